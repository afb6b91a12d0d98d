"""The loading of the compiled CPU kernels.

`csrc/` is compiled once per instruction set. The libraries are stored next to this file, and are
absent if there was no compiler at install time. A build that is named is loaded, or else the best
that the processor runs (`settings/cpu_builds.py`). A library of another interface version (ABI)
than this source is refused.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freight.errors import KernelError, choices, shown
from freight.kernels.cpu.interface import ABI, open_library
from freight.settings.cpu_builds import BUILD_VARIABLE, describe, named_build
from freight.settings.cpu_builds import installed as installed
from freight.settings.cpu_builds import path_of as path_of
from freight.settings.cpu_builds import runnable as runnable
from freight.settings.device import bound_nodes, check_stack, cpu_features


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in main memory; its values are undefined."""
    return torch.empty(shape, dtype=dtype, device="cpu")


@dataclass(frozen=True, eq=False)
class Library:
    """One loaded build: `functions` are the C functions of interface.py, `empty` makes outputs."""

    build: str
    functions: Any
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor] = new_tensor

    def set_prefetch(self, non_temporal: bool) -> None:
        """Prefetch weights past the caches (True) or into them (False, the default).

        Changes no result.
        """
        self.functions.freight_set_prefetch(int(non_temporal))


@cache
def load(build: str | None = None) -> Library:
    """Load `build`, or the one that FREIGHT_CPU_BUILD names, or the best that this processor runs.

    Raises KernelError if none is installed, if the processor does not run `build` or the one that
    is named, and for a stale library; ConfigError as `check_stack` does.
    """
    check_stack()
    usable = runnable()
    named = named_build()
    if named and not usable:
        raise KernelError(
            f"{BUILD_VARIABLE} is {shown(named)}, and no such build of the CPU kernels can run; "
            f"usable here: {', '.join(runnable(cpu_features())) or 'none'}"
        )
    if not usable or (build is not None and build not in usable):
        kernels_name = f"the {build} build of the CPU kernels" if build else "the CPU kernels"
        have = f"usable here: {choices(usable)}" if usable else "none is usable here"
        raise KernelError(f"{kernels_name} cannot run ({have}): {describe()}")
    name = build or usable[0]
    return load_file(path_of(name), name)


def load_file(path: Path, build: str) -> Library:
    """Load the library of `build` at `path`. Raises KernelError if it is stale or not a library."""
    try:
        functions = open_library(path)
        abi = functions.freight_abi()
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} cannot be loaded: {error}; reinstall Freight") from error
    if abi != ABI:
        raise KernelError(
            f"{path} is of another version (interface {abi}, not {ABI}); reinstall Freight"
        )
    functions.freight_init(_gomp_parallel())
    bind(functions, bound_nodes())
    return Library(build, functions)


def bind(functions: Any, nodes: Sequence[frozenset[int]]) -> None:
    """Bind the threads of kernels to these memory nodes, round-robin.

    nodes: the logical processors of each node; if empty, the operating system places the threads
    """
    if not nodes:
        return
    node_of = {processor: index for index, node in enumerate(nodes) for processor in node}
    count = max(node_of) + 1
    table = (ctypes.c_int32 * count)(*(node_of.get(processor, -1) for processor in range(count)))
    functions.freight_bind(table, count, len(nodes))


def _gomp_parallel() -> int | None:
    """Return the address of GOMP_parallel in torch's OpenMP runtime, or None without one.

    With it the kernels and torch share one pool of threads.
    """
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        return None
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
