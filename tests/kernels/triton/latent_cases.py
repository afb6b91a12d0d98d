"""Launches of latent attention that are compiled ahead of time, as `cases.py` has those of other
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cases import BF16, empty, native, pages, sequences

from freight.fp8.formats import Format
from freight.kernels.triton import paged
from freight.kernels.triton.formats import Target
from freight.operands.attention import AttentionCall


def attend_latent(
    format: Format, scales: str, heads: int, target: Target, fp8: bool = False
) -> None:
    """A step of prefill and decoding: keys of 576 channels for all heads, whose last 512 are the
    values.
    """
    cache = pages(format, scales, 1, 576, 512)
    cache = replace(cache, v=cache.k[..., 64:], v_in_k=True)
    paged.attention(
        target,
        empty(8192, heads, 576, dtype=BF16),
        cache,
        sequences(64),
        AttentionCall(0.1),
        fp8=fp8,
    )


# compiled whenever the tests run, as LARGE_CASES
LATENT_CASES: dict[str, Callable[[Target], object]] = {
    "latent bf16, 16 heads": partial(attend_latent, Format.BFLOAT16, "unit", 16),
    "latent bf16, 128 heads": partial(attend_latent, Format.BFLOAT16, "unit", 128),  # DeepSeek-V3
    "latent fp8 token, 16 heads": partial(attend_latent, Format.E4M3FN, "token", 16),
    "latent fp8 token, 128 heads": lambda target: attend_latent(
        native(target), "token", 128, target
    ),
    "latent fp8 static, 20 heads": partial(
        attend_latent, Format.E4M3FN, "static", 20
    ),  # GLM-4.7-Flash
    "latent e5m2, 64 heads": partial(attend_latent, Format.E5M2, "unit", 64),  # Kimi K2
    "latent fp8 compute, 128 heads": lambda target: attend_latent(
        native(target), "static", 128, target, fp8=True
    ),
    "latent float32, 16 heads": partial(attend_latent, Format.FLOAT32, "unit", 16),
}
