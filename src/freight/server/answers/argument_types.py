"""What the schema of a tool says of its arguments, for markup in which values have no types: the
types of a value, its JSON text, and the arguments that an object may have. Nothing here raises for
a schema that is no schema.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

ANY = frozenset(
    ("null", "boolean", "integer", "number", "object", "array")
)  # the types of what is no string
_NAMES = {  # of types in other languages, which people write into schemas -> those of JSON
    **dict.fromkeys(("int", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "num"), "number"),
    **dict.fromkeys(("list", "tuple"), "array"),
    "bool": "boolean",
    "dict": "object",
    "str": "string",
}
_DEEPEST = 32  # references and alternatives inside each other
_NESTED = 4  # alternatives inside each other that are told apart in a forced value
_MOST = 16  # alternatives of an object that are told apart
_ORDER = (
    "null",
    "boolean",
    "integer",
    "number",
    "object",
    "array",
)  # which type is tried first; a text is any string
_NOTES = frozenset(
    (
        "title",
        "description",
        "examples",
        "default",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
    )
)
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("const", "enum"))


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` without a `$ref` at its top, whose target is within `root`; {} for what is no
    schema.
    """
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = (
                schema.get(step.replace("~1", "/").replace("~0", "~"))
                if isinstance(schema, Mapping)
                else None
            )
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a value may have; none where the schema does not say it."""
    schema = resolved(schema, root)
    if depth > _DEEPEST:
        return frozenset()
    declared = schema.get("type")
    found = (
        {declared} if isinstance(declared, str) else set(declared) if _is_names(declared) else set()
    )
    values = schema.get("enum")
    for value in [
        *(values if isinstance(values, list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]:
        found |= set() if declared else {_type_name(value)}
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        for branch in branches if isinstance(branches, list) else ():
            found |= types_of(branch, root, depth + 1)
    if schema.get("nullable") is True:
        found.add("null")
    return frozenset(_NAMES.get(name, name) for name in found)


def branches_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Mapping[str, Any]]:
    """The alternatives of a value: those of `anyOf` or `oneOf` where nothing that binds stands
    beside them.
    """
    schema = resolved(schema, root)
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        alone = not schema.keys() - _NOTES - {word, "$defs", "definitions"}
        if alone and isinstance(branches, list) and 0 < len(branches) <= _MOST and depth < _NESTED:
            return [one for branch in branches for one in branches_of(branch, root, depth + 1)]
    return [schema]


def of_types(schema: Mapping[str, Any], types: Set[str]) -> dict[str, Any]:
    """`schema` for values of these types, of those that it allows."""
    kept = {name: value for name, value in schema.items() if name != "nullable"}
    if isinstance(kept.get("enum"), list):
        kept["enum"] = [value for value in kept["enum"] if not types.isdisjoint(_type_names(value))]
    if isinstance(schema.get("type"), list) or schema.get("nullable") is True:
        kept["type"] = sorted(types)
    return kept


def constants_of(schema: Mapping[str, Any]) -> list[str]:
    """The strings of which a value is one; none where the schema does not name them all."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _type_names(value: object) -> tuple[str, ...]:
    name = _type_name(value)
    return (name, "number") if name == "integer" else (name,)


def _type_name(value: object) -> str:
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def value_text(text: str, types: frozenset[str]) -> str:
    """JSON of the value that a model wrote as `text`: of the first of `types` that it can be, else
    a string.

    JSON comes exactly as it was written. Python's notation of constants, lists and dictionaries is
    read too, because templates that print values without a filter teach it.
    """
    for name in _ORDER:
        if name in types and (found := _as_type(text.strip(), name)) is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def _as_type(text: str, name: str) -> str | None:
    """`text` as JSON of a value of this type, None where it is none."""
    if name in ("null", "boolean"):
        word = {"none": "null"}.get(text.lower(), text.lower())
        return word if word in (("null",) if name == "null" else ("true", "false")) else None
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if name not in ("object", "array"):
            return None
        try:
            value = ast.literal_eval(text)
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
    return text if _is_type(value, name) else None


def _is_type(value: object, name: str) -> bool:
    if isinstance(value, float) and not math.isfinite(value):  # as 1e999 is read
        return False
    if name == "integer":
        return (
            not isinstance(value, bool) and isinstance(value, int | float) and value == int(value)
        )
    kinds: dict[str, Any] = {"number": int | float, "object": dict, "array": list}
    return isinstance(value, kinds[name]) and not isinstance(value, bool)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def parameters_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The schema of the arguments of the tool `name`; {} where there is none."""
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else tool
        if function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def properties_of(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """name -> schema of all arguments that an object may have."""
    return {
        name: one for properties, _ in shapes_of(schema, root) for name, one in properties.items()
    }


Shape = tuple[
    dict[str, Any], frozenset[str]
]  # the schemas of properties, and which of them have to be there


def shapes_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Shape]:
    """The alternatives of an object; those of `anyOf` and `oneOf` have what stands beside these
    words too.
    """
    schema = resolved(schema, root)
    own, names = schema.get("properties"), schema.get("required")
    shapes: list[Shape] = [
        (
            dict(own) if isinstance(own, Mapping) else {},
            frozenset(names) if _is_names(names) else frozenset(),
        )
    ]
    if depth > _DEEPEST:
        return shapes
    for word in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(word)
        groups = (
            [shapes_of(branch, root, depth + 1) for branch in branches]
            if isinstance(branches, list)
            else []
        )
        if word != "allOf" and groups:
            groups = [[shape for group in groups for shape in group]]
        for group in groups:
            shapes = [({**a, **b}, left | right) for a, left in shapes for b, right in group][
                :_MOST
            ]
    return shapes


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments. Only the named properties are forced where others are
    not mentioned.
    """
    schema = dict(function.get("parameters") or {})
    schema.setdefault("type", "object")
    if not any(
        word in schema for word in ("additionalProperties", "$ref", "allOf", "anyOf", "oneOf")
    ):
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return schema


def bare(schema: Any, is_map: bool = False) -> Any:
    """`schema` without what only people read."""
    if isinstance(schema, list):
        return [bare(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if not is_map and name in _DATA else bare(value, not is_map and name in _MAPS)
        for name, value in schema.items()
        if is_map or name not in _NOTES
    }


def within(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, a part of `root`, as a schema of its own: with the definitions that it may refer
    to.
    """
    alone = dict(schema) if isinstance(schema, Mapping) else {}
    if "$ref" in json.dumps(alone):
        alone |= {
            name: root[name]
            for name in ("$defs", "definitions")
            if name in root and name not in alone
        }
    return dict(bare(alone))
