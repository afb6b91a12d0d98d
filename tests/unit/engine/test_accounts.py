"""What an engine says of itself: the times of a request, and totals that only rise and count
nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.shares import examples
from tests.unit.engine.fakes import new_engine
from tests.unit.engine.test_interrupted import Interrupt, Interrupter

from freight import SamplingParams
from freight.cache.groups import Pages
from freight.cache.manager import CacheManager
from freight.cache.pool import KVPool
from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.engine.engine import SECONDS_BETWEEN_READS, Engine
from freight.engine.request import Request
from freight.fp8.formats import Format
from freight.outputs import EngineStats, RequestTimes

TOTALS = ("prefix_queries", "prefix_hits", "prompt", "generated", "preemptions", "failed")


def add(engine: Engine, name: str, prompt: Sequence[int], **params: Any) -> None:
    given: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0, "detokenize": False, **params}
    sampling = SamplingParams(**given)
    engine.add(name, engine.accept(prompt, sampling), sampling)


def clock_of(engine: Engine) -> Any:
    return engine.clock


# -----------------------------------------------------------------------------------------------------------
# times


def test_the_last_delta_says_how_long_a_request_waited_and_was_computed() -> None:
    engine = new_engine(max_num_seqs=1, budget=4)
    clock = clock_of(engine)
    add(engine, "first", [1] * 6, max_tokens=3)
    add(engine, "second", [2], max_tokens=1)
    last = {}
    for clock.now in (
        1.0,
        3.0,
        6.0,
        10.0,
        15.0,
    ):  # first: half of the prompt, the rest and a token, two tokens
        for delta in engine.step():
            assert (delta.times is None) == (not delta.finished)
            last[delta.request_id] = delta.times
    assert last == {"first": RequestTimes(1.0, 2.0, 7.0), "second": RequestTimes(15.0, 0.0, 0.0)}


@pytest.mark.parametrize(
    ("steps", "times"),
    [
        (0, RequestTimes(9.0, 0.0, 0.0)),  # waited only
        (1, RequestTimes(1.0, 8.0, 0.0)),  # half of its prompt was computed
        (3, RequestTimes(1.0, 1.0, 7.0)),
    ],
)
def test_an_aborted_request_has_times(steps: int, times: RequestTimes) -> None:
    engine = new_engine(budget=4)
    clock = clock_of(engine)
    add(engine, "a", [1] * 6, max_tokens=20)
    for clock.now in range(1, steps + 1):
        engine.step()
    clock.now = 9.0
    assert engine.times("a") == times
    engine.abort("a")
    clock.now = 20.0
    assert engine.times("a") == times


def test_requests_that_time_out_or_fail_have_times() -> None:
    engine = new_engine(max_num_seqs=1)
    clock, runner = clock_of(engine), engine.runner
    runner.bad = 59  # type: ignore[attr-defined]
    add(engine, "late", [1, 2], max_tokens=20, timeout_s=5.0)
    add(engine, "bad", [59], max_tokens=20)
    clock.now = 1.0
    engine.step()
    clock.now = 5.0
    late, bad = engine.step()
    assert (late.request_id, late.times) == ("late", RequestTimes(1.0, 0.0, 4.0))
    assert (bad.outputs[0].finish_reason, bad.times) == ("error", RequestTimes(5.0, 0.0, 0.0))
    assert engine.stats().failed == 1


def test_times_tell_how_often_a_request_lost_its_blocks() -> None:
    engine = new_engine(num_blocks=6, budget=16, max_model_len=24)
    for name in "abc":
        add(engine, name, [ord(name) % 3] * 5, max_tokens=12)
    lost = 0
    while engine.has_unfinished:
        lost += sum(delta.times.preemptions for delta in engine.step() if delta.times)
    assert lost == engine.stats().preemptions > 0


# ----------------------------------------------------------------------------------------------------------
# totals


def test_tokens_are_counted_once_and_prefixes_where_they_are_looked_up() -> None:
    engine = new_engine()
    prompt = [1, 2] * 4  # two blocks; the last token is always computed, so one is a hit
    for name, more in (("cold", {}), ("warm", {"n": 2}), ("scored", {"prompt_logprobs": 0})):
        add(engine, name, prompt, max_tokens=3, **more)
        while engine.has_unfinished:
            engine.step()
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (3 * 8, 2 * 4)
    assert (stats.prompt, stats.generated) == (4 * 8, 4 * 3)
    assert (stats.running, stats.waiting, stats.held_tokens, stats.capacity_tokens) == (0, 0, 0, 96)
    assert stats.reusable_tokens > 0


def test_the_counters_of_the_cache_are_read_at_most_once_a_second() -> None:
    engine = new_engine()
    clock = clock_of(engine)
    reads = iter([(1, 2), (3, 4)])
    engine.runner.pool.counters = lambda: next(reads)  # type: ignore[method-assign]
    seen = []
    for clock.now in (
        0.0,
        0.9 * SECONDS_BETWEEN_READS,
        SECONDS_BETWEEN_READS,
        1.9 * SECONDS_BETWEEN_READS,
    ):
        stats = engine.stats()
        seen.append((stats.nans, stats.clipped))
    assert seen == [(1, 2), (1, 2), (3, 4), (3, 4)]


def test_use_of_several_groups_is_that_of_the_fullest_as_its_share_of_the_capacity() -> None:
    whole, window = Pages((0,), 1, None, 4), Pages((1,), 1, 64, 4)
    cache = CacheManager((whole, window), (100, 20), 4, step_tokens=16)
    layers = (
        LayerKVSpec(Format.BFLOAT16, None, 1, 1, 1),
        LayerKVSpec(Format.BFLOAT16, None, 1, 1, 1, window=64),
    )
    assert (
        cache.capacity_tokens
        == KVPool((), KVCacheSpec(layers, 4), (100, 20)).capacity_tokens
        == 400
    )
    admitted = cache.admit([], 40, reserve=0)
    assert admitted is not None
    held = cache.grow(admitted[0], 40)
    assert held is not None
    assert cache.usage() == (200, 0)  # 10 of the window's 20 blocks; of the others 10 of 100
    cache.release(held)
    assert cache.usage() == (0, 0)
    assert CacheManager((window,), (20,), 4, step_tokens=16).capacity_tokens == 80


class Accounts(RuleBasedStateMachine):
    """Random schedules on a small cache, with interrupts at random lines of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = new_engine(num_blocks=10, budget=8, max_model_len=40)
        self.clock = clock_of(self.engine)
        self.added: dict[str, float] = {}
        self.sizes: Counter[str] = Counter()  # of everything that was ever added
        self.requests: list[Request] = []
        self.before = self.engine.stats()
        self.interrupted = False
        self.drawn = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=16),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 2),
        scored=st.booleans(),
        timeout_s=st.none() | st.floats(0.5, 9.0),
    )
    def add(
        self, prompt: list[int], max_tokens: int, n: int, scored: bool, timeout_s: float | None
    ) -> None:
        name = str(len(self.added))
        add(
            self.engine,
            name,
            prompt,
            max_tokens=max_tokens,
            n=n,
            prompt_logprobs=0 if scored else None,
            timeout_s=timeout_s,
        )
        self.added[name] = self.clock.now
        self.sizes["prompt"] += n * len(prompt)
        self.sizes["looked_up"] += (n - scored) * len(prompt)  # only the first completion is scored
        self.requests += [one.request for one in self.engine.groups[name].completions]

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def take(self) -> None:
        for delta in self.engine.step():
            self.drawn += sum(len(one.token_ids) for one in delta.outputs)
            assert (delta.times is None) == (not delta.finished)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take()
            self.clock.now += 0.25

    @rule(at=st.integers(1, 400))
    def interrupted_step(self, at: int) -> None:
        self.interrupted = True
        with suppress(Interrupt), Interrupter(at):
            self.engine.step()
        self.clock.now += 0.25

    @rule(data=st.data(), forget=st.booleans(), at=st.none() | st.integers(1, 40))
    def leave(self, data: st.DataObject, forget: bool, at: int | None) -> None:
        if not self.engine.groups:
            return
        name = data.draw(st.sampled_from(sorted(self.engine.groups)))
        self.interrupted |= at is not None
        with suppress(Interrupt), Interrupter(at):
            (self.engine.release if forget else self.engine.abort)(name)

    @invariant()
    def totals_hold(self) -> None:
        stats, before = self.engine.stats(), self.before
        assert min(value for value in asdict(stats).values() if isinstance(value, int)) >= 0
        assert stats.held_tokens + stats.reusable_tokens <= stats.capacity_tokens
        assert stats.prefix_hits <= stats.prefix_queries <= self.sizes["looked_up"]
        assert stats.prompt <= self.sizes["prompt"]
        for name in TOTALS:
            assert getattr(stats, name) >= getattr(before, name), name
        drawn = sum(len(request.output_token_ids) for request in self.requests)
        lost = sum(request.num_preemptions for request in self.requests)
        assert stats.generated <= drawn
        assert stats.preemptions <= lost
        if not self.interrupted:
            assert stats.generated == drawn == self.drawn
            assert stats.preemptions == lost
            assert stats.prefix_hits == sum(request.num_cached_tokens for request in self.requests)
        self.before = stats

    @invariant()
    def times_hold(self) -> None:
        for name, group in self.engine.groups.items():
            times = self.engine.times(name)
            assert min(times.queued, times.prefill, times.decode) >= 0
            lifetime = self.clock.now - self.added[name]
            assert times.queued + times.prefill + times.decode <= lifetime + 1e-9
            if not group.finished:
                assert times.queued + times.prefill + times.decode == pytest.approx(lifetime)

    def teardown(self) -> None:
        while self.engine.has_unfinished:
            self.take()
        self.totals_hold()
        self.times_hold()
        assert self.before.running == self.before.waiting == self.before.held_tokens == 0


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(
    max_examples=examples(30), stateful_step_count=20, suppress_health_check=list(HealthCheck)
)


def test_stats_are_plain_numbers() -> None:
    stats = new_engine().stats()
    assert stats.store is None
    numbers = asdict(stats)
    for name in ("store", "running_adapters", "waiting_adapters"):
        numbers.pop(name)
    counts = [*numbers.pop("drafted_by").values(), *numbers.pop("accepted_by").values()]
    assert all(type(value) is int for value in [*numbers.values(), *counts])
    assert isinstance(stats, EngineStats)
