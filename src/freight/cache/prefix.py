"""Keys of full blocks: equal keys mean equal tokens from position 0 on, equal salts and equal adapters.
Imports no torch.

The key of a full block is a digest over the key of the block before it and its own token ids; the
first block's parent is a digest of the request's cache salt and of its adapter. The digest is cryptographic: a client
must not be able to construct a prompt that is answered from another client's blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence


def root_key(salt: str | None, adapter: str | None = None) -> bytes:
    """Return the parent key of a sequence's first block. No salt and the empty salt are different
    salts. adapter: the digest of the sequence's adapter, if it has one.
    """
    content = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    root = hashlib.blake2b(content, digest_size=32, person=b"root").digest()
    if adapter is None:
        return root
    return hashlib.blake2b(root + adapter.encode(), digest_size=32, person=b"adapter").digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block that holds `token_ids` and follows the block (or root) with
    key `parent`.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


def extend_keys(
    keys: list[bytes],
    count: int,
    block_size: int,
    salt: str | None,
    tokens: Callable[[int, int], Sequence[int]],
    adapter: str | None = None,
) -> None:
    """Extend `keys`, those of a sequence in order, to at least `count`; only missing ones are
    computed.

    `tokens(start, stop)` returns the token ids at positions start … stop - 1.
    """
    while len(keys) < count:
        parent = keys[-1] if keys else root_key(salt, adapter)
        start = len(keys) * block_size
        keys.append(block_key(parent, tokens(start, start + block_size)))


class RecentKeys:
    """The block keys that were asked for last, at most `size` of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: dict[bytes, None] = {}  # the latest last

    def note(self, keys: Sequence[bytes]) -> int:
        """Take note of the keys of a sequence; return how many leading ones were known before."""
        known = 0
        for key in keys:
            if key not in self._keys:
                break
            known += 1
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._size:
            del self._keys[next(iter(self._keys))]
        return known
