"""Calibration: run the unquantized model over samples, one layer at a time, and observe what will
be quantized.

All samples go through a layer before the next layer is read, so memory holds one layer with its observers, its cache
for one sample, the scales of the layers before, and the hidden states of all samples (tokens x hidden_size in the
model's format). The layers are the engine's own. Observed are the keys and values that they store (after rotary
embedding, as the cache gets them) and the inputs of their Linear modules. The cache has the model's own format and no
scales, so it stores values unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from freight.base.terminal import OnStage, unseen
from freight.errors import CheckpointError
from freight.fp8.formats import Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.model.config.model import ModelConfig
from freight.model.decoder import DecoderLayer
from freight.model.mixers.spec import PagedMixer
from freight.model.sources import WeightSource
from freight.quantizer.centers import CenterWatch, LayerCenters
from freight.quantizer.layer_rounder import LayerRounder
from freight.quantizer.modules import LayerModules, layer_modules
from freight.quantizer.plan import ActivationScheme, QuantizePlan
from freight.quantizer.walk import Walk, kv_sources, rotary_of
from freight.quantizer.watch import LayerWatch, Watch, observed, watch_layer

# a scale that grows by more than this factor after that has not settled; about one step of E4M3
MOVING = 1.05


@dataclass(frozen=True)
class Calibration:
    """What was measured. Scales are for E4M3FN.

    kv            one scale per layer for K and one for V; None if the cache was not observed
    kv_finer      per head or channel, if requested; with centers, in any granularity
    centers       by layer, the gain of centering, and the centers where it is large enough; empty
                  if not requested
    input_scales  by Linear module; empty if activations were not observed
    moving        name -> growth of scales that had not settled: more data would change them
    zeros         names of what was always zero; its scale is 1.0
    by_granularity  scales of every granularity that was observed; all static ones for a budget
    unseen          names of experts that no token reached, where inputs were observed; they have
                    the scales of the rest
    few_tokens      name -> tokens that reached an input, where too few for GPTQ did
    expert_tokens   name of an expert -> tokens that reached it, where inputs were observed
    """

    kv: KVScales | None
    kv_finer: KVScales | None
    input_scales: Mapping[str, float]
    num_samples: int
    num_tokens: int
    longest: int  # tokens of the longest sample: scales have seen no position from there on
    moving: Mapping[str, float]
    zeros: tuple[str, ...]
    centers: tuple[LayerCenters, ...] = ()
    by_granularity: Mapping[Granularity, KVScales] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    few_tokens: Mapping[str, int] = field(default_factory=dict)
    expert_tokens: Mapping[str, int] = field(default_factory=dict)


@torch.inference_mode()
def calibrate(
    config: ModelConfig,
    source: WeightSource,
    kernels: KernelSet,
    plan: QuantizePlan,
    samples: Sequence[Sequence[int]],
    ignored: Sequence[str] = (),
    device: str = "cpu",
    on_progress: OnStage = unseen,
    rounder: LayerRounder | None = None,
) -> Calibration:
    """Measure the scales that `plan` needs, on `samples` of token ids. `source` gives unquantized
    weights.

    Keys and values are stored and read by the reference, in float32: the rounding of faster kernels
    depends on the machine, and would become part of the scales. Only where layers are quantized
    (`rounder`) and no scales of the cache are measured, `kernels` do it. Centers need a second pass through
    each layer, because scales are for the centered keys, and the hidden states twice; everything
    else is measured as without them. Layers that read the keys and values of another have its
    scales; what it stores of all samples is kept for them. Raises CheckpointError that names the
    layer and what in it is NaN or infinite, and for a budget of a model with such layers.
    """
    _require_supported(config, plan)
    left_out = frozenset(ignored)
    sources = kv_sources(config)
    lengths = [len(ids) for ids in samples]
    passes = config.num_layers
    if plan.center:
        passes += sum(source == index for index, source in enumerate(sources))
    if rounder is not None:
        passes += config.num_layers
    total = passes * sum(lengths)
    cache_kernels: KernelSet = REFERENCE
    if rounder is not None and plan.kv_granularity is None:
        cache_kernels = kernels
    walk = Walk(
        config,
        source,
        kernels,
        samples,
        device,
        cache_kernels,
        lambda done: on_progress("calibrating", done, total),
    )
    watched: list[LayerWatch] = []
    centered: list[tuple[LayerCenters, LayerWatch]] = []
    for index, modules in enumerate(layer_modules(config)):
        mixer = config.layers[index].mixer
        rotary_dim = 0
        if isinstance(mixer, PagedMixer):
            rotary_dim = walk.ropes[mixer.rope].rotary_dim
        watch = watch_layer(plan, mixer, modules, left_out, device, rotary_dim)
        if rounder is None:
            layer = walk.layer(index)
        else:
            layer = _quantized_layer(walk, index, modules, rounder)
        if not plan.center:
            walk.through(index, watch.around(layer), walk.hidden, watch)
        elif sources[index] != index:
            walk.through(index, watch.around(layer), walk.hidden, watch)
            centered.append(centered[sources[index]])
        else:
            finder = CenterWatch(rotary_of(layer).rotary_dim)
            before = walk.hidden.clone()
            walk.through(index, watch.around(layer), walk.hidden, watch, projected=finder.see)
            only_kv = replace(plan, activations=ActivationScheme.NONE)
            kv_watch = watch_layer(only_kv, mixer, modules, left_out, device, rotary_dim)
            centers = finder.centers()
            centered.append((centers, kv_watch))
            walk.through(index, layer, before, kv_watch, centers=centers)
            del before
        walk.require_finite(index)
        watched.append(watch)
        del layer  # before the next one is read
    stored = {index: watched[sources[index]] for index in config.paged}
    return _summary(plan, watched, stored, centered, lengths)


def _quantized_layer(
    walk: Walk, index: int, modules: LayerModules, rounder: LayerRounder
) -> DecoderLayer:
    """Return layer `index` as `rounder` rounds it, which takes a pass of its own."""
    inputs = rounder.inputs_of(index, modules)
    if inputs is None:
        walk.skip()
    else:
        layer = inputs.around(walk.layer(index))
        walk.through(index, layer, walk.hidden.clone(), LayerWatch(modules, {}, {}))
        rounder.round(index, inputs)
    return walk.layer(index, rounder.changed())


def _require_supported(config: ModelConfig, plan: QuantizePlan) -> None:
    """Raise CheckpointError for what cannot be measured of this model."""
    if plan.kv_granularity is not None and not config.paged:
        raise CheckpointError(
            f"--kv-cache fp8: no layer of this model ({config.model_type}) has attention, and stores keys and values; "
            "use --kv-cache none"
        )
    if config.without_pages and (plan.center or plan.kv_budget):
        flag = "--center" if plan.center else "--kv-budget"
        raise CheckpointError(
            f"layer {min(config.without_pages)} has no attention, and stores no keys and values: {flag} is implemented "
            f"for models in which every layer does; omit {flag}"
        )
    if plan.center and len(config.attention) < len(config.paged):
        raise CheckpointError(
            f"--center: what layer {min(config.paged.keys() - config.attention.keys())} stores are latents, of which "
            "keys and values are made (MLA): a center would be missing in the values; omit --center"
        )
    for index, source in enumerate(kv_sources(config)):
        if source != index and plan.kv_budget:
            raise CheckpointError(
                f"layer {index} reads the keys and values of layer {source} (num_kv_shared_layers): a "
                "budget chooses how each layer is stored by itself, which is not implemented for it; omit --kv-budget"
            )


def _summary(
    plan: QuantizePlan,
    watched: Sequence[LayerWatch],
    stored: Mapping[int, LayerWatch],
    centered: Sequence[tuple[LayerCenters, LayerWatch]],
    lengths: Sequence[int],
) -> Calibration:
    """Return what was measured. `stored` has, of each layer with attention, the watch of the layer
    whose keys and values it reads: its own in most models.
    """

    def scales(granularity: Granularity) -> KVScales:
        by_layer: list[LayerScales | None] = [None] * len(watched)
        for index, layer in stored.items():
            by_layer[index] = layer.layer_scales(granularity)
        return KVScales(tuple(by_layer), unneeded=frozenset(range(len(watched))) - stored.keys())

    watches: list[Watch] = []
    input_scales: dict[str, float] = {}
    unseen: list[str] = []
    expert_tokens: dict[str, int] = {}
    for layer in watched:
        watches += layer.all
        unseen += layer.unseen()
        expert_tokens |= layer.expert_tokens()
        for group, watch in layer.inputs.items():
            input_scales |= dict.fromkeys(group, float(watch.scales()))
    for _, layer in centered:
        watches += layer.all
    finer = plan.kv_granularity
    kv = None
    kv_finer = None
    if finer is not None:
        kv = scales(Granularity.TENSOR)
        if centered:
            of_layers = (layer.layer_scales(finer, centers) for centers, layer in centered)
            kv_finer = KVScales(tuple(of_layers))
        elif finer is not Granularity.TENSOR:
            kv_finer = scales(finer)
    return Calibration(
        kv=kv,
        kv_finer=kv_finer,
        input_scales=input_scales,
        num_samples=len(lengths),
        num_tokens=sum(lengths),
        longest=max(lengths),
        moving={watch.name: watch.growth for watch in watches if watch.growth > MOVING},
        zeros=tuple(dict.fromkeys(watch.name for watch in watches if watch.zero)),
        centers=tuple(centers for centers, _ in centered),
        by_granularity={granularity: scales(granularity) for granularity in observed(plan)},
        unseen=tuple(unseen),
        expert_tokens=expert_tokens,
    )
