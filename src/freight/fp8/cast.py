"""Encode and decode FP8 and INT8: the only place in Freight that casts to FP8 (a test greps for
others).

`encode` divides by the scale in float32, clamps to the format's largest finite value, and rounds to
nearest, ties to even. It clamps first because the result of a cast out of range differs between
formats, devices and torch versions (E4M3FN: NaN up to torch 2.11, saturation since; E5M2: inf;
E4M3FNUZ: NaN). NaN stays NaN, in INT8 as the code -128, which the symmetric range leaves free. A
scale is always the multiplier: `true ≈ stored * scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.formats import Format

_DTYPES: dict[Format, torch.dtype] = {
    format: getattr(torch, format.torch_name) for format in Format
}
_FORMATS = {dtype: format for format, dtype in _DTYPES.items()}
_INT8_NAN = -128.0
E8M0 = torch.float8_e8m0fnu  # dtype of scales that are powers of two (`fp8.mxfp4`); never cast to


def torch_dtype(format: Format) -> torch.dtype:
    """Return the torch dtype in which numbers of `format` are stored."""
    return _DTYPES[format]


def format_of(tensor: Tensor) -> Format:
    """Return the format in which a tensor is stored. Raises KernelError for dtypes that are not a
    `Format`.
    """
    if tensor.dtype not in _FORMATS:
        raise KernelError(
            f"a tensor of dtype {tensor.dtype} where one of {', '.join(map(str, _FORMATS))} was expected"
        )
    return _FORMATS[tensor.dtype]


def encode(x: Tensor, scale: Tensor | float, format: Format) -> Tensor:
    """Quantize `x` (any float dtype) with `scale` (> 0, float32, broadcastable) to `format`, in x's
    shape.
    """
    # a tensor, because CUDA's division by a Python number is inexact
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    values = (x.float() / divisor).clamp(-format.max, format.max)
    if format is Format.INT8:
        values = values.round().nan_to_num(nan=_INT8_NAN)  # ties to even
    return values.to(_DTYPES[format])


def clipped(x: Tensor, scale: Tensor | float, format: Format) -> Tensor:
    """Return which values of x `encode` clips because they exceed the range of their scale: bool, of
    the shape of x.
    """
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return (x.float() / divisor).abs() > format.overflow


def decode(stored: Tensor, scale: Tensor | float | None = None) -> Tensor:
    """Return the float32 values of a quantized (or 16-bit) tensor, multiplied by `scale` if there
    is one.
    """
    values = stored.float()
    if stored.dtype == torch.int8:
        values = values.masked_fill(values == _INT8_NAN, torch.nan)
    if scale is None:
        return values
    return values * scale


def amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the largest finite magnitude along `dim`, float32; 0 if there is none. Non-finite
    values do not count.
    """
    magnitude = x.float().abs()
    finite = torch.where(magnitude < torch.inf, magnitude, 0.0)  # a comparison with NaN is false
    return finite.amax(dim)


SMALLEST_SCALE = 2.0**-126  # the smallest normal float32


def scale_from_amax(amax: Tensor, format: Format) -> Tensor:
    """Return amax / format.max, float32, at least the smallest normal float32 (the scale of an
    all-zero vector).
    """
    largest = torch.tensor(format.max, dtype=torch.float32, device=amax.device)
    return (amax.float() / largest).clamp(min=SMALLEST_SCALE)


def token_scale(amax: Tensor, format: Format) -> Tensor:
    """Return the scale of a `token` vector: `scale_from_amax`, rounded to bfloat16, the dtype in
    which the cache stores it.

    Rounding changes it by at most a factor of 1 ± 2 ** -8, less than half a step of E4M3, E5M2 and
    INT8 at the top of their ranges, so the largest value still becomes the format's largest. A
    power of two would take one byte, but the largest value, which matters most in attention, would
    no longer be exact (docs/numerics.md has the figures).
    """
    return scale_from_amax(amax, format).to(torch.bfloat16)


LEAST_INDEX_AMAX = 1e-4  # magnitude below which vectors of an indexer have the same scale


def index_scale(amax: Tensor, format: Format) -> Tensor:
    """Return the scale of a vector of an indexer, float32, from its largest magnitude.

    FP8: the least power of two at which no value exceeds the format, and at least that of
    LEAST_INDEX_AMAX. That is `act_quant` of DeepSeek-V3.2-Exp (inference/kernel.py) with the
    `scale_fmt` ue8m0 of its config, to the bit: its exponent is the one of the float32 product
    amax * (1 / format.max), one more if that is no power of two. INT8: `scale_from_amax`.
    """
    if not format.is_fp8:
        return scale_from_amax(amax, format)
    inverse = torch.tensor(1 / format.max, dtype=torch.float32, device=amax.device)
    mantissa, exponent = torch.frexp(amax.float().clamp(min=LEAST_INDEX_AMAX) * inverse)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def convert_e4m3(stored: Tensor, scale: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Convert E4M3 bytes to the variant `format`, E4M3FN or E4M3FNUZ; (bytes, scale) represent the
    same values.

    FN -> FNUZ: -0 (0x80, FNUZ's NaN) becomes 0, the scale doubles; E4M3FN's NaN stays NaN. FNUZ ->
    FN: the scale halves; exact but for FNUZ's largest magnitude, 240 (0x7F, FN's NaN), which
    becomes 224. Done once, at load. Returns the input unchanged if it has that format already.
    Raises KernelError for E5M2.
    """
    have = format_of(stored)
    if have is format:
        return stored, scale
    if not (have.is_e4m3 and format.is_e4m3):
        raise KernelError(
            f"{have} cannot be reinterpreted as {format}: only E4M3FN and E4M3FNUZ share their bytes"
        )
    code = stored.view(torch.uint8)
    magnitude = code & 0x7F
    if format is Format.E4M3FNUZ:
        code = code.masked_fill(magnitude == 0, 0).masked_fill(magnitude == 0x7F, 0x80)
        return code.view(_DTYPES[format]), scale * 2.0
    code = torch.where(magnitude == 0x7F, code - 1, code).masked_fill(code == 0x80, 0x7F)
    return code.view(_DTYPES[format]), scale / 2.0
