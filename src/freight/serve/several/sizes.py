"""What models need, before one is loaded: `measure`, in a process of its own, which imports torch.

A model needs its weights as the kernels hold them, as `freight plan` counts them, and its cache. The
cache takes a share of the free memory where one model is served. Beside others that share would
depend on what else is loaded at the time, so here its size is fixed at start: what
--kv-cache-memory says, else `CACHE` bytes, less where the model cannot use so much, and more where
a request of --max-model-len tokens needs it.
"""

from __future__ import annotations

from freight.base.descent import ENDING, end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before imports that take long

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from freight.base.fields import JsonDict
from freight.errors import FreightError, shown
from freight.serve.processes.children import spawn, without_secrets
from freight.settings.engine import EngineArgs

if TYPE_CHECKING:
    from freight.model.open import OpenModel
    from freight.model.sizes import Layout
    from freight.settings.engine import EngineConfig

logger = logging.getLogger("freight")

CACHE = 1 << 30  # bytes, unless given
SHARE = 0.8  # of the memory that is free at start, unless --models-memory says otherwise


@dataclass(frozen=True)
class Size:
    """Bytes that a loaded model holds. `failure`: why it cannot be loaded, in words; else ''."""

    weights: int = 0
    cache: int = 0
    failure: str = ""

    @property
    def total(self) -> int:
        return self.weights + self.cache


@dataclass(frozen=True)
class Sizes:
    """The size of each model, in order, and the bytes that are free on the device."""

    models: tuple[Size, ...]
    free: int


def measure(models: Sequence[EngineArgs]) -> Sizes:
    """Open each model, check all that is known before its weights are read, and count."""
    environ = without_secrets(os.environ)
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    process = spawn(command, env=environ, stdin=pipe, stdout=pipe)
    try:
        out, _ = process.communicate(json.dumps([asdict(args) for args in models]).encode())
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise FreightError(
            f"the process that opens the models ended with {process.returncode}; what it wrote is above"
        )
    answer = json.loads(out)
    return Sizes(tuple(Size(**size) for size in answer["models"]), answer["free"])


def main() -> None:
    """Read a list of `EngineArgs` as JSON, and write what `measure` returns."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    logging.getLogger("freight").setLevel(logging.ERROR)
    from freight.settings.device import probe

    models = [EngineArgs(**args) for args in json.load(sys.stdin)]
    free = min((probe(args.computes_on).memory_free for args in models), default=0)
    json.dump({"models": list(map(_measured, models)), "free": free}, sys.stdout)


def _measured(args: EngineArgs) -> JsonDict:
    try:
        return asdict(size_of(args))
    except FreightError as error:
        return asdict(Size(failure=str(error)))
    except Exception as error:  # a fault here, which ends no other model
        logger.exception("model %s", shown(args.model))
        return asdict(Size(failure=f"{type(error).__name__}: {error}"))


def size_of(args: EngineArgs) -> Size:
    """Return the size of one model. Raises ConfigError, CheckpointError and CapacityError."""
    from freight.engine.build import planned
    from freight.model.open import open_model
    from freight.settings.resolve import for_serving

    opened = open_model(args)
    opened = replace(opened, args=for_serving(args, str(opened.device.kind)))
    config = opened.resolve(opened.args)
    cache = config.kv_cache_memory
    if cache is None:
        cache = default_cache(opened, config)
        opened = replace(opened, args=replace(opened.args, kv_cache_memory=cache))
    return Size(weight_bytes(opened, planned(opened)), cache)


def default_cache(opened: OpenModel, config: EngineConfig) -> int:
    """Return bytes for the cache of a model whose options say none."""
    from freight.cache.sizing import bytes_of_request, useful_memory

    sizes = config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens
    spec = opened.cache_spec(config)
    least = bytes_of_request(spec, min(config.max_model_len, config.block_size), sizes[2])
    if opened.args.max_model_len is not None:
        least = bytes_of_request(spec, config.max_model_len, sizes[2])
    return max(1, least, min(CACHE, useful_memory(spec, *sizes)))


def weight_bytes(opened: OpenModel, config: EngineConfig) -> int:
    """Return the bytes of the weights, of all ranks, with tables and the memory for adapters."""
    from freight.model.adapted import adapter_bytes
    from freight.model.sizes import loaded_bytes

    compute = config.compute_format
    ranks = opened.args.tensor_parallel_size
    weights, linear_of = opened.matrices(config)
    layout = _layout(opened, config)
    length = config.max_model_len
    model = opened.model
    loaded = loaded_bytes(model, compute, weights, linear_of, layout, length, ranks)
    return ranks * (loaded.total + adapter_bytes(model, config.lora, compute.bytes, ranks))


def _layout(opened: OpenModel, config: EngineConfig) -> Layout:
    """Return the layout of the kernels that will run."""
    from freight.kernels.cpu.cpu_set import CpuKernels
    from freight.model.sizes import Layout
    from freight.settings.device import cpu_features

    if not isinstance(opened.kernels(config), CpuKernels):
        return Layout.PLAIN
    return Layout.TILES if {"amx_tile", "amx_bf16"} <= set(cpu_features()) else Layout.PACKED


def with_cache(args: EngineArgs, size: Size) -> EngineArgs:
    """Return the options with the cache that was counted."""
    return args if size.failure else replace(args, kv_cache_memory=size.cache)


if __name__ == "__main__":
    main()
