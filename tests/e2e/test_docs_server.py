"""docs/server.md against a server: each curl line runs, answers have the shape shown, numbers are
the code's.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.refusals import assert_names
from tests.serving import freight_serve

from freight import structured
from freight.base import json_schema
from freight.serve import service, tokens
from freight.serve.limits import ServingLimits
from freight.serve.rendering import renderer
from freight.serve.settings import ServerSettings
from freight.serve.transport import stream
from freight.serve.transport.http_limits import HttpLimits

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def examples() -> Iterator[tuple[str, str]]:
    """Each curl line and the answer that stands right behind it, or ""."""
    blocks = list(BLOCK.finditer(TEXT))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[2].startswith("curl "):
            shown = (
                following is not None
                and following.start() == block.end()
                and following[1] in ("json", "text")
            )
            yield block[2], following[2] if following is not None and shown else ""


def curl(line: str, url: str) -> tuple[int, str]:
    """Status and body of what the curl line sends, to another server."""
    words = iter(shlex.split(line.replace("\\\n", " "))[1:])
    address, headers, body = "", {}, None
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words)
        elif word != "-N":
            assert word.startswith("http://127.0.0.1:8000/"), f"this test does not know {word}"
            address = word
    to, path = urlsplit(url), urlsplit(address).path
    with closing(http.client.HTTPConnection(to.hostname or "", to.port, timeout=300)) as connection:
        connection.request("POST" if body is not None else "GET", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def values(text: str) -> list[object]:
    """The JSON of a body, or of each event."""
    if not text.startswith("data:"):
        return [json.loads(text)]
    events = [event.removeprefix("data:").strip() for event in text.split("\n\n") if event.strip()]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def shape(value: object) -> object:
    """Names, and kinds of values."""
    if isinstance(value, dict):
        return {name: shape(inside) for name, inside in value.items()}
    return [shape(inside) for inside in value] if isinstance(value, list) else type(value)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("template")
    template, start = next(
        block[2] for block in BLOCK.finditer(TEXT) if "freight serve demo" in block[2]
    ).splitlines()
    subprocess.run(["sh", "-c", template], cwd=folder, check=True)
    *options, name = start.removeprefix("freight serve demo ").split()
    with freight_serve(
        "demo", [*options, str(folder / name), "--kv-cache-memory", "64MiB"]
    ) as address:
        yield address


@pytest.fixture(scope="module")
def pooling_url() -> Iterator[str]:
    with freight_serve("demo", ["--pooling", "mean", "--kv-cache-memory", "64MiB"]) as address:
        yield address


def test_every_curl_line_is_answered_as_it_says(url: str, pooling_url: str) -> None:
    found = list(examples())
    assert len(found) == TEXT.count("\ncurl ") >= 8
    pooling = TEXT.split("\n## Embeddings and scores\n")[1].split("\n## ")[0]
    for line, shown in found:
        status, body = curl(line, pooling_url if line in pooling else url)
        assert status == 200, (line, body)
        answered = values(body)
        if shown:
            assert shape(answered) == shape(values(shown)), line


def rows(heading: str) -> dict[str, str]:
    """The first table of a section, its first column to its second."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip(): row[1].strip() for row in cells[2:]}


def kib(size: int) -> str:
    assert size % 1024 == 0
    return f"{size >> 20} MiB" if size % (1 << 20) == 0 else f"{size >> 10} KiB"


def test_the_table_of_limits_is_the_code_s() -> None:
    http_limits, serving, server = HttpLimits(), ServingLimits(), ServerSettings()
    sampling = serving.sampling
    assert sampling.logprobs == sampling.prompt_logprobs
    assert server.max_connections == http_limits.max_connections
    assert server.write_timeout == http_limits.write_seconds
    assert rows("Limits") == {
        "connections (`--max-connections`)": str(server.max_connections),
        "completions that wait (`--max-queue`), beside those that run (`--max-num-seqs`)": str(
            server.max_queue
        ),
        "request line and headers": kib(http_limits.head_bytes),
        "headers": str(http_limits.max_headers),
        "seconds for the headers": f"{http_limits.head_seconds:g}",
        "body": kib(http_limits.body_bytes),
        "bodies that are read at a time, without the first 64 KiB of each": f"{http_limits.held_bytes >> 20} MiB",
        "seconds without a byte of the body": f"{http_limits.body_seconds:g}",
        "seconds for the body": f"{http_limits.body_total:g}",
        "seconds between requests of a connection": f"{http_limits.idle_seconds:g}",
        "seconds in which a client reads nothing of its answer (`--write-timeout`)": f"{server.write_timeout:g}",
        "JSON objects and arrays inside each other": str(
            min(http_limits.json_depth, serving.nesting)
        ),
        "JSON objects and arrays": str(http_limits.json_containers),
        "names of a JSON object": str(http_limits.json_names),
        "digits of a number": str(http_limits.number_digits),
        "prompts of a completion": str(serving.prompts),
        "inputs of a request for embeddings or classes; documents of a ranking": str(
            serving.inputs
        ),
        "log-probabilities of the prompts of a request: their tokens times (`prompt_logprobs` + 1)": str(
            serving.scores
        ),
        "messages": str(serving.messages),
        "tools": str(serving.tools),
        "`n`": str(sampling.n),
        "`temperature`": f"{sampling.temperature:g}",
        "`logprobs`, `top_logprobs`, `prompt_logprobs`": str(sampling.logprobs),
        "stop strings": str(sampling.stop),
        "characters of a stop string, of a bad word": str(sampling.stop_length),
        "`stop_token_ids`": str(sampling.stop_token_ids),
        "`allowed_token_ids`": str(sampling.allowed_token_ids),
        "`bad_words`": str(sampling.bad_words),
        "`logit_bias` entries": str(sampling.logit_bias),
        "characters of `cache_salt`": str(sampling.cache_salt),
        "characters of `request_id`": str(serving.request_id),
        "tokens of `/detokenize`": str(tokens.MOST_TOKENS),
        "JSON schema": kib(json_schema.MOST_SCHEMA),
        "objects and arrays of a schema inside each other": str(json_schema.MOST_NESTING),
        "`$ref` in a chain": str(json_schema.MOST_REFERENCES),
        "regular expression": kib(structured.MOST_REGEX),
        "grammar": kib(structured.MOST_GRAMMAR),
        "rules of a grammar": str(structured.MOST_RULES),
        "choices": str(structured.MOST_CHOICES),
        "choices together": kib(structured.MOST_CHOICE_BYTES),
        "seconds of `--request-timeout`": str(server.request_timeout).lower(),
        "seconds of `--drain-timeout`": f"{server.drain_timeout:g}",
        "seconds of `--stall-timeout`": f"{server.stall_timeout:g}",
    }
    defaults = renderer.Renderer.__init__.__kwdefaults__
    assert_names(
        TEXT,
        f"{defaults['deadline_s']:g} seconds and {defaults['memory'] >> 30} GiB of memory",
        f"{defaults['max_waiting']} requests wait",
    )
    assert f"or after {stream._HEADERS_AFTER:g} seconds without one" in TEXT
    assert f"After {service.KEEP_ALIVE:g} seconds without a token" in TEXT
