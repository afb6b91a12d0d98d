"""Tool calls of Gemma 4. Keys have no quotes, and strings have special quotes:
`{city:<|"|>Rome<|"|>,days:2}`. Parsing is linear.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from freight.base.fields import JsonObject
from freight.serve.answers.argument_types import (
    allowed_values,
    bare,
    mapping_of,
    resolved,
    shapes_of,
)
from freight.serve.answers.scanner import Scanner
from freight.serve.answers.tagged_calls import Literal, TokenIn, bounds_of, text_rules

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
_COMBINING = ("anyOf", "oneOf", "allOf", "$ref")
_SCALARS = ("integer", "number", "boolean", "null")


@dataclass(frozen=True)
class GemmaValues:
    """Arguments between `{` and `}` after a name. `mark`: the quote of strings."""

    head: str  # the text right before the name
    mark: str

    def read(self, opening: str, body: str, tools: Sequence[JsonObject]) -> list[tuple[str, str]]:
        """Return (name, arguments as JSON) of the call in a region. Raises ValueError."""
        del tools  # not needed: the markup shows the types of values
        scan = Scanner(opening + body)
        scan.until(self.head)
        at = scan.at
        begin = scan.text.index("{", at)
        scan.at = begin
        arguments = _Values(scan, self.mark)
        arguments.value(0)
        scan.blanks()
        if not scan.is_at_end:
            raise ValueError("text after the arguments")
        return [(scan.text[at:begin].strip(), "".join(arguments.out))]

    def ends_within(self, text: str, is_open: bool) -> bool:
        """Return whether a call that goes on with `text` ends within a marked string; is_open:
        whether it does so before.
        """
        return is_open != bool(text.count(self.mark) % 2)

    def part(self, function: JsonObject, literal: Literal, token_in: TokenIn) -> JsonObject:
        """Return keyword arguments of StructuredOutputs for the arguments of `function`."""
        root = mapping_of(function.get("parameters"))
        rules = _Rules(self.mark, literal, token_in, root)
        start = rules.value({"type": "object", **root}, 0)
        return {"grammar": "\n".join([f"start: {start}", *rules.lines])}


class _Values:
    """The values of a call, read from `scan`; `out` is their JSON so far."""

    def __init__(self, scan: Scanner, mark: str) -> None:
        self.out: list[str] = []
        self._scan = scan
        self._mark = mark

    def value(self, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError("values are nested too deeply")
        scan = self._scan
        if scan.accept("{"):
            self._items("{", "}", depth)
        elif scan.accept("["):
            self._items("[", "]", depth)
        elif scan.accept(self._mark):
            self._text(scan.until(self._mark))
        elif scan.text.startswith('"', scan.at):
            self._text(scan.json())
        else:
            word = scan.match(_WORD)
            if word is None:
                raise ValueError("no value")
            self.out.append(_scalar(word))

    def _text(self, value: object) -> None:
        self.out.append(json.dumps(value, ensure_ascii=False))

    def _items(self, opening: str, closing: str, depth: int) -> None:
        scan = self._scan
        scan.blanks()
        separator = opening
        while not scan.accept(closing):
            if separator != opening:
                scan.expect(",", "no comma between values")
            self.out.append(separator)
            separator = ", "
            if closing == "}":
                self._key()
            self.value(depth + 1)
            scan.blanks()
        if separator == opening:
            self.out.append(opening)
        self.out.append(closing)

    def _key(self) -> None:
        scan = self._scan
        if scan.accept(self._mark):
            self._text(scan.until(self._mark))
        else:
            key = scan.match(_KEY)
            if key is None:
                raise ValueError("no key")
            self._text(key.strip('"'))
        scan.blanks()
        scan.expect(":", "no colon after a key")
        self.out.append(": ")


def _scalar(word: str) -> str:
    """Return the JSON of an unquoted value: a constant or a number, else a string."""
    word = word.strip()
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    number = word
    if _POINT.fullmatch(word):
        number = f"{word}0"
    with suppress(ValueError):
        value = json.loads(number)
        if isinstance(value, int | float) and math.isfinite(value):
            return number
    return json.dumps(word, ensure_ascii=False)


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

    def value(self, schema: object, depth: int) -> str:
        """Add the rule of a value that satisfies `schema`; returns the rule's name."""
        reference = mapping_of(schema).get("$ref")
        if isinstance(reference, str) and reference in self._references:
            return self._references[reference]
        name = self._new()
        if isinstance(reference, str):
            self._references[reference] = name
        choices = self._choices(resolved(schema, self._root), depth)
        self.lines.append(f"{name}: {' | '.join(choices)}")
        return name

    def _new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _choices(self, schema: JsonObject, depth: int) -> list[str]:
        if depth > _DEEPEST:
            raise ValueError("values are nested too deeply")
        constants = allowed_values(schema)
        if constants is not None:
            return [self._literal(self._written(value)) for value in constants]
        types = schema.get("type")
        if not isinstance(types, list):
            types = [types]
        if "object" in types or schema.get("properties"):
            return [self._object(schema, depth), *self._simple(schema, types, depth)]
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                return [self.value(branch, depth + 1) for branch in schema[word]]
        return self._simple(schema, types, depth) or self._anything()

    def _simple(self, schema: JsonObject, types: Sequence[object], depth: int) -> list[str]:
        """Return the alternatives that are not objects."""
        choices = []
        if "string" in types:
            choices.append(self._string(bounds_of(schema)))
        if "array" in types:
            choices.append(self._array(schema, depth))
        plain = {key: value for key, value in schema.items() if key not in _COMBINING}
        for name in _SCALARS:
            if name in types:
                choices.append(f"%json {json.dumps({**bare(plain), 'type': name})}")
        return choices

    def _anything(self) -> list[str]:
        """Return the alternatives of a value without a schema: any scalar."""
        return [
            self._string((0, None)),
            f"%json {json.dumps({'type': ['number', 'boolean', 'null']})}",
        ]

    def _written(self, value: object) -> str:
        """Return a constant as the model writes it."""
        if isinstance(value, str):
            return f"{self._mark}{value}{self._mark}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, Mapping):
            pairs = [f"{self._key(key)}:{self._written(item)}" for key, item in value.items()]
            return f"{{{','.join(pairs)}}}"
        return json.dumps(value)

    def _key(self, name: str) -> str:
        """Return the name of a property as it is written: quoted if it cannot be read otherwise."""
        plain = _KEY.fullmatch(name) is not None and name.strip('"') == name
        if plain:
            return name
        return f"{self._mark}{name}{self._mark}"

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
        items = f'({item} ("," {item}){{{max(least - 1, 0)},{most - 1}}})'
        if least == 0:
            items += "?"
        return f'"[" {items} "]"'

    def _object(self, schema: JsonObject, depth: int) -> str:
        """Return an object with its properties in order, separated by commas whichever are left
        out.
        """
        choices = []
        for properties, required in shapes_of(schema, self._root):
            name = self._new()
            lines: list[str] = []
            for index, (key, property_schema) in enumerate(properties.items()):
                value = self.value(property_schema, depth + 1)
                pair = f"{self._literal(f'{self._key(key)}:')} {value} {name}_m{index + 1}"
                first = f"{name}_{index}: {pair}"
                later = f'{name}_m{index}: "," {pair}'
                if key not in required:
                    first += f" | {name}_{index + 1}"
                    later += f" | {name}_m{index + 1}"
                lines += [first, later]
            last = len(properties)
            self.lines += [*lines, f'{name}_{last}: ""', f'{name}_m{last}: ""']
            choices.append(f'"{{" {name}_0 "}}"')
        return f"({' | '.join(choices)})"


def _number_of_items(value: object, otherwise: int) -> int:
    """Return the value of minItems or maxItems, `otherwise` if it has none that a call can keep."""
    return value if isinstance(value, int) and 0 <= value <= _MOST_ITEMS else otherwise
