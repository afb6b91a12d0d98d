"""What the index of a cache gains and loses, as routers hear of it. Imports no torch.

A block is named by the first 8 bytes of its key (cache/prefix.py), as an integer: equal names mean
equal tokens from position 0 on, in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_CHANGED = 1 << 16  # blocks between two calls of `take`; further changes are dropped


class SequenceContent(NamedTuple):
    """What the keys of a sequence are made of.

    tokens   those at positions start … stop - 1
    salt     its cache salt, if it has one
    adapter  the name of its adapter, if it has one
    """

    tokens: Callable[[int, int], Sequence[int]]
    salt: str | None = None
    adapter: str | None = None


@dataclass(slots=True)
class BlocksStored:
    """Consecutive blocks of one sequence that a later request may reuse from now on.

    parent     the block before the first; None: there is none
    token_ids  those of all these blocks, the same number in each
    salt, adapter  of the sequence
    """

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    salt: str | None = None
    adapter: str | None = None


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks that no request can reuse any more."""

    hashes: list[int]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks are gone."""


CacheChange = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Changes of the index, in order. `dropped` more came after them, and are not told."""

    changes: Sequence[CacheChange]
    dropped: int = 0


def hash_of(key: bytes) -> int:
    """Return the name of the block with a prefix key: 64 bits."""
    return int.from_bytes(key[:8], "big")


class CacheEvents:
    """Collects the changes of the index of one group of the cache."""

    def __init__(self, most: int = MOST_CHANGED) -> None:
        """most: changed blocks that are held until they are taken; the rest is counted alone."""
        self._most = most
        self._changes: list[CacheChange] = []
        self._num_changed = 0
        self._dropped = 0

    def stored(
        self, key: bytes, parent: bytes | None, token_ids: Sequence[int], content: SequenceContent
    ) -> None:
        """Note that a block with these tokens is indexed, which follows the one with key `parent`."""
        if not self._has_room():
            return
        before = None if parent is None else hash_of(parent)
        last = self._changes[-1] if self._changes else None
        if (
            isinstance(last, BlocksStored)
            and before is not None
            and last.hashes[-1] == before
            and (last.salt, last.adapter) == (content.salt, content.adapter)
        ):
            last.hashes.append(hash_of(key))
            last.token_ids.extend(token_ids)
            return
        self._changes.append(
            BlocksStored([hash_of(key)], before, list(token_ids), content.salt, content.adapter)
        )

    def removed(self, key: bytes) -> None:
        """Note that the block with `key` is no longer indexed."""
        if not self._has_room():
            return
        last = self._changes[-1] if self._changes else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(hash_of(key))
            return
        self._changes.append(BlocksRemoved([hash_of(key)]))

    def cleared(self) -> None:
        """Note that nothing is indexed any more: what came before it need not be told."""
        self._changes = [CacheCleared()]
        self._num_changed = 1
        self._dropped = 0

    def take(self) -> CacheChanged | None:
        """Return what changed since the last call; None: nothing."""
        if not self._changes and not self._dropped:
            return None
        changed = CacheChanged(self._changes, self._dropped)
        self._changes = []
        self._num_changed = 0
        self._dropped = 0
        return changed

    def _has_room(self) -> bool:
        """Count a change; False if it is to be dropped. After one that was, all are: what is told has
        no holes.
        """
        if self._dropped or self._num_changed >= self._most:
            self._dropped += 1
            return False
        self._num_changed += 1
        return True
