"""What calibration observes of a layer: the keys and values that it stores, and the inputs of its
Linear modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freight.cache.pool import PagedKV
from freight.fp8.cast import SMALLEST_SCALE, scale_from_amax
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import LayerScales
from freight.kernels import reference
from freight.model.decoder import DecoderLayer
from freight.model.feed_forward.mlp import MLP
from freight.model.feed_forward.moe import MoE
from freight.model.layers.linear import GatheredLinear, UnmergedLinear
from freight.model.mixers.spec import Mixer, PagedMixer
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import read_slots
from freight.operands.packed import Rows, as_tensor
from freight.operands.rotary import Rotary
from freight.quantizer.centers import LayerCenters
from freight.quantizer.expert_inputs import ExpertWatch
from freight.quantizer.modules import Fields, LayerModules
from freight.quantizer.observers import Observer, by_group, make_observer, pair_norms
from freight.quantizer.plan import KV_GRANULARITIES, ActivationScheme, QuantizePlan

# Least scale of a head or channel, as a share of the layer's. E4M3 spans a factor of 2 ** 17, so
# this loses no precision, and a channel that was inactive in calibration does not saturate as soon
# as it is active
FLOOR = 2.0**-8


class Watch:
    """One observer of a layer, with its amax before the last part of the data (`mark`) and at the
    end (`finish`).

    `finish` keeps the amax and releases the observer, whose histograms are far larger.
    """

    amax: Tensor  # float32 [groups], once finished

    def __init__(self, observer: Observer, name: str) -> None:
        self.name = name
        self._observer = observer
        self._earlier: Tensor | None = None
        self.growth = 1.0  # mean growth of the scales since `mark`; 1.0 if none grew

    def observe(self, values: Tensor) -> None:
        """Pass `values` [groups, count] to the observer."""
        self._observer.observe(values)

    def observe_all(self, values: Tensor) -> None:
        """Pass `values` of any shape to the observer of one group."""
        self._observer.observe(values.reshape(1, -1))

    def mark(self) -> None:
        self._earlier = self._observer.amax().clone()

    def finish(self) -> None:
        amax = self._observer.amax()
        if self._earlier is not None:
            self.growth = float(
                (amax / self._earlier.clamp(min=SMALLEST_SCALE)).clamp(max=1e6).mean()
            )
        self.amax = amax.cpu()
        del self._observer, self._earlier

    @property
    def zero(self) -> bool:
        return not self.amax.any()

    def scales(self) -> Tensor:
        """Return the scales, float32 [groups]; 1.0 if only zeros were seen."""
        if self.zero:
            return torch.ones_like(self.amax)
        return scale_from_amax(self.amax, Format.E4M3FN)


@dataclass(frozen=True)
class _Watched(UnmergedLinear):
    """Projections that pass the input they share, [rows, in_features], to `observe`."""

    observe: Callable[[Tensor], None]

    def __call__(self, x: Rows, adapters: Tensor | None = None) -> Tensor:
        self.observe(as_tensor(x))
        return super().__call__(x, adapters)


@dataclass(frozen=True)
class WatchedKV(PagedKV):
    """A layer's cache that passes what it has stored to `stored`, and q and k before that to
    `projected`.
    """

    stored: Callable[[Tensor, Tensor], None] = lambda k, v: None
    projected: Callable[[Tensor, Tensor], None] | None = None

    def store(self, qkv: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        if self.projected is not None:
            self.projected(*reference.split_heads(qkv, rotary, self.pages)[:2])
        q = super().store(qkv, rotary, batch)
        slots = batch.slots[self.group]
        self.stored(read_slots(self.pages.k, slots), read_slots(self.pages.v, slots))
        return q


@dataclass(frozen=True)
class LayerWatch:
    """All observers of one layer."""

    modules: LayerModules
    # By ('k' or 'v', granularity); without 'v' where V is in K
    kv: Mapping[tuple[str, Granularity], Watch]
    inputs: Mapping[tuple[str, ...], Watch]  # by the modules that share the input
    experts: ExpertWatch | None = None
    v_dim: int = 0  # of values that are the last channels of keys
    rotary_dim: int = 0  # channels of a key that are rotated, the first ones

    @property
    def all(self) -> list[Watch]:
        return [*self.kv.values(), *self.inputs.values()]

    def see_kv(self, k: Tensor, v: Tensor) -> None:
        for (side, granularity), watch in self.kv.items():
            seen = k if side == "k" else v
            if side == "k" and granularity is Granularity.CHANNEL:
                seen = pair_norms(k, self.rotary_dim)
            watch.observe(by_group(seen, granularity))

    def around(self, layer: DecoderLayer) -> DecoderLayer:
        """Return the layer with the inputs of its Linear modules observed."""
        observers = {group: watch.observe_all for group, watch in self.inputs.items()}
        return observed_layer(layer, self.modules, observers, self.experts)

    def unseen(self) -> list[str]:
        """Return the names of the experts that no token reached."""
        if self.experts is None or self.modules.experts is None:
            return []
        return [self.modules.experts.named(expert) for expert in self.experts.unseen()]

    def expert_tokens(self) -> dict[str, int]:
        """Return the tokens that reached each expert, by its name."""
        if self.experts is None or self.modules.experts is None:
            return {}
        counts = self.experts.num_tokens.tolist()
        return {self.modules.experts.named(expert): n for expert, n in enumerate(counts)}

    def layer_scales(
        self, granularity: Granularity, centers: LayerCenters | None = None
    ) -> LayerScales:
        k = self._side("k", granularity)
        v = self._side("v", granularity)
        k_center: tuple[float, ...] = ()
        if centers is not None and centers.k is not None:
            k_center = tuple(centers.k.flatten().tolist())
        return LayerScales(k, v, granularity, (), k_center)

    def _side(self, side: str, granularity: Granularity) -> tuple[float, ...]:
        if (side, granularity) not in self.kv:
            return self._side("k", granularity)[-self.v_dim :]
        coarse = self.kv[side, Granularity.TENSOR].scales()
        scales = torch.maximum(self.kv[side, granularity].scales(), coarse * FLOOR)
        return tuple(scales.tolist())


Observe = Callable[[Tensor], None]  # takes the input of a group of modules, [rows, in_features]
Observers = Mapping[tuple[str, ...], Observe]  # by the modules that share the input


def observed_layer(
    layer: DecoderLayer, modules: LayerModules, observers: Observers, experts: ExpertWatch | None
) -> DecoderLayer:
    """Return the layer with the inputs of its Linear modules passed to `observers`, and those of
    its experts to `experts`, before they are used.
    """
    parallel = layer.parallel_experts
    if parallel is not None and experts is not None:
        parallel = replace(parallel, moe=experts.around(parallel.moe))
    return replace(
        layer,
        mixer=_observed_part(layer.mixer, modules.mixed, observers),
        mlp=_observed_feed_forward(layer.mlp, modules, observers, experts),
        per_layer=_observed_part(layer.per_layer, modules.per_layer, observers),
        parallel_experts=parallel,
    )


def _observed_part(part: Any, fields: Fields, observers: Observers) -> Any:
    """Return `part`, a frozen dataclass, with the inputs of its projections `fields` observed."""
    watched = {}
    for field, group in fields.items():
        observe = observers.get(group)
        if observe is None:
            continue
        projection = getattr(part, field)
        assert not isinstance(projection, GatheredLinear), "calibration has one rank"
        parts = projection.parts if isinstance(projection, UnmergedLinear) else (projection,)
        watched[field] = _Watched(parts, observe)
    return replace(part, **watched) if watched else part


def _observed_feed_forward(
    mlp: MLP | MoE | None,
    modules: LayerModules,
    observers: Observers,
    experts: ExpertWatch | None,
) -> MLP | MoE | None:
    if isinstance(mlp, MLP):
        dense: MLP = _observed_part(mlp, modules.dense, observers)
        return dense
    if mlp is None:
        return None
    shared = mlp.shared
    if isinstance(shared, MLP):
        shared = _observed_part(shared, modules.dense, observers)
    latent = _observed_part(mlp.latent, modules.latent, observers)
    moe = replace(mlp, shared=shared, latent=latent)
    return moe if experts is None else experts.around(moe)


def observed(plan: QuantizePlan) -> tuple[Granularity, ...]:
    """Return the granularities whose scales are measured; a budget chooses among all of them."""
    if plan.kv_granularity is None:
        return ()
    if plan.kv_budget:
        return KV_GRANULARITIES
    return tuple(dict.fromkeys((Granularity.TENSOR, plan.kv_granularity)))


def watch_layer(
    plan: QuantizePlan,
    mixer: Mixer,
    modules: LayerModules,
    ignored: frozenset[str],
    device: str,
    rotary_dim: int = 0,
) -> LayerWatch:
    """Make the observers of a layer whose keys have `rotary_dim` rotated channels."""

    def watch(name: str, groups: int = 1) -> Watch:
        return Watch(make_observer(plan.observer, name, groups, device), name)

    kv = {}
    inputs = {}
    v_dim = 0
    if isinstance(mixer, PagedMixer):
        sides = [("k", "keys", mixer.k_dim), ("v", "values", mixer.v_dim)]
        if mixer.v_in_k:
            v_dim = mixer.v_dim
            sides = [("k", "latents", mixer.k_dim)]
        if mixer.kv_from is not None:
            sides = []
        for side, tensor, dim in sides:
            for granularity in observed(plan):
                groups = granularity.num_scales(mixer.num_kv_heads, dim)
                kv[side, granularity] = watch(f"{modules.mixer}: {tensor}", groups)
    if plan.activations is ActivationScheme.STATIC:
        for group in modules.groups:
            if not ignored.issuperset(group):
                inputs[group] = watch(modules.input_of(group))
    experts = None
    if modules.experts is not None and modules.experts.gate_up in inputs:
        gate_up = inputs[modules.experts.gate_up]
        down = inputs[modules.experts.down]
        num_tokens = torch.zeros(modules.experts.count, dtype=torch.int64, device=device)
        experts = ExpertWatch(gate_up.observe_all, down.observe_all, num_tokens)
    return LayerWatch(modules, kv, inputs, experts, v_dim, rotary_dim)
