"""A scheduler over a store: wherever blocks come from, tokens are what they are without it.

The model is the rig's fake one, so a block that is stored before it is computed, read into a wrong
place, or overwritten while somebody reads it changes a token. The threads of the store run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.engine.conftest import FakeModel, Rig

from freight.cache import stored as stored_module
from freight.cache.store.mover import Record
from freight.cache.store.tiers import StoreTiers
from freight.cache.stored import StoredPrefixes
from freight.engine.request import RequestState
from freight.engine.step import Step

DIGEST = 8
WINDOWS = [(None,), (None, 6), (8,), (None, 5, 70)]


class FakeBytes:
    """The slots of a group of the fake model, as bytes."""

    def __init__(self, model: FakeModel, group: int) -> None:
        self.slots, self.size = model.slots[group], model.block_size
        self.payload_bytes = self.size * DIGEST

    def read(self, block: int) -> bytes:
        slots = range(block * self.size, (block + 1) * self.size)
        return b"".join(self.slots.get(slot, bytes(DIGEST)) for slot in slots)

    def write(self, blocks: Sequence[int], payloads: Record) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            content = payload.tobytes()
            for index in range(self.size):
                part = content[index * DIGEST : (index + 1) * DIGEST]
                self.slots[block * self.size + index] = part


class StoreRig(Rig):
    """A rig with a store in `folder`."""

    def __init__(
        self, folder: Path, *, memory: int = 0, salted: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.tiers = StoreTiers(folder, 1 << 24, memory)
        self.tiers.open("space")
        groups = [FakeBytes(self.model, group) for group in range(len(self.windows))]
        self.store = StoredPrefixes(self.tiers, self.cache, groups, salted)
        self.scheduler._fetches.store = self.store
        self.schedule_once = self.scheduler.schedule
        self.scheduler.schedule = self._with_chunks  # type: ignore[method-assign]
        self.num_idle = 0

    def _with_chunks(self, max_tokens: int | None = None) -> Step:
        """A step with chunks, where there is one: what the engine's next steps would come to."""
        for _ in range(5000):
            step = self.schedule_once(max_tokens)
            if step.chunks or not self.scheduler.has_unfinished:
                return step
            self.num_idle += 1
            self.check_counts()
            self.store.step(decodes=False, idle=True)
        raise AssertionError("nothing comes, and nothing is computed")

    @property
    def num_found(self) -> int:
        return self.tiers.stats().tokens

    def close(self) -> None:
        self.store.close(5)


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "LEAST_TOKENS", 4)


@pytest.fixture
def new_store_rig(tmp_path: Path) -> Iterator[Callable[..., StoreRig]]:
    made: list[StoreRig] = []

    def make(**options: Any) -> StoreRig:
        made.append(StoreRig(tmp_path, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_restart_finds_what_was_computed(
    new_store_rig: Callable[..., StoreRig], windows: tuple[int | None, ...], memory: int
) -> None:
    prompt = list(range(41))
    first = new_store_rig(windows=windows, memory=memory)
    first.add("a", prompt, max_tokens=6)
    first.run()
    first.check_all_done()
    first.close()
    again = new_store_rig(windows=windows, memory=memory)
    request = again.add("a", prompt, max_tokens=6)
    again.run()
    again.check_all_done()
    assert request.num_cached_tokens == again.num_found == 40
    assert again.num_idle > 0


@pytest.mark.parametrize("windows", WINDOWS)
def test_an_eviction_loses_nothing(
    new_store_rig: Callable[..., StoreRig], windows: tuple[int | None, ...]
) -> None:
    rig = new_store_rig(windows=windows, num_blocks=[16, 40, 40][: len(windows)], max_num_seqs=1)
    prompts = [[number] * 33 for number in range(4)]
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            rig.add(f"{turn} {index}", prompt, max_tokens=3)
            rig.run()
            rig.store.mover.flush(5)
    rig.check_all_done()
    assert rig.num_found >= 3 * 32
    assert rig.tiers.stats().dropped == 0


def test_a_short_prefix_is_stored_once_it_was_hit(
    new_store_rig: Callable[..., StoreRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_module, "LEAST_TOKENS", 100)
    rig = new_store_rig()
    for name, tail in (("a", [1] * 9), ("b", [2] * 9), ("c", [3] * 9)):
        rig.add(name, [0] * 12 + tail, max_tokens=1)
        rig.run()
        rig.store.mover.flush(5)
        assert rig.tiers.stats().stored == (0 if name == "a" else 3)


@pytest.mark.parametrize("salted", [False, True])
def test_salted_requests(new_store_rig: Callable[..., StoreRig], salted: bool) -> None:
    for salt in ("mine", "mine", "other", None):
        rig = new_store_rig(salted=salted)
        request = rig.add("a", [5] * 30, max_tokens=1, cache_salt=salt)
        rig.run()
        rig.check_all_done()
        rig.close()
        assert request.num_cached_tokens == (28 if salted and rig.num_found else 0)
        if salt == "mine":
            assert rig.tiers.stats().stored == (0 if not salted or rig.num_found else 7)


def test_an_aborted_request_gives_its_fetch_up(new_store_rig: Callable[..., StoreRig]) -> None:
    first = new_store_rig()
    first.add("a", [1] * 41, max_tokens=1)
    first.run()
    first.close()
    rig = new_store_rig()
    rig.store.mover.budget.step(decodes=True)  # it may read nothing yet
    rig.add("a", [1] * 41, max_tokens=1)
    assert not rig.schedule_once().chunks
    assert rig.cache.num_held == 10
    rig.scheduler.abort("a")
    assert rig.cache.num_held == 0
    rig.add("b", [2] * 41, max_tokens=1)
    rig.run()
    rig.check_all_done()


def test_running_requests_go_first(new_store_rig: Callable[..., StoreRig]) -> None:
    """Blocks that come are given up before anybody is preempted; then the prefix is computed."""
    first = new_store_rig()
    first.add("a", [1] * 41, max_tokens=1)
    first.run()
    first.close()
    rig = new_store_rig(num_blocks=16)
    runner = rig.add("b", [2] * 15, max_tokens=40, ignore_eos=True)
    rig.step()
    rig.store.mover.budget.step(decodes=True)
    rig.add("a", [1] * 41, max_tokens=1)
    for _ in range(30):
        rig.step()
    assert rig.cache.num_held < 16
    assert runner.num_preemptions == 0
    rig.store.mover.budget.step(decodes=False)
    rig.run()
    rig.check_all_done()
    assert rig.num_preemptions == 0


def test_a_later_request_does_not_stand_in_the_way(new_store_rig: Callable[..., StoreRig]) -> None:
    """What is held for it is given up where an earlier one would not fit, and nothing runs."""
    first = new_store_rig()
    first.add("a", [1] * 41, max_tokens=1)
    first.run()
    first.close()
    rig = new_store_rig(num_blocks=16, max_num_seqs=1)
    rig.add("b", [2] * 30, max_tokens=30, ignore_eos=True)
    rig.add("a", [1] * 41, max_tokens=1)
    rig.store.mover.budget.step(decodes=True)
    for _ in range(3):
        rig.step()
    rig.scheduler.lose(rig.schedule())
    rig.store.mover.budget.step(decodes=False)
    rig.run()
    rig.check_all_done()


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 300))]
)
def test_whatever_happens(new_store_rig: Callable[..., StoreRig], seed: int) -> None:
    """Few blocks, shared prefixes, aborts, lost steps and rebuilds, over three engines in turn."""
    rng = random.Random(seed)
    windows = rng.choice(WINDOWS)
    blocks = rng.choice([20, 28, 60])
    prefixes = [[rng.randrange(9) for _ in range(rng.choice([8, 20, 33]))] for _ in range(3)]
    for life in range(3):
        rig = new_store_rig(
            windows=windows,
            num_blocks=[blocks, 40, 40][: len(windows)],
            max_num_seqs=rng.choice([1, 2, 6]),
            memory=rng.choice([0, 3000, 1 << 20]),
        )
        rig.add(f"{life} first", [*prefixes[0], 1], max_tokens=1)
        rig.run()
        assert (rig.num_found > 0) is (life > 0)
        for turn in range(60):
            if rng.random() < 0.3:
                prompt = rng.choice(prefixes) + [
                    rng.randrange(9) for _ in range(rng.randrange(1, 9))
                ]
                rig.add(f"{life} {turn}", prompt, max_tokens=rng.randrange(1, 20))
            waiting = [name for name, one in rig.requests.items() if not one.is_finished]
            if waiting and rng.random() < 0.04:
                rig.scheduler.abort(rng.choice(waiting))
            if rng.random() < 0.03:
                rig.scheduler.rebuild(rig.requests.values())
            if rig.scheduler.has_unfinished:
                rig.store.mover.budget.step(decodes=rng.random() < 0.5)
                rig.step()
            if rng.random() < 0.3:
                rig.store.mover.flush(5)
        rig.add(f"{life} last", [*prefixes[0], 2], max_tokens=1)
        rig.run()
        rig.check_all_done()
        assert all(one.state is RequestState.FINISHED for one in rig.requests.values())
        rig.close()
        assert rig.tiers.stats().corrupt == rig.tiers.stats().errors == 0


def stored(make: Callable[..., StoreRig], *prompts: list[int]) -> None:
    """Let an engine store prompts, and end."""
    rig = make()
    for index, prompt in enumerate(prompts):
        rig.add(str(index), prompt, max_tokens=1)
    rig.run()
    rig.close()


def test_one_that_waits_for_its_turn_holds_nobody_up(
    new_store_rig: Callable[..., StoreRig],
) -> None:
    """What `sibling` wants comes for `last`, whose blocks `large` lacks, which `last` is behind."""
    prefix = [1] * 17
    stored(new_store_rig, prefix + [3] * 24, [2] * 9)
    rig = new_store_rig(num_blocks=21, budget=100)
    rig.store.mover.budget.step(decodes=True)
    rig.add("leader", prefix, group="g", max_tokens=1)
    rig.add("sibling", prefix, group="g", index=1, max_tokens=1)
    disk, rig.tiers.disk = rig.tiers.disk, None
    rig.schedule_once()  # before the store is open, so the leader computes its prompt
    rig.tiers.disk = disk
    rig.add("large", [2] * 9 + [4] * 48, max_tokens=1)
    rig.add("last", prefix + [3] * 24, max_tokens=1)
    step = rig.schedule_once()
    assert [chunk.request.request_id for chunk in step.chunks] == ["leader"]
    assert rig.cache.num_held == 5 + 2 + 10
    rig.scheduler.fail("leader", "its step failed")
    rig.store.mover.budget.step(decodes=False)
    end = time.monotonic() + 10
    while rig.store.is_coming("last"):
        assert time.monotonic() < end
        time.sleep(0.001)
    rig.run()
    rig.check_all_done(failed={"leader"})


def test_a_disk_that_hangs_is_waited_for_once(
    new_store_rig: Callable[..., StoreRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(new_store_rig, [1] * 41, [2] * 41)
    rig, goes_on = new_store_rig(), threading.Event()
    read_into = rig.tiers.read_into

    def hangs(*args: Any) -> Any:
        assert goes_on.wait(20)
        return read_into(*args)

    monkeypatch.setattr(rig.tiers, "read_into", hangs)
    now = [0.0]
    monkeypatch.setattr(rig.store, "_clock", lambda: now[0])
    one = rig.add("one", [1] * 41, max_tokens=1)
    assert not rig.schedule_once().chunks
    now[0] = 60.0
    rig.run()
    other = rig.add("other", [2] * 41, max_tokens=1)
    assert rig.schedule_once().chunks  # it does not even begin
    rig.run()
    rig.check_all_done()
    assert one.num_cached_tokens == other.num_cached_tokens == 0
    goes_on.set()
    end = time.monotonic() + 10
    while not rig.store._late.is_done:  # type: ignore[union-attr]
        assert time.monotonic() < end
        time.sleep(0.001)
    rig.cache.reset()
    again = rig.add("again", [2] * 41, max_tokens=1)
    rig.run()
    assert again.num_cached_tokens == 40


def test_what_failed_is_found_no_more(new_store_rig: Callable[..., StoreRig]) -> None:
    """As in the pool: a prompt that is sent again is computed again."""
    stored(new_store_rig, [1] * 41)
    rig = new_store_rig()
    rig.add("a", [1] * 41, max_tokens=9)
    rig.step()
    assert rig.num_found == 40
    rig.scheduler.fail("a", "no finite logit")
    end = time.monotonic() + 10
    while len(rig.tiers.disk):  # type: ignore[arg-type]
        assert time.monotonic() < end
        time.sleep(0.001)
    again = rig.add("again", [1] * 41, max_tokens=1)
    rig.run()
    assert again.num_cached_tokens == 0


def test_a_refused_prompt_is_planned_again_once_there_is_room(
    new_store_rig: Callable[..., StoreRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of a long prompt takes milliseconds, and a refused one asks at every step."""
    stored(new_store_rig, [1] * 41, [2] * 8)
    rig = new_store_rig(num_blocks=20, budget=100)
    planned: list[int] = []
    plan = rig.store._plan

    def counted(sought: Any) -> Any:
        planned.append(sought.num_tokens)
        return plan(sought)

    monkeypatch.setattr(rig.store, "_plan", counted)
    rig.add("long", [3] * 20, max_tokens=40, ignore_eos=True)
    rig.add("short", [4] * 12, max_tokens=16, ignore_eos=True)
    rig.step()
    planned.clear()
    refused = rig.add("refused", [1] * 41, max_tokens=1)
    for _ in range(12):
        rig.step()
    assert refused.state is RequestState.WAITING
    assert planned == [41]
    while not rig.requests["short"].is_finished:
        rig.step()
    rig.step()
    assert len(planned) == 2  # looked at again, with the room that `short` left
    rig.run()
    rig.check_all_done()
    assert refused.num_cached_tokens == rig.num_found == 40
    assert len(planned) <= 4


def test_a_refusal_is_of_one_request(new_store_rig: Callable[..., StoreRig]) -> None:
    """Another one of the same name is looked up, and so is one after all blocks were given up."""
    stored(new_store_rig, [1] * 41)
    rig = new_store_rig(num_blocks=20, budget=100)
    for end in ("abort", "rebuild"):
        rig.add(f"runs {end}", [3] * 50, max_tokens=8, ignore_eos=True)
        rig.step()
        rig.add(end, [1] * 41, max_tokens=1)
        rig.step()
        assert rig.store._refused is not None
        if end == "abort":
            rig.scheduler.abort(end)
        else:
            rig.scheduler.rebuild(rig.requests.values())
        assert rig.store._refused is None
        rig.run()
    rig.check_all_done()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked")
def test_a_fork_goes_on_without_a_store(new_store_rig: Callable[..., StoreRig]) -> None:
    """Its threads are its parent's: it computes what comes, and waits for nobody."""
    stored(new_store_rig, [1] * 41)
    rig = new_store_rig()
    rig.store.mover.budget.step(decodes=True)  # it may read nothing yet
    rig.add("a", [1] * 41, max_tokens=2)
    assert not rig.schedule_once().chunks
    with rig.store._coming["a"].fetch.lock, rig.store.mover._changed:  # as its threads may
        child = os.fork()
    if child == 0:
        status = 1
        try:
            rig.run()
            rig.add("b", [1] * 41, max_tokens=1)
            rig.run()
            rig.check_all_done()
            rig.store.close(60)
            assert rig.num_found == 0
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended[1] == 0
    rig.store.mover.budget.step(decodes=False)
    rig.run()
    rig.check_all_done()
    assert rig.num_found == 40
