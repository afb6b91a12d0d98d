"""The block tables of captured steps: they stay where they are, and a step writes only what is new
in them.

From one step to the next a sequence gets a block at most, and most get none. What was written is
remembered by row: a table that is the same object says the same, one that became longer is written
from there on, and one that moved to another row, because a request before it ended, is copied. A
device with memory of its own gets single entries where few changed, else the rows from the first to
the last that did.

Guarantee: after `update` the rows of its sequences are as if written to tables of zeros; those
behind are not defined. An `update` that is interrupted half done makes the next one write
everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# more new entries than this many times the rows are not worth a list: rows are copied
SINGLE_PER_ROW = 2


class BlockTables:
    """Tables of `num_rows` sequences for each of the cache's groups, with up to widths[group]
    blocks.

    on_host    int32 arrays [num_rows, width] by group
    on_device  the same as tensors on `device`; with `apart` in memory of their own, as on all
               devices but the CPU
    """

    def __init__(
        self, num_rows: int, widths: Sequence[int], device: str, apart: bool | None = None
    ) -> None:
        pinned = torch.device(device).type != "cpu"
        if apart is None:
            apart = pinned
        # each begins at a multiple of 16 bytes: Triton compiles a kernel anew for other alignments
        sizes = [-(-num_rows * width // 4) * 4 for width in widths]
        starts = list(itertools.accumulate(sizes, initial=0))
        host = torch.zeros(starts[-1], dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._words = host
        if apart:
            self._words = torch.zeros_like(host, device=device)
        self._host = host
        self._apart = apart
        self._starts = starts[:-1]
        self._widths = tuple(widths)

        def views(buffer: Tensor) -> list[Tensor]:
            tables = []
            for start, width in zip(starts, widths, strict=False):
                words = buffer[start : start + num_rows * width]
                tables.append(words.view(num_rows, width))
            return tables

        self._rows_on_host = views(host)
        self.on_host = [view.numpy() for view in self._rows_on_host]
        self.on_device = tuple(views(self._words))
        self._most_single = SINGLE_PER_ROW * num_rows
        # What goes to single entries: their places in `_words` as int64, then their values as
        # int32.
        self._sent = torch.zeros(
            3 * self._most_single, dtype=torch.int32, device="cpu", pin_memory=pinned
        )
        self._received = self._sent
        if apart:
            self._received = torch.zeros_like(self._sent, device=device)
        self._written: list[list[tuple[int, ...]]] = [[()] * num_rows for _ in widths]
        self._dirty = False

    def update(self, tables: Sequence[Sequence[Sequence[int]]]) -> None:
        """Make the first rows say `tables`, for each sequence its table by group.

        The host may change the tables again once the device has come to the end of what was queued
        until now.
        """
        if self._dirty:
            self._forget()
        self._dirty = True
        places: list[int] = []  # of single entries in `_words`
        for group, written in enumerate(self._written):
            of_group = [tuple(of_sequence[group]) for of_sequence in tables]
            self._update(group, written, of_group, places)
        if places and self._apart:
            self._send(places)
        self._dirty = False

    def _forget(self) -> None:
        self._host.zero_()
        self._words.zero_()
        self._written = [[()] * len(written) for written in self._written]

    def _update(
        self,
        group: int,
        written: list[tuple[int, ...]],
        tables: list[tuple[int, ...]],
        places: list[int],
    ) -> None:
        """Write one group's tables, and copy the rows of which the device does not get single
        entries, in `places`.
        """
        changed = [row for row, table in enumerate(tables) if table is not written[row]]
        if not changed:
            return
        moved = self._move(group, written, tables, changed)
        to_copy = list(moved)
        for row in changed:
            if row in moved:
                continue
            new = self._write(group, row, written[row], tables[row])
            written[row] = tables[row]
            if moved or len(places) + len(new) > self._most_single:
                to_copy.append(row)
            else:
                begin = self._starts[group] + row * self._widths[group]
                places += [begin + entry for entry in new]
        if to_copy and self._apart:
            rows = slice(min(to_copy), max(to_copy) + 1)
            self.on_device[group][rows].copy_(self._rows_on_host[group][rows], non_blocking=True)

    def _move(
        self,
        group: int,
        written: list[tuple[int, ...]],
        tables: list[tuple[int, ...]],
        changed: list[int],
    ) -> set[int]:
        """Copy, on the host, the tables that were written to other rows before; returns the rows
        they are in now.
        """
        if len(changed) == 1:
            return set()
        row_of = {id(table): row for row, table in enumerate(written) if table}
        rows = [row for row in changed if id(tables[row]) in row_of]
        sources = [row_of[id(tables[row])] for row in rows]
        width = max((max(len(written[row]), len(tables[row])) for row in rows), default=0)
        part = self.on_host[group][:, :width]
        part[rows] = part[sources]  # the right side is a copy, so rows may change places
        for row in rows:
            written[row] = tables[row]
        return set(rows)

    def _write(
        self, group: int, row: int, old: tuple[int, ...], new: tuple[int, ...]
    ) -> Sequence[int]:
        """Write a row on the host, in which `old` is written; returns the entries that changed."""
        on_host = self.on_host[group][row]
        length = len(old)
        if new[:length] == old:
            on_host[length : len(new)] = new[length:]
            return range(length, len(new))
        fresh = np.zeros(max(length, len(new)), np.int32)
        fresh[: len(new)] = new
        changed: list[int] = np.flatnonzero(fresh != on_host[: len(fresh)]).tolist()
        on_host[: len(fresh)] = fresh
        return changed

    def _send(self, places: list[int]) -> None:
        """Copy the single entries at `places` to the device. Waits for nothing."""
        count = len(places)
        sent = self._sent[: 3 * count]
        received = self._received[: 3 * count]
        sent[: 2 * count].view(torch.int64).numpy()[:] = places
        sent[2 * count :].numpy()[:] = self._host.numpy()[places]
        received.copy_(sent, non_blocking=True)
        self._words.index_copy_(0, received[: 2 * count].view(torch.int64), received[2 * count :])
