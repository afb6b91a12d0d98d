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
from freight.calibrate.experts import ExpertWatch, one_by_one
from freight.calibrate.modules import LayerModules, layer_modules
from freight.calibrate.observers import Observer, by_group, make_observer
from freight.config.engine import KVCacheConfig
from freight.config.layer import AttentionConfig
from freight.config.model import ModelConfig
from freight.config.plan import KV_GRANULARITIES, ActivationScheme, QuantizePlan
from freight.errors import CheckpointError
from freight.fp8.cast import SMALLEST_SCALE, scale_from_amax
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels import reference
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.layers.linear import Projection, UnmergedLinear
from freight.layers.rope import build_ropes
from freight.models.architectures import tensor_names
from freight.models.decoder import MLP, DecoderLayer
from freight.models.loader import build_embedding, build_layer
from freight.models.sources import WeightSource
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import KeyCenter
from freight.operands.rotary import Rotary

BLOCK_SIZE = 64  # of the cache that one sample is computed with
LATE = 0.75  # share of the tokens after which scales are compared with the final ones
MOVING = 1.05  # a scale that grows by more than this factor after that has not settled; about one step of E4M3
FLOOR = 2.0**-8  # least scale of a head or channel, as a share of the layer's. E4M3 spans a factor of 2 ** 17, so this
# loses no precision, and a channel that was inactive in calibration does not saturate as soon as it is active

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


class _Watch:
    """One observer of a layer, with its amax before the last part of the data (`mark`) and at the end (`finish`).

    `finish` keeps the amax and releases the observer, whose histograms are far larger.
    """

    def __init__(self, observer: Observer, name: str) -> None:
        self.name = name
        self._observer: Observer | None = observer
        self._earlier: Tensor | None = None
        self._amax: Tensor | None = None  # float32 [groups], once finished
        self.growth = 1.0  # mean growth of the scales since `mark`; 1.0 if none grew

    def observe(self, values: Tensor) -> None:
        """values: [groups, count]"""
        assert self._observer is not None, "finished"
        self._observer.observe(values)

    def mark(self) -> None:
        assert self._observer is not None, "finished"
        self._earlier = self._observer.amax().clone()

    def finish(self) -> None:
        assert self._observer is not None, "finished"
        amax = self._observer.amax()
        if self._earlier is not None:
            self.growth = float((amax / self._earlier.clamp(min=SMALLEST_SCALE)).clamp(max=1e6).mean())
        self._amax = amax.cpu()
        self._observer = self._earlier = None

    @property
    def zero(self) -> bool:
        return not self._seen.any()

    def scales(self) -> Tensor:
        """float32 [groups]; 1.0 if only zeros were seen."""
        return torch.ones_like(self._seen) if self.zero else scale_from_amax(self._seen, Format.E4M3FN)

    @property
    def _seen(self) -> Tensor:
        assert self._amax is not None, "not finished"
        return self._amax


@dataclass(frozen=True)
class _Watched(UnmergedLinear):
    """Projections that pass the input they share to `observe`."""

    observe: Callable[[Tensor], None]

    def __call__(self, x: Tensor) -> Tensor:
        self.observe(x.reshape(1, -1))
        return super().__call__(x)


@dataclass(frozen=True)
class WatchedKV(PagedKV):
    """A layer's cache that passes what it has stored to `stored`, and q and k before that to `projected`."""

    stored: Callable[[Tensor, Tensor], None] = lambda k, v: None
    projected: Callable[[Tensor, Tensor], None] | None = None

    def store(self, qkv: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        if self.projected is not None:
            self.projected(*reference.split_heads(qkv, rotary, self.pages)[:2])
        q = super().store(qkv, rotary, batch)
        slots = batch.slots[self.group]
        self.stored(*(page.flatten(0, 1)[slots] for page in (self.pages.k, self.pages.v)))
        return q


@dataclass(frozen=True)
class _LayerWatch:
    """All observers of one layer."""

    modules: LayerModules
    kv: Mapping[tuple[str, Granularity], _Watch]  # by ('k' or 'v', granularity)
    inputs: Mapping[tuple[str, ...], _Watch]  # by the modules that share the input
    experts: ExpertWatch | None = None

    @property
    def all(self) -> list[_Watch]:
        return [*self.kv.values(), *self.inputs.values()]

    def see_kv(self, k: Tensor, v: Tensor) -> None:
        for (side, granularity), watch in self.kv.items():
            watch.observe(by_group(k if side == "k" else v, granularity))

    def around(self, layer: DecoderLayer) -> DecoderLayer:
        """The layer with the inputs of its Linear modules observed."""
        attention, mlp, modules = layer.attention, layer.mlp, self.modules

        def watched(projection: Projection, group: tuple[str, ...]) -> Projection:
            watch = self.inputs.get(group)
            if watch is None:
                return projection
            parts = projection.parts if isinstance(projection, UnmergedLinear) else (projection,)
            return _Watched(parts, watch.observe)

        def dense(mlp: MLP) -> MLP:
            return replace(mlp, gate_up=watched(mlp.gate_up, modules.gate_up), down=watched(mlp.down, modules.down))

        attention = replace(attention, qkv=watched(attention.qkv, modules.qkv), o=watched(attention.o, modules.o))
        if isinstance(mlp, MLP):
            mlp = dense(mlp)
        else:
            if isinstance(mlp.shared, MLP):
                mlp = replace(mlp, shared=dense(mlp.shared))
            if self.experts is not None:
                mlp = self.experts.around(mlp)
        return replace(layer, attention=attention, mlp=mlp)

    def unseen(self) -> list[str]:
        """Names of the experts that no token reached."""
        if self.experts is None or self.modules.experts is None:
            return []
        return [self.modules.experts.named(expert) for expert in self.experts.unseen()]

    def layer_scales(self, granularity: Granularity, centers: LayerCenters | None = None) -> LayerScales:
        k, v = (self._side(side, granularity) for side in "kv")
        b = None if centers is None else centers.k
        return LayerScales(k, v, granularity, (), () if b is None else tuple(b.flatten().tolist()))

    def _side(self, side: str, granularity: Granularity) -> tuple[float, ...]:
        coarse = self.kv[side, Granularity.TENSOR].scales()
        scales = torch.maximum(self.kv[side, granularity].scales(), coarse * FLOOR)
        return tuple(scales.tolist())


def _observed(plan: QuantizePlan) -> tuple[Granularity, ...]:
    """The granularities whose scales are measured; a budget chooses among all of them."""
    if plan.kv_granularity is None:
        return ()
    return KV_GRANULARITIES if plan.kv_budget else tuple(dict.fromkeys((Granularity.TENSOR, plan.kv_granularity)))


def _watch_layer(
    plan: QuantizePlan, mixer: AttentionConfig, modules: LayerModules, ignored: frozenset[str], device: str
) -> _LayerWatch:
    def watch(name: str, groups: int = 1) -> _Watch:
        return _Watch(make_observer(plan.observer, name, groups, device), name)

    kv, inputs = {}, {}
    if plan.kv_granularity is not None:
        for side, what in (("k", "keys"), ("v", "values")):
            for granularity in _observed(plan):
                groups = granularity.num_scales(mixer.num_kv_heads, mixer.k_dim if side == "k" else mixer.v_dim)
                kv[side, granularity] = watch(f"{modules.attention}: {what}", groups)
    if plan.activations is ActivationScheme.STATIC:
        for group in modules.groups:
            if not ignored.issuperset(group):
                inputs[group] = watch(modules.input_of(group))
    experts = None
    if modules.experts is not None and modules.experts.gate_up in inputs:
        gate_up, down = inputs[modules.experts.gate_up], inputs[modules.experts.down]
        num_tokens = torch.zeros(modules.experts.count, dtype=torch.int64, device=device)
        experts = ExpertWatch(gate_up.observe, down.observe, num_tokens)
    return _LayerWatch(modules, kv, inputs, experts)


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
        watch = _watch_layer(plan, mixer, modules, left_out, device)
        if plan.center:
            finder, before = CenterWatch(layer.attention.rotary.rotary_dim), hidden.clone()
            run.through(mixer, watch.around(layer), hidden, watch, projected=finder.see)
            centers = finder.centers()
            only_kv = replace(plan, activations=ActivationScheme.NONE)
            rest = _watch_layer(only_kv, mixer, modules, left_out, device)
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
        watch: _LayerWatch,
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
    watched: Sequence[_LayerWatch],
    centered: Sequence[tuple[LayerCenters, _LayerWatch]],
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
        by_granularity={one: KVScales(tuple(layer.layer_scales(one) for layer in watched)) for one in _observed(plan)},
        unseen=tuple(name for layer in watched for name in layer.unseen()),
    )
