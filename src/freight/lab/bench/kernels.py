"""`freight bench kernels` on a CPU: each operation of the selected kernel set, and torch's.

Every row takes turns over copies of what it reads, together larger than any cache, as it is when a
model runs. Its `bandwidth_fraction` is the bytes that it has to read and write, divided by its
median time and by the bandwidth measured right before and after it. `cases.py` has the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch

from freight.base.fields import JsonObject
from freight.fp8.formats import Format, Granularity
from freight.kernels.interface import KernelSet
from freight.lab.bench.cases import GROUPS, Bench, Heads, Made, selected, set_of
from freight.lab.bench.timing import MemoryProbe, bytes_beyond_caches, time_in_rotation
from freight.model.architectures import tensor_names
from freight.model.config.model import ModelConfig
from freight.model.mixers.latent.spec import LatentConfig
from freight.model.mixers.spec import mixer_parts
from freight.operands.weight import Activations
from freight.settings.kv_source import groups_fit

CACHES: tuple[tuple[Format, Granularity | None], ...] = (
    (Format.BFLOAT16, None),
    *((Format.E4M3FN, granularity) for granularity in Granularity),  # `group` for latents alone
    (Format.E4M3FNUZ, Granularity.TENSOR),
    (Format.E5M2, None),
    (Format.INT8, Granularity.TOKEN),
)


def measure_kernels(
    kernels: KernelSet,
    model: ModelConfig,
    matrix: tuple[int, int],
    rows: Sequence[int],
    context: int,
    seconds: float,
    only: Sequence[str] = (),
    cache_size: int | None = None,
) -> Iterator[JsonObject]:
    """Yield what --json prints, a row at a time. `matrix` [out_features, in_features] comes
    with those of the model.

    `only` names the kernels wanted; none: all. `seconds` are spent on each row, and at least five
    runs. `cache_size`, in bytes, is what the copies together exceed; default:
    `bytes_beyond_caches`.
    """
    cache_size = cache_size or bytes_beyond_caches()
    probe = MemoryProbe(max(2 * cache_size, 4096))
    made = _cases(Bench(kernels, "cpu", cache_size), model, matrix, rows, context)
    for kernel, make in selected(made, only):
        case = make()
        before = probe.sample()
        spread = time_in_rotation(case.calls, seconds)
        bandwidth = (before + probe.sample()) / 2
        yield {
            **case.figures(spread, bandwidth),
            "read_bandwidth_bytes_per_second": bandwidth,
            "kernels": set_of(kernel, kernels),
            "threads": torch.get_num_threads(),
        }


def _products(bench: Bench, rows: int, shape: tuple[int, int]) -> Made:
    """Yield the products with one matrix in each of its formats."""
    for format in (Format.E4M3FN, Format.INT8, Format.BFLOAT16):
        yield "linear", partial(bench.linear, rows, shape, format)
    for codes, (size, _) in GROUPS.items():
        if bench.kernels.packs_groups and shape[1] % size == 0:
            for activations in (Activations.GROUPS, Activations.PLAIN):
                yield "linear", partial(bench.four_bit, rows, shape, codes, activations)


def _cases(
    bench: Bench, model: ModelConfig, matrix: tuple[int, int], rows: Sequence[int], context: int
) -> Made:
    """Yield cases in the order of the report."""
    for shape in dict.fromkeys((matrix, *linear_shapes(model))):
        for count in rows:
            yield from _products(bench, count, shape)
            yield "torch.linear", partial(bench.torch_linear, count, shape)
            if count == rows[0]:
                yield "torch._scaled_mm", partial(bench.scaled_mm, count, shape)
    mixer = next(iter(model.paged.values()))
    heads = Heads(mixer.num_heads, mixer.num_kv_heads, mixer.k_dim, mixer.v_dim, mixer.v_in_k)
    caches = list(CACHES)
    if not groups_fit({0: mixer}):
        caches.remove((Format.E4M3FN, Granularity.GROUP))
    for cache in caches:
        yield "attention", partial(bench.attention, 1, 1, context, heads, *cache)
    for cache in caches:
        yield "rotate_store", partial(bench.rotate_store, max(rows), heads, *cache)
    if isinstance(mixer, LatentConfig):
        of_heads = ((mixer.latent, mixer.nope), (mixer.head_size, mixer.latent))
        for count, shape in product(rows, of_heads):
            yield "by_head", partial(bench.by_head, count, (mixer.num_heads, *shape))


def linear_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """[out_features, in_features] of the merged projections of the first layer that has them."""
    parts = mixer_parts(next(iter(model.paged.values())), model.hidden_size, tensor_names(model))
    feed_forwards = [layer.feed_forward for layer in model.layers]
    feed_forward = next(part for part in feed_forwards if part is not None)
    return [
        *((sum(linear.sizes), linear.columns) for linear in parts.projections.values()),
        (sum(feed_forward.up_sizes), model.hidden_size),
        (model.hidden_size, feed_forward.intermediate_size),
    ]
