"""The fingerprint of an engine: what decides its bits, as one short string.

Two engines with one fingerprint have the same weights, kernels, torch and settings. For the
compiled CPU kernels a request with the same prompt, parameters and seed then has the same bits,
whatever other requests run: no row's result depends on its neighbours (docs/internals/steps.md).
Other kernels leave matrix products to a library that may choose another order of summation for
another number of rows, so there a fingerprint promises nothing about bits.

Weights count by what the checkpoint declares of them, the headers of their files, their sizes, and
samples of their bytes: two fine-tunings of one model differ almost everywhere, and all of a large
model would take minutes to read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.model.open import OpenModel
from freight.operands.kv_pages import LARGE_BIAS, SMALL_BIAS
from freight.operands.tiles import STATE_TILE
from freight.settings.cpu_builds import path_of
from freight.settings.engine import EngineConfig

_SAMPLES = 64  # of each file of weights: how many, and their bytes
_SAMPLE = 1 << 16
_HEADER = 1 << 20


def fingerprint(opened: OpenModel, config: EngineConfig, kernels: KernelSet, version: str) -> str:
    """'fp_' and 16 hexadecimal digits; `version` is Freight's.

    Threads, the memory of the cache, stages and --state-every change no bit, and do not count; ranks do on
    GPUs, but with --exact-products. `config.kv` has the format of states.
    """
    state = hashlib.sha256()
    decides = (
        config.compute_format,
        config.weight_format,
        config.int4,
        config.int8_activations,
        config.kv,
        config.fp8_attention,
        config.max_model_len,
        (LARGE_BIAS, SMALL_BIAS) if config.kv.format.is_quantized else None,
    )
    tile = STATE_TILE if opened.model.recurrent else None  # tokens between roundings of a state
    for part in (
        version,
        torch.__version__,
        kernels.name,
        config.device,
        opened.model,
        declared(opened),
        decides,
        tile,
    ):
        state.update(repr(part).encode())
    if not isinstance(kernels, CpuKernels):
        if config.exact_products:
            state.update(b"exact products")
        elif (
            opened.ranks.size > 1
        ):  # a product of torch's may sum a part of a matrix in another order
            state.update(f"{opened.ranks.size} ranks".encode())
    if isinstance(kernels, CpuKernels):
        state.update(path_of(kernels.library.build).read_bytes())
    if opened.checkpoint is None:
        state.update(f"random weights of seed {config.seed}".encode())
    else:
        for file in opened.checkpoint.files:
            _add_file(state, file)
        state.update(opened.checkpoint.digest().encode())
    return f"fp_{state.hexdigest()[:16]}"


def declared(opened: OpenModel) -> str:
    """Return the digest of what a checkpoint declares, '' for random weights. `ModelConfig` has
    neither how weights and activations are quantized, nor what transformers' modules read.
    """
    if opened.checkpoint is None:
        return ""
    content = opened.checkpoint.config, opened.checkpoint.hf_quant_config
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_reproducible(opened: OpenModel, kernels: KernelSet) -> bool:
    """Return whether the same fingerprint, prompt, parameters and seed promise the same bits.

    Products of transformers' modules are torch's, which sum in another order for another number of
    rows.
    """
    return isinstance(kernels, CpuKernels) and opened.model.foreign is None


def _add_file(state: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    state.update(f"{file.name} {size}".encode())
    with file.open("rb") as data:
        state.update(data.read(_HEADER))
        for index in range(_SAMPLES):
            data.seek(size * index // _SAMPLES)
            state.update(data.read(_SAMPLE))
