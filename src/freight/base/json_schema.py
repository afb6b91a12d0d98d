"""JSON schemas of answers: size, references, and the part a grammar enforces. Needs no packages.

Everything is checked without recursion, in a time that grows linearly with the schema, before any
compiler sees it. No reference is ever fetched. `enforceable` removes what JSON Schema lets a reader
ignore, or what no grammar can express, and returns the removed keywords. pydantic writes
`uniqueItems` for a set and `format: "password"` for a secret, and requests with these should work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from freight.errors import RequestError, shown

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]  # a JSON value

MOST_SCHEMA = 32 * 1024  # bytes of a JSON schema, as compact JSON
MOST_NESTING = 64  # objects and arrays of a schema inside each other
MOST_REFERENCES = 64  # `$ref`s that follow from one another

# Keywords whose value maps names to schemas
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
# Keywords whose value is data, in which "$ref" is a name like any other
_DATA = frozenset(("const", "enum", "default", "examples"))
# Keywords whose value is a schema or a list of schemas
_SCHEMAS = frozenset(
    ("items", "additionalItems", "additionalProperties", "prefixItems", "allOf", "anyOf", "oneOf")
)

# Keywords that the compiler of grammars refuses. It ignores all others that it does not know, as
# JSON Schema asks.
UNENFORCED = frozenset(
    (
        *(
            "not",
            "if",
            "then",
            "else",
            "contains",
            "minContains",
            "maxContains",
            "uniqueItems",
            "propertyNames",
        ),
        *(
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedItems",
            "unevaluatedProperties",
        ),
        *("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"),
    )
)
FORMATS = frozenset(  # formats that the compiler has a grammar for
    (
        *(
            "date-time",
            "time",
            "date",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uri",
            "uuid",
            "unknown",
        ),
    )
)
_ASKS_NOTHING: tuple[tuple[str, object], ...] = (
    ("uniqueItems", False),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", True),
)
# Look-around, word boundaries and back-references, after any number of escaped characters
_LOOKS_AROUND = re.compile(r"(?:[^\\]|\\[^1-9bBk])*?(?:\(\?(?:<?[=!])|\\[1-9bBk])")


def enforceable(
    schema: dict[str, Any], constraints: bool = True
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return `schema` without what a grammar cannot enforce, and the keywords that were removed.

    schema       within this module's limits (`check_size`)
    constraints  False: remove no constraint, only formats that the compiler does not know, which
                 JSON Schema calls annotations

    The result allows everything that `schema` allows. A `oneOf` becomes an `anyOf`, because the
    compiler rarely sees that branches exclude each other. It counts as removed where two branches
    may both match.
    """
    left_out: dict[str, None] = {}
    reduced = _enforceable(schema, schema, constraints, left_out)
    return reduced, tuple(left_out)


def _enforceable(
    schema: Mapping[str, Any], root: dict[str, Any], constraints: bool, left_out: dict[str, None]
) -> dict[str, Any]:
    """Return one schema within `root` without these keywords, and add them to `left_out`.

    Recurses as deep as a schema may be nested.
    """

    def inner(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [inner(entry) for entry in value]
        if isinstance(value, Mapping):
            return _enforceable(value, root, constraints, left_out)
        return value

    reduced: dict[str, Any] = {}
    for name, value in schema.items():
        if _is_left_out(name, value, constraints):
            if (name, value) not in _ASKS_NOTHING:
                left_out[name] = None
        elif name in _SCHEMAS:
            reduced[name] = inner(value)
        elif name in _MAPS and isinstance(value, Mapping):
            reduced[name] = {key: inner(entry) for key, entry in value.items()}
        else:
            reduced[name] = value
    branches = schema.get("oneOf")
    if isinstance(branches, list) and ((exclusive := _exclusive(branches, root)) or constraints):
        if not exclusive:
            left_out["oneOf"] = None
        either = {"anyOf": reduced.pop("oneOf")}
        if "anyOf" in reduced:
            conjuncts = reduced.get("allOf", [])
            # An allOf that is not a list stays: the compiler refuses it
            reduced["allOf"] = [*conjuncts, either] if isinstance(conjuncts, list) else conjuncts
        else:
            reduced |= either
    return reduced


def _is_left_out(name: str, value: object, constraints: bool) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in FORMATS
    if not constraints:
        return False
    if name == "pattern":
        return isinstance(value, str) and _LOOKS_AROUND.match(value) is not None
    return name in UNENFORCED


def _exclusive(branches: list[Any], root: dict[str, Any]) -> bool:
    """Return whether it is certain that no value matches two of `branches`: one property separates
    each from all others.
    """
    signs = [_signs(branch, root) for branch in branches]
    names = frozenset.intersection(*map(frozenset, signs)) if signs else frozenset()
    for name in names:
        values = [branch_signs[name] for branch_signs in signs]
        if sum(map(len, values)) == len(frozenset.union(*values)):
            return True
    return False


def _signs(branch: Any, root: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Return what separates a branch from others: its types (under ""), its constant values (under
    "="), and the values of its required constant properties.
    """
    for _ in range(MOST_REFERENCES):
        if not isinstance(branch, Mapping) or not isinstance(branch.get("$ref"), str):
            break
        try:
            branch = resolve(branch["$ref"], root)
        except RequestError:
            return {}
    if not isinstance(branch, Mapping):
        return {}
    signs: dict[str, frozenset[str]] = {}
    types = branch.get("type")
    if isinstance(types, str) or (
        isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    ):
        kinds = [types] if isinstance(types, str) else types
        signs[""] = frozenset("number" if kind == "integer" else kind for kind in kinds)
    if "const" in branch or isinstance(branch.get("enum"), list):
        signs["="] = _values(branch)
    properties = branch.get("properties")
    required = branch.get("required")
    if (
        branch.get("type") == "object"
        and isinstance(properties, Mapping)
        and isinstance(required, list)
    ):
        for name in required:
            field = properties.get(name) if isinstance(name, str) else None
            if isinstance(field, Mapping) and (
                "const" in field or isinstance(field.get("enum"), list)
            ):
                signs[f".{name}"] = _values(field)
    return signs


def _values(schema: Mapping[str, Any]) -> frozenset[str]:
    values: Iterable[Any] = [schema["const"]] if "const" in schema else schema["enum"]
    equal = [json.loads(json.dumps(value), parse_float=_number) for value in values]
    return frozenset(json.dumps(value, sort_keys=True) for value in equal)


def _number(text: str) -> float:
    """Parse a JSON number, an int if it is whole: 1.0 is 1 in JSON."""
    value = float(text)
    return int(value) if value.is_integer() else value


def too_deep() -> RequestError:
    """Return the error for a schema that is nested too deeply."""
    return RequestError(
        f"structured_outputs.json is nested deeper than {MOST_NESTING} objects and arrays, which is the most allowed"
    )


def check_size(schema: dict[str, Any]) -> None:
    """Raise RequestError for a schema that is nested too deeply, is too large, or has names that
    are not text.
    """
    size = 0
    todo: list[tuple[Any, int]] = [(schema, 1)]
    while todo:
        value, depth = todo.pop()
        if depth > MOST_NESTING and isinstance(value, dict | list | tuple):
            raise too_deep()
        if isinstance(value, dict):
            for name in value:
                if not isinstance(name, str):
                    raise RequestError(
                        f"structured_outputs.json has the name {shown(name)}; names in JSON are text"
                    )
                size += len(name)
        if isinstance(value, dict | list | tuple | str):
            size += len(value)
        if size > MOST_SCHEMA:  # before the entries are queued
            raise RequestError(
                f"structured_outputs.json has more than {MOST_SCHEMA} characters; at most {MOST_SCHEMA} bytes "
                "are allowed"
            )
        if isinstance(value, dict | list | tuple):
            entries = value.values() if isinstance(value, dict) else value
            todo += [(entry, depth + 1) for entry in entries]


def check_references(schema: dict[str, Any]) -> None:
    """Raise RequestError for a `$ref` out of the schema or to nothing, and for too long a chain of
    them.

    Walks every part once, depth first, references included, and counts for each part the longest
    chain of references below it. A reference back to a part that the walk is still in is recursion,
    and ends a chain.
    """
    # By id of a part: the result of `_parts` for it
    below: dict[int, list[tuple[Any, bool, bool]]] = {}
    lengths: dict[int, int] = {}
    # (part, is a map of schemas, all below it is done)
    todo: list[tuple[Any, bool, bool]] = [(schema, False, False)]
    while todo:
        part, is_map, done = todo.pop()
        if done:
            lengths[id(part)] = max(
                (lengths.get(id(inner), 0) + count for inner, _, count in below[id(part)]),
                default=0,
            )
        elif id(part) not in below:
            below[id(part)] = list(_parts(part, is_map, schema))
            todo.append((part, is_map, True))
            todo += [(inner, one_is_map, False) for inner, one_is_map, _ in below[id(part)]]
    if lengths[id(schema)] > MOST_REFERENCES:
        raise RequestError(
            f"structured_outputs.json has {lengths[id(schema)]} $ref that follow from one another; "
            f"at most {MOST_REFERENCES} are allowed"
        )


def _parts(part: Any, is_map: bool, schema: dict[str, Any]) -> Iterator[tuple[Any, bool, bool]]:
    """Yield the objects and lists right below a part: each with whether it maps names to schemas,
    and whether a `$ref` leads to it.
    """
    if isinstance(part, list):
        yield from ((entry, False, False) for entry in part if isinstance(entry, dict | list))
        return
    for name, value in part.items():
        if not is_map and name == "$ref" and isinstance(value, str):
            target = resolve(value, schema)
            if isinstance(target, dict):
                yield target, False, True
        elif isinstance(value, dict | list) and (is_map or name not in _DATA):
            yield value, not is_map and name in _MAPS, False


def resolve(reference: str, schema: dict[str, Any]) -> Any:
    """Return the part of the schema that `reference`, a JSON pointer after '#', names. Raises
    RequestError if there is none.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise RequestError(
            f"structured_outputs.json refers to {shown(reference)}; a $ref must be within the schema, as in "
            "'#/$defs/name', and nothing is ever fetched"
        )
    target: Any = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if (
            isinstance(target, list)
            and name.isascii()
            and name.isdigit()
            and len(name) < 6
            and int(name) < len(target)
        ):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            raise RequestError(
                f"structured_outputs.json refers to {shown(reference)}, which it does not have"
            )
    return target
