"""A sequence of C calls, recorded while it runs, and replayed in one call (csrc/replay.cpp).

Weights that stream through the caches evict the code of the Python interpreter between two
products; a replay runs no Python. A recording repeats the same calls with the same arguments, so
its results have the same bits, for the values that the inputs hold at that time. It keeps
addresses: its owner must keep the inputs, the weights and the pages alive and in place.

A replay makes no call of torch. So a sequence in which torch did anything but view memory is not
recorded: a dispatch mode sees every operation of torch while the recording runs.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch

from freight.kernels.cpu import interface
from freight.kernels.cpu.interface import CACHE_LINE, FUNCTIONS, FreightCall
from freight.kernels.cpu.library import Library

_aten = torch.ops.aten
VIEWS = (
    _aten.view.default,
    _aten.view.dtype,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.unsqueeze.default,
    _aten.alias.default,
    _aten.flatten.using_ints,
    _aten.reshape.default,
    _aten.contiguous.default,  # this one and the two before may copy, which `_storage` detects
)


class Arena:
    """Memory for outputs of up to `max_rows` rows, shared by recordings that run one at a time.

    A recording reuses the memory of a tensor once that is freed, so the arena grows to the largest
    total that is alive at one time.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.blocks: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    def add(self, num_bytes: int) -> np.ndarray:
        """Allocate a block that begins at a cache line."""
        memory = np.empty(num_bytes + CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        self.blocks.append(memory[start : start + num_bytes])
        return self.blocks[-1]


@dataclass(frozen=True, eq=False)
class Recording:
    """Recorded calls, and the tensor in the arena that holds their result.

    `arguments` owns the structs that `calls` points to.
    """

    functions: Any
    calls: ctypes.Array[FreightCall]
    arguments: Sequence[ctypes.Structure]
    output: Tensor

    def replay(self) -> Tensor:
        """Make the calls and return `output`, which is valid until the arena is next used.

        Raises the error of the first call that fails.
        """
        interface.replay(self.functions, self.calls)
        return self.output


@dataclass(frozen=True)
class Recorded:
    """The result of a recorded run, and its recording.

    `recording` is None if the run cannot be replayed, for the reason in `obstacle`.
    """

    output: Tensor
    recording: Recording | None
    obstacle: str = ""


def record(library: Library, arena: Arena, run: Callable[[Library], Tensor]) -> Recorded:
    """Call `run` with a copy of `library` that records its calls.

    `run` must return the output of one of its calls; its result is the same as with `library`. An
    error that it raises is passed on.
    """
    recorder = _Recorder(library, arena)
    depth = torch._C._len_torch_dispatch_stack()
    try:  # not `with recorder`: an interrupt inside its __enter__ would leave the mode on
        dispatch._push_mode(recorder)
        output = run(recorder.library)
    finally:
        while torch._C._len_torch_dispatch_stack() > depth:
            dispatch._pop_mode()
    if not recorder.owns(output):
        recorder.obstacle = recorder.obstacle or "its result is not the output of a recorded call"
    if recorder.obstacle:
        return Recorded(output, None, recorder.obstacle)
    arguments = [call for _, call in recorder.calls]
    calls = (FreightCall * len(arguments))(
        *(FreightCall(ctypes.addressof(call), code) for code, call in recorder.calls)
    )
    return Recorded(output, Recording(library.functions, calls, arguments, output))


class _Recorder(dispatch.TorchDispatchMode):
    """The library that records, and the dispatch mode that sees torch's operations meanwhile."""

    def __init__(self, library: Library, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[int, ctypes.Structure]] = []
        self.obstacle = ""
        self._arena = arena
        self._free = list(arena.blocks)
        # Asked, not called back: Python drops an interrupt that comes in a callback of a reference.
        self._lent: list[tuple[weakref.ref[np.ndarray], np.ndarray]] = []
        self._allocating = False
        functions = {
            f"freight_{name}": partial(
                self._call, code, getattr(library.functions, f"freight_{name}")
            )
            for code, name in enumerate(FUNCTIONS)
        }
        self.library = replace(library, functions=SimpleNamespace(**functions), empty=self.empty)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo, which takes seconds

    def _call(
        self, code: int, function: Callable[[Any], None], arguments: ctypes.Structure
    ) -> None:
        function(arguments)
        self.calls.append((code, arguments))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate an output in the arena, in place of `Library.empty`."""
        assert shape[0] <= self._arena.max_rows
        row = math.prod(shape[1:]) * dtype.itemsize
        # Bytes for max_rows rows, so that outputs of any number of rows share blocks.
        needed = -(-row * self._arena.max_rows // CACHE_LINE) * CACHE_LINE
        self._take_back()
        fitting = [index for index, block in enumerate(self._free) if block.nbytes >= needed]
        best = min(fitting, key=lambda index: self._free[index].nbytes, default=None)
        block = self._arena.add(needed) if best is None else self._free.pop(best)
        # The tensor's storage, which its views share, keeps `handle` alive. Once `handle` is
        # collected, no tensor can read the block.
        handle = block[: row * shape[0]]
        self._lent.append((weakref.ref(handle), block))
        self._allocating = True
        try:
            return torch.from_numpy(handle).view(dtype).view(shape)
        finally:
            self._allocating = False

    def _take_back(self) -> None:
        """Count the blocks that no tensor reads any more as free."""
        lent = self._lent
        self._lent = []
        for handle, block in lent:
            if handle() is None:
                self._free.append(block)
            else:
                self._lent.append((handle, block))

    def owns(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in the arena."""
        address = tensor.data_ptr()
        return any(
            block.ctypes.data <= address < block.ctypes.data + block.nbytes
            for block in self._arena.blocks
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._allocating and not (func in VIEWS and _storage(result) == _storage(args[0])):
            self.obstacle = self.obstacle or f"{func} is not one of the kernels"
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
