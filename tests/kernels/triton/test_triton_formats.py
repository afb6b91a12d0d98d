"""Encoding and decoding in Triton against fp8/cast.py: every code, every rounding boundary."""

from __future__ import annotations

import os
import subprocess

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.cast import decode, encode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels.reference import Fp8Products
from freight.kernels.select import select_kernels
from freight.kernels.triton import formats
from freight.kernels.triton.formats import Target

FP8 = [format for format in Format if format.is_fp8]
WAYS = (
    [True] if triton.knobs.runtime.interpret else [True, False]
)  # the interpreter has no conversion instructions


@triton.jit
def encode_kernel(x_ptr, code_ptr, num, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < num, other=0.0)
    tl.store(
        code_ptr + index, formats.encode(x, code_ptr.dtype.element_ty, FORMAT), mask=index < num
    )


@triton.jit
def decode_kernel(code_ptr, x_ptr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x_ptr + index, formats.decode(tl.load(code_ptr + index), FORMAT).to(tl.float32))


def boundaries(format: Format) -> Tensor:
    """Every value of the format, every midpoint of two neighbours, and the float32 numbers next to
    each.
    """
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


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in add:RuntimeWarning"
)  # older numpy leaves a signalling NaN as it is
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
    stored = (
        codes.view(torch.uint8) if by_bits else formats.carrier(codes, formats.current_target())
    )
    got = torch.empty(256, device=device)
    decode_kernel[(1,)](stored, got, BLOCK=256, FORMAT=str(format))
    assert torch.equal(got.nan_to_num(-1.0), decode(codes).nan_to_num(-1.0))
    assert torch.equal(got.signbit()[~got.isnan()], decode(codes).signbit()[~got.isnan()])


def test_what_a_gpu_does_in_hardware():
    ocp = {Format.E4M3FN, Format.E5M2}
    expected = {
        ("cuda", 80): set(),
        ("cuda", 89): ocp,
        ("cuda", 90): ocp,
        ("hip", "gfx90a"): set(),
        ("hip", "gfx942"): {Format.E4M3FNUZ},
        ("hip", "gfx950"): ocp,
    }
    assert {target: formats.Target(*target).native for target in expected} == expected


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
        Target("hip", "gfx950"): (both, both),
        Target("hip", "gfx90a"): (none, none),
    }
    for target, products in expected.items():
        own, other = Format.E4M3FN, Format.E4M3FNUZ
        if target == Target("hip", "gfx942"):
            own, other = other, own
        assert (
            tuple(target.fp8_products(own, few_rows) for few_rows in (False, True)) == products
        ), target
        for format in (other, Format.E5M2, Format.BFLOAT16):
            assert target.fp8_products(format, few_rows=False) is none


@triton.jit
def decode_pairs_kernel(
    code_ptr, x_ptr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr
):
    index = tl.arange(0, BLOCK)
    words = tl.load(code_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + index)
    first, second = formats.decode_pairs(words, code_ptr.dtype.element_ty, FORMAT, PAIRS)
    tl.store(x_ptr + 2 * index, first.to(tl.float32))
    tl.store(x_ptr + 2 * index + 1, second.to(tl.float32))


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("by_bits", WAYS)
def test_pairs_decode_to_what_ml_dtypes_decodes(format, by_bits, device):
    """Every byte, as the first of two and as the second, beside every other byte."""
    every = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack((every.repeat_interleave(256), every.repeat(256)), 1).flatten().to(device)
    stored = (
        codes
        if by_bits
        else formats.carrier(codes.view(torch_dtype(format)), formats.current_target())
    )
    pairs = "triton" if by_bits else formats.current_target().pairs(format)
    got = torch.empty(codes.shape, device=device)
    decode_pairs_kernel[(1,)](stored, got, BLOCK=2**16, FORMAT=str(format), PAIRS=pairs)
    names = {
        Format.E4M3FN: "float8_e4m3fn",
        Format.E4M3FNUZ: "float8_e4m3fnuz",
        Format.E5M2: "float8_e5m2",
    }
    expected = codes.cpu().numpy().view(getattr(ml_dtypes, names[format])).astype(np.float32)
    np.testing.assert_array_equal(got.cpu().numpy(), expected)  # NaN equals NaN
    number = ~np.isnan(expected)
    assert (np.signbit(got.cpu().numpy()) == np.signbit(expected))[number].all()


def test_which_targets_decode_pairs_by_ptx():
    """PTX converts two values at a time from sm_89 on; a format that the target lacks is decoded by
    bits.
    """
    expected = {
        formats.INTERPRETER: ("triton", "triton", "triton"),
        Target("cuda", 80): ("triton", "triton", "triton"),
        Target("cuda", 89): ("ptx", "triton", "ptx"),
        Target("cuda", 90): ("ptx", "triton", "ptx"),
        Target("cuda", 100): ("ptx", "triton", "ptx"),
        Target("hip", "gfx942"): ("triton", "triton", "triton"),
    }
    for target, ways in expected.items():
        assert tuple(map(target.pairs, (Format.E4M3FN, Format.E4M3FNUZ, Format.E5M2))) == ways, (
            target
        )
        assert target.pairs(Format.BFLOAT16) == ""


@pytest.mark.skipif(
    not hasattr(triton.knobs.language, "fp_fusion_enabled"),
    reason="before Triton 3.9 it always fuses",
)
def test_a_launch_that_says_nothing_of_fusing_does_not_warn():
    """Of a warning at every first launch the tests on a GPU would fail."""
    assert triton.knobs.language.fp_fusion_enabled(None) == (
        os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
    )


class Driver:
    """Triton's driver where it cannot be compiled."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    @property
    def active(self) -> str:
        if self.error is not None:
            raise self.error
        return "a driver"


@pytest.mark.parametrize(
    ("arch", "error", "said"),
    [
        (90, RuntimeError("Failed to find C compiler."), "C compiler; .*gcc.*--device cpu"),
        (80, subprocess.CalledProcessError(1, ["gcc", "main.c"]), "main.c.*python3-dev"),
        (80, AssertionError("libcuda.so cannot found!"), "libcuda.so"),
        (80, PermissionError(13, "Permission denied", "/.triton"), "/.triton.*TRITON_CACHE_DIR"),
        (75, None, "8.0.*this one has 7.5.*--device cpu"),
    ],
)
def test_a_gpu_that_triton_cannot_use_is_refused_before_a_request(arch, error, said, monkeypatch):
    monkeypatch.setattr(formats, "driver", Driver(error))
    monkeypatch.setattr(formats, "current_target", lambda: Target("cuda", arch))
    with pytest.raises(KernelError, match=said):
        select_kernels("auto", "cuda")
    monkeypatch.setattr(formats, "driver", Driver(None))
    monkeypatch.setattr(formats, "current_target", lambda: Target("cuda", 80))
    assert select_kernels("auto", "cuda").name == "triton"
