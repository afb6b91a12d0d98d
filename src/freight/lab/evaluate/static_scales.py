"""Static KV scales measured on the spot, for caches whose scales the checkpoint does not have.

The loaded model runs over calibration text with an unquantized cache, and the largest magnitude of
each channel of the stored keys and values becomes a scale, of rotated keys the largest norm of its
rotary pair; those of heads and tensors are the largest of their channels. They are what `freight
quantize --kv-cache fp8` would write, within the rounding of the kernels. Weights that are quantized
already are no obstacle. Centers need a second run, as the scales are those of the centered keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from freight.base.terminal import OnProgress, OnStage, unseen
from freight.cache.pool import AngleTables, KVPool
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.errors import CheckpointError
from freight.fp8.cast import scale_from_amax
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.lab.evaluate.measure import now
from freight.model.decoder import Decoder
from freight.operands.kv_pages import KeyCenter
from freight.quantizer.centers import CenterWatch
from freight.quantizer.observers import pair_norms
from freight.quantizer.watch import FLOOR, WatchedKV

# by layer that has keys and values, of k, of v and of k by rotary pair (`pair_norms`): float32
# [num_kv_heads, head_dim]
Amax = dict[int, list[Tensor]]


@dataclass(frozen=True)
class Measured:
    """Scales by name, None where no layer gains from them, and the seconds of the forward passes
    that they took.
    """

    scales: dict[str, KVScales | None] = field(default_factory=dict)
    forward_seconds: float = 0.0


def channel_amax(
    decoder: Decoder,
    pool: KVPool,
    samples: Sequence[Sequence[int]],
    watches: Sequence[CenterWatch],
    on_progress: OnProgress = unseen,
) -> tuple[Amax, float]:
    """Largest magnitudes of what the unquantized `pool` stores for `samples`, each no longer than
    the pool. `on_progress(done, total)` counts tokens.

    `watches`, one a layer or none, see queries and keys before rotary embedding. Also returns the
    seconds of the forward passes, without those of watching. Raises CheckpointError for NaN and
    infinities, which no scale can represent.
    """
    device = next(iter(pool.paged.values())).pages.k.device.type
    seen: Amax = {}
    watching: list[float] = []

    def stored(index: int, k: Tensor, v: Tensor) -> None:
        begin = now(device)
        rotary = decoder.rotaries[index]
        pairs = k if rotary is None else pair_norms(k, rotary.rotary_dim)
        largest = [side.abs().amax(0).float() for side in (k, v, pairs)]
        if not all(bool(side.isfinite().all()) for side in largest):
            raise CheckpointError(
                f"layer {index} computes NaN or infinity without quantization; no scale can be measured"
            )
        seen[index] = list(map(torch.maximum, seen.get(index, largest), largest))
        watching.append(now(device) - begin)

    def projected(index: int, q: Tensor, k: Tensor) -> None:
        begin = now(device)
        watches[index].see(q, k)
        watching.append(now(device) - begin)

    layers = {}
    for index, kv in pool.paged.items():
        layers[index] = WatchedKV(
            **vars(kv),
            stored=partial(stored, index),
            projected=partial(projected, index) if watches else None,
        )
    runner = ModelRunner(decoder, pool.with_layers(layers), device)
    begin = now(device)
    done = 0
    total = sum(map(len, samples))
    for sample in samples:
        on_progress(done, total)
        runner.run([SequenceSlice(sample, 0, pool.whole, Logits.NONE)])
        done += len(sample)
    on_progress(done, total)
    forward = now(device) - begin - sum(watching)
    for index, layer in pool.spec.kept.items():
        if layer.source is not None:
            seen[index] = seen[layer.source]
    return seen, forward


def scales_of(
    amax: Amax, num_layers: int, granularity: Granularity, centers: Sequence[Tensor | None] = ()
) -> KVScales:
    """E4M3FN scales from the channels' magnitudes; `centers` are [num_kv_heads, k_dim] by layer."""
    layers: list[LayerScales | None] = [None] * num_layers
    for index, (of_keys, of_values, of_pairs) in amax.items():
        if granularity is Granularity.CHANNEL:
            of_keys = of_pairs
        b = centers[index] if centers else None
        k_center = () if b is None else tuple(b.flatten().tolist())
        k = _scales(of_keys, granularity)
        v = _scales(of_values, granularity)
        layers[index] = LayerScales(k, v, granularity, k_center=k_center)
    return KVScales(tuple(layers), unneeded=frozenset(range(num_layers)).difference(amax))


def _scales(amax: Tensor, granularity: Granularity) -> tuple[float, ...]:
    if not amax.any():
        amax = torch.full_like(amax, Format.E4M3FN.max)  # only zeros were seen: a scale of 1.0
    if granularity is Granularity.TENSOR:
        amax = amax.amax()
    elif granularity is Granularity.HEAD:
        amax = amax.amax(1)
    scales = scale_from_amax(amax, Format.E4M3FN)
    return tuple(scales.clamp(min=float(scales.max()) * FLOOR).flatten().tolist())


def measure_scales(
    decoder: Decoder,
    pool: KVPool,
    samples: Sequence[Sequence[int]],
    names: Sequence[str],
    on_progress: OnStage = unseen,
) -> Measured:
    """Scales for each of `names`: a static granularity, or 'centered', which is None where no layer
    gains from it.
    """
    # centers are for layers that all store rotated keys, which latents are not
    shared = len(pool.paged) < len(pool.layers) or any(kv.shared for kv in pool.paged.values())
    rotaries = [rotary for rotary in decoder.rotaries if rotary is not None]
    centering = "centered" in names and not shared and len(rotaries) == len(pool.layers)
    watches = [CenterWatch(rotary.rotary_dim) for rotary in rotaries] if centering else []
    calibrating = partial(on_progress, "calibrating")
    amax, seconds = channel_amax(decoder, pool, samples, watches, calibrating)
    num_layers = len(pool.layers)
    scales: dict[str, KVScales | None] = {}
    for name in names:
        scales[name] = None
        if name != "centered":
            scales[name] = scales_of(amax, num_layers, Granularity(name))
    centers = [watch.centers().k for watch in watches]
    if any(center is not None for center in centers):
        pool = _centered(decoder, pool, centers)
        calibrating = partial(on_progress, "calibrating centered keys")
        amax, again = channel_amax(decoder, pool, samples, (), calibrating)
        seconds += again
        scales["centered"] = scales_of(amax, num_layers, Granularity.CHANNEL, centers)
    return Measured(scales, seconds)


def _centered(decoder: Decoder, pool: KVPool, centers: Sequence[Tensor | None]) -> KVPool:
    """`pool`, with keys stored less their centers."""
    tables = AngleTables()
    layers = {}
    for index, kv in pool.paged.items():
        center = centers[index]
        rotary = decoder.rotaries[index]
        if center is not None:
            assert rotary is not None
            b = KeyCenter.of(center.to(kv.pages.k.device), *tables.of(rotary))
            layers[index] = replace(kv, pages=replace(kv.pages, k_center=b))
    return pool.with_layers(layers)
