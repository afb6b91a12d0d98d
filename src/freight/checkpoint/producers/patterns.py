"""Producers' ways to refer to modules, as regular expressions matched from the start of a name.

Exact names may omit the prefix `model.`, and the name of a merged projection (`qkv_proj`,
`gate_up_proj`) also matches each of its parts. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, repeat

from freight.base.fields import JsonObject
from freight.base.patterns import MOST_EXPRESSIONS, FilePattern
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.fp8.scheme import LinearScheme, ModulePattern, Rule

Syntax = Callable[[str], ModulePattern]

_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*\Z")

CLASSES = ("Linear", "LinearBase")  # every module that is looked up is one of these
# Names of a merged projection and of its parts
_FORMS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "gate_up_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
    "in_proj_ba": ("in_proj_b", "in_proj_a", "in_proj_ba"),
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
    listed = declared.get(key) or []
    if not isinstance(listed, list | Mapping) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"config.json: {key} = {listed!r} is not a list of module names")
    return list(listed)


def rules(
    declared: JsonObject,
    key: str,
    syntax: Syntax,
    linear: Callable[[str], LinearScheme | None] | None = None,
) -> list[Rule]:
    """Return a rule for each of `names`: the scheme that `linear` returns for it, or None (not
    quantized).
    """
    listed = names(declared, key)
    schemes = map(linear, listed) if linear else repeat(None)
    return list(joined(zip(listed, schemes, strict=False), syntax, key))


def all_but(
    declared: JsonObject, key: str, syntax: Syntax, linear: LinearScheme | None
) -> tuple[Rule, ...]:
    """Return the rules of a scheme for all modules but those of `names`."""
    return (*rules(declared, key, syntax), Rule(every(), linear))


def weight_format(rules: Iterable[Rule]) -> Format | None:
    """Return the format of a scheme's weights, E4M3; None if no rule quantizes any."""
    return Format.E4M3FN if any(rule.linear for rule in rules) else None


def joined(
    schemes: Iterable[tuple[str, LinearScheme | None]], syntax: Syntax, key: str
) -> Iterator[Rule]:
    """Give the rules of (name, scheme) in their order. Plain names that follow each other and have
    the same scheme are one rule, which looks a module up: lists of mixtures have a name for each
    matrix of each expert.

    Raises CheckpointError for more than MOST_EXPRESSIONS others.
    """
    how = _LISTED.get(syntax)
    num_expressions = 0
    for (is_plain, linear), group in groupby(
        schemes, lambda entry: (how is not None and _is_plain(entry[0]), entry[1])
    ):
        members = [name for name, _ in group]
        if is_plain and how is not None and len(members) > 1:
            yield Rule(ListedNames(frozenset(how.entries(members)), how.parts), linear)
            continue
        num_expressions += len(members)
        if num_expressions > MOST_EXPRESSIONS:
            raise CheckpointError(
                f"config.json: {key} has more than {MOST_EXPRESSIONS:,} expressions; list plain names of modules, or "
                "write fewer expressions"
            )
        for name in members:
            yield Rule(syntax(name), linear)


@dataclass(frozen=True)
class ListedNames:
    """Many plain names, found in a time that does not grow with their number.

    parts   what of a module's name selects it if it is in `entries`
    """

    entries: frozenset[str]
    parts: Callable[[str], Iterable[str]]

    def match(self, name: str) -> bool:
        """Return whether a module is listed."""
        return any(part in self.entries for part in self.parts(name))


@dataclass(frozen=True)
class _Lookup:
    """How `ListedNames` do what the expressions of a syntax do."""

    entries: Callable[[Iterable[str]], Iterable[str]]
    parts: Callable[[str], Iterable[str]]


def _is_plain(name: str) -> bool:
    return name not in CLASSES and _PLAIN.match(name) is not None


def _all_forms(names: Iterable[str]) -> Iterator[str]:
    """Give the names without `model.`, and for merged projections those of all parts."""
    for name in names:
        head, dot, last = name.removeprefix("model.").rpartition(".")
        for form in _FORMS.get(last, (last,)):
            yield f"{head}{dot}{form}"


def _whole(name: str) -> Iterable[str]:
    return (name.removeprefix("model."),)


def _runs(name: str) -> Iterator[str]:
    """Give each part of a name between dots."""
    words = name.split(".")
    for begin in range(len(words)):
        for end in range(begin + 1, len(words) + 1):
            yield ".".join(words[begin:end])


def _starts_and_ends(names: Iterable[str]) -> Iterator[str]:
    """Give `^` and each form, which a module or the module around it has, and `$` and the name, in
    which the name of a module ends.
    """
    for name in names:
        yield f"${name}"
        for form in _all_forms([name]):
            yield f"^{form}"


def _starts_and_ends_of(name: str) -> Iterator[str]:
    for begin in range(len(name)):
        yield f"${name[begin:]}"
    words = name.removeprefix("model.").split(".")
    for end in range(1, len(words) + 1):
        yield "^" + ".".join(words[:end])


_LISTED: Mapping[Syntax, _Lookup] = {
    exact: _Lookup(_all_forms, _whole),
    class_or_exact: _Lookup(_all_forms, _whole),
    wildcard: _Lookup(iter, lambda name: (name,)),
    wildcard_or_part: _Lookup(_all_forms, _runs),
    searched: _Lookup(_starts_and_ends, _starts_and_ends_of),
}


def _name(name: str) -> str:
    """Return the expression of one module's full name."""
    head, dot, last = name.removeprefix("model.").rpartition(".")
    forms = "|".join(_FORMS.get(last, (re.escape(last),)))
    return rf"(?:model\.)?{re.escape(head + dot)}(?:{forms})"
