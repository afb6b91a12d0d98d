"""`freight bench kernels` on a GPU: what the Triton kernel set does, beside torch's own, timed by events over graphs.

`bandwidth_fraction` is the bytes that a row has to read and write, over its median time and the bandwidth of a copy on
the same device, read and written bytes both counted. Shapes: `attention` [batch, new tokens, context, heads, KV heads,
head_dim]; `rotate_store` [tokens, heads + 2 * KV heads, head_dim]; products [rows, out_features, in_features].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from freight.bench.timing import Spread
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels.interface import KernelSet
from freight.kernels.select import select_kernels
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary
from freight.operands.weight import Activations, Weight

BLOCK_SIZE = 16
CACHES = ((Format.BFLOAT16, "none"), (Format.E4M3FN, "static"), (Format.E4M3FN, "token"), (Format.E5M2, "unit"))


@dataclass(frozen=True)
class Sizes:
    """What is measured: `attention` are (batch, new tokens, context)."""

    attention: tuple[tuple[int, int, int], ...] = ((64, 1, 8192), (1, 1, 131072), (1, 8192, 8192))
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    store: int = 8192
    product: tuple[int, int, int] = (8192, 8192, 8192)
    decode_products: tuple[tuple[int, int, int], ...] = ((1, 4096, 14336), (1, 28672, 4096), (64, 28672, 4096))


@dataclass(frozen=True)
class Case:
    """One row. `num_bytes` have to be moved and `num_flops` done, causal pairs only."""

    kernel: str
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    num_flops: int
    call: Callable[[], object]


def measure_on_gpu(kernels: KernelSet, only: Sequence[str], seconds: float, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield what --json prints, a row at a time; `only` names the kernels wanted, none: all."""
    for make in cases(kernels, sizes, "cuda", only):
        before = copy_bandwidth()
        case = make()
        spread = seconds_in_graph(case.call, seconds)
        bandwidth = (before + copy_bandwidth()) / 2
        yield {
            "kernel": case.kernel,
            "format": case.format,
            "shape": list(case.shape),
            "median_us": spread.median * 1e6,
            "low_us": spread.low * 1e6,
            "high_us": spread.high * 1e6,
            "bytes": case.num_bytes,
            "bandwidth_fraction": case.num_bytes / spread.median / bandwidth,
            "tflops": case.num_flops / spread.median / 1e12,
            "copy_bandwidth_bytes_per_second": bandwidth,
            "kernels": "torch" if case.kernel.startswith("torch") else kernels.name,
            "device": torch.cuda.get_device_name(),
        }
        del case
        torch.cuda.empty_cache()


def seconds_in_graph(call: Callable[[], object], seconds: float, least: int = 10) -> Spread:
    """Of one call, launched by a graph, without what it costs to launch from Python."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # written before each run: larger than any cache
    samples: list[float] = []
    while len(samples) < least or (sum(samples) < seconds and len(samples) < 200):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return Spread.of(samples)


def copy_bandwidth(size: int = 2**31) -> float:
    """Bytes read and written per second by a copy on the device: the median of five."""
    source, target = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / seconds_in_graph(lambda: target.copy_(source), 0.0, least=5).median


def cases(kernels: KernelSet, sizes: Sizes, device: str, only: Sequence[str] = ()) -> Iterator[Callable[[], Case]]:
    """What makes each case, one at a time, as together they are large."""
    fp8 = select_kernels(kernels.name, device, fp8_attention=True)

    def wanted(kernel: str) -> bool:
        return not only or kernel in only

    for shape in sizes.attention:
        if wanted("attention"):
            for format, scales in CACHES:
                yield partial(_attention, kernels, sizes, shape, format, scales, device)
                if format.is_e4m3:
                    yield partial(_attention, fp8, sizes, shape, format, scales, device, ", FP8 products")
        if wanted("torch.sdpa"):
            yield partial(_torch_attention, sizes, shape, device, SDPBackend.FLASH_ATTENTION)
            if device == "cuda" and shape[1] > 1 and torch.version.hip is None:
                yield partial(_torch_attention, sizes, shape, device, SDPBackend.CUDNN_ATTENTION)
    if wanted("rotate_store"):
        for format, scales in CACHES:
            yield partial(_store, kernels, sizes, format, scales, device)
    for product in (sizes.product, *sizes.decode_products):
        if wanted("linear"):
            for activations in (Activations.DYNAMIC, Activations.PLAIN):
                yield partial(_linear, kernels, product, activations, device)
        if wanted("torch.linear"):
            yield partial(_torch_linear, product, device)
    if wanted("torch._scaled_mm") and device == "cuda":
        for fast in (False, True):
            yield partial(_scaled_mm, sizes.product, fast)


def _pages(sizes: Sizes, num_blocks: int, format: Format, scales: str, device: str) -> KVPages:
    """Pages of random values without NaNs."""
    shape = (num_blocks, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)

    def page() -> Tensor:
        if not format.is_fp8:
            return torch.randn(shape, dtype=torch_dtype(format), device=device)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device) & 0xBF  # exponents of no NaN
        return codes.view(torch_dtype(format))

    def scale() -> Tensor | None:
        if scales == "token":
            return torch.full(shape[:3], 0.02, dtype=torch.bfloat16, device=device)
        return torch.full(shape[2:], 0.02, dtype=torch.float32, device=device) if scales == "static" else None

    return KVPages(page(), page(), scale(), scale(), torch.zeros(2, dtype=torch.int64, device=device))


def _bytes_of(pages: KVPages, tokens: int) -> int:
    per_token = 2 * pages.k.shape[2] * (pages.k.shape[3] * pages.k.itemsize + (2 if pages.dynamic else 0))
    return per_token * tokens


def _work(sizes: Sizes, shape: tuple[int, int, int]) -> tuple[int, int]:
    """(bytes of q and of the output, floating point operations over the keys that causal attention sees)."""
    batch, rows, context = shape
    pairs = batch * (rows * context - rows * (rows - 1) // 2)
    return 4 * batch * rows * sizes.heads * sizes.head_dim, 4 * pairs * sizes.heads * sizes.head_dim


def _attention(
    kernels: KernelSet,
    sizes: Sizes,
    shape: tuple[int, int, int],
    format: Format,
    scales: str,
    device: str,
    compute: str = "",
) -> Case:
    """Sequences that have `context` keys, the last `rows` of them new; blocks lie in no order."""
    batch, rows, context = shape
    blocks = -(-context // BLOCK_SIZE)
    pages = _pages(sizes, batch * blocks, format, scales, device)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * blocks, generator=generator, dtype=torch.int64, device="cpu")
    forward_batch = prepare(
        [SequenceSlice([0] * rows, context - rows, (own,), Logits.LAST) for own in order.view(batch, blocks).tolist()],
        BLOCK_SIZE,
        device,
    )
    q = torch.randn(batch * rows, sizes.heads, sizes.head_dim, dtype=torch.bfloat16, device=device)
    ends, flops = _work(sizes, shape)
    call = partial(kernels.attention, q, pages, forward_batch.sequences(0), sizes.head_dim**-0.5, None)
    extents = (*shape, sizes.heads, sizes.kv_heads, sizes.head_dim)
    name = f"{format}, {scales}{compute}"
    return Case("attention", name, extents, _bytes_of(pages, batch * context) + ends, flops, call)


def _torch_attention(sizes: Sizes, shape: tuple[int, int, int], device: str, backend: SDPBackend) -> Case:
    """torch's FlashAttention or cuDNN over contiguous bfloat16; cuDNN gets a KV head for each query head."""
    batch, rows, context = shape

    def tensor(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, sizes.head_dim, dtype=torch.bfloat16, device=device)

    kv_heads = sizes.heads if backend is SDPBackend.CUDNN_ATTENTION else sizes.kv_heads
    q, k, v = tensor(sizes.heads, rows), tensor(kv_heads, context), tensor(kv_heads, context)

    def call() -> Tensor:
        with sdpa_kernel(backend if device == "cuda" else SDPBackend.MATH):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=rows > 1, enable_gqa=kv_heads != sizes.heads
            )

    ends, flops = _work(sizes, shape)
    extents = (*shape, sizes.heads, sizes.kv_heads, sizes.head_dim)
    size = 4 * batch * context * kv_heads * sizes.head_dim + ends
    name = "bfloat16, cuDNN" if backend is SDPBackend.CUDNN_ATTENTION else "bfloat16, FlashAttention"
    return Case("torch.sdpa", name, extents, size, flops, call)


def _store(kernels: KernelSet, sizes: Sizes, format: Format, scales: str, device: str) -> Case:
    pages = _pages(sizes, -(-sizes.store // BLOCK_SIZE), format, scales, device)
    shape = (sizes.store, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
    qkv = torch.randn(shape, dtype=torch.bfloat16, device=device)
    cos, sin = torch.rand(2, sizes.store, sizes.head_dim // 2, dtype=torch.float32, device=device)
    positions = torch.arange(sizes.store, dtype=torch.int64, device=device)
    slots = torch.randperm(sizes.store, dtype=torch.int64, device=device)
    size = _bytes_of(pages, sizes.store) + qkv.nbytes + 2 * sizes.store * sizes.heads * sizes.head_dim
    size += cos.nbytes + sin.nbytes
    call = partial(kernels.rotate_store, qkv, Rotary(cos, sin), positions, slots, pages)
    return Case("rotate_store", f"{format}, {scales}", shape, size, 0, call)


def _matrix(product: tuple[int, int, int], device: str) -> Weight:
    _, outputs, inputs = product
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=device) & 0xBF
    return Weight(
        codes.view(torch_dtype(Format.E4M3FN)), torch.full((outputs,), 0.01, dtype=torch.float32, device=device)
    )


def _linear(kernels: KernelSet, product: tuple[int, int, int], activations: Activations, device: str) -> Case:
    """The layer's product, activation quantization included."""
    rows, outputs, inputs = product
    matrix = _matrix(product, device)
    weight = kernels.pack(Weight(matrix.data, matrix.scale, activations))
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    size, name = outputs * inputs + 2 * rows * (inputs + outputs), f"{Format.E4M3FN}, activations {activations}"
    call = partial(kernels.linear, x, weight, None)
    return Case("linear", name, product, size, 2 * rows * outputs * inputs, call)


def _torch_linear(product: tuple[int, int, int], device: str) -> Case:
    rows, outputs, inputs = product
    x, weight = (torch.randn(n, inputs, dtype=torch.bfloat16, device=device) for n in (rows, outputs))
    size = 2 * (outputs * inputs + rows * (inputs + outputs))
    call = partial(functional.linear, x, weight)
    return Case("torch.linear", "bfloat16", product, size, 2 * rows * outputs * inputs, call)


def _scaled_mm(product: tuple[int, int, int], fast: bool) -> Case:
    """torch's FP8 product alone, activations quantized beforehand."""
    rows, outputs, inputs = product
    x, weight = _matrix((0, rows, inputs), "cuda"), _matrix(product, "cuda")
    assert x.scale is not None
    assert weight.scale is not None
    scales = x.scale[:, None], weight.scale[None]
    call = partial(torch._scaled_mm, x.data, weight.data.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    size, name = outputs * inputs + rows * (inputs + 2 * outputs), f"{Format.E4M3FN}{', fast sums' if fast else ''}"
    return Case("torch._scaled_mm", name, product, size, 2 * rows * outputs * inputs, call)
