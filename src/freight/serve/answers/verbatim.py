"""The arguments of tool calls as the model wrote them: the text of a value inside JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from freight.base.fields import JsonDict
from freight.serve.answers.argument_types import strict_json
from freight.serve.answers.scanner import Scanner

_BLANKS = " \t\r\n"
_QUOTE = re.compile(r'\\.|"', re.DOTALL)


def arguments_texts(body: str, arguments: Sequence[object]) -> list[str] | None:
    """Return the JSON texts of the arguments of several calls, or None if one is not an object.

    body: the text that the model wrote between the tags of the calls. If it is JSON, arguments are
    copied from it unchanged; else, or if a template converted them, json.dumps writes them. None
    and "" count as {}; a string that is the JSON of an object is used as it is. Raises ValueError
    for values that JSON does not have.
    """
    try:
        written = list(_objects(body))
    except ValueError:
        written = []
    texts = []
    for value in arguments:
        if value is None or value == "":
            text = "{}"
        elif isinstance(value, str):
            text = value
        else:
            text = _written_as(value, written)
        if not isinstance(strict_json(text), dict):
            return None
        texts.append(text)
    return texts


def _written_as(value: object, written: list[tuple[str, JsonDict]]) -> str:
    """Return the text of the first object in `written` that equals `value`, which is removed with
    those before it; what json.dumps writes if there is none.
    """
    for index, (text, written_value) in enumerate(written):
        if written_value == value:
            del written[: index + 1]
            return text
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def within_string(text: str, is_open: bool) -> bool:
    """Return whether JSON that goes on with `text` ends within a string; is_open: whether it does
    so before.
    """
    quotes = sum(match.group() == '"' for match in _QUOTE.finditer(text))
    return is_open != bool(quotes % 2)


def _objects(text: str) -> Iterator[tuple[str, JsonDict]]:
    """Yield the objects that may be arguments, with their text: `text` itself, its members, and
    members of the objects in it.
    """
    value = json.loads(text)
    text = text.strip(_BLANKS)
    if isinstance(value, list):
        for at in _elements(text):
            yield from _members(text, at)
    elif isinstance(value, dict):
        yield from _members(text, 0)
        yield text, value


def _elements(text: str) -> Iterator[int]:
    """Yield the beginning of each element of the array `text`."""
    scan = Scanner(text)
    scan.expect("[", "no array")
    while not scan.accept("]"):
        yield scan.at
        _value_in(scan)


def _members(text: str, at: int) -> Iterator[tuple[str, JsonDict]]:
    """Yield the members that are objects, if an object is at `at`."""
    scan = Scanner(text, at)
    if not scan.accept("{"):
        return
    scan.blanks()
    while not scan.accept("}"):
        scan.json()
        scan.blanks()
        scan.expect(":", "no colon")
        begin = scan.at
        value, end = _value_in(scan)
        if isinstance(value, dict):
            yield text[begin:end], value


def _value_in(scan: Scanner) -> tuple[object, int]:
    """Read a value of an array or an object, and the comma behind it; returns its end too."""
    value = scan.json()
    end = scan.at
    scan.blanks()
    if scan.accept(","):
        scan.blanks()
    return value, end
