"""Decode steps that are captured once and then replayed: steps of few rows, all of which have
logits.

A captured step does the same work on the same memory, so it belongs to a number of rows, its
bucket, and has adapters or none. In most steps every sequence has one row. On a CPU a sequence with
drafts has several; the batch still has as many sequences as rows, and the last ones have none. Its
inputs lie in `Buffers`, owned for life and filled for each step; the `ForwardBatch` that was
captured is a view of them.
Block tables are shared by all buckets, and only what is new in them is written (`block_tables.py`).
A step of fewer rows is padded to its bucket with sequences that have no keys and store nothing.
Contexts may grow up to the buffers' width. Buckets are captured when they are first needed, on a
GPU the largest before all others.

A captured step keeps the addresses of weights and pages, which never move while an engine lives.
How a step is captured is a `Capture`: CUDA graphs (`graphs.py`) or calls of the CPU kernels
(`recordings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.block_tables import BlockTables
from freight.engine.prepare import BlockLayout, SequenceSlice, have_adapters, slots_of
from freight.operands.adapters import NO_ADAPTER
from freight.operands.batch import ForwardBatch
from freight.parallel.stages import devices_of

Replay = Callable[[], Tensor]  # computes what the buffers say: float32 logits [bucket, vocab_size]


class Capture(Protocol):
    """How the steps of one model over one cache are captured."""

    @property
    def max_num_seqs(self) -> int:
        """The most sequences of a captured step."""
        ...

    @property
    def several_rows(self) -> bool:
        """Whether a sequence may have several rows."""
        ...

    @property
    def largest_first(self) -> bool:
        """Whether the largest bucket is to be captured before all others."""
        ...

    @property
    def generation(self) -> int:
        """A number: what was captured under another one is captured anew."""
        ...

    @property
    def features(self) -> Tensor | None:
        """Features of all rows of the step that ran last, [bucket, size], where a head takes them."""
        ...

    def bucket_of(self, num_seqs: int) -> int:
        """Return the number of rows that a step of `num_seqs` rows is padded to."""
        ...

    def capture(self, batch: ForwardBatch) -> Replay:
        """Return the step over `batch`, which is full of padding now and is filled before each
        replay.
        """
        ...


class Buffers:
    """A decode batch of `bucket` rows, and as many sequences, on the host and on `device`, with the
    first rows of `tables`. `adapted`: its rows may have adapters. `further`: other devices, of
    later stages, whose copies of the batch are filled by the replay, as a step comes to them: what the
    host copied would wait there for the steps before, and the host for it.

    Each of the cache's groups has block tables, and slots if its tokens have places of their own.
    """

    def __init__(
        self,
        bucket: int,
        tables: BlockTables,
        groups: Sequence[BlockLayout],
        device: str,
        adapted: bool = False,
        further: Sequence[str] = (),
    ) -> None:
        self._tables = tables
        self._groups = groups
        # int32 words: token ids, positions and slots by group as int64, then lengths and first rows
        # of sequences and adapters of rows as int32. Each begins at a multiple of 16 bytes, as what `prepare` makes:
        # Triton compiles a kernel anew for other alignments.
        num_longs = 2 + len(groups)
        counts = [2 * bucket, 2 * bucket]
        for group in groups:
            num_words = 0
            if group.has_slots:
                num_words = 2 * bucket
            counts.append(num_words)
        counts += [bucket, bucket + 1, bucket if adapted else 0]
        size = sum(-(-count // 4) * 4 for count in counts)
        on_cpu = torch.device(device).type == "cpu"
        host = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=not on_cpu)
        words = host
        if not on_cpu:
            words = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = host
        self._words = words

        def views(buffer: Tensor) -> list[Tensor]:
            parts: list[Tensor] = []
            begin = 0
            for count in counts:
                part = buffer[begin : begin + count]
                if len(parts) < num_longs:
                    part = part.view(torch.int64)
                parts.append(part)
                begin += -(-count // 4) * 4
            return parts

        on_host = [view.numpy() for view in views(host)]
        self._adapters = on_host.pop()
        self._tokens, self._positions, *self._slots, self._lengths, self._starts = on_host

        tokens, positions, *slots, lengths, starts, adapters = views(words)
        rows = torch.arange(bucket, dtype=torch.int64, device=device)
        blocks = tuple(table[:bucket] for table in tables.on_device)
        batch = ForwardBatch(
            token_ids=tokens,
            positions=positions,
            query_starts=starts,
            context_lens=lengths,
            slots=tuple(slots),
            block_tables=blocks,
            logit_rows=rows,
            adapters=adapters if adapted else None,
        )
        self.fill([])
        self.batch = replace(batch, copies={other: batch.copied_to(other) for other in further})

    def fill(self, slices: Sequence[SequenceSlice]) -> None:
        """Make `batch` say what `slices` say; the rest of it is padding, of one row a sequence while
        there are rows.
        """
        num_seqs = len(slices)
        counts = np.array([len(part.token_ids) for part in slices], np.int64)
        tokens: list[int] = []
        for part in slices:
            tokens += part.token_ids
        count = len(tokens)
        bucket = len(self._lengths)
        sequence = np.repeat(np.arange(num_seqs), counts)
        firsts = np.cumsum(counts) - counts  # row of the first token
        starts = np.array([part.start for part in slices], np.int64)
        positions = starts[sequence] + np.arange(count) - firsts[sequence]
        self._tokens[count:] = self._positions[count:] = self._lengths[num_seqs:] = 0
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._lengths[:num_seqs] = starts + counts
        self._starts[:num_seqs] = firsts
        self._starts[num_seqs:] = np.minimum(count + np.arange(bucket + 1 - num_seqs), bucket)
        if len(self._adapters):
            self._adapters[:count] = slots_of(slices)[sequence]
            self._adapters[count:] = NO_ADAPTER
        self._tables.update([part.block_ids for part in slices])
        for group, slots, tables in zip(
            self._groups, self._slots, self._tables.on_host, strict=True
        ):
            if group.has_slots:
                size = group.tokens_per_block
                slots[:count] = (
                    tables[sequence, positions // size].astype(np.int64) * size + positions % size
                )
                slots[count:] = -1
        if self._words is not self._host:
            self._words.copy_(self._host, non_blocking=True)  # the next `fill` waits for it


class DecodeSteps:
    """The captured steps of a model over `pool`, for sequences of up to `max_model_len` tokens."""

    def __init__(self, capture: Capture, pool: KVPool, max_model_len: int, device: str) -> None:
        self.pool = pool
        self._capture = capture
        self._device, *self._further = devices_of(pool.stages, device)
        widths = pool.spec.blocks_of(max_model_len)
        num_rows = capture.bucket_of(capture.max_num_seqs)
        self._tables = BlockTables(num_rows, widths, self._device)
        self._copied: torch.cuda.Event | None = None
        if torch.device(self._device).type != "cpu":
            self._copied = torch.cuda.Event()
        # by bucket, and whether rows have adapters
        self.steps: dict[tuple[int, bool], tuple[Buffers, Replay]] = {}
        self._generation = capture.generation

    @property
    def features(self) -> Tensor | None:
        """As `Capture.features`."""
        return self._capture.features

    def takes(self, slices: Sequence[SequenceSlice]) -> bool:
        """Return whether the logits of all rows are wanted, and there are few: one a sequence, or
        several where they can be captured.
        """
        count = 0
        for part in slices:
            if part.num_logit_rows != len(part.token_ids) or part.logits.is_state:
                return False
            count += part.num_logit_rows
        if count > len(slices) and not self._capture.several_rows:
            return False
        return count <= self._capture.max_num_seqs

    def run(self, slices: Sequence[SequenceSlice], tokens: Tensor | None = None) -> Tensor:
        """float32 logits [rows, vocab_size]; the next step may overwrite them.

        `tokens`, int64 [rows] on the device, take the place of those in the slices.
        """
        num_rows = sum(len(part.token_ids) for part in slices)
        bucket = self._capture.bucket_of(num_rows)
        if self._copied is not None:
            # the last step may be under way, and its copies still to come
            self._copied.synchronize()
        if self._generation != self._capture.generation:
            self.steps.clear()
            self._generation = self._capture.generation
        adapted = have_adapters(slices)
        if self._capture.largest_first and not self.steps:
            self._prepare(self._capture.bucket_of(self._capture.max_num_seqs), adapted)
        if (bucket, adapted) not in self.steps:
            self._prepare(bucket, adapted)
        buffers, replay = self.steps[bucket, adapted]
        buffers.fill(slices)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        if tokens is not None:
            buffers.batch.token_ids[:num_rows].copy_(tokens)
        return replay()[:num_rows]

    def _prepare(self, bucket: int, adapted: bool) -> None:
        groups = self.pool.spec.groups
        buffers = Buffers(bucket, self._tables, groups, self._device, adapted, self._further)
        self.steps[bucket, adapted] = buffers, self._capture.capture(buffers.batch)
