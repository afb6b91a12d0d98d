"""ForwardBatch: the inputs of one forward pass. Frozen; passed to models and layers as an argument,
never a global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

_TENSORS = (  # of a batch
    *("token_ids", "positions", "query_starts", "context_lens", "slots", "block_tables"),
    *("logit_rows", "adapters", "token_types"),
)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch, as attention needs them: their rows, and the blocks of their keys.

    query_starts   [num_seqs + 1] int32: first row of each sequence; the last entry is num_tokens
    context_lens   [num_seqs] int32: keys of each sequence once this step's are stored, so at least
                   its tokens in this batch
    block_tables   [num_seqs, max_blocks] int32: blocks of each sequence in order, from position 0.
                   Entries after the context, and of blocks released before a window, are 0 and not
                   read
    some_decode    False if it is known that no sequence has exactly one row in this step
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    some_decode: bool = True

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @cached_property  # each layer asks
    def are_whole(self) -> bool:
        """Say whether the batch has every token of each sequence. On a GPU this waits for it."""
        return torch.equal(self.query_starts.diff(), self.context_lens)


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, with its sequences concatenated.

    token_ids      [num_tokens] int64
    positions      [num_tokens] int64: position of each token in its sequence, from 0
    query_starts, context_lens    as in `Sequences`
    slots          by cache group: [num_tokens] int64, the slot of each token's K and V, block *
                   tokens_per_block + offset; -1 stores nothing. [0] in a group without slots
    block_tables   by cache group: as in `Sequences`
    logit_rows     [num_logit_rows] int64: rows of the batch for which logits are computed, in
                   strictly increasing order
    some_decode    as in `Sequences`
    adapters       [num_tokens] int32: the slot of each row's adapter (`operands/adapters.py`), or
                   NO_ADAPTER; None: no row has one
    token_types    [num_tokens] int64: the token type of each row (`ModelConfig.token_types`); None:
                   all have the first
    copies         the same batch on other devices, by their names, where layers are on several
    choices        the keys that each row reads in layers with sparse attention, by the index of the
                   layer whose indexer chose them in this step (`PagedKV.choose`)
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slots: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    logit_rows: Tensor
    some_decode: bool = True
    adapters: Tensor | None = None
    token_types: Tensor | None = None
    copies: Mapping[str, ForwardBatch] = field(default_factory=dict)
    choices: dict[int, Tensor | None] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    def on(self, device: str) -> ForwardBatch:
        """Return the batch on `device`; the batch itself if that has no copy of its own."""
        return self.copies.get(device, self)

    def copied_to(self, device: str) -> ForwardBatch:
        """Return a copy on `device`."""
        return self._with_tensors(lambda tensor: tensor.to(device, copy=True))

    def take(self, other: ForwardBatch) -> None:
        """Copy the values of `other`, maybe of another device, into the tensors of this copy of it. The
        host does not wait; the devices do.
        """
        targets = list(self._tensors())
        for target, source in zip(targets, other._tensors(), strict=True):
            target.copy_(source, non_blocking=True)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> ForwardBatch:
        changed: dict[str, object] = {}
        for name in _TENSORS:
            value = getattr(self, name)
            if isinstance(value, tuple):
                changed[name] = tuple(map(change, value))
            elif value is not None:
                changed[name] = change(value)
        return replace(self, **changed)  # type: ignore[arg-type]

    def _tensors(self) -> Iterator[Tensor]:
        for name in _TENSORS:
            value = getattr(self, name)
            if isinstance(value, tuple):
                yield from value
            elif value is not None:
                yield value

    def sequences(self, group: int) -> Sequences:
        """Return the sequences with the block tables of a cache group."""
        return self._by_group[group]

    @cached_property
    def _by_group(self) -> tuple[Sequences, ...]:
        groups = []
        for tables in self.block_tables:
            groups.append(Sequences(self.query_starts, self.context_lens, tables, self.some_decode))
        return tuple(groups)
