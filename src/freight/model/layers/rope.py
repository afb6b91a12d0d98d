"""Rotary position embedding: tables of cos and sin for every position, computed once.

Inverse frequencies by kind, as transformers computes them (float32), so that checkpoints see the
angles they were trained with:

default   theta ** (-2i / d)  (Su et al. 2021)
linear    positions divided by `factor` (Chen et al. 2023)
llama3    long wavelengths divided by `factor`, short ones kept, a linear ramp between (Llama 3.1)
yarn      the same idea with bounds in rotations, and attention scaled by `attention_factor` (Peng
          et al. 2023)
longrope  each frequency divided by its factor from the short or the long list (Ding et al. 2024).
          The longest context that the tables are built for selects the list, not the current
          length, so that keys in the cache stay valid
proportional  as default, divided by `factor`, for the pairs of the highest frequencies; the others
              are not rotated

Where yarn has `llama_4_scaling_beta`, queries are multiplied by 1 + beta * ln(1 + floor(position /
original length)), which keeps attention as sharp in long contexts as in short ones (Llama 4,
Ministral 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from freight.model.config.model import RopeConfig
from freight.model.config.rope import QUERY_SCALING, yarn_mscale
from freight.operands.rotary import Rotary


def build_ropes(
    configs: Sequence[RopeConfig], max_positions: int, device: str
) -> Mapping[int | None, Rotary]:
    """Build the tables of each rope, for positions below `max_positions`.

    Returns them by `AttentionConfig.rope`, without norms; the tables under None rotate no channel.
    """
    empty = torch.empty(max_positions, 0, dtype=torch.float32, device=device)
    tables: dict[int | None, Rotary] = {None: Rotary(empty, empty)}
    return tables | {
        index: build_rope(config, max_positions, device) for index, config in enumerate(configs)
    }


def build_rope(config: RopeConfig, max_positions: int, device: str) -> Rotary:
    """Build the tables of one rope for positions below `max_positions`, without norms."""
    inverse, factor = inverse_frequencies(config, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device="cpu"), inverse)
    q_factor = _query_factor(config, max_positions)
    cos, sin = cos_and_sin(angles)
    return Rotary(
        (cos * factor).to(device),
        (sin * factor).to(device),
        q_factor=None if q_factor is None else q_factor.to(device),
    )


def cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of float32 angles on the CPU, rounded to the nearest float32.

    They are computed in float64, by numpy. torch's float32 functions call MKL. A process's first
    such call on two threads gave other last bits in one process of ten (torch 2.13), and with them
    every result of that process.
    """
    tables = np.empty((2, *angles.shape), np.float32)
    for function, out in zip((np.cos, np.sin), tables, strict=True):
        function(angles.numpy(), out=out, dtype=np.float64, casting="unsafe")
    cos, sin = torch.from_numpy(tables)
    return cos, sin


def _query_factor(config: RopeConfig, max_positions: int) -> Tensor | None:
    """Compute the factors of queries, [max_positions] float32, as transformers does, or None."""
    beta = config.parameters.get(QUERY_SCALING)
    if not beta:
        return None
    positions = places(max_positions)
    spans = torch.floor(positions.float() / config.parameters["original_max_position_embeddings"])
    return 1 + beta * torch.log(1 + spans)


def places(count: int) -> Tensor:
    """Return 0 … count - 1 on the CPU, from which an order of rows can be built."""
    return torch.arange(count, dtype=torch.int64, device="cpu")


def half_pairs(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Return the order that turns pairs (2i, 2i + 1) into pairs (i, i + rotary_dim / 2).

    The result, [num_heads * head_dim] int64, indexes the channels of heads whose rope has the
    former pairs; the kernels rotate the latter.
    """
    channels = places(head_dim)
    head = torch.cat((channels[0:rotary_dim:2], channels[1:rotary_dim:2], channels[rotary_dim:]))
    return (places(num_heads)[:, None] * head_dim + head).flatten()


def inverse_frequencies(config: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies, [rotary_dim / 2] float32, and the factor of cos and sin."""
    rotary_dim = config.rotary_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    inverse = 1.0 / (config.theta**exponents)
    match config.kind:
        case "default":
            return inverse, 1.0
        case "linear":
            return inverse / config.parameters["factor"], 1.0
        case "llama3":
            return _llama3(inverse, config), 1.0
        case "yarn":
            return _yarn(inverse, config, rotary_dim)
        case "proportional":
            rotated = int(config.parameters.get("partial_rotary_factor", 1.0) * rotary_dim // 2)
            inverse[rotated:] = 0  # cos is 1 and sin is 0, so these channels keep their bits
            return inverse / config.parameters.get("factor", 1.0), 1.0
        case "longrope":
            return _longrope(config, config.theta**exponents, max_positions)
    raise AssertionError(
        f"rope kind {config.kind} passed parse_model_config but is not implemented"
    )


def _llama3(inverse: Tensor, config: RopeConfig) -> Tensor:
    p = config.parameters
    factor = p["factor"]
    low = p["low_freq_factor"]
    high = p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    result = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, result)


def _yarn(inverse: Tensor, config: RopeConfig, rotary_dim: int) -> tuple[Tensor, float]:
    p = config.parameters
    factor = p["factor"]
    original = p["original_max_position_embeddings"]

    def rotations_to_dim(rotations: float) -> float:
        return (
            rotary_dim
            * math.log(original / (rotations * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low = rotations_to_dim(p.get("beta_fast", 32))
    high = rotations_to_dim(p.get("beta_slow", 1))
    if p.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (
        (torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    ).clamp(0, 1)
    extrapolated = 1 - ramp  # 1: extrapolate (keep the frequency), 0: interpolate (divide it)
    return inverse / factor * (1 - extrapolated) + inverse * extrapolated, yarn_attention_factor(
        config
    )


def yarn_attention_factor(config: RopeConfig) -> float:
    """Return yarn's factor of cos and sin.

    It is the checkpoint's `attention_factor`; else the quotient of the scales by `mscale` and
    `mscale_all_dim` (DeepSeek); else 0.1 ln(factor) + 1. `attn_factor` multiplies the last two.
    """
    p = config.parameters
    if "attention_factor" in p:
        return float(p["attention_factor"])
    multiplier = float(p.get("attn_factor", 1.0))

    if p.get("mscale") and p.get("mscale_all_dim"):
        return (
            multiplier
            * yarn_mscale(p["factor"], p["mscale"])
            / yarn_mscale(p["factor"], p["mscale_all_dim"])
        )
    return multiplier * yarn_mscale(p["factor"])


def _longrope(config: RopeConfig, wavelengths: Tensor, max_positions: int) -> tuple[Tensor, float]:
    p = config.parameters
    factor = p["factor"]
    original = p["original_max_position_embeddings"]
    chosen = config.for_context(max_positions).long_factors
    inverse = 1.0 / (torch.tensor(chosen, dtype=torch.float32, device="cpu") * wavelengths)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return inverse, float(p.get("attention_factor", default))
