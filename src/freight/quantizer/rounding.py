"""One matrix, rounded: its scales, chosen from the matrix as it is, and codes for any matrix near it.

`choose_scales` is what plain rounding does; GPTQ keeps its scales and gives other codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from freight.errors import CheckpointError
from freight.fp8 import mxfp4
from freight.fp8.formats import Format
from freight.fp8.four_bits import (
    NVFP4_GROUP,
    ZERO_POINT,
    FloatGroups,
    IntGroups,
    from_pairs,
    int4_scale_dtype,
    nvfp4_divisor,
    round_int_groups,
    round_mxfp4,
    round_nvfp4,
)
from freight.fp8.weights import BLOCK, quantize_blocks, quantize_rows, quantize_tensor
from freight.quantizer.grid import Element, Grid
from freight.quantizer.plan import Layout, QuantizePlan, WeightObserver, WeightScheme

_QUANTIZE = {
    WeightScheme.TENSOR: quantize_tensor,
    WeightScheme.CHANNEL: quantize_rows,
    WeightScheme.BLOCK: quantize_blocks,
    WeightScheme.INT8: quantize_rows,
}


@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix of a Linear as it will be stored.

    codes      [rows, inputs]: uint8 0 to 15 in 4 bits, else E4M3 or INT8
    scales     FP8 and INT8: float32 [], [rows] or [row blocks, blocks]; INT4: 16 bits [rows,
               groups]; NVFP4: E4M3 [rows, groups]; MXFP4: uint8 [rows, groups]
    zeros      uint8 [rows, groups], with INT4 that has zero points
    group_of   int32 [inputs], the group of each input, where these are not in a row (INT4)
    divisor    float32 [1], with NVFP4
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_of: Tensor | None = None
    divisor: Tensor | None = None

    def fields(self, module: str) -> dict[str, Tensor]:
        """Return its parts by name, each with `module` before it, and in memory of its own: matrices
        that are merged share a divisor.
        """
        named = {}
        for name in RoundedMatrix.names():
            tensor = getattr(self, name)
            if tensor is not None:
                named[f"{module}:{name}"] = tensor.contiguous()
        if self.divisor is not None:
            named[f"{module}:divisor"] = self.divisor.clone()
        return named

    @staticmethod
    def names() -> list[str]:
        """Return the names of the parts."""
        return [part.name for part in fields(RoundedMatrix)]

    @property
    def groups(self) -> IntGroups | FloatGroups:
        """The matrix in INT4 or NVFP4, as `quantizer.packing` takes it."""
        if self.divisor is not None:
            return FloatGroups(self.codes, self.scales, self.divisor)
        return IntGroups(self.codes, self.scales, self.zeros, self.group_of)


@dataclass(frozen=True)
class Rounding:
    """How matrices are rounded.

    scale_format   in which scales of FP8 and INT8 are stored
    dtype          of the model's weights, which decides that of INT4's scales
    """

    plan: QuantizePlan
    scale_format: Format
    dtype: torch.dtype

    def nearest(
        self, weight: Tensor, order: Tensor | None = None, divisor: Tensor | None = None
    ) -> RoundedMatrix:
        """Round a matrix [rows, inputs] to nearest.

        order     int64 [inputs]: groups of INT4 are of inputs in this order; None: as they come
        divisor   of NVFP4, where other matrices share it: `shared_divisor`
        """
        scheme = self.plan.weights
        if scheme is WeightScheme.INT4:
            return self._int4(weight, order)
        if scheme is WeightScheme.NVFP4:
            groups = round_nvfp4(weight, divisor, searches=self._searches)
            return RoundedMatrix(groups.codes, groups.scales, divisor=groups.divisor)
        if scheme is WeightScheme.MXFP4:
            packed, scales = round_mxfp4(weight, searches=self._searches)
            return RoundedMatrix(from_pairs(packed), scales)
        codes, scales = _QUANTIZE[scheme](weight, self.plan.weight_format, self.scale_format)
        return RoundedMatrix(codes, scales)

    @property
    def _searches(self) -> bool:
        return self.plan.weight_observer is WeightObserver.MSE

    def _int4(self, weight: Tensor, order: Tensor | None) -> RoundedMatrix:
        plan = self.plan
        grouped = weight if order is None else weight[:, order]
        scale_dtype = stored_scale_dtype(plan.layout, self.dtype)
        groups = round_int_groups(
            grouped,
            plan.group_size,
            scale_dtype,
            asymmetric=plan.asymmetric,
            searches=self._searches,
        )
        if order is None:
            return RoundedMatrix(groups.codes, groups.scales, groups.zeros)
        codes = torch.empty_like(groups.codes)
        codes[:, order] = groups.codes
        group_of = torch.empty_like(order, dtype=torch.int32)
        places = torch.arange(len(order), dtype=torch.int32, device=order.device)
        group_of[order] = places // plan.group_size
        return RoundedMatrix(codes, groups.scales, groups.zeros, group_of)

    def shared_divisor(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return the divisor of NVFP4 for matrices that engines merge; None for other numbers."""
        if self.plan.weights is not WeightScheme.NVFP4:
            return None
        return nvfp4_divisor(
            torch.stack([weight.abs().amax().float() for weight in weights]).amax()
        )

    def grid(self, matrix: RoundedMatrix) -> Grid:
        """Return the numbers that the scales of `matrix` allow."""
        rows, inputs = matrix.codes.shape
        index = torch.arange(inputs, dtype=torch.int64, device=matrix.codes.device)
        scales = matrix.scales
        scheme = self.plan.weights
        if scheme is WeightScheme.MXFP4:
            powers = torch.exp2(scales.double() - mxfp4.BIAS).float()
            return Grid(Element.E2M1, powers, index // mxfp4.GROUP)
        if scheme is WeightScheme.NVFP4:
            assert matrix.divisor is not None
            return Grid(Element.E2M1, scales.float() / matrix.divisor, index // NVFP4_GROUP)
        if scheme is WeightScheme.INT4:
            group = index // self.plan.group_size
            if matrix.group_of is not None:
                group = matrix.group_of.long()
            zeros = torch.full_like(scales, ZERO_POINT, dtype=torch.float32)
            if matrix.zeros is not None:
                zeros = matrix.zeros.float()
            return Grid(Element.INT4, scales.float(), group, zeros)
        element = Element.INT8 if scheme is WeightScheme.INT8 else Element.E4M3
        if scheme is WeightScheme.BLOCK:
            return Grid(element, scales.repeat_interleave(BLOCK, 0)[:rows], index // BLOCK)
        return Grid(element, scales.view(-1, 1), torch.zeros_like(index))

    @property
    def unit(self) -> tuple[int | None, int | None]:
        """The rows and columns that share a scale; None: all of them."""
        units: dict[WeightScheme, tuple[int | None, int | None]] = {
            WeightScheme.TENSOR: (None, None),
            WeightScheme.BLOCK: (BLOCK, BLOCK),
            WeightScheme.INT4: (1, self.plan.group_size),
            WeightScheme.MXFP4: (1, mxfp4.GROUP),
            WeightScheme.NVFP4: (1, NVFP4_GROUP),
        }
        return units.get(self.plan.weights, (1, None))


def require_finite(name: str, weight: Tensor) -> None:
    """Raise CheckpointError if tensor `name` has NaN or infinities."""
    if not bool(weight.isfinite().all()):
        raise CheckpointError(
            f"{name} has values that are NaN or infinite; a damaged checkpoint cannot be quantized"
        )


def stored_scale_dtype(layout: Layout, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the scales of INT4 in `layout`, of a matrix in `dtype`."""
    # AutoGPTQ's and AutoAWQ's kernels take scales in float16
    return torch.float16 if layout.of_integers else int4_scale_dtype(dtype)


def stacked(grids: Sequence[Grid], rows: Sequence[int]) -> Grid:
    """Return the grid of matrices of one input as one, their rows in sequence. All are of one scheme
    and have inputs in the same groups.
    """
    scales = []
    zeros = []
    for grid, count in zip(grids, rows, strict=True):
        scales.append(grid.scales.expand(count, -1))
        if grid.zeros is not None:
            zeros.append(grid.zeros)
    return Grid(
        grids[0].element, torch.cat(scales), grids[0].group, torch.cat(zeros) if zeros else None
    )
