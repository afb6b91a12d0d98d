"""What a cache tells of its index is enough to have the same index elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.router_index import RouterIndex
from tests.unit.engine.conftest import Rig

from freight.cache.blocks import BlockAllocator
from freight.cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvents,
    SequenceContent,
    hash_of,
)
from freight.outputs import FinishReason
from freight.serve.observe.kv_events import event_of


def indexed(allocator: BlockAllocator) -> set[int]:
    return set(map(hash_of, allocator._index))


def told(events: CacheEvents, index: RouterIndex) -> None:
    if (changed := events.take()) is not None:
        assert not changed.dropped
        index.apply(map(event_of, changed.changes))


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of which many begin alike."""
    choose = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        beginning: list[int] = []
        if prompts and choose.random() < 0.7:
            beginning = choose.choice(prompts)[: choose.randrange(30)]
        prompts.append([*beginning, *(choose.randrange(9) for _ in range(choose.randrange(1, 30)))])
    return prompts


@pytest.mark.parametrize("windows", [(None,), (6, None), (None, 5)])
def test_an_index_made_of_events_alone_is_the_engines(windows: Sequence[int | None]) -> None:
    """With evictions, preemptions, salts, completions that fail, and engines that start over."""
    rig = Rig(num_blocks=24, windows=windows, max_num_seqs=3)
    events = CacheEvents()
    rig.cache.collect_events(events)
    allocator = rig.cache.allocators[windows.index(None)]
    index = RouterIndex()
    choose = random.Random(3)
    waiting = random_prompts(7, 250)
    rebuilt = 0
    while waiting or rig.scheduler.has_unfinished:
        while waiting and rig.scheduler.num_waiting + rig.scheduler.num_running < 4:
            salt = choose.choice([None, None, "a", "b"])
            rig.add(str(len(waiting)), waiting.pop(), max_tokens=8, cache_salt=salt)
        step = rig.schedule()
        if step.chunks and choose.random() < 0.02:
            rig.scheduler.fail(step.chunks[0].request.request_id, "it failed")
        if choose.random() < 0.01:
            rig.scheduler.rebuild(rig.requests.values())
            rebuilt += 1
        else:
            rig.scheduler.apply(step, rig.model(step))
        told(events, index)
        assert set(index.blocks) == indexed(allocator)
    assert index.num_cleared == rebuilt > 0
    assert index.num_changed > 1000
    assert {str(request.finish_reason) for request in rig.requests.values()} >= {
        FinishReason.LENGTH,
        FinishReason.ERROR,
    }


def content(salt: str | None = None, adapter: str | None = None) -> SequenceContent:
    return SequenceContent(lambda start, stop: range(start, stop), salt, adapter)


def test_consecutive_blocks_are_one_event() -> None:
    events = CacheEvents()
    keys = [bytes([number]) * 32 for number in range(5)]
    plain = content()
    events.stored(keys[0], None, [1, 2], plain)
    events.stored(keys[1], keys[0], [3, 4], plain)
    events.stored(keys[2], None, [5, 6], plain)
    events.stored(keys[3], keys[2], [7, 8], content("salt"))
    events.removed(keys[0])
    events.removed(keys[2])
    events.stored(keys[0], None, [1, 2], content(adapter="a"))
    taken = events.take()
    assert taken is not None
    names = list(map(hash_of, keys))
    assert taken.changes == [
        BlocksStored(names[:2], None, [1, 2, 3, 4]),
        BlocksStored([names[2]], None, [5, 6]),
        BlocksStored([names[3]], names[2], [7, 8], "salt"),
        BlocksRemoved([names[0], names[2]]),
        BlocksStored([names[0]], None, [1, 2], None, "a"),
    ]
    assert events.take() is None


def test_too_many_changes_are_counted_and_leave_no_hole() -> None:
    events = CacheEvents(most=3)
    for number in range(5):
        events.removed(bytes([number]) * 32)
    taken = events.take()
    assert taken is not None
    assert taken.changes == [BlocksRemoved([hash_of(bytes([number]) * 32) for number in range(3)])]
    assert taken.dropped == 2
    events.removed(bytes(32))
    assert (again := events.take()) is not None
    assert again.dropped == 0
    for _ in range(5):
        events.removed(bytes(32))
    events.cleared()  # what it ends needs no telling
    assert (last := events.take()) is not None
    assert (last.changes, last.dropped) == ([CacheCleared()], 0)


def test_nothing_is_collected_unless_asked_for() -> None:
    rig = Rig(num_blocks=24)
    rig.add("a", list(range(20)), max_tokens=4)
    while rig.scheduler.has_unfinished:
        step = rig.schedule()
        rig.scheduler.apply(step, rig.model(step))
    assert rig.allocator.events is rig.cache.events is None
    assert indexed(rig.allocator)
