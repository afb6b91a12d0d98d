"""StructuredOutputs: the form that a request's text must have. Imports no torch.

A value that exists is within every limit below and those of `json_schema.py`, so the compiler of
grammars never sees more than it can take. All limits are checked without recursion, in a time that
grows linearly with the input, because deep nesting crashes programs that read grammars.
`engine/grammar.py` decides whether a form can be compiled.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from freight.base.files import DuplicateNameError, unique_names
from freight.base.json_schema import (
    MOST_SCHEMA,
    check_references,
    check_size,
    enforceable,
    too_deep,
)
from freight.errors import RequestError, choices, nearest, shown

# The beginning of the error of a grammar that gave up within an answer
CANNOT_GO_ON = "its structured output cannot go on"
MOST_REGEX = 4 * 1024  # bytes
MOST_GRAMMAR = 16 * 1024  # bytes
MOST_RULES = 500  # rules of a Lark grammar
MOST_PARTS = 256  # forms that a Lark grammar refers to
MOST_PARTS_BYTES = 512 * 1024  # of all parts together
MOST_CHOICES = 1000
MOST_CHOICE_BYTES = 32 * 1024  # of all choices together

_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_PART = re.compile(r"[a-z][a-z0-9_]{0,63}")
_RULE = re.compile(r"^[ \t]*[?!]*[A-Za-z_][^:\"/\n]*:", re.MULTILINE)


@dataclass(frozen=True)
class StructuredOutputs:
    """The one form that the complete text of a completion must have.

    json         a JSON schema, as a mapping or as JSON text; True or {}: any JSON object
    regex        a regular expression that the complete text matches; without look-around and
                 backreferences
    choice       texts, one of which is the answer
    grammar      a grammar in Lark's notation, whose rule `start` gives the text
    json_object  any JSON object
    parts        with grammar: name -> the form, without parts itself, that `@name` stands for in
                 the grammar

    `json` is kept as compact JSON text, `choice` as a tuple, `parts` as pairs, so a value is
    hashable. Raises RequestError for none or several of them, for one beyond a limit of this
    module, and for a `$ref` that is not within the schema.
    """

    json: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    parts: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool | None):
            raise RequestError(
                f"structured_outputs.json_object is {shown(self.json_object)}; it must be True or False"
            )
        values = {name: getattr(self, name) for name in _FORMS}
        forms = [
            name
            for name, value in values.items()
            if value is not None and not (name == _FORMS[-1] and not value)
        ]
        if len(forms) != 1:
            fault = f"has {' and '.join(forms)}" if forms else "is empty"
            raise RequestError(f"structured_outputs {fault}; give exactly one of {choices(_FORMS)}")
        checked: dict[str, Any] = dict.fromkeys(_FORMS) | {"json_object": False}
        name = forms[0]
        if name == "json":
            schema = _schema(values[name])
            checked |= {"json_object": True} if schema is None else {"json": schema}
        elif name == "choice":
            checked[name] = _choice(values[name])
        elif name == "json_object":
            checked[name] = True
        else:
            checked[name] = _text(
                name, values[name], MOST_REGEX if name == "regex" else MOST_GRAMMAR
            )
        if name == "grammar":
            _check_rules(checked[name])
        if self.parts is not None and name != "grammar":
            raise RequestError(
                "structured_outputs.parts belong to structured_outputs.grammar, which is not given"
            )
        checked["parts"] = None if self.parts is None else _checked_parts(self.parts)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """Return `given` itself, or the value that a mapping of the fields describes. Raises
        RequestError.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured_outputs is {shown(value)}; it must be a StructuredOutputs or a mapping of its fields"
            )
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                hint = nearest(
                    str(name)[:60],
                    known,
                    {"lark": "grammar", "schema": "json", "json_schema": "json"},
                )
                raise RequestError(
                    f"structured_outputs has no field {shown(name)}{hint}; it has {', '.join(known)}"
                )
        return cls(**value)

    @classmethod
    def enforceable(
        cls, schema: Mapping[str, Any] | bool | str
    ) -> tuple[StructuredOutputs, tuple[str, ...]]:
        """Return the form that `schema` asks for, as far as a grammar can enforce it, and the
        keywords that it cannot.

        `StructuredOutputs(json=schema)` is the strict way: compiling such a keyword fails. Raises
        RequestError.
        """
        outputs = cls(json=schema)
        if outputs.json is None:
            return outputs, ()
        reduced, left_out = enforceable(json.loads(str(outputs.json)))
        return cls(json=reduced), left_out

    def key(self) -> tuple[str, str]:
        """Return the form's name and its text: equal for values that compile to the same grammar.

        For a grammar with parts: "parts", and JSON of the grammar's text and [name, form, text] of
        each.
        """
        if self.parts is not None:
            return "parts", json.dumps(
                [self.grammar, [[name, *part.key()] for name, part in self._pairs()]]
            )
        for name in _FORMS[:-1]:
            value = getattr(self, name)
            if value is not None:
                return name, value if isinstance(value, str) else json.dumps(value)
        return _FORMS[-1], ""

    def given(self) -> dict[str, Any]:
        """Return the form as JSON values, from which `of` makes an equal StructuredOutputs."""
        values = {
            name: value
            for name in _FORMS
            if (value := getattr(self, name)) is not None and value is not False
        }
        if self.parts is not None:
            values["parts"] = {name: part.given() for name, part in self._pairs()}
        return values

    def _pairs(self) -> Iterator[tuple[str, StructuredOutputs]]:
        pairs: Any = self.parts
        return iter(pairs)


def _checked_parts(value: object) -> tuple[tuple[str, StructuredOutputs], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not 1 <= len(pairs) <= MOST_PARTS:
        raise RequestError(
            f"structured_outputs.parts is {shown(value)}; it must be a mapping of 1 to {MOST_PARTS} forms"
        )
    made: list[tuple[str, StructuredOutputs]] = []
    size = 0
    for name, form in pairs:
        if not isinstance(name, str) or not _PART.fullmatch(name):
            raise RequestError(
                f"structured_outputs.parts has the name {shown(name)}; a name is like 'answer_1'"
            )
        part = StructuredOutputs.of(form)
        if part.parts is not None:
            raise RequestError(
                f"structured_outputs.parts.{name} has parts of its own; move them to structured_outputs.parts"
            )
        size += len(part.key()[1].encode())
        made.append((name, part))
    if size > MOST_PARTS_BYTES:
        raise _too_large("parts", f"{size} bytes in all", MOST_PARTS_BYTES)
    return tuple(made)


def _text(name: str, value: object, most: int) -> str:
    """Return `value` as a text of at most `most` bytes."""
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"structured_outputs.{name} is {shown(value)}; it must be a text that is not empty"
        )
    if _num_bytes(name, value, most) > most:
        raise _too_large(name, f"{len(value)} characters", most)
    return value


def _num_bytes(name: str, text: str, most: int) -> int:
    """Count the bytes of UTF-8, or only the characters of a text with more than `most`."""
    try:
        return len(text) if len(text) > most else len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(
            f"structured_outputs.{name} has a lone surrogate, which is not Unicode text"
        ) from None


def _too_large(name: str, size: str, most: int) -> RequestError:
    return RequestError(f"structured_outputs.{name} has {size}; at most {most} bytes are allowed")


def _check_rules(grammar: str) -> None:
    count = sum(1 for _ in _RULE.finditer(grammar))
    if count > MOST_RULES:
        raise RequestError(
            f"structured_outputs.grammar has {count} rules; at most {MOST_RULES} are allowed"
        )


def _choice(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(
            f"structured_outputs.choice is {shown(value)}; it must be a list of texts"
        )
    entries = tuple(itertools.islice(value, MOST_CHOICES + 1))
    if not 1 <= len(entries) <= MOST_CHOICES:
        count = f"more than {MOST_CHOICES}" if entries else "no"
        raise RequestError(
            f"structured_outputs.choice has {count} entries; give 1 to {MOST_CHOICES}"
        )
    total = 0
    for position, entry in enumerate(entries):
        name = f"choice[{position}]"
        total += _num_bytes(name, _text(name, entry, MOST_CHOICE_BYTES), MOST_CHOICE_BYTES)
    if total > MOST_CHOICE_BYTES:
        raise _too_large("choice", f"{total} bytes in all", MOST_CHOICE_BYTES)
    return entries


def _schema(value: object) -> str | None:
    """Return a checked schema as compact JSON; None if it allows everything."""
    if isinstance(value, str):
        value = _parse(_text("json", value, MOST_SCHEMA))
    if isinstance(value, bool):
        if value:
            return None
        raise RequestError(
            "structured_outputs.json is False, which nothing satisfies; give a schema that allows text"
        )
    if not isinstance(value, Mapping):
        raise RequestError(f"structured_outputs.json is {shown(value)}; a JSON schema is an object")
    schema = dict(value)
    if not schema:
        return None
    check_size(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs.json is not JSON: {error}") from None
    if _num_bytes("json", text, MOST_SCHEMA) > MOST_SCHEMA:
        raise _too_large("json", f"{len(text)} characters as compact JSON", MOST_SCHEMA)
    if "x-guidance" in schema:
        raise RequestError(
            "structured_outputs.json has the keyword 'x-guidance', which is not one of JSON Schema"
        )
    check_references(json.loads(text))  # parsed again: a tree, in which no object occurs twice
    return text


def _parse(text: str) -> object:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique_names)
    except RecursionError:
        raise too_deep() from None
    except DuplicateNameError as error:
        raise RequestError(
            f"structured_outputs.json is ambiguous: {error}; write it once"
        ) from None
    except ValueError as error:
        raise RequestError(f"structured_outputs.json is not valid JSON: {error}") from None
