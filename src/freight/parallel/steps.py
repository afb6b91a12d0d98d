"""Steps as bytes: what rank 0 tells the others of the slices that a step computes. Imports no torch.

From one step to the next most block tables are the same, and others became a block longer. So
only what is new of a row's tables is sent, and the reader keeps the same tuple for a table that did
not change, as `engine/block_tables.py` wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Table = tuple[int, ...]
_NONE = -1  # for a slice without an adapter, or without a second text


class SliceNumbers(NamedTuple):
    """A slice of a sequence in numbers: `SequenceSlice` of `engine/prepare.py`, with `logits` as a
    code.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[Sequence[int]]
    logits: int
    adapter: int | None
    second_text: int | None = None


class StepWriter:
    """Writes steps. What it wrote is read in the same order by one reader each."""

    def __init__(self) -> None:
        self._rows: list[list[Table]] = []

    def clear(self) -> None:
        """Forget what was written: the readers are cleared, too."""
        self._rows = []

    def encode(self, slices: Sequence[SliceNumbers]) -> bytes:
        """Return a step as bytes."""
        num_groups = 0
        if slices:
            num_groups = len(slices[0].block_ids)
        numbers = [len(slices), num_groups]
        tokens: list[int] = []
        blocks: list[int] = []
        for row, part in enumerate(slices):
            adapter = _NONE if part.adapter is None else part.adapter
            second = _NONE if part.second_text is None else part.second_text
            numbers += (len(part.token_ids), part.start, part.logits, adapter, second)
            tokens += part.token_ids
            if row == len(self._rows):
                self._rows.append([()] * len(part.block_ids))
            written = self._rows[row]
            for group, table in enumerate(part.block_ids):
                old = written[group]
                if table is old:
                    numbers += (len(old), 0)
                    continue
                new = tuple(table)
                unchanged = 0
                if new[: len(old)] == old:
                    unchanged = len(old)
                numbers += (unchanged, len(new) - unchanged)
                blocks += new[unchanged:]
                written[group] = new
        return np.array([*numbers, *tokens, *blocks], dtype=np.int64).tobytes()


class StepReader:
    """Reads the steps of a `StepWriter`."""

    def __init__(self) -> None:
        self._rows: list[list[Table]] = []

    def clear(self) -> None:
        """Forget what was read."""
        self._rows = []

    def decode(self, data: bytes) -> list[SliceNumbers]:
        """Return the slices of a step."""
        numbers: list[int] = np.frombuffer(data, np.int64).tolist()
        count, groups = numbers[:2]
        width = 5 + 2 * groups
        token = 2 + count * width
        heads = []
        block = token
        for begin in range(2, token, width):
            heads.append(numbers[begin : begin + width])
            block += numbers[begin]
        slices = []
        for row, (num_tokens, start, logits, adapter, second, *tables) in enumerate(heads):
            token_ids = tuple(numbers[token : token + num_tokens])
            token += num_tokens
            if row == len(self._rows):
                self._rows.append([()] * groups)
            known = self._rows[row]
            for group in range(groups):
                unchanged, fresh = tables[2 * group : 2 * group + 2]
                if fresh or unchanged != len(known[group]):
                    known[group] = known[group][:unchanged] + tuple(numbers[block : block + fresh])
                    block += fresh
            slot = None if adapter == _NONE else adapter
            begin_of_second = None if second == _NONE else second
            slices.append(
                SliceNumbers(token_ids, start, tuple(known), logits, slot, begin_of_second)
            )
        return slices
