"""FP8 and INT8 matrices of a checkpoint: their tensors, the layout of their scales, and the Weight of each.

`find_linears` compares the declaration with the stored tensors and reads every scale, so a mismatch
is reported before a weight is read. From every producer, a matrix becomes a Weight with one scale
per output row or per 128 x 128 block. Bytes and scales are not changed, so dequantized values are
the producer's to the bit.

MXFP8 has a power of two for each 32 inputs (OCP MX 1.0), and no kernel takes such groups in 8 bits.
An E4M3 value has 4 significant bits, so its product with a power of two is exact in 16 bits: the
matrix becomes 16 bits at load.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import Checkpoint
from freight.errors import ConfigError
from freight.fp8.cast import convert_e4m3, torch_dtype
from freight.fp8.formats import Format
from freight.fp8.scheme import (
    MXFP8_GROUP,
    Activations,
    LinearScheme,
    Packing,
    Scheme,
    WeightScales,
)
from freight.fp8.weights import BLOCK, regroup
from freight.operands.weight import Weight

logger = logging.getLogger("freight")
# Suffixes of a module's tensors, in all producers' spellings
WEIGHTS = ("weight", "_weight_qdata")  # the second is torchao's
_SCALES = ("weight_scale", "weight_scale_inv", "_weight_scale", "qscale_weight", "scale")
# What compressed-tensors keeps of a weight or an input that it has not compressed
_OF_DENSE = ("scale", "zero_point", "global_scale", "g_idx", "shape")
_NOT_COMPRESSED = "of weights that are not compressed"
_QUANTIZED = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "I8", "U8")
_POWERS = ("U8", "F8_E8M0")  # dtypes of powers of two
# With these powers of two all values of E4M3, 2 ** -9 to 448, are normal in bfloat16
_LEAST_EXPONENT = -117
_LARGEST_EXPONENT = 119
_INPUT_SCALES = ("input_scale", "activation_scale", "act_scale", "qscale_act")


@dataclass(frozen=True)
class StoredLinear:
    """One FP8 or INT8 matrix with its scales read and checked; the tensor named `weight` is not
    read yet.
    """

    weight: str
    shape: Shape
    format: Format
    scale: Tensor
    activations: Activations
    input_scale: float | None
    input_limit: float | None
    mxfp8: bool = False  # `scale` is float32 [rows, inputs / 32]

    def read(self, checkpoint: Checkpoint, compute: Format, format: Format, device: str) -> Weight:
        """Read the matrix in `format`, an E4M3 variant; INT8 stays INT8, and MXFP8 becomes
        `compute`, exactly. Raises CheckpointError for bytes without a counterpart in `format`, and
        for values that `compute` does not have.
        """
        stored = checkpoint.take(self.weight, self.shape, self.format)
        if self.mxfp8:
            return self._decoded(checkpoint, stored.to(device), compute)
        if self.format is Format.INT8:
            scale = self.scale.to(device)
            data = stored.to(device).contiguous()
            return Weight(data, scale, self.activations, self.input_scale)
        if self.format is Format.E4M3FNUZ and format is Format.E4M3FN:
            largest = int((stored.view(torch.uint8) & 0x7F == 0x7F).sum())
            if largest:
                raise checkpoint.fault(
                    f"{self.weight} has {largest} weights of magnitude 240 in {self.format}, which "
                    f"have no counterpart in {format}, this device's format; quantize the model to {format}"
                )
        data, scale = convert_e4m3(stored.to(device), self.scale.to(device), format)
        return Weight(
            data.contiguous(),
            scale,
            self.activations,
            self.input_scale_in(format),
            self.input_limit,
        )

    def _decoded(self, checkpoint: Checkpoint, stored: Tensor, compute: Format) -> Weight:
        """Return a matrix in MXFP8 in 16 or 32 bits."""
        values = _mxfp8_values(stored, self.scale.to(stored.device))
        matrix = values.to(torch_dtype(compute))
        if not torch.equal(matrix.float(), values):
            raise checkpoint.fault(
                f"{self.weight} has values in MXFP8 that {compute} does not have; use --dtype bfloat16"
            )
        return Weight(matrix)

    def of_rows(self, rows: Sequence[slice]) -> StoredLinear:
        """Return the matrix of these output rows, of which a checkpoint presents only those
        (`Checkpoint.narrow`).

        Raises ConfigError where a block of scales would be cut.
        """
        count = 0
        scales = []
        for part in rows:
            start = part.start
            stop = part.stop
            if not self.cuts_blocks:
                scales.append(self.scale[part])
            else:
                first = start // BLOCK
                if count % BLOCK or (start % BLOCK and first != (stop - 1) // BLOCK):
                    raise ConfigError(
                        f"a rank would have rows {start} to {stop} of {self.weight}, which has a scale for each "
                        f"{BLOCK} x {BLOCK} values: choose a --tensor-parallel-size with which ranks begin at "
                        f"multiples of {BLOCK} rows"
                    )
                scales.append(self.scale[first : -(-stop // BLOCK)])
            count += stop - start
        return replace(self, shape=(count, *self.shape[1:]), scale=torch.cat(scales))

    @property
    def cuts_blocks(self) -> bool:
        """Whether a part of the rows may cut a block of scales."""
        return self.scale.ndim == 2 and not self.mxfp8

    def input_scale_in(self, format: Format) -> float | None:
        """Return the input scale for the matrix in `format`: E4M3FNUZ has half the value of E4M3FN
        for the same byte.
        """
        if self.input_scale is None or format is self.format or self.format is Format.INT8:
            return self.input_scale
        return self.input_scale * (2.0 if format is Format.E4M3FNUZ else 0.5)


def find_linears(
    checkpoint: Checkpoint,
    scheme: Scheme,
    shapes: Mapping[str, Shape],
    free: frozenset[str],
) -> dict[str, StoredLinear]:
    """Find the matrices that are stored in FP8 or INT8, by the names in `shapes`
    ('model.layers.0.mlp.down_proj.weight').

    `shapes` are all tensors of the model; those in `free` (head and embedding) may be quantized or
    not, whatever is declared. Raises CheckpointError, naming tensors, for a declared matrix that is
    not stored so or has no scale, for such a matrix that is not declared, and for scales of another
    shape than declared.
    """
    linears = {}
    for name, shape in shapes.items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or len(shape) != 2:
            continue
        weights = checkpoint.stored_of(module, WEIGHTS)
        if not weights or module in scheme.blocks:
            continue  # `Checkpoint.check` reports missing tensors, and `find_blocks` finds these
        weight = weights[0]
        declared = scheme.linear(checkpoint.declared_module(weight))
        if declared is not None and _holds_four_bits(checkpoint.entry(weight).dtype, declared):
            continue  # `find_four_bits` finds it
        if checkpoint.format_of(weight).is_quantized:
            linear = _declared(checkpoint, weight, scheme, module, declared)
            linears[name] = _stored_linear(checkpoint, module, weight, shape, linear)
        elif declared is not None:
            or_plain = declared.or_plain or name in free
            _require_plain(checkpoint, weight, scheme, module, declared, or_plain)
    return linears


def _holds_four_bits(dtype: str, declared: LinearScheme) -> bool:
    """Return whether a tensor called `weight` has codes of 4 bits."""
    if declared.four is None:
        return False
    return dtype == "U8" or (dtype == "I8" and declared.four.packing is Packing.INT4_BYTES)


def _declared(
    checkpoint: Checkpoint,
    weight: str,
    scheme: Scheme,
    module: str,
    declared: LinearScheme | None,
) -> LinearScheme:
    """Return `declared`, which an FP8 or INT8 matrix must have. Raises CheckpointError."""
    stored = checkpoint.format_of(weight)
    if stored not in (Format.E4M3FN, Format.E4M3FNUZ, Format.INT8):
        raise checkpoint.fault(f"{weight} is stored in {stored}; weights in E4M3 are implemented")
    if declared is not None and declared.four is not None:
        raise checkpoint.fault(
            f"{weight} is stored in {stored}, but config.json declares {declared.four}; correct its quantization_config"
        )
    if declared is None and scheme.weight_format is None:
        raise checkpoint.fault(
            f"{weight} is stored in {stored}, but config.json declares no quantization of weights; "
            "the quantizer's quantization_config is missing"
        )
    if declared is None:
        raise checkpoint.fault(
            f"{weight} is stored in {stored}, but config.json lists {module} as not quantized; "
            "remove it from the list, or store it in 16 bits"
        )
    if declared.integers is not (stored is Format.INT8):
        expected = Format.INT8 if declared.integers else "FP8"
        raise checkpoint.fault(
            f"{weight} is stored in {stored}, but config.json declares {expected}"
        )
    return declared


def _require_plain(
    checkpoint: Checkpoint,
    weight: str,
    scheme: Scheme,
    module: str,
    declared: LinearScheme,
    or_plain: bool,
) -> None:
    """Raise CheckpointError for a matrix in 16 or 32 bits that is declared quantized, or that has
    a scale.
    """
    stored = checkpoint.format_of(weight)
    scales = checkpoint.stored_of(module, _SCALES)
    if scales:
        raise checkpoint.fault(
            f"{weight} is stored in {stored}, but config.json declares it quantized ({scheme.method}: {declared}), "
            f"and there is a scale {scales[0]}; {_way_out(checkpoint, scheme, module)}"
        )
    if not or_plain:
        raise checkpoint.fault(
            f"{weight} is stored in {stored}, but config.json declares it quantized "
            f"({scheme.method}: {declared}); if it is not quantized, list {module} as ignored"
        )


def _way_out(checkpoint: Checkpoint, scheme: Scheme, module: str) -> str:
    """Say what to do with a matrix in 16 bits that has a scale."""
    if scheme.method == "compressed-tensors" and not _is_compressed(checkpoint):
        return (
            "save the model with its weights compressed, or run it as it is stored: quantization_status 'frozen' in "
            "its quantization_config says that they are not"
        )
    return (
        "save the model with its weights compressed, or, if the weight needs no scale, remove its scales from the "
        f"checkpoint and list {module} as ignored"
    )


def dense_scheme(checkpoint: Checkpoint, scheme: Scheme) -> Scheme:
    """Return `scheme` without its weights where config.json says that they are not compressed
    (`Scheme.uncompressed`) and none is stored in 8 or 4 bits: they run as they are stored, and
    nothing needs their scales.
    """
    if not scheme.uncompressed or not scheme.rules or _is_compressed(checkpoint):
        return scheme
    logger.info(
        "weights are declared quantized (%s), but not compressed yet: they run as they are stored",
        scheme.weights,
    )
    unused = list(scheme.unused)
    for tensor in ("weight", "input"):
        unused += [(f"*.{tensor}_{suffix}", _NOT_COMPRESSED) for suffix in _OF_DENSE]
    return replace(
        scheme,
        weight_format=None,
        rules=(),
        unused=tuple(unused),
        description=f"{scheme.description}, not compressed yet: weights run as they are stored",
    )


def _is_compressed(checkpoint: Checkpoint) -> bool:
    """Return whether any matrix is stored in 8 or 4 bits."""
    for name in checkpoint.names:
        suffix = name.rpartition(".")[2]
        eight = suffix in WEIGHTS and checkpoint.entry(name).dtype in _QUANTIZED
        if eight or suffix == "weight_packed":
            return True
    return False


def _stored_linear(
    checkpoint: Checkpoint, module: str, weight: str, shape: Shape, declared: LinearScheme
) -> StoredLinear:
    """Read and check the scales of one FP8 or INT8 matrix."""
    if checkpoint.shape_of(weight) != tuple(shape):
        raise checkpoint.fault(
            f"{weight} has shape {list(checkpoint.shape_of(weight))}, config.json asks for "
            f"{list(shape)}"
        )
    name = _scale_name(checkpoint, module, _SCALES)
    if name is None:
        suffixes = {name.rpartition(".")[2] for name in checkpoint.names}  # of other modules
        expected = next((suffix for suffix in _SCALES if suffix in suffixes), _SCALES[0])
        kind = "INT8" if declared.integers else "FP8"
        raise checkpoint.fault(
            f"{weight} is stored in {kind}, and its scale {module}.{expected} is missing"
        )
    scale = _weight_scale(checkpoint, name, shape, declared)
    if declared.mxfp8:
        _require_bfloat16(checkpoint, weight, name, scale)
    input_name = _scale_name(checkpoint, module, _INPUT_SCALES)
    input_scale = None
    if declared.activations is Activations.STATIC:
        if input_name is None:
            raise checkpoint.fault(
                f"activations are declared static, and {module}.{_INPUT_SCALES[0]} is missing"
            )
        values = checkpoint.take_scale(
            input_name, "calibration data in which this input is always zero are known for this"
        )
        if values.numel() != 1:
            raise checkpoint.fault(
                f"{input_name} has shape {list(values.shape)}; one number can be read"
            )
        input_scale = float(values)
    elif input_name is not None:
        raise checkpoint.fault(
            f"there is {input_name}, but config.json declares activations {declared.activations}"
        )
    return StoredLinear(
        weight,
        shape,
        checkpoint.format_of(weight),
        scale,
        declared.activations,
        input_scale,
        declared.input_limit,
        declared.mxfp8,
    )


def _mxfp8_values(stored: Tensor, scale: Tensor) -> Tensor:
    """Return the values of E4M3 [rows, inputs] with powers of two, float32 [rows, groups]: float32
    [rows, inputs].
    """
    wide = scale.repeat_interleave(MXFP8_GROUP, 1)[:, : stored.shape[1]]
    return stored.float() * wide


def _require_bfloat16(checkpoint: Checkpoint, weight: str, name: str, scale: Tensor) -> None:
    """Raise CheckpointError for a matrix in MXFP8 with values that bfloat16 does not have. Reads the
    matrix only where scales allow such values.
    """
    if scale.min() >= 2.0**_LEAST_EXPONENT and scale.max() <= 2.0**_LARGEST_EXPONENT:
        return
    values = _mxfp8_values(checkpoint.copy(weight), scale)
    if not torch.equal(values.bfloat16().float(), values) or values.isinf().any():
        raise checkpoint.fault(
            f"{weight} has values beyond bfloat16: {name} has powers of two from {scale.min():.3g} to "
            f"{scale.max():.3g}; quantize the model again"
        )


def _scale_name(checkpoint: Checkpoint, module: str, suffixes: tuple[str, ...]) -> str | None:
    """Return the one name of a scale that the checkpoint has, None if there is none. Raises
    CheckpointError for two.
    """
    names = checkpoint.stored_of(module, suffixes)
    if len(names) > 1:
        raise checkpoint.fault(f"{names[0]} and {names[1]} are the same scale twice")
    return names[0] if names else None


def _weight_scale(
    checkpoint: Checkpoint, name: str, shape: Shape, declared: LinearScheme
) -> Tensor:
    """Read the scale as float32, laid out as `Weight.scale`. Raises CheckpointError for a shape
    that does not fit the declared granularity.
    """
    rows, columns = shape
    scale = checkpoint.take_scale(name)
    if declared.mxfp8:
        groups = math.ceil(columns / MXFP8_GROUP)
        if scale.shape == (rows, groups) and checkpoint.entry(name).dtype in _POWERS:
            return scale
        raise checkpoint.fault(
            f"{name} is {checkpoint.entry(name).dtype} of shape {list(scale.shape)}; for MXFP8, {' or '.join(_POWERS)} "
            f"of [{rows}, {groups}] is expected: config.json is of another model, or the file is damaged"
        )
    if declared.scales is WeightScales.TENSOR:
        expected = "one number"
        if scale.numel() == 1:
            return scale.reshape(1).repeat(rows)
    elif declared.scales is WeightScales.ROW:
        expected = f"[{rows}] or [{rows}, 1]"
        if scale.shape in ((rows,), (rows, 1)):
            return scale.reshape(rows)
    else:
        assert declared.block is not None
        height, width = declared.block
        grid = (math.ceil(rows / height), math.ceil(columns / width))
        expected = f"{list(grid)}"
        # ModelOpt writes [] for a matrix of one block
        single = math.prod(grid) == scale.numel() == 1
        if single or scale.shape in (grid, (grid[0], 1, grid[1], 1)):
            regrouped = regroup(scale.reshape(grid), declared.block, shape)
            if regrouped is None:
                raise checkpoint.fault(
                    f"{name} scales blocks of {height}x{width}, which is not "
                    "implemented; multiples of 128x128, and blocks as wide as the matrix, are"
                )
            return regrouped
    raise checkpoint.fault(
        f"{name} has shape {list(scale.shape)}; for {declared.scales} scales of a matrix "
        f"[{rows}, {columns}], {expected} is expected"
    )
