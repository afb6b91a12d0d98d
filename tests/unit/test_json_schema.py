"""What is left out of a JSON schema: exactly what the compiler of grammars refuses, and never what
it can enforce.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.refusals import refuses
from tests.unit.engine.test_grammar import END

import freight
from freight import RequestError, StructuredOutputs
from freight.base.json_schema import FORMATS, UNENFORCED, enforceable
from freight.engine.grammar import Grammars
from freight.text.tokenizer import Tokenizer

# Of the drafts of JSON Schema from 4 to 2020-12.
KEYWORDS: dict[str, Any] = {
    **{
        name: {"type": "null"}
        for name in ("contains", "else", "if", "not", "propertyNames", "then")
    },
    **{
        name: {"type": "null"}
        for name in ("additionalItems", "additionalProperties", "items", "contentSchema")
    },
    **{name: [{}] for name in ("allOf", "anyOf", "prefixItems")},
    **{
        name: {"a": {}}
        for name in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
    },
    **{name: {"a": ["b"]} for name in ("dependencies", "dependentRequired")},
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), False),
    **dict.fromkeys(
        ("minItems", "minLength", "minProperties", "minContains", "minimum", "exclusiveMinimum"), 1
    ),
    **dict.fromkeys(
        ("maxItems", "maxLength", "maxProperties", "maxContains", "maximum", "exclusiveMaximum"), 9
    ),
    **dict.fromkeys(
        ("uniqueItems", "deprecated", "readOnly", "writeOnly", "$recursiveAnchor"), True
    ),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "#"),
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "$comment", "title", "description"), "a"),
    **dict.fromkeys(("contentEncoding", "contentMediaType"), "base64"),
    "required": ["a"],
    "pattern": "a",
    "multipleOf": 2,
    "format": "date",
    "default": 1,
    "examples": [1],
    "type": "object",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/a",
}


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(Path(freight.__file__).parent / "demo")


@pytest.fixture(scope="module")
def grammars(demo: Tokenizer) -> Grammars:
    return Grammars(demo, demo.vocab_size, [END])


def compiles(grammars: Grammars, schema: dict[str, Any]) -> bool:
    try:
        grammars.check(StructuredOutputs(json=schema))
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_is_left_out_exactly_where_the_compiler_refuses_it(grammars: Grammars, name: str):
    schema = {"allOf": [{"type": "object"}], name: KEYWORDS[name]}
    assert enforceable(schema)[1] == ((name,) if name in UNENFORCED else ())
    assert compiles(grammars, schema) == (name not in UNENFORCED)
    assert compiles(grammars, enforceable(schema)[0])


@pytest.mark.parametrize(
    "name", [*sorted(FORMATS), *("password", "path", "binary", "base64", "cuid", "int32", "uri-")]
)
def test_a_format_is_enforced_or_an_annotation(grammars: Grammars, name: str):
    schema = {"type": "string", "format": name, "maxLength": 40}
    assert compiles(grammars, schema), "also where nothing else may be left out"
    assert enforceable(schema) == (
        (schema, ()) if name in FORMATS else ({"type": "string", "maxLength": 40}, ("format",))
    )


PATTERNS = [r"^(?!a)b$", r"a(?=b)", r"(?<=a)b", r"(?<!a)b", r"\ba", r"(a)\1", r"\\\ba"]
PLAIN = [r"^\d{3}$", r"\\b", r"(?:a)(?i)b(?P<n>c)", r"\(\?=", r"[?=!]", r"\\\\1", ""]


@pytest.mark.parametrize("pattern", PATTERNS + PLAIN)
def test_a_pattern_that_looks_around_is_left_out(grammars: Grammars, pattern: str):
    schema = {"type": "string", "pattern": pattern}
    assert enforceable(schema)[1] == (("pattern",) if pattern in PATTERNS else ())
    assert compiles(grammars, schema) == (pattern in PLAIN)


def test_what_stands_beside_holds_and_names_are_no_keywords(grammars: Grammars):
    inner = {
        "type": "array",
        "items": {"type": "integer"},
        "uniqueItems": True,
        "contains": {"const": 1},
    }
    schema = {
        "type": "object",
        "properties": {
            "not": inner,
            "b": {"enum": [{"uniqueItems": True}]},
            "c": {"const": {"if": 1}},
        },
        "patternProperties": {"^x": {"allOf": [inner]}},
        "$defs": {"then": {"prefixItems": [inner], "anyOf": [inner, {"default": {"not": {}}}]}},
        "additionalProperties": {
            "uniqueItems": False,
            "unevaluatedProperties": True,
            "type": "null",
        },
        "required": ["not"],
        "x-else": {"not": 1},
    }
    before = json.dumps(schema)
    held = {"type": "array", "items": {"type": "integer"}}
    kept, left_out = enforceable(schema)
    assert left_out == ("uniqueItems", "contains")
    assert kept == {
        **schema,
        "properties": {**schema["properties"], "not": held},
        "patternProperties": {"^x": {"allOf": [held]}},
        "$defs": {"then": {"prefixItems": [held], "anyOf": [held, {"default": {"not": {}}}]}},
        "additionalProperties": {"type": "null"},
    }
    assert json.dumps(schema) == before
    for value in ({"not": [1, 1]}, {"not": "x"}, {"not": [], "b": 1}, {"not": [], "q": 1}, {}):
        assert jsonschema_rs.is_valid(kept, value) == (value == {"not": [1, 1]})


def kind(name: str, **others: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, **others},
        "required": ["kind"],
    }


@pytest.mark.parametrize(
    ("branches", "exclusive"),
    [
        ([{"type": "integer"}, {"type": "string"}, {"type": ["null", "boolean"]}], True),
        ([kind("a"), kind("b", x={"type": "integer"})], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"const": "a"}, {"enum": ["b", "c"]}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([kind("a"), kind("a", x={"type": "integer"})], False),
        ([{**kind("a"), "required": []}, {**kind("b"), "required": []}], False),
        ([{}, {"type": "string"}], False),
        ([{"const": [1]}, {"enum": [[1.0], 2.5]}], False),
        ([{"const": n, "title": "n"} for n in range(900)], True),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_one_of_is_enforced_where_its_branches_exclude_each_other(
    grammars: Grammars, branches: list[Any], exclusive: bool
):
    schema = {"oneOf": branches, "$defs": {"a": kind("a"), "b": kind("b")}}
    kept, left_out = enforceable(schema)
    assert left_out == (() if exclusive else ("oneOf",))
    assert kept == {"$defs": schema["$defs"], "anyOf": branches}
    assert compiles(grammars, kept)
    assert compiles(grammars, schema) == exclusive, "where nothing may be left out"
    both, _ = enforceable({**schema, "anyOf": [{}]})
    assert both.get("anyOf") == [{}]
    assert both.get("allOf") == [{"anyOf": branches}]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "null"}], "anyOf": [{}], "allOf": 5},
        {"oneOf": [{"type": "string"}, {"type": "null"}], "anyOf": [{}], "allOf": None},
        {"oneOf": [{"$ref": 5}, {"type": "null"}]},
        {"oneOf": [{"$ref": {"a": "#"}}, {"type": "null"}]},
    ],
)
def test_a_schema_with_values_of_wrong_types_is_the_compiler_s_to_refuse(
    grammars: Grammars, schema: dict[str, Any]
):
    with pytest.raises(RequestError):
        grammars.check(StructuredOutputs.enforceable(schema)[0])


def test_a_form_in_python_says_what_it_does_not_hold(grammars: Grammars):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with refuses(RequestError, "uniqueItems", "StructuredOutputs.enforceable"):
        grammars.check(StructuredOutputs(json=schema))
    for given in (schema, json.dumps(schema)):
        form, left_out = StructuredOutputs.enforceable(given)
        assert left_out == ("uniqueItems",)
        assert form == StructuredOutputs(json={"type": "array", "items": {"type": "integer"}})
        grammars.check(form)
    assert StructuredOutputs.enforceable({"type": "null"}) == (
        StructuredOutputs(json={"type": "null"}),
        (),
    )
    assert StructuredOutputs.enforceable(True) == (StructuredOutputs(json_object=True), ())
    assert StructuredOutputs.enforceable({"not": {}}) == (
        StructuredOutputs(json_object=True),
        ("not",),
    )
    with pytest.raises(RequestError, match="at most 32768 bytes"):
        StructuredOutputs.enforceable({"const": "x" * 40_000})
