"""`freight bench kernels` on a GPU: what the Triton kernel set does, and torch's kernels, timed by
events over graphs.

`bandwidth_fraction` is the bytes that a row has to read and write, over its median time and the
bandwidth of a copy on the same device, read and written bytes both counted. `cases.py` has the
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from freight.base.fields import JsonObject
from freight.fp8.formats import Format, Granularity
from freight.kernels.interface import KernelSet
from freight.kernels.select import select_kernels
from freight.lab.bench.cases import Bench, Case, Heads, Made, attention_work, selected, set_of
from freight.lab.bench.timing import Spread, sampled
from freight.operands.weight import Activations

CACHES = (
    (Format.BFLOAT16, None),
    (Format.E4M3FN, Granularity.TENSOR),
    (Format.E4M3FN, Granularity.TOKEN),
    (Format.E5M2, None),
)
LLAMA_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
DEEPSEEK_V3 = Heads(num_heads=128, num_kv_heads=1, head_dim=576, v_dim=512, v_in_k=True)


@dataclass(frozen=True)
class Sizes:
    """What is measured: `attention` are (batch, new tokens, context)."""

    attention: tuple[tuple[int, int, int], ...] = ((64, 1, 8192), (1, 1, 131072), (1, 8192, 8192))
    heads: Heads = LLAMA_8B
    store: int = 8192
    product: tuple[int, int, int] = (8192, 8192, 8192)
    decode_products: tuple[tuple[int, int, int], ...] = (
        (1, 4096, 14336),
        (1, 28672, 4096),
        (64, 28672, 4096),
    )
    latents: Heads = DEEPSEEK_V3
    # benchmarks/gpu_goals.py has no goal for these shapes
    latent_attention: tuple[tuple[int, int, int], ...] = ((32, 1, 8192), (1, 4096, 4096))
    # of each head of latents: keys, values
    by_head: tuple[tuple[int, int], ...] = ((512, 128), (128, 512))
    by_head_rows: tuple[int, ...] = (1, 64, 4096)


def measure_on_gpu(
    kernels: KernelSet, only: Sequence[str], seconds: float, sizes: Sizes, after: int = 0
) -> Iterator[JsonObject]:
    """Yield what --json prints, a row at a time; `only` names the kernels wanted, none: all.

    Rows are numbered from 1 as `case`, and the first `after` are left out. A case that fails gives
    a row with `error`. Raises the GPU's error behind that row if the GPU takes no more work from
    this process.
    """
    gap = launch_gap()
    for number, (kernel, make) in enumerate(cases(kernels, sizes, "cuda", only), 1):
        if number <= after:
            continue
        row = {
            "case": number,
            "device": torch.cuda.get_device_name(),
            "launch_gap_us": gap * 1e6,
            "kernel": kernel,
            "kernels": set_of(kernel, kernels),
        }
        try:
            row |= _measured(make, seconds)
        except Exception as error:  # whatever it is, the other rows can be measured
            row["what"] = ", ".join(map(str, make.args))
            row["error"] = f"{type(error).__name__}: {str(error)[:600]}"
        yield row
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _measured(make: Callable[[], Case], seconds: float) -> JsonObject:
    before = copy_bandwidth()
    case = make()
    spread = seconds_in_graph(case.calls[0], seconds)
    bandwidth = (before + copy_bandwidth()) / 2
    return {
        **case.figures(spread, bandwidth),
        "tflops": case.num_flops / spread.median / 1e12,
        "launches": launches_of(case.calls[0]),
        "copy_bandwidth_bytes_per_second": bandwidth,
    }


def launches_of(call: Callable[[], object]) -> int | None:
    """Count the kernels that a call launches, as torch's profiler counts them; None where it counts
    none.
    """
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        return sum(event.device_type.name == "CUDA" for event in seen.events() or ()) or None
    except RuntimeError:  # no counters for this process
        return None


def launch_gap() -> float:
    """Return seconds from the start of a kernel that does nothing to that of the next, in a graph."""
    count = 64
    counter = torch.zeros(1, dtype=torch.float32, device="cuda")

    def many() -> None:
        for _ in range(count):
            counter.add_(1)

    return seconds_in_graph(many, 0.0, least=5).median / count


def seconds_in_graph(call: Callable[[], object], seconds: float, least: int = 10) -> Spread:
    """Time one call, launched by a graph, without what it costs to launch from Python."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    # Larger than any cache, and read before each run: what a write leaves in the cache would drain
    # during the run.
    flush = torch.zeros(2**26, dtype=torch.float32, device="cuda")

    def sample() -> float:
        flush.amax()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    return sampled(sample, seconds, least)


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a copy on the device: the median of five.

    By a kernel: what a graph copies by `copy_` takes 1.2 times as long on an H100.
    """
    source = torch.ones(2**29, dtype=torch.float32, device="cuda")
    target = torch.ones_like(source)
    seconds = seconds_in_graph(lambda: torch.neg(source, out=target), 0.0, least=5).median
    return 2 * source.nbytes / seconds


def cases(kernels: KernelSet, sizes: Sizes, device: str, only: Sequence[str] = ()) -> Made:
    """Yield each case's kernel, and what makes it."""
    bench = Bench(kernels, device)
    made = chain(
        _cache_cases(bench, sizes), _product_cases(bench, sizes), _latent_cases(bench, sizes)
    )
    return selected(made, only)


def _cache_cases(bench: Bench, sizes: Sizes) -> Made:
    device = bench.device
    in_fp8 = Bench(select_kernels(bench.kernels.name, device, fp8_attention=True), device)
    for shape in sizes.attention:
        for format, granularity in CACHES:
            case = *shape, sizes.heads, format, granularity
            yield "attention", partial(bench.attention, *case)
            if format.is_e4m3:
                yield "attention", partial(in_fp8.attention, *case, note=", FP8 products")
        by_torch = partial(_torch_attention, sizes.heads, shape, device)
        yield "torch.sdpa", partial(by_torch, SDPBackend.FLASH_ATTENTION)
        if device == "cuda" and shape[1] > 1 and torch.version.hip is None:
            yield "torch.sdpa", partial(by_torch, SDPBackend.CUDNN_ATTENTION)
    for cache in CACHES:
        yield "rotate_store", partial(bench.rotate_store, sizes.store, sizes.heads, *cache)


def _product_cases(bench: Bench, sizes: Sizes) -> Made:
    for rows, outputs, inputs in (sizes.product, *sizes.decode_products):
        matrix = (outputs, inputs)
        for activations in (Activations.DYNAMIC, Activations.PLAIN):
            yield "linear", partial(bench.linear, rows, matrix, Format.E4M3FN, activations)
        yield "torch.linear", partial(bench.torch_linear, rows, matrix)
    if bench.device == "cuda":
        for fast in (False, True):
            case = partial(bench.scaled_mm, sizes.product[0], sizes.product[1:], fast)
            yield "torch._scaled_mm", case


def _latent_cases(bench: Bench, sizes: Sizes) -> Made:
    for shape, cache in product(sizes.latent_attention, CACHES):
        yield "attention", partial(bench.attention, *shape, sizes.latents, *cache)
    for rows, matrix in product(sizes.by_head_rows, sizes.by_head):
        yield "by_head", partial(bench.by_head, rows, (sizes.latents.num_heads, *matrix))


def _torch_attention(
    heads: Heads, shape: tuple[int, int, int], device: str, backend: SDPBackend
) -> Case:
    """torch's FlashAttention or cuDNN over contiguous bfloat16; cuDNN gets a KV head for each query
    head.
    """
    batch, rows, context = shape
    dim = heads.head_dim

    def tensor(count: int, length: int) -> Tensor:
        return torch.randn(batch, count, length, dim, dtype=torch.bfloat16, device=device)

    kv_heads = heads.num_kv_heads
    name = "bfloat16, FlashAttention"
    if backend is SDPBackend.CUDNN_ATTENTION:
        kv_heads = heads.num_heads
        name = "bfloat16, cuDNN"
    q = tensor(heads.num_heads, rows)
    k = tensor(kv_heads, context)
    v = tensor(kv_heads, context)

    def call() -> Tensor:
        with sdpa_kernel(backend if device == "cuda" else SDPBackend.MATH):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=rows > 1, enable_gqa=kv_heads != heads.num_heads
            )

    ends, flops = attention_work(shape, heads)
    return Case(
        kernel="torch.sdpa",
        format=name,
        shape=(*shape, heads.num_heads, heads.num_kv_heads, dim),
        num_bytes=4 * batch * context * kv_heads * dim + ends,
        num_flops=flops,
        calls=[call],
    )
