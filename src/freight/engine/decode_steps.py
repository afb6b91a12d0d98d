"""Decode steps that are captured once and then replayed: steps in which every sequence has one token.

A captured step does the same work on the same memory, so it belongs to a number of sequences, its bucket. Its inputs
lie in `Buffers`, owned for life and filled for each step; the `ForwardBatch` that was captured is a view of them. A
step of fewer sequences is padded to its bucket with sequences that have no keys and store nothing. Contexts may grow up
to the buffers' width. Buckets are captured when they are first needed.

A captured step keeps the addresses of weights and pages, which never move while an engine lives. How a step is captured
is a `Capture`: CUDA graphs (`graphs.py`) or calls of the CPU kernels (`recordings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.prepare import Logits, SequenceSlice
from freight.operands.batch import ForwardBatch

Replay = Callable[[], Tensor]  # computes what the buffers say: float32 logits [bucket, vocab_size]


class Capture(Protocol):
    """How the steps of one model over one cache are captured."""

    @property
    def max_num_seqs(self) -> int:
        """The most sequences of a captured step."""
        ...

    def bucket_of(self, num_seqs: int) -> int:
        """The number of sequences that a step of `num_seqs` is padded to."""
        ...

    def capture(self, batch: ForwardBatch) -> Replay:
        """The step over `batch`, which is full of padding now and is filled before each replay."""
        ...


class Buffers:
    """A decode batch of `bucket` sequences with up to `max_blocks` blocks each, on the host and on `device`.

    Each of the cache's `num_groups` groups has block tables and slots.
    """

    def __init__(self, bucket: int, max_blocks: int, block_size: int, device: str, num_groups: int = 1) -> None:
        self.block_size = block_size
        # int32 words: token ids, positions and slots by group as int64, then lengths and tables by group as int32. Each
        # begins at a multiple of 16 bytes, as what `prepare` makes: Triton compiles a kernel anew for other alignments.
        num_longs = 2 + num_groups
        counts = (*[2 * bucket] * num_longs, bucket, *[bucket * max_blocks] * num_groups)
        edges = np.cumsum([0, *(-(-count // 4) * 4 for count in counts)]).tolist()
        on_cpu = device == "cpu"
        host = torch.zeros(edges[-1], dtype=torch.int32, device="cpu", pin_memory=not on_cpu)
        words = host if on_cpu else torch.zeros(edges[-1], dtype=torch.int32, device=device)
        self._host, self._words = host, words

        def views(buffer: Tensor) -> list[Tensor]:
            parts = [buffer[begin : begin + count] for begin, count in zip(edges[:-1], counts, strict=True)]
            longs = [part.view(torch.int64) for part in parts[:num_longs]]
            tables = [part.view(bucket, max_blocks) for part in parts[num_longs + 1 :]]
            return [*longs, parts[num_longs], *tables]

        on_host = [view.numpy() for view in views(host)]
        self._tokens, self._positions, self._lengths = on_host[0], on_host[1], on_host[num_longs]
        self._slots, self._tables = on_host[2:num_longs], on_host[num_longs + 1 :]
        on_device = views(words)
        slots, tables = tuple(on_device[2:num_longs]), tuple(on_device[num_longs + 1 :])
        starts = torch.arange(bucket + 1, dtype=torch.int32, device=device)
        rows = torch.arange(bucket, dtype=torch.int64, device=device)
        tokens, positions, lengths = on_device[0], on_device[1], on_device[num_longs]
        self.batch = ForwardBatch(tokens, positions, starts, lengths, slots, tables, rows)
        self.fill([])

    def fill(self, slices: Sequence[SequenceSlice]) -> None:
        """Make `batch` say what `slices`, one token each, say; the rest of it is padding."""
        count = len(slices)
        self._tokens[count:] = self._positions[count:] = self._lengths[count:] = 0
        self._tokens[:count] = [part.token_ids[0] for part in slices]
        starts = np.array([part.start for part in slices], dtype=np.int64)
        self._positions[:count] = starts
        self._lengths[:count] = starts + 1
        for group, (slots, tables) in enumerate(zip(self._slots, self._tables, strict=True)):
            for i, part in enumerate(slices):
                tables[i, : len(part.block_ids[group])] = part.block_ids[group]
            blocks = tables[np.arange(count), starts // self.block_size].astype(np.int64)
            slots[:count] = blocks * self.block_size + starts % self.block_size
            slots[count:] = -1
        if self._words is not self._host:
            self._words.copy_(self._host, non_blocking=True)  # the step's end waits for it: the tokens are read


class DecodeSteps:
    """The captured steps of a model over `pool`, for sequences of up to `max_model_len` tokens."""

    def __init__(self, capture: Capture, pool: KVPool, max_model_len: int, device: str) -> None:
        self.pool = pool
        self._capture, self._device = capture, device
        self._max_blocks = -(-max_model_len // pool.spec.block_size)
        self._captured: dict[int, tuple[Buffers, Replay]] = {}

    def takes(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether every sequence has one token, whose logits are wanted."""
        return len(slices) <= self._capture.max_num_seqs and all(
            len(part.token_ids) == 1 and part.logits is not Logits.NONE for part in slices
        )

    def run(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """float32 logits [len(slices), vocab_size]; the next step may overwrite them."""
        bucket = self._capture.bucket_of(len(slices))
        if bucket not in self._captured:
            spec = self.pool.spec
            buffers = Buffers(bucket, self._max_blocks, spec.block_size, self._device, len(spec.groups))
            self._captured[bucket] = buffers, self._capture.capture(buffers.batch)
        buffers, replay = self._captured[bucket]
        buffers.fill(slices)
        return replay()[: len(slices)]
