"""`freight verify`: answers of a server, with their requests, proved or refuted by another process."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.asking import Server
from tests.e2e.conftest import KEY, DemoServer
from tests.e2e.test_drafts import SOURCES
from typer.testing import CliRunner

from freight.cli.main import app
from freight.config.engine import EngineArgs
from freight.engine.verification import Outcome
from freight.errors import ConfigError
from freight.server.verify import Verifier, verifier_of

COUNT = 200
RETURNED = {"return_token_ids": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def random_request(rng: Random) -> tuple[str, dict[str, Any]]:
    """The path and the body of a completion or a chat, of any kind that draws its tokens again."""
    body: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.7, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "seed": rng.randrange(1 << 20),
        "n": rng.choice([1, 1, 1, 2]),
        "max_tokens": rng.randint(1, 32),
        **RETURNED,
    }
    optional: dict[str, Any] = {
        "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.4,
        "logit_bias": {"5": 3.0, "17": -2.0}, "stop": ["\n\n", "self"], "ignore_eos": True, "min_tokens": 1,
        "bad_words": ["in range"], "return_tokens_as_token_ids": True, "skip_special_tokens": False,
        "allowed_token_ids": list(range(260)), "include_stop_str_in_output": True, "stop_token_ids": [40, 41, 42],
        "prompt_logprobs": 1, "truncate_prompt_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }  # fmt: skip
    for name, value in optional.items():
        if rng.random() < 0.12:
            body[name] = value
    if "response_format" in body:
        body["max_tokens"] = 64
        body.pop("allowed_token_ids", None)
    source = rng.choice(SOURCES)
    text = source[: rng.randint(1, len(source))]
    if rng.random() < 0.5:
        prompts = rng.choice([text, [text, "import "], [5, 6, 7, 40]])
        body |= {"prompt": prompts, "logprobs": rng.choice([None, 0, 3])}
        if rng.random() < 0.2:
            body["echo"] = True
        return "/v1/completions", body
    body |= {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.7:
        body |= {"logprobs": True, "top_logprobs": rng.choice([0, 2])}
    if rng.random() < 0.1:
        body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80}
        body.pop("response_format", None)
        body.pop("allowed_token_ids", None)
    return "/v1/chat/completions", body


def ask(server: DemoServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answered = Server(server.url, {"Authorization": f"Bearer {KEY}"}).ask(path, body)
    assert answered.status == 200, (body, answered.body)
    return {"request": body, "response": answered.body}


@pytest.fixture(scope="module")
def answers(demo_server: DemoServer) -> list[dict[str, Any]]:
    """Of requests that run beside each other."""
    rng = Random(7)
    requests = [random_request(rng) for _ in range(COUNT)]
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda one: ask(demo_server, *one), requests))


@pytest.fixture(scope="module")
def verifier(served_folder: Path) -> Verifier:
    """Of another size of cache and of steps, which change no bit."""
    args = EngineArgs(
        str(served_folder),
        kv_cache_dtype="fp8",
        kv_cache_memory="48MiB",
        max_num_batched_tokens=512,
    )
    return verifier_of(args)


def test_answers_are_proved(verifier: Verifier, answers: list[dict[str, Any]]) -> None:
    results = list(verifier.results(answers))
    assert [
        (one["request"], result.reason)
        for one, result in zip(answers, results, strict=True)
        if result.outcome is not Outcome.EQUAL
    ] == []
    assert [result.num_tokens for result in results] == [
        one["response"]["usage"]["completion_tokens"] for one in answers
    ]


def alter_token(rng: Random, answer: dict[str, Any]) -> None:
    ids = rng.choice(answer["response"]["choices"])["token_ids"]
    at = rng.randrange(len(ids))
    ids[at] = (ids[at] + rng.randint(1, 200)) % 1000


def alter_log_probability(rng: Random, answer: dict[str, Any]) -> None:
    """By one unit in the last place of float64."""
    logprobs = rng.choice(answer["response"]["choices"])["logprobs"]
    if "content" in logprobs:
        entry: Any = rng.choice(logprobs["content"])
        entry["logprob"] = math.nextafter(entry["logprob"], 1.0)
        return
    values = logprobs["token_logprobs"]
    at = rng.choice([index for index, value in enumerate(values) if value is not None])
    values[at] = math.nextafter(values[at], 1.0)


def alter_prompt(rng: Random, answer: dict[str, Any]) -> None:
    request = answer["request"]
    if "messages" in request:
        request["messages"][0]["content"] += "x"
    elif isinstance(request["prompt"], str):
        request["prompt"] = "x" + request["prompt"]
    else:
        request["prompt"] = [*request["prompt"][:-1], rng.choice(["y", "z"])]
        if request["prompt"] and isinstance(request["prompt"][0], int):
            request["prompt"] = [9, *request["prompt"][1:-1]]


def alter_prompt_and_its_ids(rng: Random, answer: dict[str, Any]) -> None:
    """So that request and response agree with each other."""
    body, request = answer["response"], answer["request"]
    ids = body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"]
    other = [*ids]
    other[rng.randrange(len(ids))] = rng.randrange(300, 600)
    request.pop("truncate_prompt_tokens", None)
    request["prompt"] = other
    for choice in body["choices"]:
        choice["prompt_token_ids"] = other


ALTERATIONS: dict[str, tuple[Callable[[Random, Any], None], Callable[[Any], bool]]] = {
    "token": (alter_token, lambda one: True),
    "log-probability": (
        alter_log_probability,
        lambda one: one["response"]["choices"][0]["logprobs"] is not None,
    ),
    "prompt": (alter_prompt, lambda one: "truncate_prompt_tokens" not in one["request"]),
    "prompt and its ids": (
        alter_prompt_and_its_ids,
        lambda one: (
            one["request"].get("logprobs") is not None
            and isinstance(one["request"].get("prompt"), str)
            and "echo" not in one["request"]
            and "prompt_logprobs" not in one["request"]
        ),
    ),
    "usage": (
        lambda _, one: one["response"]["usage"].update(completion_tokens=1000),
        lambda one: True,
    ),
    "end": (
        lambda _, one: one["response"]["choices"][0].update(finish_reason="content_filter"),
        lambda one: True,
    ),
    "a choice less": (
        lambda _, one: one["response"]["choices"].pop(),
        lambda one: one["request"]["n"] > 1,
    ),
    "a field more": (
        lambda _, one: one["response"]["choices"][0]["message"].update(tool_calls=[{"id": "x"}]),
        lambda one: "messages" in one["request"],
    ),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_what_is_altered_is_found(
    verifier: Verifier, answers: list[dict[str, Any]], name: str
) -> None:
    alter, applies = ALTERATIONS[name]
    rng = Random(name)
    changed = [copy.deepcopy(one) for one in answers if applies(one)][:40]
    for one in changed:
        alter(rng, one)
    assert len(changed) >= 10
    assert {result.outcome for result in verifier.results(changed)} == {Outcome.DIFFERS}


def test_a_seed_that_draws_another_token_is_found(
    verifier: Verifier, demo_server: DemoServer
) -> None:
    body = {"prompt": SOURCES[0], "temperature": 1.0, "max_tokens": 4, **RETURNED}
    made = [ask(demo_server, "/v1/completions", {**body, "seed": seed}) for seed in range(20)]
    texts = [one["response"]["choices"][0]["token_ids"] for one in made]
    shifted = [
        {**one, "request": {**one["request"], "seed": (seed + 1) % 20}}
        for seed, one in enumerate(made)
    ]
    same = [texts[seed] == texts[(seed + 1) % 20] for seed in range(20)]
    results = list(verifier.results(shifted))
    assert [result.outcome is Outcome.EQUAL for result in results] == same
    assert same.count(False) > 10


def test_what_cannot_be_said(verifier: Verifier, demo_server: DemoServer) -> None:
    body: dict[str, Any] = {
        "prompt": SOURCES[0],
        "temperature": 1.0,
        "max_tokens": 4,
        "seed": 3,
        **RETURNED,
    }
    good = ask(demo_server, "/v1/completions", body)
    cases: list[tuple[Any, str]] = [
        (5, "not an object with `request` and `response`"),
        ({"request": body}, "`response` is None"),
        ({**good, "response": {**good["response"], "object": "response"}}, "`object` is 'response'"),
        ({**good, "response": {**good["response"], "system_fingerprint": None}}, "no `system_fingerprint`"),
        ({**good, "response": {**good["response"], "system_fingerprint": "fp_0"}}, "system_fingerprint is fp_0"),
        ({**good, "response": {**good["response"], "choices": []}}, "no `choices`"),
        ({**good, "response": {**good["response"], "choices": [{"text": "a"}]}}, "no `token_ids`"),
        ({**good, "request": {**body, "seed": None}}, "without a seed"),
        ({**good, "request": {**body, "top_p": 7}}, "cannot be served here: top_p"),
    ]  # fmt: skip
    results = list(verifier.results([case for case, _ in cases]))
    for result, (_, reason) in zip(results, cases, strict=True):
        assert (result.outcome, reason in result.reason) == (Outcome.UNKNOWN, True), result.reason


def run(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, ["verify", *arguments], input=text)


def test_the_command(tmp_path: Path, served_folder: Path, answers: list[dict[str, Any]]) -> None:
    options = [str(served_folder), "--kv-cache-dtype", "fp8", "--kv-cache-memory", "48MiB"]
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answers[0], indent=1))
    found = run(str(file), *options)
    assert (found.exit_code, found.stdout[:10]) == (0, "equal: all"), found.output
    bad = copy.deepcopy(answers[1])
    alter_token(Random(1), bad)
    lines = "\n".join(json.dumps(one) for one in (answers[0], bad, {}))
    found = run("-", *options, "--json", text=lines + "\n")
    results = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.exit_code == 1
    assert [one["outcome"] for one in results] == ["equal", "differs", "unknown"]
    assert results[1]["stated_token"] != results[1].get("drawn_token")
    assert "3 answers: 1 equal, 1 differ, 1 of which it cannot be said" in found.stderr


def test_what_no_model_is_needed_for(tmp_path: Path) -> None:
    """A model that does not exist is not looked for."""
    file = tmp_path / "answer.json"
    for text, says in (
        ("{}", "it cannot be said: `request` is None"),
        ("", "is empty"),
        ("{", "line 1, is not JSON"),
    ):
        file.write_text(text)
        found = run(str(file), "/nowhere")
        assert found.exit_code == 2 or isinstance(found.exception, ConfigError)
        assert says in found.output + str(found.exception)
