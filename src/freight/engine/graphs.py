"""Decode steps as CUDA graphs: one launch replaces the hundreds of kernel launches of a step.

A replay repeats the grids of the captured launches. Grids depend only on the shapes of tensors, so
a graph stays valid while contexts grow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.decode_steps import Replay
from freight.model.decoder import Decoder
from freight.operands.batch import ForwardBatch


def bucket_of(num_seqs: int) -> int:
    """Return the number of sequences that a step of `num_seqs` is padded to: a power of two up to
    8, a multiple of 8 up to 64, a multiple of 32 above.
    """
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()  # rounds up to a power of two
    multiple = 32
    if num_seqs <= 64:
        multiple = 8
    return -(-num_seqs // multiple) * multiple


class CudaGraphs:
    """A `Capture` on a GPU. All graphs share one pool of device memory, because they never run at
    the same time.

    A piece of that pool never grows: a graph larger than those before it finds no piece that is
    large enough, and takes new memory. So the largest is captured first, and all others fit into
    its pieces.
    """

    largest_first = True
    several_rows = False

    def __init__(self, model: Decoder, pool: KVPool, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._model = model
        self._pool = pool
        self._first: torch.cuda.CUDAGraph | None = None  # all later graphs share its memory

    def bucket_of(self, num_seqs: int) -> int:
        return bucket_of(num_seqs)

    def capture(self, batch: ForwardBatch) -> Replay:
        # First run the step uncaptured, on another stream: kernels are compiled then, and libraries
        # allocate their memory outside of the graph.
        main = torch.cuda.current_stream()
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(main)
        with torch.cuda.stream(warm_up):
            self._model.forward(batch, self._pool.layers)
        main.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        memory = None
        if self._first is not None:
            memory = self._first.pool()
        with torch.cuda.graph(graph, pool=memory):
            logits = self._model.forward(batch, self._pool.layers)
        if self._first is None:
            self._first = graph

        def replay() -> Tensor:
            graph.replay()
            return logits  # each replay writes the same tensor

        return replay
