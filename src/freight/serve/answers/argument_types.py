"""Types of tool arguments from the tool's JSON schema, for markup in which values have no types.

It has the types of a value, its JSON text, and the properties that an object may have. Nothing here
raises for an invalid schema.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence, Set
from itertools import product
from typing import Any, TypeGuard

from freight.base.fields import JsonDict, JsonObject, is_number

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
# What may allow further properties.
_WIDER = ("additionalProperties", "$ref", "allOf", "anyOf", "oneOf")
_TYPE_NAMES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    type(None): "null",
}
_CONSTANTS = {  # type -> a constant as models write it -> in JSON
    "null": {"null": "null", "none": "null"},
    "boolean": {"true": "true", "false": "false"},
}


def mapping_of(value: object) -> JsonObject:
    """Return `value` if it is an object of JSON, else {}."""
    return value if isinstance(value, Mapping) else {}


def list_of(value: object) -> list[object]:
    """Return `value` if it is a list of JSON, else []."""
    return value if isinstance(value, list) else []


def resolved(schema: object, root: JsonObject) -> JsonObject:
    """Follow a `$ref` at the top of `schema`, within `root`; returns {} for an invalid schema."""
    for _ in range(_DEEPEST):
        reference = mapping_of(schema).get("$ref")
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = mapping_of(schema).get(step.replace("~1", "/").replace("~0", "~"))
    return mapping_of(schema)


def types_of(schema: object, root: JsonObject, depth: int = 0) -> frozenset[str]:
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
    if not declared:
        names.update(map(_type_name, list_of(schema.get("enum"))))
        if "const" in schema:
            names.add(_type_name(schema["const"]))
    for word in ("anyOf", "oneOf", "allOf"):
        for branch in list_of(schema.get(word)):
            names |= types_of(branch, root, depth + 1)
    if schema.get("nullable") is True:
        names.add("null")
    return frozenset(_NAMES.get(name, name) for name in names)


def branches_of(schema: object, root: JsonObject, depth: int = 0) -> list[JsonObject]:
    """Return the alternatives of a value: those of `anyOf` or `oneOf`, if no constraint stands next
    to them.
    """
    schema = resolved(schema, root)
    for word in ("anyOf", "oneOf"):
        branches = list_of(schema.get(word))
        alone = not schema.keys() - _NOTES - {word, "$defs", "definitions"}
        if alone and 0 < len(branches) <= _MOST and depth < _NESTED:
            alternatives: list[JsonObject] = []
            for branch in branches:
                alternatives += branches_of(branch, root, depth + 1)
            return alternatives
    return [schema]


def of_types(schema: JsonObject, types: Set[str]) -> JsonDict:
    """Restrict `schema` to values of `types`, which are among those that it allows."""
    reduced = {name: value for name, value in schema.items() if name != "nullable"}
    values = reduced.get("enum")
    if isinstance(values, list):
        reduced["enum"] = [value for value in values if not types.isdisjoint(_type_names(value))]
    if isinstance(schema.get("type"), list) or schema.get("nullable") is True:
        reduced["type"] = sorted(types)
    return reduced


def allowed_values(schema: JsonObject) -> list[object] | None:
    """Return the values that `const` or `enum` allows; None if the schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def constants_of(schema: JsonObject) -> list[str]:
    """Return the strings that `const` or `enum` allows; none if the schema has neither."""
    return [value for value in allowed_values(schema) or () if isinstance(value, str)]


def _is_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _type_names(value: object) -> tuple[str, ...]:
    name = _type_name(value)
    if name == "integer":
        return name, "number"
    return (name,)


def _type_name(value: object) -> str:
    return _TYPE_NAMES.get(type(value), "object")


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
    if name in ("null", "boolean"):
        return _CONSTANTS[name].get(text.lower())
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        if name not in ("object", "array"):
            return None
        try:
            value = ast.literal_eval(text)
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
    if _is_type(value, name):
        return text
    return None


def _is_type(value: object, name: str) -> bool:
    if isinstance(value, float) and not math.isfinite(value):  # json.loads reads 1e999 as inf
        return False
    if name == "integer":
        return is_number(value) and value == int(value)
    if name == "number":
        return is_number(value)
    return isinstance(value, dict if name == "object" else list)


def strict_json(text: str) -> object:
    """Read JSON. Raises ValueError for anything else, also for NaN and Infinity."""
    value: object = json.loads(text, parse_constant=_refuse)
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def function_of(tool: JsonObject) -> JsonObject:
    """Return the function of a tool, which some clients send without a wrapper."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def names_of(tools: Sequence[JsonObject]) -> list[object]:
    """Return the names of tools, in order."""
    return [function_of(tool).get("name") for tool in tools]


def parameters_of(tools: Sequence[JsonObject], name: str) -> JsonObject:
    """Return the schema of the arguments of the tool `name`; {} if there is none."""
    for function in map(function_of, tools):
        if function.get("name") == name:
            return mapping_of(function.get("parameters"))
    return {}


def properties_of(schema: object, root: JsonObject) -> JsonDict:
    """Return name -> schema of all properties that an object may have."""
    fields: JsonDict = {}
    for properties, _ in shapes_of(schema, root):
        fields |= properties
    return fields


Shape = tuple[JsonDict, frozenset[str]]  # schemas of properties; names of required ones


def shapes_of(schema: object, root: JsonObject, depth: int = 0) -> list[Shape]:
    """Return the alternatives of an object. Those of `anyOf` and `oneOf` include the properties
    next to these keywords.
    """
    schema = resolved(schema, root)
    names = schema.get("required")
    required = frozenset[str]()
    if _is_names(names):
        required = frozenset(names)
    shapes: list[Shape] = [(dict(mapping_of(schema.get("properties"))), required)]
    if depth > _DEEPEST:
        return shapes
    for branch in list_of(schema.get("allOf")):
        shapes = _joined(shapes, shapes_of(branch, root, depth + 1))
    for word in ("anyOf", "oneOf"):
        alternatives: list[Shape] = []
        for branch in list_of(schema.get(word)):
            alternatives += shapes_of(branch, root, depth + 1)
        if alternatives:
            shapes = _joined(shapes, alternatives)
    return shapes


def _joined(shapes: Sequence[Shape], others: Sequence[Shape]) -> list[Shape]:
    """Return the first alternatives of an object that has one of both."""
    pairs: list[Shape] = []
    for (properties, required), (further, also_required) in product(shapes, others):
        pairs.append(({**properties, **further}, required | also_required))
    return pairs[:_MOST]


def arguments_schema(function: JsonObject) -> JsonDict:
    """Return the schema of a function's arguments. It forbids further properties unless the schema
    mentions them.
    """
    schema = dict(function.get("parameters") or {})
    schema.setdefault("type", "object")
    if schema.keys().isdisjoint(_WIDER):
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return schema


def bare(schema: object, is_map: bool = False) -> Any:
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


def within(schema: object, root: JsonObject) -> JsonDict:
    """Return `schema`, a part of `root`, as a separate schema: with the definitions that it may
    refer to.
    """
    alone = dict(mapping_of(schema))
    if "$ref" in json.dumps(alone):
        for name in ("$defs", "definitions"):
            if name in root:
                alone.setdefault(name, root[name])
    return dict(bare(alone))
