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
    recipes = [resolve_modifier(modifier) for modifier in _modifiers(recipe)]
    if len(recipes) != 1:
        count = f"{len(recipes)} QuantizationModifiers" if recipes else "no QuantizationModifier"
        raise ConfigError(
            f"the recipe has {count}; give one, with scheme= for the weights and kv_cache_scheme= for the cache"
        )
    return recipes[0]


def _modifiers(recipe: object) -> Iterator[object]:
    """Yield modifiers as objects; each is checked by `resolve_modifier`, before or after."""
    if isinstance(recipe, str | Path):
        yield from _from_mapping(_parse(recipe))
    elif isinstance(recipe, Mapping):
        yield from _from_mapping(recipe)
    elif isinstance(recipe, list | tuple):
        for part in recipe:
            yield from _modifiers(part)
    elif recipe is None:
        raise ConfigError(
            "oneshot needs a recipe: YAML, or QuantizationModifier(targets='Linear', scheme='FP8', …)"
        )
    else:
        _require_modifier(type(recipe).__name__)
        yield recipe


def _parse(recipe: str | Path) -> JsonObject:
    text = str(recipe)
    is_named = ":" not in text or re.search(r"\.(ya?ml|json|md)$", text)
    if isinstance(recipe, Path) or (is_named and "\n" not in text.strip()):
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
    known = [field.name for field in fields(QuantizationModifier)]
    content = {}
    for key, value in options.items():
        name = str(key)
        if name in _UNUSED:
            continue
        if name not in known:
            raise ConfigError(
                f"recipe: QuantizationModifier has no field {name!r}{nearest(name, known)}"
            )
        if value is not None:
            content[name] = value
    return QuantizationModifier(**content)


def _require_modifier(name: str) -> None:
    if name == "QuantizationModifier":
        return
    if name in OTHER_MODIFIERS:
        raise ConfigError(f"recipe: {name} is not implemented; {OTHER_MODIFIERS[name]}")
    raise ConfigError(
        f"recipe: {name} is unknown{nearest(name, ['QuantizationModifier', *OTHER_MODIFIERS])}; "
        "Freight has QuantizationModifier only"
    )
