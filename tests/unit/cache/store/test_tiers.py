"""The tiers of a store: memory before disk, and everything wrong is a miss."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.cache.store.test_folder import TOKENS, block, key_of, payload_of

from freight.cache.store.memory import MemoryTier
from freight.cache.store.tiers import StoreTiers, Tier


def read(tiers: StoreTiers, number: int) -> tuple[Tier | None, bytes]:
    record = bytearray(len(TOKENS) + 40)
    tier = tiers.read_into(key_of(number), 0, TOKENS, memoryview(record))
    return tier, bytes(record[len(TOKENS) :])


def opened(
    root: Path, memory: int = 1 << 20, clock: Callable[[], float] = time.monotonic
) -> StoreTiers:
    tiers = StoreTiers(root, 1 << 20, memory, clock)
    tiers.open("space")
    return tiers


def test_memory_before_disk(tmp_path: Path) -> None:
    tiers = opened(tmp_path)
    tiers.write([block(1)])
    assert tiers.tier_of(key_of(1), 0) is Tier.MEMORY
    assert read(tiers, 1) == (Tier.MEMORY, payload_of(1))
    tiers.close()
    again = opened(tmp_path)
    assert again.tier_of(key_of(1), 0) is Tier.DISK
    assert read(again, 1) == (Tier.DISK, payload_of(1))
    assert read(again, 1) == (Tier.MEMORY, payload_of(1))
    stats = again.stats()
    assert (stats.disk_hits, stats.memory_hits, stats.misses) == (1, 1, 0)
    assert stats.memory_bytes == len(TOKENS) + 40
    assert stats.disk_bytes > stats.memory_bytes


def test_nothing_before_it_is_open(tmp_path: Path) -> None:
    opened(tmp_path).write([block(1)])
    tiers = StoreTiers(tmp_path, 1 << 20, 1 << 20)
    assert not tiers.contains(key_of(1), 0)
    tiers.write([block(2)])
    assert tiers.stats().dropped == 1
    tiers.open("space")
    assert tiers.contains(key_of(1), 0)
    assert not tiers.contains(key_of(2), 0)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_damage_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path).write([block(1), block(2), block(3)])
    path = next(tmp_path.rglob("*.blocks"))
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    content[110] ^= 1
    path.write_bytes(content)
    tiers = opened(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert [read(tiers, number)[0] for number in (1, 2, 3)] == [None, None, Tier.DISK]
    assert not tiers.contains(key_of(1), 0)
    assert (tiers.stats().corrupt, tiers.stats().misses) == (2, 2)
    assert warnings_of(caplog) == [f"KV store: a block in {tmp_path} is damaged; it is computed"]


def test_a_vanished_folder_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    tiers = StoreTiers(tmp_path / "store", 1 << 20, 0, lambda: now[0])
    tiers.open("space")
    tiers.write([block(1)])
    tiers.close()
    tiers = StoreTiers(tmp_path / "store", 1 << 20, 0, lambda: now[0])
    tiers.open("space")
    shutil.rmtree(tmp_path / "store")
    with caplog.at_level(logging.WARNING):
        assert read(tiers, 1)[0] is None
        tiers.write([block(2)])
        tiers.write([block(3)])  # it rests
        tiers.refresh()
    stats = tiers.stats()
    assert (stats.misses, stats.dropped, stats.errors) == (1, 2, 2)
    assert len(warnings_of(caplog)) == 2
    now[0] += 60  # longer than it rests
    (tmp_path / "store" / "space").mkdir(parents=True, mode=0o700)
    tiers.write([block(4)])
    assert tiers.stats().stored == 1


def test_a_folder_that_somebody_else_made_again_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As /tmp/store, that was removed because nobody used it for long."""
    root, other = tmp_path / "store", tmp_path / "other"
    now = [0.0]
    tiers = opened(root, memory=0, clock=lambda: now[0])
    theirs = opened(other)
    tiers.write([block(1)])
    theirs.write([block(2)])
    theirs.close()
    shutil.rmtree(root)
    other.rename(root)
    root.chmod(0o777)
    now[0] += 60  # longer than between two looks
    tiers.refresh()
    assert read(tiers, 2)[0] is None
    tiers.write([block(3)])
    assert tiers.stats().dropped == 1
    for message in warnings_of(caplog):
        assert "others may write into it" in message
    assert len(warnings_of(caplog)) == 2
    root.chmod(0o700)
    now[0] += 60  # longer than between two looks
    tiers.refresh()
    assert read(tiers, 2)[0] is Tier.DISK


def test_what_another_engine_deleted_is_a_miss_and_no_error(tmp_path: Path) -> None:
    opened(tmp_path).write([block(1)])
    tiers = opened(tmp_path)
    for path in (*tmp_path.rglob("*.index"), *tmp_path.rglob("*.blocks")):
        path.unlink()
    assert read(tiers, 1)[0] is None
    assert (tiers.stats().misses, tiers.stats().errors) == (1, 0)


def test_a_folder_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tiers = StoreTiers(tmp_path / "file", 1 << 20, 0)
    tiers.open("space")
    assert not tiers.is_open
    assert tiers.stats().errors == 1


def test_the_memory_tier_forgets_what_was_used_longest_ago() -> None:
    tier = MemoryTier(100)
    for number in range(4):
        tier.put(key_of(number), 0, TOKENS)
    assert len(tier) == 3
    assert tier.get(key_of(0), 0, TOKENS) is None
    assert tier.get(key_of(1), 0, TOKENS) == TOKENS
    tier.put(key_of(4), 0, TOKENS)
    assert not tier.contains(key_of(2), 0)
    assert tier.contains(key_of(1), 0)
    assert tier.get(key_of(1), 0, b"other") is None
    tier.put(key_of(5), 0, bytes(101))
    assert not tier.contains(key_of(5), 0)
    tier.put(key_of(1), 0, b"short")
    assert tier.num_bytes == 32 + 32 + 5
    tier.forget(key_of(1), 0)
    assert tier.num_bytes == 64
