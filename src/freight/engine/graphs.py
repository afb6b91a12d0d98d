"""Decode steps as CUDA graphs: one launch replaces the hundreds of kernel launches of a step.

A replay repeats the grids of the captured launches. Grids depend only on the shapes of tensors, so
a graph stays valid while contexts grow.

Of several ranks each captures the same steps in the same order, as gathers are launches too, and the
runs that compile kernels gather as well. A step that one of them left may have been captured by some
alone, so after it all capture anew.

A graph is of one device: with layers on several there is one
for each stage (`parallel/stages.py`), and the residual stream is copied between two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.decode_steps import Replay
from freight.model.decoder import Decoder, Residual, computing_on
from freight.operands.batch import ForwardBatch
from freight.parallel.push import Pushed
from freight.parallel.stages import Stage

Output = TypeVar("Output")


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
    """A `Capture` on a GPU. All graphs of a device share one pool of its memory, because they never
    run at the same time.

    A piece of that pool never grows: a graph larger than those before it finds no piece that is
    large enough, and takes new memory. So the largest is captured first, and all others fit into
    its pieces.
    """

    largest_first = True
    several_rows = False

    def __init__(
        self, model: Decoder, pool: KVPool, max_num_seqs: int, ranks: Pushed | None = None
    ) -> None:
        """ranks: the way to the other ranks, which gathers by launches; None without others."""
        self.max_num_seqs = max_num_seqs
        self._ranks = ranks
        self._model = model
        self._pool = pool
        # by device, the first of its graphs: all later ones share its memory
        self._first: dict[str | None, torch.cuda.CUDAGraph] = {}
        # by device, where its graphs are captured. torch's own such stream is of one device, and to use
        # it would make that the current one: launches on another would run, and not be captured
        self._streams: dict[str | None, torch.cuda.Stream] = {}

    @property
    def generation(self) -> int:
        """How often all ranks have begun anew."""
        return 0 if self._ranks is None else self._ranks.times

    features = None  # heads draft on CPUs alone

    def bucket_of(self, num_seqs: int) -> int:
        return bucket_of(num_seqs)

    def capture(self, batch: ForwardBatch) -> Replay:
        model = self._model
        layers = self._pool.layers
        if not model.stages:

            def step() -> Tensor:
                return model.forward(batch, layers)

            if not self._is_pushed(step):
                return step
            graph, logits = self._captured(None, step)

            def replay() -> Tensor:
                graph.replay()
                return logits  # each replay writes the same tensor

            return replay
        return self._capture_stages(batch)

    def _is_pushed(self, step: Replay) -> bool:
        """Return whether a step makes all its gathers by launches. All ranks run it, and find the same:
        a gather of more rows than a slot holds is the group's, which is not captured.
        """
        if self._ranks is None:
            return True
        before = self._ranks.grouped
        step()
        self._ranks.finish()
        return self._ranks.grouped == before

    def _capture_stages(self, batch: ForwardBatch) -> Replay:
        """Capture a graph for each stage. Between two, a replay copies the stream from the output of
        one into the input of the other, and the batch with it, which the devices wait for, and the
        host does not.
        """
        parts: list[tuple[str, torch.cuda.CUDAGraph]] = []
        copies: list[tuple[Residual, Residual, str]] = []
        given = None
        *stages, last = self._model.stages
        for stage in stages:
            graph, stream = self._captured(stage.device, partial(self._stage, stage, given, batch))
            with computing_on(stage.device):
                graph.replay()  # what was captured has not run: the next stage runs over its output now
            following = self._model.stages[len(parts) + 1].device
            given = stream.on(following)
            parts.append((stage.device, graph))
            copies.append((stream, given, following))
        graph, logits = self._captured(last.device, partial(self._last_stage, given, batch))

        def replay() -> Tensor:
            for (device, part), (stream, given, following) in zip(parts, copies, strict=True):
                with computing_on(device):
                    part.replay()
                given.take(stream)
                target = batch.on(following)
                if target is not batch.on(device):
                    target.take(batch.on(device))
            with computing_on(last.device):
                graph.replay()
            return logits

        return replay

    def _stage(self, stage: Stage, given: Residual | None, batch: ForwardBatch) -> Residual:
        """Run a stage. given: what the one before returned; None: it is the first."""
        model = self._model
        stream = model.begin(batch) if given is None else given
        return model.run_stage(stage, stream, batch, self._pool.layers)

    def _last_stage(self, given: Residual | None, batch: ForwardBatch) -> Tensor:
        model = self._model
        stream = self._stage(model.stages[-1], given, batch)
        return model.logits(model.end(stream, batch))

    def _captured(
        self, device: str | None, compute: Callable[[], Output]
    ) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Return a graph of what `compute` launches on `device`, and what it returned."""
        with computing_on(device):
            # First run it uncaptured, on another stream: kernels are compiled then, and libraries
            # allocate their memory outside of the graph.
            main = torch.cuda.current_stream()
            warm_up = torch.cuda.Stream()
            warm_up.wait_stream(main)
            with torch.cuda.stream(warm_up):
                compute()
            main.wait_stream(warm_up)
            mode = "global"
            if self._ranks is not None:
                self._ranks.finish()  # to capture waits for the device, however long that takes
                mode = "thread_local"  # NCCL has a thread that asks the device meanwhile
            graph = torch.cuda.CUDAGraph()
            memory = None
            if device in self._first:
                memory = self._first[device].pool()
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream()
            stream = self._streams[device]
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode=mode):
                output = compute()
            self._first.setdefault(device, graph)
            return graph, output
