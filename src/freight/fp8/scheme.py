"""The quantization that a checkpoint declares, and its KV scales, as plain values. Imports no
torch.

Scales are Python floats (exact images of the float32 values), always multipliers: `true ≈ stored *
scale`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from freight.errors import CheckpointError
from freight.fp8.block_formats import BlockFormat
from freight.fp8.formats import Format, Granularity


class Activations(StrEnum):
    """The quantization of a Linear's input before the product."""

    PLAIN = "plain"  # not at all: weight-only quantization, or none
    # Both round to E4M3, or to INT8 for weights in INT8.
    DYNAMIC = "dynamic"  # each row, with a scale from its amax (1 x 128 groups with block scales)
    STATIC = "static"  # with one calibrated scale
    # To INT8, with a scale for each group of inputs, from its amax; only for weights in 4 bits
    GROUPS = "groups"


class WeightScales(StrEnum):
    """The elements of a weight that share one scale."""

    TENSOR = "tensor"
    ROW = "row"  # one output feature
    BLOCK = "block"  # a rectangle of the matrix


MXFP8_GROUP = 32  # inputs that share a power of two in MXFP8 (OCP MX 1.0, section 5.2)
INT4_GROUP = 128  # inputs that share a scale where Freight rounds to INT4
INT4_GROUPS = (128, 64, 32)  # where that does not divide the inputs, the next one does


def int4_group(in_features: int, size: int = INT4_GROUP) -> int | None:
    """Return the inputs of a group of INT4: `size`, or the next smaller size that divides
    `in_features`; None if none does.
    """
    for group in INT4_GROUPS:
        if group <= size and in_features % group == 0:
            return group
    return None


class Packing(StrEnum):
    """How a producer stores a matrix in 4 bits; `checkpoint.four_bits` has their tensors."""

    INT4 = "pack-quantized"  # compressed-tensors
    INT4_BYTES = "int-quantized"  # the same, a code to a byte: for inputs that are rounded too
    NVFP4 = "nvfp4-pack-quantized"  # compressed-tensors
    MXFP4 = "mxfp4-pack-quantized"  # compressed-tensors
    MODELOPT_NVFP4 = "modelopt"
    GPTQ = "gptq"  # zero points are stored minus 1
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"

    @property
    def codes(self) -> str:
        """The name of the numbers."""
        if self in (Packing.NVFP4, Packing.MODELOPT_NVFP4):
            return "NVFP4"
        if self is Packing.MXFP4:
            return "MXFP4"
        return "INT4"


@dataclass(frozen=True)
class FourBits:
    """A matrix in 4 bits, as its producer stores it.

    group      consecutive inputs of a row that share a scale; None: all of them
    zeros      whether groups have zero points
    ordered    whether `g_idx` may give inputs to groups in another order
    """

    packing: Packing
    group: int | None
    zeros: bool = False
    ordered: bool = False

    def stored_bytes(self, count: int) -> int:
        """Return the bytes of `count` codes, with scales and zero points of their groups."""
        if not self.group:
            return count // 2
        of_group = 2
        if self.packing.codes in ("NVFP4", "MXFP4"):
            of_group = 1
        if self.zeros:
            of_group += 1
        return count // 2 + count // self.group * of_group

    def __str__(self) -> str:
        text = f"{self.packing.codes}, scales"
        if self.zeros:
            text += " and zero points"
        if self.group is None:
            text += " per row"
        else:
            text += f" per {self.group} inputs"
        if self.ordered:
            text += ", groups in an order of their own"
        return text


def held_group(four: FourBits, columns: int) -> int | None:
    """Return the inputs of a group as kernels have it, in a matrix of `columns` inputs: a larger
    group becomes several with the same scale. None if there is no such size.
    """
    size = four.group
    if size is None:
        size = columns
    if four.packing.codes == "NVFP4":
        return size
    return int4_group(size)


@dataclass(frozen=True)
class LinearScheme:
    """The quantization of one Linear, as its checkpoint declares it.

    block          (rows, columns) that share a scale; only with BLOCK
    input_limit    with DYNAMIC: magnitude to which inputs are clipped before they are scaled
    or_plain       whether the producer may leave a matrix in 16 or 32 bits without listing it as
                   unquantized
    bits           bits of a stored number: 8 for FP8, 4 for E2M1 with powers of two as scales
                   (`fp8.mxfp4`) and for what has `four`
    integers       whether the stored numbers are INT8
    four           a matrix in 4 bits with tensors of its own; None: in 8 bits, or experts of gpt-oss
    blocks         a matrix of a GGUF file, in blocks; None: another
    mxfp8          whether E4M3 has a power of two for each `MXFP8_GROUP` inputs, in a byte; `block`
                   is then a group
    input_rounding how the producer has inputs rounded, where that is not `activations`: 'INT8 per
                   token'; '' where they are treated as declared
    """

    scales: WeightScales
    activations: Activations
    block: tuple[int, int] | None = None
    input_limit: float | None = None
    or_plain: bool = False
    bits: int = 8
    integers: bool = False
    four: FourBits | None = None
    blocks: BlockFormat | None = None
    mxfp8: bool = False
    input_rounding: str = ""

    @staticmethod
    def in_mxfp8(input_rounding: str = "") -> LinearScheme:
        """Return the scheme of a matrix in MXFP8, whose inputs stay in 16 bits."""
        return LinearScheme(
            WeightScales.BLOCK,
            Activations.PLAIN,
            (1, MXFP8_GROUP),
            mxfp8=True,
            input_rounding=input_rounding,
        )

    @staticmethod
    def in_blocks(format: BlockFormat) -> LinearScheme:
        """Return the scheme of a matrix of a GGUF file."""
        return LinearScheme(WeightScales.BLOCK, Activations.PLAIN, (1, format.group), blocks=format)

    @staticmethod
    def in_four_bits(
        packing: Packing,
        group: int | None,
        *,
        zeros: bool = False,
        ordered: bool = False,
        or_plain: bool = False,
        input_rounding: str = "",
    ) -> LinearScheme:
        """Return the scheme of a matrix in 4 bits, whose inputs stay in 16 bits."""
        scheme = LinearScheme(
            WeightScales.ROW,
            Activations.PLAIN,
            or_plain=or_plain,
            bits=4,
            four=FourBits(packing, group, zeros, ordered),
            input_rounding=input_rounding,
        )
        if group is None:
            return scheme
        return replace(scheme, scales=WeightScales.BLOCK, block=(1, group))

    def __str__(self) -> str:
        inputs = f"activations {self.activations}"
        if self.input_rounding:
            inputs += f" (declared: {self.input_rounding})"
        if self.four is not None:
            return f"{self.four}, {inputs}"
        if self.mxfp8:
            return f"MXFP8, scales per {MXFP8_GROUP} inputs, {inputs}"
        if self.blocks is not None:
            return str(self.blocks)
        shared = str(self.scales)
        if self.block:
            rows, columns = self.block
            shared = f"{rows}x{columns} block"
        text = f"scales per {shared}, {inputs}"
        if self.input_limit:
            text += f" up to {self.input_limit:g}"
        return text


class ModulePattern(Protocol):
    """What selects modules by name: an `re.Pattern`, or a FilePattern of an expression in a file."""

    def match(self, name: str, /) -> object:
        """Return a true value if `name` is selected."""


@dataclass(frozen=True)
class Rule:
    """A pattern of module names, matched from their start, and their scheme: None for modules that
    stay unquantized.
    """

    pattern: ModulePattern
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
class ScaleFault:
    """Why stored KV scales cannot be used: those of `layer`, or of all layers (None)."""

    layer: int | None
    what: str


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

    `faults` are of scales that the checkpoint stores and nothing can use; their layers have None in
    `layers`. They matter where the scales are used, not before: `require_valid`.
    """

    layers: tuple[LayerScales | None, ...]
    format: Format = Format.E4M3FN
    format_assumed: bool = False
    mixed: tuple[Granularity | None, ...] = ()
    unneeded: frozenset[int] = frozenset()
    faults: tuple[ScaleFault, ...] = ()

    @property
    def usable(self) -> bool:
        """True if scales, or a choice by layer, are stored, and nothing is wrong with them."""
        return not self.empty and not self.faults

    def require_valid(self, way_out: str) -> None:
        """Raise CheckpointError, which ends with `way_out`, if there are `faults`."""
        if not self.faults:
            return
        what = self.faults[0].what
        if len(self.faults) > 1:
            what += f", and {len(self.faults) - 1} more like it"
        raise CheckpointError(f"{what}; {way_out}")

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the layers that need scales and have none."""
        indices = []
        for index, layer in enumerate(self.layers):
            if layer is None and index not in self.unneeded:
                indices.append(index)
        return tuple(indices)

    def without(self, layers: Set[int]) -> KVScales:
        """Return the scales for a cache in which `layers` stay unquantized."""
        scales = list(self.layers)
        mixed = list(self.mixed)
        for index in layers:
            scales[index] = None
            if mixed:  # a choice for every layer
                mixed[index] = None
        return replace(
            self,
            layers=tuple(scales),
            mixed=tuple(mixed),
            unneeded=self.unneeded | layers,
            faults=tuple(fault for fault in self.faults if fault.layer not in layers),
        )

    def alone(self, side: str) -> tuple[int, ...]:
        """Return the indices of the layers where only `side`, 'k' or 'v', has a scale."""
        indices = []
        for index, layer in enumerate(self.layers):
            if layer is not None and layer.alone == side:
                indices.append(index)
        return tuple(indices)

    @property
    def by_granularity(self) -> str:
        """Description of a mixed choice, for messages: 'layers 0, 2 per channel, layer 1 in 16
        bits'.
        """
        members: dict[Granularity | None, list[int]] = {}
        for index, granularity in enumerate(self.mixed):
            members.setdefault(granularity, []).append(index)
        parts = []
        for granularity, layers in members.items():
            form = f"per {granularity}"
            if granularity is None:
                form = "in 16 bits"
            noun = "layers"
            if len(layers) == 1:
                noun = "layer"
            parts.append(f"{noun} {', '.join(map(str, layers))} {form}")
        return ", ".join(parts)

    @property
    def empty(self) -> bool:
        """True if no scales are stored, and no format is declared per layer."""
        return not self.mixed and not any(self.layers) and not self.faults


@dataclass(frozen=True)
class Scheme:
    """The quantization that config.json (or hf_quant_config.json) declares.

    method          the producer's name ('compressed-tensors', 'fp8', 'modelopt', …), None for an
                    unquantized model
    weight_format   FP8 or INT8 if Linear weights are declared quantized; FP8 also in 4 bits
    kv_format       FP8 if an FP8 KV cache is declared
    kv_refused      what is declared of a KV cache in another format than FP8, with which nothing here
                    computes; '' if nothing is: the cache has to be chosen then
    kv_static       whether the checkpoint must have static KV scales; False for ModelOpt's cast
                    mode, which stores none
    description     one line for the user
    rules           schemes of Linear weights; the first rule that matches counts
    blocks          the formats of the matrices of a GGUF file, by module; `weight_format` is None
    decoded         other types of matrices in a GGUF file, which are decoded as they load
    uncompressed    whether the producer says that weights are not stored in `weight_format` yet;
                    tensors show whether they are (`checkpoint.linears.dense_scheme`)
    unused          (pattern of `*` and `?`, reason) of tensors that the producer writes and Freight
                    does not need
    """

    method: str | None = None
    weight_format: Format | None = None
    kv_format: Format | None = None
    kv_static: bool = False
    kv_refused: str = ""
    description: str = "none"
    rules: tuple[Rule, ...] = ()
    unused: tuple[tuple[str, str], ...] = ()
    uncompressed: bool = False
    blocks: Mapping[str, BlockFormat] = field(default_factory=dict, hash=False)
    decoded: tuple[str, ...] = ()

    @property
    def weights(self) -> str:
        """One line about the matrices that are declared quantized; '' when none are."""
        named: dict[str, None] = {}  # these name their numbers; in the order of the rules
        kinds: dict[str, None] = {}
        has_mxfp4 = False
        for linear in self._linears:
            if linear.four is not None or linear.mxfp8:
                named[str(linear)] = None
            else:
                kinds[str(linear)] = None
                has_mxfp4 = has_mxfp4 or linear.bits == 4
        parts = []
        if named:
            parts.append(f"weights in {' or '.join(named)}")
        if has_mxfp4:
            parts.append(f"experts in MXFP4, {' or '.join(kinds)}")
        elif kinds:
            parts.append(f"weights {self.weight_format}, {' or '.join(kinds)}")
        return "; ".join(parts)

    @property
    def _linears(self) -> list[LinearScheme]:
        """The schemes of the rules whose modules are quantized."""
        return [rule.linear for rule in self.rules if rule.linear is not None]

    @property
    def has_mxfp8(self) -> bool:
        """Whether some matrices are declared in MXFP8."""
        return any(linear.mxfp8 for linear in self._linears)

    @property
    def rounded_inputs(self) -> list[LinearScheme]:
        """Schemes whose producer has inputs rounded otherwise than they are here, one for each way."""
        ways = {}
        for linear in self._linears:
            if linear.input_rounding:
                ways[linear.input_rounding, linear.bits] = linear
        return list(ways.values())

    @property
    def is_final(self) -> bool:
        """Whether the checkpoint is a quantizer's result, so that `freight quantize` refuses it.
        Experts in MXFP4 are no obstacle: so gpt-oss is published. Nor is a GGUF file, which many
        have alone: its decoded weights are quantized.
        """
        return self.method not in (None, "mxfp4", "gguf")

    @property
    def has_four_bits(self) -> bool:
        """Whether some matrices are declared in 4 bits, experts in MXFP4 among them."""
        return any(linear.bits == 4 for linear in self._linears)

    @property
    def four_bits(self) -> frozenset[Packing]:
        """How matrices in 4 bits are stored; empty if none is declared so."""
        return frozenset(linear.four.packing for linear in self._linears if linear.four is not None)

    @property
    def weight_formats(self) -> str:
        """The formats of Linear weights in a few words: 'int4', or 'fp8_e4m3fn and nvfp4'; '' for
        none.
        """
        four = {packing.codes.lower() for packing in self.four_bits}
        formats = sorted(four)
        if self.has_mxfp8:
            formats.insert(0, "mxfp8")
        if any(linear.four is None and not linear.mxfp8 for linear in self._linears):
            formats.insert(0, str(self.weight_format))
        return " and ".join(formats)

    def linear(self, module: str) -> LinearScheme | None:
        """Return the scheme of the weight of `module` ('model.layers.0.mlp.down_proj'); None if it
        was not quantized.
        """
        if module in self.blocks:
            return LinearScheme.in_blocks(self.blocks[module])
        for rule in self.rules:
            if rule.pattern.match(module):
                return rule.linear
        return None

    @property
    def block_formats(self) -> str:
        """The formats of a GGUF file's matrices in a few words: 'q4_k and q6_k'."""
        return " and ".join(sorted(set(self.blocks.values())))

    @property
    def counted_blocks(self) -> str:
        """The formats of a GGUF file's matrices with their numbers: 'q4_k in 169, q6_k in 29, iq2_xs'."""
        counts = Counter(self.blocks.values())
        parts = [f"{format} in {count}" for format, count in counts.most_common()]
        return ", ".join((*parts, *self.decoded))
