"""Drafts change no bit of any request: random ones, with drafts and without, in one engine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.drafters import KINDS, Told
from tests.hybrids import HYBRIDS
from tests.refusals import refuses

from freight import LLM, SamplingParams
from freight.engine import build
from freight.engine.drafts import LONGEST_TEXT, Drafter
from freight.engine.engine import Engine
from freight.errors import ConfigError, RequestError
from freight.outputs import FinishReason
from freight.settings.speculation import speculation

SOURCES = [
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "def first(values):\n    return values[0]\n\n\n" * 3,
    "import os\nimport sys\n\n\ndef main():\n    path = os.path.join(",
    "for index in range(10):\n    print(index)\n",
]
MOST = 12
OPTIONS: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_scales": "dynamic", "max_model_len": 192}
OPTIONS["threads"] = 1
EARLY = (FinishReason.ABORT, FinishReason.TIMEOUT)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """A cache of few blocks: requests are preempted, and find each other's prefixes."""
    return LLM("demo", **OPTIONS, kv_cache_memory="360KiB", max_num_seqs=8, speculate=MOST)


def random_params(rng: Random) -> SamplingParams:
    max_tokens = rng.randint(1, 90)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(100),
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        stop=rng.choice([(), (), "\n\n", ("self", "return x"), ")"]),
        stop_token_ids=rng.choice([(), (), tuple(rng.sample(range(300), 40))]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.8]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logit_bias=rng.choice([{}, {}, {5: 3.0, 17: -2.0}]),
        bad_words=rng.choice([(), (), ("self", "in range")]),
        include_stop_str_in_output=rng.random() < 0.2,
    )


def essence(output: Any) -> Any:
    return output.prompt_logprobs, [
        (one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason)
        for one in output.outputs
    ]


def outputs_of(
    engine: Engine,
    requests: dict[str, tuple[str, SamplingParams]],
    rng: Random | None = None,
) -> Iterator[tuple[str, Any]]:
    """The outputs of requests; with `rng` they come at any time, and some are aborted."""
    waiting = list(requests)
    while waiting or engine.has_unfinished:
        burst = len(waiting) if rng is None else rng.choice([0, 0, 0, 0, 1, 6])
        for name in waiting[:burst]:
            prompt, params = requests[name]
            engine.add(name, engine.accept(prompt, params), params)
        del waiting[:burst]
        running = [name for name in engine.groups if not engine.is_finished(name)]
        if rng is not None and running and rng.random() < 0.02:
            engine.abort(rng.choice(running))
        for delta in engine.step():
            if delta.finished:
                yield delta.request_id, engine.output(delta.request_id)
                engine.release(delta.request_id)
        for name in [name for name in engine.groups if engine.is_finished(name)]:
            yield name, engine.output(name)  # aborted
            engine.release(name)


def check_same(found: Any, expected: Any) -> None:
    """One that was aborted, or had no more time, has the first tokens of what was expected."""
    prompt_logprobs, completions = essence(expected)
    for one, wanted in zip(found.outputs, completions, strict=True):
        if one.finish_reason in EARLY:
            count = len(one.token_ids)
            assert one.token_ids == wanted[0][:count]
            assert one.logprobs == (None if wanted[2] is None else wanted[2][:count])
    if not any(one.finish_reason in EARLY for one in found.outputs):
        assert essence(found) == (prompt_logprobs, completions)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 36), pytest.param(2, 2000, marks=pytest.mark.slow)]
)
def test_random_requests_with_drafts_and_without(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int, count: int
) -> None:
    """Beside each other, preempted, aborted, out of time, found in the cache. Some are not drafted for,
    the others by guesses that are right, wrong, both, or their own.
    """
    rng, engine = Random(seed), llm.engine
    requests = {}
    for index in range(count):
        source = rng.choice(SOURCES) * rng.randint(1, 2)
        requests[str(index)] = source[: rng.randint(1, len(source))], random_params(rng)
    monkeypatch.setattr(engine, "drafters", lambda prompt, params: [None] * params.n)
    expected = dict(outputs_of(engine, requests))
    assert engine.stats().drafted == 0

    def drafter(prompt: Any, params: SamplingParams) -> Drafter | None:
        kind = rng.choice(["none", "own", *KINDS, "right"])
        if kind == "own":
            return Drafter(prompt.token_ids)
        answers = [
            one.token_ids
            for name, (text, its_params) in requests.items()
            if text == prompt.text and its_params == replace(params, timeout_s=None)
            for one in expected[name].outputs
        ]
        return None if kind == "none" else Told(answers, kind, rng, engine.intake.vocab_size)

    monkeypatch.setattr(
        engine,
        "drafters",
        lambda prompt, params: [drafter(prompt, params) for _ in range(params.n)],
    )
    monkeypatch.setattr(engine, "clock", itertools.count().__next__)
    before = engine.stats()
    late = {
        name: (prompt, replace(params, timeout_s=30.0 if rng.random() < 0.1 else None))
        for name, (prompt, params) in requests.items()
    }
    found = dict(outputs_of(engine, late, rng))
    reasons = {one.finish_reason for output in found.values() for one in output.outputs}
    assert {FinishReason.LENGTH, FinishReason.STOP, *EARLY} <= reasons
    assert found.keys() == expected.keys()
    for name, output in found.items():
        check_same(output, expected[name])
    stats = engine.stats()
    assert stats.accepted > count
    assert stats.drafted - stats.accepted > count
    assert stats.preemptions > before.preemptions > 0
    assert stats.prefix_hits > before.prefix_hits
    assert engine.cache.num_held == 0


def counted(llm: LLM, prompt: str, params: SamplingParams) -> tuple[Any, int]:
    """An answer, and how many steps it took."""
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        step = llm.engine.step
        patch.setattr(llm.engine, "step", lambda **quiet: steps.append(1) or step(**quiet))
        return llm.generate([prompt], params)[0], len(steps)


def test_a_text_that_repeats_itself_takes_fewer_steps(llm: LLM) -> None:
    """`generate` as it is, against the same model without the option."""
    prompt = SOURCES[3] * 4
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2)
    plain = LLM("demo", **OPTIONS, speculate=0)
    before = llm.engine.stats()
    output, num_steps = counted(llm, prompt, params)
    assert essence(output) == essence(plain.generate([prompt], params)[0])
    assert num_steps < 40
    assert llm.engine.stats().accepted - before.accepted >= 60 - num_steps - 1
    assert plain.engine.stats().drafted == 0


def test_a_prediction_is_drafted_from_the_first_token_on(llm: LLM) -> None:
    """The text that the answer has, and one that it has not: the same tokens, in fewer steps."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logprobs=0)
    plain = llm.generate([SOURCES[0]], replace(params, prediction="nothing of the kind"))[0]
    steps = []
    for text in (plain.outputs[0].text, "nothing of the kind"):
        output, num_steps = counted(llm, SOURCES[0], replace(params, prediction=text))
        assert essence(output) == essence(plain)
        steps.append(num_steps)
    predicted, other = steps
    assert predicted < other / 2


def test_a_prediction_drafts_no_token_beyond_the_vocabulary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Tokenizers may have more tokens than the embedding has rows, such as those of images."""
    llm = LLM("demo", kv_cache_memory="4MiB", threads=1, max_model_len=256, speculate=6)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain, intake = llm.generate([SOURCES[1]], params)[0], llm.engine.intake
    assert intake.tokenizer is not None
    intake.tokenizer.backend.add_special_tokens(["<|image|>"])
    text = plain.outputs[0].text
    text = "".join(f"{text[begin : begin + 12]}<|image|>" for begin in range(0, len(text), 12))
    predicted = replace(params, prediction=text)
    assert max(intake.tokenizer.encode(text)) == intake.vocab_size
    assert max(intake.predicted(predicted)) < intake.vocab_size
    assert essence(llm.generate([SOURCES[1]], predicted)[0]) == essence(plain)
    assert all(record.levelno < logging.WARNING for record in caplog.records)  # no step failed


def test_a_prediction_is_tokenized_once_and_not_beyond_what_is_used(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that run wait for it."""
    engine, lengths = llm.engine, []
    assert engine.tokenizer is not None
    encode = engine.tokenizer.encode

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    params = SamplingParams(n=3, max_tokens=2, prediction="value = 1\n" * (LONGEST_TEXT // 5))
    prompt = engine.accept(SOURCES[0], params)
    monkeypatch.setattr(engine.tokenizer, "encode", watched)
    engine.add("long", prompt, params)
    engine.release("long")
    assert lengths == [LONGEST_TEXT]


def test_a_prediction_that_is_no_text_is_refused() -> None:
    for prediction in ("\ud800", 5):
        with pytest.raises(RequestError, match="prediction is"):
            SamplingParams(prediction=prediction)  # type: ignore[arg-type]


def test_one_sequence_at_most_has_drafts_and_recorded_steps() -> None:
    """The rows of drafts are no sequences: `max_num_seqs` does not count them."""
    options: dict[str, Any] = {"kv_cache_memory": "4MiB", "threads": 1, "max_num_seqs": 1}
    prompt, params = SOURCES[3] * 4, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    drafted = LLM("demo", speculate=6, **options)
    found = drafted.generate([prompt], params)[0]
    plain = LLM("demo", speculate=0, **options)
    assert essence(found) == essence(plain.generate([prompt], params)[0])
    captured = drafted.engine.runner.captured
    assert captured is not None
    assert (7, False) in captured.steps


def test_steps_with_drafts_are_recorded_where_layers_keep_states() -> None:
    options: dict[str, Any] = {"kv_cache_memory": "4MiB", "threads": 1, "max_model_len": 256}
    model = str(HYBRIDS / "delta_net")
    prompt, params = SOURCES[3] * 4, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    drafted = LLM(model, speculate=6, **options)
    found = drafted.generate([prompt], params)[0]
    assert essence(found) == essence(
        LLM(model, speculate=0, **options).generate([prompt], params)[0]
    )
    captured = drafted.engine.runner.captured
    assert captured is not None
    assert (7, False) in captured.steps
    assert drafted.engine.stats().accepted > 6


SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "customer_name": {"type": "string", "maxLength": 6},
            "is_available": {"type": "boolean"},
            "kind": {"enum": ["customer_account", "customer_order"]},
            "addresses": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"street_and_number": {"type": "string", "maxLength": 4}},
                    "required": ["street_and_number"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["customer_name", "is_available", "kind", "addresses"],
        "additionalProperties": False,
    },
    {"enum": ["a long answer that is one of two", "a long answer that is the other one of two"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5},
]
FORMS: list[dict[str, Any]] = [
    *({"json": schema} for schema in SCHEMAS),
    {"regex": "(ab){12}|(abab){2}c[0-9]{3}"},
    {"choice": ["import os", "import sys", "from typing import Any"]},
]


def test_what_a_grammar_forces_is_drafted_and_changes_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other requests, preempted, with parameters that bar some of the forced tokens."""
    rng, engine = Random(4), llm.engine
    requests = {}
    for index in range(40):
        params = replace(random_params(rng), stop=(), max_tokens=rng.choice([20, 70]), min_tokens=0)
        if index % 5 == 0:  # within what is forced, and before which no end may come
            params = replace(params, stop=("name", "ab", "is_av"), min_tokens=rng.choice([0, 4, 9]))
        if index % 3:
            params = replace(params, structured_outputs=rng.choice(FORMS))
        if index % 7 == 1:
            params = replace(params, bad_words=("customer", "import"), n=1)
        requests[str(index)] = rng.choice(SOURCES)[: rng.randint(1, 40)], params
    before = engine.stats()
    found = dict(outputs_of(engine, requests, rng))
    stats = engine.stats()
    monkeypatch.setattr(engine.scheduler, "most_drafts", 0)
    expected = dict(outputs_of(engine, requests))
    assert engine.stats().drafted == stats.drafted
    for name, output in found.items():
        check_same(output, expected[name])
    reasons = {one.finish_reason for output in expected.values() for one in output.outputs}
    assert reasons >= {FinishReason.STOP, FinishReason.LENGTH}
    assert stats.accepted - before.accepted > 60
    assert stats.drafted - before.drafted > stats.accepted - before.accepted
    assert stats.preemptions > before.preemptions


@pytest.mark.parametrize(("kernels", "count"), [("auto", 40), ("reference", 30)])
def test_what_rejected_drafts_store_is_not_counted(kernels: str, count: int) -> None:
    """Every token is stored once, with drafts and without, and many values are clipped."""
    options: dict[str, Any] = {
        "kv_cache_dtype": "fp8", "kv_scales": "0.01,0.01", "kv_cache_memory": "4MiB", "threads": 1,
        "enable_prefix_caching": False, "kernels": kernels,
    }  # fmt: skip
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=count, stop=("print", "values")),
        SamplingParams(temperature=0.8, seed=3, max_tokens=count, n=2),
        SamplingParams(temperature=0.0, max_tokens=count, structured_outputs=FORMS[0]),
    ]
    found = []
    for most in (0, MOST):
        with torch.inference_mode():  # steps are taken outside of it, as in another thread
            engine = LLM("demo", speculate=most, **options).engine
        texts = [source * 2 for source in SOURCES]
        requests = dict(zip("abcd", zip(texts, params, strict=True), strict=True))
        for name, (prompt, one) in requests.items():
            engine.add(name, engine.accept(prompt, one), one)
        ended = list(engine.scheduler._requests.values())
        while engine.has_unfinished:
            engine.step()
        assert {one.drafter for one in ended} == {None}  # kept until an answer is read
        outputs = {name: engine.output(name) for name in requests}
        stats = engine.stats()
        found.append(([essence(outputs[name]) for name in requests], stats.clipped, stats.nans))
        assert most == 0 or stats.drafted - stats.accepted > 10
    assert found[0] == found[1]
    assert found[0][1] > 1000


def test_a_forced_text_takes_few_steps_and_its_own_text_gives_no_drafts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    form = replace(params, structured_outputs={"regex": "(ab){12}"})
    before = llm.engine.stats()
    assert llm.generate(["ab" * 12], form)[0].outputs[0].text == "ab" * 12
    after = llm.engine.stats()
    # the last one is drawn, and ends the text
    assert after.accepted - before.accepted == after.drafted - before.drafted - 1 > 5
    for counts, total in ((after.drafted_by, after.drafted), (after.accepted_by, after.accepted)):
        assert counts.keys() == {"text", "grammar"}
        assert counts["grammar"] > 5
        assert sum(counts.values()) == total
    form = replace(params, structured_outputs={"regex": "[ab]{24}"})  # nothing is forced
    llm.generate(["ab" * 12], form)
    assert llm.engine.stats().drafted == after.drafted


def test_it_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (
            {"speculative_config": config},
            ["drafts: up to 4 a step, from each request's own text"],
        ),
        ({}, ["drafts: up to 8 a step"]),
        ({"speculate": 0}, []),
        ({"kernels": "reference"}, ["drafts: none, because the reference kernels"]),
    ]
    for options, says in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO, "freight"):
            LLM("demo", kv_cache_memory="4MiB", threads=1, **options)
        lines = [message for message in caplog.messages if "drafts" in message]
        assert len(lines) == len(says)
        assert all(part in line for part, line in zip(says, lines, strict=True)), options


def test_a_head_is_refused_by_name_where_it_cannot_draft() -> None:
    for config, says in (
        ({"method": "eagle3"}, ["'eagle3'", "needs the folder of what drafts"]),
        ({"method": "draft_model"}, ["'draft_model'", "needs the folder of what drafts"]),
        ({"method": "medusa"}, ["'medusa'", "ngram, suffix, draft_model, mtp or eagle3"]),
        ({"method": "mtp", "model": "demo"}, ["'mtp'", "the model's own checkpoint", "omit model"]),
        ({"method": "mtp"}, ["demo has no layers that predict further tokens"]),
        ({"method": "ngram", "model": "demo"}, ["'ngram'", "takes no model"]),
    ):
        with refuses(ConfigError, *says):
            LLM("demo", speculative_config=config, **OPTIONS, kv_cache_memory="4MiB")


def test_where_they_would_not_be_exact_there_are_none(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"decoder": object()}, "the modules of transformers may round a row differently"),
        (
            {"config": SimpleNamespace(most_drafts=4, launches_ahead=True)},
            "on a GPU the next step is launched before",
        ),
        ({"exact": False}, "the reference kernels may round a row differently"),
    ]
    caplog.set_level(logging.INFO, "freight")
    runner = llm.engine.runner
    own_text = speculation(4, None)
    exact: dict[str, Any] = {
        "config": SimpleNamespace(most_drafts=4, launches_ahead=False, drafts=own_text),
        "decoder": runner.model,
        "exact": True,
    }
    assert build._most_drafts(**exact) == 4
    for changes, reason in cases:
        caplog.clear()
        assert build._most_drafts(**exact | changes) == 0
        assert f"drafts: none, because {reason}" in caplog.text
