"""Encoding and decoding in Triton against fp8/cast.py: every code, every rounding boundary."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.fp8.cast import decode, encode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels.reference import Fp8Products
from freight.kernels.triton import formats
from freight.kernels.triton.formats import Target

FP8 = [format for format in Format if format.is_fp8]
WAYS = [True] if triton.knobs.runtime.interpret else [True, False]  # the interpreter has no conversion instructions


@triton.jit
def encode_kernel(x_ptr, code_ptr, num, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < num, other=0.0)
    tl.store(code_ptr + index, formats.encode(x, code_ptr.dtype.element_ty, FORMAT), mask=index < num)


@triton.jit
def decode_kernel(code_ptr, x_ptr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x_ptr + index, formats.decode(tl.load(code_ptr + index), FORMAT).to(tl.float32))


def boundaries(format: Format) -> Tensor:
    """Every value of the format, every midpoint of two neighbours, and the float32 numbers next to each."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(format))
    values = decode(codes)
    values = values[values.isfinite()].sort().values
    edges = torch.cat((values, (values[1:] + values[:-1]) / 2, values * 1.5))
    infinity = torch.full_like(edges, torch.inf)
    return torch.cat((edges, edges.nextafter(infinity), edges.nextafter(-infinity)))


def numbers(format: Format) -> Tensor:
    """Boundaries, every float16, and float32 numbers of every exponent."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    random = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(0))
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    return torch.cat((boundaries(format), halves, random.int().view(torch.float32), special))


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("by_bits", WAYS)
def test_encoding_gives_the_same_bytes(format, by_bits, device):
    x = numbers(format).to(device)
    expected = encode(x, 1.0, format)
    got = torch.empty_like(expected)
    stored = got.view(torch.uint8) if by_bits else formats.carrier(got, formats.current_target())
    encode_kernel[(triton.cdiv(len(x), 1024),)](x, stored, len(x), BLOCK=1024, FORMAT=str(format))
    nan = x.isnan()
    assert decode(got)[nan].isnan().all()
    assert torch.equal(got.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("by_bits", WAYS)
def test_decoding_is_exact(format, by_bits, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch_dtype(format))
    stored = codes.view(torch.uint8) if by_bits else formats.carrier(codes, formats.current_target())
    got = torch.empty(256, device=device)
    decode_kernel[(1,)](stored, got, BLOCK=256, FORMAT=str(format))
    assert torch.equal(got.nan_to_num(-1.0), decode(codes).nan_to_num(-1.0))
    assert torch.equal(got.signbit()[~got.isnan()], decode(codes).signbit()[~got.isnan()])


def test_what_a_gpu_does_in_hardware():
    native = {target: formats.Target(*target).native for target in [("cuda", 80), ("cuda", 90), ("hip", "gfx942")]}
    assert native == {
        ("cuda", 80): frozenset(),
        ("cuda", 90): {Format.E4M3FN, Format.E5M2},
        ("hip", "gfx942"): {Format.E4M3FNUZ},
    }


def test_attention_multiplies_fp8_where_it_pays():
    none, scores, both = Fp8Products.NONE, Fp8Products.SCORES, Fp8Products.BOTH
    expected = {  # target -> (prefill, decode) over its own E4M3
        Target("cuda", 86): (none, none),
        Target("cuda", 89): (both, both),
        Target("cuda", 90): (scores, none),
        Target("cuda", 100): (both, none),
        Target("cuda", 103): (both, none),
        Target("cuda", 120): (both, both),
        Target("hip", "gfx942"): (both, both),
        Target("hip", "gfx90a"): (none, none),
    }
    for target, products in expected.items():
        own, other = (Format.E4M3FNUZ, Format.E4M3FN) if target.backend == "hip" else (Format.E4M3FN, Format.E4M3FNUZ)
        assert tuple(target.fp8_products(own, decoding) for decoding in (False, True)) == products, target
        for format in (other, Format.E5M2, Format.BFLOAT16):
            assert target.fp8_products(format, decoding=False) is none
