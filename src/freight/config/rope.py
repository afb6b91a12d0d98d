"""RopeConfig: which rotary embedding a config.json asks for, in both of its spellings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from freight.config.family import Family
from freight.config.fields import number
from freight.errors import CheckpointError, choices


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear, llama3, yarn or longrope; `parameters` are that kind's numbers.

    linear: factor. llama3: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
    yarn: factor, original_max_position_embeddings and, where the checkpoint has them, attention_factor, beta_fast,
    beta_slow, mscale, mscale_all_dim, truncate. longrope: factor, original_max_position_embeddings, perhaps
    attention_factor, and what divides each frequency, [rotary_dim / 2]: `short_factors` where no position lies beyond
    the original length, else `long_factors`. The first `rotary_dim` channels of a head are rotated.
    """

    rotary_dim: int
    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, float | bool] = field(default_factory=dict)
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


_REQUIRED = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "longrope": frozenset({"factor", "original_max_position_embeddings"}),
}
_OPTIONAL = {
    "yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "longrope": frozenset({"attention_factor"}),
}
_OTHER = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_LAYER_KINDS = ("full_attention", "sliding_attention")


def parse_ropes(config: Mapping[str, Any], family: Family, max_positions: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """The rope of all layers; or, where layers with a window have their own, that of the others and then theirs.

    Both spellings: `rope_theta`, `rope_local_base_freq` and `rope_scaling`, or `rope_parameters` with the theta inside,
    for each kind of layer where there are two ropes.
    """
    if family.local_theta is None:
        return (_parse_rope(config, family, family.theta, max_positions, head_dim),)
    by_kind = config.get("rope_parameters") or {}
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= set(_LAYER_KINDS):
        raise CheckpointError(
            f"config.json: rope_parameters = {by_kind!r}: {family.architecture} needs one entry for each of "
            f"{choices(_LAYER_KINDS)}, and no other"
        )
    whole, windowed = (by_kind.get(kind) for kind in _LAYER_KINDS)
    shared = {**config, "rope_parameters": whole}
    local = {"rope_parameters": windowed, "rope_theta": config.get("rope_local_base_freq")}
    return (
        _parse_rope(shared, family, family.theta, max_positions, head_dim),
        _parse_rope(local, family, family.local_theta, max_positions, head_dim),
    )


def _parse_rope(
    config: Mapping[str, Any], family: Family, theta: float, max_positions: int, head_dim: int
) -> RopeConfig:
    declared = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    if family.rope and not declared:
        declared = {"rope_parameters": family.rope}
    for key, value in declared.items():
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {key} = {value!r} is not a JSON object")
    plain = RopeConfig(_rotary_dim(config, {}, family, head_dim), number(config, "rope_theta", theta))
    parsed = {
        key: _parse(
            key, value, config, replace(plain, rotary_dim=_rotary_dim(config, value, family, head_dim)), max_positions
        )
        for key, value in declared.items()
    }
    if len(set(map(repr, parsed.values()))) > 1:
        spellings = " but ".join(f"{key} = {value}" for key, value in declared.items())
        raise CheckpointError(f"config.json contradicts itself: {spellings}")
    return next(iter(parsed.values()), plain)


def _rotary_dim(config: Mapping[str, Any], rope: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """Channels that are rotated: all, or as many as `partial_rotary_factor` says, here or there."""
    factors = [source["partial_rotary_factor"] for source in (rope, config) if source.get("partial_rotary_factor")]
    if not factors or set(factors) == {1}:
        return head_dim
    if len(set(factors)) > 1 or not family.partial_rotary:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {' and '.join(map(repr, factors))} is not implemented for "
            f"{family.architecture}; {'one value between 0 and 1' if family.partial_rotary else 'only 1'} is"
        )
    rotary_dim = int(head_dim * number({"partial_rotary_factor": factors[0]}, "partial_rotary_factor"))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {factors[0]!r} rotates {rotary_dim} of {head_dim} channels; rotary "
            "embedding rotates pairs of channels"
        )
    return rotary_dim


def _parse(
    where: str, rope: Mapping[str, Any], config: Mapping[str, Any], plain: RopeConfig, max_positions: int
) -> RopeConfig:
    kinds = {rope[key] for key in ("type", "rope_type") if rope.get(key) is not None} or {"default"}
    kind = kinds.pop()
    kind = "longrope" if kind == "su" else kind
    if kinds or kind not in _REQUIRED:
        named = repr(kind) if not kinds else f"type {rope['type']!r} and rope_type {rope['rope_type']!r}"
        raise CheckpointError(f"config.json: {where} of {named} is not implemented; {choices(_REQUIRED)} are")
    thetas = {number(source, "rope_theta") for source in (rope, config) if source.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: rope_theta = {config['rope_theta']}, and in {where} {rope['rope_theta']}"
        )
    values = {key: value for key, value in rope.items() if key not in _OTHER and value is not None}
    factors = [_factors(where, values, key, plain.rotary_dim) if kind == "longrope" else () for key in _FACTORS]
    # a pretrained length outside of this object takes precedence; without either, it is max_position_embeddings
    outside = config.get("original_max_position_embeddings")
    original = outside if outside is not None else values.pop("original_max_position_embeddings", max_positions)
    values.pop("original_max_position_embeddings", None)
    if "original_max_position_embeddings" in _REQUIRED[kind]:
        values["original_max_position_embeddings"] = original
    if kind in ("yarn", "longrope") and "factor" not in values:
        values["factor"] = max_positions / number(values, "original_max_position_embeddings")
    allowed = _REQUIRED[kind] | _OPTIONAL.get(kind, frozenset())
    for key in sorted(_REQUIRED[kind] - set(values)):
        raise CheckpointError(f"config.json: {where} of kind {kind!r} lacks {key}")
    for key in sorted(set(values) - allowed):
        raise CheckpointError(
            f"config.json: {key} = {values[key]!r} in {where} is unknown to Freight for kind {kind!r}"
        )
    parameters = {key: _value(where, values, key) for key in sorted(values)}
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise CheckpointError(f"config.json: {where} needs high_freq_factor > low_freq_factor, and has {dict(rope)}")
    theta = thetas.pop() if thetas else plain.theta
    return RopeConfig(plain.rotary_dim, theta, kind, parameters, *factors)


_FACTORS = ("short_factor", "long_factor")


def _factors(where: str, values: dict[str, Any], key: str, rotary_dim: int) -> tuple[float, ...]:
    """Remove from `values` what divides each frequency."""
    found = values.pop(key, None)
    if not isinstance(found, list) or len(found) != rotary_dim // 2:
        raise CheckpointError(f"config.json: {key} = {found!r} in {where} must be a list of {rotary_dim // 2} numbers")
    return tuple(number({key: value}, key) for value in found)


def _value(where: str, values: Mapping[str, Any], key: str) -> float | bool:
    value = values[key]
    if key == "truncate":
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: truncate = {value!r} in {where} must be true or false")
        return value
    return number(values, key, least=0.0 if key.startswith("mscale") else None)
