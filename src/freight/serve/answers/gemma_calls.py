"""Tool calls of Gemma 4. Keys have no quotes, and strings have special quotes:
`{city:<|"|>Rome<|"|>,days:2}`. Parsing is linear.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freight.base.fields import JsonObject
from freight.serve.answers.argument_types import bare, resolved, shapes_of
from freight.serve.answers.tagged_calls import Literal, TokenIn, bounds_of, text_rules

_BLANKS = re.compile(r"\s*")
_KEY = re.compile(r"[^\s{}\[\]:,<>]{1,256}")
_WORD = re.compile(r"[^\s{}\[\],<>][^{}\[\],<>\n]{0,4000}")  # up to the end of a bare value
_POINT = re.compile(r"-?(?:0|[1-9]\d*)\.")  # a number whose decimals are missing
_CONSTANTS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "none": "null",  # the template prints None for null
}
_DEEPEST = 64  # nested values
_MOST_ITEMS = 64  # of an array in a forced call
_SCALARS = ("integer", "number", "boolean", "null")


@dataclass(frozen=True)
class GemmaValues:
    """Arguments between `{` and `}` after a name. `mark`: the quote of strings."""

    head: str  # the text right before the name
    mark: str

    def read(self, opening: str, body: str, tools: Sequence[JsonObject]) -> list[tuple[str, str]]:
        """Return (name, arguments as JSON) of the call in a region. Raises ValueError."""
        del tools  # not needed: the markup shows the types of values
        text = opening + body
        at = text.index(self.head) + len(self.head)
        begin = text.index("{", at)
        out: list[str] = []
        end = _skip(text, self._value(text, begin, out, 0))
        if end != len(text):
            raise ValueError("text after the arguments")
        return [(text[at:begin].strip(), "".join(out))]

    def ends_within(self, text: str, is_open: bool) -> bool:
        """Return whether a call that goes on with `text` ends within a marked string; is_open:
        whether it does so before.
        """
        return is_open != bool(text.count(self.mark) % 2)

    def _value(self, text: str, at: int, out: list[str], depth: int) -> int:
        """Append the value at `at` to `out`, as JSON; returns its end."""
        if depth > _DEEPEST:
            raise ValueError("values are nested too deeply")
        if text.startswith("{", at):
            return self._items(text, at + 1, "}", out, depth)
        if text.startswith("[", at):
            return self._items(text, at + 1, "]", out, depth)
        if text.startswith(self.mark, at):
            return self._string(text, at, out)
        if text.startswith('"', at):
            value, end = json.JSONDecoder().raw_decode(text, at)
            out.append(json.dumps(value, ensure_ascii=False))
            return end
        match = _WORD.match(text, at)
        if match is None:
            raise ValueError("no value")
        out.append(_scalar(match.group()))
        return match.end()

    def _string(self, text: str, at: int, out: list[str]) -> int:
        begin = at + len(self.mark)
        end = text.index(self.mark, begin)
        out.append(json.dumps(text[begin:end], ensure_ascii=False))
        return end + len(self.mark)

    def _items(self, text: str, at: int, close: str, out: list[str], depth: int) -> int:
        out.append("{" if close == "}" else "[")
        at = _skip(text, at)
        first = True
        while not text.startswith(close, at):
            if not first:
                if not text.startswith(",", at):
                    raise ValueError("no comma between values")
                out.append(", ")
                at = _skip(text, at + 1)
            first = False
            if close == "}":
                at = self._key(text, at, out)
            at = _skip(text, self._value(text, at, out, depth + 1))
        out.append(close)
        return at + 1

    def _key(self, text: str, at: int, out: list[str]) -> int:
        if text.startswith(self.mark, at):
            at = self._string(text, at, out)
        else:
            match = _KEY.match(text, at)
            if match is None:
                raise ValueError("no key")
            out.append(json.dumps(match.group().strip('"'), ensure_ascii=False))
            at = match.end()
        at = _skip(text, at)
        if not text.startswith(":", at):
            raise ValueError("no colon after a key")
        out.append(": ")
        return _skip(text, at + 1)

    def part(self, function: JsonObject, literal: Literal, token_in: TokenIn) -> JsonObject:
        """Return keyword arguments of StructuredOutputs for the arguments of `function`."""
        root = function.get("parameters")
        root = root if isinstance(root, Mapping) else {}
        rules = _Rules(self.mark, literal, token_in, root)
        return {
            "grammar": f"start: {rules.value({'type': 'object'} | dict(root), 0)}\n"
            + "\n".join(rules.lines)
        }


def _scalar(word: str) -> str:
    """Return the JSON of an unquoted value: a constant or a number, else a string."""
    word = word.strip()
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    number = f"{word}0" if _POINT.fullmatch(word) else word
    try:
        value = json.loads(number)
    except ValueError:
        value = None
    known = isinstance(value, int | float) and math.isfinite(value)
    return number if known else json.dumps(word, ensure_ascii=False)


class _Rules:
    """The grammar rules of one function's arguments."""

    def __init__(self, mark: str, literal: Literal, token_in: TokenIn, root: JsonObject) -> None:
        self.lines: list[str] = []
        self._mark = mark
        self._literal = literal
        self._token_in = token_in
        self._root = root
        self._references: dict[str, str] = {}
        self._count = 0

    def value(self, schema: Any, depth: int) -> str:
        """Add the rule of a value that satisfies `schema`; returns the rule's name."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str) and reference in self._references:
            return self._references[reference]
        name = self._new()
        if isinstance(reference, str):
            self._references[reference] = name
        self.lines.append(
            f"{name}: {' | '.join(self._choices(resolved(schema, self._root), depth))}"
        )
        return name

    def _new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _choices(self, schema: JsonObject, depth: int) -> list[str]:
        if depth > _DEEPEST:
            raise ValueError("values are nested too deeply")
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(constants, list):
            return [self._constant(value) for value in constants]
        declared = schema.get("type")
        types: list[Any] = []
        if isinstance(declared, str):
            types = [declared]
        elif isinstance(declared, list):
            types = declared
        if "object" in types or schema.get("properties"):
            return [
                self._object(schema, depth),
                *self._simple(schema, [t for t in types if t != "object"], depth),
            ]
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                return [self.value(branch, depth + 1) for branch in schema[word]]
        return self._simple(schema, types, depth) or self._anything()

    def _simple(self, schema: JsonObject, types: Sequence[Any], depth: int) -> list[str]:
        """Return the alternatives that are not objects."""
        choices = [self._string(bounds_of(schema))] if "string" in types else []
        if "array" in types:
            choices.append(self._array(schema, depth))
        for name in _SCALARS:
            if name in types:
                reduced = {
                    key: value
                    for key, value in schema.items()
                    if key not in ("anyOf", "oneOf", "allOf", "$ref")
                }
                choices.append(f"%json {json.dumps({**bare(reduced), 'type': name})}")
        return choices

    def _anything(self) -> list[str]:
        """Return the alternatives of a value without a schema: any scalar."""
        return [
            self._string((0, None)),
            f"%json {json.dumps({'type': ['number', 'boolean', 'null']})}",
        ]

    def _constant(self, value: Any) -> str:
        return self._literal(self._written(value))

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._mark}{value}{self._mark}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{self._key(key)}:{self._written(item)}' for key, item in value.items())}}}"
        return json.dumps(value)

    def _key(self, name: str) -> str:
        """Return the name of a property as it is written: quoted if it cannot be read otherwise."""
        plain = _KEY.fullmatch(name) is not None and name.strip('"') == name
        return name if plain else f"{self._mark}{name}{self._mark}"

    def _string(self, bounds: tuple[int, int | None]) -> str:
        name = f"{self._new()}_text"
        self.lines += text_rules(name, self._mark, "", bounds, self._literal, self._token_in)
        return f"{self._literal(self._mark)} {name}"

    def _array(self, schema: JsonObject, depth: int) -> str:
        least = _number_of_items(schema.get("minItems"), 0)
        most = _number_of_items(schema.get("maxItems"), _MOST_ITEMS)
        item = self.value(schema.get("items", {}), depth + 1)
        if most == 0:
            return '"[]"'
        items = f'{item} ("," {item}){{{max(least - 1, 0)},{most - 1}}}'
        return f'"[" ({items}){"?" if not least else ""} "]"'

    def _object(self, schema: JsonObject, depth: int) -> str:
        """Return an object with its properties in order, separated by commas whichever are left
        out.
        """
        choices = []
        for properties, required in shapes_of(schema, self._root):
            name = self._new()
            pairs = [
                (
                    f"{self._literal(f'{self._key(key)}:')} {self.value(property_schema, depth + 1)}",
                    key in required,
                )
                for key, property_schema in properties.items()
            ]
            last = len(pairs)
            for index, (pair, needed) in enumerate(pairs):
                self.lines.append(f"{name}_{index}: {pair} {name}_m{index + 1}")
                self.lines[-1] += "" if needed else f" | {name}_{index + 1}"
                self.lines.append(f'{name}_m{index}: "," {pair} {name}_m{index + 1}')
                self.lines[-1] += "" if needed else f" | {name}_m{index + 1}"
            self.lines += [f'{name}_{last}: ""', f'{name}_m{last}: ""']
            choices.append(f'"{{" {name}_0 "}}"')
        return f"({' | '.join(choices)})"


def _number_of_items(value: object, otherwise: int) -> int:
    """Return the value of minItems or maxItems, `otherwise` if it has none that a call can keep."""
    return value if isinstance(value, int) and 0 <= value <= _MOST_ITEMS else otherwise


def _skip(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match else at
