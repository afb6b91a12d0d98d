"""The builds of the CPU kernels: those of this architecture, those installed, those that run here.

`csrc/` is compiled once per instruction set, into libraries next to `kernels/cpu/library.py`, which
loads one. What is known without loading any is here, so that `--kernels cpu-avx2` is refused before
torch is imported. FREIGHT_CPU_BUILD leaves the one build that it names, in child processes too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from freight.settings.device import cpu_features

FOLDER = Path(__file__).parents[1] / "kernels" / "cpu"
BUILD_VARIABLE = "FREIGHT_CPU_BUILD"
PREFIX = "cpu-"  # of a build, as a value of --kernels
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
_BF16 = frozenset({"amx", "avx512", "neon_bf16"})  # whose products take bfloat16
FP8_IS_SLOW = (
    "this processor has no products in BF16: weights in INT8 (--quantization int8) are faster than FP8 here, in "
    "prompts and where memory is not the limit"
)
OTHER_BUILDS: dict[str, frozenset[str]] = {"portable": frozenset()}


def builds() -> dict[str, frozenset[str]]:
    """Return the builds for this machine's architecture, best first."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86_BUILDS
    return ARM64_BUILDS if machine in ("aarch64", "arm64") else OTHER_BUILDS


def multiplies_bfloat16(build: str) -> bool:
    """Return whether the products of a build take bfloat16, FP8 decoded to it too; else they are of
    float32.
    """
    return build in _BF16


def build_in(kernels: str) -> str:
    """Return the build that a value of --kernels names, or '': 'cpu-avx2' names avx2."""
    if kernels.startswith(PREFIX):
        return kernels.removeprefix(PREFIX)
    return ""


def path_of(build: str, folder: Path | None = None) -> Path:
    """Return the path of a build's library, whether or not it exists."""
    return (folder or FOLDER) / f"freight_{build}.so"


def installed(folder: Path | None = None) -> tuple[str, ...]:
    """Return the builds that were compiled, best first."""
    return tuple(build for build in builds() if path_of(build, folder).exists())


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


def obstacles(
    features: tuple[str, ...] | None = None, folder: Path | None = None
) -> dict[str, str]:
    """Return, for each build of this architecture, why it does not run here; '' if it does.

    features: default: those of this processor
    """
    have = cpu_features() if features is None else features
    compiled = installed(folder)
    reasons = {}
    for build in builds():
        reasons[build] = _obstacle(build, have)
        if not reasons[build] and build not in compiled:
            reasons[build] = "not compiled"
    return reasons


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
    if not installed(folder):
        return (
            "no compiled kernels: there was no C++17 compiler when Freight was installed; "
            "install one, then reinstall"
        )
    reasons = []
    best = "none"
    for build, obstacle in obstacles(features, folder).items():
        if not obstacle:
            best = build
            break
        reasons.append(f"{build}: {obstacle}")
    return best + (f" ({'; '.join(reasons)})" if reasons else "")
