"""Foldings: scales by channel that move between two parts of a layer and change nothing but
rounding, and the rules of SmoothQuant and AWQ for such scales.

A scale s [inputs] multiplies the columns of the Linear modules that share an input, W[:, j] * s[j],
and divides what makes this input: the weight of a norm, or the rows of the Linear before. The
product is the same in exact arithmetic. The places are those of SmoothQuant (the norms) and AWQ
(the norms, v before o, up before down); one that is not exact has a reason instead (`Unfoldable`).

Everything here is a function of tensors by their names in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from freight.model.config.layer import DenseConfig, MoEConfig, NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.mixers.attention.spec import AttentionConfig, AttentionNames
from freight.model.mixers.latent.spec import LatentConfig, LatentNames
from freight.operands.activation import Activation, AnyActivation, GatedFunction
from freight.quantizer.modules import layer_modules
from freight.quantizer.normed import Axis, Group, LayerTensors, Norm
from freight.quantizer.plan import DuoScaling

# of up(x): activation(gate) * (up / s) = (activation(gate) * up) / s, and max(up / s, 0) = max(up,
# 0) / s for s > 0
_LINEAR_IN_UP = (GatedFunction.SILU, GatedFunction.GELU_TANH, GatedFunction.GEGLU)


@dataclass(frozen=True)
class Rows:
    """Rows of the matrix `weight` from `start` to `stop`, and of its bias; None: there is none."""

    weight: str
    bias: str | None
    start: int
    stop: int


@dataclass(frozen=True)
class Sharing:
    """Heads of queries that read the values of one KV head, and so have to share its scales.

    heads     KV heads
    repeats   heads of queries for each
    size      channels of a head
    """

    heads: int
    repeats: int
    size: int

    def by_source(self, scale: Tensor) -> Tensor:
        """Return the scales of the KV heads, [heads * size], of scales that are shared, [heads *
        repeats * size].
        """
        return scale.view(self.heads, self.repeats, self.size)[:, 0].flatten()

    def mean(self, values: Tensor) -> Tensor:
        """Return `values` [heads * repeats * size], each replaced by the mean over its sharers."""
        by_head = values.view(self.heads, self.repeats, self.size)
        return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(values.shape)

    def largest(self, values: Tensor) -> Tensor:
        """Return `values` [heads * repeats * size], each replaced by the largest of its sharers."""
        by_head = values.view(self.heads, self.repeats, self.size)
        return by_head.amax(1, keepdim=True).expand_as(by_head).reshape(values.shape)


@dataclass(frozen=True)
class Folding:
    """A place for a scale s [inputs].

    source      divided by s
    groups      those of `LayerModules.groups` that read the scaled input, or of an expert's down
                projection its module alone: what is quantized
    consumers   every tensor whose input dimension s multiplies: the matrices of `groups`, and
                routers and gates
    sharing     channels of s that have to be equal; None: all are free
    """

    source: Norm | Rows
    groups: tuple[Group, ...]
    consumers: tuple[Axis, ...]
    sharing: Sharing | None = None

    @property
    def modules(self) -> Group:
        """The modules of `groups`."""
        return tuple(chain.from_iterable(self.groups))

    @property
    def tensors(self) -> Group:
        """Names of the tensors that the folding changes."""
        source = (self.source.weight, self.source.bias)
        names = [name for name in source if name is not None]
        return (*names, *(consumer.tensor for consumer in self.consumers))


@dataclass(frozen=True)
class Unfoldable:
    """Modules whose input has no place for a scale, and the reason."""

    group: Group
    reason: str


def foldings(config: ModelConfig, index: int) -> tuple[Folding, ...]:
    """Return the foldings of layer `index`: of the mixer's input, of its output projection, and of
    both sides of the feed-forward, of each expert too.

    Those whose source is a `Norm` are SmoothQuant's. `config.foreign` must be None.
    """
    return tuple(place for place in _places(config, index) if isinstance(place, Folding))


def unfoldable(config: ModelConfig, index: int) -> tuple[Unfoldable, ...]:
    """Return the other groups of layer `index`, with reasons for messages."""
    return tuple(place for place in _places(config, index) if isinstance(place, Unfoldable))


def fold(folding: Folding, scale: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return every tensor that changes, by name, in float32 and its shape.

    scale     float32 [inputs], finite and > 0; equal where `folding.sharing` says so
    tensors   at least `folding.tensors`, as the checkpoint has them
    """
    return {name: fold_tensor(folding, scale, name, tensors[name]) for name in folding.tensors}


def fold_tensor(folding: Folding, scale: Tensor, name: str, tensor: Tensor) -> Tensor:
    """Return one tensor of `fold`, so that only one is in memory."""
    assert bool((scale > 0).all()), "scales are > 0"
    assert bool(scale.isfinite().all()), "scales are finite"
    sharing = folding.sharing
    if sharing is not None:
        assert torch.equal(scale, sharing.largest(scale)), "heads of one KV head share their scales"
    values = tensor.float()
    scale = scale.to(values.device, torch.float32)
    for consumer in folding.consumers:
        if consumer.tensor == name:
            shape = [1] * values.dim()
            shape[consumer.dim] = -1
            return values * scale.view(shape)
    source = folding.source
    if isinstance(source, Norm):
        offset = source.offset if name == source.weight else 0.0
        return (values + offset) / scale - offset
    if sharing is not None:
        scale = sharing.by_source(scale)
    divided = values.clone()
    rows = divided[source.start : source.stop]
    rows /= scale if name == source.bias else scale[:, None]
    return divided


def _places(config: ModelConfig, index: int) -> Iterator[Folding | Unfoldable]:
    """Yield all places in the order of the layer, then what has none."""
    tensors = LayerTensors(config, index, layer_modules(config)[index])
    of_mixer = set(tensors.modules.mixed.values())
    normed = [Folding(read.norm, read.groups, read.consumers) for read in tensors.normed_inputs]
    places = (
        *(place for place in normed if of_mixer.issuperset(place.groups)),
        *_inner(config, index, tensors),
        *(place for place in normed if not of_mixer.issuperset(place.groups)),
        *_downs(tensors),
    )
    yield from places
    placed: set[str] = set()
    for place in places:
        placed.update(place.modules if isinstance(place, Folding) else place.group)
    for group in tensors.modules.groups:
        if not placed.issuperset(group):
            yield Unfoldable(group, _reason(tensors))


def _reason(tensors: LayerTensors) -> str:
    """Return why a group has no place that the rules below know."""
    placement = tensors.layer.norms
    if placement is NormPlacement.OUTPUT:
        return "no norm stands before it: the layer norms outputs alone"
    if placement is NormPlacement.POST:
        return "the norm before it also feeds the residual stream"
    return "neither a norm nor a Linear that a scale could divide stands right before it"


def _inner(
    config: ModelConfig, index: int, tensors: LayerTensors
) -> Iterator[Folding | Unfoldable]:
    """Yield the places inside the mixer."""
    mixer = tensors.layer.mixer
    if isinstance(mixer, AttentionConfig):
        yield _output(config, index, mixer, tensors)
    if isinstance(mixer, LatentConfig) and mixer.q_rank is not None:
        group = tensors.modules.mixed["q_b"]
        norm = tensors.norm(tensors.names.of(LatentNames).q_norm)
        yield Folding(norm, (group,), tuple(Axis(f"{module}.weight", 1) for module in group))


def _output(
    config: ModelConfig, index: int, mixer: AttentionConfig, tensors: LayerTensors
) -> Folding | Unfoldable:
    """Return the place between the values and the output projection. Attention sums values by head
    and channel; sinks and gates multiply these sums, so a scale passes through.
    """
    group = tensors.modules.mixed["o"]
    readers = [layer for layer, other in config.attention.items() if other.kv_from == index]
    if mixer.kv_from is not None:
        return Unfoldable(group, f"its values are those of layer {mixer.kv_from}")
    if readers:
        return Unfoldable(group, f"layer {readers[0]} reads the same values")
    if mixer.k_eq_v:
        return Unfoldable(group, "the values are the keys")
    if mixer.v_norm:
        return Unfoldable(group, "a norm of the values undoes the scale")
    module = tensors.prefix + tensors.names.of(AttentionNames).qkv_of(mixer)[-1]
    values = mixer.qkv_sizes[2]
    rows = tensors.parts.projections["qkv"].rows[-1]
    bias = f"{module}.bias" if mixer.qkv_bias else None
    source = Rows(f"{module}.weight", bias, rows - values, rows)
    repeats = mixer.num_heads // mixer.num_kv_heads
    sharing = None if repeats == 1 else Sharing(mixer.num_kv_heads, repeats, mixer.v_dim)
    return Folding(source, (group,), (Axis(f"{group[0]}.weight", 1),), sharing)


def _downs(tensors: LayerTensors) -> Iterator[Folding | Unfoldable]:
    """Yield the places between up and down, of a feed-forward and of each expert."""
    mlp = tensors.layer.feed_forward
    modules = tensors.modules
    dense = mlp.shared if isinstance(mlp, MoEConfig) else mlp
    if dense is not None:
        yield _down(dense, modules.dense["gate_up"], modules.dense["down"])
    if not isinstance(mlp, MoEConfig):
        return
    assert modules.experts is not None
    if tensors.names.interleaved:
        yield Unfoldable(modules.experts.down, "the experts of a layer are one tensor")
        return
    for gate_up, down in modules.experts.by_expert:
        place = _down(mlp.expert, gate_up, (down,))
        if isinstance(place, Unfoldable):  # for all experts
            yield Unfoldable(modules.experts.down, place.reason)
            return
        yield place


def _down(mlp: DenseConfig, gate_up: Group, down: Group) -> Folding | Unfoldable:
    if not _is_linear_in_up(mlp.activation):
        return Unfoldable(
            down, f"the activation {mlp.activation} is not linear in the up projection"
        )
    size = mlp.intermediate_size
    stop = size if len(gate_up) > 1 else sum(mlp.up_sizes)
    up = gate_up[-1]
    source = Rows(f"{up}.weight", f"{up}.bias" if mlp.bias else None, stop - size, stop)
    return Folding(source, (down,), (Axis(f"{down[0]}.weight", 1),))


def _is_linear_in_up(activation: AnyActivation) -> bool:
    """Return whether f(up / s) = f(up) / s for s > 0."""
    if isinstance(activation, Activation):
        return activation is Activation.RELU
    return activation.function in _LINEAR_IN_UP


def smoothquant_scale(
    input_range: Tensor, weights: Sequence[Tensor], strength: float = 0.5
) -> Tensor:
    """Return SmoothQuant's scale (Xiao et al. 2022, arXiv 2211.10438), float32 [inputs].

    s_j = range_j^strength / (2 max_i |W_ij|)^(1 - strength), range_j where the column is 0, and at
    least 1e-5: as llm-compressor has it. With the range 2 max |X_j| of symmetric inputs and a
    strength of 0.5 it is the paper's max |X_j|^0.5 / max |W_j|^0.5.

    input_range   [inputs], largest less smallest input of each channel over the calibration tokens
    weights       of the modules that read it, each [outputs, inputs]
    strength      from 0 (weights as even as can be) to 1 (inputs)
    """
    ranges = input_range.float()
    largest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0) * 2
    scale = ranges.pow(strength) / largest.pow(1 - strength)
    return torch.where(largest > 0, scale, ranges).clamp(min=1e-5)


def weight_means(weights: Sequence[Tensor], unit: tuple[int | None, int | None]) -> Tensor:
    """Return AWQ's mean magnitude of each input's weights, float64 [inputs]: of |W| divided by the
    largest of the values that are quantized together.

    weights   each [outputs, inputs]
    unit      rows and columns with one scale: (1, 128) for groups, (1, None) for rows, (None, None)
              for a matrix; None is all of them
    """
    total = torch.zeros(weights[0].shape[1], dtype=torch.float64, device=weights[0].device)
    for weight in weights:
        magnitudes = weight.float().abs()
        rows, columns = magnitudes.shape
        height = unit[0] or rows
        width = unit[1] or columns
        padding = (0, -columns % width, 0, -rows % height)
        tiles = torch.nn.functional.pad(magnitudes, padding)
        tiles = tiles.unflatten(0, (-1, height)).unflatten(2, (-1, width))
        tiles = tiles / (tiles.amax((1, 3), keepdim=True) + 1e-6)
        total += tiles.flatten(2).flatten(0, 1)[:rows, :columns].sum(0, dtype=torch.float64)
    return total / sum(len(weight) for weight in weights)


@dataclass(frozen=True)
class AwqCandidate:
    """A scale that AWQ tries: mean |X_j|^ratio, with `duo` divided by the weights' mean magnitude to
    the power of 1 - ratio.

    scale   float32 [inputs]; the root of the largest times the smallest is 1
    """

    ratio: float
    duo: bool
    scale: Tensor


@dataclass(frozen=True)
class AwqChoice:
    """The candidate with the smallest loss, the first of equals, and all with their losses: the
    squared error of all outputs, over all calibration tokens.
    """

    chosen: AwqCandidate
    losses: tuple[tuple[AwqCandidate, float], ...]


def awq_candidates(
    weights: Sequence[Tensor],
    mean_magnitude: Tensor,
    unit: tuple[int | None, int | None],
    duo: DuoScaling = DuoScaling.ON,
    steps: int = 20,
    sharing: Sharing | None = None,
) -> tuple[AwqCandidate, ...]:
    """Return the scales that AWQ (Lin et al. 2023, arXiv 2306.00978) tries, as llm-compressor has
    them: x^r, or x^r / (w^(1 - r) + 1e-4), at least 1e-4, divided by the root of the largest times
    the smallest.

    weights          of the modules that share the input, each [outputs, inputs]: w is their
                     `weight_means`
    mean_magnitude   x, the mean of |X| over the calibration tokens, [inputs]
    unit             rows and columns that share a scale when the weights are rounded
    steps            number of candidates, at least 4
    sharing          of the folding: x and w become means over channels that share a scale
    """
    magnitudes = mean_magnitude.double()
    means = weight_means(weights, unit)
    if sharing is not None:
        magnitudes = sharing.mean(magnitudes)
        means = sharing.mean(means)
    return tuple(
        AwqCandidate(ratio, with_weights, _awq_scale(magnitudes, means, ratio, with_weights))
        for ratio, with_weights in _awq_grid(duo, steps)
    )


def _awq_grid(duo: DuoScaling, steps: int) -> list[tuple[float, bool]]:
    """Return (ratio, whether weights count) of each candidate."""
    assert steps >= 4
    if duo is DuoScaling.OFF:
        return [(step / (steps - 1), False) for step in range(steps)]
    if duo is DuoScaling.BOTH:
        half = steps // 2
        return [(step / (half - 1), also) for step in range(half) for also in (False, True)]
    return [(0.0, False), *((step / (steps - 2), True) for step in range(steps - 1))]


def _awq_scale(magnitudes: Tensor, means: Tensor, ratio: float, with_weights: bool) -> Tensor:
    """Return the scale of one candidate, float32 [inputs]."""
    scale = magnitudes.pow(ratio)
    if with_weights:
        scale = scale / (means.pow(1 - ratio) + 1e-4)
    scale = scale.clamp(min=1e-4)
    scale = scale / (scale.max() * scale.min()).sqrt()
    return torch.where(scale.isfinite(), scale, 1.0).float()


def awq_scale(
    weights: Sequence[Tensor],
    hessian: Tensor,
    candidates: Sequence[AwqCandidate],
    rounding: Callable[[Tensor], Tensor],
) -> AwqChoice:
    """Choose among `candidates` by the error of the modules' outputs.

    The error is exact, without another pass over the tokens: with Q = rounding(W s) / s the outputs
    differ by X (W - Q)^T, whose squares sum to tr((W - Q) H (W - Q)^T) where H = X^T X.
    llm-compressor takes the error behind the module that contains all of `weights`: for o and down
    it is this one, for q, k and v that of attention's result, for gate and up that of the
    feed-forward's.

    weights      of the modules that share the input, each [outputs, inputs]
    hessian      X^T X, or a multiple, which the losses are a multiple with, [inputs, inputs]
    rounding     a matrix [outputs, inputs] -> the values that its quantized form stands for
    """
    hessian = hessian.float()
    losses = []
    for candidate in candidates:
        errors = [_squared_error(weight, candidate.scale, hessian, rounding) for weight in weights]
        loss = sum(errors)
        losses.append((candidate, math.inf if math.isnan(loss) else loss))
    chosen, _ = min(losses, key=lambda tried: tried[1])
    return AwqChoice(chosen, tuple(losses))


def _squared_error(
    weight: Tensor, scale: Tensor, hessian: Tensor, rounding: Callable[[Tensor], Tensor]
) -> float:
    """Return tr((W - Q) H (W - Q)^T) with Q = rounding(W s) / s."""
    values = weight.float()
    difference = values - rounding(values * scale) / scale
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))
