"""Conversations, tools and the form of an answer: what a chat's body makes of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.clock import is_quicker, takes_less
from tests.refusals import refuses
from tests.unit.server.openai_cases import (
    HEAD,
    HELLO,
    LIMITS,
    SERVED,
    TOOL,
    WITH_PARSER,
    chunks,
    deltas,
    tokenized,
)

from freight.errors import RequestError
from freight.sampling import SamplingParams
from freight.serve.openai import sampling_fields
from freight.serve.openai.chat_request import parse_chat
from freight.serve.openai.completion_request import parse_completion
from freight.serve.tgi.request import parse_generate
from freight.serve.transport.errors import ApiError
from freight.structured import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(served=SERVED, **body):
    return parse_chat({"messages": HELLO, **body}, served, LIMITS)


def refused(**body):
    with pytest.raises(ApiError) as error:
        chat(**body)
    assert error.value.status == 400
    return error.value


@pytest.fixture
def forms(monkeypatch):
    """The forms of answers that SamplingParams were made with."""
    seen = []

    def make(structured_outputs=None, **values):
        if structured_outputs == {"grammar": "bad"}:
            raise RequestError("structured_outputs.grammar has no rule start")
        seen.append(structured_outputs)
        return SamplingParams(**values)

    monkeypatch.setattr(sampling_fields, "SamplingParams", make)
    return seen


def test_a_conversation_is_what_templates_read():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    empty = {"id": "2", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "x",
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call, empty],
            "reasoning": "hm",
            "refusal": None,
        },
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "assistant", "content": "c", "reasoning_content": "so", "tool_calls": []},
    ]
    none = {**empty, "function": {"name": "f", "arguments": {}}}
    assert chat(messages=messages).work[0].prompt.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "ab", "name": "x"},
        {
            "role": "assistant",
            "tool_calls": [call, none],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "assistant", "content": "c", "reasoning": "so", "reasoning_content": "so"},
    ]


def test_allowed_tools_leave_the_others_out():
    other = {"type": "function", "function": {"name": "other"}}
    choice = {"mode": "auto", "tools": [other]}
    asked = []
    served = replace(
        SERVED,
        forced_call=lambda tools, names, many, prompt: (
            asked.append((tools, names)) or {"regex": "x"}
        ),
    )

    def tools_of(**allowed):
        given = {"type": "allowed_tools", "allowed_tools": {**choice, **allowed}}
        values = chat(served, tools=[TOOL, other], tool_choice=given).work[0].prompt.template_values
        return values.get("tools", [])

    assert tools_of() == [other]
    assert tools_of(tools=[]) == []
    assert not asked
    assert tools_of(mode="required") == [other]
    assert {names for _, names in asked} == {("other",)}
    for allowed, field in (
        ({"mode": "none"}, "mode"),
        ({"tools": None}, "tools"),
        ({"tools": [other, {"type": "function", "function": {"name": "third"}}]}, "tools[1]"),
    ):
        with pytest.raises(ApiError) as error:
            tools_of(**allowed)
        assert error.value.param == f"tool_choice.allowed_tools.{field}"


def test_what_the_template_may_read():
    def values(**body):
        return chat(**body).work[0].prompt.template_values

    assert values(reasoning_effort="low") == {"reasoning_effort": "low"}
    assert values(reasoning_effort="none") == {"enable_thinking": False}
    assert values(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == {
        "enable_thinking": True
    }


def test_the_last_message_can_be_continued():
    messages = [*HELLO, {"role": "assistant", "content": "I"}]
    conversation = chat(messages=messages, continue_final_message=True).work[0].prompt
    assert (conversation.continue_final_message, conversation.add_generation_prompt) == (
        True,
        False,
    )
    assert chat().work[0].prompt.add_generation_prompt
    assert not chat(add_generation_prompt=False).work[0].prompt.add_generation_prompt
    error = refused(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function(name="")]}, "tools[0].function.name"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [function(description=5)]}, "tools[0].function.description"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(other=5)]}, "tools[0].function.other"),
        ({"tools": [function(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        (
            {"tools": [function(parameters={"properties": []})]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [function(parameters={"properties": {"a": 5}})]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [function(parameters={"required": "a"})]},
            "tools[0].function.parameters.required",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),  # no known markup
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_bad_tools_are_refused_by_field(body, param):
    assert refused(**body).param == param


def test_a_demanded_call_is_a_form_that_the_rendered_prompt_decides(forms):
    def forced_call(tools, names, parallel, prompt_text):
        return {"grammar": f"{len(tools)} {names} {parallel} {prompt_text}"}

    served = replace(WITH_PARSER, forced_call=forced_call)
    tools = [TOOL, function()]
    named = {"type": "function", "function": {"name": "f"}}
    [work] = chat(served, tools=tools, tool_choice=named, parallel_tool_calls=False).work
    assert forms == [{"grammar": "2 ('f',) False None"}]
    assert work.params_of("<think>").n == 1
    assert forms[1:] == [{"grammar": "2 ('f',) False <think>"}]
    chat(served, tools=tools, tool_choice="required")
    assert forms[2:] == [{"grammar": "2 ('weather', 'f') True None"}]
    assert chat(served, tools=tools).work[0].params_of is None
    assert forms[3:] == [None]


@pytest.mark.parametrize(
    "parallel", [{}, {"parallel_tool_calls": True}, {"parallel_tool_calls": None}]
)
def test_a_function_that_is_named_is_called_exactly_once(forms, parallel):
    asked = []
    served = replace(
        WITH_PARSER,
        forced_call=lambda tools, names, many, prompt: asked.append(many) or {"regex": "x"},
    )
    tools = [TOOL, function()]
    call = chat(
        served, tools=tools, tool_choice={"type": "function", "function": {"name": "f"}}, **parallel
    )
    call.work[0].params_of("")
    assert asked == [False, False]
    chat(served, tools=tools, tool_choice="required", **parallel).work[0].params_of("")
    assert asked[2:] == [True, True], "any of the functions: as many calls as the client allows"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_a_forced_call_wins_over_a_form_which_is_named_as_ignored(forms, given, name):
    served = replace(WITH_PARSER, forced_call=lambda *_: {"regex": "call"})
    call = chat(served, tools=[TOOL], tool_choice="required", **given)
    assert (forms, call.ignored, call.work[0].form_from) == (
        [{"regex": "call"}],
        (name,),
        "tool_choice",
    )
    assert name not in chat(served, tools=[TOOL], **given).ignored


def test_what_a_grammar_cannot_hold_of_a_schema_is_named(forms):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "format": "frog"}
    held = {"type": "array", "items": {"type": "integer"}}
    for given, where in [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            "response_format.schema",
        ),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ({"guided_json": json.dumps(schema)}, "guided_json"),
    ]:
        for call in (chat(**given), parse_completion({"prompt": "x", **given}, SERVED, LIMITS)):
            assert call.ignored == (f"{where}.uniqueItems", f"{where}.format")
        assert forms[-2:] == [{"json": held}] * 2
    strict = replace(SERVED, strict_schemas=True)
    with refuses(ApiError, "uniqueItems", "--strict-schemas") as error:
        chat(strict, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert (error.value.param, error.value.code) == ("response_format", "invalid_grammar")
    del schema["uniqueItems"]
    assert chat(strict, guided_json=schema).ignored == ("guided_json.format",), "an annotation"


def test_what_a_grammar_cannot_hold_of_parameters_is_named_only_where_a_call_is_forced(forms):
    seen = []
    served = replace(
        WITH_PARSER, forced_call=lambda tools, *_: seen.append(tools) or {"regex": "x"}
    )
    tools = [
        function(
            parameters={
                "type": "object",
                "properties": {"a": {"type": "array", "uniqueItems": True}},
            }
        )
    ]
    forced = chat(served, tools=tools, tool_choice="required")
    assert forced.ignored == ("tools[].function.parameters.uniqueItems",)
    assert seen[0][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "array"}},
    }
    assert forced.work[0].prompt.template_values["tools"] == tools, (
        "the model reads what the client wrote"
    )
    assert chat(served, tools=tools).ignored == ()
    with pytest.raises(ApiError, match="strict-schemas") as error:
        chat(replace(served, strict_schemas=True), tools=tools, tool_choice="required")
    assert error.value.param == "tools[0].function.parameters"
    assert chat(replace(served, strict_schemas=True), tools=tools).ignored == ()


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "json", "value": {"properties": {"a": {}}}}},
            {"json": {"type": "object", "properties": {"a": {}}}},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_the_form_of_an_answer_can_be_said_in_four_ways(forms, body, form):
    chat(**body)
    parse_completion({"prompt": "x", **body}, SERVED, LIMITS)
    assert forms == [form, form]


def test_a_work_knows_the_field_of_its_form():
    tools = {"tools": [TOOL], "tool_choice": "required"}
    with_calls = replace(SERVED, forced_call=lambda *_: {"regex": "a"})
    assert chat(with_calls, **tools).work[0].form_from == "tool_choice"
    for body in ({"guided_regex": "a"}, {"response_format": {"type": "json_object"}}):
        call = parse_completion({"prompt": "x", **body}, SERVED, LIMITS)
        assert {chat(**body).work[0].form_from, call.work[0].form_from} == set(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_object", "value": "x"}}, "response_format.value"),
        ({"response_format": {"type": "regex"}}, "response_format.value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"guided_grammar": "bad"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "bad"}}, "structured_outputs.grammar"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_form_that_is_not_known_is_refused_by_field(forms, body, param):
    assert refused(**body).param == param


def test_a_long_prompt_is_refused_with_three_numbers():
    call = chat(max_tokens=100)
    with pytest.raises(ApiError, match=r"1024 tokens.*1000 tokens.*100") as error:
        call.reply(HEAD, SERVED, tokenized(call, ids=range(1000)))
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")
    chat().reply(HEAD, SERVED, tokenized(call, ids=range(1000)))


def test_a_clients_own_id_is_kept():
    assert chat(request_id="a-1.b").request_id == "a-1.b"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "x"}] * 4000},
        {"tools": [{"type": "x"}] * 100_000},
        {"stop": ["x" * 10_000] * 10_000},
        {"logit_bias": {str(i): "x" for i in range(200_000)}},
        {"chat_template_kwargs": {f"x{i}": 1 for i in range(100_000)}},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 100_000}]},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_flood_is_refused_quickly(body):
    assert takes_less(1, lambda: refused(**body))


def test_a_chunk_costs_less_than_its_json_would():
    """What chunks have in common is written once for all of them."""
    call = chat()
    reply = call.reply(HEAD, SERVED, tokenized(call))
    [delta] = deltas(["word "], reason=None)
    [chunk] = chunks(reply.advance(0, delta) + reply.end())

    assert is_quicker(lambda: reply.advance(0, delta), lambda: json.dumps(chunk))


def test_a_form_begins_after_the_reasoning_once_the_prompt_is_known():
    def after_reasoning(form, prompt_text):
        return {
            "grammar": "start: /t/ @answer",
            "parts": {"answer": {**form, "regex": form["regex"] + prompt_text}},
        }

    served = replace(WITH_PARSER, after_reasoning=after_reasoning)
    (work,) = parse_chat(
        {"messages": HELLO, "structured_outputs": {"regex": "a"}}, served, LIMITS
    ).work
    assert work.params.structured_outputs == StructuredOutputs(regex="a")
    found = work.params_of("p").structured_outputs
    assert found == StructuredOutputs(
        grammar="start: /t/ @answer", parts={"answer": {"regex": "ap"}}
    )
    (free,) = parse_chat({"messages": HELLO}, served, LIMITS).work
    assert free.params_of is None


def test_what_no_grammar_holds_of_tgis_schema_is_named_or_refused():
    grammar = {"type": "json", "value": {"type": "object", "not": {}}}
    body = {"inputs": "x", "parameters": {"grammar": grammar}}
    assert parse_generate(body, SERVED, LIMITS.sampling, None).ignored == (
        "parameters.grammar.value.not",
    )
    with pytest.raises(ApiError, match="strict-schemas") as error:
        parse_generate(body, replace(SERVED, strict_schemas=True), LIMITS.sampling, None)
    assert (error.value.status, error.value.param) == (422, "parameters.grammar.value")
