"""Rotation of a model's channels by Hadamard matrices, folded into its weights (QuaRot, Ashkboos et
al. 2024, arXiv 2404.00456; SpinQuant, Liu et al. 2024, arXiv 2405.16406).

R1 turns the residual stream: x becomes x R. The root mean square of x R is that of x, so an RMSNorm
passes a rotation through once its weight is folded into the Linear modules that it feeds. The
embedding's rows and all that a layer adds are turned by R, the inputs of all readers by R too, for
(x R)(W R)^T = x W^T. R2 turns the values of each KV head, which attention sums by channel, and the
columns of the output projection. Both change nothing but rounding, and spread outliers over all
channels. The rotated model has an output head of its own, since the embedding is turned without the
last norm's weight.

Each tensor of the result comes from one tensor of the checkpoint and at most one norm, so only these
are in memory (`Rotation.tensor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from freight.errors import ConfigError
from freight.model.architectures import tensor_names
from freight.model.config.layer import NormKind, NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.mixers.attention.spec import AttentionConfig, AttentionNames
from freight.model.shapes import tensor_shapes
from freight.quantizer.hadamard import paley_order, signs, turned
from freight.quantizer.normed import Axis, LayerTensors, Norm, layer_tensors, norm_of

_CHUNK = 1 << 21  # numbers that are computed at once in float64


class RotationPart(StrEnum):
    """What is turned."""

    RESIDUAL = "R1"
    VALUES = "R2"


@dataclass(frozen=True)
class Turn:
    """x R along dimension `dim` from index `start` on, in each of the equal parts of size `order`: R is
    the Hadamard matrix of this order, its rows multiplied by random signs.

    seed   of the signs; None: all are 1
    """

    dim: int
    order: int
    seed: int | None
    start: int = 0


@dataclass(frozen=True)
class Change:
    """How a tensor of the rotated model is made.

    reads      the tensor of the checkpoint: its own name, but for the head of a tied model
    norm       the norm whose weight first multiplies dimension `norm_dim`; None: none does
    turns      follow, in this order
    constant   a norm's weight, which is in other tensors now: every value becomes this number;
               None: it is computed
    """

    reads: str
    norm: Norm | None = None
    norm_dim: int = 0
    turns: tuple[Turn, ...] = ()
    constant: float | None = None


@dataclass(frozen=True)
class Rotation:
    """What becomes of each tensor of a model.

    changes    by the name of the tensor in the rotated model; all others stay as they are
    unties     whether the head is a tensor of its own now: `tie_word_embeddings` becomes false
    parts      what is turned; VALUES in all layers that are not in `refusals`
    refusals   why R1 is not possible, or R2 in a layer: for messages
    """

    changes: Mapping[str, Change]
    unties: bool
    parts: tuple[RotationPart, ...]
    refusals: tuple[str, ...]

    def tensor(self, name: str, stored: Tensor, norm: Tensor | None = None) -> Tensor:
        """Return tensor `name` of the rotated model in float32. Products with Hadamard matrices are
        summed in float64, a part of the tensor at a time.

        stored   the tensor `changes[name].reads` of the checkpoint
        norm     the weight of `changes[name].norm`; None where that is None
        """
        change = self.changes[name]
        if change.constant is not None:
            return torch.full_like(stored, change.constant, dtype=torch.float32)
        values = stored.to(torch.float32, copy=True)
        if change.norm is not None:
            assert norm is not None, f"{name} takes the weight of {change.norm.weight}"
            shape = [1] * values.dim()
            shape[change.norm_dim] = -1
            values *= (norm.float() + change.norm.offset).view(shape)
        for turn in change.turns:
            values = _turned(values, turn)
        return values


def rotation(
    config: ModelConfig,
    parts: tuple[RotationPart, ...] = (RotationPart.RESIDUAL, RotationPart.VALUES),
    seed: int | None = None,
) -> Rotation:
    """Return how the model is rotated by `parts`, as far as that is exact.

    seed   of random signs, with which R1 is the randomized Hadamard matrix of QuaRot; None: none

    Raises ConfigError, with all reasons, if nothing can be rotated.
    """
    if config.foreign is not None:
        raise ConfigError(
            f"--method rotation: model_type {config.model_type!r} runs through transformers' modules, and which norms "
            "feed which Linear modules is unknown; use another method"
        )
    refusals: list[str] = []
    changes: dict[str, Change] = {}
    if RotationPart.VALUES in parts:
        _add_values(config, seed, changes, refusals)
    turned_parts = [RotationPart.VALUES] if changes else []
    unties = False
    if RotationPart.RESIDUAL in parts:
        reason = residual_refusal(config)
        if reason is None:
            _add_residual(config, seed, changes)
            unties = config.tie_word_embeddings
            turned_parts.insert(0, RotationPart.RESIDUAL)
        else:
            refusals.insert(0, f"R1: {reason}")
    if not changes:
        raise ConfigError(
            f"--method rotation: nothing of this model can be rotated: {'; '.join(refusals)}; use another method"
        )
    return Rotation(changes, unties, tuple(turned_parts), tuple(refusals))


def residual_refusal(config: ModelConfig) -> str | None:
    """Return why R1 would change the model's results; None if it does not."""
    placements = {layer.norms for layer in config.layers}
    reasons = (
        (
            config.norm_kind is NormKind.LAYER,
            "LayerNorm subtracts the mean, which a rotation changes",
        ),
        (
            NormPlacement.SANDWICH in placements or NormPlacement.OUTPUT in placements,
            "norms of what layers add have weights by channel, which nothing after them can take up",
        ),
        (NormPlacement.POST in placements, "the residual stream itself is normed by channel"),
        (config.embedding_norm, "the embedding is normed"),
        (config.position_offset is not None, "positions are added to the embedding"),
        (
            config.embedding_size is not None,
            "projections stand after the embedding and before the head",
        ),
        (config.per_layer_vocab_size is not None, "each layer adds embeddings of its own"),
        (not config.final_norm, "no norm stands before the head"),
        (
            config.prediction_layers > 0,
            "layers that predict further tokens read the residual stream",
        ),
        (
            config.architecture.endswith("ForConditionalGeneration") or _has_other_parts(config),
            "embeddings of pictures or sound enter the residual stream",
        ),
    )
    for applies, reason in reasons:
        if applies:
            return reason
    return _order_refusal(config.hidden_size, "hidden_size")


def _has_other_parts(config: ModelConfig) -> bool:
    unused = tensor_names(config).unused
    return any("runs the text model alone" in reason for _, reason in unused)


def _order_refusal(order: int, what: str) -> str | None:
    try:
        paley_order(order)
    except ConfigError as error:
        return f"{what} = {order}: {error}"
    return None


def _add_residual(config: ModelConfig, seed: int | None, changes: dict[str, Change]) -> None:
    """Add R1 to `changes`, which may have R2's."""
    names = tensor_names(config)
    shapes = tensor_shapes(config)
    order = config.hidden_size

    def turn(axis: Axis, norm: Norm | None = None, reads: str | None = None) -> None:
        before = changes.get(axis.tensor, Change(reads or axis.tensor))
        turns = (*before.turns, Turn(axis.dim, order, seed))
        changes[axis.tensor] = Change(before.reads, norm, axis.dim, turns)

    def reset(norm: Norm) -> None:
        changes[norm.weight] = Change(norm.weight, constant=1.0 - norm.offset)

    turn(Axis(names.embedding, 1))
    last = norm_of(config, names.norm, None if config.final_norm_offset else 0.0)
    turn(Axis(names.head, 1), last, names.embedding if config.tie_word_embeddings else None)
    reset(last)
    for layer in layer_tensors(config):
        for normed in layer.normed_inputs:
            for consumer in normed.consumers:
                turn(consumer, normed.norm)
            reset(normed.norm)
        for output in layer.outputs(shapes):
            turn(output)


def _add_values(
    config: ModelConfig, seed: int | None, changes: dict[str, Change], refusals: list[str]
) -> None:
    """Add R2 to `changes`, and to `refusals` the layers without it."""
    reasons: dict[str, list[int]] = {}
    for index, layer in enumerate(layer_tensors(config)):
        reason = _values_refusal(config, index)
        if reason is not None:
            reasons.setdefault(reason, []).append(index)
            continue
        mixer = layer.layer.mixer
        assert isinstance(mixer, AttentionConfig)
        changes.update(_value_changes(layer, mixer, seed))
    for reason, layers in reasons.items():
        which = f"layer {layers[0]}" + (f" and {len(layers) - 1} more" if layers[1:] else "")
        refusals.append(f"R2 of {which}: {reason}")


def _values_refusal(config: ModelConfig, index: int) -> str | None:
    """Return why the values of a layer cannot be rotated; None if they can."""
    mixer = config.layers[index].mixer
    if not isinstance(mixer, AttentionConfig):
        return "the mixer is not attention with a projection of values"
    if mixer.kv_from is not None or any(
        other.kv_from == index for other in config.attention.values()
    ):
        return "several layers read the same values"
    if mixer.k_eq_v:
        return "the values are the keys"
    if mixer.output_gate is not None and not mixer.output_gate.by_head:
        return "a gate multiplies each channel of a head separately"
    return _order_refusal(mixer.v_dim, "the size of a value head")


def _value_changes(
    layer: LayerTensors, mixer: AttentionConfig, seed: int | None
) -> Iterator[tuple[str, Change]]:
    """Yield R2 of a layer, by tensor. A norm of each head's values (`AttentionConfig.v_norm`) has no
    weight, and the root mean square of a head stays.
    """
    module = layer.prefix + layer.names.of(AttentionNames).qkv_of(mixer)[-1]
    start = layer.parts.projections["qkv"].rows[-1] - mixer.qkv_sizes[2]
    of_v = [f"{module}.weight"]
    if mixer.qkv_bias:
        of_v.append(f"{module}.bias")
    for name in of_v:
        yield name, Change(name, turns=(Turn(0, mixer.v_dim, seed, start),))
    (o,) = layer.modules.mixed["o"]
    yield f"{o}.weight", Change(f"{o}.weight", turns=(Turn(1, mixer.v_dim, seed),))


def _turned(values: Tensor, turn: Turn) -> Tensor:
    """Return `values`, float32, with a turn in place."""
    size = values.shape[turn.dim] - turn.start
    part = values.narrow(turn.dim, turn.start, size).movedim(turn.dim, -1)
    factors = signs(turn.order, turn.seed).to(values.device)
    step = max(1, _CHUNK * len(part) // part.numel())
    for begin in range(0, len(part), step):
        rows = part[begin : begin + step]
        exact = rows.double().unflatten(-1, (-1, turn.order)) * factors
        rows.copy_(turned(exact, turn.order).flatten(-2))
    return values
