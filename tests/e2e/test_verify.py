"""`LLM.verify`: an output is proved in one prefill, and what was altered in it is found."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.e2e.test_drafts import SOURCES, random_params
from tests.hybrids import MODELS, folder
from tests.refusals import refuses

from freight import LLM, Outcome, SamplingParams
from freight.errors import RequestError
from freight.outputs import FinishReason, Logprob, RequestOutput

OPTIONS: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_scales": "dynamic", "threads": 1}
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, logprobs=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Few blocks, and steps shorter than most answers."""
    sizes: dict[str, Any] = {"max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 48}
    return LLM("demo", kv_cache_memory="360KiB", **sizes, **OPTIONS)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> RequestOutput:
    return llm.generate([SOURCES[0]], SEEDED)[0]


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 40), pytest.param(2, 1500, marks=pytest.mark.slow)]
)
def test_random_requests_are_proved(llm: LLM, seed: int, count: int) -> None:
    rng = Random(seed)
    prompts = [(rng.choice(SOURCES) * 2)[: rng.randint(1, 90)] for _ in range(count)]
    params = [random_params(rng) for _ in range(count)]
    params += [replace(GREEDY, structured_outputs={"regex": "[a-z]+ = [0-9]{3}\n"})]
    params += [replace(SEEDED, seed=None, max_tokens=0, prompt_logprobs=1, logprobs=None)]
    outputs = llm.generate([*prompts, *SOURCES[:2]], params)
    results = llm.verify(outputs, params)
    assert [one.reason for one in results if one.outcome is not Outcome.EQUAL] == []
    assert [one.num_tokens for one in results] == [
        sum(len(completion.token_ids) for completion in output.outputs) for output in outputs
    ]
    assert llm.engine.cache.num_held == 0


@pytest.mark.parametrize("model", MODELS)
def test_models_with_states(model: str) -> None:
    hybrid = LLM(str(folder(model)), kv_cache_memory="8MiB", max_num_batched_tokens=33, threads=1)
    prompts = [list(range(5, 80)), list(range(40, 61))]
    outputs = hybrid.generate(prompts, replace(SEEDED, n=2))
    outputs += hybrid.generate(prompts, GREEDY)
    params = [replace(SEEDED, n=2)] * 2 + [GREEDY] * 2
    assert {one.outcome for one in hybrid.verify(outputs, params)} == {Outcome.EQUAL}


def test_weights_and_caches_of_8_and_4_bits() -> None:
    rounded = [{"quantization": name} for name in ("fp8", "int8", "int4")]
    for options in (*rounded, {"kv_cache_dtype": "int8"}):
        small = LLM("demo", kv_cache_memory="8MiB", threads=1, **options)
        outputs = small.generate(SOURCES, SEEDED)
        assert {one.outcome for one in small.verify(outputs, SEEDED)} == {Outcome.EQUAL}


def altered(answer: RequestOutput, change: Callable[[RequestOutput], None]) -> RequestOutput:
    other = copy.deepcopy(answer)
    change(other)
    return other


def test_an_altered_token_is_found(llm: LLM, answer: RequestOutput) -> None:
    drawn = list(answer.outputs[0].token_ids)
    others = [(token + 1 + position) % 300 for position, token in enumerate(drawn)]
    outputs = []
    for position, other in enumerate(others):
        outputs.append(copy.deepcopy(answer))
        outputs[-1].outputs[0].token_ids[position] = other
    for position, result in enumerate(llm.verify(outputs, SEEDED)):
        assert result.outcome is Outcome.DIFFERS
        assert (result.completion, result.position) == (0, position)
        assert (result.stated_token, result.drawn_token) == (others[position], drawn[position])
        logprobs: Any = answer.outputs[0].logprobs
        assert result.drawn_logprob == logprobs[position][drawn[position]].logprob
        assert result.stated_logprob not in (None, result.drawn_logprob)


def test_an_altered_log_probability_is_found(llm: LLM, answer: RequestOutput) -> None:
    """By one unit in the last place of float64, of the token or of another of the most likely."""
    entries: Any = answer.outputs[0].logprobs
    cases = [(position, other) for position in (0, 1, 13, 19) for other in entries[position]]
    assert len(cases) >= 8
    outputs, values = [], []
    for position, other in cases:
        outputs.append(copy.deepcopy(answer))
        values.append(math.nextafter(entries[position][other].logprob, 0.0))
        changed: Any = outputs[-1].outputs[0].logprobs
        changed[position][other] = replace(changed[position][other], logprob=values[-1])
    results = llm.verify(outputs, SEEDED)
    for (position, other), value, result in zip(cases, values, results, strict=True):
        assert (result.outcome, result.completion) == (Outcome.DIFFERS, 0)
        assert result.position == position
        if other == answer.outputs[0].token_ids[position]:
            drawn = entries[position][other].logprob
            assert (result.stated_logprob, result.drawn_logprob) == (value, drawn)


ALTERED: dict[str, Callable[[Any], None]] = {
    "a prompt's token": lambda output: output.prompt_token_ids.__setitem__(3, 7),
    "a token less": lambda output: output.outputs[0].token_ids.pop(),
    "a token more": lambda output: output.outputs[0].token_ids.append(3),
    "the text": lambda output: setattr(output.outputs[0], "text", output.outputs[0].text + " "),
    "the end": lambda output: setattr(output.outputs[0], "finish_reason", FinishReason.STOP),
    "what ended it": lambda output: setattr(output.outputs[0], "stop_reason", "x"),
    "no log-probabilities": lambda output: setattr(output.outputs[0], "logprobs", None),
    "its index": lambda output: setattr(output.outputs[0], "index", 1),
    "an error": lambda output: setattr(output.outputs[0], "error", "lost"),
    "a log-probability that is no number": lambda output: (
        output.outputs[0].logprobs[2].update({output.outputs[0].token_ids[2]: Logprob(math.nan, 1)})
    ),
    "a rank": lambda output: (
        output.outputs[0].logprobs[2].update({output.outputs[0].token_ids[2]: Logprob(-1.0, 9)})
    ),
    "log-probabilities of the prompt": lambda output: setattr(output, "prompt_logprobs", [None]),
}


def test_anything_else_that_is_altered_is_found(llm: LLM, answer: RequestOutput) -> None:
    outputs = [altered(answer, change) for change in ALTERED.values()]
    first, *results = llm.verify([answer, *outputs], SEEDED)
    assert first.outcome is Outcome.EQUAL
    for name, result in zip(ALTERED, results, strict=True):
        assert result.outcome is Outcome.DIFFERS, name


def test_other_parameters_are_found_where_they_give_another_answer(llm: LLM) -> None:
    params = replace(SEEDED, temperature=1.0)
    output = llm.generate([SOURCES[2]], params)[0]
    drawn = output.outputs[0]
    others: list[dict[str, Any]] = [
        {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"seed": 6}, {"logprobs": 3},
        {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
        {"logit_bias": {40: 30.0}}, {"allowed_token_ids": range(1000)}, {"bad_words": [drawn.text[3:6]]},
        {"max_tokens": 19}, {"max_tokens": 21}, {"stop_token_ids": [drawn.token_ids[9]]},
        {"stop": drawn.text[4:7]}, {"stop": drawn.text[-2:]}, {"structured_outputs": {"regex": "[a-z]+"}},
    ]  # fmt: skip
    results = []
    for other in others:
        changed = replace(params, **other)
        same = llm.generate([SOURCES[2]], changed)[0].outputs == output.outputs
        result = llm.verify(output, changed)[0].outcome
        assert result is (Outcome.EQUAL if same else Outcome.DIFFERS), other
        results.append(result)
    assert results.count(Outcome.DIFFERS) >= 15


def test_another_seed_is_found_where_it_draws_another_token(llm: LLM) -> None:
    params = [replace(SEEDED, seed=seed, max_tokens=3) for seed in range(30)]
    outputs = llm.generate([SOURCES[1]] * 30, params)
    results = llm.verify(outputs, [params[-1], *params[:-1]])
    shifted = [outputs[-1], *outputs[:-1]]
    for output, other, result in zip(outputs, shifted, results, strict=True):
        same = output.outputs[0].token_ids == other.outputs[0].token_ids
        assert result.outcome is (Outcome.EQUAL if same else Outcome.DIFFERS)
    assert {one.outcome for one in results} >= {Outcome.DIFFERS}


def test_completions_in_another_order_are_found(llm: LLM) -> None:
    params = replace(SEEDED, n=2)
    output = llm.generate([SOURCES[2]], params)[0]
    first, second = output.outputs
    swapped = replace(output, outputs=[replace(second, index=0), replace(first, index=1)])
    assert llm.verify(output, params)[0].outcome is Outcome.EQUAL
    found = llm.verify(swapped, params)[0]
    assert (found.outcome, found.completion) == (Outcome.DIFFERS, 0)
    one = replace(output, outputs=[first])
    with pytest.raises(RequestError, match="1 answers for n=2"):
        llm.verify(one, params)


def test_an_answer_that_time_or_its_caller_ended_is_proved_as_far_as_it_goes(llm: LLM) -> None:
    stream = llm.stream(SOURCES[0], SEEDED)
    partial = next(output for output in stream if len(output.outputs[0].token_ids) >= 7)
    stream.close()  # type: ignore[attr-defined]
    count = len(partial.outputs[0].token_ids)
    early, late = (
        (FinishReason.TIMEOUT, FinishReason.ABORT),
        (FinishReason.LENGTH, FinishReason.STOP),
    )
    for reason in (*early, *late):
        partial.outputs[0].finish_reason = reason
        result = llm.verify(partial, SEEDED)[0]
        assert result.outcome is (Outcome.EQUAL if reason in early else Outcome.DIFFERS)
        assert reason in late or result.num_tokens == count


def test_what_cannot_be_said(llm: LLM, answer: RequestOutput) -> None:
    assert "without a seed" in llm.verify(answer, replace(SEEDED, seed=None))[0].reason
    failed = copy.deepcopy(answer)
    failed.outputs[0].finish_reason = FinishReason.ERROR
    assert "failed" in llm.verify(failed, SEEDED)[0].reason
    assert llm.verify(failed, SEEDED)[0].outcome is Outcome.UNKNOWN
    plain = LLM("demo", kernels="reference", kv_cache_memory="4MiB", threads=1)
    found = plain.verify(answer, SEEDED)[0]
    assert (found.outcome, "compiled CPU kernels" in found.reason) == (Outcome.UNKNOWN, True)
    outside = altered(answer, lambda one: one.outputs[0].token_ids.__setitem__(2, 1 << 20))
    with refuses(RequestError, "answer token id 1048576"):
        llm.verify(outside, SEEDED)


@pytest.mark.parametrize("model", ["demo", "delta_net"])
def test_a_redraw_that_is_preempted_or_interrupted_goes_on(model: str) -> None:
    """It computes its tokens again, and draws those that it has not drawn."""
    name = model if model == "demo" else str(folder(model))
    llm = LLM(name, kv_cache_memory="8MiB", max_num_batched_tokens=16, threads=1)
    params = replace(SEEDED, max_tokens=60, repetition_penalty=1.1, frequency_penalty=0.1)
    output = llm.generate([[5, 6, 7, 8, 9]], params)[0]
    engine = llm.engine
    for interrupt in (False, True):
        prompt = engine.accept(output.prompt_token_ids, params)
        engine.redraw("a", prompt, params, [output.outputs[0].token_ids])
        for _ in range(2):
            engine.step()
        if interrupt:
            engine._dirty = True
        else:
            engine.scheduler.preempt_latest()
        while not engine.is_finished("a"):
            engine.step()
        told = engine.redrawn("a").group.output()
        assert told.outputs == output.outputs
        engine.release("a")


def test_redraws_ride_beside_requests_and_leave_nothing(llm: LLM, answer: RequestOutput) -> None:
    """One that differs ends at once, and a request beside it has the bits that it has alone."""
    engine = llm.engine
    expected = llm.generate([SOURCES[3]], GREEDY)[0]
    wrong = [(answer.outputs[0].token_ids[0] + 1) % 300, *range(60)]
    prompt = engine.accept(SOURCES[0], replace(SEEDED, max_tokens=100))
    engine.redraw("wrong", prompt, replace(SEEDED, max_tokens=100), [wrong])
    engine.add("beside", engine.accept(SOURCES[3], GREEDY), GREEDY)
    computed = engine.num_computed_tokens
    while not engine.is_finished("wrong"):
        engine.step()
    assert engine.num_computed_tokens - computed <= 48
    found = engine.redrawn("wrong").mismatches[0]
    assert found is not None
    assert (found.position, found.drawn) == (0, answer.outputs[0].token_ids[0])
    engine.release("wrong")
    while not engine.is_finished("beside"):
        engine.step()
    assert engine.output("beside").outputs == expected.outputs
    engine.release("beside")
    assert engine.cache.num_held == 0


def test_a_prompt_that_answers_share_is_computed_once(llm: LLM) -> None:
    """The row before the first token of an answer is computed for each of them."""
    params = replace(SEEDED, n=2, max_tokens=4)
    prompt = list(range(300, 420))
    outputs = llm.generate([prompt], params)
    before = llm.engine.num_computed_tokens
    assert llm.verify(outputs * 3, params)[2].outcome is Outcome.EQUAL
    assert llm.engine.num_computed_tokens - before <= 6 * (16 + 3)
    scored = replace(params, prompt_logprobs=1)
    outputs = llm.generate([prompt], scored)
    assert llm.verify(outputs, scored)[0].outcome is Outcome.EQUAL
