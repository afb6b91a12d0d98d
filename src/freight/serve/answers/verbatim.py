"""The arguments of tool calls as the model wrote them: the text of a value inside JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # the decoder's own, which gives the end too
from typing import Any

_BLANKS = " \t\r\n"
_QUOTE = re.compile(r'\\.|"', re.DOTALL)


def arguments_texts(body: str, arguments: list[Any]) -> list[str] | None:
    """Return the JSON texts of the arguments of several calls, or None if one is not an object.

    body: the text that the model wrote between the tags of the calls. If it is JSON, arguments are
    copied from it unchanged; else, or if a template converted them, json.dumps writes them. None
    and "" count as {}; a string that is the JSON of an object is used as it is. Raises ValueError
    for values that JSON does not have.
    """
    try:
        written = list(_objects(body))
    except (ValueError, IndexError):
        written = []
    texts = []
    at = 0
    for value in arguments:
        if value is None or value == "":
            texts.append("{}")
        elif isinstance(value, str):
            if not isinstance(_loads(value), dict):
                return None
            texts.append(value)
        elif isinstance(value, dict):
            match_index = next(
                (index for index in range(at, len(written)) if written[index][1] == value), None
            )
            if match_index is None:
                text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            else:
                text = written[match_index][0]
                at = match_index + 1
            _loads(text)
            texts.append(text)
        else:
            return None
    return texts


def within_string(text: str, is_open: bool) -> bool:
    """Return whether JSON that goes on with `text` ends within a string; is_open: whether it does
    so before.
    """
    quotes = sum(match.group() == '"' for match in _QUOTE.finditer(text))
    return is_open != bool(quotes % 2)


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _objects(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects that may be arguments, with their text: `text` itself, its members, and
    members of the objects in it.
    """
    value = json.loads(text)
    start = _skip(text, 0)
    if isinstance(value, list):
        for at, end in _elements(text, start):
            yield from _members(text, at, end)
    elif isinstance(value, dict):
        yield from _members(text, start, len(text.rstrip(_BLANKS)))
        yield text.strip(_BLANKS), value


def _elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each element of the array at `at`."""
    decoder = json.JSONDecoder()
    at = _skip(text, at + 1)
    while text[at] != "]":
        _, end = decoder.raw_decode(text, at)
        yield at, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _members(text: str, at: int, end: int) -> Iterator[tuple[str, Any]]:
    """Yield the members of the object at `at` that are objects."""
    decoder = json.JSONDecoder()
    if text[at] != "{":
        return
    at = _skip(text, at + 1)
    while text[at] != "}" and at < end:
        _, at = scanstring(text, at + 1, True)
        at = _skip(text, _skip(text, at) + 1)  # the colon
        value, stop = decoder.raw_decode(text, at)
        if isinstance(value, dict):
            yield text[at:stop], value
        at = _skip(text, stop)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in _BLANKS and at < len(text):
        at += 1
    return at
