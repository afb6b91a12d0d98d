"""`freight env`: what Freight runs on here, for people and for bug reports."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

import typer

from freight.base import openmp
from freight.base.fields import JsonObject
from freight.cli.options import Kernels, OneJson
from freight.settings.cpu_builds import build_in, describe, obstacles
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check

if TYPE_CHECKING:
    from freight.kernels.interface import KernelSet

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def env(
    kernels: Kernels = "auto",
    as_json: OneJson = False,
) -> None:
    """Show versions, processor, memory, GPU and the kernels in use."""
    args = EngineArgs(kernels=kernels)
    check(args)
    facts = collect(args)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        if name == "cpu_builds":
            value = "; ".join(f"{build}: {why or 'can run'}" for build, why in value.items())
        elif name == "gpus":
            value = "; ".join(map(_gpu, value))
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {version}" for key, version in value.items())
        elif isinstance(value, list):
            value = " ".join(value)
        elif name.startswith("memory_"):
            value = f"{value / 2**30:.1f} GiB"
        if value in (None, ""):
            value = "none"
        typer.echo(f"{name.replace('_', ' '):<16} {value}")


def _gpu(gpu: dict[str, Any]) -> str:
    """'NVIDIA H100, 79.6 GiB of 80.0 GiB free'."""
    free = gpu["memory_free"] / 2**30
    total = gpu["memory_total"] / 2**30
    return f"{gpu['name']}, {free:.1f} GiB of {total:.1f} GiB free"


def collect(args: EngineArgs) -> JsonObject:
    """Return the facts, by the names of the JSON. Memory in bytes. Of `args` counts `kernels`."""

    import freight
    from freight.errors import KernelError
    from freight.kernels.select import select_kernels
    from freight.settings.device import (
        bound_nodes,
        cards,
        choose_threads,
        cpu_features,
        cpu_name,
        gpu_present,
        numa_nodes,
        physical_cores,
        probe,
    )

    device = probe(args.computes_on)
    chosen = choose_threads(None, device.cores)
    threads = chosen.count
    prefetched = None
    possible = min(device.cores, physical_cores() or device.cores)
    try:
        kernel_set = select_kernels(args.kernels, str(device.kind))
        kernels = kernel_set.name
        note = device.note
        with chosen:
            prefetched = _prefetched(kernel_set)
    except KernelError as error:
        kernels = None
        note = str(error)
    notes = (openmp.few_threads(os.environ, threads, possible), openmp.long_waits(os.environ))
    return {
        "versions": {"freight": freight.__version__, "python": platform.python_version()}
        | _versions(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_features": list(cpu_features()),
        "cores": device.cores,
        "threads": threads,
        "openmp": openmp.variables(os.environ),
        "threads_note": "; ".join(filter(None, notes)),
        "numa_nodes": len(numa_nodes()),
        "threads_bound": bool(bound_nodes()),
        "device": str(device.kind),
        "device_name": device.name,
        "native_e4m3": str(device.native_e4m3),
        "memory_total": device.memory_total,
        "memory_free": device.memory_free,
        "torch_build": _torch_build(),
        "gpu_present": gpu_present(),
        "gpus": [asdict(card) for card in cards()],
        "kernels": kernels,
        "kernels_because": _because(args.kernels),
        "cpu_builds": {build: why or None for build, why in obstacles().items()},
        "prefetch": prefetched,
        "note": note,
    }


def _because(kernels: str) -> str:
    """Say why the CPU computes with the build that it does; `kernels` is --kernels."""
    if kernels == "auto":
        return describe()
    return f"{build_in(kernels) or kernels} (--kernels)"


def _prefetched(kernels: KernelSet) -> str | None:
    """Say how weights are prefetched: what an engine measures at its first start on a processor.

    None for kernels that measure nothing.
    """
    from freight.kernels.cpu.cpu_set import CpuKernels
    from freight.kernels.cpu.tuning import tune

    if not isinstance(kernels, CpuKernels):
        return None
    past = tune(kernels.library)
    if past is None:
        return None
    return "past the caches" if past else "into the caches"


def _torch_build() -> str:
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    if hip:
        return f"ROCm {hip}"
    return "CPU"


def _versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
