"""What a router knows of a server by its KV events alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from freight.cache.events import hash_of
from freight.cache.prefix import block_key, root_key


class RouterIndex:
    """The blocks that a server has, each with its tokens; `num_changed` counts stored and removed
    ones. Asserts that a sequence is told without holes, and that blocks are named by what is in them.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.keys: dict[int, bytes] = {}  # of all that were ever told: a parent may be gone
        self.num_changed = 0
        self.num_cleared = 0

    def apply(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            kind = event["type"]
            if kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.blocks[name]
                self.num_changed += len(event["block_hashes"])
            else:
                assert kind == "AllBlocksCleared"
                self.blocks = {}
                self.num_cleared += 1

    def _store(self, event: Mapping[str, Any]) -> None:
        size, names, extra = event["block_size"], event["block_hashes"], event.get("extra_keys")
        assert len(event["token_ids"]) == size * len(names)
        if event["parent_block_hash"] is None:
            # the salt stands behind the name of an adapter, which the tests that come here have none of
            key = root_key(extra[0][0] if extra else None)
        else:
            key = self.keys[event["parent_block_hash"]]
        for place, name in enumerate(names):
            tokens = event["token_ids"][place * size : (place + 1) * size]
            key = block_key(key, tokens)
            assert hash_of(key) == name, "a block is named by its tokens and those before"
            assert name not in self.blocks, "a block is stored twice"
            self.keys[name] = key
            self.blocks[name] = tuple(tokens)
        self.num_changed += len(names)
