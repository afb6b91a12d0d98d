"""The compiled CPU kernels: the installed builds, the ones this processor runs, and their loading.

`csrc/` is compiled once per instruction set. The libraries are stored next to this file, and are
absent if there was no compiler at install time. The best one that the processor runs is loaded, or
the one that FREIGHT_CPU_BUILD names, in child processes too. A library of another interface version
(ABI) than this source is refused.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freight.errors import KernelError, choices, shown
from freight.kernels.cpu.interface import ABI, open_library
from freight.settings.device import bound_nodes, check_stack, cpu_features

FOLDER = Path(__file__).parent
BUILD_VARIABLE = "FREIGHT_CPU_BUILD"
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_VNNI = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
_AVX512 = _VNNI | {"avx512vbmi", "avx512_bf16"}
# By architecture, best first: the name of a build, and what /proc/cpuinfo must list for it.
X86_BUILDS: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"avx512dq", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,  # the code of avx2, but for products in INT8
    "avx_vnni": _AVX2 | {"avx_vnni"},  # the same, where there is no AVX-512
    "avx2": _AVX2,
    "portable": frozenset(),
}
# All processors with BF16 have the dot products of bytes (FEAT_DotProd), which neon_bf16 also uses.
ARM64_BUILDS: dict[str, frozenset[str]] = {"neon_bf16": frozenset({"bf16"}), "neon": frozenset()}
OTHER_BUILDS: dict[str, frozenset[str]] = {"portable": frozenset()}


def builds() -> dict[str, frozenset[str]]:
    """Return the builds for this machine's architecture, best first."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86_BUILDS
    return ARM64_BUILDS if machine in ("aarch64", "arm64") else OTHER_BUILDS


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


def installed(folder: Path | None = None) -> tuple[str, ...]:
    """Return the builds that were compiled, best first."""
    return tuple(build for build in builds() if path_of(build, folder).exists())


def path_of(build: str, folder: Path | None = None) -> Path:
    """Return the path of a build's library, whether or not it exists."""
    return (folder or FOLDER) / f"freight_{build}.so"


def runnable(features: Iterable[str] | None = None, folder: Path | None = None) -> tuple[str, ...]:
    """Return the installed builds that a processor with these features runs, best first.

    features: as in /proc/cpuinfo; default: those of this processor, of whose builds
        FREIGHT_CPU_BUILD leaves the one that it names
    """
    have = cpu_features() if features is None else tuple(features)
    usable = tuple(build for build in installed(folder) if not _obstacle(build, have))
    named = named_build() if features is None else ""
    return tuple(build for build in usable if build == named) if named else usable


def named_build() -> str:
    """Return the build that FREIGHT_CPU_BUILD names, or '' if it is unset or empty."""
    return os.environ.get(BUILD_VARIABLE, "")


def _obstacle(build: str, features: tuple[str, ...]) -> str:
    """Return the reason why a processor with these features does not run `build`, or ''."""
    lacks = sorted(builds()[build] - set(features))
    if lacks:
        return f"the processor lacks {', '.join(lacks)}"
    return tile_obstacle() if "amx_tile" in builds()[build] else ""


@cache
def tile_obstacle() -> str:
    """Request the tile registers of AMX; return the reason if they are denied, or ''.

    Linux saves the 8 KiB of tiles only for processes that ask (Documentation/arch/x86/xstate.rst).
    The permission also covers existing threads.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 lets Freight request tile registers"
    sys_arch_prctl = 158  # of Linux's headers
    arch_req_xcomp_perm = 0x1023
    xtiledata = 18
    libc = ctypes.CDLL(None, use_errno=True)
    request = (ctypes.c_long(sys_arch_prctl), ctypes.c_long(arch_req_xcomp_perm))
    if libc.syscall(*request, ctypes.c_long(xtiledata)) == 0:
        return ""
    return f"Linux denied this process the tile registers ({os.strerror(ctypes.get_errno())})"


def describe(features: tuple[str, ...] | None = None, folder: Path | None = None) -> str:
    """Describe the choice in one line: the build that runs and why no better one, or why none."""
    if features is None and named_build():
        return f"{named_build()} ({BUILD_VARIABLE})"
    features = cpu_features() if features is None else features
    if not installed(folder):
        return (
            "no compiled kernels: there was no C++17 compiler when Freight was installed; "
            "install one, then reinstall"
        )
    best, *_ = runnable(features, folder) or ("none",)
    reasons = []
    names = list(builds())
    for build in names[: names.index(best) if best in names else None]:
        reasons.append(f"{build}: {_obstacle(build, features) or 'not compiled'}")
    return best + (f" ({'; '.join(reasons)})" if reasons else "")


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
