"""FP8 on a GPU: encoding and decoding, by conversion instructions or in integer arithmetic.

Where the hardware has no conversion, `encode_bits` and `decode_bits` use integer arithmetic and one
exact float32 addition or float16 multiplication. So every format runs on every GPU, and gives the
bytes of `fp8/cast.py`: rounded to nearest, ties to even, saturating, NaN kept. The element type of
a pointer selects the method at compile time: float8 if the hardware converts, uint8 if it does not.
`carrier` makes that choice on the host; in Triton's interpreter it is always uint8.

FP8 decodes to float16, in which all values of all FP8 formats are exact, subnormals included.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from freight.errors import KernelError
from freight.fp8.cast import format_of
from freight.fp8.formats import Format, ScaleKind, amd_fp8
from freight.kernels.reference import Fp8Products

# Fuse multiplications with additions unless a launch says otherwise. It is the default up to Triton
# 3.9, which warns that 3.10 changes it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# Values of a kernel's SCALES.
STATIC = tl.constexpr(int(ScaleKind.STATIC))
TOKEN = tl.constexpr(int(ScaleKind.TOKEN))
SMALLEST = tl.constexpr(2.0**-126)  # the smallest normal float32


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are specialized for.

    backend   'cuda' (NVIDIA) or 'hip' (AMD)
    arch      80, 90, … on NVIDIA, 'gfx942' etc. on AMD; 0 is Triton's interpreter
    units     number of multiprocessors
    """

    backend: str
    arch: int | str
    units: int = 132

    @cached_property
    def fits(self) -> dict[Hashable, int]:
        """Return the cache of `occupancy.programs_per_unit`, whose answers never change."""
        return {}

    @property
    def native(self) -> frozenset[Format]:
        """Return the FP8 formats that this GPU converts and multiplies in hardware."""
        if self.backend == "hip":
            return amd_fp8(str(self.arch))
        return frozenset({Format.E4M3FN, Format.E5M2} if int(self.arch) >= 89 else ())

    def fp8_products(self, format: Format, few_rows: bool) -> Fp8Products:
        """Select the products of attention over `format` that are faster with FP8 instructions.

        Tiles of few rows, as in decoding, use `mma.sync`, for which Triton widens FP8 on Hopper and
        on Blackwell's sm_10x. Hopper's `wgmma` would need V transposed byte by byte. The
        interpreter, which has no FP8, rounds the operands of both products.
        """
        if not format.is_e4m3 or (format not in self.native and self.arch):
            return Fp8Products.NONE
        if self.backend == "hip":
            return Fp8Products.BOTH
        if 90 <= int(self.arch) < 120 and few_rows:
            return Fp8Products.NONE
        return Fp8Products.SCORES if 90 <= int(self.arch) < 100 else Fp8Products.BOTH

    def pairs(self, format: Format) -> str:
        """Return how kernels decode two neighbouring values of `format` at a time.

        '': not at all, because it is not FP8; 'ptx': by the instructions that convert two values;
        'triton': by Triton's conversions or in integer arithmetic.
        """
        if not format.is_fp8:
            return ""
        return "ptx" if self.backend == "cuda" and format in self.native else "triton"

    @property
    def small(self) -> bool:
        """Say whether a multiprocessor holds 1536 threads and has 100 KiB of shared memory.

        ptxas gives a program fewer registers there.
        """
        return self.backend == "cuda" and int(self.arch) in (86, 89)

    @property
    def hopper_or_newer(self) -> bool:
        """Say whether the GPU is NVIDIA's of sm_90 or later."""
        return self.backend == "cuda" and int(self.arch) >= 90


INTERPRETER = Target("cuda", 0, units=1)  # no native FP8


def current_target() -> Target:
    """Return the GPU that torch uses now, or the interpreter."""
    if knobs.runtime.interpret:
        return INTERPRETER
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip is not None:
        return Target("hip", facts.gcnArchName.split(":")[0], facts.multi_processor_count)
    return Target("cuda", 10 * facts.major + facts.minor, facts.multi_processor_count)


def check_gpu(target: Target) -> None:
    """Raise KernelError for a GPU older than Ampere, and where Triton does not work.

    Triton compiles C while it runs: its access to the driver, and in versions before 3.9 also the
    launchers of kernels. Without this check the first request would fail.
    """
    if not target.arch:  # the interpreter
        return
    if target.backend == "cuda" and int(target.arch) < 80:
        raise KernelError(
            "the Triton kernels need an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, and this one has "
            f"{int(target.arch) / 10:.1f}; use --device cpu, or --kernels reference"
        )
    try:
        _ = driver.active  # the first use compiles
    except (
        AssertionError,
        ImportError,
        OSError,
        RuntimeError,
        subprocess.SubprocessError,
    ) as error:
        raise KernelError(
            f"Triton cannot use this GPU: {str(error).rstrip('.')}; it needs a C compiler, the headers of Python "
            "(Debian: gcc, libc6-dev and python3-dev) and a cache that it can write (TRITON_CACHE_DIR, by default "
            "~/.triton/cache), or use --device cpu, or --kernels reference"
        ) from error


def carrier(stored: Tensor, target: Target) -> Tensor:
    """View `stored` as kernels for `target` take it.

    FP8 that the hardware does not convert is viewed as uint8.
    """
    format = format_of(stored)
    if format.is_fp8 and format not in target.native:
        return stored.view(torch.uint8)
    return stored


@triton.constexpr_function
def largest(format):
    """Return the largest number of the format with this name, at compile time."""
    return Format(format).max


@triton.constexpr_function
def overflow(format):
    """Return `Format.overflow` of the format with this name, at compile time."""
    return Format(format).overflow


@triton.jit
def encode_bits(x, FORMAT: tl.constexpr):
    """Encode float32 as the nearest byte of FORMAT (a `Format`'s name)."""
    FNUZ: tl.constexpr = FORMAT == "fp8_e4m3fnuz"
    MANTISSA: tl.constexpr = 2 if FORMAT == "fp8_e5m2" else 3
    BIAS: tl.constexpr = 15 if FORMAT == "fp8_e5m2" else (8 if FNUZ else 7)
    LARGEST: tl.constexpr = largest(FORMAT)
    # Adding 2 ** (23 - MANTISSA + 1 - BIAS) rounds a subnormal into the lowest bits of the sum.
    MAGIC: tl.constexpr = 2.0 ** (24 - MANTISSA - BIAS)
    MAGIC_BITS: tl.constexpr = (24 - MANTISSA - BIAS + 127) << 23
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    odd = (bits >> (23 - MANTISSA)) & 1
    rounded = (bits + ((1 << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA)
    normal = rounded - ((127 - BIAS) << MANTISSA)
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    if FNUZ:
        code = tl.where(is_nan, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def decode_bits(code, FORMAT: tl.constexpr):
    """Decode a byte of FORMAT to float16, exactly."""
    word = code.to(tl.int16)
    if FORMAT == "fp8_e5m2":
        value = (word << 8).to(tl.float16, bitcast=True)  # E5M2 is the upper half of float16
    else:
        # Read as float16, the value is 2 ** 8 (FNUZ: 2 ** 7) too small: float16's bias is larger.
        value = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.float16, bitcast=True)
        nan = tl.full((), float("nan"), tl.float16)
        if FORMAT == "fp8_e4m3fnuz":
            value = tl.where(word == 0x80, nan, value * tl.full((), 128.0, tl.float16))
        else:
            value = tl.where((word & 0x7F) == 0x7F, nan, value * tl.full((), 256.0, tl.float16))
    return value


@triton.jit
def encode(x, like: tl.constexpr, FORMAT: tl.constexpr):
    """Encode float32 for a pointer to elements of type `like`: float8 (in hardware) or bytes.

    FORMAT: the name of the `Format`.
    """
    if like == tl.uint8:
        stored = encode_bits(x, FORMAT)
    else:
        LARGEST: tl.constexpr = largest(FORMAT)
        stored = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(like)
    return stored


@triton.jit
def decode(stored, FORMAT: tl.constexpr):
    """Decode loaded float8 values or bytes of FORMAT to float16; other types do not change."""
    if stored.dtype == tl.uint8:
        value = decode_bits(stored, FORMAT)
    elif stored.dtype.is_fp8():
        value = stored.to(tl.float16)
    else:
        value = stored
    return value


@triton.jit
def decode_pairs(words, like: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr):
    """Decode int16 words, each two stored neighbours of type `like`, to float16.

    Returns the first and the second values of all words. PAIRS is `Target.pairs`. The PTX code
    takes two words at a time and collects their first and their second bytes.
    """
    if PAIRS == "ptx" and FORMAT == "fp8_e5m2":  # E5M2 is the upper half of float16
        first, second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xFF00FF00;",
            "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PAIRS == "ptx":
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 t; .reg .b16 a, b;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first = decode((words & 0xFF).to(tl.uint8).to(like, bitcast=True), FORMAT)
        second = decode((words >> 8).to(tl.uint8).to(like, bitcast=True), FORMAT)
    return first, second


@triton.jit
def finite_amax(x, axis: tl.constexpr):
    """Return the largest finite magnitude along `axis`, 0 where there is none."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis)


@triton.jit
def scale_from_amax(amax, FORMAT: tl.constexpr):
    """Return amax / the largest value of FORMAT, at least 2 ** -126."""
    LARGEST: tl.constexpr = largest(FORMAT)
    return tl.maximum(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), SMALLEST)


@triton.jit
def power_of_two(amax):
    """Return the power of two at or below amax, clamped to 2 ** ±126, and its inverse.

    Both are float32, and exact, because they are built from exponent bits.
    """
    exponent = amax.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)
    return exponent.to(tl.float32, bitcast=True), ((254 << 23) - exponent).to(
        tl.float32, bitcast=True
    )


@triton.jit
def places(block, token, head, STRIDES: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of a KV head's vectors in pages, in units of WIDTH values.

    STRIDES are `KVPages.strides`, of which PART is taken. Triton before 3.9 takes no part of a
    tuple as an argument.
    """
    OF_BLOCK: tl.constexpr = STRIDES[PART][0]
    OF_TOKEN: tl.constexpr = STRIDES[PART][1]
    OF_HEAD: tl.constexpr = STRIDES[PART][2]
    UNIT: tl.constexpr = STRIDES[PART][3]
    if OF_BLOCK % OF_TOKEN == 0:  # saves a multiplication and a register
        place = (block * (OF_BLOCK // OF_TOKEN) + token) * OF_TOKEN + head * OF_HEAD
    else:
        place = block * OF_BLOCK + token * OF_TOKEN + head * OF_HEAD
    if UNIT != WIDTH:
        place = place.to(tl.int64) * (UNIT // WIDTH)
    return place


@triton.jit
def token_scale(scale_ptr, place, stored, MASKED: tl.constexpr):
    """Load the `token` scales of a tile's keys or values, float32 [N]."""
    if MASKED:
        scale = tl.load(scale_ptr + place, mask=stored, other=0.0)
    else:
        scale = tl.load(scale_ptr + place)
    return scale.to(tl.float32)
