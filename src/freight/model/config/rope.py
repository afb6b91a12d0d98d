"""Rotary embedding in a config.json, in both of its spellings. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freight.base.fields import JsonObject, number
from freight.errors import CheckpointError, choices
from freight.model.config.family import Family, RopeForm
from freight.model.config.model import RopeConfig

_REQUIRED = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "longrope": frozenset({"factor", "original_max_position_embeddings"}),
}
PROPORTIONAL = "proportional"
QUERY_SCALING = "llama_4_scaling_beta"
_SHARE = "partial_rotary_factor"
_SECTIONS = "mrope_section"
_OPTIONAL = {
    "yarn": frozenset(
        {
            "attention_factor",
            "attn_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset({"attention_factor"}),
    PROPORTIONAL: frozenset({"factor", _SHARE}),
}
_OTHER = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_LAYER_KINDS = ("full_attention", "sliding_attention")
_LENGTH = "original_max_position_embeddings"


def yarn_mscale(scale: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor for contexts that are `scale` times as long (Peng et al.
    2023).
    """
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def parse_ropes(
    config: JsonObject, family: Family, max_positions: int, head_dims: tuple[int, ...]
) -> tuple[RopeConfig, ...]:
    """Return the rope of all layers; or, if layers with a window have a separate rope, that of the
    other layers and then theirs.

    Both spellings are read: `rope_theta`, `rope_local_base_freq` and `rope_scaling`, or
    `rope_parameters` with the theta inside, by kind of layer if there are two ropes. `head_dims` has
    the head size of each of the two kinds.
    """
    if family.local_theta is None:
        return (_parse_rope(config, family, family.theta, max_positions, head_dims[0]),)
    by_kind = config.get("rope_parameters") or {}
    if isinstance(by_kind, Mapping) and _LENGTH in by_kind:
        by_kind = _without_length(by_kind)
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= set(_LAYER_KINDS):
        raise CheckpointError(
            f"config.json: rope_parameters = {by_kind!r}: {family.architecture} needs one entry for each of "
            f"{choices(_LAYER_KINDS)}, and no other"
        )
    full, windowed = [by_kind.get(kind) for kind in _LAYER_KINDS]
    shared = {**config, "rope_parameters": full}
    local = {"rope_parameters": windowed, "rope_theta": config.get("rope_local_base_freq")}
    return (
        _parse_rope(shared, family, family.theta, max_positions, head_dims[0]),
        _parse_rope(local, family, family.local_theta, max_positions, head_dims[1]),
    )


def _without_length(by_kind: JsonObject) -> dict[str, Any]:
    """Drop the pretrained length that Laguna-XS.2 repeats next to the ropes of `by_kind`.

    transformers does not read it there, and other programs take it as the ropes' default. So each
    rope that needs a length must repeat it; raises CheckpointError otherwise.
    """
    for kind, rope in by_kind.items():
        keys = rope if isinstance(rope, Mapping) else {}
        needed = _LENGTH in _REQUIRED.get(str(keys.get("rope_type") or keys.get("type")), ())
        if needed and keys.get(_LENGTH) != by_kind[_LENGTH]:
            raise CheckpointError(
                f"config.json contradicts itself: {_LENGTH} = {by_kind[_LENGTH]!r} in rope_parameters, and in its "
                f"{kind} {keys.get(_LENGTH)!r}"
            )
    return {kind: rope for kind, rope in by_kind.items() if kind != _LENGTH}


def _parse_rope(
    config: JsonObject, family: Family, theta: float, max_positions: int, head_dim: int
) -> RopeConfig:
    declared = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, value in declared.items():
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {key} = {value!r} is not a JSON object")
    if RopeForm.SECTIONS in family.ropes:
        declared = {key: _of_text(key, value) for key, value in declared.items()}
    if not declared:
        return _plain(config, {}, family, theta, head_dim)
    parsed = {
        key: _parse(key, value, config, family, theta, head_dim, max_positions)
        for key, value in declared.items()
    }
    if len(set(map(repr, parsed.values()))) > 1:
        spellings = " but ".join(f"{key} = {value}" for key, value in declared.items())
        raise CheckpointError(f"config.json contradicts itself: {spellings}")
    return next(iter(parsed.values()))


def _plain(
    config: JsonObject, rope: JsonObject, family: Family, theta: float, head_dim: int
) -> RopeConfig:
    """Build a rope without scaling; `rope` may limit the channels it rotates."""
    rotary_dim = _rotary_dim(config, _of_heads(rope, family), family, head_dim)
    return RopeConfig(
        rotary_dim, number(config, "rope_theta", theta), interleaved=family.interleaved
    )


def _of_text(where: str, rope: JsonObject) -> JsonObject:
    """Drop the sections for time, height and width from `rope`: a text token has the same position
    in all of them.
    """
    sections = rope.get(_SECTIONS)
    if sections is not None and not (
        isinstance(sections, list) and all(type(size) is int for size in sections)
    ):
        raise CheckpointError(
            f"config.json: {_SECTIONS} = {sections!r} in {where} must be a list of numbers of pairs"
        )
    found = {
        key: value for key, value in rope.items() if key not in (_SECTIONS, "mrope_interleaved")
    }
    return found | {key: "default" for key in ("type", "rope_type") if found.get(key) == "mrope"}


def _of_heads(rope: JsonObject, family: Family) -> JsonObject:
    """Drop the partial factor from `rope` where it is a parameter of the proportional kind
    (`RopeConfig`).
    """
    named = (rope.get("rope_type"), rope.get("type"))
    if RopeForm.PROPORTIONAL not in family.ropes or PROPORTIONAL not in named:
        return rope
    return {key: value for key, value in rope.items() if key != _SHARE}


def _rotary_dim(config: JsonObject, rope: JsonObject, family: Family, head_dim: int) -> int:
    """Return the number of rotated channels: all, or the share `partial_rotary_factor` of `rope` or
    `config`.
    """
    factors = [number(source, _SHARE) for source in (rope, config) if source.get(_SHARE)]
    factors = factors or [1.0 if family.rotary_factor is None else family.rotary_factor]
    if set(factors) == {1}:
        return head_dim
    if len(set(factors)) > 1 or family.rotary_factor is None:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {' and '.join(map(repr, factors))} is not implemented for "
            f"{family.architecture}; {'only 1' if family.rotary_factor is None else 'one value between 0 and 1'} is"
        )
    rotary_dim = int(head_dim * factors[0])
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {factors[0]!r} rotates {rotary_dim} of {head_dim} channels; rotary "
            "embedding rotates pairs of channels"
        )
    return rotary_dim


def _parse(
    where: str,
    rope: JsonObject,
    config: JsonObject,
    family: Family,
    theta: float,
    head_dim: int,
    max_positions: int,
) -> RopeConfig:
    plain = _plain(config, rope, family, theta, head_dim)
    named = [rope[key] for key in ("type", "rope_type") if rope.get(key) is not None]
    if not all(isinstance(kind, str) for kind in named):
        raise CheckpointError(
            f"config.json: {where} = {dict(rope)!r} has a rope_type that is not a word"
        )
    kinds = {*named} or {"default"}
    kind = kinds.pop()
    kind = "longrope" if kind == "su" else kind
    required = _REQUIRED | (
        {PROPORTIONAL: frozenset[str]()} if RopeForm.PROPORTIONAL in family.ropes else {}
    )
    if kinds or kind not in required:
        declared = repr(kind)
        if kinds:
            declared = f"type {rope['type']!r} and rope_type {rope['rope_type']!r}"
        raise CheckpointError(
            f"config.json: {where} of {declared} is not implemented; {choices(required)} are"
        )
    allowed = required[kind] | _OPTIONAL.get(kind, frozenset())
    if RopeForm.QUERY_SCALING in family.ropes:
        rope = _with_query_scaling(where, rope, kind)
        allowed = allowed | {QUERY_SCALING}
    thetas = {
        number(source, "rope_theta")
        for source in (rope, config)
        if source.get("rope_theta") is not None
    }
    if len(thetas) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: rope_theta = {config['rope_theta']}, and in {where} {rope['rope_theta']}"
        )
    other = _OTHER - ({_SHARE} if kind == PROPORTIONAL else set())
    values = {key: value for key, value in rope.items() if key not in other and value is not None}
    factors = [
        _factors(where, values, key, plain.rotary_dim) if kind == "longrope" else ()
        for key in _FACTORS
    ]
    # a pretrained length outside of this object takes precedence over the one inside; the default of
    # both is max_position_embeddings
    inside = values.pop(_LENGTH, max_positions)
    outside = config.get(_LENGTH)
    if _LENGTH in required[kind]:
        values[_LENGTH] = inside if outside is None else outside
    if kind in ("yarn", "longrope") and "factor" not in values:
        values["factor"] = max_positions / number(values, _LENGTH)
    for key in sorted(required[kind] - set(values)):
        raise CheckpointError(f"config.json: {where} of kind {kind!r} lacks {key}")
    for key in sorted(set(values) - allowed):
        raise CheckpointError(
            f"config.json: {key} = {values[key]!r} in {where} is unknown to Freight for kind {kind!r}"
        )
    parameters = {key: _value(where, values, key) for key in sorted(values)}
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise CheckpointError(
            f"config.json: {where} needs high_freq_factor > low_freq_factor, and has {dict(rope)}"
        )
    return replace(
        plain,
        theta=thetas.pop() if thetas else plain.theta,
        kind=kind,
        parameters=parameters,
        short_factors=factors[0],
        long_factors=factors[1],
    )


def _with_query_scaling(where: str, rope: JsonObject, kind: str) -> JsonObject:
    """Return `rope` of a family with RopeForm.QUERY_SCALING, without the model's length, which it
    repeats.
    """
    if kind != "yarn" or rope.get(QUERY_SCALING) is None:
        raise CheckpointError(
            f"config.json: {where} = {dict(rope)!r} must be of type 'yarn' and have {QUERY_SCALING}, 0 for queries "
            "that are not scaled by their position"
        )
    return {key: value for key, value in rope.items() if key != "max_position_embeddings"}


_FACTORS = ("short_factor", "long_factor")


def _factors(where: str, values: dict[str, Any], key: str, rotary_dim: int) -> tuple[float, ...]:
    """Remove the divisors of frequencies from `values` and return them, [rotary_dim / 2]."""
    factors = values.pop(key, None)
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        raise CheckpointError(
            f"config.json: {key} = {factors!r} in {where} must be a list of {rotary_dim // 2} numbers"
        )
    return tuple(number({key: value}, key) for value in factors)


def _value(where: str, values: JsonObject, key: str) -> float | bool:
    value = values[key]
    if key == "attn_factor" and "attention_factor" in values:
        raise CheckpointError(
            f"config.json: {where} has attn_factor = {value!r} and attention_factor = "
            f"{values['attention_factor']!r}; only one of them can be the factor of attention"
        )
    if key == "truncate":
        if not isinstance(value, bool):
            raise CheckpointError(
                f"config.json: truncate = {value!r} in {where} must be true or false"
            )
        return value
    if key == _SHARE and number(values, key) > 1:
        raise CheckpointError(
            f"config.json: {key} = {value!r} in {where} must be a share of the channels, at most 1"
        )
    return number(
        values, key, least=0.0 if key.startswith("mscale") or key == QUERY_SCALING else None
    )
