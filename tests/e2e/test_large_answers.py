"""Answers with very many log-probabilities: the values of small answers, made without holding up
anybody else.
"""

from __future__ import annotations

import random
import threading
import time
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


def test_a_large_answer_is_what_small_ones_are() -> None:
    prompts = prompts_of(8, 210)
    assert sum(map(len, prompts)) * 21 > service._LARGE
    with freight_serve("demo", OPTIONS) as url:
        server = Server(url)
        large = server.ask("/v1/completions", scoring(prompts, prompt_logprobs=20))
        small = [
            server.ask("/v1/completions", scoring(prompt, prompt_logprobs=20))
            for prompt in prompts[:2]
        ]
        echoed = server.ask(
            "/v1/completions", scoring(prompts, logprobs=20, echo=True, stream=True)
        )
        alone = server.ask("/v1/completions", scoring(prompts[3], logprobs=20, echo=True))
    assert large.status == 200
    assert len(large.raw) == int(large.headers["content-length"])
    for choice, one in zip(large.body["choices"], small, strict=False):
        [other] = one.body["choices"]
        assert {**choice, "index": 0} == other
        assert [len(entry or ()) >= 20 for entry in choice["prompt_logprobs"]] == [False] + [
            True
        ] * 209
    told = [
        event["choices"][0] for event in echoed.events[:-1] if event["choices"][0]["index"] == 3
    ]
    [whole] = alone.body["choices"]
    for name, values in whole["logprobs"].items():
        assert [value for part in told for value in part["logprobs"][name]] == values


@pytest.mark.slow
def test_the_server_answers_beside_large_answers() -> None:
    """Four answers of some 90 MB each. A probe waits for milliseconds, and never for an answer to
    be written.
    """
    length, longest = 1000, 0.0
    answers: list[Answered] = []

    def ask(seed: int) -> None:
        body = scoring(prompts_of(64, length, seed), prompt_logprobs=20)
        opened = Server(url).open("/v1/completions", body)
        opened.connection.sock.settimeout(1800)
        answers.append(opened.whole())
        opened.leave()

    with freight_serve("demo", ["--max-queue", "1024"]) as url:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            asked = time.monotonic()
            assert health(url) == 200
            longest = max(longest, time.monotonic() - asked)
            time.sleep(0.05)
        seconds = time.monotonic() - began
        for thread in threads:
            thread.join()
    assert [answer.status for answer in answers] == [200] * 4
    assert all(len(answer.raw) > 64 * length * 21 * 50 for answer in answers)
    assert longest < max(2.0, seconds / 20), f"a probe waited {longest:.2f} s of {seconds:.0f} s"


@pytest.mark.clock
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "The quick brown fox. " * 40_000}),
        ("/tokenize", {"inputs": "The quick brown fox. " * 10_000}),
        ("/detokenize", {"tokens": [7] * 1_000_000}),
        (
            "/v1/completions",
            {"prompt": "a b " * 200_000, "truncate_prompt_tokens": 8, "max_tokens": 1},
        ),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [7] * 1_000_000}),
    ],
)
def test_a_large_body_holds_up_nobody(path: str, body: dict[str, Any]) -> None:
    """/health is answered, again and again, while it is processed."""
    with freight_serve("demo", OPTIONS) as url:
        server = Server(url)
        server.ask("/tokenize", {"prompt": "a" * (1 << 17)})  # starts the process for long texts
        answers: list[Answered] = []
        thread = threading.Thread(target=lambda: answers.append(server.ask(path, body)))
        begun = time.monotonic()
        thread.start()
        longest = 0.0
        while thread.is_alive():
            asked = time.monotonic()
            assert health(url) == 200
            longest = max(longest, time.monotonic() - asked)
            time.sleep(0.01)
        seconds = time.monotonic() - begun
    print(f"{path}: /health {longest:.3f} s at most, in {seconds:.3f} s")
    assert answers[0].status in (200, 400)
    assert longest < max(0.4, 0.3 * seconds)
