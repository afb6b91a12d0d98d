"""RopeConfig: which rotary embedding a config.json asks for, in both of its spellings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freight.config.fields import number
from freight.errors import CheckpointError, choices


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear, llama3 or yarn; `parameters` are that kind's numbers.

    linear: factor. llama3: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
    yarn: factor, original_max_position_embeddings and, where the checkpoint has them, attention_factor, beta_fast,
    beta_slow, mscale, mscale_all_dim, truncate. The first `rotary_dim` channels of a head are rotated.
    """

    rotary_dim: int
    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, float | bool] = field(default_factory=dict)


_REQUIRED = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
_OPTIONAL = {"yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})}
_OTHER = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})


def parse_rope(config: Mapping[str, Any], max_position_embeddings: int, head_dim: int) -> RopeConfig:
    """Both spellings: `rope_theta` and `rope_scaling`, or `rope_parameters` with the theta inside."""
    declared = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, value in declared.items():
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {key} = {value!r} is not a JSON object")
    parsed = {key: _parse(key, value, config, max_position_embeddings, head_dim) for key, value in declared.items()}
    if len(set(map(repr, parsed.values()))) > 1:
        spellings = " but ".join(f"{key} = {value}" for key, value in declared.items())
        raise CheckpointError(f"config.json contradicts itself: {spellings}")
    return next(iter(parsed.values()), RopeConfig(head_dim, theta=number(config, "rope_theta", 10000.0)))


def _parse(
    where: str, rope: Mapping[str, Any], config: Mapping[str, Any], max_positions: int, head_dim: int
) -> RopeConfig:
    kinds = {rope[key] for key in ("type", "rope_type") if rope.get(key) is not None} or {"default"}
    kind = kinds.pop()
    if kinds or kind not in _REQUIRED:
        named = repr(kind) if not kinds else f"type {rope['type']!r} and rope_type {rope['rope_type']!r}"
        raise CheckpointError(f"config.json: {where} of {named} is not implemented; {choices(_REQUIRED)} are")
    thetas = {number(source, "rope_theta") for source in (rope, config) if source.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: rope_theta = {config['rope_theta']}, and in {where} {rope['rope_theta']}"
        )
    values = {key: value for key, value in rope.items() if key not in _OTHER and value is not None}
    if rope.get("partial_rotary_factor") not in (1, None):
        partial = rope["partial_rotary_factor"]
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {partial!r} in {where} is not implemented; only 1 is"
        )
    # a pretrained length outside of this object takes precedence; without either, it is max_position_embeddings
    outside = config.get("original_max_position_embeddings")
    original = outside if outside is not None else values.pop("original_max_position_embeddings", max_positions)
    values.pop("original_max_position_embeddings", None)
    if "original_max_position_embeddings" in _REQUIRED[kind]:
        values["original_max_position_embeddings"] = original
    if kind == "yarn" and "factor" not in values:
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
    return RopeConfig(head_dim, theta=thetas.pop() if thetas else 10000.0, kind=kind, parameters=parameters)


def _value(where: str, values: Mapping[str, Any], key: str) -> float | bool:
    value = values[key]
    if key == "truncate":
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: truncate = {value!r} in {where} must be true or false")
        return value
    return number(values, key, least=0.0 if key.startswith("mscale") else None)
