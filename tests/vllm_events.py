"""The messages of vLLM's KV events as msgspec reads them, written from the public form of
`vllm/distributed/kv_events.py` as of 0.33: the names, tags and defaults, and that a batch is an array
and an event a map. Unlike there, an unknown field is an error.
"""

from typing import Any

import msgspec


class Event(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def decoded(payload: bytes) -> tuple[KVEventBatch, list[dict[str, Any]]]:
    """A batch by those structs, and its events as maps for a `RouterIndex`."""
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    return batch, [
        {"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in batch.events
    ]
