"""Matrices in 4 bits: their tensors in every producer's layout, and the Weight of each.

The tensors of a module with R outputs and C inputs in G groups, by `Packing`; codes and zero points
are 8 to an int32, the first in its lowest bits, or 2 to a byte, unless said otherwise:

int-quantized          weight int8 [R, C] of codes minus 8, weight_scale [R, G], weight_zero_point
                       int8 [R, G], minus 8 too, weight_g_idx int32 [C]
pack-quantized         weight_packed int32 [R, C / 8], weight_scale [R, G], weight_zero_point int32
                       [R / 8, G], weight_g_idx int32 [C] (the group of each input), weight_shape [2]
nvfp4-pack-quantized   weight_packed uint8 [R, C / 2], weight_scale E4M3 [R, G], weight_global_scale
                       float32 [1], by which a value is divided
mxfp4-pack-quantized   weight_packed uint8 [R, C / 2], weight_scale uint8 [R, G]: 2 ** (byte - 127)
modelopt               weight uint8 [R, C / 2], weight_scale E4M3 [R, G], weight_scale_2 float32 [],
                       by which a value is multiplied
gptq, gptq_v2          qweight int32 [C / 8, R], scales [G, R], qzeros int32 [G, R / 8], g_idx int32
                       [C]; in gptq an int32 of qzeros is stored minus 0x11111111, modulo 2 ** 32
awq                    qweight int32 [C, R / 8], scales [G, R], qzeros int32 [G, R / 8]; of 8 outputs,
                       an int32 has 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits

Every scale is read and checked before a code is. A value is the producer's to the bit before it is
multiplied by a scale of float32, which multiplies the finished sum instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.checkpoint.mxfp4 import as_weight
from freight.checkpoint.reader import Checkpoint
from freight.fp8 import mxfp4
from freight.fp8.formats import Format
from freight.fp8.four_bits import from_pairs, in_pairs, scales_out_of_range
from freight.fp8.scheme import FourBits, Packing, Scheme, held_group
from freight.operands.weight import Codes, Groups, Weight

logger = logging.getLogger("freight")
_PER_INT = 8  # codes of an int32
# What GPTQModel subtracts from 8 zero points at once: one of 0 borrows from the next. AutoGPTQ
# subtracts 1 from each, which gives the same bits of all zero points but 0.
_ONES = 0x11111111
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where an int32 of AWQ has each of 8 outputs
_OPTIONAL = ("weight_shape", "weight_g_idx", "g_idx")
# Packings with codes in a tensor called `weight`, by its dtype
_OF_WEIGHT = {"U8": Packing.MODELOPT_NVFP4, "I8": Packing.INT4_BYTES}
# Dtypes that a tensor may have, and its shape, by its suffix; of R outputs, C inputs and G groups
_Layout = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class _Form:
    """How a packing stores a matrix: the suffixes of its tensors.

    codes      of the numbers
    scales     of the scales of groups, and `of_tensor` of the one that all groups share
    by_input   whether rows are of inputs or groups, and not of outputs
    """

    codes: str
    scales: str
    layout: _Layout
    of_tensor: str = ""
    by_input: bool = False


_FLOATS = "F16 BF16 F32"
_INT4 = _Form(
    "weight_packed",
    "weight_scale",
    {
        "weight_packed": ("I32", "R C/8"),
        "weight_scale": (_FLOATS, "R G"),
        "weight_zero_point": ("I32", "R/8 G"),
        "weight_g_idx": ("I32", "C"),
        "weight_shape": ("I64 I32", "2"),  # says what other tensors' shapes say
    },
)
_INT4_BYTES = _Form(
    "weight",
    "weight_scale",
    {
        "weight": ("I8", "R C"),
        "weight_scale": (_FLOATS, "R G"),
        "weight_zero_point": ("I8", "R G"),
        "weight_g_idx": ("I32", "C"),
    },
)
_NVFP4 = _Form(
    "weight_packed",
    "weight_scale",
    {
        "weight_packed": ("U8", "R C/2"),
        "weight_scale": ("F8_E4M3", "R G"),
        "weight_global_scale": ("F32", "1"),
    },
    of_tensor="weight_global_scale",
)
_MXFP4 = _Form(
    "weight_packed",
    "weight_scale",
    {"weight_packed": ("U8", "R C/2"), "weight_scale": ("U8 F8_E8M0", "R G")},
)
_MODELOPT = _Form(
    "weight",
    "weight_scale",
    {
        "weight": ("U8", "R C/2"),
        "weight_scale": ("F8_E4M3", "R G"),
        "weight_scale_2": ("F32", ""),
    },
    of_tensor="weight_scale_2",
)
_GPTQ = _Form(
    "qweight",
    "scales",
    {
        "qweight": ("I32", "C/8 R"),
        "qzeros": ("I32", "G R/8"),
        "scales": (_FLOATS, "G R"),
        "g_idx": ("I32", "C"),
    },
    by_input=True,
)
_AWQ = _Form(
    "qweight",
    "scales",
    {"qweight": ("I32", "C R/8"), "qzeros": ("I32", "G R/8"), "scales": (_FLOATS, "G R")},
    by_input=True,
)
_FORMS = {
    Packing.INT4: _INT4,
    Packing.INT4_BYTES: _INT4_BYTES,
    Packing.NVFP4: _NVFP4,
    Packing.MXFP4: _MXFP4,
    Packing.MODELOPT_NVFP4: _MODELOPT,
    Packing.GPTQ: _GPTQ,
    Packing.GPTQ_V2: _GPTQ,
    Packing.AWQ: _AWQ,
}


@dataclass(frozen=True)
class StoredGroups:
    """One matrix in 4 bits with scales of groups. Its tensors are checked, and its codes are not
    read yet. `shape` is that of the file; `rows`: the output rows that are read; empty: all.
    """

    module: str
    shape: Shape
    four: FourBits
    tensors: Mapping[str, Shape]
    rows: tuple[slice, ...] = ()

    def read(self, checkpoint: Checkpoint, device: str) -> Weight:
        """Read the matrix."""
        order = _order(checkpoint, self)
        data = _codes(checkpoint, self)
        groups = _groups(checkpoint, self)
        scale = _tensor_scale(checkpoint, self)
        if order is not None:
            data = in_pairs(_nibbles(data)[:, order])
            order = order.to(device)
        if self.rows:
            rows = torch.cat([_numbers(rows.start, rows.stop) for rows in self.rows])
            groups = groups.of_rows(rows)
            data = data[rows]
        if scale is not None:
            scale = scale.repeat(len(data)).to(device)
        groups = replace(groups, scales=groups.scales.to(device).contiguous())
        if groups.zeros is not None:
            groups = replace(groups, zeros=groups.zeros.to(device))
        return Weight(data.to(device).contiguous(), scale, groups=groups, order=order)

    def of_rows(self, rows: Sequence[slice]) -> StoredGroups:
        """Return the matrix of these output rows."""
        return replace(self, rows=tuple(rows))

    @property
    def codes(self) -> str:
        """The name of the numbers."""
        return self.four.packing.codes

    def is_reordered(self, checkpoint: Checkpoint) -> bool:
        """Say whether groups are of inputs that are not consecutive."""
        return _order(checkpoint, self) is not None


@dataclass(frozen=True)
class StoredPowers:
    """One matrix in MXFP4, its scales checked. `exact`: E4M3 has its values; `normal`: kernels may
    take it in MXFP4; both hold for all matrices that are computed together.
    """

    module: str
    shape: Shape
    tensors: Mapping[str, Shape]
    exact: bool
    normal: bool
    rows: tuple[slice, ...] = ()
    codes = "MXFP4"

    def read(
        self, checkpoint: Checkpoint, compute: Format, format: Format, device: str, keeps: bool
    ) -> Weight:
        """Read the matrix: in MXFP4 if the kernels take it (`keeps`), else in `format`, an E4M3
        variant, or `compute`, as `checkpoint.mxfp4` has it for experts.

        Raises CheckpointError for float16 that does not have the values.
        """
        blocks, scales = self._stored(checkpoint)
        if self.rows:
            blocks = torch.cat([blocks[rows] for rows in self.rows])
            scales = torch.cat([scales[rows] for rows in self.rows])
        parts = (blocks.to(device), scales.to(device))
        exact = format if self.exact else None
        return as_weight(checkpoint, self.module, parts, compute, exact, keeps and self.normal)

    def of_rows(self, rows: Sequence[slice]) -> StoredPowers:
        """Return the matrix of these output rows."""
        return replace(self, rows=tuple(rows))

    def _stored(self, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
        blocks, scales = (checkpoint.copy(name).view(torch.uint8) for name in self.tensors)
        return blocks.unflatten(1, (-1, mxfp4.GROUP // 2)), scales


def find_four_bits(
    checkpoint: Checkpoint, scheme: Scheme, shapes: Mapping[str, Shape]
) -> dict[str, StoredGroups | StoredPowers]:
    """Find the matrices that are stored in 4 bits, by the names in `shapes`, which are all tensors
    of the model ('model.layers.0.mlp.down_proj.weight').

    Raises CheckpointError, naming tensors, for a matrix that is stored so and not declared, for
    tensors of another shape than declared or that are missing, and for scales that are not finite,
    or negative in NVFP4.
    """
    matrices: dict[str, StoredGroups | StoredPowers] = {}
    for name, shape in shapes.items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or len(shape) != 2:
            continue
        four = _declared(checkpoint, scheme, module)
        if four is None:
            continue
        if four.packing is Packing.MXFP4:
            matrices[name] = _stored_powers(checkpoint, module, shape)
        else:
            matrices[name] = _stored_groups(checkpoint, module, shape, four)
            bias = f"{module}.bias"  # GPTQ's tools write zeros where the model has none
            needless = _FORMS[four.packing] is _GPTQ and bias not in shapes
            if needless and bias in checkpoint.names and checkpoint.copy(bias).any():
                raise checkpoint.fault(
                    f"{bias} is not zero, and config.json describes a model without it"
                )
    _warn_of_borrowed_zeros(checkpoint, matrices.values())
    _make_alike(matrices)
    return matrices


def _warn_of_borrowed_zeros(
    checkpoint: Checkpoint, matrices: Iterable[StoredGroups | StoredPowers]
) -> None:
    """Log a line where GPTQ's zero points depend on the tool that packed them: a zero point of 0 is
    stored as 15, and GPTQModel, which is followed here, then borrows 1 from the next in the int32.
    """
    for stored in matrices:
        if not isinstance(stored, StoredGroups) or not stored.four.zeros:
            continue
        if stored.four.packing is not Packing.GPTQ:
            continue
        name = f"{stored.module}.qzeros"
        codes = _nibbles(checkpoint.copy(name)).unflatten(-1, (-1, _PER_INT))
        if (codes[..., :-1] == 15).any():
            logger.warning(
                "%s has zero points of 0, which are read as GPTQModel packs them, eight at once; tools that pack each "
                "alone mean others: if answers are poor, have the tool write checkpoint_format gptq_v2",
                name,
            )
            return


def _stored_codes(checkpoint: Checkpoint, scheme: Scheme, module: str) -> str | None:
    """Return the name of a module's codes of 4 bits; None if it has none."""
    for name in checkpoint.stored_of(module, ("weight_packed", "qweight")):
        return name
    for name in checkpoint.stored_of(module, ("weight",)):
        if _OF_WEIGHT.get(checkpoint.entry(name).dtype) in scheme.four_bits:
            return name
    return None


def _declared(checkpoint: Checkpoint, scheme: Scheme, module: str) -> FourBits | None:
    """Return how a module is stored in 4 bits; None if it is not. Raises CheckpointError if
    declaration and tensors contradict each other.
    """
    codes = _stored_codes(checkpoint, scheme, module)
    stored = codes or f"{module}.weight"
    is_stored = stored in checkpoint.names
    declared = scheme.linear(checkpoint.declared_module(stored) if is_stored else module)
    four = declared.four if declared is not None else None
    if codes is None:
        if four is not None and not is_stored:
            raise checkpoint.fault(
                f"{module}.{_FORMS[four.packing].codes} is missing: {scheme.method} declares {four}"
            )
        return None  # `find_linears` refuses one that may not be in 16 bits
    if four is None:
        if scheme.method is None:
            raise checkpoint.fault(
                f"{codes} holds weights in 4 bits, but config.json declares no quantization; the quantizer's "
                "quantization_config is missing, or the file of GPTQ or AWQ that is read in its place "
                "(quantize_config.json, quant_config.json): fetch the model again"
            )
        raise checkpoint.fault(
            f"{codes} holds weights in 4 bits, but config.json declares {module} to be "
            f"{declared or 'not quantized'}; correct its quantization_config"
        )
    expected = f"{module}.{_FORMS[four.packing].codes}"
    if codes != expected:
        raise checkpoint.fault(
            f"{codes} is there where {scheme.method} has {expected}, as config.json declares {four}"
        )
    return four


def _stored_groups(
    checkpoint: Checkpoint, module: str, shape: Shape, four: FourBits
) -> StoredGroups:
    """Check the tensors of one matrix, and read all but its codes."""
    rows, columns = shape
    size = four.group or columns
    if columns % size or held_group(four, columns) is None:
        raise checkpoint.fault(
            f"{module} has {columns} inputs in groups of {size}, which is not implemented; multiples of 32 that divide "
            "the inputs are, and 16 in NVFP4"
        )
    by_input = _FORMS[four.packing].by_input
    if columns % _PER_INT or (by_input and rows % _PER_INT):
        raise checkpoint.fault(
            f"{module} is [{rows}, {columns}], which int32 of {_PER_INT} codes do not divide"
        )
    stored = StoredGroups(module, shape, four, _tensors(checkpoint, module, shape, four))
    _groups(checkpoint, stored)
    _tensor_scale(checkpoint, stored)
    _order(checkpoint, stored)
    needs_order = _FORMS[four.packing] is _GPTQ and four.ordered
    if needs_order and f"{module}.g_idx" not in stored.tensors:
        raise checkpoint.fault(
            f"{module}.g_idx is missing, the group of each input: config.json says desc_act true; quantize the "
            "model again, or set desc_act false if its groups are of consecutive inputs"
        )
    return stored


def _tensors(checkpoint: Checkpoint, module: str, shape: Shape, four: FourBits) -> dict[str, Shape]:
    """Return the stored tensors of one matrix. Raises CheckpointError for one that is missing, or of
    another dtype or shape than its packing has.
    """
    rows, columns = shape
    num_groups = columns // (four.group or columns)
    sizes = {"R": rows, "C": columns, "G": num_groups, "1": 1, "2": 2}
    tensors = {}
    for suffix, (dtypes, dimensions) in _FORMS[four.packing].layout.items():
        name = f"{module}.{suffix}"
        if suffix == "weight_zero_point" and not four.zeros:
            continue
        if suffix == "weight_g_idx" and not four.ordered:
            continue
        if suffix in _OPTIONAL and name not in checkpoint.names:
            continue
        if name not in checkpoint.names:
            raise checkpoint.fault(f"{name} is missing: config.json declares {four}")
        expected = []
        for dimension in dimensions.split():
            size, _, codes = dimension.partition("/")
            expected.append(math.ceil(sizes[size] / int(codes or 1)))
        entry = checkpoint.entry(name)
        fits = list(entry.shape) == expected or (
            expected in ([], [1]) and entry.shape in ((), (1,))
        )
        if entry.dtype not in dtypes.split() or not fits:
            raise checkpoint.fault(
                f"{name} is {entry.dtype} of shape {list(entry.shape)}; {dtypes.replace(' ', ' or ')} of {expected} is "
                f"expected for {four}: config.json is of another model, or the file is damaged"
            )
        tensors[name] = entry.shape
    return tensors


def _tensor_scale(checkpoint: Checkpoint, stored: StoredGroups) -> Tensor | None:
    """Return the factor of all groups, float32 [1]; None where there is none."""
    suffix = _FORMS[stored.four.packing].of_tensor
    if not suffix:
        return None
    name = f"{stored.module}.{suffix}"
    scale = checkpoint.take_scale(name).reshape(1)
    if stored.four.packing is not Packing.NVFP4:
        return scale
    factor = scale.reciprocal()
    if factor.isinf().any():
        raise checkpoint.fault(
            f"{name} is {scale.item():.3g}, by which no value in float32 can be divided; quantize the model again"
        )
    return factor


def _scales(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return the scales of groups, as they are stored; those in float32 become bfloat16 or float16,
    whichever has them. Raises CheckpointError for what is not finite, negative in E4M3, or outside
    what `fp8.four_bits.scales_out_of_range` allows.

    Those of integers may be negative: AutoRound lets -8, the code of the largest magnitude, stand
    for the group's value of the largest magnitude, whatever its sign.
    """
    stored = checkpoint.copy(name)
    values = stored.float()
    valid = values.isfinite()
    rule = "finite"
    if checkpoint.entry(name).dtype == "F8_E4M3":
        valid &= values >= 0
        rule = "finite and not negative"
    bad = values[~valid]
    if len(bad):
        raise checkpoint.fault(
            f"{name} has {bad[0].item()} among its {values.numel()} values; a scale has to be {rule}: quantize the "
            "model again"
        )
    outside = scales_out_of_range(stored)
    if len(outside):
        raise checkpoint.fault(
            f"{name} has {outside[0].item():.3g} among its {values.numel()} values; a scale has to be 0, or 2 ** -126 "
            "to 2 ** 100 in magnitude: convert the model to bfloat16, or quantize it again"
        )
    if stored.dtype != torch.float32:
        return stored
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(stored.to(dtype).float(), stored):
            return stored.to(dtype)
    raise checkpoint.fault(
        f"{name} is in float32 and has values that neither bfloat16 nor float16 has, in which scales of groups are "
        "held; save the quantized model in one of them"
    )


def _order(checkpoint: Checkpoint, stored: StoredGroups) -> Tensor | None:
    """Return the input that each column takes once columns are sorted by group, int64 [inputs];
    None if groups are of consecutive inputs already.

    Raises CheckpointError unless every group has as many inputs.
    """
    name = next((name for name in stored.tensors if name.endswith("g_idx")), None)
    if name is None:
        return None
    group_of = checkpoint.copy(name).long()
    columns = stored.shape[1]
    size = stored.four.group or columns
    # as compressed-tensors says that there is no order
    ct = stored.four.packing in (Packing.INT4, Packing.INT4_BYTES)
    if ct and (group_of == -1).all():
        return None
    count = columns // size
    outside = group_of[(group_of < 0) | (group_of >= count)]
    if len(outside):
        raise checkpoint.fault(
            f"{name} has the group {int(outside[0])} among its {columns} values; {columns} inputs have the groups 0 to "
            f"{count - 1}: quantize the model again"
        )
    if not (group_of.bincount(minlength=count) == size).all():
        raise checkpoint.fault(
            f"{name} does not put {size} of the {columns} inputs into each of {count} groups, which is not implemented"
        )
    order = torch.sort(group_of, stable=True).indices
    if torch.equal(order, _numbers(0, columns)):
        return None
    if not stored.four.ordered:
        raise checkpoint.fault(
            f"{name} gives inputs to groups in an order of their own, but config.json says desc_act false"
        )
    return order


def _numbers(first: int, stop: int) -> Tensor:
    return torch.arange(first, stop, dtype=torch.int64, device="cpu")


def _turned(x: Tensor) -> Tensor:
    """Return the transpose of x in rows of its own: `contiguous` keeps the strides of one column."""
    return x.t().clone(memory_format=torch.contiguous_format)


def _nibbles(words: Tensor) -> Tensor:
    """Return the codes of bytes or int32, the lowest bits first: uint8 [.., codes]."""
    return from_pairs(words.contiguous().view(torch.uint8))


def _groups(checkpoint: Checkpoint, stored: StoredGroups) -> Groups:
    """Read scales and zero points, as groups of a size that kernels take."""
    form = _FORMS[stored.four.packing]
    scales = _scales(checkpoint, f"{stored.module}.{form.scales}")
    if form.by_input:
        scales = _turned(scales)
    zeros = _zeros(checkpoint, stored)
    size = stored.four.group or stored.shape[1]
    kernel_size = held_group(stored.four, size)
    assert kernel_size is not None
    times = size // kernel_size
    if times > 1:
        scales = scales.repeat_interleave(times, 1)
        if zeros is not None:
            zeros = zeros.repeat_interleave(times, 1)
    codes = Codes.INT4 if stored.codes == "INT4" else Codes.E2M1
    return Groups(codes, kernel_size, scales, zeros)


def _zeros(checkpoint: Checkpoint, stored: StoredGroups) -> Tensor | None:
    """Return the zero points, uint8 [rows, groups]; None if all are 8, or there are none."""
    packing = stored.four.packing
    if _FORMS[packing] is _GPTQ:
        return _gptq_zeros(checkpoint, stored)
    if packing is Packing.AWQ:
        return _by_output(checkpoint.copy(f"{stored.module}.qzeros"))
    if not stored.four.zeros:
        return None
    packed = checkpoint.copy(f"{stored.module}.weight_zero_point")
    if packing is Packing.INT4_BYTES:
        return _from_bytes(checkpoint, f"{stored.module}.weight_zero_point", packed)
    return _turned(_nibbles(packed.t()))[: stored.shape[0]]


def _codes(checkpoint: Checkpoint, stored: StoredGroups) -> Tensor:
    """Return the codes of all rows, uint8 [rows, columns / 2], in the order of the inputs."""
    form = _FORMS[stored.four.packing]
    words = checkpoint.copy(f"{stored.module}.{form.codes}")
    if form is _AWQ:
        return in_pairs(_by_output(words))
    if form is _INT4_BYTES:
        return in_pairs(_from_bytes(checkpoint, f"{stored.module}.{form.codes}", words))
    if form is _GPTQ:  # an int32 has 8 inputs of an output, so turning them makes rows of inputs
        words = words.t().contiguous()
    return words.view(torch.uint8)


def _from_bytes(checkpoint: Checkpoint, name: str, stored: Tensor) -> Tensor:
    """Return codes or zero points 0 to 15, uint8, of those that are stored minus 8, int8. Raises
    CheckpointError for others.
    """
    outside = stored[(stored < -8) | (stored > 7)]
    if len(outside):
        raise checkpoint.fault(
            f"{name} has {int(outside[0])} among its values, and 4 bits have -8 to 7: config.json declares num_bits 4, "
            "and the file is of another model, or damaged"
        )
    return (stored + 8).view(torch.uint8)


def _by_output(words: Tensor) -> Tensor:
    """Return AWQ's codes or zero points, uint8 [outputs, words of a column], in the order of the
    outputs.
    """
    codes = _nibbles(words)
    places = torch.tensor(_AWQ_PLACES, dtype=torch.int64, device="cpu")
    in_order = codes.view(len(codes), -1, _PER_INT).index_select(-1, places)
    return _turned(in_order.flatten(1))


def _gptq_zeros(checkpoint: Checkpoint, stored: StoredGroups) -> Tensor | None:
    """Return the zero points [rows, groups]; None if all are 8, as they are declared to be. Raises
    CheckpointError if they are declared so and are not.
    """
    name = f"{stored.module}.qzeros"
    words = checkpoint.copy(name)
    if stored.four.packing is Packing.GPTQ:
        words = (words.long() + _ONES).to(torch.int32)
    zeros = _nibbles(words)
    if stored.four.zeros:
        return _turned(zeros)
    other = zeros[zeros != 8]
    if len(other):
        raise checkpoint.fault(
            f"{name} has the zero point {int(other[0])}, but config.json says sym true, which is 8 everywhere; is "
            "checkpoint_format (gptq, gptq_v2) that of the file?"
        )
    return None


def _stored_powers(checkpoint: Checkpoint, module: str, shape: Shape) -> StoredPowers:
    """Check the tensors of one matrix in MXFP4, and read its scales."""
    four = FourBits(Packing.MXFP4, mxfp4.GROUP)
    columns = shape[1]
    if columns % mxfp4.GROUP:
        raise checkpoint.fault(
            f"{module} has {columns} inputs, which is not a multiple of {mxfp4.GROUP}"
        )
    tensors = _tensors(checkpoint, module, shape, four)
    stored = StoredPowers(module, shape, tensors, exact=False, normal=False)
    parts = stored._stored(checkpoint)
    if not mxfp4.finite(*parts):
        raise checkpoint.fault(
            f"{module} has values that are not finite: a scale in {module}.weight_scale is NaN (255) or too large; "
            "quantize the model again"
        )
    exact = bool(mxfp4.exact_rows(*parts).all())
    return replace(stored, exact=exact, normal=mxfp4.normal(*parts))


def _make_alike(matrices: dict[str, StoredGroups | StoredPowers]) -> None:
    """Give the matrices in MXFP4 that are computed together one format: those of one module, such
    as `mlp`, and of all experts of a layer.
    """
    by_parent: dict[str, list[StoredPowers]] = {}
    for stored in matrices.values():
        if isinstance(stored, StoredPowers):
            by_parent.setdefault(_parent(stored.module), []).append(stored)
    for together in by_parent.values():
        exact = all(stored.exact for stored in together)
        normal = all(stored.normal for stored in together)
        for stored in together:
            matrices[f"{stored.module}.weight"] = replace(stored, exact=exact, normal=normal)


def _parent(module: str) -> str:
    """Return the name of the module around `module`, of all experts for one of an expert."""
    parent = module.rpartition(".")[0]
    head, _, last = parent.rpartition(".")
    return head if last.isdigit() else parent
