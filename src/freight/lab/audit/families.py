"""What each engine does with a form of names in a family of models, as tools/engine_rules.py read
it from the sources.

`engine_families.json` in this folder has the tables. What is not in them was not read, or could
not be followed, and is None here. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from freight.base.fields import JsonObject
from freight.lab.audit.rules import (
    CT,
    FP8_QUARK,
    MODELOPT,
    NONE,
    SGLANG_STRATEGIES,
    SGLANG_WITH_SCALES,
    SGLANG_WITHOUT,
    Effect,
    Engine,
    NameRule,
)

# The forms of the tables, by the end of a tensor's name.
_FORMS: Mapping[str, str] = {
    "plain": r"self_attn\.[kv]_scale",
    "inside": r"self_attn\.attn\.[kv]_scale",
    "modelopt": r"self_attn\.([kv])_proj\.\1_scale",
    "output": r"self_attn\.[kv]_proj\.output_scale",
    "fused": r"self_attn\.qk(?:qk)?v_proj\.[kv]_scale",
    "cache": r"self_attn\.[kv]_cache\.scale",
    "both": r"self_attn\.kv_scale",
    "mixer": r"mixer\.([kv])_proj\.\1_scale",
}
_EFFECTS = {"uses": Effect.USED, "converts": Effect.CONVERTED, "drops": Effect.IGNORED}
_WHY = {
    Effect.USED: "",
    Effect.CONVERTED: "kv_scale is rounded to the model's dtype as it is read",
    Effect.IGNORED: "its loader finds no parameter of this name, and goes on",
}


@cache
def tables() -> JsonObject:
    """Return the file: `engines`, `profiles`, and `architectures` by model_type."""
    content: JsonObject = json.loads(
        (files(__package__) / "engine_families.json").read_text(encoding="utf-8")
    )
    return content


def form_of(tail: str) -> str | None:
    """Return the form of a name from `self_attn` or `mixer` on."""
    return next((form for form, pattern in _FORMS.items() if re.fullmatch(pattern, tail)), None)


def family_of(engine: Engine, architecture: str, model_type: str) -> str:
    """Return what the engine chooses a model's class by: TGI by model_type, the others by the first
    of `architectures`.
    """
    if engine is Engine.TGI:
        return model_type
    return architecture or str(tables()["architectures"].get(model_type, model_type))


def known(
    engine: Engine, version: str, family: str, tail: str, method: str, strategy: str
) -> NameRule | None:
    """Return what becomes of a name; None if that was not read. `version` is one of `READ`."""
    table = tables()["engines"].get(engine, {}).get(version)
    form = form_of(tail)
    if table is None or form is None or family not in table["families"]:
        return None
    row = table["families"][family]
    situation = _situation(engine, table["methods"], method, strategy)
    text = tables()["profiles"][row["profile"]].get(situation, {}).get(form)
    if text is None:
        return None
    source = f"{engine} {version}: {row['at'][text]}"
    if text.startswith("stops"):
        # What vLLM raises depends on the module where the name ends: ValueError or AttributeError.
        error = ""
        if engine is not Engine.VLLM:
            error = f" with {text.removeprefix('stops: ')}"
        return NameRule(
            engine=engine,
            names=".*",
            effect=Effect.REFUSED,
            why=f"its loader stops at this name{error}",
            source=source,
        )
    effect = _EFFECTS[text]
    if effect is Effect.USED and form == "both":
        return NameRule(
            engine=engine,
            names=".*",
            effect=effect,
            why="kv_scale is loaded as K's scale",
            source=source,
            sides="k",
        )
    return NameRule(engine=engine, names=".*", effect=effect, why=_WHY[effect], source=source)


def _situation(
    engine: Engine, methods: Mapping[str, bool], method: str, strategy: str
) -> str | None:
    """Return the situation of the tables: whether attention has scales under this method, and whose
    names are mapped.
    """
    if engine is Engine.TGI:
        return "any"
    if engine is Engine.SGLANG:
        if method in SGLANG_WITHOUT or (
            method in CT | MODELOPT and strategy not in SGLANG_STRATEGIES
        ):
            return "no_scales"
        return "scales" if method in SGLANG_WITH_SCALES else None
    if method == NONE:
        return "undeclared"
    if method in FP8_QUARK:
        return "scales_and_outputs"
    has_scales = methods.get(method)
    if has_scales is None:
        return None
    return "scales" if has_scales else "no_scales"
