"""A forward pass that raises ends the requests that raise alone, in a bounded number of passes; the
others go on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.unit.engine.fakes import BLOCK, FakeRunner, check_clean, essence, params_of, prompt_of

from freight import LLM, SamplingParams
from freight.engine.pace import Pace
from freight.engine.prepare import SequenceSlice
from freight.engine.step import Mode
from freight.outputs import FinishReason

ROOM = {"num_blocks": 400, "max_num_seqs": 16, "budget": 256}
BAD = 59  # prompt_of has no such token


def runner_of(llm: LLM) -> FakeRunner:
    runner: Any = llm.engine.runner
    return runner


def raises_for(token: int) -> Callable[[Sequence[SequenceSlice]], None]:
    """A kernel that raises where one of its rows is `token`."""

    def fails(slices: Sequence[SequenceSlice]) -> None:
        if any(token in part.token_ids for part in slices):
            raise RuntimeError(f"row of {token}")

    return fails


@pytest.mark.parametrize("mode", [Mode.REPEATABLE, Mode.OVERLAPPED])
@pytest.mark.parametrize("bad", [[0], [9], [15], [3, 4], [0, 15], list(range(16))])
def test_the_others_answer_as_without_them(new_llm: Callable[..., LLM], bad: list[int], mode: Mode):
    """All passes of the first step are counted: at most 1 + 2k log2(n), and never more than 2n."""
    rng = random.Random(1)
    prompts = [prompt_of(rng) for _ in range(16)]
    params = [
        SamplingParams(max_tokens=6, seed=i, temperature=i % 2, logprobs=1) for i in range(16)
    ]
    expected = essence(new_llm(**ROOM, mode=mode).generate(prompts, params))
    llm = new_llm(**ROOM, mode=mode)
    runner = runner_of(llm)
    runner.fails = raises_for(BAD)
    prompts = [[*prompt, BAD] if i in bad else prompt for i, prompt in enumerate(prompts)]
    outputs = llm.generate(prompts, params, on_error="return")
    for index, output in enumerate(outputs):
        (completion,) = output.outputs
        if index in bad:
            assert completion.finish_reason is FinishReason.ERROR
            assert completion.error == f"its step failed: RuntimeError: row of {BAD}"
        else:
            assert essence([output]) == [expected[index]]
    passes = runner.sizes.index(16 - len(bad), 1) if 16 - len(bad) > 0 else len(runner.sizes)
    assert runner.sizes[0] == 16
    assert passes <= min(1 + 2 * len(bad) * math.ceil(math.log2(16)), 2 * 16)
    check_clean(llm)
    runner.fails = lambda slices: None
    assert (
        len(llm.generate(prompts[0], params[0])[0].outputs[0].token_ids) > 0
    )  # the engine lives on


@dataclass(frozen=True)
class Mixture:
    """Requests of every kind, three of which have `BAD` in their prompt, and what all give where
    nothing fails.
    """

    llm: LLM
    prompts: list[list[int]]
    params: list[SamplingParams]
    bad: list[int]
    expected: list[Any]

    @classmethod
    def of(cls, new_llm: Callable[..., LLM], rng: random.Random, **more: Any) -> Mixture:
        """`more`: of the engine in which requests fail."""
        limits = {
            "num_blocks": rng.choice([24, 100]),
            "budget": rng.choice([8, 16]),
            "max_num_seqs": 8,
            "max_model_len": 40,
        }
        prompts = [prompt_of(rng) for _ in range(16)]
        params = [
            replace(params_of(rng), logit_bias={BAD: -100.0}) for _ in prompts
        ]  # nobody draws it
        expected = essence(new_llm(**limits).generate(prompts, params))
        bad = rng.sample(range(16), 3)
        damaged = [[*prompt[:-1], BAD] if i in bad else prompt for i, prompt in enumerate(prompts)]
        return cls(new_llm(**limits, **more), damaged, params, bad, expected)

    def check(self) -> None:
        """Those of `bad` fail, and change no other."""
        outputs = self.llm.generate(self.prompts, self.params, on_error="return")
        for index, output in enumerate(outputs):
            if index in self.bad:
                assert {one.error for one in output.outputs} == {
                    f"its step failed: RuntimeError: row of {BAD}"
                }
            else:
                assert essence([output]) == [self.expected[index]]
        check_clean(self.llm)


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture(new_llm: Callable[..., LLM], seed: int):
    """Chunks of prompts, few blocks, hits, several completions, scored prompts: a failing kernel
    changes no other.
    """
    case = Mixture.of(new_llm, random.Random(seed))
    runner_of(case.llm).fails = raises_for(BAD)
    case.check()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rarely", [False, True])
def test_any_mixture_where_a_pass_cannot_be_repeated(
    new_llm: Callable[..., LLM], seed: int, rarely: bool
):
    """A pass that raises spoils the blocks that are not full, as one over layers with a state may.
    With `rarely` others raise now and then for no fault of a row."""
    rng = random.Random(seed)
    case = Mixture.of(new_llm, rng, mode=Mode.ONCE)
    runner = runner_of(case.llm)
    raises, alone = raises_for(BAD), 0

    def fails(slices: Sequence[SequenceSlice]) -> None:
        nonlocal alone
        alone += len(slices) == 1
        try:
            if rarely and len(slices) > 1 and rng.random() < 0.2:
                raise MemoryError("for now")
            raises(slices)
        except (MemoryError, RuntimeError):
            for part in slices:
                for position in range(
                    part.start // BLOCK * BLOCK, part.start + len(part.token_ids)
                ):
                    runner.slots[runner._slot(part, position)] = b"spoilt"
            raise

    runner.fails = fails
    case.check()
    assert alone > 3


def test_one_that_fails_later_gives_its_tokens_until_then(new_llm: Callable[..., LLM]):
    """The fourth pass is its second decode step: blocks are written and indexed by then."""
    prompts = [[1, 2, index] for index in range(16)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = new_llm(**ROOM).generate(prompts, params)
    llm = new_llm(**ROOM)

    def fails(slices: Sequence[SequenceSlice]) -> None:
        for part in slices:
            if part.start == 4 and part.block_ids[0][0] == first_block:
                raise RuntimeError("second step")

    first_block = new_block_of(llm, 11, prompts, params)
    runner_of(llm).fails = fails
    outputs = llm.generate(prompts, params, on_error="return")
    (failed,) = outputs.pop(11).outputs
    assert failed.error == "its step failed: RuntimeError: second step"
    assert failed.token_ids == expected.pop(11).outputs[0].token_ids[:2]
    assert essence(outputs) == essence(expected)
    check_clean(llm)


def new_block_of(llm: LLM, index: int, prompts: Sequence[list[int]], params: SamplingParams) -> int:
    """The first block that prompt `index` will have in `llm`: what it has in another one, for the
    same requests.
    """
    runner = runner_of(llm)
    blocks: list[int] = []

    def look(slices: Sequence[SequenceSlice]) -> None:
        blocks.extend(part.block_ids[0][0] for part in slices if part.start == 0)

    runner.fails = look
    llm.generate(prompts, params)
    llm.engine.cache.reset()
    return blocks[index]


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_what_fails_once_ends_nobody(
    new_llm: Callable[..., LLM], count: int, caplog: pytest.LogCaptureFixture
):
    prompts = [[1, 2, index] for index in range(count)]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    expected = essence(new_llm(**ROOM).generate(prompts, params))
    for at in range(1, 4):
        llm = new_llm(**ROOM)
        runner = runner_of(llm)

        def fails(
            slices: Sequence[SequenceSlice], runner: FakeRunner = runner, at: int = at
        ) -> None:
            if len(runner.sizes) == at:
                raise MemoryError("for now")

        runner.fails = fails
        assert essence(llm.generate(prompts, params)) == expected
        assert runner.sizes[at - 1 : at + 2] == [
            count,
            *([count // 2, count - count // 2] if count > 1 else [1, 1]),
        ]
    assert "repeated in parts: MemoryError: for now" in caplog.text
    assert "failed alone" not in caplog.text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_fault_of_the_model_passes_through(
    new_llm: Callable[..., LLM], kind: type[BaseException]
):
    llm = new_llm(**ROOM)
    runner = runner_of(llm)
    prompts = [[1, 2, index] for index in range(16)]

    def fails(slices: Sequence[SequenceSlice]) -> None:
        if len(slices) == 16:
            raise RuntimeError("in parts")
        raise kind

    runner.fails = fails
    with pytest.raises(kind):
        llm.generate(prompts, SamplingParams(max_tokens=2))
    assert runner.sizes == [16, 8]
    check_clean(llm)


def test_a_fault_of_every_row_is_logged_once(
    new_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
):
    llm = new_llm(**ROOM)
    runner_of(llm).fails = raises_for(1)
    outputs = llm.generate(
        [[1, index] for index in range(16)], SamplingParams(max_tokens=2), on_error="return"
    )
    assert {output.outputs[0].error for output in outputs} == {
        "its step failed: RuntimeError: row of 1"
    }
    alone = [record for record in caplog.records if "failed alone" in record.getMessage()]
    assert len(alone) == 1
    assert alone[0].exc_info  # where it failed


def test_the_time_of_a_repeated_step_is_no_measure(new_llm: Callable[..., LLM]):
    llm = new_llm(**ROOM)
    pace = llm.engine.pace = Pace(1.0, 256)
    clock: Any = llm.engine.clock
    runner = runner_of(llm)

    def fails(slices: Sequence[SequenceSlice]) -> None:
        clock.now += 1.0
        if len(runner.sizes) == 3:
            raise RuntimeError("once")

    runner.fails = fails
    llm.generate(
        [[1, 2, index] for index in range(4)],
        SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
    )
    assert runner.sizes[:6] == [4, 4, 4, 2, 2, 4]
    assert pace.base == 1.0  # of the other steps; that one took 3
