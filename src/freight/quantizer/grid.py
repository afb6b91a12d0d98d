"""The numbers that a matrix can have once it is rounded: its codes times the scales that were chosen
for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from freight.fp8 import mxfp4
from freight.fp8.cast import decode, encode
from freight.fp8.formats import Format
from freight.fp8.four_bits import e2m1_codes, int_codes


class Element(StrEnum):
    """The numbers that scales multiply."""

    INT4 = "int4"  # 0 to 15, less the zero point
    INT8 = "int8"  # -127 to 127
    E4M3 = "e4m3"
    E2M1 = "e2m1"  # of NVFP4 and MXFP4


@dataclass(frozen=True)
class Grid:
    """The numbers that each input of each row can have.

    scales   float32 [rows, groups], or [1, groups] where all rows share them; as they are stored
    group    int64 [inputs]: the group of each input
    zeros    float32 [rows, groups], with INT4: the code of 0
    """

    element: Element
    scales: Tensor
    group: Tensor
    zeros: Tensor | None = None

    def column(self, values: Tensor, index: int) -> Tensor:
        """Return `values`, float32 [rows], rounded to nearest as those of input `index`."""
        group = self.group[index : index + 1]
        scales = self.scales[:, group]
        zeros = self._zeros(group)
        return self._values(self._codes(values[:, None], scales, zeros), scales, zeros)[:, 0]

    def codes(self, matrix: Tensor) -> Tensor:
        """Return the codes of the matrix, float32 [rows, inputs], each rounded to nearest: uint8 0 to
        15 in 4 bits, else in the element's dtype.
        """
        return self._codes(matrix, self.scales[:, self.group], self._zeros(self.group))

    def values(self, codes: Tensor) -> Tensor:
        """Return the numbers, float32 [rows, inputs], that `codes` of that shape stand for."""
        return self._values(codes, self.scales[:, self.group], self._zeros(self.group))

    def _zeros(self, group: Tensor) -> Tensor | None:
        return None if self.zeros is None else self.zeros[:, group]

    def _codes(self, values: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        if self.element is Element.INT4:
            assert zeros is not None
            return int_codes(values, scales, zeros).to(torch.uint8)
        if self.element is Element.E2M1:
            return e2m1_codes(values / scales)
        format = Format.INT8 if self.element is Element.INT8 else Format.E4M3FN
        return encode(values, scales, format)

    def _values(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        if self.element is Element.INT4:
            assert zeros is not None
            return (codes.float() - zeros) * scales
        if self.element is Element.E2M1:
            table = torch.tensor(mxfp4.SIGNED, dtype=torch.float32, device=codes.device)
            return table[codes.int()] * scales
        return decode(codes, scales)
