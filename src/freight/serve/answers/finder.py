"""Detection of the regions of an answer: the part of a response template given to transformers'
parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freight.base.fields import JsonDict, JsonObject
from freight.text.tokenizer import load_response_template


@dataclass(frozen=True)
class Finder:
    """A template for transformers' parser, and a fast test for text that has no markup.

    first_of   region (None: outside of markup) -> the characters that can begin markup there;
               regions whose markup has no known first characters are absent
    """

    template: Any
    first_of: Mapping[str | None, frozenset[str]]


def searchable(field: JsonDict) -> JsonDict:
    """Remove white space from the beginning of patterns, in place; returns `field`.

    Matching it would take quadratic time, and `Pieces` drops it anyway.
    """
    for key in ("open_pattern", "close_pattern"):
        if key in field:
            field[key] = field[key].removeprefix(r"\s*") or field[key]
    return field


def as_text(field: JsonObject) -> JsonDict:
    """Return `field` as a plain text field. The transform is needed because patterns may have named
    groups.
    """
    other_keys = {
        key: field[key]
        for key in ("open", "open_pattern", "close", "close_pattern")
        if key in field
    }
    return {
        **other_keys,
        "content": "text",
        "content_args": {"strip": False},
        "transform": "{content}",
    }


def load_fields(fields: JsonObject, implicit: str) -> Any:
    """Load a template of `fields` and of text outside them. It treats any prefix as part of the
    answer.
    """
    return load_response_template(
        {"start_anchor_pattern": "(?!)", "fields": {**fields, implicit: {"content": "text"}}}
    )


def finder_of(fields: JsonObject, implicit: str) -> Finder:
    opens = [_first(field, "open") for field in fields.values()]
    first_of: dict[str | None, frozenset[str]] = {}
    if all(opens):
        first_of[None] = frozenset().union(*opens)
    first_of.update(
        {name: first for name, field in fields.items() if (first := _first(field, "close"))}
    )
    return Finder(load_fields(fields, implicit), first_of)


def _first(field: JsonObject, key: str) -> frozenset[str]:
    """Return the characters that can begin the markup of `field`; empty if they are not known."""
    literals = field.get(key, ())
    if isinstance(literals, str) and literals:
        return frozenset(literals[0])
    if literals:
        return frozenset(text[0] for text in literals)
    pattern = field.get(f"{key}_pattern", "").replace("\\|", "")
    begins = re.match(r"(?:\(\?=|\(\?:(?=<[^()|]*\)\?<))?(?:\\?(<)|\\(\[))(?![*?{])", pattern)
    if begins is None or "|" in pattern:
        return frozenset()
    return frozenset(begins[1] or begins[2])


def strings_in(value: Any) -> list[str]:
    """Return all strings in a template."""
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in strings_in(part)]
    if isinstance(value, list):
        return [text for part in value for text in strings_in(part)]
    return [value] if isinstance(value, str) else []
