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
from freight.cache.pool import AngleTables, KVPool, PagedKV
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

# by layer, of k, of v and of k by rotary pair (`pair_norms`): float32 [num_kv_heads, head_dim]; []
# of a layer that stores nothing
Amax = list[list[Tensor]]


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
    seen: Amax = [[] for _ in pool.layers]
    watching = [0.0]

    def watched(index: int) -> WatchedKV:
        def stored(k: Tensor, v: Tensor) -> None:
            begin = now(device)
            rotary = decoder.rotaries[index]
            pairs = k if rotary is None else pair_norms(k, rotary.rotary_dim)
            largest = [side.abs().amax(0).float() for side in (k, v, pairs)]
            if not all(bool(side.isfinite().all()) for side in largest):
                raise CheckpointError(
                    f"layer {index} computes NaN or infinity without quantization; no scale can be measured"
                )
            before = seen[index] or largest
            seen[index] = [
                torch.maximum(old, new) for old, new in zip(before, largest, strict=True)
            ]
            watching[0] += now(device) - begin

        def projected(q: Tensor, k: Tensor) -> None:
            begin = now(device)
            watches[index].see(q, k)
            watching[0] += now(device) - begin

        kv = pool.paged[index]
        see = projected if watches else None
        return WatchedKV(kv.pages, kv.kernels, kv.group, kv.shared, stored=stored, projected=see)

    runner = ModelRunner(
        decoder, pool.with_layers({index: watched(index) for index in pool.paged}), device
    )
    begin = now(device)
    done = 0
    total = sum(map(len, samples))
    for sample in samples:
        on_progress(done, total)
        runner.run([SequenceSlice(sample, 0, pool.whole, Logits.NONE)])
        done += len(sample)
    on_progress(done, total)
    forward = now(device) - begin - watching[0]
    amax = list(seen)
    for index, layer in pool.spec.kept.items():
        if layer.source is not None:
            amax[index] = seen[layer.source]
    return amax, forward


def scales_of(
    amax: Amax, granularity: Granularity, centers: Sequence[Tensor | None] = ()
) -> KVScales:
    """E4M3FN scales from the channels' magnitudes; `centers` are [num_kv_heads, k_dim] by layer."""
    layers: list[LayerScales | None] = []
    for index, sides in enumerate(amax):
        if not sides:
            layers.append(None)
            continue
        of_keys, of_values, of_pairs = sides
        by_channel = granularity is Granularity.CHANNEL
        k = _scales(of_pairs if by_channel else of_keys, granularity)
        v = _scales(of_values, granularity)
        b = centers[index] if centers else None
        k_center = () if b is None else tuple(b.flatten().tolist())
        layers.append(LayerScales(k, v, granularity, k_center=k_center))
    return KVScales(
        tuple(layers), unneeded=frozenset(index for index, sides in enumerate(amax) if not sides)
    )


def _scales(amax: Tensor, granularity: Granularity) -> tuple[float, ...]:
    if not amax.any():
        amax = torch.full_like(amax, Format.E4M3FN.max)  # only zeros were seen: a scale of 1.0
    shared: dict[Granularity, tuple[int, ...]] = {
        Granularity.TENSOR: (0, 1),
        Granularity.HEAD: (1,),
    }
    groups = amax.amax(shared[granularity]) if granularity in shared else amax
    scales = scale_from_amax(groups, Format.E4M3FN)
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
    scales: dict[str, KVScales | None] = {"centered": None} if "centered" in names else {}
    for name in names:
        if name != "centered":
            scales[name] = scales_of(amax, Granularity(name))
    if watches:
        centers = [watch.centers().k for watch in watches]
        if any(center is not None for center in centers):
            pool = _centered(decoder, pool, centers)
            calibrating = partial(on_progress, "calibrating centered keys")
            amax, again = channel_amax(decoder, pool, samples, (), calibrating)
            seconds += again
            scales["centered"] = scales_of(amax, Granularity.CHANNEL, centers)
    return Measured(scales, seconds)


def _centered(decoder: Decoder, pool: KVPool, centers: Sequence[Tensor | None]) -> KVPool:
    """`pool`, with keys stored less their centers."""
    tables = AngleTables()
    layers = dict[int, PagedKV]()
    for index, kv in pool.paged.items():
        pages = kv.pages
        center = centers[index]
        rotary = decoder.rotaries[index]
        if center is not None:
            assert rotary is not None
            pages = replace(
                pages, k_center=KeyCenter.of(center.to(pages.k.device), *tables.of(rotary))
            )
        layers[index] = replace(kv, pages=pages)
    return pool.with_layers(layers)
