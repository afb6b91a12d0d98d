"""Where the regions of an answer begin and end: the part of a response template that transformers'
parser is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freight.text.tokenizer import load_response_template


@dataclass(frozen=True)
class Finder:
    """Finds regions: a template for transformers' parser, and characters without which a text goes
    on in its region.

    first_of   region (None: outside of markup) -> the characters with which markup can begin there;
               regions that are not in it have markup of which that is not known
    """

    template: Any
    first_of: Mapping[str | None, frozenset[str]]


def searchable(field: dict[str, Any]) -> dict[str, Any]:
    """`field` without white space at the ends of its patterns: it would cost quadratic time, and we
    drop it anyway.
    """
    for key in ("open_pattern", "close_pattern"):
        if key in field:
            field[key] = field[key].removeprefix(r"\s*") or field[key]
    return field


def as_text(field: Mapping[str, Any]) -> dict[str, Any]:
    """`field` as plain text. A transform has to be there, because patterns may have named groups."""
    kept = {
        key: field[key]
        for key in ("open", "open_pattern", "close", "close_pattern")
        if key in field
    }
    return {**kept, "content": "text", "content_args": {"strip": False}, "transform": "{content}"}


def load_fields(fields: Mapping[str, Any], implicit: str) -> Any:
    """A template of `fields` and text outside of them, which takes any prefix as a part of the
    answer.
    """
    return load_response_template(
        {"start_anchor_pattern": "(?!)", "fields": {**fields, implicit: {"content": "text"}}}
    )


def finder_of(fields: Mapping[str, Any], implicit: str) -> Finder:
    opens = [_first(field, "open") for field in fields.values()]
    first_of: dict[str | None, frozenset[str]] = {}
    if all(opens):
        first_of[None] = frozenset().union(*opens)
    first_of.update(
        {name: first for name, field in fields.items() if (first := _first(field, "close"))}
    )
    return Finder(load_fields(fields, implicit), first_of)


def _first(field: Mapping[str, Any], key: str) -> frozenset[str]:
    """The characters with which the markup in `field` begins; empty where that is not known."""
    literals = field.get(key, ())
    if literals:
        return frozenset(
            text[0] for text in ([literals] if isinstance(literals, str) else literals)
        )
    pattern = field.get(f"{key}_pattern", "")
    begins = re.match(
        r"(?:\(\?=|\(\?:(?=<[^()|]*\)\?<))?(?:\\?(<)|\\(\[))(?![*?{])", pattern.replace("\\|", "")
    )
    return (
        frozenset(begins[1] or begins[2])
        if begins and "|" not in pattern.replace("\\|", "")
        else frozenset()
    )


def strings_in(value: Any) -> list[str]:
    """All strings in a template."""
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in strings_in(part)]
    if isinstance(value, list):
        return [text for part in value for text in strings_in(part)]
    return [value] if isinstance(value, str) else []
