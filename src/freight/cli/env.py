"""`freight env`: what Freight runs on here, for people and for bug reports."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata

import typer

from freight.base import openmp
from freight.base.fields import JsonObject
from freight.cli.options import OneJson
from freight.settings.cpu_builds import describe

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def env(
    as_json: OneJson = False,
) -> None:
    """Show versions, processor, memory, GPU and the kernels in use."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {version}" for key, version in value.items())
        elif isinstance(value, list):
            value = " ".join(value)
        elif name.startswith("memory_"):
            value = f"{value / 2**30:.1f} GiB"
        if value in (None, ""):
            value = "none"
        typer.echo(f"{name.replace('_', ' '):<16} {value}")


def collect() -> JsonObject:
    """Return the facts, by the names of the JSON. Memory in bytes."""

    import freight
    from freight.errors import KernelError
    from freight.kernels.select import select_kernels
    from freight.settings.device import (
        bound_nodes,
        choose_threads,
        cpu_features,
        cpu_name,
        gpu_present,
        numa_nodes,
        physical_cores,
        probe,
    )

    device = probe("auto")
    threads = choose_threads(None, device.cores).count
    possible = min(device.cores, physical_cores() or device.cores)
    try:
        kernels = select_kernels("auto", str(device.kind)).name
        note = device.note
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
        "kernels": kernels,
        "kernels_because": describe(),
        "note": note,
    }


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
