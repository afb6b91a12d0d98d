"""Producers' ways to refer to modules, as regular expressions matched from the start of a name.

Exact names may omit the prefix `model.`, and the name of a merged projection (`qkv_proj`,
`gate_up_proj`) also matches each of its parts. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Mapping

from freight.config.fields import JsonObject
from freight.errors import CheckpointError
from freight.fp8.patterns import FilePattern
from freight.fp8.scheme import LinearScheme, ModulePattern, Rule

Syntax = Callable[[str], ModulePattern]

CLASSES = ("Linear", "LinearBase")  # every module that is looked up is one of these
_MERGED = {
    "qkv_proj": "(?:q|k|v|qkv)_proj",
    "gate_up_proj": "(?:gate|up|gate_up)_proj",
    "in_proj_qkvz": "in_proj_(?:qkv|z|qkvz)",
    "in_proj_ba": "in_proj_(?:b|a|ba)",
}


def every() -> re.Pattern[str]:
    """Match every module."""
    return re.compile("")


def exact(name: str) -> ModulePattern:
    """Match one module, or, after `re:`, an expression from the start of the name
    (compressed-tensors).
    """
    if name.startswith("re:"):
        return FilePattern(name.removeprefix("re:"), "config.json")
    return re.compile(rf"{_name(name)}$")


def class_or_exact(name: str) -> ModulePattern:
    """Match a module class, or as `exact` (compressed-tensors)."""
    return every() if name in CLASSES else exact(name)


def searched(name: str) -> ModulePattern:
    """Match a module and its submodules, the end of a name, or an expression that ends at a dot
    (transformers, AutoFP8).

    An expression after `re:` is searched anywhere, as in AutoFP8.
    """
    if name.startswith("re:"):
        return FilePattern(f".*?(?:{name.removeprefix('re:')})", "config.json")
    forms = [rf"{_name(name)}(?:\.|$)", rf".*{re.escape(name)}$"]
    with contextlib.suppress(CheckpointError):  # a plain name need not be an expression
        forms.append(FilePattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", "config.json").expression)
    return FilePattern("|".join(forms), "config.json")


def wildcard(name: str) -> ModulePattern:
    """Match `*`, `?` and `[...]` over the full name, or `re:` as in `exact` (Quark)."""
    if name.startswith("re:"):
        return exact(name)
    return FilePattern(fnmatch.translate(name), "config.json")


def wildcard_or_part(name: str) -> ModulePattern:
    """Match `*`, `?` and `[...]`, or, as in older files, a part of the name between dots
    (ModelOpt).
    """
    if any(sign in name for sign in "*?["):
        return FilePattern(fnmatch.translate(name), "config.json")
    return re.compile(rf"(?:.*\.)?{_name(name)}(?:\.|$)")


def contained(name: str) -> re.Pattern[str]:
    """Match every module whose name has this text in it (AutoAWQ)."""
    return re.compile(f".*{re.escape(name)}")


def names(declared: JsonObject, key: str) -> list[str]:
    """Return the list of names (or the keys of the object) under `key`. Raises CheckpointError for
    anything else.
    """
    found = declared.get(key) or []
    if not isinstance(found, list | Mapping) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"config.json: {key} = {found!r} is not a list of module names")
    return list(found)


def rules(
    declared: JsonObject,
    key: str,
    syntax: Syntax,
    linear: Callable[[str], LinearScheme | None] | None = None,
) -> list[Rule]:
    """Return a rule for each of `names`: the scheme that `linear` returns for it, or None (not
    quantized).
    """
    return [Rule(syntax(name), linear(name) if linear else None) for name in names(declared, key)]


def _name(name: str) -> str:
    """Return the expression of one module's full name."""
    head, dot, last = name.removeprefix("model.").rpartition(".")
    return rf"(?:model\.)?{re.escape(head + dot)}{_MERGED.get(last, re.escape(last))}"
