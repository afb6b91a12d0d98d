"""Requests fail alone and end in time, deltas add up, long prompts are scored in little memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.refusals import assert_names, refuses
from tests.unit.engine.fakes import FakeDetokenizer, check_clean, essence, params_of, prompt_of

from freight import LLM, SamplingParams
from freight.engine import compute
from freight.engine.prepare import SequenceSlice
from freight.errors import ConfigError, GenerationError
from freight.outputs import FinishReason
from freight.text.logprobs import to_logprobs


def test_a_row_of_nan_ends_its_request_and_changes_no_other(new_llm: Callable[..., LLM]):
    rng = random.Random(7)
    prompts = [prompt_of(rng) for _ in range(16)]
    params = [
        SamplingParams(max_tokens=8, seed=index, logprobs=1, prompt_logprobs=index % 2)
        for index in range(16)
    ]
    llm = new_llm(num_blocks=200, max_num_seqs=16, budget=64)
    expected = essence(llm.generate(prompts, params))
    bad = 9
    llm = new_llm(num_blocks=200, max_num_seqs=16, budget=64)
    llm.engine.runner.bad = 59  # type: ignore[attr-defined]
    with_bad = [*prompts[:bad], [*prompts[bad], 59], *prompts[bad + 1 :]]
    outputs = llm.generate(with_bad, params, on_error="return")
    (failed,) = outputs[bad].outputs
    assert (failed.finish_reason, failed.token_ids, failed.text) == (FinishReason.ERROR, [], "")
    assert "NaN" in (failed.error or "")
    assert essence(outputs[:bad] + outputs[bad + 1 :]) == expected[:bad] + expected[bad + 1 :]
    check_clean(llm)
    with refuses(GenerationError, "1 of 16 prompts", "prompt 9", "NaN") as error:
        llm.generate(with_bad, params)
    assert essence(error.value.outputs) == essence(outputs)
    with pytest.raises(GenerationError, match="the prompt failed"):
        list(llm.stream(with_bad[bad], params[bad]))
    assert [one.finished for one in llm.stream(with_bad[bad], params[bad], on_error="return")] == [
        True
    ]
    with pytest.raises(ConfigError, match="'ignore'"):
        llm.generate("A", on_error="ignore")
    check_clean(llm)


def test_what_a_failed_request_computed_is_not_taken_up(new_llm: Callable[..., LLM]):
    llm = new_llm()
    runner: Any = llm.engine.runner
    prompt = [1, 2] * 6
    stream = llm.stream(prompt, SamplingParams(max_tokens=9, temperature=0.0), on_error="return")
    next(stream)

    def fails(slices: Sequence[SequenceSlice]) -> None:
        raise MemoryError("no room")

    runner.fails = fails
    (last,) = stream
    assert last.outputs[0].error == "its step failed: MemoryError: no room"
    runner.fails = lambda slices: None
    assert llm.generate(prompt)[0].num_cached_tokens == 0


def test_a_step_that_fails_is_repeated_until_the_failing_request_is_alone(
    new_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
):
    prompts = [[1, 2, index] for index in range(4)]
    params = SamplingParams(max_tokens=5, temperature=0.0)
    expected = essence(new_llm().generate(prompts, params))
    llm = new_llm()
    runner: Any = llm.engine.runner

    def fails(slices: Sequence[SequenceSlice]) -> None:
        if len(runner.sizes) == 3:  # once, and not again
            raise RuntimeError("sometimes")

    runner.fails = fails
    assert essence(llm.generate(prompts, params)) == expected
    assert runner.sizes[:6] == [4, 4, 4, 2, 2, 4]
    assert_names(caplog.text, "4 sequences", "repeated", "RuntimeError: sometimes")

    def always(slices: Sequence[SequenceSlice]) -> None:
        if any(part.token_ids[0] == 1 and part.token_ids[-1] == 2 for part in slices):
            raise RuntimeError("always")

    runner.fails = always
    llm.engine.cache.reset()
    outputs = llm.generate(prompts, params, on_error="return")
    errors = [output.outputs[0].error for output in outputs]
    assert errors == [None, None, "its step failed: RuntimeError: always", None]
    assert essence([*outputs[:2], outputs[3]]) == [*expected[:2], expected[3]]
    check_clean(llm)


def test_text_that_cannot_be_decoded_fails_alone(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    prompts = [[1], [2], [0]]
    expected = essence(
        new_llm().generate(
            prompts, [SamplingParams(max_tokens=6, seed=index) for index in range(3)]
        )
    )
    append = FakeDetokenizer.append

    def broken(self: FakeDetokenizer, token_ids: Sequence[int]) -> str:
        if self._stops:
            raise ValueError("no such token")
        return append(self, token_ids)

    monkeypatch.setattr(FakeDetokenizer, "append", broken)
    llm = new_llm()
    params = [
        SamplingParams(max_tokens=6, seed=index, stop="?" if index == 1 else ())
        for index in range(3)
    ]
    outputs = llm.generate(prompts, params, on_error="return")
    assert "no such token" in (outputs[1].outputs[0].error or "")
    assert essence([outputs[0], outputs[2]]) == [expected[0], expected[2]]
    check_clean(llm)


def test_time_limits_of_waiting_and_running_requests(new_llm: Callable[..., LLM]):
    llm = new_llm(max_num_seqs=1)
    engine = llm.engine
    clock: Any = engine.clock

    def add(name: str, **params: Any) -> None:
        sampling = SamplingParams(ignore_eos=True, temperature=0.0, **params)
        engine.add(name, engine.accept([1, 2], sampling), sampling)

    add("running", timeout_s=5.0, max_tokens=20)
    add("waiting", timeout_s=2.0, max_tokens=20)
    add("free", max_tokens=2)
    assert [delta.request_id for delta in engine.step()] == ["running"]
    clock.now = 2.0
    first, second = engine.step()
    assert (first.request_id, first.finished, first.outputs[0].finish_reason) == (
        "waiting",
        True,
        "timeout",
    )
    assert second.request_id == "running"
    clock.now = 5.5
    deltas = engine.step()
    assert [(delta.request_id, delta.outputs[0].finish_reason) for delta in deltas] == [
        ("running", FinishReason.TIMEOUT),
        ("free", None),
    ]
    (running,) = engine.output("running").outputs
    assert (len(running.token_ids), len(running.text), running.error) == (2, 2, None)
    assert engine.step()[0].outputs[0].finish_reason is FinishReason.LENGTH
    for name in ("running", "waiting", "free"):
        engine.release(name)
    check_clean(llm)


# -------------------------------------------------------------------------------------------------------------
# deltas


def test_deltas_add_up_to_the_output(new_llm: Callable[..., LLM]):
    rng = random.Random(11)
    llm = new_llm(num_blocks=14, budget=10, max_model_len=40)
    engine = llm.engine
    given = {str(index): (prompt_of(rng), params_of(rng)) for index in range(12)}
    for name, (prompt, params) in given.items():
        engine.add(name, engine.accept(prompt, params), params)
    tokens: dict[tuple[str, int], list[int]] = {}
    texts: dict[tuple[str, int], str] = {}
    logprobs: dict[tuple[str, int], list[Any]] = {}
    scored: dict[str, list[Any]] = {}
    finished = set()
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.request_id not in finished
            for one in delta.outputs:
                key = (delta.request_id, one.index)
                tokens[key] = [*tokens.get(key, []), *one.token_ids]
                texts[key] = texts.get(key, "") + one.text
                logprobs[key] = [*logprobs.get(key, []), *(one.logprobs or [])]
            scored[delta.request_id] = [*scored.get(delta.request_id, []), *(delta.scores or ())]
            if delta.finished:
                finished.add(delta.request_id)
    assert finished == set(given)
    for name, (_, params) in given.items():
        output = engine.output(name)
        expected = [entry for entry in output.prompt_logprobs or [] if entry is not None]
        assert [to_logprobs(entries, engine.tokenizer) for entries in scored[name]] == expected
        for one in output.outputs:
            assert tokens[name, one.index] == one.token_ids
            assert texts[name, one.index] == one.text
            assert logprobs[name, one.index] == (one.logprobs or [])
            assert (one.logprobs is None) == (params.logprobs is None)


def test_a_prompt_can_be_scored_without_generating(new_llm: Callable[..., LLM]):
    llm = new_llm(budget=7)
    prompt = [1, 2, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1]
    (more,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=2))
    (none,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert none.prompt_logprobs == more.prompt_logprobs
    assert len(none.prompt_logprobs or []) == len(prompt)
    (completion,) = none.outputs
    assert (completion.token_ids, completion.text, completion.finish_reason) == (
        [],
        "",
        FinishReason.LENGTH,
    )
    check_clean(llm)


def test_rows_of_a_long_prompt_are_scored_a_few_at_a_time(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    prompt = [1, 2, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1]
    (expected,) = new_llm().generate(
        [prompt], SamplingParams(max_tokens=2, prompt_logprobs=2, seed=1)
    )
    monkeypatch.setattr(compute, "SCORED_AT_ONCE", 3)  # FakeRows refuses more at once
    (output,) = new_llm().generate(
        [prompt], SamplingParams(max_tokens=2, prompt_logprobs=2, seed=1)
    )
    assert essence([output]) == essence([expected])
