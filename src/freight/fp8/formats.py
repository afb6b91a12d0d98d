"""The number formats that Freight stores. Imports no torch.

E4M3FN and E5M2: Micikevicius et al. 2022, "FP8 formats for deep learning" (also OCP OFP8 1.0).
E4M3FNUZ: Noune et al. 2022, "8-bit numerical formats for deep neural networks", the E4M3 of AMD's
MI300 (the MI350 has OCP's). Its exponent bias is larger by one, so a byte decodes to half its
E4M3FN value, and 0x80, which is -0 in E4M3FN, is its only NaN. INT8 is symmetric, -127 to 127;
0x80, which would be -128, is its NaN.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Format(StrEnum):
    """The format of a stored number. Values are the names on the command line and in every JSON."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    E4M3FN = "fp8_e4m3fn"
    E4M3FNUZ = "fp8_e4m3fnuz"
    E5M2 = "fp8_e5m2"
    INT8 = "int8"

    @property
    def is_quantized(self) -> bool:
        """True if a stored number is a byte that encodes the true one divided by a scale."""
        return self.is_fp8 or self is Format.INT8

    @property
    def is_fp8(self) -> bool:
        """True for E4M3FN, E4M3FNUZ and E5M2."""
        return self in (Format.E4M3FN, Format.E4M3FNUZ, Format.E5M2)

    @property
    def is_e4m3(self) -> bool:
        """True for both variants of E4M3, FN and FNUZ."""
        return self in (Format.E4M3FN, Format.E4M3FNUZ)

    @property
    def bytes(self) -> int:
        """Bytes of one number."""
        return {Format.FLOAT32: 4, Format.FLOAT16: 2, Format.BFLOAT16: 2}.get(self, 1)

    @property
    def max(self) -> float:
        """Largest finite magnitude; encoding saturates here. Quantized formats only."""
        return {
            Format.E4M3FN: 448.0,
            Format.E4M3FNUZ: 240.0,
            Format.E5M2: 57344.0,
            Format.INT8: 127.0,
        }[self]

    @property
    def overflow(self) -> float:
        """Half a step above `max`: larger magnitudes do not round to `max` but are clipped.
        Quantized formats only.
        """
        return {
            Format.E4M3FN: 464.0,
            Format.E4M3FNUZ: 248.0,
            Format.E5M2: 61440.0,
            Format.INT8: 127.5,
        }[self]

    @property
    def torch_name(self) -> str:
        """The name of the torch dtype, e.g. 'float8_e4m3fn'."""
        return str(self).replace("fp8_", "float8_")


def amd_fp8(arch: str) -> frozenset[Format]:
    """Return the formats that the matrix units of AMD's GPU `arch` ('gfx942:…') multiply: FNUZ on
    CDNA 3, OCP's on CDNA 4.
    """
    if arch.startswith("gfx94"):
        return frozenset({Format.E4M3FNUZ})
    if arch.startswith("gfx95"):
        return frozenset({Format.E4M3FN, Format.E5M2})
    return frozenset()


COMPUTE_FORMATS = (Format.BFLOAT16, Format.FLOAT16, Format.FLOAT32)


SCALE_GROUP = 128  # channels of a latent that share a `group` scale


class Granularity(StrEnum):
    """The values that share one KV scale. `TENSOR`, `HEAD` and `CHANNEL` are static. `TOKEN` and
    `GROUP`, the latter for latents only, are measured at the store.
    """

    TENSOR = "tensor"  # one per layer for K, one for V
    HEAD = "head"  # [num_kv_heads]
    CHANNEL = "channel"  # [num_kv_heads, head_dim]
    TOKEN = "token"  # one per token and KV head, stored with the page
    # one per token and SCALE_GROUP channels of its latent; the rotated channels stay in bfloat16
    GROUP = "group"

    @property
    def is_dynamic(self) -> bool:
        """True if scales are measured when a token is stored, and stored with it."""
        return self in (Granularity.TOKEN, Granularity.GROUP)

    def num_scales(self, num_kv_heads: int, head_dim: int) -> int:
        """Return the number of scales of one layer's keys, or of its values; static granularities
        only.
        """
        return {
            Granularity.TENSOR: 1,
            Granularity.HEAD: num_kv_heads,
            Granularity.CHANNEL: num_kv_heads * head_dim,
        }[self]


class ScaleKind(IntEnum):
    """The form of a cache's scales, as kernels distinguish it. The numbers are part of their
    interfaces.
    """

    NONE = 0  # stored values are the true ones
    STATIC = 1  # per KV head and channel, fixed
    TOKEN = 2  # per token and KV head, measured when it is stored
    # per token, KV head and SCALE_GROUP channels of V, which lies in K; measured when it is stored
    GROUP = 3


class ScaleSource(StrEnum):
    """The origin of the KV scales in use."""

    CHECKPOINT = "checkpoint"
    CALIBRATED = "calibrated"
    FILE = "file"
    GIVEN = "given"  # numbers in the options
    DYNAMIC = "dynamic"
    UNIT = "unit"
