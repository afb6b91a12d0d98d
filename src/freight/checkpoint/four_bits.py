"""Matrices in 4 bits: their tensors in every producer's layout, and the Weight of each.

The tensors of a module with R outputs and C inputs in G groups, by `Packing`; codes and zero points
are 8 to an int32, the first in its lowest bits, or 2 to a byte, unless said otherwise:

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.checkpoint.mxfp4 import as_weight
from freight.checkpoint.reader import Checkpoint
from freight.fp8 import mxfp4
from freight.fp8.formats import Format
from freight.fp8.four_bits import scales_out_of_range
from freight.fp8.scheme import FourBits, Packing, Scheme, held_group
from freight.operands.weight import Codes, Groups, Weight

logger = logging.getLogger("freight")
_PER_INT = 8  # codes of an int32
# What GPTQModel subtracts from 8 zero points at once: one of 0 borrows from the next. AutoGPTQ
# subtracts 1 from each, which gives the same bits of all zero points but 0.
_ONES = 0x11111111
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where an int32 of AWQ has each of 8 outputs
_INTS = ("I32",)
_BYTES = ("U8",)
_E4M3 = ("F8_E4M3",)
_FLOATS = ("F16", "BF16", "F32")
_SHAPES = ("I64", "I32")  # dtypes of weight_shape, which says what other tensors' shapes say

_OPTIONAL = ("weight_shape", "weight_g_idx", "g_idx")
# Dtypes that a tensor may have, and its shape, by its suffix
_Layout = dict[str, tuple[Sequence[str], Shape]]


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
        parts = _FORMS[self.four.packing].read(checkpoint, self)
        groups = parts.groups
        data = parts.data
        scale = parts.scale
        order = parts.order
        if order is not None:
            data = _in_pairs(_nibbles(data)[:, order])
            order = order.to(device)
        if self.rows:
            rows = torch.cat([_numbers(rows.start, rows.stop) for rows in self.rows])
            groups = groups.of_rows(rows)
            data = data[rows]
            if scale is not None:
                scale = scale[rows]
        if scale is not None:
            scale = scale.to(device)
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


@dataclass(frozen=True)
class _Parts:
    """A matrix with all its rows, as `Weight` has it; `data` in the order of the inputs."""

    data: Tensor
    groups: Groups
    scale: Tensor | None = None
    order: Tensor | None = None


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
        codes = _stored_codes(checkpoint, scheme, module)
        four = _declared(checkpoint, scheme, module, codes, name)
        if four is None:
            continue
        if four.packing is Packing.MXFP4:
            matrices[name] = _stored_powers(checkpoint, module, shape)
        else:
            matrices[name] = _stored_groups(checkpoint, module, shape, four)
            _require_no_bias(checkpoint, module, four, shapes)
    _warn_of_borrowed_zeros(checkpoint, matrices.values())
    return _alike(matrices)


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
        if checkpoint.entry(name).dtype == "U8" and Packing.MODELOPT_NVFP4 in scheme.four_bits:
            return name
    return None


def _declared(
    checkpoint: Checkpoint, scheme: Scheme, module: str, codes: str | None, name: str
) -> FourBits | None:
    """Return how a module is stored in 4 bits; None if it is not. Raises CheckpointError if
    declaration and tensors contradict each other.
    """
    stored = codes or name
    is_stored = stored in checkpoint.names
    declared = scheme.linear(checkpoint.declared_module(stored) if is_stored else module)
    four = declared.four if declared is not None else None
    if codes is None:
        if four is not None and not is_stored:
            raise checkpoint.fault(
                f"{module}.{_codes(four)} is missing: {scheme.method} declares {four}"
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
    expected = f"{module}.{_codes(four)}"
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
    form = _FORMS[four.packing]
    groups = _num_groups(checkpoint, module, shape, four)
    tensors = {}
    for suffix, (dtypes, expected) in form.layout(rows, columns, groups).items():
        name = f"{module}.{suffix}"
        if suffix == "weight_zero_point" and not four.zeros:
            continue
        if suffix == "weight_g_idx" and not four.ordered:
            continue
        if suffix in _OPTIONAL and name not in checkpoint.names:
            continue
        _require(checkpoint, name, dtypes, expected, four)
        tensors[name] = checkpoint.shape_of(name)
    stored = StoredGroups(module, shape, four, tensors)
    form.check(checkpoint, stored)
    return stored


def _num_groups(checkpoint: Checkpoint, module: str, shape: Shape, four: FourBits) -> int:
    """Return the groups of a row. Raises CheckpointError for sizes that do not fit."""
    rows, columns = shape
    size = four.group or columns
    if columns % size or held_group(four, columns) is None:
        raise checkpoint.fault(
            f"{module} has {columns} inputs in groups of {size}, which is not implemented; multiples of 32 that divide "
            "the inputs are, and 16 in NVFP4"
        )
    outputs = four.packing in (Packing.GPTQ, Packing.GPTQ_V2, Packing.AWQ)
    if columns % _PER_INT or (outputs and rows % _PER_INT):
        raise checkpoint.fault(
            f"{module} is [{rows}, {columns}], which int32 of {_PER_INT} codes do not divide"
        )
    return columns // size


def _require(
    checkpoint: Checkpoint, name: str, dtypes: Sequence[str], shape: Shape, four: FourBits
) -> None:
    if name not in checkpoint.names:
        raise checkpoint.fault(f"{name} is missing: config.json declares {four}")
    entry = checkpoint.entry(name)
    single = shape in ((), (1,)) and entry.shape in ((), (1,))
    if entry.dtype not in dtypes or (entry.shape != shape and not single):
        raise checkpoint.fault(
            f"{name} is {entry.dtype} of shape {list(entry.shape)}; {' or '.join(dtypes)} of {list(shape)} is "
            f"expected for {four}: config.json is of another model, or the file is damaged"
        )


def _require_no_bias(
    checkpoint: Checkpoint, module: str, four: FourBits, shapes: Mapping[str, Shape]
) -> None:
    """Take a bias that the model does not have: GPTQ's tools write zeros. Raises CheckpointError for
    anything else.
    """
    name = f"{module}.bias"
    gptq = four.packing in (Packing.GPTQ, Packing.GPTQ_V2)
    if gptq and name in checkpoint.names and name not in shapes and checkpoint.copy(name).any():
        raise checkpoint.fault(f"{name} is not zero, and config.json describes a model without it")


def _layout_int4(rows: int, columns: int, groups: int) -> _Layout:
    return {
        "weight_packed": (_INTS, (rows, columns // _PER_INT)),
        "weight_scale": (_FLOATS, (rows, groups)),
        "weight_zero_point": (_INTS, (-(-rows // _PER_INT), groups)),
        "weight_g_idx": (_INTS, (columns,)),
        "weight_shape": (_SHAPES, (2,)),
    }


def _layout_nvfp4(rows: int, columns: int, groups: int) -> _Layout:
    return {
        "weight_packed": (_BYTES, (rows, columns // 2)),
        "weight_scale": (_E4M3, (rows, groups)),
        "weight_global_scale": (("F32",), (1,)),
    }


def _layout_modelopt(rows: int, columns: int, groups: int) -> _Layout:
    return {
        "weight": (_BYTES, (rows, columns // 2)),
        "weight_scale": (_E4M3, (rows, groups)),
        "weight_scale_2": (("F32",), ()),
    }


def _layout_gptq(rows: int, columns: int, groups: int) -> _Layout:
    return {
        "qweight": (_INTS, (columns // _PER_INT, rows)),
        "qzeros": (_INTS, (groups, rows // _PER_INT)),
        "scales": (_FLOATS, (groups, rows)),
        "g_idx": (_INTS, (columns,)),
    }


def _layout_awq(rows: int, columns: int, groups: int) -> _Layout:
    return {
        "qweight": (_INTS, (columns, rows // _PER_INT)),
        "qzeros": (_INTS, (groups, rows // _PER_INT)),
        "scales": (_FLOATS, (groups, rows)),
    }


def _check_int4(checkpoint: Checkpoint, stored: StoredGroups) -> None:
    _scales(checkpoint, f"{stored.module}.weight_scale")
    _order(checkpoint, stored)


def _check_nvfp4(checkpoint: Checkpoint, stored: StoredGroups) -> None:
    _scales(checkpoint, f"{stored.module}.weight_scale")
    name = f"{stored.module}.{_of_tensor(stored)}"
    scale = checkpoint.take_scale(name)
    if stored.four.packing is Packing.NVFP4 and scale.reciprocal().isinf().any():
        raise checkpoint.fault(
            f"{name} is {scale.item():.3g}, by which no value in float32 can be divided; quantize the model again"
        )


def _check_gptq(checkpoint: Checkpoint, stored: StoredGroups) -> None:
    _scales(checkpoint, f"{stored.module}.scales")
    _gptq_zeros(checkpoint, stored)
    _order(checkpoint, stored)
    if stored.four.ordered and f"{stored.module}.g_idx" not in stored.tensors:
        raise checkpoint.fault(
            f"{stored.module}.g_idx is missing, the group of each input: config.json says desc_act true; quantize the "
            "model again, or set desc_act false if its groups are of consecutive inputs"
        )


def _check_awq(checkpoint: Checkpoint, stored: StoredGroups) -> None:
    _scales(checkpoint, f"{stored.module}.scales")


def _of_tensor(stored: StoredGroups) -> str:
    """Return the suffix of the scale that all groups share."""
    if stored.four.packing is Packing.MODELOPT_NVFP4:
        return "weight_scale_2"
    return "weight_global_scale"


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
    if checkpoint.entry(name).dtype in _E4M3:
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
    if stored.four.packing is Packing.INT4 and (group_of == -1).all():
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
    stored = words.contiguous().view(torch.uint8)
    return torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


def _in_pairs(codes: Tensor) -> Tensor:
    """Pack codes, uint8 [.., count], two to a byte: [.., count / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _groups(stored: StoredGroups, codes: Codes, scales: Tensor, zeros: Tensor | None) -> Groups:
    """Return groups of a size that kernels take, from scales and zero points [rows, groups]."""
    size = stored.four.group or stored.shape[1]
    kernel_size = held_group(stored.four, size)
    assert kernel_size is not None
    times = size // kernel_size
    if times > 1:
        scales = scales.repeat_interleave(times, 1)
        if zeros is not None:
            zeros = zeros.repeat_interleave(times, 1)
    return Groups(codes, kernel_size, scales, zeros)


def _read_int4(checkpoint: Checkpoint, stored: StoredGroups) -> _Parts:
    module = stored.module
    order = _order(checkpoint, stored)
    zeros = None
    if stored.four.zeros:
        packed = checkpoint.copy(f"{module}.weight_zero_point")
        zeros = _turned(_nibbles(packed.t()))[: stored.shape[0]]
    data = checkpoint.copy(f"{module}.weight_packed").view(torch.uint8)
    scales = _scales(checkpoint, f"{module}.weight_scale")
    return _Parts(data, _groups(stored, Codes.INT4, scales, zeros), order=order)


def _read_nvfp4(checkpoint: Checkpoint, stored: StoredGroups) -> _Parts:
    module = stored.module
    data = checkpoint.copy(f"{module}.{_codes(stored.four)}")
    scale = checkpoint.take_scale(f"{module}.{_of_tensor(stored)}").reshape(1)
    if stored.four.packing is Packing.NVFP4:
        scale = scale.reciprocal()
    scales = _scales(checkpoint, f"{module}.weight_scale")
    groups = _groups(stored, Codes.E2M1, scales, None)
    return _Parts(data, groups, scale.repeat(stored.shape[0]))


def _gptq_zeros(checkpoint: Checkpoint, stored: StoredGroups) -> Tensor | None:
    """Return the zero points [groups, rows]; None if all are 8, as they are declared to be. Raises
    CheckpointError if they are declared so and are not.
    """
    name = f"{stored.module}.qzeros"
    words = checkpoint.copy(name)
    if stored.four.packing is Packing.GPTQ:
        words = (words.long() + _ONES).to(torch.int32)
    zeros = _nibbles(words)
    if stored.four.zeros:
        return zeros
    other = zeros[zeros != 8]
    if len(other):
        raise checkpoint.fault(
            f"{name} has the zero point {int(other[0])}, but config.json says sym true, which is 8 everywhere; is "
            "checkpoint_format (gptq, gptq_v2) that of the file?"
        )
    return None


def _read_gptq(checkpoint: Checkpoint, stored: StoredGroups) -> _Parts:
    module = stored.module
    order = _order(checkpoint, stored)
    zeros = _gptq_zeros(checkpoint, stored)
    # an int32 has 8 inputs of an output, so turning them makes rows of inputs
    data = checkpoint.copy(f"{module}.qweight").t().contiguous().view(torch.uint8)
    scales = _turned(_scales(checkpoint, f"{module}.scales"))
    if zeros is not None:
        zeros = _turned(zeros)
    return _Parts(data, _groups(stored, Codes.INT4, scales, zeros), order=order)


def _read_awq(checkpoint: Checkpoint, stored: StoredGroups) -> _Parts:
    module = stored.module

    def by_output(name: str) -> Tensor:
        """uint8 [outputs, words of a column]: codes or zero points, in the order of the outputs."""
        codes = _nibbles(checkpoint.copy(name))
        words = codes.view(len(codes), -1, _PER_INT)
        places = torch.tensor(_AWQ_PLACES, dtype=torch.int64, device="cpu")
        in_order = words.index_select(-1, places)
        return _turned(in_order.flatten(1))

    scales = _turned(_scales(checkpoint, f"{module}.scales"))
    groups = _groups(stored, Codes.INT4, scales, by_output(f"{module}.qzeros"))
    return _Parts(_in_pairs(by_output(f"{module}.qweight")), groups)


def _stored_powers(checkpoint: Checkpoint, module: str, shape: Shape) -> StoredPowers:
    """Check the tensors of one matrix in MXFP4, and read its scales."""
    rows, columns = shape
    four = FourBits(Packing.MXFP4, mxfp4.GROUP)
    if columns % mxfp4.GROUP:
        raise checkpoint.fault(
            f"{module} has {columns} inputs, which is not a multiple of {mxfp4.GROUP}"
        )
    tensors = {
        f"{module}.weight_packed": (rows, columns // 2),
        f"{module}.weight_scale": (rows, columns // mxfp4.GROUP),
    }
    for name, expected in tensors.items():
        dtypes = _BYTES if name.endswith("packed") else ("U8", "F8_E8M0")
        _require(checkpoint, name, dtypes, expected, four)
    stored = StoredPowers(module, shape, tensors, exact=False, normal=False)
    parts = stored._stored(checkpoint)
    if not mxfp4.finite(*parts):
        raise checkpoint.fault(
            f"{module} has values that are not finite: a scale in {module}.weight_scale is NaN (255) or too large; "
            "quantize the model again"
        )
    exact = bool(mxfp4.exact_rows(*parts).all())
    return replace(stored, exact=exact, normal=mxfp4.normal(*parts))


def _alike(
    matrices: Mapping[str, StoredGroups | StoredPowers],
) -> dict[str, StoredGroups | StoredPowers]:
    """Give the matrices in MXFP4 that are computed together one format: those of one module, such
    as `mlp`, and of all experts of a layer.
    """
    exact: dict[str, bool] = {}
    normal: dict[str, bool] = {}
    for stored in matrices.values():
        if isinstance(stored, StoredPowers):
            parent = _parent(stored.module)
            exact[parent] = exact.get(parent, True) and stored.exact
            normal[parent] = normal.get(parent, True) and stored.normal
    result = dict(matrices)
    for name, stored in matrices.items():
        if isinstance(stored, StoredPowers):
            parent = _parent(stored.module)
            result[name] = replace(stored, exact=exact[parent], normal=normal[parent])
    return result


def _parent(module: str) -> str:
    """Return the name of the module around `module`, of all experts for one of an expert."""
    parent = module.rpartition(".")[0]
    head, _, last = parent.rpartition(".")
    return head if last.isdigit() else parent


@dataclass(frozen=True)
class _Form:
    """How a packing stores a matrix.

    codes    suffix of the tensor with the codes
    layout   its tensors, from rows, columns and groups of a row
    check    reads and checks all but the codes
    read     gives the matrix
    """

    codes: str
    layout: Callable[[int, int, int], _Layout]
    check: Callable[[Checkpoint, StoredGroups], None]
    read: Callable[[Checkpoint, StoredGroups], _Parts]


_GPTQ = _Form("qweight", _layout_gptq, _check_gptq, _read_gptq)
_FORMS = {
    Packing.INT4: _Form("weight_packed", _layout_int4, _check_int4, _read_int4),
    Packing.NVFP4: _Form("weight_packed", _layout_nvfp4, _check_nvfp4, _read_nvfp4),
    Packing.MODELOPT_NVFP4: _Form("weight", _layout_modelopt, _check_nvfp4, _read_nvfp4),
    Packing.GPTQ: _GPTQ,
    Packing.GPTQ_V2: _GPTQ,
    Packing.AWQ: _Form("qweight", _layout_awq, _check_awq, _read_awq),
}


def _codes(four: FourBits) -> str:
    """Return the suffix of the tensor with a module's codes."""
    form = _FORMS.get(four.packing)
    return "weight_packed" if form is None else form.codes  # the former of MXFP4
