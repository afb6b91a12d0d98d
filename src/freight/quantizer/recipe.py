"""Recipes of llm-compressor, read as Recipe. Imports no torch, reads no weight.

A recipe is YAML text, the path of a YAML or JSON file, a modifier, or a list of these: a
`QuantizationModifier` or `GPTQModifier`, and before it at most one of `AWQModifier`,
`SmoothQuantModifier` and `SpinQuantModifier`. Another modifier, or an unknown key, is an error that
names it. Only keys that llm-compressor does not use either, such as `start` and `end`, and those
that change no weight are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

import yaml

from freight.base.fields import JsonObject
from freight.base.files import read_text
from freight.errors import ConfigError, nearest, shown
from freight.quantizer.modifier import (
    GPTQ,
    GPTQModifier,
    QuantizationModifier,
    Recipe,
    resolve_modifier,
)
from freight.quantizer.plan import WeightScheme
from freight.quantizer.schemes import require_mapping
from freight.quantizer.transform_modifiers import (
    AWQModifier,
    SmoothQuantModifier,
    SpinQuantModifier,
    Transform,
    quantizes,
    resolve_transform,
)

Modifier = QuantizationModifier | SmoothQuantModifier | SpinQuantModifier
_QUANTIZERS = {"QuantizationModifier": QuantizationModifier, "GPTQModifier": GPTQModifier}
_TRANSFORMS = {
    "AWQModifier": AWQModifier,
    "SmoothQuantModifier": SmoothQuantModifier,
    "SpinQuantModifier": SpinQuantModifier,
}
MODIFIERS: dict[str, type[Modifier]] = _QUANTIZERS | _TRANSFORMS
_PRUNING = "prune with llm-compressor, save in 16 bits, and quantize the result here"
OTHER_MODIFIERS = {  # llm-compressor's other modifiers -> what to do instead
    "LogarithmicEqualizationModifier": "use SmoothQuantModifier",
    "QuIPModifier": "its rotations are done at run time; use SpinQuantModifier, whose rotations are folded",
    "AutoRoundModifier": "use GPTQModifier",
    "SparseGPTModifier": _PRUNING,
    "WandaPruningModifier": _PRUNING,
    "MagnitudePruningModifier": _PRUNING,
    "ConstantPruningModifier": _PRUNING,
    "REAPPruningModifier": _PRUNING,
}


def read_recipe(recipe: object) -> Recipe:
    """Read `recipe` in any of its forms, resolved. Raises ConfigError for a recipe without exactly
    one modifier that quantizes, or with two transforms, and for what Freight does not do.
    """
    transform: Transform | None = None
    of_transform: Recipe | None = None  # what an AWQModifier says itself
    quantized: list[Recipe] = []
    for modifier in _modifiers(recipe):
        name = type(modifier).__name__
        if name not in _TRANSFORMS:
            quantized.append(resolve_modifier(modifier))
            continue
        if transform is not None or quantized:
            raise ConfigError(
                f"the recipe has {name} after another modifier; give one of AWQModifier, SmoothQuantModifier and "
                "SpinQuantModifier, before the one that quantizes"
            )
        transform = resolve_transform(modifier)
        if quantizes(modifier):
            of_transform = resolve_modifier(modifier)
    if of_transform is not None and not quantized:
        quantized = [of_transform]
    if len(quantized) != 1:
        count = (
            f"{len(quantized)} modifiers that quantize" if quantized else "no QuantizationModifier"
        )
        raise ConfigError(
            f"the recipe has {count}; give one, with scheme= for the weights and kv_cache_scheme= for the cache"
        )
    if of_transform not in (None, _without_gptq(quantized[0])):
        raise ConfigError(
            "the recipe has AWQModifier with a scheme, targets or ignore other than those of the modifier after it; "
            "leave them out of AWQModifier"
        )
    return quantized[0] if transform is None else _transformed(quantized[0], transform)


def _without_gptq(recipe: Recipe) -> Recipe:
    return replace(recipe, method=None, damping=None, act_order=None)


def _transformed(recipe: Recipe, transform: Transform) -> Recipe:
    if recipe.weights is WeightScheme.NONE:
        raise ConfigError(
            f"the recipe has {transform.method}, which changes nothing without quantized weights; add scheme="
        )
    method = transform.method
    if recipe.method == GPTQ:
        method += f",{GPTQ}"
    return replace(
        recipe, method=method, smoothing=transform.smoothing, duo_scaling=transform.duo_scaling
    )


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


def _from_mapping(content: JsonObject) -> Iterator[Modifier]:
    """Yield the modifiers of stages, which contain groups, `…_modifiers`, which contain modifiers.
    Groups may also come without a stage.
    """
    for key, value in content.items():
        if str(key).endswith("_stage"):
            yield from _from_mapping(require_mapping(f"recipe: {key}", value))
        elif str(key).endswith("modifiers"):
            for name, options in require_mapping(f"recipe: {key}", value).items():
                _require_modifier(str(name))
                options = require_mapping(f"recipe: {name}", options or {})
                yield _modifier(str(name), options)
        elif value and (key, value) != ("run_type", "oneshot"):
            raise ConfigError(
                f"recipe: {key!r} is not understood; a recipe is quant_stage: quant_modifiers: QuantizationModifier: …"
            )


# keys of every modifier that oneshot does not use, and keys of older versions that change no weight
_UNUSED = (
    "start",
    "end",
    "update",
    "index",
    "group",
    "offload_hessians",
    "sequential_targets",
    "max_chunk_memory",
)
_NULL_SAYS_SOMETHING = ("actorder",)


def _modifier(name: str, options: JsonObject) -> Modifier:
    known = [field.name for field in fields(MODIFIERS[name])]
    content = {}
    for key, value in options.items():
        option = str(key)
        if option in _UNUSED:
            continue
        if option not in known:
            raise ConfigError(f"recipe: {name} has no field {option!r}{nearest(option, known)}")
        if value is not None or option in _NULL_SAYS_SOMETHING:
            content[option] = value
    return MODIFIERS[name](**content)


def _require_modifier(name: str) -> None:
    if name in MODIFIERS:
        return
    if name in OTHER_MODIFIERS:
        raise ConfigError(f"recipe: {name} is not implemented; {OTHER_MODIFIERS[name]}")
    raise ConfigError(
        f"recipe: {name} is unknown{nearest(name, [*MODIFIERS, *OTHER_MODIFIERS])}; known are {', '.join(MODIFIERS)}"
    )
