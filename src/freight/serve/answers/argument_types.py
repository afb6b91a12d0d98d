"""Types of tool arguments from the tool's JSON schema, for markup in which values have no types.

It has the types of a value, its JSON text, and the properties that an object may have. Nothing here
raises for an invalid schema.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from freight.base.fields import JsonDict, JsonObject

# The types of JSON except string.
ANY = frozenset(("null", "boolean", "integer", "number", "object", "array"))
_NAMES = {  # types of other languages, which people write into schemas -> JSON's types
    **dict.fromkeys(("int", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "num"), "number"),
    **dict.fromkeys(("list", "tuple"), "array"),
    "bool": "boolean",
    "dict": "object",
    "str": "string",
}
_DEEPEST = 32  # nested references and alternatives
_NESTED = 4  # nesting of alternatives that are separate in the grammar of a value
_MOST = 16  # alternatives of an object that are kept separate
# The order in which types are tried; string comes last, because any text is a string.
_ORDER = ("null", "boolean", "integer", "number", "object", "array")
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


def resolved(schema: Any, root: JsonObject) -> JsonObject:
    """Follow a `$ref` at the top of `schema`, within `root`; returns {} for an invalid schema."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            if not isinstance(schema, Mapping):
                return {}
            schema = schema.get(step.replace("~1", "/").replace("~0", "~"))
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: JsonObject, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a value may have; none if the schema does not restrict them."""
    schema = resolved(schema, root)
    if depth > _DEEPEST:
        return frozenset()
    declared = schema.get("type")
    names: set[str] = set()
    if isinstance(declared, str):
        names = {declared}
    elif _is_names(declared):
        names = set(declared)
    values = schema.get("enum")
    for value in [
        *(values if isinstance(values, list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]:
        names |= set() if declared else {_type_name(value)}
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        for branch in branches if isinstance(branches, list) else ():
            names |= types_of(branch, root, depth + 1)
    if schema.get("nullable") is True:
        names.add("null")
    return frozenset(_NAMES.get(name, name) for name in names)


def branches_of(schema: Any, root: JsonObject, depth: int = 0) -> list[JsonObject]:
    """Return the alternatives of a value: those of `anyOf` or `oneOf`, if no constraint stands next
    to them.
    """
    schema = resolved(schema, root)
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        alone = not schema.keys() - _NOTES - {word, "$defs", "definitions"}
        if alone and isinstance(branches, list) and 0 < len(branches) <= _MOST and depth < _NESTED:
            return [inner for branch in branches for inner in branches_of(branch, root, depth + 1)]
    return [schema]


def of_types(schema: JsonObject, types: Set[str]) -> JsonDict:
    """Restrict `schema` to values of `types`, which are among those that it allows."""
    reduced = {name: value for name, value in schema.items() if name != "nullable"}
    if isinstance(reduced.get("enum"), list):
        reduced["enum"] = [
            value for value in reduced["enum"] if not types.isdisjoint(_type_names(value))
        ]
    if isinstance(schema.get("type"), list) or schema.get("nullable") is True:
        reduced["type"] = sorted(types)
    return reduced


def constants_of(schema: JsonObject) -> list[str]:
    """Return the strings that `const` or `enum` allows; none if the schema has neither."""
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
    """Return the JSON of a value that a model wrote as `text`.

    Its type is the first of `types` that fits, else string. JSON is kept exactly as written.
    Python's notation of constants, lists and dictionaries is also read: chat templates that print
    values without a JSON filter teach it to the model.
    """
    for name in _ORDER:
        if name in types and (converted := _as_type(text.strip(), name)) is not None:
            return converted
    return json.dumps(text, ensure_ascii=False)


def _as_type(text: str, name: str) -> str | None:
    """Return `text` as JSON of a value of this type, or None if it is not one."""
    if name == "null":
        return "null" if text.lower() in ("null", "none") else None
    if name == "boolean":
        return text.lower() if text.lower() in ("true", "false") else None
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
    if isinstance(value, float) and not math.isfinite(value):  # json.loads reads 1e999 as inf
        return False
    if name == "integer":
        return (
            not isinstance(value, bool) and isinstance(value, int | float) and value == int(value)
        )
    kinds: JsonDict = {"number": int | float, "object": dict, "array": list}
    return isinstance(value, kinds[name]) and not isinstance(value, bool)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def parameters_of(tools: Sequence[JsonObject], name: str) -> JsonObject:
    """Return the schema of the arguments of the tool `name`; {} if there is none."""
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else tool
        if function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def properties_of(schema: Any, root: JsonObject) -> JsonDict:
    """Return name -> schema of all properties that an object may have."""
    return {
        name: field
        for properties, _ in shapes_of(schema, root)
        for name, field in properties.items()
    }


Shape = tuple[JsonDict, frozenset[str]]  # schemas of properties; names of required ones


def shapes_of(schema: Any, root: JsonObject, depth: int = 0) -> list[Shape]:
    """Return the alternatives of an object. Those of `anyOf` and `oneOf` include the properties
    next to these keywords.
    """
    schema = resolved(schema, root)
    properties = schema.get("properties")
    names = schema.get("required")
    shapes: list[Shape] = [
        (
            dict(properties) if isinstance(properties, Mapping) else {},
            frozenset(names) if _is_names(names) else frozenset(),
        )
    ]
    if depth > _DEEPEST:
        return shapes
    for word in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(word)
        if not isinstance(branches, list) or not branches:
            continue
        groups = [shapes_of(branch, root, depth + 1) for branch in branches]
        if word != "allOf":
            groups = [[shape for group in groups for shape in group]]
        for group in groups:
            pairs = [({**a, **b}, left | right) for a, left in shapes for b, right in group]
            shapes = pairs[:_MOST]
    return shapes


def arguments_schema(function: JsonObject) -> JsonDict:
    """Return the schema of a function's arguments. It forbids further properties unless the schema
    mentions them.
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
    """Return `schema` without its annotations, such as titles and descriptions."""
    if isinstance(schema, list):
        return [bare(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    if is_map:
        return {name: bare(value) for name, value in schema.items()}
    reduced = {}
    for name, value in schema.items():
        if name in _NOTES:
            continue
        reduced[name] = value if name in _DATA else bare(value, name in _MAPS)
    return reduced


def within(schema: Any, root: JsonObject) -> JsonDict:
    """Return `schema`, a part of `root`, as a separate schema: with the definitions that it may
    refer to.
    """
    alone = dict(schema) if isinstance(schema, Mapping) else {}
    if "$ref" in json.dumps(alone):
        alone |= {
            name: root[name]
            for name in ("$defs", "definitions")
            if name in root and name not in alone
        }
    return dict(bare(alone))
