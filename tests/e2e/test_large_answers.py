"""Answers with very many log-probabilities: the values of small answers, made without holding up
anybody else.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.asking import Answered, Server
from tests.serving import freight_serve, health

from freight.serve import service

OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "16MiB"]


def prompts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 4096) for _ in range(length)] for _ in range(count)]


def scoring(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with freight_serve("demo", OPTIONS) as url:
        yield Server(url)


def test_a_large_answer_is_what_small_ones_are(server: Server) -> None:
    prompts = prompts_of(8, 210)
    assert sum(map(len, prompts)) * 21 > service._LARGE

    def ask(prompt: Any, **more: Any) -> Answered:
        return server.ask("/v1/completions", scoring(prompt, **more))

    large = ask(prompts, prompt_logprobs=20)
    assert large.status == 200
    assert len(large.raw) == int(large.headers["content-length"])
    for choice, prompt in zip(large.body["choices"], prompts[:2], strict=False):
        [small] = ask(prompt, prompt_logprobs=20).body["choices"]
        assert {**choice, "index": 0} == small
        known = [len(entry or ()) >= 20 for entry in choice["prompt_logprobs"]]
        assert known == [False] + [True] * 209
    echoed = ask(prompts, logprobs=20, echo=True, stream=True)
    choices = [event["choices"][0] for event in echoed.events[:-1]]
    parts = [choice["logprobs"] for choice in choices if choice["index"] == 3]
    [whole] = ask(prompts[3], logprobs=20, echo=True).body["choices"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values


def longest_wait(url: str, threads: list[threading.Thread], pause: float) -> tuple[float, float]:
    """Ask /health again and again while `threads` run, which are started: how long one answer took
    at most, and all of it, in seconds.
    """
    longest, began = 0.0, time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        asked = time.monotonic()
        assert health(url) == 200
        longest = max(longest, time.monotonic() - asked)
        time.sleep(pause)
    return longest, time.monotonic() - began


@pytest.mark.slow
def test_the_server_answers_beside_large_answers() -> None:
    """Four answers of some 90 MB each. A probe waits for milliseconds, and never for an answer to
    be written.
    """
    length = 1000
    answers: list[Answered] = []

    def ask(seed: int) -> None:
        body = scoring(prompts_of(64, length, seed), prompt_logprobs=20)
        opened = Server(url).open("/v1/completions", body)
        opened.connection.sock.settimeout(1800)
        answers.append(opened.whole())
        opened.leave()

    with freight_serve("demo", ["--max-queue", "1024"]) as url:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        longest, seconds = longest_wait(url, threads, 0.05)
    assert [answer.status for answer in answers] == [200] * 4
    assert all(len(answer.raw) > 64 * length * 21 * 50 for answer in answers)
    assert longest < max(2.0, seconds / 20), f"a probe waited {longest:.2f} s of {seconds:.0f} s"


LARGE: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "The quick brown fox. " * 40_000}),
    ("/tokenize", {"inputs": "The quick brown fox. " * 10_000}),
    ("/detokenize", {"tokens": [7] * 1_000_000}),
    ("/v1/completions", {"prompt": "a b " * 200_000, "truncate_prompt_tokens": 8, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [7] * 1_000_000}),
]


@pytest.mark.clock
def test_a_large_body_holds_up_nobody(server: Server) -> None:
    """/health is answered, again and again, while it is processed."""
    server.ask("/tokenize", {"prompt": "a" * (1 << 17)})  # starts the process for long texts
    for path, body in LARGE:
        answers: list[Answered] = []
        thread = threading.Thread(
            target=lambda path, body, answers: answers.append(server.ask(path, body)),
            args=(path, body, answers),
        )
        longest, seconds = longest_wait(server.url, [thread], 0.01)
        print(f"{path}: /health {longest:.3f} s at most, in {seconds:.3f} s")
        assert answers[0].status in (200, 400)
        assert longest < max(0.4, 0.3 * seconds), path
