"""`freight verify`: answers of a server, with their requests, proved or refuted by another process."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.asking import Server
from tests.e2e.conftest import KEY, DemoServer
from tests.e2e.test_drafts import SOURCES
from tests.forked_server import CAN_FORK, forked
from tests.refusals import assert_names
from tests.shares import examples
from typer.testing import CliRunner

from freight.cli.main import app
from freight.engine import redraw
from freight.engine.progress import Completion
from freight.engine.sampler import Sampled
from freight.engine.verification import Outcome
from freight.errors import ConfigError
from freight.serve.offline.verify import Verifier, verifier_of
from freight.serve.processes import children
from freight.serve.rendering.renderer import Renderer
from freight.settings.engine import EngineArgs

COUNT = max(90, examples(200))
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


@pytest.fixture(scope="module", autouse=True)
def forked_renderers() -> Iterator[None]:
    """How they start is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        if CAN_FORK:
            patch.setattr(children, "subprocess", SimpleNamespace(Popen=forked))
        yield


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
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_memory": "48MiB"}
    return verifier_of(EngineArgs(str(served_folder), max_num_batched_tokens=512, **options))


def test_answers_are_proved(verifier: Verifier, answers: list[dict[str, Any]]) -> None:
    for answer, result in zip(answers, verifier.results(answers), strict=True):
        assert result.outcome is Outcome.EQUAL, (answer["request"], result.reason)
        assert result.num_tokens == answer["response"]["usage"]["completion_tokens"]


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


def states_log_probabilities(answer: Any) -> bool:
    return choice_of(answer)["logprobs"] is not None


def states_its_prompt_once(answer: Any) -> bool:
    request = answer["request"]
    stated = request.get("logprobs") is not None and isinstance(request.get("prompt"), str)
    return stated and not {"echo", "prompt_logprobs"} & {*request}


# How an answer is altered, and which ones can be
ALTERATIONS: dict[str, tuple[Callable[[Random, Any], object], Callable[[Any], bool]]] = {
    "token": (alter_token, lambda one: True),
    "log-probability": (alter_log_probability, states_log_probabilities),
    "prompt": (alter_prompt, lambda one: "truncate_prompt_tokens" not in one["request"]),
    "prompt and its ids": (alter_prompt_and_its_ids, states_its_prompt_once),
    "usage": (lambda _, one: one["response"]["usage"].update(completion_tokens=1000), lambda one: True),
    "end": (lambda _, one: choice_of(one).update(finish_reason="content_filter"), lambda one: True),
    "a choice less": (lambda _, one: one["response"]["choices"].pop(), lambda one: one["request"]["n"] > 1),
    "a field more": (
        lambda _, one: choice_of(one)["message"].update(tool_calls=[{"id": "x"}]),
        lambda one: "messages" in one["request"],
    ),
}  # fmt: skip


def test_what_is_altered_is_found(verifier: Verifier, answers: list[dict[str, Any]]) -> None:
    changed: list[tuple[str, dict[str, Any]]] = []
    for name, (alter, applies) in ALTERATIONS.items():
        rng = Random(name)
        altered = [copy.deepcopy(one) for one in answers if applies(one)][: examples(30)]
        assert len(altered) >= 5
        for answer in altered:
            alter(rng, answer)
            changed.append((name, answer))
    results = verifier.results([answer for _, answer in changed])
    for (name, answer), result in zip(changed, results, strict=True):
        assert result.outcome is Outcome.DIFFERS, (name, answer)


def choice_of(answer: Any) -> Any:
    return answer["response"]["choices"][0]


def logprobs_of(answer: Any) -> Any:
    return choice_of(answer)["logprobs"]


# What a short answer may state in a single field, and whether that is refuted or cannot be judged
LIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "the text": (lambda one: choice_of(one).update(text="lie"), "differs"),
    "no text": (lambda one: choice_of(one).pop("text"), "differs"),
    "the index": (lambda one: choice_of(one).update(index=True), "differs"),
    "what ended it": (lambda one: choice_of(one).update(stop_reason="lie"), "differs"),
    "tokens in total": (lambda one: one["response"]["usage"].update(total_tokens=1), "differs"),
    "a count that is true": (lambda one: one["response"]["usage"].update(completion_tokens=True), "differs"),
    "reasoning": (
        lambda one: one["response"]["usage"]["completion_tokens_details"].update(reasoning_tokens=3), "differs"
    ),
    "a count more": (lambda one: one["response"]["usage"].update(audio_tokens=3), "differs"),
    "usage that is a text": (lambda one: one["response"].update(usage="none"), "differs"),
    "a field more": (lambda one: one["response"].update(output_text="lie"), "differs"),
    "an escape sequence as a field": (lambda one: choice_of(one).update({"\x1b[2J" + "x" * 999: 1}), "differs"),
    "one in the request": (lambda one: one["request"].update({"\x1b[2J": json.loads("[" * 97 + "]" * 97)}), "unknown"),
    "NaN": (lambda one: logprobs_of(one)["token_logprobs"].__setitem__(0, math.nan), "differs"),
    "a text for a number": (lambda one: logprobs_of(one)["token_logprobs"].__setitem__(0, "x" * 999), "differs"),
    "another likely token": (lambda one: logprobs_of(one)["top_logprobs"][0].update({"~": -9.0}), "differs"),
    "a huge id": (lambda one: choice_of(one).update(token_ids=[1 << 70]), "differs"),
    "a negative id": (lambda one: choice_of(one).update(token_ids=[-1]), "differs"),
    "no tokens": (lambda one: choice_of(one).update(token_ids=[]), "differs"),
    "more tokens than fit": (lambda one: choice_of(one).update(token_ids=[5] * 5000), "differs"),
    "ids of the prompt": (lambda one: choice_of(one).update(prompt_token_ids=[5]), "differs"),
    "ids that are true": (lambda one: choice_of(one).update(token_ids=[True]), "unknown"),
    "a kind that is a list": (lambda one: one["response"].update(object=[]), "unknown"),
    "choices that are texts": (lambda one: one["response"].update(choices=["x"]), "unknown"),
    "a chunk of a stream": (lambda one: choice_of(one).update(finish_reason=None), "unknown"),
    "an escape sequence": (lambda one: one["response"].update(system_fingerprint="\x1b[2J\ud800"), "unknown"),
    "a length that does not fit": (lambda one: one["request"].update(max_tokens=10**6), "unknown"),
    "a seed that is NaN": (lambda one: one["request"].update(seed=math.nan), "unknown"),
    "a temperature that is NaN": (lambda one: one["request"].update(temperature=math.nan), "unknown"),
    "a deep request": (lambda one: one["request"].update(user=json.loads("[" * 500 + "]" * 500)), "unknown"),
    "a prompt that is no text": (lambda one: one["request"].update(prompt={"a": 1}), "unknown"),
}  # fmt: skip


@pytest.fixture(scope="module")
def short(demo_server: DemoServer) -> dict[str, Any]:
    body = {"prompt": SOURCES[0], "temperature": 1.0, "seed": 4, "max_tokens": 6, "logprobs": 2}
    return ask(demo_server, "/v1/completions", body | RETURNED)


def test_every_lie_is_judged_beside_answers_that_are_true(
    verifier: Verifier, short: dict[str, Any]
) -> None:
    """None stops the run, and all that is printed is text and JSON."""
    changed = []
    for lie, _ in LIES.values():
        changed.append(copy.deepcopy(short))
        lie(changed[-1])
    results = list(verifier.results(one for lying in changed for one in (lying, short)))
    for (name, (_, outcome)), result in zip(LIES.items(), results[::2], strict=True):
        assert str(result.outcome) == outcome, name
    assert {one.outcome for one in results[1::2]} == {Outcome.EQUAL}
    for one in results:
        assert len(one.reason.encode()) < 500
        assert one.reason.isprintable()
        json.loads(json.dumps(one.as_object(), allow_nan=False))
    assert not verifier.engine.groups


def test_names_times_and_what_the_cache_had_are_not_judged(
    verifier: Verifier, short: dict[str, Any]
) -> None:
    other = copy.deepcopy(short)
    other["response"] |= {"id": "cmpl-\ud800", "created": "today", "model": "other"}
    other["response"]["usage"]["prompt_tokens_details"]["cached_tokens"] = 1
    other["response"]["usage"]["completion_tokens_details"] |= {"accepted_prediction_tokens": 2}
    joined = copy.deepcopy(short)
    del joined["response"]["usage"]
    assert [one.outcome for one in verifier.results([other, joined])] == [Outcome.EQUAL] * 2


def test_what_ended_an_answer_is_judged_where_it_is_stated(
    verifier: Verifier, demo_server: DemoServer, short: dict[str, Any]
) -> None:
    named = choice_of(short)["token_ids"][2]
    cut = ask(demo_server, "/v1/completions", short["request"] | {"stop_token_ids": [named]})
    assert (choice_of(cut)["finish_reason"], choice_of(cut)["stop_reason"]) == ("stop", named)
    unstated, lie = copy.deepcopy(cut), copy.deepcopy(cut)
    del choice_of(unstated)["stop_reason"]  # a client of OpenAI's API may drop it
    choice_of(lie)["stop_reason"] = None
    found = [one.outcome for one in verifier.results([cut, unstated, lie])]
    assert found == [Outcome.EQUAL, Outcome.EQUAL, Outcome.DIFFERS]


def test_one_completion_that_fails_hides_no_other_that_differs(
    verifier: Verifier, demo_server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "import ", "seed": 1, "n": 2, "max_tokens": 3, "ignore_eos": True, **RETURNED}
    good = ask(demo_server, "/v1/completions", body)
    bad = copy.deepcopy(good)
    bad["response"]["choices"][1]["token_ids"][2] ^= 1
    complete = redraw.complete

    def broken(completion: Completion, drawn: Sequence[Sampled]) -> None:
        if completion.request.index == 0:
            raise ValueError("no text")
        complete(completion, drawn)

    monkeypatch.setattr(redraw, "complete", broken)
    unknown, differing = verifier.results([good, bad])
    assert unknown.outcome is Outcome.UNKNOWN
    assert "turned into text: no text" in unknown.reason
    assert (differing.outcome, differing.completion) == (Outcome.DIFFERS, 1)


def with_template(verifier: Verifier, template: str, deadline_s: float = 60) -> Verifier:
    """The same verifier, of a model with another chat template."""
    served, new_renderer = verifier.served, verifier.new_renderer
    assert served.tokenizer is not None
    assert new_renderer is not None
    renderer = partial(new_renderer, chat_template=template, deadline_s=deadline_s)
    tokenizer = served.tokenizer.with_chat_template(template)
    return Verifier(verifier.engine, replace(served, tokenizer=tokenizer), renderer)


@pytest.fixture(scope="module")
def chat(demo_server: DemoServer) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "def "}], "max_tokens": 4, "seed": 1}
    return ask(demo_server, "/v1/chat/completions", body | RETURNED)


LOOP = (
    "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
)


def test_a_template_that_does_not_end_hides_no_other_answer(
    verifier: Verifier, chat: dict[str, Any]
) -> None:
    bad = copy.deepcopy(chat)
    bad["request"]["messages"][0]["content"] = "loop"
    assert verifier.served.tokenizer is not None
    other = with_template(verifier, f"{LOOP}{verifier.served.tokenizer.chat_template}", 2)
    results = list(other.results([chat, bad, chat]))
    assert [str(one.outcome) for one in results] == ["equal", "unknown", "equal"]
    assert "did not end within 2 s" in results[1].reason


def test_the_process_of_templates_ends_with_results_that_nobody_reads_to_the_end(
    verifier: Verifier, chat: dict[str, Any]
) -> None:
    made = []

    def new_renderer() -> Renderer:
        assert verifier.new_renderer is not None
        made.append(verifier.new_renderer())
        return made[-1]

    results = Verifier(verifier.engine, verifier.served, new_renderer).results([chat, chat])
    assert next(results).outcome is Outcome.EQUAL
    [renderer] = made
    pid = renderer.pid
    assert pid is not None
    results.close()
    assert not verifier.engine.groups
    assert renderer.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [one.outcome for one in verifier.results([chat])] == [Outcome.EQUAL]


def test_a_grammar_that_is_not_compiled_in_time_hides_no_other_answer(
    verifier: Verifier, short: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "subprocess", subprocess)  # which reads PYTHONPATH
    (tmp_path / "slow_checker.py").write_text(
        "import time\n\nmake = lambda *_: lambda _: time.sleep(99)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert verifier.new_renderer is not None
    renderer = partial(verifier.new_renderer, grammar_checker="slow_checker:make", deadline_s=0.5)
    bad = copy.deepcopy(short)
    bad["request"]["structured_outputs"] = {"regex": "a+"}
    other = Verifier(verifier.engine, verifier.served, renderer)
    results = list(other.results([short, bad, short]))
    assert [str(one.outcome) for one in results] == ["equal", "unknown", "equal"]
    assert "it was not compiled within 0.5 s" in results[1].reason


def test_a_prompt_that_the_clock_decides_is_not_refuted(
    verifier: Verifier, chat: dict[str, Any]
) -> None:
    """Templates write the date of the day on which they are rendered."""
    served = verifier.served
    assert served.tokenizer is not None
    template = served.tokenizer.chat_template
    found = []
    for written in ("", "{{ strftime_now('%Y') }}", "2001 {# strftime_now #}", "2001"):
        found += with_template(verifier, f"{written}{template}").results([chat])
    assert [str(one.outcome) for one in found] == ["equal", "unknown", "unknown", "differs"]
    assert "the chat template writes the time" in found[1].reason


def test_a_seed_that_draws_another_token_is_found(
    verifier: Verifier, demo_server: DemoServer
) -> None:
    body = {"prompt": SOURCES[0], "temperature": 1.0, "max_tokens": 4, **RETURNED}
    made = [ask(demo_server, "/v1/completions", {**body, "seed": seed}) for seed in range(20)]
    next_made = [*made[1:], made[0]]
    shifted = [
        {"request": following["request"], "response": stated["response"]}
        for stated, following in zip(made, next_made, strict=True)
    ]
    same = [
        choice_of(stated)["token_ids"] == choice_of(following)["token_ids"]
        for stated, following in zip(made, next_made, strict=True)
    ]
    results = list(verifier.results(shifted))
    assert [result.outcome is Outcome.EQUAL for result in results] == same
    assert same.count(False) > 10


def test_what_cannot_be_said(verifier: Verifier, short: dict[str, Any]) -> None:
    good, body = short, short["request"]
    cases: list[tuple[Any, str]] = [
        (5, "not an object with `request` and `response`"),
        ({"request": body}, "`response` is None"),
        ({**good, "response": {**good["response"], "object": "response"}}, "`object` is 'response'"),
        ({**good, "response": {**good["response"], "system_fingerprint": None}}, "no `system_fingerprint`"),
        ({**good, "response": {**good["response"], "system_fingerprint": "fp_0"}}, "system_fingerprint is 'fp_0'"),
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
    assert_names(found.stderr, "3 answers", "1 equal", "1 differ", "1 of which")


def test_lines_are_judged_alone(tmp_path: Path, served_folder: Path, short: dict[str, Any]) -> None:
    """Texts may have characters that Python, but no reader of JSON, takes for line ends."""
    odd = copy.deepcopy(short)
    odd["request"]["user"] = "a\u2028b\x85c"
    line = json.dumps(odd, ensure_ascii=False)
    assert len(line.splitlines()) == 3
    twice = line.replace('"text":', '"text": "lie", "text":', 1)
    deep = '{"request": ' + "[" * 100_000
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join((line, line[:-9], "", twice, deep, line)), encoding="utf-8")
    found = run(str(file), str(served_folder), "--kv-cache-dtype", "fp8", "--json")
    results = [json.loads(one) for one in found.stdout.splitlines()]
    outcomes = ["equal", "unknown", "unknown", "unknown", "equal"]
    assert [one["outcome"] for one in results] == outcomes, found.output
    reasons = [one.get("reason", "") for one in results]
    assert "line 2 is not JSON" in reasons[1]
    assert_names(reasons[2], "'text'", "twice")
    assert "line 5 is not JSON" in reasons[3]
    assert found.exit_code == 2


def test_what_no_model_is_needed_for(tmp_path: Path) -> None:
    """A model that does not exist is not looked for."""
    file = tmp_path / "answer.json"
    for text, says in (
        ("{}", "it cannot be said: `request` is None"),
        ("", "is empty"),
        ("1\n\0", "comes first, then MODEL"),
        ("{", "line 1, is not JSON"),
        ('{"request": 1, "request": 2}', "the name 'request' twice"),
        ("[" * 100_000, "line 1, is not JSON"),
    ):
        file.write_text(text)
        found = run(str(file), "/nowhere")
        assert found.exit_code == 2 or isinstance(found.exception, ConfigError)
        assert says in found.output + str(found.exception)
