"""Experts in MXFP4: their tensors, the formats that hold them exactly, and the Weight of each.

A tensor of all experts, `X` [experts, inputs, outputs] in 16 bits, is stored as `X_blocks`
[experts, outputs, inputs / 32, 16], two codes a byte, and `X_scales` [experts, outputs, inputs /
32], both uint8 (OCP MX 1.0). The experts stay in MXFP4 where the kernels compute with it
(`KernelSet.packs_mxfp4`, `mxfp4.normal`). Elsewhere they become E4M3 with a power of two per row if
that is exact for every row, else 16 bits: they are computed together, so they have one format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import Checkpoint
from freight.fp8 import mxfp4
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme
from freight.operands.weight import Weight

_BLOCKS = "_blocks"
_SCALES = "_scales"


@dataclass(frozen=True)
class StoredExperts:
    """The tensor `name` of all experts, its scales checked. `exact_rows` of its `rows` are exactly
    E4M3. `normal`: kernels may take it in MXFP4.
    """

    name: str
    shape: tuple[int, int, int]  # experts, inputs, outputs
    exact_rows: int
    normal: bool

    @property
    def rows(self) -> int:
        """Rows of all experts together."""
        return self.shape[0] * self.shape[2]

    @property
    def tensors(self) -> dict[str, Shape]:
        """Names and shapes of the stored tensors."""
        experts, inputs, outputs = self.shape
        groups = inputs // mxfp4.GROUP
        return {
            self.name + _BLOCKS: (experts, outputs, groups, 16),
            self.name + _SCALES: (experts, outputs, groups),
        }

    def of_outputs(self, checkpoint: Checkpoint, outputs: slice) -> StoredExperts:
        """Have `checkpoint` present these outputs alone; return the experts as they then are, of
        the same formats.
        """
        for name in self.tensors:
            checkpoint.narrow(name, ((slice(None), outputs),))
        shape = (*self.shape[:2], outputs.stop - outputs.start)
        rows = shape[0] * shape[2]
        exact = rows if self.exact_rows == self.rows else 0  # all experts have one format
        return replace(self, shape=shape, exact_rows=exact)

    def stored(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Map blocks and scales from their file, by their names."""
        return {name: checkpoint.take_bytes(name, shape) for name, shape in self.tensors.items()}

    def take(self, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
        """Map blocks and scales from their file."""
        blocks, scales = self.stored(checkpoint).values()
        return blocks, scales

    def read(
        self,
        checkpoint: Checkpoint,
        compute: Format,
        format: Format,
        device: str,
        order: Tensor,
        keeps: bool,
    ) -> Iterator[Weight]:
        """Yield the matrix [outputs, inputs] of each expert: in MXFP4 if the kernels take it
        (`keeps`) and it is `normal`; else in `format`, an E4M3 variant, if that is exact for all
        rows; else in `compute`.

        order: int64 [outputs], the stored output for each of the matrix.

        Raises CheckpointError for float16 that does not have the values.
        """
        exact = self.exact_rows == self.rows
        for blocks, scales in zip(*self.take(checkpoint), strict=True):
            parts = (blocks[order].to(device), scales[order].to(device))
            yield as_weight(
                checkpoint,
                self.name,
                parts,
                compute,
                format if exact else None,
                keeps and self.normal,
            )


def as_weight(
    checkpoint: Checkpoint,
    name: str,
    parts: tuple[Tensor, Tensor],
    compute: Format,
    exact: Format | None,
    keeps: bool,
) -> Weight:
    """Return a matrix from its blocks [rows, groups, 16] and scales [rows, groups]: in MXFP4 if
    `keeps`, else in `exact`, the E4M3 variant that has its values, else in `compute`.

    Raises CheckpointError, naming the tensor `name`, for float16 that does not have the values.
    """
    if keeps:
        blocks, scales = parts
        codes = blocks.flatten(1).contiguous()
        return Weight(codes.view(mxfp4.CODES), scales.contiguous().view(mxfp4.SCALES))
    if exact is not None:
        return Weight(*mxfp4.to_e4m3(*parts, exact))
    values = mxfp4.to_bfloat16(*parts)
    matrix = values.to(torch_dtype(compute))
    if not torch.equal(matrix.float(), values.float()):
        raise checkpoint.fault(
            f"{name} has values in MXFP4 that {compute} does not have; use --dtype bfloat16"
        )
    return Weight(matrix)


def find_experts(
    checkpoint: Checkpoint, scheme: Scheme, shapes: Mapping[str, Shape]
) -> dict[str, StoredExperts]:
    """Find the tensors of experts that are stored in MXFP4, by the names in `shapes`, which are all
    tensors of the model.

    Raises CheckpointError for experts that are stored so and not declared, or declared and stored
    in 16 bits, for other modules than experts, and for scales that are NaN or give values that are
    not finite.
    """
    experts = {}
    for name, shape in shapes.items():
        if len(shape) == 3 and not name.endswith(".weight"):
            experts[name] = shape
    for name in sorted(checkpoint.names) if scheme.method == "mxfp4" else ():
        if name.endswith((_BLOCKS, _SCALES)) and name.rpartition("_")[0] not in experts:
            raise checkpoint.fault(f"{name} belongs to no expert; MXFP4 is read for experts only")
    packed = {}
    for name, (count, inputs, outputs) in experts.items():
        declared = scheme.linear(name)
        stored = name + _BLOCKS in checkpoint.names
        is_declared = declared is not None and declared.bits == 4
        if stored and not is_declared:
            raise checkpoint.fault(
                f"{name}{_BLOCKS} is there, but config.json does not declare that module to be in "
                "MXFP4; correct its quantization_config (quant_method, modules_to_not_convert)"
            )
        if is_declared and not stored:
            raise checkpoint.fault(
                f"config.json declares {name} to be in MXFP4, and {name}{_BLOCKS} is missing; if it "
                "is in 16 bits, list its module in modules_to_not_convert"
            )
        if stored:
            packed[name] = _stored(checkpoint, name, (count, inputs, outputs))
    return packed


def _stored(checkpoint: Checkpoint, name: str, shape: tuple[int, int, int]) -> StoredExperts:
    if shape[1] % mxfp4.GROUP:
        raise checkpoint.fault(
            f"{name} has {shape[1]} inputs, which is not a multiple of {mxfp4.GROUP}"
        )
    experts = StoredExperts(name, shape, exact_rows=0, normal=False)
    checkpoint.check(experts.tensors)
    exact_rows = 0
    normal = True
    for index, (blocks, scales) in enumerate(zip(*experts.take(checkpoint), strict=True)):
        if not mxfp4.finite(blocks, scales):
            raise checkpoint.fault(
                f"expert {index} of {name} has values that are not finite: a scale in "
                f"{name}{_SCALES} is NaN (255) or too large; quantize the model again"
            )
        exact_rows += int(mxfp4.exact_rows(blocks, scales).sum())
        normal = normal and mxfp4.normal(blocks, scales)
    return replace(experts, exact_rows=exact_rows, normal=normal)


def describe(experts: Mapping[str, StoredExperts], compute: Format, keeps: bool) -> str:
    """Return the start-up line: the formats that experts are computed in. keeps: the kernels take
    MXFP4.
    """
    tensors = list(experts.values())
    unpacked = [tensor for tensor in tensors if not (keeps and tensor.normal)]
    num_packed = len(tensors) - len(unpacked)
    if not num_packed:
        return f"experts in MXFP4: {_converted(tensors, compute)}"
    line = f"experts in MXFP4: {num_packed} of {len(tensors)} tensors are computed in MXFP4"
    if unpacked:
        line += f"; scales beyond 3 to 252 in the others: {_converted(unpacked, compute)}"
    return line


def _converted(tensors: Sequence[StoredExperts], compute: Format) -> str:
    rows = 0
    exact = 0
    wide = 0
    for tensor in tensors:
        rows += tensor.rows
        exact += tensor.exact_rows
        wide += tensor.exact_rows < tensor.rows
    line = f"{exact:,} of {rows:,} rows exactly in E4M3"
    if wide:
        line += f"; {wide} of {len(tensors)} tensors have rows that are not, and are in {compute}"
    return line
