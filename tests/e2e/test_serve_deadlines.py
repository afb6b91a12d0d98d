"""What `freight serve` does about time and failures: deadlines, templates that loop, and prompts
that give NaN.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.asking import ENDLESS, Answered, Server
from tests.demo_chat import demo_with_chat_template
from tests.serving import freight_serve
from tests.unit.server.raw_http import in_time, wait_for

pytestmark = pytest.mark.clock

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
NAN = 7  # the token whose embedding is NaN
ADA, BOB = ({"Authorization": f"Bearer {name}-0123456789"} for name in ("ada", "bob"))
KEYS = ["--api-key", "ada:ada-0123456789", "--api-key", "bob:bob-0123456789"]
CACHE = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "8MiB"]
ONE_BY_ONE = [*CACHE, "--max-num-seqs", "1"]
LOOPS = (
    "{% for message in messages %}{% if message.content == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "loops.jinja").write_text(LOOPS)
    options = [*ONE_BY_ONE, *KEYS, "--shared-prefix-cache", "--template-timeout", "1"]
    options += ["--chat-template", str(folder / "loops.jinja")]
    with freight_serve(demo_with_chat_template(folder / "demo"), options) as url:
        yield Server(url, ADA)


@pytest.fixture(scope="module")
def hurried() -> Iterator[Server]:
    """A server whose answers have 1.5 s: less than a machine that stands still may take for any of
    them.
    """
    options = [*ONE_BY_ONE, "--request-timeout", "1.5", "--max-num-batched-tokens", "16"]
    with freight_serve("demo", options) as url:
        yield Server(url)


def is_timeout(answer: Answered) -> bool:
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["content-type"].startswith("application/json")
    return True


def test_an_answer_that_takes_too_long_ends_and_frees_what_it_held(hurried: Server) -> None:
    assert is_timeout(hurried.ask("/v1/completions", ENDLESS))

    def a_stream_ends_with_an_error() -> bool:
        answer = hurried.ask("/v1/completions", {**ENDLESS, "stream": True})
        if answer.status != 200:
            return not is_timeout(answer)
        *events, error, done = answer.events
        assert (error["error"]["code"], error["error"]["type"], done) == (
            "timeout",
            "timeout_error",
            "[DONE]",
        )
        return bool(events[0]["choices"][0]["text"])

    assert in_time(a_stream_ends_with_an_error)
    hurried.wait_for(0)


def test_requests_whose_time_passes_in_the_queue_fail_before_an_answer_begins(
    hurried: Server,
) -> None:
    with ThreadPoolExecutor(12) as pool:
        common = {"max_tokens": 1000, "ignore_eos": True, "n": 16}
        bodies = [{**common, "prompt": [100 + i] * 20, "stream": i % 2 == 0} for i in range(12)]
        answers = list(pool.map(lambda body: hurried.ask("/v1/completions", body), bodies))
    late = [answer for answer in answers if answer.status != 200]
    assert len(late) >= 4
    assert all(map(is_timeout, late))
    hurried.wait_for(0)
    assert in_time(
        lambda: hurried.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
    )


def test_a_template_that_loops_fails_its_request_once_and_no_other(server: Server) -> None:
    def failures() -> float:
        server.ask("/v1/models", headers=ADA)
        of = {"handler": "/v1/chat/completions", "status": "500"}
        with contextlib.suppress(AssertionError):  # there is no such metric yet
            return server.metric("http_requests_total", **of)
        return 0

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="ada-0123456789", max_retries=2)
    hello = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}

    def ask() -> openai.APIStatusError:
        with pytest.raises(openai.InternalServerError) as error:
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "loop"}], max_tokens=1
            )
        return error.value

    def others_are_served() -> bool:
        before = failures()
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
            beside = not asking.done()
            # otherwise its turn came after the other's deadline
            after = server.ask("/v1/chat/completions", hello).status == 200
            assert asking.result().code == "template_error"
        assert failures() == before + 1 + (not after)
        return beside and after

    assert in_time(others_are_served)
    client.close()


def test_keys_share_prefixes_where_that_was_asked_for(server: Server) -> None:
    text = "class Shared:\n    def method(self, value, other):\n        return"
    for headers, least in ((ADA, 0), (BOB, 16)):
        answer = server.ask("/v1/completions", {"prompt": text, "max_tokens": 1}, headers)
        assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= least


def test_a_prompt_that_gives_nan_fails_alone(tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(BASE, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with freight_serve(folder, ["--skip-tokenizer-init", *CACHE]) as url:
        server = Server(url)
        sound = {"prompt": [3, 4, 5], "max_tokens": 120, "temperature": 0, "ignore_eos": True}
        sound |= {"return_token_ids": True, "logit_bias": {str(NAN): -100}}
        alone = server.ask("/v1/completions", sound).body["choices"]
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(server.ask, "/v1/completions", sound)
            bad = {"prompt": [3, NAN, 5], "max_tokens": 4}
            for stream in (False, True):
                answer = server.ask("/v1/completions", {**bad, "stream": stream})
                assert (answer.status, answer.error["type"]) == (500, "server_error")
                assert answer.headers["x-should-retry"] == "false"
                assert "NaN" in answer.error["message"]
            body = {"prompt": [[3, 4], [3, NAN]], "max_tokens": 4, "stream": True}
            late = server.ask("/v1/completions", body)
            if late.status != 500:
                assert late.events[-1] == "[DONE]"
                assert "error" in late.events[-2]
            assert beside.result().body["choices"] == alone
        # the engine's statistics come behind its last answer
        wait_for(lambda: server.metric("vllm:corrupted_requests_total") >= 3)
        server.wait_for(0)
        assert server.metric("vllm:corrupted_requests_total") == 3
