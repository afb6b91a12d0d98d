"""Decode steps as CUDA graphs: one launch instead of some hundreds. Grids follow from shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.decode_steps import Replay
from freight.models.decoder import Decoder
from freight.operands.batch import ForwardBatch


def bucket_of(num_seqs: int) -> int:
    """The number of sequences that a step of `num_seqs` is padded to: 1, 2, 4, 8, then in eights,
    from 64 in 32s.
    """
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()
    step = 8 if num_seqs <= 64 else 32
    return -(-num_seqs // step) * step


class CudaGraphs:
    """A `Capture` on a GPU; all graphs share one pool of memory, because they never run at the same
    time.

    Pieces of the pool never grow, so a larger graph after a smaller one finds none that is large
    enough, and takes new memory. The largest first leaves room for all others.
    """

    largest_first = True

    def __init__(self, model: Decoder, pool: KVPool, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._model, self._pool = model, pool
        self._first: torch.cuda.CUDAGraph | None = None  # whose pool all others share

    def bucket_of(self, num_seqs: int) -> int:
        return bucket_of(num_seqs)

    def capture(self, batch: ForwardBatch) -> Replay:
        main, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(main)
        with torch.cuda.stream(
            aside
        ):  # kernels are compiled and libraries take their memory outside of the graph
            self._model.forward(batch, self._pool.layers)
        main.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if self._first is None else self._first.pool()):
            logits = self._model.forward(batch, self._pool.layers)
        self._first = self._first or graph

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
