"""Recipes of llm-compressor, read as Recipe. Imports no torch, reads no weight.

A recipe is YAML text, the path of a YAML or JSON file, a `QuantizationModifier`, or a list of
these. Another modifier, or an unknown key, is an error that names it. Only keys that llm-compressor
does not use either, such as `start` and `end`, are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import yaml

from freight.base.fields import JsonObject
from freight.base.files import read_text
from freight.errors import ConfigError, nearest, shown
from freight.quantizer.modifier import (
    QuantizationModifier,
    Recipe,
    require_mapping,
    resolve_modifier,
)

_SMOOTHING = "remove it: FP8 keeps outliers, which it moves for integer formats; or apply it there and save in 16 bits"
_ROUNDING = "use QuantizationModifier with scheme FP8, FP8_DYNAMIC or FP8_BLOCK"
_PRUNING = "prune with llm-compressor, save in 16 bits, and quantize the result here"
OTHER_MODIFIERS = {  # llm-compressor's other modifiers -> what to do instead
    "SmoothQuantModifier": _SMOOTHING,
    "AWQModifier": _SMOOTHING,
    "LogarithmicEqualizationModifier": _SMOOTHING,
    "QuIPModifier": _SMOOTHING,
    "SpinQuantModifier": _SMOOTHING,
    "GPTQModifier": _ROUNDING,
    "AutoRoundModifier": _ROUNDING,
    "SparseGPTModifier": _PRUNING,
    "WandaPruningModifier": _PRUNING,
    "MagnitudePruningModifier": _PRUNING,
    "ConstantPruningModifier": _PRUNING,
    "REAPPruningModifier": _PRUNING,
}


def read_recipe(recipe: object) -> Recipe:
    """Read `recipe` in any of its forms, resolved. Raises ConfigError for a recipe without exactly
    one QuantizationModifier, and for what Freight does not do.
    """
    found = [resolve_modifier(modifier) for modifier in _modifiers(recipe)]
    if len(found) != 1:
        raise ConfigError(
            f"the recipe has {len(found) or 'no'} QuantizationModifier{'s' * (len(found) > 1)}; give one, with "
            "scheme= for the weights and kv_cache_scheme= for the cache"
        )
    return found[0]


def _modifiers(recipe: object) -> Iterator[object]:
    """Yield modifiers as objects; each is checked by `resolve_modifier`, before or after."""
    if isinstance(recipe, str | Path):
        yield from _from_mapping(_parse(recipe))
    elif isinstance(recipe, Mapping):
        yield from _from_mapping(recipe)
    elif isinstance(recipe, list | tuple):
        for one in recipe:
            yield from _modifiers(one)
    elif recipe is None:
        raise ConfigError(
            "oneshot needs a recipe: YAML, or QuantizationModifier(targets='Linear', scheme='FP8', …)"
        )
    else:
        _require_modifier(type(recipe).__name__)
        yield recipe


def _parse(recipe: str | Path) -> JsonObject:
    one_line = isinstance(recipe, Path) or "\n" not in recipe.strip()
    text = str(recipe)
    if one_line and (
        isinstance(recipe, Path) or re.search(r"\.(ya?ml|json|md)$", text) or ":" not in text
    ):
        try:
            text = read_text(Path(recipe))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"recipe {shown(str(recipe))} cannot be read as a file: {error}"
            ) from None
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"the recipe is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"the recipe is {shown(content)}, not a mapping of stages to modifiers")
    return content


def _from_mapping(content: JsonObject) -> Iterator[QuantizationModifier]:
    """Yield the modifiers of stages, which contain groups, `…_modifiers`, which contain modifiers.
    Groups may also come without a stage.
    """
    for key, value in content.items():
        if str(key).endswith("_stage"):
            yield from _from_mapping(require_mapping(f"recipe: {key}", value))
        elif str(key).endswith("modifiers"):
            for name, options in require_mapping(f"recipe: {key}", value).items():
                _require_modifier(str(name))
                yield _modifier(require_mapping(f"recipe: {name}", options))
        elif value:
            raise ConfigError(
                f"recipe: {key!r} is not understood; a recipe is quant_stage: quant_modifiers: QuantizationModifier: …"
            )


# keys of every modifier that oneshot does not use
_UNUSED = ("start", "end", "update", "index", "group")


def _modifier(options: JsonObject) -> QuantizationModifier:
    known = [one.name for one in fields(QuantizationModifier)]
    given = {str(name): value for name, value in options.items() if name not in _UNUSED}
    for name in given:
        if name not in known:
            raise ConfigError(
                f"recipe: QuantizationModifier has no field {name!r}{nearest(name, known)}"
            )
    return QuantizationModifier(
        **{name: value for name, value in given.items() if value is not None}
    )


def _require_modifier(name: str) -> None:
    if name == "QuantizationModifier":
        return
    if name in OTHER_MODIFIERS:
        raise ConfigError(f"recipe: {name} is not implemented; {OTHER_MODIFIERS[name]}")
    raise ConfigError(
        f"recipe: {name} is unknown{nearest(name, ['QuantizationModifier', *OTHER_MODIFIERS])}; "
        "Freight has QuantizationModifier only"
    )
