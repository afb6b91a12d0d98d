"""The tensors of a matrix in 4 bits in every layout that is written, from `fp8.four_bits`' types.

Of R outputs and C inputs in G groups; an int32 has 8 codes or zero points, the first in its lowest
bits, and a byte has 2:

compressed-tensors  weight_packed int32 [R, C / 8], weight_scale [R, G], weight_shape int64 [2]; with
                    zero points weight_zero_point int32 [R / 8, G], rounded up; with an order of
                    groups weight_g_idx int32 [C]; NVFP4: weight_packed uint8 [R, C / 2],
                    weight_scale E4M3 [R, G], weight_global_scale float32 [1], which divides
gptq                qweight int32 [C / 8, R], scales float16 [G, R], qzeros int32 [G, R / 8], g_idx
                    int32 [C]; symmetric an int32 of qzeros is stored minus 0x11111111, as AutoGPTQ
                    does; with zero points as it is (gptq_v2), because of a 0 that would borrow from
                    the next
awq                 qweight int32 [C, R / 8], scales float16 [G, R], qzeros int32 [G, R / 8]; of 8
                    outputs an int32 has 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from freight.fp8.four_bits import ZERO_POINT, FloatGroups, IntGroups, in_pairs
from freight.quantizer.plan import Layout

_PER_INT = 8  # codes of an int32
_ONES = 0x11111111  # 1 for each of 8 zero points
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of 8 outputs, in the order of an int32


def pack(matrix: IntGroups | FloatGroups, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a module in `layout`, by suffix: one that has weights in 4 bits."""
    if isinstance(matrix, FloatGroups):
        assert layout is Layout.COMPRESSED_TENSORS
        return pack_nvfp4(matrix)
    return _PACK_INTEGERS[layout](matrix)


def pack_quantized(matrix: IntGroups) -> dict[str, Tensor]:
    """Return the tensors of a module in compressed-tensors' form `pack-quantized`, by suffix."""
    shape = torch.tensor(matrix.codes.shape, dtype=torch.int64, device="cpu")
    tensors = {
        "weight_packed": _words(matrix.codes),
        "weight_scale": matrix.scales,
        "weight_shape": shape,
    }
    if matrix.zeros is not None:
        tensors["weight_zero_point"] = _turned(_words(_turned(matrix.zeros)))
    if matrix.group_of is not None:
        tensors["weight_g_idx"] = matrix.group_of
    return tensors


def pack_nvfp4(matrix: FloatGroups) -> dict[str, Tensor]:
    """Return the tensors of a module in compressed-tensors' form `nvfp4-pack-quantized`, by suffix."""
    return {
        "weight_packed": in_pairs(matrix.codes),
        "weight_scale": matrix.scales,
        # merged matrices share it, and a file has each tensor once
        "weight_global_scale": matrix.divisor.clone(),
    }


def pack_gptq(matrix: IntGroups) -> dict[str, Tensor]:
    """Return the tensors of a module in AutoGPTQ's form, by suffix. R is a multiple of 8."""
    num_inputs = matrix.codes.shape[1]
    zeros = _words(_turned(_zeros(matrix)))
    if matrix.zeros is None:
        zeros = zeros - _ONES
    group_of = matrix.group_of
    if group_of is None:
        group_of = torch.arange(num_inputs, dtype=torch.int32, device="cpu") // matrix.size
    return {
        "qweight": _turned(_words(matrix.codes)),
        "qzeros": zeros,
        "scales": _turned(matrix.scales),
        "g_idx": group_of,
    }


def pack_awq(matrix: IntGroups) -> dict[str, Tensor]:
    """Return the tensors of a module in AutoAWQ's form `gemm`, by suffix. R is a multiple of 8, and
    groups are of consecutive inputs.
    """
    assert matrix.group_of is None
    return {
        "qweight": _awq_words(matrix.codes),
        "qzeros": _awq_words(_zeros(matrix)),
        "scales": _turned(matrix.scales),
    }


_PACK_INTEGERS = {
    Layout.COMPRESSED_TENSORS: pack_quantized,
    Layout.GPTQ: pack_gptq,
    Layout.AWQ: pack_awq,
}


def _zeros(matrix: IntGroups) -> Tensor:
    """Return the zero points, uint8 [R, G]."""
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.full_like(matrix.scales, ZERO_POINT, dtype=torch.uint8)


def _awq_words(codes: Tensor) -> Tensor:
    """Pack codes or zero points, uint8 [R, count], in AWQ's order of outputs: int32 [count, R / 8]."""
    outputs = torch.tensor(_AWQ_OUTPUTS, dtype=torch.int64, device="cpu")
    eights = _turned(codes).unflatten(1, (-1, _PER_INT))
    return _words(eights.index_select(2, outputs).flatten(1))


def _words(codes: Tensor) -> Tensor:
    """Pack codes, uint8 [rows, count], eight to an int32: [rows, count / 8], rounded up."""
    padded = functional.pad(codes, (0, -codes.shape[1] % _PER_INT))
    return _in_rows(in_pairs(padded)).view(torch.int32)


def _turned(x: Tensor) -> Tensor:
    return _in_rows(x.t())


def _in_rows(x: Tensor) -> Tensor:
    """Return x in rows of its own: `contiguous` keeps the strides of a single column or row."""
    return x.clone(memory_format=torch.contiguous_format)
