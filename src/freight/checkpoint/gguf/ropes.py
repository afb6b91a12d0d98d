"""Rotary embedding in the metadata and tensors of a GGUF file, in the words of a config.json.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from freight.base.fields import JsonDict, shortened
from freight.checkpoint.gguf.keys import Keys, shortest
from freight.errors import CheckpointError

FREQUENCIES = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
# tensors that become parameters of the rope
ROPE_TENSORS = frozenset({FREQUENCIES, LONG, SHORT})

_LENGTH = "original_max_position_embeddings"
_UNROTATED = 1e29  # divisors above it stop a pair of channels: converters write 1e30
# Relative difference between divisors computed in float64 and the float32 numbers of a converter
_ROUNDING = 1e-5
_YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def rope_parameters(keys: Keys, head_dim: int | None, constants: Mapping[str, Any]) -> JsonDict:
    """Return `rope_parameters` of the layers without a window; `constants` are added to a YaRN.

    head_dim: channels of a head; None: the number of those that rotate, and divisors of their
              frequencies, are not read
    """
    theta = keys.number("rope.freq_base", 10000.0)
    if theta <= 0:
        keys.refuse("rope.freq_base", "a number > 0 is")
    rope: JsonDict = {"rope_type": "default", "rope_theta": theta}
    rope |= _scaling(keys, constants)
    if head_dim is None:
        return rope
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = share(rotated, head_dim)
    if keys.has(LONG) or keys.has(SHORT):
        return rope | _longrope(keys)
    if keys.has(FREQUENCIES):
        return _with_divisors(keys, rope, rotated)
    return rope


def share(rotated: int, head_dim: int) -> float:
    """Return the share of a head's channels that makes `rotated` of them."""
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else math.nextafter(part, math.inf)


def _scaling(keys: Keys, constants: Mapping[str, Any]) -> JsonDict:
    """Return the type of scaling and its parameters. Without a type it is linear, and without a
    factor there is none.
    """
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    keys.get("rope.scaling.original_context_length")
    if kind == "yarn":
        return _yarn(keys, factor, constants)
    for name in _YARN:
        keys.get(name)  # without effect on other types
    if not keys.has(LONG):
        keys.require("rope.scaling.attn_factor", (1.0,), 1.0)
    if kind not in ("none", "linear", "longrope"):
        keys.refuse("rope.scaling.type", "'none', 'linear', 'yarn' or 'longrope' is")
    if kind == "linear" and factor not in (0.0, 1.0):
        return {"rope_type": "linear", "factor": factor}
    return {}


def _yarn(keys: Keys, factor: float, constants: Mapping[str, Any]) -> JsonDict:
    length = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    rope: JsonDict = {"rope_type": "yarn", "factor": factor or 1.0, _LENGTH: length, **constants}
    for name, parameter in _YARN.items():
        if keys.get(name) is not None:
            rope[parameter] = keys.number(name)
    keys.require("rope.scaling.yarn_ext_factor", (1.0,), 1.0)
    keys.require("rope.scaling.attn_factor", (1.0,), 1.0)
    return rope


def _longrope(keys: Keys) -> JsonDict:
    """Return the parameters of a rope whose divisors depend on the length of the context."""
    length = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    limit = keys.integer("context_length")
    for name in (LONG, SHORT):
        if not keys.has(name):
            raise CheckpointError(f"GGUF: tensor {name} is missing, and its counterpart is there")
    rope: JsonDict = {
        "rope_type": "longrope",
        "short_factor": [shortest(value) for value in keys.values(SHORT)],
        "long_factor": [shortest(value) for value in keys.values(LONG)],
        _LENGTH: length,
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    scale = limit / length if length > 1 else 1.0
    usual = math.sqrt(1 + math.log(scale) / math.log(length)) if scale > 1 else 1.0
    if not math.isclose(attention, usual, rel_tol=_ROUNDING):
        rope["attention_factor"] = attention
    return rope


def _with_divisors(keys: Keys, rope: JsonDict, rotated: int) -> JsonDict:
    """Return `rope` with the divisors of FREQUENCIES: as the Llama 3 rope that has these, else as
    they are.
    """
    divisors = list(keys.values(FREQUENCIES))
    if len(divisors) != rotated // 2 or rope["rope_type"] != "default":
        raise CheckpointError(
            f"GGUF: {FREQUENCIES} has {len(divisors)} divisors for {rotated // 2} pairs of channels, with "
            f"{keys.full('rope.scaling.type')} = {rope['rope_type']!r}: not implemented"
        )
    if not all(0 < value < _UNROTATED for value in divisors):
        raise CheckpointError(
            f"GGUF: {FREQUENCIES} = {shortened(divisors, 80)} has divisors that are not implemented; numbers from 0 "
            f"to {_UNROTATED:g} are"
        )
    if all(value == 1 for value in divisors):
        return rope
    llama3 = _as_llama3(divisors, rope["rope_theta"])
    if llama3 is not None:
        return rope | llama3
    # A long rope divides the frequencies by its factors, and nothing else
    factors = [shortest(value) for value in divisors]
    length = keys.integer("context_length")
    return rope | {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        _LENGTH: length,
    }


def _as_llama3(divisors: Sequence[float], theta: float) -> JsonDict | None:
    """Return the Llama 3 rope whose divisors equal `divisors` but for rounding; None for others.

    Every published one has the factors 1 and 4. The length is a power of two.
    """
    factor = shortest(max(divisors))
    for length in (8192, *(2**power for power in range(5, 20))):
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            _LENGTH: length,
        }
        expected = llama3_divisors(len(divisors), theta, factor, length)
        if all(
            math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(divisors, expected, strict=True)
        ):
            return rope
    return None


def llama3_divisors(pairs: int, theta: float, factor: float, length: int) -> list[float]:
    """Return the divisors of the frequencies of a Llama 3 rope with the factors 1 and 4."""
    divisors = []
    for pair in range(pairs):
        turns = length * theta ** (-pair / pairs) / (2 * math.pi)  # within the pretrained length
        smooth = min(max((turns - 1) / 3, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def proportional_share(keys: Keys, head_dim: int) -> float:
    """Return the share of channels that a proportional rope rotates: FREQUENCIES divides the
    frequencies of the others by 1e30.
    """
    divisors = list(keys.values(FREQUENCIES)) if keys.has(FREQUENCIES) else [1.0] * (head_dim // 2)
    rotated = sum(value == 1 for value in divisors)
    stopped = sum(value > _UNROTATED for value in divisors[rotated:])
    if len(divisors) != head_dim // 2 or rotated + stopped != len(divisors) or not rotated:
        raise CheckpointError(
            f"GGUF: {FREQUENCIES} = {shortened(divisors, 80)} must have 1 for pairs of channels that rotate, and then "
            f"1e30, for all {head_dim // 2} pairs"
        )
    return share(2 * rotated, head_dim)
