"""The bytes of a stored block, and its entry in an index. Imports no torch.

A block is stored as a record: its token ids, then its payload. Its entry says where the record is
and has the digest of it. Entries have one size and each has a check of its own, so a damaged one
costs no other. A record or entry that is damaged in any way is not found; it is never read wrongly.

The digest is SHA-256 because processors have instructions for it, which make it faster than BLAKE2b:

    python -m timeit -s "import hashlib; b = bytes(1 << 26)" "hashlib.sha256(b)"
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# key, digest of the record, where it begins, bytes of its payload and of its token ids, group
_FIELDS = struct.Struct("<32s32sQQII")
_CHECK = 8  # bytes: a damaged entry passes once in 2^64
ENTRY_BYTES = _FIELDS.size + _CHECK
TOKEN_BYTES = 8  # of a token id in a record


@dataclass(frozen=True, slots=True)
class Entry:
    """A record in a file.

    key             key of the block (`cache.prefix.block_key`)
    group           index of the cache's group that it belongs to
    digest          `digest_of` the record
    offset          of the record in its file
    token_bytes     of its token ids, at the start of the record
    payload_bytes   of the rest
    """

    key: bytes
    group: int
    digest: bytes
    offset: int
    token_bytes: int
    payload_bytes: int

    @property
    def record_bytes(self) -> int:
        return self.token_bytes + self.payload_bytes

    def encode(self) -> bytes:
        """Return its `ENTRY_BYTES` bytes."""
        fields = _FIELDS.pack(
            self.key, self.digest, self.offset, self.payload_bytes, self.token_bytes, self.group
        )
        return fields + _check(fields)


def decode_entries(data: bytes) -> Iterator[Entry]:
    """Yield the sound entries of an index, of which `data` is a multiple of `ENTRY_BYTES`."""
    assert len(data) % ENTRY_BYTES == 0, len(data)
    for start in range(0, len(data), ENTRY_BYTES):
        fields = data[start : start + _FIELDS.size]
        if _check(fields) == data[start + _FIELDS.size : start + ENTRY_BYTES]:
            key, digest, offset, payload_bytes, token_bytes, group = _FIELDS.unpack(fields)
            yield Entry(key, group, digest, offset, token_bytes, payload_bytes)


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as a record has them."""
    return array("q", token_ids).tobytes()


def digest_of(key: bytes, group: int, record: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a record: it covers what the block is as well as what it holds."""
    digest = hashlib.sha256(key + group.to_bytes(4, "little"))
    digest.update(record)
    return digest.digest()


def _check(fields: bytes) -> bytes:
    return hashlib.sha256(fields).digest()[:_CHECK]
