"""An engine that launches the next step before it knows the last one's tokens gives what one that
waits gives.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.engine.fakes import EOS, FakeRunner, check_clean, essence, params_of, prompt_of
from tests.unit.engine.test_interrupted import Interrupt, Interrupter

from freight import LLM, SamplingParams
from freight.engine import sampler
from freight.engine.adjust import SamplingRow
from freight.engine.ahead import Launched
from freight.engine.engine import Engine
from freight.engine.prepare import SequenceSlice
from freight.engine.step import Mode

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def runner_of(engine: Engine) -> FakeRunner:
    runner: Any = engine.runner
    return runner


def look_at(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Only the `width` most likely tokens are looked at first for top_p, as on a GPU; a CPU sorts
    all.
    """
    monkeypatch.setattr(sampler, "_NUCLEUS", width)
    monkeypatch.setattr(
        sampler, "_largest", lambda p, width: p.topk(min(width, p.shape[-1])).values
    )


def plain_params(rng: random.Random) -> SamplingParams:
    """Mostly what nothing of the host is needed for."""
    if rng.random() < 0.1:
        return params_of(rng)
    return SamplingParams(
        max_tokens=rng.randint(1, 15),
        seed=rng.randrange(9),
        temperature=rng.choice([0.0, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        n=rng.choice([1, 1, 2]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_has_the_same_tokens_and_leaves_nothing_behind(
    new_llm: Callable[..., LLM], seed: int
):
    """Also where blocks run out, where requests wait, and where a second batch takes up the blocks
    of the first.
    """
    found = []
    for mode in (Mode.REPEATABLE, Mode.OVERLAPPED):
        rng = random.Random(seed)
        limits = {
            "num_blocks": rng.choice([12, 24, 100]),
            "budget": rng.choice([8, 16]),
            "max_model_len": 40,
        }
        llm = new_llm(**limits, mode=mode)
        prompts = [prompt_of(rng) for _ in range(9)]
        params = [plain_params(rng) for _ in prompts]
        first = llm.generate(prompts, params)
        longer = [[*one.prompt_token_ids, *one.outputs[0].token_ids][:30] for one in first]
        found.append([essence(first), essence(llm.generate(longer, params))])
        check_clean(llm)
        assert (runner_of(llm.engine).num_ahead > 0) == (mode is Mode.OVERLAPPED)
    assert found[0] == found[1]


@pytest.mark.parametrize("may_follow", [True, False])
def test_nothing_is_launched_ahead_where_a_token_may_be_forced(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, may_follow: bool
):
    monkeypatch.setattr(SamplingRow, "may_follow", may_follow)
    llm = new_llm(mode=Mode.OVERLAPPED)
    llm.generate([[1, 2, 0]], GREEDY)
    assert (runner_of(llm.engine).num_ahead > 0) == may_follow


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_requests_that_come_and_go_have_the_tokens_they_have_alone(
    new_llm: Callable[..., LLM], seed: int, num_microbatches: int
):
    """They are added, aborted and released, and time out, while a step is launched ahead; ids come
    again.
    """
    rng = random.Random(seed)
    limits: dict[str, Any] = {"num_microbatches": num_microbatches, "mode": Mode.OVERLAPPED}
    llm = new_llm(num_blocks=20, budget=12, **limits)
    engine = llm.engine
    clock: Any = engine.clock
    live: dict[str, SamplingParams] = {}
    ended = []
    for number in range(120):
        clock.now = float(number)
        name = str(rng.randrange(7))
        if number < 60 and name not in live:
            params = live[name] = replace(
                plain_params(rng), timeout_s=rng.choice([None, None, 9.0]), n=1
            )
            engine.add(name, engine.accept(prompt_of(rng), params), params)
        if live and rng.random() < 0.1:
            getattr(engine, rng.choice(["abort", "release"]))(rng.choice(list(live)))
        engine.step()
        for name in list(live):
            if name not in engine.groups or engine.is_finished(name):
                params = live.pop(name)
                if name in engine.groups:
                    ended.append((engine.output(name), params))
                engine.release(name)
    assert not live
    check_clean(llm)
    assert runner_of(engine).num_ahead > 5
    alone = new_llm(num_blocks=20)
    for output, params in ended:
        (expected,) = alone.generate([output.prompt_token_ids], replace(params, timeout_s=None))
        (got,), (whole,) = output.outputs, expected.outputs
        early = got.finish_reason in ("abort", "timeout")
        assert got.token_ids == whole.token_ids[: len(got.token_ids)] if early else got == whole


def steps_of(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Any]:
    """What each step gives."""
    for index, prompt in enumerate(prompts):
        engine.add(str(index), engine.accept(prompt, params), params)
    found = []
    while engine.has_unfinished:
        found.append([(one.request_id, one.outputs, one.finished) for one in engine.step()])
    return found


def test_each_step_gives_the_same_and_a_stop_id_ends_a_stream_at_the_same_token(
    new_llm: Callable[..., LLM],
):
    prompts = [[index % 3, 1, index] for index in range(4)]
    params = SamplingParams(max_tokens=40, seed=3, stop_token_ids=(5, 9))
    plain = steps_of(new_llm(mode=Mode.REPEATABLE).engine, prompts, params)
    ahead = steps_of(new_llm(mode=Mode.OVERLAPPED).engine, prompts, params)
    assert ahead == plain
    assert {one.finish_reason for step in plain for _, (one,), _ in step} >= {"stop", None}


def test_the_next_step_is_launched_before_tokens_are_read(
    monkeypatch: pytest.MonkeyPatch, new_llm: Callable[..., LLM]
):
    happened: list[str] = []
    run, read = FakeRunner.run, Launched.read

    def logged_run(
        self: FakeRunner, slices: Sequence[SequenceSlice], tokens: torch.Tensor | None = None
    ) -> Any:
        happened.append("ahead" if tokens is not None else "run")
        return run(self, slices, tokens)

    def logged_read(self: Launched) -> list[int] | None:
        happened.append("read")
        return read(self)

    monkeypatch.setattr(FakeRunner, "run", logged_run)
    monkeypatch.setattr(Launched, "read", logged_read)
    new_llm(mode=Mode.OVERLAPPED).generate([[1, 2, 0]], replace(GREEDY, max_tokens=5))
    # The prompt, the second token and then one ahead of each that is read; the last is known to be
    # the last.
    assert happened == ["run", "run", "ahead", "read", "ahead", "read", "ahead", "read", "read"]


WAITING = [
    {"logprobs": 0},
    {"stop": "?"},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": {3: 1.0}},
    {"min_tokens": 8, "ignore_eos": False},
]


@pytest.mark.parametrize("params", WAITING, ids=lambda params: next(iter(params)))
def test_steps_that_need_the_host_wait_for_it(new_llm: Callable[..., LLM], params: dict[str, Any]):
    llm = new_llm(mode=Mode.OVERLAPPED)
    llm.generate([[1, 2, 0], [2, 0]], [GREEDY, replace(GREEDY, **params)])
    assert runner_of(llm.engine).num_ahead == 0
    llm.generate([[1, 2, 0], [2, 0]], GREEDY)
    assert runner_of(llm.engine).num_ahead == 6


def test_rows_of_nan_and_wide_nuclei_are_computed_again(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    prompts = [[index % 3, index] for index in range(4)]
    params = [
        SamplingParams(max_tokens=9, seed=index, ignore_eos=True, top_p=0.9) for index in range(4)
    ]
    usual = essence(new_llm().generate(prompts, params))
    middle = usual[2][1][0].token_ids[4]
    found = []
    for mode, nucleus in [
        (Mode.REPEATABLE, 1024),
        (Mode.OVERLAPPED, 1024),
        (Mode.OVERLAPPED, 3),
    ]:
        look_at(monkeypatch, nucleus)
        llm = new_llm(mode=mode)
        assert essence(llm.generate(prompts, params)) == usual
        runner_of(
            llm.engine
        ).bad = middle  # it is drawn and read by the step that was launched ahead
        llm.engine.cache.reset()
        found.append(essence(llm.generate(prompts, params, on_error="return")))
        check_clean(llm)
        assert (runner_of(llm.engine).num_ahead > 0) == (mode is Mode.OVERLAPPED)
    assert found[0] == found[1] == found[2]
    assert "NaN" in str(found[0][2][1][0].error)


def test_what_was_launched_on_a_wrong_token_is_forgotten(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    """Of one request, so that steps with a nucleus that is wide enough follow others without."""
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, top_p=0.9)
    usual = essence(new_llm().generate([[1, 2]], params))
    for width in (36, 38, 40):  # of 61 tokens, enough in about half of the steps
        look_at(monkeypatch, width)
        assert essence(new_llm(mode=Mode.OVERLAPPED).generate([[1, 2]], params)) == usual, width


@pytest.mark.parametrize("failing", ["once", "always"])
def test_a_step_that_raises_fails_the_same_requests(new_llm: Callable[..., LLM], failing: str):
    prompts = [[1, 2, index] for index in range(4)]
    found = []
    for mode in (Mode.REPEATABLE, Mode.OVERLAPPED):
        llm = new_llm(mode=mode)
        runner = runner_of(llm.engine)

        def fails(slices: Sequence[SequenceSlice], runner: FakeRunner = runner) -> None:
            if failing == "once":
                if len(runner.sizes) == 4:
                    raise RuntimeError("sometimes")
            elif any(part.start == 7 and part.block_ids[0][0] in (0, 1) for part in slices):
                raise RuntimeError("always")

        runner.fails = fails
        found.append(essence(llm.generate(prompts, GREEDY, on_error="return")))
        check_clean(llm)
        assert (runner.num_ahead > 0) == (mode is Mode.OVERLAPPED)
    assert found[0] == found[1]
    errors = [one[1][0].error for one in found[0]]
    assert any(errors) == (failing == "always")


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_exception_at_any_line_leaves_the_engine_as_if_the_call_had_not_been_made(
    new_llm: Callable[..., LLM], num_microbatches: int
):
    limits: dict[str, Any] = {
        "num_microbatches": num_microbatches,
        "num_blocks": 12,
        "budget": 12,
        "max_model_len": 40,
        "mode": Mode.OVERLAPPED,
    }
    rng = random.Random(1)
    prompts = [prompt_of(rng) for _ in range(3)]
    params = [plain_params(rng) for _ in prompts]
    of_stream = SamplingParams(max_tokens=12, seed=4)
    expected = essence(new_llm(**limits).generate(prompts, params))
    (whole,) = essence(new_llm(**limits).generate([[1, 2, 1, 2, 0]], of_stream))
    with Interrupter() as counter:
        new_llm(**limits).generate(prompts, params)
    for at in random.Random(2).sample(range(1, counter.count + 1), 24):
        llm = new_llm(**limits)
        stream = llm.stream([1, 2, 1, 2, 0], of_stream)
        outputs = [next(stream), next(stream), next(stream)]
        try:
            with Interrupter(at):
                llm.generate(prompts, params)
        except Interrupt:
            pass
        outputs += stream
        assert essence([outputs[-1]]) == [whole], at
        assert essence(llm.generate(prompts, params)) == expected, at
        check_clean(llm)


def test_a_step_under_way_is_forgotten_by_a_repair(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):
    """An exception once the next step is confirmed: its blocks are those of before the repair."""
    prompts = [[1, 2, 0], [1, 2, 1, 2, 0]]
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)
    usual = [output.outputs[0].token_ids for output in new_llm().generate(prompts, params)]

    def interrupt(entries: object) -> Any:
        raise Interrupt

    cases = [*itertools.product(range(2, 8), [1]), *itertools.product(range(2, 16), [2])]
    for interrupted, num_microbatches in cases:
        engine = new_llm(mode=Mode.OVERLAPPED, num_microbatches=num_microbatches).engine
        for index, prompt in enumerate(prompts):
            engine.add(str(index), engine.accept(prompt, params), params)
        token_ids: list[list[int]] = [[], []]
        step = 0
        while engine.has_unfinished:
            with monkeypatch.context() as patched:
                if step == interrupted:
                    patched.setattr(engine, "_report", interrupt)
                with suppress(Interrupt):
                    for delta in engine.step():
                        token_ids[int(delta.request_id)] += delta.outputs[0].token_ids
            step += 1
        assert token_ids == usual, (interrupted, num_microbatches)


def test_draws_that_are_not_waited_for_are_those_of_sample(monkeypatch: pytest.MonkeyPatch):
    look_at(monkeypatch, 8)
    torch.manual_seed(0)
    logits = torch.randn(6, 3000)
    logits[4, 7] = torch.nan
    kinds = [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 40, "min_p": 0.01},
        {"top_p": 0.9999},
        {},
        {},
    ]
    params = [SamplingParams(**kind) for kind in kinds]
    rows = [
        sampler.SamplingRow(one, 5 + i, (1,), [3, 4], frozenset({EOS}))
        for i, one in enumerate(params)
    ]
    tokens, facts = sampler.draw(logits, [sampler.Draw(row.params, row.seed, 2) for row in rows])
    expected = sampler.sample(logits, rows)
    told, usable = facts.tolist()
    assert usable == [1, 0, 1, 0, 0, 1]
    assert [token for token, one in zip(told, usable, strict=True) if one] == [
        sampled.token_id for sampled, one in zip(expected, usable, strict=True) if one
    ]
    assert told == tokens.tolist()
    assert all(0 <= token < 3000 for token in told)


@pytest.mark.parametrize("captured", [True, False])
def test_the_demo_model_generates_the_same(captured: bool):
    """Recorded steps and launched ones take their tokens from the device; a request that ends early
    makes rows move.
    """
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=6 + 3 * i, ignore_eos=True)
        for i in range(6)
    ]
    found, ahead = [], []
    for mode in (Mode.REPEATABLE, Mode.OVERLAPPED):
        llm = LLM(
            "demo",
            kv_cache_dtype="fp8_e4m3",
            kv_cache_memory="2MiB",
            max_model_len=64,
            max_num_seqs=4,
        )
        # the host has nothing to gain on a CPU, which it computes with
        assert llm.engine.mode is not Mode.OVERLAPPED
        llm.engine.mode = mode
        runner = llm.engine.runner
        if not captured:
            llm.engine.runner = runner = replace(runner, captured=None)
        follow = llm.engine.scheduler.follow
        llm.engine.scheduler.follow = lambda step, follow=follow: (
            ahead.append(follow(step)) or ahead[-1]
        )  # type: ignore
        found.append(
            [
                one.outputs[0].token_ids
                for one in llm.generate([[5 + i, 9, 11] for i in range(6)], params)
            ]
        )
    assert found[0] == found[1]
    assert len([step for step in ahead if step is not None]) > 10
