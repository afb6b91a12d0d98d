"""AWQModifier, SmoothQuantModifier and SpinQuantModifier of llm-compressor: what a recipe does to
the weights before they are rounded. Imports no torch.

The classes have llm-compressor's fields and defaults; objects of its classes are read as well.
Freight does each of the three in one way. Fields that ask for another are errors that name them;
fields that change no result, such as `offload_device`, are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freight.errors import ConfigError, shown
from freight.quantizer.modifier import QuantizationModifier, resolve_modifier
from freight.quantizer.schemes import plain

AWQ = "awq"
SMOOTHQUANT = "smoothquant"
ROTATION = "rotation"
_DUO_SCALING: dict[bool | str, str] = {True: "on", False: "off", "both": "both"}
_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj")
_NORM_MAPPINGS = {"input_layernorm": _QKV, "post_attention_layernorm": _MLP}
_AWQ_MAPPINGS = _NORM_MAPPINGS | {"v_proj": ("o_proj",), "up_proj": ("down_proj",)}


@dataclass(frozen=True)
class AWQModifier(QuantizationModifier):
    """A search for scales of input channels by AWQ, with llm-compressor's fields. As in its older
    versions, those of QuantizationModifier may be given here instead of there.

    mappings      None, or llm-compressor's own for Llama
    duo_scaling   whether the candidates depend on the weights beside the inputs: True, False, or "both"
                  for half of them each
    n_grid        20 candidates

    Raises ConfigError for what Freight does not do.
    """

    mappings: Sequence[Any] | None = None
    offload_device: object = None
    duo_scaling: bool | str = True
    n_grid: int = 20

    def __post_init__(self) -> None:
        resolve_transform(self)
        if quantizes(self):
            resolve_modifier(self)


@dataclass(frozen=True)
class SmoothQuantModifier:
    """SmoothQuant, with llm-compressor's fields.

    smoothing_strength   from 0 to 1: the share of the outliers that moves into the weights
    mappings             None, or llm-compressor's own for Llama

    Raises ConfigError for what Freight does not do.
    """

    smoothing_strength: float = 0.5
    mappings: Sequence[Any] | None = None
    ignore: Sequence[str] | None = None
    num_calibration_steps: int | None = None
    calibration_function: object = None
    algorithm: str = "smoothquant"

    def __post_init__(self) -> None:
        resolve_transform(self)


@dataclass(frozen=True)
class SpinQuantModifier:
    """Rotation by Hadamard matrices, with llm-compressor's fields.

    rotations   R1 and R2, which are folded into the weights

    Raises ConfigError for what Freight does not do.
    """

    rotations: Sequence[str] = ("R1", "R2")
    transform_type: str = "hadamard"
    randomize: bool = False
    learnable: bool = False
    precision: object = None
    transform_block_size: int | None = None
    mappings: object = field(default=None, repr=False)
    norm_mappings: object = field(default=None, repr=False)
    transform_config: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        resolve_transform(self)


@dataclass(frozen=True)
class Transform:
    """A resolved transform: a part of `--method`, SmoothQuant's strength, and AWQ's candidates."""

    method: str
    smoothing: float | None = None
    duo_scaling: str | None = None


def quantizes(modifier: Any) -> bool:
    """Return whether an AWQModifier also says how modules are quantized."""
    names = ("scheme", "config_groups", "kv_cache_scheme")
    return any(getattr(modifier, name, None) is not None for name in names)


def resolve_transform(modifier: Any) -> Transform:
    """Resolve one of the modifiers of this module, or llm-compressor's object of its name. Raises
    ConfigError for what Freight does not do.
    """
    resolvers = {
        "AWQModifier": _awq,
        "SmoothQuantModifier": _smoothquant,
        "SpinQuantModifier": _spinquant,
    }
    return resolvers[type(modifier).__name__](modifier)


def _awq(modifier: Any) -> Transform:
    duo = modifier.duo_scaling
    if not isinstance(duo, bool | str) or duo not in _DUO_SCALING:
        raise ConfigError(
            f"recipe: AWQModifier has duo_scaling {shown(duo)}; choose True, False or 'both'"
        )
    _require(modifier, "n_grid", (20,))
    _require_mappings(modifier, _AWQ_MAPPINGS)
    return Transform(AWQ, duo_scaling=_DUO_SCALING[duo])


def _smoothquant(modifier: Any) -> Transform:
    _require(modifier, "algorithm", ("smoothquant",))
    _require(modifier, "ignore", (None, [], ()))
    _require(modifier, "num_calibration_steps", (None,))
    _require(modifier, "calibration_function", (None,))
    _require_mappings(modifier, _NORM_MAPPINGS)
    strength = modifier.smoothing_strength
    is_number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not is_number or not 0 < strength <= 1:
        raise ConfigError(
            f"recipe: SmoothQuantModifier has smoothing_strength {shown(strength)}; give a number above 0, at most 1"
        )
    return Transform(SMOOTHQUANT, float(strength))


def _spinquant(modifier: Any) -> Transform:
    rotations = [str(getattr(name, "value", name)).upper() for name in modifier.rotations]
    online = [name for name in rotations if name not in ("R1", "R2")]
    if online:
        raise ConfigError(
            f"recipe: SpinQuantModifier has the rotation {online[0]}, which is done at run time; choose R1 and R2, "
            "which are folded into the weights"
        )
    if set(rotations) != {"R1", "R2"}:
        raise ConfigError(
            f"recipe: SpinQuantModifier has the rotations {', '.join(rotations) or 'none'}; Freight does R1 and R2: "
            "give both"
        )
    _require(modifier, "transform_type", ("hadamard",))
    for name in ("randomize", "learnable"):
        _require(modifier, name, (False,))
    for name in ("transform_block_size", "mappings", "norm_mappings", "transform_config"):
        _require(modifier, name, (None,))
    return Transform(ROTATION)


def _require(modifier: Any, name: str, done: tuple[object, ...]) -> None:
    """Raise ConfigError unless the field `name` has one of the values of what Freight does."""
    value = getattr(modifier, name)
    if value not in done or isinstance(value, bool) != isinstance(done[0], bool):
        way_out = "omit it" if done[0] is None else f"only {done[0]!r} is done: omit it"
        raise ConfigError(f"recipe: {type(modifier).__name__} has {name} {shown(value)}; {way_out}")


def _require_mappings(modifier: Any, done: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for mappings other than `done`: a module that is divided -> those that are
    multiplied.
    """
    if modifier.mappings is None:
        return
    listed = {}
    for mapping in modifier.mappings:
        smoothed, balanced = _mapping(type(modifier).__name__, plain(mapping))
        listed[_module(smoothed)] = set(map(_module, balanced))
    if listed != {smoothed: set(balanced) for smoothed, balanced in done.items()}:
        raise ConfigError(
            f"recipe: {type(modifier).__name__} has mappings of its own; Freight folds where the model's structure "
            "allows it: omit them"
        )


def _mapping(name: str, mapping: Any) -> tuple[str, Iterable[str]]:
    """Return (module that is divided, modules that are multiplied) of a mapping of either form."""
    if isinstance(mapping, dict) and {"smooth_layer", "balance_layers"} <= mapping.keys():
        return mapping["smooth_layer"], mapping["balance_layers"]
    is_pair = isinstance(mapping, list | tuple) and len(mapping) == 2
    if is_pair and isinstance(mapping[0], list | tuple):
        return mapping[1], mapping[0]
    raise ConfigError(
        f"recipe: {name} has the mapping {shown(mapping)}; omit mappings, which Freight finds itself"
    )


def _module(pattern: str) -> str:
    return str(pattern).removeprefix("re:").removeprefix(".*").removesuffix("$")
