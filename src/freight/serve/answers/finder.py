"""Detection of the regions of an answer: the part of a response template given to transformers'
parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freight.base.fields import JsonDict, JsonObject
from freight.text.tokenizer import load_response_template

if TYPE_CHECKING:
    from freight.text.tokenizer import ResponseTemplate

_MARKUP = ("open", "open_pattern", "close", "close_pattern")
_AS_TEXT: JsonDict = {
    "content": "text",
    "content_args": {"strip": False},
    "transform": "{content}",
}


@dataclass(frozen=True)
class Finder:
    """A template for transformers' parser, and a fast test for text that has no markup.

    first_of   region (None: outside of markup) -> the characters that can begin markup there;
               regions whose markup has no known first characters are absent
    """

    template: ResponseTemplate
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
    text_field = {key: value for key, value in field.items() if key in _MARKUP}
    return text_field | _AS_TEXT


def load_fields(fields: JsonObject, implicit: str) -> ResponseTemplate:
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
    for name, field in fields.items():
        first = _first(field, "close")
        if first:
            first_of[name] = first
    return Finder(load_fields(fields, implicit), first_of)


def _first(field: JsonObject, key: str) -> frozenset[str]:
    """Return the characters that can begin the markup of `field`; empty if they are not known."""
    literals = field.get(key, ())
    if isinstance(literals, str) and literals:
        literals = (literals,)
    if literals:
        return frozenset(text[0] for text in literals)
    pattern = field.get(f"{key}_pattern", "").replace("\\|", "")
    begins = re.match(r"(?:\(\?=|\(\?:(?=<[^()|]*\)\?<))?(?:\\?(<)|\\(\[))(?![*?{])", pattern)
    if begins is None or "|" in pattern:
        return frozenset()
    return frozenset(begins[1] or begins[2])


def strings_in(value: object) -> list[str]:
    """Return all strings in a template."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    strings: list[str] = []
    if isinstance(value, list):
        for part in value:
            strings += strings_in(part)
    return strings
