"""Keys of full blocks: equal keys mean equal tokens from position 0 on, and equal salts. Imports no
torch.

The key of a full block is a digest over the key of the block before it and its own token ids; the
first block's parent is a digest of the request's cache salt. The digest is cryptographic: a client
must not be able to construct a prompt that is answered from another client's blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence


def root_key(salt: str | None) -> bytes:
    """Return the parent key of a sequence's first block. No salt and the empty salt are different
    salts.
    """
    content = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=32, person=b"root").digest()


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
) -> None:
    """Extend `keys`, those of a sequence in order, to at least `count`; only missing ones are
    computed.

    `tokens(start, stop)` returns the token ids at positions start … stop - 1.
    """
    while len(keys) < count:
        parent = keys[-1] if keys else root_key(salt)
        start = len(keys) * block_size
        keys.append(block_key(parent, tokens(start, start + block_size)))
