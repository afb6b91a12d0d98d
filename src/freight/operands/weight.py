"""Weight: the matrix of a Linear with its scales, and the quantization of that Linear's input.

The format follows from the tensor's dtype and is never passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from freight.errors import CheckpointError
from freight.fp8 import blocks, mxfp4
from freight.fp8.blocks import BlockFormat
from freight.fp8.cast import decode
from freight.fp8.four_bits import from_pairs
from freight.fp8.scheme import Activations as Activations
from freight.fp8.weights import BLOCK, expand_blocks
from freight.operands.packed import PackedWeight


class Codes(StrEnum):
    """What a code stands for, before its group's scale multiplies it."""

    INT4 = "int4"  # the code, 0 to 15, minus the zero point of its group, which is 8 without one
    E2M1 = "e2m1"  # a number of `fp8.mxfp4.SIGNED`
    INT8 = "int8"  # the code, -128 to 127, in 8 bits


@dataclass(frozen=True)
class Groups:
    """Scales of the groups of inputs of a matrix in 4 bits, or in INT8.

    codes     what a code stands for
    size      consecutive inputs of a row that share a scale; divides in_features
    scales    [out_features, in_features / size], float16, bfloat16 or E4M3FN; finite
    zeros     uint8 as `scales`, 0 to 15: the code of zero; only with INT4. None: 8
    """

    codes: Codes
    size: int
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What must agree between matrices that become one."""
        return self.codes, self.size, self.scales.dtype, self.zeros is None

    def decode(self, data: Tensor) -> Tensor:
        """Return [out_features, in_features] float32: every code's value times its group's scale,
        which is exact. data: uint8 [out_features, in_features / 2], int8 [out_features,
        in_features] with INT8.
        """
        if self.codes is Codes.INT8:
            return self._scaled(data.float().unflatten(1, (-1, self.size)))
        codes = from_pairs(data)
        codes = codes.unflatten(1, (-1, self.size))
        if self.codes is Codes.E2M1:
            table = torch.tensor(mxfp4.SIGNED, dtype=torch.float32, device=data.device)
            values = table[codes.long()]
        elif self.zeros is None:
            values = codes.float() - 8
        else:
            values = codes.float() - self.zeros[..., None].float()
        return self._scaled(values)

    def _scaled(self, values: Tensor) -> Tensor:
        """Return [out_features, in_features]: values [.., groups, size] times their scales."""
        scaled: Tensor = values * self.scales.float()[..., None]
        return scaled.flatten(1)

    def of_rows(self, rows: Tensor | slice[int, int, None]) -> Groups:
        """Return the groups of these output rows."""
        scales = _bytes(self.scales)[rows].view(self.scales.dtype)
        if self.zeros is None:
            return replace(self, scales=scales)
        return replace(self, scales=scales, zeros=self.zeros[rows])

    @staticmethod
    def concat(parts: Sequence[Groups]) -> Groups:
        """Merge groups of one `kind` along the output features."""
        first = parts[0]
        scales = _joined([part.scales for part in parts])
        zeros = [part.zeros for part in parts if part.zeros is not None]
        if not zeros:
            return replace(first, scales=scales)
        return replace(first, scales=scales, zeros=torch.cat(zeros))


@dataclass(frozen=True)
class Weight(PackedWeight):
    """The matrix of a Linear. Also its own packed form, in sets of kernels that compute with it
    unchanged.

    data           [out_features, in_features], contiguous, FP8, int8 or 16/32-bit; or MXFP4,
                   float4_e2m1fn_x2 [out_features, in_features / 2], for sets of kernels that take
                   it (`KernelSet.packs_mxfp4`); or uint8 [out_features, in_features / 2] with
                   `groups`, the earlier input in the low half of a byte; or int8 with `groups`
    scale          None for 16/32 bits; float32 [out_features], one per output row (the only one
                   of int8, whose codes are -128 to 127, none of them NaN); float32
                   [ceil(out_features / 128), ceil(in_features / 128)], one per 128 x 128 block; or
                   for MXFP4 float8_e8m0fnu [out_features, in_features / 32], bytes 3 to 252 except
                   in groups of zeros; with `groups`, None or float32 [out_features]
    groups         scales of a matrix in 4 bits: a value is (code - zero) * its group's scale, in
                   float32 rounded once to the dtype of the rows, and `scale` multiplies the sum
    blocks         of a GGUF file: `data` is uint8 [out_features, bytes of a row], which has all of
                   the row's scales (`fp8.blocks`); None: `data` is none of these formats
    order          int64 [in_features], only with `groups`: the input that each column takes, where
                   groups are not of consecutive inputs; None: column i takes input i
    activations    quantization of the input: to E4M3 for FP8, to INT8 for int8, which is never
                   PLAIN; PLAIN or GROUPS for MXFP4, with `groups` and with `blocks`; PLAIN
                   for all else
    input_scale    static activation scale, > 0; only with STATIC
    input_limit    only with DYNAMIC: magnitude to which the Linear layer clips its input; kernels
                   do not see it
    whole          out_features of the matrix in the whole model, where these are one rank's rows of
                   it; None: they are all. Kernels that choose an order of summation by the number of
                   outputs choose it by this one
    """

    data: Tensor
    scale: Tensor | None = None
    activations: Activations = Activations.PLAIN
    input_scale: float | None = None
    input_limit: float | None = None
    groups: Groups | None = None
    order: Tensor | None = None
    blocks: BlockFormat | None = None
    whole: int | None = None

    @property
    def whole_outputs(self) -> int:
        """out_features of the matrix in the whole model."""
        return len(self.data) if self.whole is None else self.whole

    @property
    def is_mxfp4(self) -> bool:
        """True if `data` holds MXFP4 codes."""
        return self.data.dtype is mxfp4.CODES

    @property
    def is_int8(self) -> bool:
        """True if `data` holds int8 with a scale per row, so that products are sums of integers."""
        return self.data.dtype is torch.int8 and self.groups is None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, columns = self.data.shape
        if self.blocks is not None:
            return rows, columns // self.blocks.bytes * self.blocks.inputs
        if self.is_mxfp4 or self.data.dtype is torch.uint8:
            return rows, 2 * columns
        return rows, columns

    def with_int8_inputs(self) -> Weight:
        """Return the matrix, if it has groups or blocks, with inputs that are rounded to INT8 in groups."""
        if not self.is_mxfp4 and self.groups is None and self.blocks is None:
            return self
        return replace(self, activations=Activations.GROUPS)

    @property
    def group_size(self) -> int:
        """Consecutive inputs of a row that share a scale, of MXFP4, or with `groups` or `blocks`."""
        if self.is_mxfp4:
            return mxfp4.GROUP
        if self.blocks is not None:
            return self.blocks.group
        assert self.groups is not None
        return self.groups.size

    @property
    def mxfp4_bytes(self) -> tuple[Tensor, Tensor]:
        """Blocks, uint8 [out_features, in_features / 32, 16], and scales, uint8 [out_features,
        in_features / 32].
        """
        assert self.is_mxfp4
        assert self.scale is not None
        scales = self.scale.view(torch.uint8)
        return self.data.view(torch.uint8).view(*scales.shape, mxfp4.GROUP // 2), scales

    def dequantized(self) -> Tensor:
        """Return [out_features, in_features] float32: every stored value times its scale, rounded
        once; with `blocks` once more, where a minimum is added.
        """
        if self.blocks is not None:
            return blocks.decode(self.data, self.blocks)
        if self.is_mxfp4:
            return mxfp4.to_bfloat16(*self.mxfp4_bytes).float()
        if self.groups is not None:
            return self._of_groups(self.groups)
        if self.scale is None:
            return self.data.float()
        if self.is_int8:
            return self.data.float() * self.scale[:, None]
        if self.scale.ndim == 1:
            return decode(self.data, self.scale[:, None])
        return decode(self.data, expand_blocks(self.scale, self.data.shape))

    def _of_groups(self, groups: Groups) -> Tensor:
        values = groups.decode(self.data)
        if self.scale is not None:
            values *= self.scale[:, None]
        if self.order is None:
            return values
        by_input = torch.empty_like(values)
        by_input[:, self.order] = values
        return by_input

    def reordered(self, rows: Tensor, name: str) -> Weight:
        """Return the matrix of the output rows `rows`, int64, each at most once. Exact: every row
        keeps its bits.

        Raises CheckpointError, naming the matrix `name`, if 128 new rows would mix the rows of
        several blocks of scales.
        """
        rows = rows.to(self.data.device)
        data = _bytes(self.data)
        scale = self.scale
        if self._in_blocks:
            assert scale is not None
            blocks = rows // BLOCK
            order = blocks[::BLOCK]  # the block of the first of each 128 rows
            if not torch.equal(blocks, order.repeat_interleave(BLOCK)[: len(rows)]):
                raise CheckpointError(
                    f"{name}: its rows have to be reordered, which is not possible with heads that span blocks of "
                    "128 x 128 scales; quantize it with a scale per row"
                )
            scale = scale[order]
        elif scale is not None:
            scale = _bytes(scale)[rows].view(scale.dtype)
        groups = self.groups
        if groups is not None:
            groups = groups.of_rows(rows)
        return replace(self, data=data[rows].view(self.data.dtype), scale=scale, groups=groups)

    @staticmethod
    def mergeable(parts: Sequence[Weight]) -> bool:
        """Return whether `concat` is exact: schemes and input scales agree, no block of 128 rows
        spans two parts, and all take their inputs in the same order.
        """
        in_blocks = any(part._in_blocks for part in parts)
        if in_blocks and any(len(part.data) % BLOCK for part in parts[:-1]):
            return False
        orders = [part.order for part in parts if part.order is not None]
        if len(orders) not in (0, len(parts)):
            return False
        for order in orders[1:]:
            if not torch.equal(order, orders[0]):
                return False
        return Weight.alike(parts)

    @staticmethod
    def alike(weights: Sequence[Weight]) -> bool:
        """Return whether format, kind of scales and input quantization are the same in all weights."""
        return len({weight._kind for weight in weights}) == 1

    @property
    def _in_blocks(self) -> bool:
        """True if a scale is of 128 x 128 values."""
        return self.scale is not None and self.scale.ndim == 2 and not self.is_mxfp4

    @property
    def _kind(self) -> tuple[object, ...]:
        dims = None if self.scale is None else self.scale.ndim
        groups = None if self.groups is None else self.groups.kind
        inputs = self.activations, self.input_scale, self.input_limit
        return self.data.dtype, dims, groups, self.blocks, *inputs

    @staticmethod
    def concat(parts: Sequence[Weight]) -> Weight:
        """Merge `mergeable` parts along the output features (q, k, v or gate, up). Exact: rows keep
        their bits.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        assert Weight.mergeable(parts)
        whole = None
        if any(part.whole is not None for part in parts):
            whole = sum(part.whole_outputs for part in parts)
        merged = replace(first, data=_joined([part.data for part in parts]), whole=whole)
        scales = [part.scale for part in parts if part.scale is not None]
        if scales:
            merged = replace(merged, scale=_joined(scales))
        groups = [part.groups for part in parts if part.groups is not None]
        if groups:
            merged = replace(merged, groups=Groups.concat(groups))
        return merged


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors, of one dtype, one behind the other."""
    return torch.cat([_bytes(tensor) for tensor in tensors]).view(tensors[0].dtype)


def _bytes(x: Tensor) -> Tensor:
    """Return x, as bytes where an element has no more: torch cannot index FP8, nor join MXFP4."""
    if x.itemsize == 1:
        return x.view(torch.uint8)
    return x


class Weights(Protocol):
    """The matrices of all experts, by id. Iterated over once; they may be read lazily, so that one
    at a time is in memory.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Weight]: ...
