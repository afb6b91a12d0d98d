"""Calls as JSON objects with a name and arguments: Hermes, Llama 3, and in lists Granite 3,
Phi-4-mini and others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from freight.base.fields import JsonObject
from freight.serve.answers.argument_types import arguments_schema
from freight.serve.answers.scanner import Scanner
from freight.serve.answers.tagged_calls import Literal, TokenIn
from freight.serve.answers.verbatim import arguments_texts, within_string

_BETWEEN = re.compile(r"[\s,;]*")


@dataclass(frozen=True)
class ListedCalls:
    """The syntax of a list of calls, or of several objects in a row, with name and arguments.

    implied  whether a name without arguments is also a call
    """

    implied: bool = True

    def read(self, opening: str, body: str, tools: Sequence[JsonObject]) -> list[tuple[str, str]]:
        """Return (name, arguments as JSON) of the calls in a region. Raises ValueError, KeyError or
        TypeError.
        """
        del opening, tools
        named_texts: list[tuple[str, str]] = []
        for text, value in _values(body):
            calls = value if isinstance(value, list) else [value]
            names: list[str] = []
            arguments: list[object] = []
            for call in calls:
                function = call.get("function", call)
                arguments.append(_arguments(function, self.implied))
                names.append(function["name"])
            texts = arguments_texts(text, arguments)
            if texts is None:
                raise ValueError("arguments are not an object")
            named_texts += zip(names, texts, strict=True)
        return named_texts

    def ends_within(self, text: str, is_open: bool) -> bool:
        """Return whether a region that goes on with `text` ends within a string; is_open: whether
        it does so before.
        """
        return within_string(text, is_open)

    def part(self, function: JsonObject, literal: Literal, token_in: TokenIn) -> JsonObject:
        """Return keyword arguments of StructuredOutputs for the arguments of `function`."""
        del literal, token_in
        return {"json": arguments_schema(function)}


def _arguments(function: JsonObject, implied: bool) -> Any:
    """Return the arguments of a call; models also name them parameters. Raises ValueError if they
    may have another name.
    """
    for key in ("arguments", "parameters"):
        if key in function:
            return function[key]
    if not implied or function.keys() - {"name", "type", "id"}:
        raise ValueError("no arguments")
    return None


def _values(text: str) -> Iterator[tuple[str, Any]]:
    """Yield each JSON value in `text`, with its text."""
    scan = Scanner(text)
    scan.blanks()
    while not scan.is_at_end:
        begin = scan.at
        value = scan.json()
        yield text[begin : scan.at], value
        scan.match(_BETWEEN)
