"""Groups of layers that share block tables, and the blocks a sequence needs in each. Imports no
torch.

A group is the layers of one kind and window, whatever the bytes of a token in each of them. Blocks
and block tables are per group: layers with a window release blocks that no later token sees, while
other layers keep theirs. There are two kinds of groups. Pages have a slot for every token. States
are one per sequence, and every token changes it; the one after every `tokens_per_block` tokens is
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from freight.operands.tiles import KEY_TILE


class CacheGroup(Protocol):
    """The rule for the blocks that a sequence needs in one group. Entry i of its block table is
    block i of the sequence.

    tokens_per_block    a multiple of the block size that prefix keys are made for
    keeps_all           whether no block is released before the end: `first_block` is always 0
    """

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def keeps_all(self) -> bool: ...

    def first_block(self, start: int) -> int:
        """Return the first entry that is read to compute a token at position `start` or later; it
        never decreases as `start` grows.

        So a sequence can continue at `start`, a multiple of tokens_per_block, if it has the entries
        first_block(start) … start / tokens_per_block - 1.
        """
        ...

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks that a sequence holds at once until it has `num_tokens` tokens,
        computed `step_tokens` per step.
        """
        ...

    def describe(self) -> str:
        """Describe its layers, for messages: 'the layers with a window of 1024 tokens'."""
        ...


def least_of_complete(groups: Sequence[CacheGroup], values: Sequence[int]) -> int:
    """Return the least of `values`, one for each group, of the groups that keep the blocks of a
    sequence to its end; if there is no such group, of all.
    """
    complete = []
    for group, value in zip(groups, values, strict=True):
        if group.keeps_all:
            complete.append(value)
    return min(complete or values)


def capacity_tokens(groups: Sequence[CacheGroup], num_blocks: Sequence[int]) -> int:
    """Return the tokens of complete sequences that `num_blocks` blocks of each group hold."""
    tokens = []
    for group, count in zip(groups, num_blocks, strict=True):
        tokens.append(count * group.tokens_per_block)
    return least_of_complete(groups, tokens)


class LayerGroup(CacheGroup, Protocol):
    """A `CacheGroup` with the layers whose memory lies in its blocks.

    layers             indices into the model's layers
    bytes_per_block    bytes of a block in all these layers together
    has_slots          whether each token has a separate slot in the block of its position, so that
                       computing it twice stores the same as once
    kind               text after a number of layers: 'with a window of 1,024'
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def has_slots(self) -> bool: ...

    @property
    def kind(self) -> str: ...

    def held_by(self, num_seqs: int, num_tokens: int, step_tokens: int) -> int:
        """Return the blocks that `num_seqs` sequences of up to `num_tokens` tokens need at once, if
        they compute `step_tokens` per step together. For one sequence it is `most_blocks`.
        """
        ...

    def spare(self, blocks: int) -> int:
        """Return the blocks worth having besides `held`, for prefix hits of later requests."""
        ...

    def read_bytes(self, num_tokens: float) -> float:
        """Return the bytes that a decode step reads for one sequence of `num_tokens` tokens."""
        ...

    def facts(self) -> dict[str, int | None]:
        """Return its distinguishing property, for every JSON: {"window": 1024}."""
        ...


@dataclass(frozen=True)
class Pages:
    """The K and V pages of `layers`, indices into the model's layers. `bytes_per_token` is their
    sum.
    """

    layers: tuple[int, ...]
    bytes_per_token: int
    window: int | None
    tokens_per_block: int

    has_slots = True

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.tokens_per_block

    @property
    def keeps_all(self) -> bool:
        return self.window is None

    def first_block(self, start: int) -> int:
        """Return the block that holds the start of the first key tile that the window of the token
        at `start` touches.

        Attention reads all of that tile, so keys in it that precede the window must not be
        overwritten.
        """
        if self.window is None or start < self.window:
            return 0
        return (start - self.window + 1) // KEY_TILE * KEY_TILE // self.tokens_per_block

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the blocks of all tokens, or with a window those of window + one step, rounded up
        to the tile or block in which the window begins.
        """
        if self.window is not None:
            before = max(KEY_TILE, self.tokens_per_block) - 1
            num_tokens = min(num_tokens, before + self.window - 1 + step_tokens)
        return -(-num_tokens // self.tokens_per_block)

    def held_by(self, num_seqs: int, num_tokens: int, step_tokens: int) -> int:
        step_blocks = -(-step_tokens // self.tokens_per_block)
        together = num_seqs * self.most_blocks(num_tokens, 1) + step_blocks
        return min(num_seqs * self.most_blocks(num_tokens, step_tokens), together)

    def spare(self, blocks: int) -> int:
        return 0

    def read_bytes(self, num_tokens: float) -> float:
        return min(num_tokens, self.window or num_tokens) * self.bytes_per_token

    def facts(self) -> dict[str, int | None]:
        return {"window": self.window}

    @property
    def kind(self) -> str:
        if self.window is None:
            return "without a window"
        return f"with a window of {self.window:,}"

    def describe(self) -> str:
        if self.window is None:
            return "every layer"
        return f"the layers with a window of {self.window} tokens"


@dataclass(frozen=True)
class StateBlocks:
    """The states of `layers`. A sequence has one block of states per `tokens_per_block` tokens.

    Block i holds the state after the last computed token whose position falls into it. The block's
    first token reads the state of block i - 1 and writes block i; later tokens read and write block
    i. So a full block, which other sequences may share, is never written, and needs no copy on
    write.
    """

    layers: tuple[int, ...]
    bytes_per_block: int
    tokens_per_block: int

    has_slots = False
    keeps_all = False

    def first_block(self, start: int) -> int:
        """Return the block of the token before `start`: it holds the state from which `start` is
        computed.
        """
        return max(0, start - 1) // self.tokens_per_block

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Count the block that is read, and those that a step writes."""
        return min(
            -(-num_tokens // self.tokens_per_block), 1 + -(-step_tokens // self.tokens_per_block)
        )

    def held_by(self, num_seqs: int, num_tokens: int, step_tokens: int) -> int:
        """Return one block for each sequence, an eighth more, and the blocks of one step. A
        sequence needs two blocks in the one step of `tokens_per_block` that begins a block;
        sequences do so at different times, so an eighth is room enough. A sequence that finds none
        waits, or is preempted.
        """
        together = num_seqs + -(-num_seqs // 8) + -(-step_tokens // self.tokens_per_block)
        return min(num_seqs * self.most_blocks(num_tokens, step_tokens), together)

    def spare(self, blocks: int) -> int:
        """Return `held`: a prefix hit needs the state at its end, while pages have free blocks
        anyway.
        """
        return blocks

    def read_bytes(self, num_tokens: float) -> float:
        return self.bytes_per_block

    def facts(self) -> dict[str, int | None]:
        return {"state_every": self.tokens_per_block}

    @property
    def kind(self) -> str:
        return f"with a state every {self.tokens_per_block:,} tokens"

    def describe(self) -> str:
        return "the layers with a state"
