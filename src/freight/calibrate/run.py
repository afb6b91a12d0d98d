"""Calibration: run the unquantized model over samples, one layer at a time, and observe what will be quantized.

All samples go through a layer before the next layer is read, so memory holds one layer with its observers, its cache
for one sample, the scales of the layers before, and the hidden states of all samples (tokens x hidden_size in the
model's format). The layers are the engine's own. Observed are the keys and values that they store (after rotary
embedding, as the cache gets them) and the inputs of their Linear modules. The cache has the model's own format and no
scales, so it stores values unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from freight.cache.pool import AngleTables, PagedKV, allocate_pool
from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.calibrate.centers import CenterWatch, LayerCenters
from freight.calibrate.experts import one_by_one
from freight.calibrate.modules import layer_modules
from freight.calibrate.watch import LayerWatch, WatchedKV, observed, watch_layer
from freight.config.engine import KVCacheConfig
from freight.config.layer import AttentionConfig
from freight.config.model import ModelConfig
from freight.config.plan import ActivationScheme, QuantizePlan
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.layers.rope import build_ropes
from freight.models.architectures import tensor_names
from freight.models.decoder import DecoderLayer
from freight.models.loader import build_embedding, build_layer
from freight.models.sources import WeightSource
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import KeyCenter

BLOCK_SIZE = 64  # of the cache that one sample is computed with
LATE = 0.75  # share of the tokens after which scales are compared with the final ones
MOVING = 1.05  # a scale that grows by more than this factor after that has not settled; about one step of E4M3

Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True)
class Calibration:
    """What was measured. Scales are for E4M3FN.

    kv            one scale per layer for K and one for V; None if the cache was not observed
    kv_finer      per head or channel, if requested; with centers, in any granularity
    centers       by layer, the gain of centering, and the centers where it is large enough; empty if not requested
    input_scales  by Linear module; empty if activations were not observed
    moving        name -> growth of scales that had not settled: more data would change them
    zeros         names of what was always zero; its scale is 1.0
    by_granularity  scales of every granularity that was observed; all static ones for a budget
    unseen          names of experts that no token reached, where inputs were observed; they have the scales of the rest
    """

    kv: KVScales | None
    kv_finer: KVScales | None
    input_scales: Mapping[str, float]
    num_samples: int
    num_tokens: int
    moving: Mapping[str, float]
    zeros: tuple[str, ...]
    centers: tuple[LayerCenters, ...] = ()
    by_granularity: Mapping[Granularity, KVScales] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()


@torch.inference_mode()
def calibrate(
    config: ModelConfig,
    source: WeightSource,
    kernels: KernelSet,
    plan: QuantizePlan,
    samples: Sequence[Sequence[int]],
    ignored: Sequence[str] = (),
    device: str = "cpu",
    on_progress: Progress = lambda what, done, total: None,
) -> Calibration:
    """Measure the scales that `plan` needs, on `samples` of token ids. `source` gives unquantized weights.

    Keys and values are stored and read by the reference, in float32: the rounding of faster kernels depends on the
    machine, and would become part of the scales. Centers need a second pass through each layer, because scales are for
    the centered keys, and the hidden states twice; everything else is measured as without them.
    Raises CheckpointError that names the layer and what in it is NaN or infinite, and for layers that read the keys and
    values of another.
    """
    names, left_out = tensor_names(config), frozenset(ignored)
    sharing = [index for index, layer in enumerate(config.layers) if layer.mixer.kv_from is not None]
    if sharing:
        raise CheckpointError(
            f"layer {sharing[0]} reads the keys and values of layer {config.layers[sharing[0]].mixer.kv_from} "
            "(num_kv_shared_layers): calibration, which goes layer by layer, is not implemented for it; quantize "
            "without (dynamic activations, and a KV cache whose scales are measured per token)"
        )
    lengths = [len(ids) for ids in samples]
    ropes = build_ropes(config.ropes, max(lengths), device)
    total = config.num_layers * sum(lengths) * (2 if plan.center else 1)
    run = _Run(config.checkpoint_format, lengths, device, lambda done: on_progress("calibrating", done, total))
    tokens = torch.tensor([token for ids in samples for token in ids], dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(length, dtype=torch.int64, device=device) for length in lengths])
    hidden = build_embedding(config, source, kernels)(tokens, positions)
    watched, centered = [], []
    for index, modules in enumerate(layer_modules(config)):
        layer, mixer = build_layer(config, source, one_by_one(kernels), index, ropes), config.layers[index].mixer
        watch = watch_layer(plan, mixer, modules, left_out, device)
        if plan.center:
            finder, before = CenterWatch(layer.attention.rotary.rotary_dim), hidden.clone()
            run.through(mixer, watch.around(layer), hidden, watch, projected=finder.see)
            centers = finder.centers()
            only_kv = replace(plan, activations=ActivationScheme.NONE)
            rest = watch_layer(only_kv, mixer, modules, left_out, device)
            run.through(mixer, layer, before, rest, centers=centers)
            centered.append((centers, rest))
            del before
        else:
            run.through(mixer, watch.around(layer), hidden, watch)
        if not hidden.isfinite().all():
            raise CheckpointError(
                f"layer {index} ({names.layer.format(index).rstrip('.')}) computes NaN or infinity during calibration, "
                "without quantization: no scales can be measured beyond it"
            )
        watched.append(watch)
        del layer  # before the next one is read
    return _summary(plan, watched, centered, lengths)


class _Run:
    """Runs all samples through one layer after the other."""

    def __init__(
        self,
        format: Format,
        lengths: Sequence[int],
        device: str,
        on_progress: Callable[[int], None],
    ) -> None:
        self._format, self._lengths, self._total, self._done = format, lengths, sum(lengths), 0
        self._device, self._on_progress = device, on_progress
        self._caches: dict[tuple[int, int, int], PagedKV] = {}
        self._angles = AngleTables()

    def _cache(self, mixer: AttentionConfig) -> PagedKV:
        """A cache for one sample, the same for all layers of one shape."""
        shape = (mixer.num_kv_heads, mixer.k_dim, mixer.v_dim)
        if shape not in self._caches:
            spec = KVCacheSpec((LayerKVSpec(self._format, None, *shape),), BLOCK_SIZE)
            num_blocks = -(-max(self._lengths) // BLOCK_SIZE)
            config = KVCacheConfig(self._format, None, None, None)
            self._caches[shape] = allocate_pool(spec, config, (num_blocks,), REFERENCE, self._device).layers[0]
        return self._caches[shape]

    def through(
        self,
        mixer: AttentionConfig,
        layer: DecoderLayer,
        hidden: Tensor,
        watch: LayerWatch,
        centers: LayerCenters | None = None,
        projected: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """hidden: [total, hidden_size], samples end to end; overwritten with the layer's output.

        `watch` observes keys and values as they are stored, the keys less `centers` if given, and is then finished.
        """
        cache = self._cache(mixer)
        pages = cache.pages
        if centers is not None and centers.k is not None:
            pages = replace(pages, k_center=KeyCenter.of(centers.k, *self._angles.of(layer.attention.rotary)))
        kv = WatchedKV(pages, cache.kernels, stored=watch.see_kv, projected=projected)
        begin, late = 0, min(LATE * self._total, self._total - self._lengths[-1])
        for length in self._lengths:
            if begin > 0 and begin >= late:
                late = self._total
                for one in watch.all:
                    one.mark()
            rows = slice(begin, begin + length)
            hidden[rows] = layer.whole(hidden[rows], self._batch(length), kv)
            begin += length
            self._done += length
            self._on_progress(self._done)
        for one in watch.all:
            one.finish()

    def _batch(self, length: int) -> ForwardBatch:
        """One sequence from its beginning. Layers do not use token ids."""
        position = torch.arange(length, dtype=torch.int64, device=self._device)
        blocks = torch.arange(-(-length // BLOCK_SIZE), dtype=torch.int32, device=self._device)
        return ForwardBatch(
            token_ids=position,
            positions=position,
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=self._device),
            context_lens=torch.tensor([length], dtype=torch.int32, device=self._device),
            slots=(position,),
            block_tables=(blocks[None],),
            logit_rows=position[:0],
        )


def _summary(
    plan: QuantizePlan,
    watched: Sequence[LayerWatch],
    centered: Sequence[tuple[LayerCenters, LayerWatch]],
    lengths: Sequence[int],
) -> Calibration:
    everything = [watch for layer in (*watched, *(rest for _, rest in centered)) for watch in layer.all]
    coarse, finer = Granularity.TENSOR, plan.kv_granularity
    kv = kv_finer = None
    if finer is not None:
        kv = KVScales(tuple(layer.layer_scales(coarse) for layer in watched))
        if centered:
            kv_finer = KVScales(tuple(rest.layer_scales(finer, centers) for centers, rest in centered))
        elif finer is not coarse:
            kv_finer = KVScales(tuple(layer.layer_scales(finer) for layer in watched))
    return Calibration(
        kv=kv,
        kv_finer=kv_finer,
        input_scales={
            name: float(watch.scales()) for layer in watched for group, watch in layer.inputs.items() for name in group
        },
        num_samples=len(lengths),
        num_tokens=sum(lengths),
        moving={watch.name: watch.growth for watch in everything if watch.growth > MOVING},
        zeros=tuple(dict.fromkeys(watch.name for watch in everything if watch.zero)),
        centers=tuple(centers for centers, _ in centered),
        by_granularity={one: KVScales(tuple(layer.layer_scales(one) for layer in watched)) for one in observed(plan)},
        unseen=tuple(name for layer in watched for name in layer.unseen()),
    )
