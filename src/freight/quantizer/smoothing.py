"""Scales by channel that make a model easier to round, chosen from what the inputs of its modules are:
SmoothQuant's and AWQ's (`folding.py` has the formulas).

One pass over the unquantized model, layer by layer. Folding changes no result, so every layer is
looked at as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from freight.base.terminal import OnStage, unseen
from freight.errors import ConfigError
from freight.fp8.cast import torch_dtype
from freight.kernels.interface import KernelSet
from freight.model.config.model import ModelConfig
from freight.model.shapes import tensor_shapes
from freight.model.sources import WeightSource
from freight.quantizer.folding import (
    AwqCandidate,
    Folding,
    awq_candidates,
    awq_scale,
    foldings,
    smoothquant_scale,
    unfoldable,
)
from freight.quantizer.layer_inputs import ChannelStatistics, LayerInputs
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import LayerModules, layer_modules
from freight.quantizer.normed import Norm
from freight.quantizer.plan import Method, Transform, WeightObserver
from freight.quantizer.rounding import Rounding
from freight.quantizer.transformed import PlacedScale
from freight.quantizer.walk import Walk
from freight.quantizer.watch import LayerWatch


@torch.inference_mode()
def smooth(
    config: ModelConfig,
    source: WeightSource,
    kernels: KernelSet,
    method: Method,
    rounding: Rounding,
    samples: Sequence[Sequence[int]],
    left_out: frozenset[str],
    store: LayerStore,
    device: str,
    on_progress: OnStage = unseen,
) -> list[PlacedScale]:
    """Choose the scales of all layers, as `method` has them. Layers in `store` are done.

    source     of the unquantized weights
    left_out   modules that stay in 16 bits; a place that feeds one of these has no scale

    Raises ConfigError for a model without any place.
    """
    by_layer = []
    for index in range(config.num_layers):
        places = _places(config, index, method)
        by_layer.append([place for place in places if left_out.isdisjoint(place.modules)])
    if not any(by_layer):
        raise ConfigError(
            f"--method {method.transform}: no layer of this model has a place for its scales: {_reason(config)}; "
            "use --method gptq, or leave fewer modules out"
        )
    if any(store.scales(index) is None for index in range(config.num_layers)):
        chooser = _Chooser(method, rounding, source, config)
        total = config.num_layers * sum(map(len, samples))
        walk = Walk(
            config,
            source,
            kernels,
            samples,
            device,
            kernels,
            lambda done: on_progress(f"measuring for {method.transform}", done, total),
        )
        _choose(walk, chooser, by_layer, layer_modules(config), left_out, store, device)
    placed: list[PlacedScale] = []
    for index, places in enumerate(by_layer):
        scales = store.scales(index)
        assert scales is not None
        placed += zip(places, scales, strict=True)
    return placed


def _choose(
    walk: Walk,
    chooser: _Chooser,
    by_layer: Sequence[Sequence[Folding]],
    modules: Sequence[LayerModules],
    left_out: frozenset[str],
    store: LayerStore,
    device: str,
) -> None:
    """Go through the model, and put the scales of layers that `store` does not have into it."""
    for index, places in enumerate(by_layer):
        layer = walk.layer(index)
        inputs = None
        if store.scales(index) is None:
            inputs = LayerInputs(modules[index], left_out, device)
            layer = inputs.around(layer)
        walk.through(index, layer, walk.hidden, LayerWatch(modules[index], {}, {}))
        walk.require_finite(index)
        if inputs is not None:
            scales = [chooser.exact(place, chooser.scale(place, inputs)) for place in places]
            store.add_scales(index, scales, inputs.records())


def _reason(config: ModelConfig) -> str:
    """Return why the first layer has none."""
    places = unfoldable(config, 0)
    return places[0].reason if places else "all that could take one stay in 16 bits"


def _places(config: ModelConfig, index: int, method: Method) -> list[Folding]:
    """Return the foldings of a layer that the method uses."""
    places = foldings(config, index)
    if method.transform is Transform.SMOOTHQUANT:
        return [place for place in places if isinstance(place.source, Norm)]
    return list(places)


class _Chooser:
    """Chooses the scale of one place."""

    def __init__(
        self, method: Method, rounding: Rounding, source: WeightSource, config: ModelConfig
    ) -> None:
        self._method = method
        # Scales of the largest magnitude, as llm-compressor has them here: a search for each of the
        # candidates takes several times as long
        plan = replace(rounding.plan, weight_observer=WeightObserver.MINMAX)
        self._rounding = replace(rounding, plan=plan)
        self._source = source
        self._shapes = tensor_shapes(config)

    def scale(self, place: Folding, inputs: LayerInputs) -> Tensor:
        """Return the scale, float32 [inputs]; ones where no token reached the place."""
        seen = []
        for group, statistics in inputs.by_group.items():
            if not set(group).isdisjoint(place.modules) and statistics.num_rows:
                seen.append((group, statistics))
        if not seen:
            columns = self._weights(place.modules[:1])[0].shape[1]
            return torch.ones(columns, dtype=torch.float32, device="cpu")
        if self._method.transform is Transform.SMOOTHQUANT:
            return self._smoothquant(place, [statistics for _, statistics in seen])
        return self._awq(place, seen)

    def exact(self, place: Folding, scale: Tensor) -> Tensor:
        """Return the scale nearest to `scale` by which a norm's weight, rounded to its dtype, is exactly
        what it was divided by; 1 where there is none.

        Rounding would change the model: a weight to which 1 is added, divided by a large scale, is
        near -1, where 16 bits have few digits of the sum.
        """
        norm = place.source
        if not isinstance(norm, Norm):
            return scale
        weight = self._source.exact(norm.weight, self._shapes[norm.weight]) + norm.offset
        scale = scale.to(weight.device)
        stored = (weight / scale - norm.offset).to(torch_dtype(self._source.compute_format))
        exact = weight / (stored.float() + norm.offset)
        return torch.where(exact.isfinite() & (exact > 0), exact, 1.0)

    def _smoothquant(self, place: Folding, seen: Sequence[ChannelStatistics]) -> Tensor:
        most = torch.stack([statistics.most for statistics in seen]).amax(0)
        least = torch.stack([statistics.least for statistics in seen]).amin(0)
        weights = self._weights(place.modules)
        return smoothquant_scale(most - least, weights, self._method.smoothing)

    def _awq(
        self, place: Folding, seen: Sequence[tuple[tuple[str, ...], ChannelStatistics]]
    ) -> Tensor:
        """Choose among AWQ's candidates by the error of all modules that read the input, each over
        the tokens that reach it.
        """
        rows = sum(statistics.num_rows for _, statistics in seen)
        magnitudes = torch.stack([statistics.magnitude for _, statistics in seen]).sum(0) / rows
        candidates = awq_candidates(
            self._weights(place.modules),
            magnitudes,
            self._rounding.unit,
            self._method.duo_scaling,
            sharing=place.sharing,
        )
        losses = [0.0] * len(candidates)
        for group, statistics in seen:
            weights = self._weights(group)
            choice = awq_scale(weights, statistics.hessian, candidates, self._rounded)
            for index, (_, loss) in enumerate(choice.losses):
                losses[index] += loss
        return _least(candidates, losses).scale

    def _weights(self, modules: Sequence[str]) -> list[Tensor]:
        weights = []
        for module in modules:
            name = f"{module}.weight"
            weights.append(self._source.exact(name, self._shapes[name]))
        return weights

    def _rounded(self, weight: Tensor) -> Tensor:
        """Return what the matrix becomes when it is rounded to nearest."""
        matrix = self._rounding.nearest(weight)
        return self._rounding.grid(matrix).values(matrix.codes)


def _least(candidates: Sequence[AwqCandidate], losses: Sequence[float]) -> AwqCandidate:
    """Return the candidate of the smallest loss, the first of equals."""
    return candidates[losses.index(min(losses))]
