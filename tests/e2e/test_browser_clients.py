"""OpenAI's and Anthropic's clients for JavaScript in Chromium, on a page of another origin that
`--allow-origin` names.

The clients are those of npm, in the checkout: `npm install --no-save openai @anthropic-ai/sdk
esbuild`. Browsers ask before they send the headers that these add, which no other client shows.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import KEY, OPTIONS
from tests.serving import freight_serve
from tests.unit.server.page.browser import Browser, browser, in_browser

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "node_modules"
NEEDED = ("openai", "@anthropic-ai/sdk", "esbuild")
ESBUILD = MODULES / ".bin" / "esbuild"
CLIENTS = "export {default as OpenAI} from 'openai';\nexport {default as Anthropic} from '@anthropic-ai/sdk';\n"
OPENAI = """
const [baseURL, apiKey] = arguments;
const {OpenAI} = await import('/clients.mjs');
const client = new OpenAI({baseURL: baseURL + '/v1', apiKey, dangerouslyAllowBrowser: true, maxRetries: 1});
const asked = {model: 'dummy', messages: [{role: 'user', content: 'def main('}], temperature: 0, max_tokens: 8};
const {data, response} = await client.chat.completions.create({...asked, user: 'me'}).withResponse();
let streamed = '';
for await (const chunk of await client.chat.completions.create({...asked, stream: true}))
  streamed += chunk.choices[0]?.delta?.content ?? '';
const refusal = await client.chat.completions.create({...asked, temperature: -1}).catch((error) => error);
const wrong = new OpenAI({baseURL: baseURL + '/v1', apiKey: 'wrong', dangerouslyAllowBrowser: true, maxRetries: 0});
const locked = await wrong.models.list().catch((error) => error);
return {
  text: data.choices[0].message.content, streamed, ignored: response.headers.get('x-freight-ignored'),
  requestId: data._request_id, refused: [refusal.status, refusal.param], locked: [locked.status, locked.code],
};
"""
ANTHROPIC = """
const [baseURL, apiKey] = arguments;
const {Anthropic} = await import('/clients.mjs');
const client = new Anthropic({baseURL, apiKey, dangerouslyAllowBrowser: true, maxRetries: 1});
const asked = {model: 'dummy', messages: [{role: 'user', content: 'def main('}], temperature: 0, max_tokens: 8};
const whole = await client.messages.create(asked);
const streamed = await client.messages.stream(asked).finalMessage();
return {text: whole.content[0].text, streamed: streamed.content[0].text, requestId: whole._request_id};
"""

pytestmark = [
    pytest.mark.slow,
    in_browser,
    pytest.mark.skipif(
        not all((MODULES / name).is_dir() for name in NEEDED),
        reason=f"needs npm's packages in the checkout: npm install --no-save {' '.join(NEEDED)}",
    ),
]


class Pages(SimpleHTTPRequestHandler):
    """A folder with `clients.mjs`, and an empty page."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def pages(folder: Path) -> Iterator[str]:
    """The address of a server of the page, with the clients as a web application's build makes
    them.
    """
    command = [
        str(ESBUILD),
        "--bundle",
        "--platform=browser",
        "--format=esm",
        f"--outfile={folder / 'clients.mjs'}",
    ]
    subprocess.run(
        command, input=CLIENTS, text=True, check=True, capture_output=True, timeout=300, cwd=ROOT
    )
    (folder / "index.html").write_text("<!doctype html><title>clients</title>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def asking(
    served_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Browser, str]]:
    """A browser at the page, and the address of a server that allows it."""
    with (
        pages(tmp_path_factory.mktemp("page")) as origin,
        freight_serve(served_folder, [*OPTIONS, "--api-key", KEY, "--allow-origin", origin]) as url,
        browser() as window,
    ):
        window.open(origin)
        yield window, url


def run(asking: tuple[Browser, str], script: str) -> dict[str, Any]:
    window, url = asking
    found: dict[str, Any] = window.run(
        f"return (async function () {{{script}}}).apply(null, arguments)", url, KEY
    )
    return found


def test_openais_client_reads_answers_streams_errors_and_headers(
    asking: tuple[Browser, str],
) -> None:
    found = run(asking, OPENAI)
    assert found["text"]
    assert found["streamed"] == found["text"]
    assert found["ignored"] == "user"
    assert found["requestId"]
    assert found["refused"] == [400, "temperature"]
    assert found["locked"] == [401, "invalid_api_key"]


def test_anthropics_client_reads_answers_and_streams(asking: tuple[Browser, str]) -> None:
    found = run(asking, ANTHROPIC)
    assert found["text"]
    assert found["streamed"] == found["text"]
