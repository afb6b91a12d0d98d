"""StructuredOutputs: what is accepted, what is refused with which words, and that no size or depth
takes long.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clock import takes_less
from tests.refusals import refuses
from tests.shares import examples

from freight import RequestError, SamplingParams, StructuredOutputs

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def chained(length: int, loop: bool = False) -> dict[str, Any]:
    """A schema of `length` references that follow from one another, and back to the first."""
    parts: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
        for i in range(length - 1)
    }
    last = {"properties": {"x": {"$ref": "#/$defs/a0"}}} if loop else {"type": "null"}
    return {"$ref": "#/$defs/a0", "$defs": parts | {f"a{length - 1}": last}}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


def doubled() -> dict[str, Any]:
    """2 ** 60 entries, in 60 lists."""
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    return {"enum": value}


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["items"] = value
    return value


def rules(count: int) -> str:
    return "\n".join(['start: "a"', *(f'r{i}: "x" "y:z"' for i in range(count - 1))])


@settings(max_examples=examples(30))
@given(
    value=st.dictionaries(
        st.text(min_size=1, max_size=4).filter(lambda key: key[0] != "$"), JSON, min_size=1
    )
)
def test_a_schema_is_the_same_as_a_mapping_and_as_text(value: dict[str, Any]):
    kept = StructuredOutputs(json=value)
    assert (
        kept
        == StructuredOutputs(json=json.dumps(value, indent=2))
        == StructuredOutputs.of({"json": value})
    )
    assert hash(kept) == hash(StructuredOutputs(json=json.dumps(value)))
    assert isinstance(kept.json, str)
    assert json.loads(kept.json) == value
    assert list(json.loads(kept.json)) == list(value), (
        "the order of properties is that of the answer"
    )
    assert kept.key() == ("json", kept.json)
    assert dataclasses.replace(kept) == kept


@pytest.mark.parametrize("anything", [True, {}, "true", " {} "])
def test_a_schema_that_allows_everything_is_json_object(anything: Any):
    assert StructuredOutputs(json=anything) == StructuredOutputs(json_object=True)


def test_the_largest_of_each_limit():
    StructuredOutputs(json=nested(64))
    StructuredOutputs(json=chained(64))
    StructuredOutputs(json=chained(60, loop=True))
    StructuredOutputs(regex="a" * 4096)
    StructuredOutputs(grammar=rules(500))
    StructuredOutputs(choice=[f"{i}" for i in range(1000)])
    StructuredOutputs(json={"enum": ["x" * 32_000]})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "is empty"),
        ({"json_object": False}, "is empty"),
        ({"json_object": True, "regex": "a"}, "has regex and json_object"),
        ({"json_object": 1}, "json_object is 1"),
        ({"json": False}, "nothing satisfies"),
        ({"json": 3}, "json is 3"),
        ({"json": "[]"}, "a JSON schema is an object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": '{"a": NaN}'}, "NaN is not a JSON number"),
        ({"json": {"a": float("inf")}}, "not JSON"),
        ({"json": {"a": {3}}}, "not JSON"),
        ({"json": {"a": 10**5000}}, "not JSON"),
        ({"json": {"a": {1: 2}}}, "the name 1"),
        ({"json": {"a": "\ud800"}}, "lone surrogate"),
        ({"json": {"type": "null", "x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"json": nested(65)}, "nested deeper than 64"),
        ({"json": nested(30_000)}, "nested deeper than 64"),
        ({"json": "[" * 30_000}, "nested deeper than 64"),
        ({"json": '{"a":' * 5_000}, "nested deeper than 64|not valid JSON"),
        ({"json": endless()}, "nested deeper than 64"),
        ({"json": doubled()}, "at most 32768 bytes"),
        ({"json": {"enum": list(range(100_000))}}, "at most 32768 bytes"),
        ({"json": {"enum": ["é" * 20_000]}}, "at most 32768 bytes"),
        ({"json": "x" * 10_000_000}, "at most 32768 bytes"),
        ({"json": chained(65)}, "65 .ref that follow"),
        ({"json": chained(1100)}, "at most 32768 bytes|1100 .ref"),
        ({"json": {"$ref": "https://example.com/schema.json"}}, "nothing is ever fetched"),
        ({"json": {"items": [{"$ref": "other.json#/a"}]}}, "nothing is ever fetched"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "nothing is ever fetched"),
        ({"json": {"properties": {"a": {"$ref": "#/$defs/b"}}}}, "does not have"),
        ({"json": {"$ref": "#/items/7", "items": []}}, "does not have"),
        ({"regex": 3}, "regex is 3"),
        ({"regex": ""}, "not empty"),
        ({"regex": "a" * 4097}, "at most 4096 bytes"),
        ({"regex": "a" * 1_000_000}, "at most 4096 bytes"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"choice": "ab"}, "list of texts"),
        ({"choice": []}, "no entries"),
        ({"choice": ["a", ""]}, r"choice\[1\]"),
        ({"choice": ["a"] * 1001}, "more than 1000 entries"),
        ({"choice": ["a" * 20_000] * 2}, "40000 bytes in all"),
        ({"choice": [1]}, r"choice\[0\] is 1"),
        ({"grammar": "(" * 60_000}, "at most 16384 bytes"),
        ({"grammar": rules(501)}, "501 rules"),
        ({"grammar": rules(3000)}, "at most 16384 bytes"),
        ({"guided_json": {}}, "has no field 'guided_json'"),
        ({"json": '{"type": "string", "type": "object"}'}, "'type' twice"),
        ({"json": '{"properties": {"a": {}, "b": {}, "a": true}}'}, "'a' twice"),
        ({"lark": "start:"}, "did you mean grammar"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says: str):
    def refused() -> None:
        with pytest.raises(RequestError, match=says) as caught:
            StructuredOutputs.of(given)
        assert str(caught.value).startswith("structured_outputs")
        assert len(str(caught.value)) < 400

    assert takes_less(1, refused)


@settings(max_examples=examples(40))
@given(edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_a_chain_of_references_is_as_long_as_its_longest_path(edges: list[tuple[int, int]]):
    """Each part repeated so often that a path of k parts is 10 * k references, without loops: 7
    parts are too many.
    """
    steps = 10
    forward = {(min(pair), max(pair)) for pair in edges if pair[0] != pair[1]}
    parts: dict[str, Any] = {}
    for node in range(10):
        for i in range(steps - 1):
            parts[f"{node}.{i}"] = {"$ref": f"#/$defs/{node}.{i + 1}"}
        below = [{"$ref": f"#/$defs/{to}.0"} for start, to in sorted(forward) if start == node]
        parts[f"{node}.{steps - 1}"] = {"anyOf": below}
    lengths = [0] * 10
    for node in reversed(range(10)):
        lengths[node] = steps + max(
            (lengths[to] for start, to in forward if start == node), default=0
        )
    schema = {"anyOf": [{"$ref": f"#/$defs/{node}.0"} for node in range(10)], "$defs": parts}
    if max(lengths) <= 64:
        StructuredOutputs(json=schema)
    else:
        with pytest.raises(RequestError, match=f"{max(lengths)} .ref"):
            StructuredOutputs(json=schema)


def test_ref_is_a_name_like_any_other_where_it_is_data():
    elsewhere = "https://example.com"
    StructuredOutputs(
        json={
            "const": {"$ref": elsewhere},
            "default": {"$ref": elsewhere},
            "enum": [{"$ref": elsewhere}],
        }
    )
    StructuredOutputs(json={"properties": {"$ref": {"type": "string"}, "default": {"$ref": "#"}}})
    with pytest.raises(RequestError, match="fetched"):
        StructuredOutputs(json={"properties": {"default": {"$ref": elsewhere}}})


def test_pointers_are_unescaped():
    StructuredOutputs(json={"$ref": "#/$defs/a~1b~0c%20d", "$defs": {"a/b~c d": {"type": "null"}}})
    StructuredOutputs(json={"$ref": "#/anyOf/1", "anyOf": [{"type": "null"}, {"type": "integer"}]})


def test_sampling_params_take_it_and_a_mapping_of_it():
    outputs = StructuredOutputs(regex="a+")
    assert SamplingParams(structured_outputs=outputs) == SamplingParams(
        structured_outputs={"regex": "a+"}
    )  # type: ignore[arg-type]
    assert SamplingParams().structured_outputs is None
    with pytest.raises(RequestError, match="structured_outputs is 'json'"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_older_names_are_explained(name: str):
    with refuses(RequestError, f"'{name}'", "did you mean structured_outputs"):
        SamplingParams(**{name: "a"})


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({}, "1 to 256 forms"),
        ({f"a{i}": {"regex": "a"} for i in range(257)}, "1 to 256 forms"),
        ({"A": {"regex": "a"}}, "a name is like"),
        ({"a": {"json": nested(70)}}, "nested deeper"),
        ({"a": {"json": {"description": "x" * 33_000}}}, "at most 32768"),
        ({f"a{i}": {"json": {"description": "x" * 32_000}} for i in range(20)}, "at most 524288"),
        ({"a": {"grammar": "start: @b", "parts": {"b": {"regex": "a"}}}}, "parts of its own"),
    ],
)
def test_parts_keep_the_limits_of_every_form(parts: dict[str, Any], why: str):
    with pytest.raises(RequestError, match=why):
        StructuredOutputs(grammar="start: @a", parts=parts)


def test_parts_belong_to_a_grammar():
    with refuses(RequestError, "structured_outputs.parts", "structured_outputs.grammar"):
        StructuredOutputs(regex="a", parts={"a": {"regex": "a"}})
    made = StructuredOutputs(grammar="start: @a", parts={"a": {"choice": ["x"]}})
    assert hash(made) == hash(StructuredOutputs.of(made.given()))
    assert (
        made.key() != StructuredOutputs(grammar="start: @a", parts={"a": {"choice": ["y"]}}).key()
    )
