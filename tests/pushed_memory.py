"""Ranks on CPUs that push columns: buffers of shared memory in place of those of GPUs, and graphs that
are replayed by computing again.

With Triton's interpreter the kernel is the real one, between processes. A process of its own, as
another rank is, enters `pushing_here` as the tests' process does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine import build, follower
from freight.engine.decode_steps import DecodeSteps
from freight.engine.graphs import CudaGraphs
from freight.errors import CapacityError
from freight.kernels.interface import KernelSet
from freight.model.decoder import Decoder, LanguageModel
from freight.parallel import device_memory, push
from freight.parallel.peers import Layout, Peers
from freight.parallel.push import Pushed
from freight.parallel.shared import nameless_memory
from freight.settings.engine import EngineConfig

TRIED = ((1, 16), (3, 7), (4, 32), (1, 16))  # slots of small models hold no more


def open_peers(
    rank: int, layout: Layout, device: torch.device, exchange: Callable[[bytes], list[bytes]]
) -> Peers:
    """`device_memory.open_peers` over memory that all processes map."""
    number = nameless_memory()
    os.ftruncate(number, layout.total)
    kept = []
    for place in exchange(f"/proc/{os.getpid()}/fd/{number}".encode()):
        with open(place, "r+b") as file:
            kept.append(mmap.mmap(file.fileno(), layout.total))
    buffers = [(ctypes.c_uint8 * layout.total).from_buffer(mapped) for mapped in kept]
    own = torch.frombuffer(buffers[rank], dtype=torch.uint8)
    page = torch.zeros(2, dtype=torch.int64)
    addresses = [ctypes.addressof(buffer) for buffer in buffers]
    places = torch.tensor([*addresses, page.data_ptr()], dtype=torch.int64)

    def close() -> None:
        buffers.clear()  # not before
        os.close(number)

    return Peers(own, places, page, close)


class Graph:
    """Writes what a step computes into the tensor of its first run."""

    def __init__(self, compute: Callable[[], Tensor], output: Tensor) -> None:
        self._compute, self._output = compute, output
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._output.copy_(self._compute())


class Graphs(CudaGraphs):
    """As on a GPU, where the run that compiles kernels gathers, and capturing itself runs nothing."""

    def __init__(self, *given: Any, faults: int = 0) -> None:
        """faults: how often capturing fails, after the run that gathers."""
        super().__init__(*given)
        self.made: list[Graph] = []
        self._faults = faults

    def _captured(self, device: str | None, compute: Any) -> Any:
        output = compute().clone()
        assert self._ranks is not None
        self._ranks.finish()
        if self._faults:
            self._faults -= 1
            raise CapacityError("no memory to capture a step")
        self.made.append(Graph(compute, output))
        return self.made[-1], output


def captured_steps(
    decoder: LanguageModel,
    pool: KVPool,
    kernels: KernelSet,
    config: EngineConfig,
    feature_layers: tuple[int, ...] | None = None,
) -> DecodeSteps:
    """`build.captured_steps` of a GPU."""
    assert feature_layers is None, "heads draft on CPUs alone"
    ranks = kernels.ranks.transport
    assert isinstance(ranks, Pushed)
    assert ranks.pushes, ranks.refused
    assert isinstance(decoder, Decoder)
    # as of the other ranks: rank 0 is the tests' process
    fails = ranks.rank > 0 and os.environ.get("FREIGHT_TEST_FAULT") == "capture"
    graphs = Graphs(decoder, pool, config.max_num_seqs, ranks, faults=int(fails))
    return DecodeSteps(graphs, pool, config.max_model_len, config.device)


def pushing_here(captures: bool, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on ranks of this process push. captures: and their decode steps are captured."""
    replace(device_memory, "open_peers", open_peers)
    replace(build, "obstacle_to_pushing", lambda *_: "")
    replace(push, "_TRIED", TRIED)
    if captures:
        replace(build, "captured_steps", captured_steps)
        replace(follower, "captured_steps", captured_steps)
