"""The quantization that a checkpoint declares, and its KV scales, as plain values. Imports no
torch.

Scales are Python floats (exact images of the float32 values), always multipliers: `true ≈ stored *
scale`.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, replace
from enum import StrEnum

from freight.fp8.formats import Format, Granularity


class Activations(StrEnum):
    """The quantization of a Linear's input before the product."""

    PLAIN = "plain"  # not at all: weight-only quantization, or none
    # Both round to E4M3, or to INT8 for weights in INT8.
    DYNAMIC = "dynamic"  # each row, with a scale from its amax (1 x 128 groups with block scales)
    STATIC = "static"  # with one calibrated scale


class WeightScales(StrEnum):
    """The elements of a weight that share one scale."""

    TENSOR = "tensor"
    ROW = "row"  # one output feature
    BLOCK = "block"  # a rectangle of the matrix


@dataclass(frozen=True)
class LinearScheme:
    """The quantization of one Linear, as its checkpoint declares it.

    block          (rows, columns) that share a scale; only with BLOCK
    input_limit    with DYNAMIC: magnitude to which inputs are clipped before they are scaled
    or_plain       whether the producer may leave a matrix in 16 or 32 bits without listing it as
                   unquantized
    bits           bits of a stored number: 8 for FP8, 4 for E2M1 with powers of two as scales
                   (`fp8.mxfp4`)
    integers       whether the stored numbers are INT8
    """

    scales: WeightScales
    activations: Activations
    block: tuple[int, int] | None = None
    input_limit: float | None = None
    or_plain: bool = False
    bits: int = 8
    integers: bool = False

    def __str__(self) -> str:
        shared = f"{self.block[0]}x{self.block[1]} block" if self.block else str(self.scales)
        limit = f" up to {self.input_limit:g}" if self.input_limit else ""
        return f"scales per {shared}, activations {self.activations}{limit}"


@dataclass(frozen=True)
class Rule:
    """A pattern of module names, matched from their start, and their scheme: None for modules that
    stay unquantized.
    """

    pattern: re.Pattern[str]
    linear: LinearScheme | None


@dataclass(frozen=True)
class LayerScales:
    """The static KV scales of one attention layer.

    `k` and `v` hold 1 (`tensor`), `num_kv_heads` (`head`) or `num_kv_heads * head_dim` (`channel`)
    positive finite floats, in row-major order; `names` are the tensors (or the JSON entries) they
    were read from.

    `k_center`, if not empty, holds `num_kv_heads * head_dim` finite floats that are subtracted from
    keys before rotary embedding; `k` is then for the differences.

    `alone` is 'k' or 'v' where only that side has a scale in the checkpoint, and `k` and `v` both
    hold it.
    """

    k: tuple[float, ...]
    v: tuple[float, ...]
    granularity: Granularity
    names: tuple[str, ...] = ()
    k_center: tuple[float, ...] = ()
    alone: str = ""


@dataclass(frozen=True)
class KVScales:
    """KV scales by layer, `None` where a layer has none, and the format they were made for.

    `format_assumed`: nothing declares the format, so E4M3FN, which every producer writes, is
    assumed.

    `mixed`, if not empty, is a choice by layer, which only `checkpoint.extras` can express: the
    granularity of an FP8 layer, None for a layer of 16 bits. Only layers with a static granularity
    then have scales in `layers`.

    `unneeded` are layers that need no scales: those that stay unquantized despite a declaration,
    and those that store no keys and values.
    """

    layers: tuple[LayerScales | None, ...]
    format: Format = Format.E4M3FN
    format_assumed: bool = False
    mixed: tuple[Granularity | None, ...] = ()
    unneeded: frozenset[int] = frozenset()

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the layers that need scales and have none."""
        return tuple(
            i for i, layer in enumerate(self.layers) if layer is None and i not in self.unneeded
        )

    def without(self, layers: Set[int]) -> KVScales:
        """Return the scales for a cache in which `layers` stay unquantized."""
        return replace(
            self,
            layers=tuple(None if i in layers else layer for i, layer in enumerate(self.layers)),
            mixed=tuple(None if i in layers else chosen for i, chosen in enumerate(self.mixed)),
            unneeded=self.unneeded | layers,
        )

    def alone(self, side: str) -> tuple[int, ...]:
        """Return the indices of the layers where only `side`, 'k' or 'v', has a scale."""
        return tuple(
            i for i, layer in enumerate(self.layers) if layer is not None and layer.alone == side
        )

    @property
    def by_granularity(self) -> str:
        """Description of a mixed choice, for messages: 'layers 0, 2 per channel, layer 1 in 16
        bits'.
        """
        members: dict[Granularity | None, list[int]] = {}
        for index, granularity in enumerate(self.mixed):
            members.setdefault(granularity, []).append(index)
        return ", ".join(
            f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(map(str, layers))} "
            + ("in 16 bits" if granularity is None else f"per {granularity}")
            for granularity, layers in members.items()
        )

    @property
    def empty(self) -> bool:
        """True if no layer has scales, and no format is declared per layer."""
        return not self.mixed and not any(self.layers)


@dataclass(frozen=True)
class Scheme:
    """The quantization that config.json (or hf_quant_config.json) declares.

    method          the producer's name ('compressed-tensors', 'fp8', 'modelopt', …), None for an
                    unquantized model
    weight_format   FP8 or INT8 if Linear weights are declared quantized
    kv_format       FP8 if an FP8 KV cache is declared
    kv_static       whether the checkpoint must have static KV scales; False for ModelOpt's cast
                    mode, which stores none
    description     one line for the user
    rules           schemes of Linear weights; the first rule that matches counts
    unused          (pattern of `*` and `?`, reason) of tensors that the producer writes and Freight
                    does not need
    """

    method: str | None = None
    weight_format: Format | None = None
    kv_format: Format | None = None
    kv_static: bool = False
    description: str = "none"
    rules: tuple[Rule, ...] = ()
    unused: tuple[tuple[str, str], ...] = ()

    @property
    def weights(self) -> str:
        """One line about the matrices that are declared quantized; '' when none are."""
        linears = [rule.linear for rule in self.rules if rule.linear is not None]
        kinds = dict.fromkeys(map(str, linears))
        if any(linear.bits == 4 for linear in linears):
            return f"experts in MXFP4, {' or '.join(kinds)}"
        return f"weights {self.weight_format}, {' or '.join(kinds)}" if kinds else ""

    def linear(self, module: str) -> LinearScheme | None:
        """Return the scheme of the weight of `module` ('model.layers.0.mlp.down_proj'); None if it
        was not quantized.
        """
        return next((rule.linear for rule in self.rules if rule.pattern.match(module)), None)
