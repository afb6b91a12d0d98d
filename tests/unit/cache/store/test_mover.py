"""Blocks between a pool and a store: nothing is stored that is not what its key says, nothing is
written into a block that was given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.unit.cache.store.test_folder import TOKENS, key_of, payload_of

from freight.cache.store import segment
from freight.cache.store.mover import Fetch, Mover, Offer, Record, WantedBlock
from freight.cache.store.pace import SHARE, Rates, ReadBudget
from freight.cache.store.segment import is_written
from freight.cache.store.tiers import StoreTiers, Tier

SIZE = 40


class FakePool:
    """A group of blocks whose copying can be held up."""

    payload_bytes = SIZE

    def __init__(self, num_blocks: int = 64) -> None:
        self.blocks = [bytes(SIZE)] * num_blocks
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def read(self, block: int) -> bytes:
        before = self.blocks[block]
        self.entered.set()
        assert self.gate.wait(10)
        return before

    def write(self, blocks: Sequence[int], payloads: Record) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self.blocks[block] = payload.tobytes()


class Setup:
    def __init__(self, root: Path, **options: int) -> None:
        self.pool, self.current = FakePool(), set(range(64))
        self.tiers = StoreTiers(root, 1 << 20, options.pop("memory", 0))
        self.mover = Mover(
            self.tiers,
            [self.pool],
            lambda offer: offer.block in self.current,
            options.pop("most", 64),
        )

    def offer(self, *numbers: int) -> None:
        for number in numbers:
            self.pool.blocks[number] = payload_of(number)
        self.mover.offer([Offer(key_of(number), 0, TOKENS, number, 1) for number in numbers])

    def fetch(self, *numbers: int, at: int = 32) -> Fetch:
        fetch = Fetch([WantedBlock(key_of(number), 0, TOKENS, at + number) for number in numbers])
        self.mover.fetch(fetch)
        return fetch

    def fetched(self, *numbers: int) -> Fetch:
        fetch = self.fetch(*numbers)
        wait_for(lambda: fetch.is_done)
        return fetch


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    made.tiers.open("space")
    yield made
    made.mover.close(1)


def test_there_and_back(setup: Setup) -> None:
    setup.offer(*range(10))
    setup.mover.flush(5)
    fetch = setup.fetched(*range(10))
    assert fetch.num_loaded == 10
    assert setup.pool.blocks[32:42] == [payload_of(number) for number in range(10)]
    assert setup.tiers.stats().stored == 10


def test_a_block_that_was_evicted_while_it_was_copied(setup: Setup) -> None:
    setup.pool.gate.clear()
    setup.offer(1, 2)
    assert setup.pool.entered.wait(10)
    setup.current.discard(1)
    setup.pool.gate.set()
    setup.mover.flush(5)
    assert not setup.tiers.contains(key_of(1), 0)
    assert setup.tiers.contains(key_of(2), 0)
    assert setup.tiers.stats().dropped == 1


def test_nothing_waits_for_a_slow_disk(tmp_path: Path) -> None:
    setup = Setup(tmp_path, most=5)
    setup.tiers.open("space")
    setup.pool.gate.clear()
    setup.offer(0)
    assert setup.pool.entered.wait(10)
    began = time.monotonic()
    setup.offer(*range(10))
    assert time.monotonic() - began < 1
    setup.pool.gate.set()
    setup.mover.flush(5)
    stats = setup.tiers.stats()
    assert (stats.stored, stats.dropped) == (6, 4)
    setup.mover.close(1)


def test_what_was_offered_before_the_store_is_open(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.offer(1, 2)
    time.sleep(0.05)
    assert setup.tiers.stats().stored == 0
    setup.tiers.open("space")
    setup.mover.opened()
    wait_for(lambda: setup.tiers.stats().stored == 2)
    setup.mover.close(1)


def test_closing_stores_what_was_offered(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.tiers.open("space")
    setup.offer(*range(20))
    setup.mover.close(5)
    setup.mover.close(5)
    other = Setup(tmp_path)
    other.tiers.open("space")
    assert other.fetched(*range(20)).num_loaded == 20
    other.mover.close(1)


def test_a_prefix_ends_at_what_is_missing_or_damaged(setup: Setup, tmp_path: Path) -> None:
    setup.offer(*range(6))
    setup.mover.flush(5)
    assert setup.fetched(0, 1, 9, 2).num_loaded == 2
    path = next(tmp_path.rglob("*.blocks"))
    content = bytearray(path.read_bytes())
    content[3 * (SIZE + len(TOKENS)) + 50] ^= 4
    path.write_bytes(content)
    assert setup.fetched(*range(6)).num_loaded == 3
    stats = setup.tiers.stats()
    assert (stats.corrupt, stats.misses) == (1, 2)


def test_a_fetch_that_is_given_up_writes_nothing_more(setup: Setup) -> None:
    setup.offer(*range(10))
    setup.mover.flush(5)
    setup.mover.budget.step(decodes=True)  # nothing saved up: the thread waits
    fetch = setup.fetch(*range(10))
    time.sleep(0.05)
    assert not fetch.is_done
    fetch.cancel()
    setup.mover.budget.step(decodes=False)
    wait_for(lambda: fetch.is_done)
    assert fetch.num_loaded == 0
    assert setup.pool.blocks[32:42] == [bytes(SIZE)] * 10


def test_a_failing_pool_stops_no_thread(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.offer(1)
    setup.mover.flush(5)

    def fail(*_: object) -> bytes:
        raise ValueError("no")

    monkeypatch.setattr(setup.pool, "read", fail)
    monkeypatch.setattr(setup.pool, "write", fail)
    setup.offer(2)
    setup.mover.flush(5)
    assert setup.fetched(1).num_loaded == 0
    monkeypatch.undo()
    setup.offer(3)
    setup.mover.flush(5)
    assert setup.fetched(1, 3).num_loaded == 2


def test_reading_takes_its_share_of_steps_that_decode() -> None:
    now = [0.0]
    budget = ReadBudget(lambda: now[0])
    budget.wait(lambda: True)  # nothing is decoded
    budget.spend(100)
    budget.step(decodes=True)
    assert budget.is_limited
    spent = 0.0
    for _ in range(1000):
        now[0] += 0.05
        budget.step(decodes=True)
        asked = Mock(return_value=False)
        budget.wait(asked)
        if not asked.called:  # there was something to spend
            budget.spend(0.01)
            spent += 0.01
    assert spent == pytest.approx(SHARE * now[0], rel=0.1)
    budget.step(decodes=False)
    budget.wait(lambda: True)


def test_what_is_slower_than_computing_is_computed() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0])
    disk = {Tier.DISK: 1000}
    assert rates.is_worth(disk, 10, is_limited=False)  # nothing was measured
    rates.note_computed(100, 1.0)
    assert rates.is_worth(disk, 10, is_limited=False)
    rates.note_read(Tier.DISK, 1000, 0.05)  # 0.05 s in place of 0.1
    assert rates.is_worth(disk, 10, is_limited=False)
    assert not rates.is_worth(disk, 10, is_limited=True)
    assert rates.is_worth({Tier.MEMORY: 1000}, 10, is_limited=True)
    rates.note_read(Tier.DISK, 1000, 1.0)
    assert not rates.is_worth(disk, 10, is_limited=False)
    now[0] += 61
    assert rates.is_worth(disk, 10, is_limited=False)  # it may be faster by now


def test_records_are_not_copied_into_other_blocks(setup: Setup) -> None:
    """Two fetches of two requests, in any order of threads."""
    setup.offer(*range(8))
    setup.mover.flush(5)
    first, second = setup.fetch(0, 1, 2), setup.fetch(5, 4)
    wait_for(lambda: first.is_done and second.is_done)
    expected = [bytes(SIZE)] * 6
    for number in (0, 1, 2, 4, 5):
        expected[number] = payload_of(number)
    assert setup.pool.blocks[32:38] == expected


def test_a_hanging_disk_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends after its time, and a second time at once."""
    setup, hangs, goes_on = Setup(tmp_path), threading.Event(), threading.Event()

    def hang(file: int) -> None:
        hangs.set()
        goes_on.wait(20)

    setup.tiers.open("space")
    monkeypatch.setattr(segment, "_sync", hang)
    setup.offer(1)
    assert hangs.wait(10)
    setup.offer(2, 3)
    began = time.monotonic()
    setup.mover.close(0.1)
    first = time.monotonic()
    setup.mover.close(5)
    assert first - began < 2.5
    assert time.monotonic() - first < 0.5
    goes_on.set()
    for thread in setup.mover._threads:
        thread.join(10)
    assert not any(is_written(path) for path in tmp_path.rglob("*.index"))
