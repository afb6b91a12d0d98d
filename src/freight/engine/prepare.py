"""Plain numbers -> ForwardBatch: which token goes where, and whose logits are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freight.operands.adapters import NO_ADAPTER
from freight.operands.batch import ForwardBatch


class Logits(Enum):
    """Which rows of a slice need logits, or their final states."""

    NONE = "none"  # a chunk of prefill that is not the last
    LAST = "last"  # the next token is sampled
    ALL = "all"  # prompt log-probabilities, evaluation
    STATE = "state"  # the final state of the last row is pooled
    STATES = "states"  # those of all rows are

    @property
    def is_state(self) -> bool:
        """Whether final states are read, which a replayed step does not give."""
        return self in (Logits.STATE, Logits.STATES)


class BlockLayout(Protocol):
    """What is asked of a cache group (`cache.spec.LayerGroup`) to find the place of a token."""

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def has_slots(self) -> bool: ...


class SequenceSlice(NamedTuple):
    """`token_ids` of one sequence at positions start, start + 1, …, its block tables by cache group,
    the slot of its adapter, and the position from which on its tokens have the second token type.

    Entry i of a table is the block of tokens i * tokens_per_block … of its group, for all that are
    stored and those of this slice; entries of blocks that were given back are 0.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[Sequence[int]]
    logits: Logits
    adapter: int | None = None
    second_text: int | None = None

    @property
    def num_logit_rows(self) -> int:
        if self.logits in (Logits.ALL, Logits.STATES):
            return len(self.token_ids)
        return int(self.logits is not Logits.NONE)


def have_adapters(slices: Sequence[SequenceSlice]) -> bool:
    """Return whether any slice has an adapter."""
    return any(part.adapter is not None for part in slices)


def slots_of(slices: Sequence[SequenceSlice]) -> NDArray[np.int32]:
    """Return the slot of each slice's adapter, or NO_ADAPTER."""
    slots = [NO_ADAPTER if part.adapter is None else part.adapter for part in slices]
    return np.array(slots, np.int32)


def types_of(
    slices: Sequence[SequenceSlice], position: NDArray[np.int64], sequence: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return the token type of each row, at its position in its sequence, the index of its slice;
    None: all have the first.
    """
    if all(part.second_text is None for part in slices):
        return None
    never = np.iinfo(np.int64).max
    begins = [never if part.second_text is None else part.second_text for part in slices]
    return (position >= np.array(begins, np.int64)[sequence]).astype(np.int64)


def prepare(
    slices: Sequence[SequenceSlice],
    groups: Sequence[BlockLayout],
    device: str = "cpu",
    further: Sequence[str] = (),
) -> ForwardBatch:
    """Lay the slices end to end; logit rows come in the slices' order. `groups` are those of the
    cache. `further`: devices that get a copy.
    """
    tokens: list[int] = []
    positions = []
    rows = []
    lengths = []
    starts = np.zeros(len(slices) + 1, np.int32)
    for i, part in enumerate(slices):
        count = len(part.token_ids)
        lengths.append(part.start + count)
        positions.append(np.arange(part.start, part.start + count, dtype=np.int64))
        end = starts[i + 1] = starts[i] + count
        rows.append(np.arange(end - part.num_logit_rows, end, dtype=np.int64))
        tokens.extend(part.token_ids)
    position = np.concatenate(positions)
    sequence = np.repeat(np.arange(len(slices)), np.diff(starts))
    tables = []
    slots = []
    for index, group in enumerate(groups):
        ids = [part.block_ids[index] for part in slices]
        table = np.zeros((len(slices), max(map(len, ids))), np.int32)
        for i, blocks in enumerate(ids):
            table[i, : len(blocks)] = blocks
        tables.append(table)
        size = group.tokens_per_block
        if group.has_slots:
            slots.append(
                table[sequence, position // size].astype(np.int64) * size + position % size
            )
        else:
            slots.append(np.zeros(0, np.int64))

    adapters = None
    if have_adapters(slices):
        adapters = slots_of(slices)[sequence]
    token_types = types_of(slices, position, sequence)

    def batch_on(device: str, copies: Mapping[str, ForwardBatch]) -> ForwardBatch:
        def tensor(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
            host = torch.from_numpy(array)
            if device == "cpu":
                return host
            return host.pin_memory().to(device, non_blocking=True)  # the host does not wait

        return ForwardBatch(
            token_ids=tensor(np.array(tokens, np.int64)),
            positions=tensor(position),
            query_starts=tensor(starts),
            context_lens=tensor(np.array(lengths, np.int32)),
            slots=tuple(map(tensor, slots)),
            block_tables=tuple(map(tensor, tables)),
            logit_rows=tensor(np.concatenate(rows)),
            some_decode=any(len(part.token_ids) == 1 for part in slices),
            adapters=None if adapters is None else tensor(adapters),
            token_types=None if token_types is None else tensor(token_types),
            copies=copies,
        )

    return batch_on(device, {other: batch_on(other, {}) for other in further})
