"""Weight: the matrix of a Linear with its scales, and the quantization of that Linear's input.

The format follows from the tensor's dtype and is never passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from freight.errors import CheckpointError
from freight.fp8 import mxfp4
from freight.fp8.cast import decode
from freight.fp8.scheme import Activations as Activations
from freight.fp8.weights import BLOCK, expand_blocks
from freight.operands.packed import PackedWeight


@dataclass(frozen=True)
class Weight(PackedWeight):
    """The matrix of a Linear. Also its own packed form, in sets of kernels that compute with it
    unchanged.

    data           [out_features, in_features], contiguous, FP8 or 16/32-bit; or MXFP4,
                   float4_e2m1fn_x2 [out_features, in_features / 2], for sets of kernels that take
                   it (`KernelSet.packs_mxfp4`)
    scale          None for 16/32 bits; float32 [out_features], one per output row; float32
                   [ceil(out_features / 128), ceil(in_features / 128)], one per 128 x 128 block; or
                   for MXFP4 float8_e8m0fnu [out_features, in_features / 32], bytes 3 to 252 except
                   in groups of zeros
    activations    quantization of the input; PLAIN unless data is FP8
    input_scale    static activation scale, > 0; only with STATIC
    input_limit    only with DYNAMIC: magnitude to which the Linear layer clips its input; kernels
                   do not see it
    """

    data: Tensor
    scale: Tensor | None = None
    activations: Activations = Activations.PLAIN
    input_scale: float | None = None
    input_limit: float | None = None

    @property
    def is_mxfp4(self) -> bool:
        """True if `data` holds MXFP4 codes."""
        return self.data.dtype is mxfp4.CODES

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, columns = self.data.shape
        return rows, 2 * columns if self.is_mxfp4 else columns

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
        once.
        """
        if self.is_mxfp4:
            return mxfp4.to_bfloat16(*self.mxfp4_bytes).float()
        if self.scale is None:
            return self.data.float()
        if self.scale.ndim == 1:
            return decode(self.data, self.scale[:, None])
        return decode(self.data, expand_blocks(self.scale, self.data.shape))

    def reordered(self, rows: Tensor, name: str) -> Weight:
        """Return the matrix of the output rows `rows`, int64, each at most once. Exact: every row
        keeps its bits.

        Raises CheckpointError, naming the matrix `name`, if 128 new rows would mix the rows of
        several blocks of scales.
        """
        rows = rows.to(self.data.device)
        # torch cannot index FP8, so its bytes are indexed
        data = self.data.view(torch.uint8) if self.data.itemsize == 1 else self.data
        scale = self.scale
        if scale is not None and scale.ndim == 2:
            blocks = rows // BLOCK
            taken = blocks[::BLOCK]  # the block of the first of each 128 rows
            if not torch.equal(blocks, taken.repeat_interleave(BLOCK)[: len(rows)]):
                raise CheckpointError(
                    f"{name}: its rows have to be reordered, which is not possible with heads that span blocks of "
                    "128 x 128 scales; quantize it with a scale per row"
                )
            scale = scale[taken]
        elif scale is not None:
            scale = scale[rows]
        return replace(self, data=data[rows].view(self.data.dtype), scale=scale)

    @staticmethod
    def mergeable(parts: Sequence[Weight]) -> bool:
        """Return whether `concat` is exact: schemes and input scales agree, and no block of 128
        rows spans two parts.
        """
        blocks = any(part.scale is not None and part.scale.ndim == 2 for part in parts)
        return Weight.alike(parts) and not (
            blocks and any(len(part.data) % BLOCK for part in parts[:-1])
        )

    @staticmethod
    def alike(weights: Sequence[Weight]) -> bool:
        """Return whether format, kind of scales and input quantization are the same in all weights."""
        return len({weight._kind for weight in weights}) == 1

    @property
    def _kind(self) -> tuple[object, ...]:
        dims = None if self.scale is None else self.scale.ndim
        return self.data.dtype, dims, self.activations, self.input_scale, self.input_limit

    @staticmethod
    def concat(parts: Sequence[Weight]) -> Weight:
        """Merge `mergeable` parts along the output features (q, k, v or gate, up). Exact: rows keep
        their bits.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        assert Weight.mergeable(parts)
        scales = [part.scale for part in parts if part.scale is not None]
        return replace(
            first,
            data=torch.cat([p.data for p in parts]),
            scale=torch.cat(scales) if scales else None,
        )


class Weights(Protocol):
    """The matrices of all experts, by id. Iterated over once; they may be read lazily, so that one
    at a time is in memory.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Weight]: ...
