"""`freight bench kernels`: each operation of the selected kernel set on its own, beside torch's, by shape and format.

Every row takes turns over copies of what it reads, together larger than any cache, as it is when a model runs. Its
`bandwidth_fraction` is the bytes that it has to read and write, divided by its median time and by the bandwidth
measured right before and after it. Shapes: `linear` [rows, out_features, in_features]; `attention`
[batch, context, num_heads, num_kv_heads, head_dim], one query a sequence; `rotate_store`
[rows, num_heads + 2 * num_kv_heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from freight.bench.timing import MemoryProbe, bytes_beyond_caches, time_alternately
from freight.cache.pool import allocate_pool
from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.config.engine import KVCacheConfig
from freight.config.model import ModelConfig
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import encode
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels import reference
from freight.kernels.interface import KernelSet
from freight.models.random_weights import RandomSource
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary

MOST_COPIES = 256  # what is so small that these fit into the caches is measured there
BLOCK_SIZE = 16
CACHES: tuple[tuple[Format, Granularity | None], ...] = (
    (Format.BFLOAT16, None),
    *((Format.E4M3FN, granularity) for granularity in Granularity),
    (Format.E4M3FNUZ, Granularity.TENSOR),
    (Format.E5M2, None),
    (Format.INT8, Granularity.TOKEN),
)


@dataclass(frozen=True)
class Case:
    """One row: `calls` do the same on different memory, and each has to move `num_bytes`."""

    kernel: str
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    calls: Sequence[Callable[[], object]]


def measure_kernels(
    kernels: KernelSet,
    model: ModelConfig,
    matrix: tuple[int, int],
    rows: Sequence[int],
    context: int,
    seconds: float,
    only: Sequence[str] = (),
    cache_size: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield what --json prints, a row at a time. `matrix` [out_features, in_features] comes beside the model's own.

    `only` names the kernels wanted; none: all. `seconds` are spent on each row, and at least five runs. `cache_size`,
    in bytes, is what the copies together exceed; default: `bytes_beyond_caches`.
    """
    cache_size = cache_size or bytes_beyond_caches()
    probe = MemoryProbe(max(2 * cache_size, 4096))
    for make in _cases(kernels, model, matrix, rows, context, cache_size, only):
        case = make()
        before = probe.sample()
        spread = time_alternately({"": case.calls}, seconds)[""]
        bandwidth = (before + probe.sample()) / 2
        yield {
            "kernel": case.kernel,
            "format": case.format,
            "shape": list(case.shape),
            "median_us": spread.median * 1e6,
            "bandwidth_fraction": case.num_bytes / spread.median / bandwidth,
            "low_us": spread.low * 1e6,
            "high_us": spread.high * 1e6,
            "bytes": case.num_bytes,
            "read_bandwidth_bytes_per_second": bandwidth,
            "kernels": "torch" if case.kernel.startswith("torch") else kernels.name,
            "threads": torch.get_num_threads(),
        }


def _cases(
    kernels: KernelSet,
    model: ModelConfig,
    matrix: tuple[int, int],
    rows: Sequence[int],
    context: int,
    cache_size: int,
    only: Sequence[str],
) -> Iterator[Callable[[], Case]]:
    """What makes each case, in the order of the report; one exists at a time, as together they are large."""

    def wanted(kernel: str) -> bool:
        return not only or kernel in only

    for shape in dict.fromkeys((matrix, *linear_shapes(model))):
        for count in rows:
            for format in (Format.E4M3FN, Format.BFLOAT16):
                if wanted("linear"):
                    yield partial(_linear, kernels, format, shape, count, cache_size)
            if wanted("torch.linear"):
                yield partial(_torch_linear, shape, count, cache_size)
            if wanted("torch._scaled_mm") and count == rows[0]:
                yield partial(_scaled_mm, shape, count, cache_size)
    for format, granularity in CACHES:
        if wanted("attention"):
            yield partial(_attention, kernels, model, format, granularity, context, cache_size)
    for format, granularity in CACHES:
        if wanted("rotate_store"):
            yield partial(_store, kernels, model, format, granularity, max(rows), cache_size)


def linear_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """[out_features, in_features] of the merged projections of the first layer."""
    mixer, feed_forward = model.layers[0].mixer, model.layers[0].feed_forward
    return [
        (sum(mixer.qkv_sizes), model.hidden_size),
        (model.hidden_size, mixer.num_heads * mixer.v_dim),
        (2 * feed_forward.intermediate_size, model.hidden_size),
        (model.hidden_size, feed_forward.intermediate_size),
    ]


def _copies(num_bytes: int, cache_size: int) -> range:
    """Enough of them that none stays in a cache until its turn comes again."""
    return range(min(MOST_COPIES, max(1, -(-cache_size // num_bytes))))


def _source(format: Format) -> RandomSource:
    return RandomSource(Format.BFLOAT16, format, "cpu", torch.Generator().manual_seed(0))


def _activations(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu").bfloat16()


def _linear(kernels: KernelSet, format: Format, shape: tuple[int, int], rows: int, cache_size: int) -> Case:
    size = shape[0] * shape[1] * format.bytes + (4 * shape[0] if format.is_fp8 else 0)
    x, source = _activations(rows, shape[1]), _source(format)
    weights = [kernels.pack(source.weight("", shape)) for _ in _copies(size, cache_size)]
    calls = [partial(kernels.linear, x, weight, None) for weight in weights]
    return Case("linear", str(format), (rows, *shape), size + 2 * rows * sum(shape), calls)


def _torch_linear(shape: tuple[int, int], rows: int, cache_size: int) -> Case:
    size = 2 * shape[0] * shape[1]
    x, source = _activations(rows, shape[1]), _source(Format.BFLOAT16)
    weights = [source.tensor("", shape) for _ in _copies(size, cache_size)]
    calls = [partial(functional.linear, x, weight) for weight in weights]
    return Case("torch.linear", "bfloat16", (rows, *shape), size + 2 * rows * sum(shape), calls)


def _scaled_mm(shape: tuple[int, int], rows: int, cache_size: int) -> Case:
    size = shape[0] * shape[1]
    x, source = encode(_activations(rows, shape[1]), 0.01, Format.E4M3FN), _source(Format.E4M3FN)
    weights = [source.weight("", shape).data for _ in _copies(size, cache_size)]
    one = torch.ones((), dtype=torch.float32, device="cpu")

    def call(weight: Tensor) -> Tensor:
        product: Tensor = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return product

    calls = [partial(call, weight) for weight in weights]
    return Case("torch._scaled_mm", str(Format.E4M3FN), (rows, *shape), size + rows * (2 * shape[0] + shape[1]), calls)


def _pages(
    kernels: KernelSet, model: ModelConfig, format: Format, granularity: Granularity | None, tokens: int, copies: range
) -> tuple[list[KVPages], int]:
    """Pages full of random keys and values for `tokens` tokens, and the bytes of one copy."""
    mixer = model.layers[0].mixer
    heads, dim = mixer.num_kv_heads, mixer.k_dim
    source, scales = None, None
    if granularity is Granularity.TOKEN:
        source = ScaleSource.DYNAMIC
    elif granularity is not None:
        source = ScaleSource.CALIBRATED
        values = (4.0 / format.max,) * granularity.num_scales(heads, dim)
        scales = KVScales((LayerScales(values, values, granularity),), format)
    config = KVCacheConfig(format, granularity, source, scales)
    spec = KVCacheSpec((LayerKVSpec(format, granularity, heads, dim, dim),), BLOCK_SIZE)
    blocks = -(-tokens // BLOCK_SIZE)
    pools = [allocate_pool(spec, config, (blocks,), kernels) for _ in copies]
    k, v = (_activations(tokens, heads * dim).view(tokens, heads, dim) for _ in "kv")
    slots = torch.arange(tokens, dtype=torch.int64, device="cpu")
    for pool in pools:
        reference.store_kv(k, v, slots, pool.layers[0].pages)
    return [pool.layers[0].pages for pool in pools], spec.bytes_per_token * tokens


def cache_name(format: Format, granularity: Granularity | None) -> str:
    return f"{format}, {granularity}" if granularity else str(format)


def _attention(
    kernels: KernelSet,
    model: ModelConfig,
    format: Format,
    granularity: Granularity | None,
    context: int,
    cache_size: int,
) -> Case:
    """One sequence decodes one token after `context` - 1 others; its blocks lie in no order."""
    mixer = model.layers[0].mixer
    heads, dim = mixer.num_heads, mixer.k_dim
    size = 2 * mixer.num_kv_heads * dim * context * format.bytes
    pages, size = _pages(kernels, model, format, granularity, context, _copies(size, cache_size))
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(-(-context // BLOCK_SIZE), generator=generator, dtype=torch.int64, device="cpu").tolist()
    batch = prepare([SequenceSlice([0], context - 1, (order,), Logits.NONE)], BLOCK_SIZE)
    q = _activations(1, heads * dim).view(1, heads, dim)
    calls = [partial(kernels.attention, q, page, batch.sequences(0), dim**-0.5, None) for page in pages]
    shape = (1, context, heads, mixer.num_kv_heads, dim)
    return Case("attention", cache_name(format, granularity), shape, size + 4 * heads * dim, calls)


def _store(
    kernels: KernelSet, model: ModelConfig, format: Format, granularity: Granularity | None, rows: int, cache_size: int
) -> Case:
    mixer = model.layers[0].mixer
    heads, dim = mixer.num_heads + 2 * mixer.num_kv_heads, mixer.k_dim
    copies = _copies(2 * mixer.num_kv_heads * dim * rows * format.bytes, cache_size)
    pages, size = _pages(kernels, model, format, granularity, rows, copies)
    qkv = _activations(rows, heads * dim)
    positions = torch.arange(rows, dtype=torch.int64, device="cpu")
    rotary = Rotary(*torch.rand(2, rows, dim // 2, dtype=torch.float32, device="cpu"))
    size += 2 * rows * (heads + mixer.num_heads) * dim + 4 * rows * dim  # qkv and q, cosines and sines
    calls = [partial(kernels.rotate_store, qkv, rotary, positions, positions, page) for page in pages]
    return Case("rotate_store", cache_name(format, granularity), (rows, heads, dim), size, calls)
