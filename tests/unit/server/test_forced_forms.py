"""Calls that are forced in every form, through the engine's own grammars: whatever walk through a
grammar, with markup as special tokens, as ordinary ones or as text, is read back as calls whose
arguments fit the schema."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tests.unit.server.call_form_cases import FORMS, large_tools, named_format, tokenizer
from tests.unit.server.joined_pieces import joined

from freight.engine.grammar import Grammars, Matcher
from freight.serve.answers.pieces import PieceKind
from freight.serve.transport.errors import ApiError
from freight.structured import StructuredOutputs
from freight.text.tokenizer import Tokenizer

UNITS = {
    "type": "array",
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": ["null", "integer"], "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
QUOTED = 'a"b\\ü'  # a name for the forms that write names as JSON
PARAMETERS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6, "description": "Where."},
            "days": {"type": "integer", "minimum": 1, "maximum": 3},
            "units": UNITS,
            "mode": {"enum": ["x", "y z"]},
            "or": {"anyOf": [{"type": "integer", "maximum": 99}, {"type": "null"}]},
        },
        "required": ["city", "units"],
    },
    "get-time": None,
    "at": {
        "$ref": "#/$defs/p",
        "$defs": {
            "p": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/e"}, "q": {"$ref": "#/$defs/q"}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "e": {"enum": ["a", "b"]},
            "q": {
                "type": "object",
                "properties": {"z": {"type": "string", "maxLength": 3}},
                "additionalProperties": False,
            },
        },
    },
    QUOTED: None,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name} | ({} if schema is None else {"parameters": schema}),
    }
    for name, schema in PARAMETERS.items()
]


def end_of(model: Tokenizer) -> int:
    (end,) = model.encode("<|im_end|>", False)
    return end


def matcher_of(model: Tokenizer, outputs: Mapping[str, Any]) -> Matcher:
    """As the engine makes one."""
    grammars = Grammars(model, model.vocab_size, [end_of(model)])
    return grammars.matcher(StructuredOutputs(**outputs))


def walk(model: Tokenizer, outputs: Mapping[str, Any], seed: int) -> str:
    """A text that the form allows: at each step any allowed token, and the end as soon as it is
    allowed.
    """
    matcher, draw, ids, end = matcher_of(model, outputs), random.Random(seed), [], end_of(model)
    for _ in range(4000):
        allowed = matcher.permitted(ids)
        assert allowed is not None, matcher.error
        tokens = [int(token) for token in np.flatnonzero(allowed)]
        if end in tokens and (len(tokens) == 1 or draw.random() < 0.5):
            return model.decode(ids, skip_special_tokens=False)
        tokens = [token for token in tokens if token != end]
        marks = [
            token for token in tokens if token >= 256
        ]  # left to chance, a text would never end
        ids.append(draw.choice(marks if marks and draw.random() < 0.3 else tokens))
    raise AssertionError("the walk did not end")


@pytest.mark.parametrize("markers", ["special", "added", "text"])
@pytest.mark.parametrize("name", FORMS)
def test_what_the_grammar_writes_is_read_back_as_allowed_calls(name: str, markers: str) -> None:
    form = named_format(name, None, markers)
    seen: set[str] = set()
    for seed in range(4):
        parallel = seed % 2 == 1
        names = [list(PARAMETERS)[seed % 3], "at"]
        text = walk(form.tokenizer, form.call_to(TOOLS, names, parallel), seed)
        found = joined(form.parser("", TOOLS), [text], True)
        assert {piece.kind for piece in found} == {PieceKind.TOOL_CALL}, text
        assert parallel or len(found) == 1
        for piece in found:
            assert piece.name in names
            arguments = json.loads(piece.text)
            jsonschema_rs.validate(PARAMETERS[piece.name] or {"maxProperties": 0}, arguments)
            seen.update(arguments)
    assert "x" in seen


def test_a_name_of_a_tool_may_need_escapes_where_it_is_json() -> None:
    quoted = [name for name, form in FORMS.items() if form.quoted]
    assert quoted
    for form in map(named_format, quoted):
        text = walk(form.tokenizer, form.call_to(TOOLS, [QUOTED], False), 0)
        (found,) = joined(form.parser("", TOOLS), [text], True)
        assert (found.name, json.loads(found.text)) == (QUOTED, {}), text


def allows(model: Tokenizer, outputs: Mapping[str, Any], text: str, spelled: str = "") -> bool:
    """Whether `text`, as the tokenizer writes it, is a whole answer; `spelled` before it comes
    letter by letter.
    """
    ids = [token for letter in spelled for token in model.encode(letter, False)] + model.encode(
        text, False
    )
    matcher = matcher_of(model, outputs)
    for count, token in enumerate(ids):
        allowed = matcher.permitted(ids[:count])
        if allowed is None or not allowed[token]:
            return False
    allowed = matcher.permitted(ids)
    return allowed is not None and bool(allowed[end_of(model)])


def qwen(city: str, days: str = "2") -> str:
    rest = f"<parameter=days>\n{days}\n</parameter>\n" if days else ""
    return (
        "<tool_call>\n<function=f>\n"
        + (f"<parameter=city>\n{city}\n</parameter>\n" if city else "")
        + f"{rest}</function>\n</tool_call>"
    )


@pytest.mark.parametrize("markers", ["special", "added", "text"])
def test_arguments_come_in_the_order_of_the_schema_and_required_ones_always(markers: str) -> None:
    form = named_format("QWEN3_CODER", None, markers)
    properties = {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 3}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    forced = form.call_to([{"function": {"name": "f", "parameters": schema}}], ["f"], False)
    for text, allowed in (
        (qwen('a "b" <c>\n</parameter >'), True),
        (qwen("a", ""), True),
        (qwen("", "2"), False),
        (qwen("a", "4"), False),
        (qwen("a", '"2"'), False),
        (qwen("a") + qwen("a"), False),
        ("So " + qwen("a"), False),
    ):
        assert allows(form.tokenizer, forced, text) == allowed, text


def test_a_schema_may_have_alternatives() -> None:
    form = named_format("GLM47")
    branch = [
        {"properties": {"a": {"const": 1}}, "required": ["a"]},
        {"properties": {"b": {"enum": ["x"]}}},
    ]
    schema = {"type": "object", "properties": {"c": {"type": "null"}}, "anyOf": branch}
    forced = form.call_to([{"function": {"name": "f", "parameters": schema}}], ["f"], False)
    for body, allowed in (
        ("<arg_key>a</arg_key><arg_value>1</arg_value>", True),
        (
            "<arg_key>c</arg_key><arg_value>null</arg_value><arg_key>b</arg_key><arg_value>x</arg_value>",
            True,
        ),
        ("<arg_key>b</arg_key><arg_value>y</arg_value>", False),
        ("", True),
    ):
        assert allows(form.tokenizer, forced, f"<tool_call>f{body}</tool_call>") == allowed, body


@pytest.mark.parametrize("name", ["QWEN3_CODER", "HERMES"])
@pytest.mark.parametrize("special", [True, False])
def test_after_the_end_of_a_thought_there_is_only_the_call(name: str, special: bool) -> None:
    """Also where the model spells the tag with other tokens than its own: it is read as the end
    then, too.
    """
    marks = ("<think>", "</think>")
    model = tokenizer("", marks, ()) if special else tokenizer("", (), marks)
    form = named_format(name, "THINK", model=model)
    forced = form.call_to(TOOLS, ["get-time"], False, "<|im_start|>assistant\n<think>\n")
    call = {
        "QWEN3_CODER": "<tool_call>\n<function=get-time>\n</function>\n</tool_call>",
        "HERMES": '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>',
    }[name]
    assert allows(model, forced, f"Well {{<\n</think>\n\n{call}")
    assert allows(model, forced, f"\n\n{call}", "Well</think>")
    assert not allows(model, forced, f"</think>\n\n{call}", "Well</think>So")
    assert not allows(model, forced, f"Well</think>So I say</think>\n\n{call}")
    assert not allows(model, forced, f"Well</think>So {call}")
    assert not allows(model, forced, call)
    free = form.call_to(TOOLS, ["get-time"], True, "<|im_start|>assistant\n")
    assert allows(model, free, call)
    assert allows(model, free, f"<think>\nWhy?</think>{call}")
    assert allows(model, free, f"{call}\n{call}")


@pytest.mark.parametrize("name", ["QWEN3_CODER", "GEMMA4", "DEEPSEEK_V32"])
def test_many_tools_compile(name: str) -> None:
    tools = large_tools(24)
    form = named_format(name)
    matcher_of(form.tokenizer, form.call_to(tools, [f"tool_{index}" for index in range(24)], True))


def test_a_schema_of_which_no_grammar_can_be_made_is_refused() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    for name in ("QWEN3_CODER", "GEMMA4"):
        for schema in (deep, {"$ref": "https://example.com/x"}, {"description": "a" * 40_000}):
            function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
            with pytest.raises(ApiError) as error:
                named_format(name).call_to([{"function": function}], ["f"], False)
            assert (error.value.status, error.value.param) == (400, "tools")


def test_a_schema_may_refer_to_itself() -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/t"}, "name": {"type": "string"}},
    }
    schema = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/t"}},
        "required": ["t"],
        "$defs": {"t": tree},
    }
    tools = [{"function": {"name": "f", "parameters": schema}}]
    for name, text in (
        ("GEMMA4", '<|tool_call>call:f{t:{next:{name:<|"|>a<|"|>}}}<tool_call|>'),
        (
            "GLM47",
            '<tool_call>f<arg_key>t</arg_key><arg_value>{"next": {"name": "a"}}</arg_value></tool_call>',
        ),
    ):
        form = named_format(name)
        forced = form.call_to(tools, ["f"], False)
        assert allows(form.tokenizer, forced, text)
        (found,) = joined(form.parser("", tools), [text], True)
        assert json.loads(found.text) == {"t": {"next": {"name": "a"}}}


TEXT = {"type": "string", "maxLength": 3}
ALTERNATIVES: dict[str, Any] = {  # as pydantic writes Optional[Literal["a", "b"]] and the like
    "choice": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
    "bounded": {"anyOf": [TEXT, {"type": "null"}], "description": "What."},
    "either": {"type": ["string", "null"], "maxLength": 2},
    "number": {"anyOf": [{"anyOf": [{"$ref": "#/$defs/n"}, {"const": "x"}]}, {"type": "boolean"}]},
    "mixed": {"enum": [1, 2.5, None, True, "a"]},
}
DEFINED = {"$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}}


@pytest.mark.parametrize("name", FORMS)
def test_each_alternative_of_a_value_holds(name: str) -> None:
    form, schema = (
        named_format(name, None, "special"),
        {"type": "object", "properties": ALTERNATIVES, **DEFINED},
    )
    schema |= {"required": list(ALTERNATIVES), "additionalProperties": False}
    tools = [{"function": {"name": "f", "parameters": schema}}]
    forced, kinds = form.call_to(tools, ["f"], False), set()
    for seed in range(6):
        (found,) = joined(form.parser("", tools), [walk(form.tokenizer, forced, seed)], True)
        assert found.kind is PieceKind.TOOL_CALL
        arguments = json.loads(found.text)
        jsonschema_rs.validate(schema, arguments)
        kinds |= {type(value) for value in arguments.values()}
    assert kinds > {str, type(None)}


ODD = ("a b", "k:k", 'k"q', "ü", "{", '"x"', "<b>", "")


@pytest.mark.parametrize("key", ODD)
@pytest.mark.parametrize("name", FORMS)
def test_names_of_arguments_are_read_as_they_are_or_refused(name: str, key: str) -> None:
    form = named_format(name, None, "special")
    tools = [
        {
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {key: TEXT}, "required": [key]},
            }
        }
    ]
    refused = None
    try:
        forced = form.call_to(tools, ["f"], False)
    except ApiError as error:
        refused = error
    if refused is not None:
        assert (refused.status, refused.param) == (400, "tools")
        assert repr(key) in refused.message
        assert key in ("", "<b>", '"x"')
        return
    (found,) = joined(form.parser("", tools), [walk(form.tokenizer, forced, 1)], True)
    assert found.kind is PieceKind.TOOL_CALL
    assert list(json.loads(found.text)) == [key]
