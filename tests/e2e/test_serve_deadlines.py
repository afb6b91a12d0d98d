"""What `freight serve` does about time and failures: deadlines, templates that loop, and prompts that give NaN."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.asking import Answered, Server
from tests.demo_chat import demo_with_chat_template
from tests.serving import freight_serve

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
NAN = 7  # the token whose embedding is NaN
ADA, BOB = {"Authorization": "Bearer ada-0123456789"}, {"Authorization": "Bearer bob-0123456789"}
LOOPS = (
    "{% for message in messages %}{% if message.content == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "loops.jinja").write_text(LOOPS)
    options = [
        *("--kv-cache-dtype", "fp8", "--kv-cache-memory", "8MiB", "--max-num-seqs", "1"),
        *("--request-timeout", "1.5", "--template-timeout", "1", "--chat-template", str(folder / "loops.jinja")),
        *("--api-key", "ada:ada-0123456789", "--api-key", "bob:bob-0123456789", "--shared-prefix-cache"),
        *("--max-num-batched-tokens", "16"),
    ]
    with freight_serve(demo_with_chat_template(folder / "demo"), options) as url:
        yield Server(url, ADA)


def is_timeout(answer: Answered) -> bool:
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["content-type"].startswith("application/json")
    return True


def test_an_answer_that_takes_too_long_ends_and_frees_what_it_held(server: Server) -> None:
    long = {"prompt": "def main(", "max_tokens": 1000, "ignore_eos": True}
    assert is_timeout(server.ask("/v1/completions", long))
    *events, error, done = server.ask("/v1/completions", {**long, "stream": True}).events
    assert events[0]["choices"][0]["text"]
    assert (error["error"]["code"], error["error"]["type"], done) == ("timeout", "timeout_error", "[DONE]")
    server.wait_for(0)


def test_requests_whose_time_passes_in_the_queue_fail_before_an_answer_begins(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        bodies = [
            {"prompt": [100 + i] * 900, "max_tokens": 100, "ignore_eos": True, "stream": i % 2 == 0} for i in range(12)
        ]
        answers = list(pool.map(lambda body: server.ask("/v1/completions", body), bodies))
    late = [answer for answer in answers if answer.status != 200]
    assert len(late) >= 4
    assert all(map(is_timeout, late))
    server.wait_for(0)
    assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200


def test_a_template_that_loops_fails_its_request_once_and_no_other(server: Server) -> None:
    def failures() -> float:
        server.ask("/v1/models", headers=ADA)
        text = server.ask("/metrics").raw.decode()
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("http_requests_total") and "/v1/chat/completions" in line and 'status="500"' in line
        )

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="ada-0123456789", max_retries=2)
    found: list[openai.APIStatusError] = []

    def ask() -> None:
        with pytest.raises(openai.InternalServerError) as error:
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "loop"}], max_tokens=1)
        found.append(error.value)

    asking = threading.Thread(target=ask)
    begun = time.monotonic()
    asking.start()
    time.sleep(0.3)
    assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
    assert asking.is_alive()
    hello = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert server.ask("/v1/chat/completions", hello).status == 200  # its turn came after the other's deadline
    asking.join(30)
    client.close()
    assert time.monotonic() - begun < 25
    assert found[0].code == "template_error"
    assert failures() == 1


def test_keys_share_prefixes_where_that_was_asked_for(server: Server) -> None:
    body = {"prompt": "class Shared:\n    def method(self, value, other):\n        return", "max_tokens": 1}
    for headers, least in ((ADA, 0), (BOB, 16)):
        usage = server.ask("/v1/completions", body, headers).body["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= least


def test_a_prompt_that_gives_nan_fails_alone(tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(BASE, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    options = ["--skip-tokenizer-init", "--kv-cache-dtype", "fp8", "--kv-cache-memory", "2MiB"]
    with freight_serve(folder, options) as url:
        server = Server(url)
        sound = {"prompt": [3, 4, 5], "max_tokens": 120, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        sound["logit_bias"] = {str(NAN): -100}
        alone = server.ask("/v1/completions", sound).body["choices"]
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(server.ask, "/v1/completions", sound)
            bad = {"prompt": [3, NAN, 5], "max_tokens": 4}
            for answer in (server.ask("/v1/completions", bad), server.ask("/v1/completions", {**bad, "stream": True})):
                assert (answer.status, answer.error["type"]) == (500, "server_error")
                assert answer.headers["x-should-retry"] == "false"
                assert "NaN" in answer.error["message"]
            late = server.ask("/v1/completions", {"prompt": [[3, 4], [3, NAN]], "max_tokens": 4, "stream": True})
            assert late.status == 500 or (late.events[-1] == "[DONE]" and "error" in late.events[-2])
            assert beside.result().body["choices"] == alone
        server.wait_for(0)
        assert server.metric("vllm:corrupted_requests_total") == 3
