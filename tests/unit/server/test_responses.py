"""OpenAI's responses: what a body means, and that streamed and whole answers are equal and read by
OpenAI's client.
"""

from __future__ import annotations

import json
from dataclasses import replace

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from tests.refusals import refuses
from tests.unit.server.openai_cases import (
    HEAD,
    LIMITS,
    SERVED,
    WITH_PARSER,
    answers,
    deltas,
    split,
    tokenized,
)

from freight.outputs import CompletionDelta, FinishReason, RequestDelta
from freight.serve.openai.responses_request import parse_responses
from freight.serve.transport.errors import ApiError

CALL = '<call>{"name": "weather", "arguments": {"city": "Zürich"}}</call>'
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
TEXTS = [
    "",
    "Grüße, 世界 \u2028 👋",
    "<think>hm, 1 < 2</think>So: ",
    "a" + CALL,
    CALL + CALL,
    "<call>{'x",
    "<thi",
]


def call_of(served=WITH_PARSER, **body):
    return parse_responses({"input": "Hello", **body}, served, LIMITS)


def messages(items, **body):
    return call_of(input=items, **body).work[0].prompt.messages


def refused(**body):
    with pytest.raises(ApiError) as error:
        call_of(**body)
    assert error.value.status == 400
    assert error.value.param is None or error.value.message.startswith(error.value.param)
    return error.value.param


def events(raw):
    """Events by their data; each has its name twice, and its number."""
    parts = raw.decode("ascii").split("\n\n")
    assert parts.pop() == ""
    found = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def client_of(raw, content_type="text/event-stream"):
    answer = httpx2.Response(200, headers={"content-type": content_type}, content=raw)
    transport = httpx2.MockTransport(lambda request: answer)
    return openai.OpenAI(
        api_key="x", base_url="http://test", http_client=httpx2.Client(transport=transport)
    )


@given(
    st.lists(st.sampled_from(TEXTS), max_size=4).map("".join),
    st.lists(st.integers(1, 200), max_size=8),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_a_stream_is_the_body_in_parts_however_the_text_is_split(text, cuts, reason):
    call = call_of(tools=[TOOL], stream=True)
    raw, body = answers(
        call, [(0, delta) for delta in deltas(split(text, cuts), reason, cached=2)], WITH_PARSER
    )
    _, unsplit = answers(call, [(0, delta) for delta in deltas([text], reason)], WITH_PARSER)
    told = events(raw)
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1] == {**told[-1], "type": f"response.{body['status']}", "response": body}
    assert body["output"] == unsplit["output"]
    items, texts = [], {}
    for event in told[2:-1]:
        kind, at = event["type"].rpartition(".")[2], event["output_index"]
        if event["type"] == "response.output_item.added":
            assert at == len(items)
            assert len(texts) == at
            texts[at] = ""
        elif kind == "delta":
            assert at == len(items)
            texts[at] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items.append(event["item"])
            assert texts[at] == event["item"].get("arguments", "") + "".join(
                part["text"] for part in event["item"].get("content", [])
            )
    assert items == body["output"]
    assert len({item["id"] for item in items}) == len(items) > 0
    Response.model_validate_json(json.dumps(body), strict=True)


def test_events_come_in_the_order_of_openais_api():
    text = "<think>so</think>It is: " + CALL
    raw, _ = answers(
        call_of(tools=[TOOL], stream=True), [(0, d) for d in deltas([text])], WITH_PARSER
    )
    names = [event["type"].removeprefix("response.") for event in events(raw)]
    part = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = [f"function_call_arguments.{kind}" for kind in ("delta", "done")]
    assert names == [
        *("created", "in_progress"),
        *[name.format("reasoning_text") for name in part],
        *[name.format("output_text") for name in part],
        *("output_item.added", *call, "output_item.done"),
        "completed",
    ]


def test_the_accumulator_of_openais_client_reads_a_stream():
    text = "<think>so</think>It is: " + CALL
    feed = [(0, delta) for delta in deltas(split(text, range(0, 90, 7)), cached=2)]
    raw, body = answers(call_of(tools=[TOOL], stream=True), feed, WITH_PARSER)
    with client_of(raw) as client, client.responses.stream(model="demo", input="Hello") as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == final.output_text == "It is: "
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[0].content[0].text == "so"
    assert json.loads(final.output[2].arguments) == {"city": "Zürich"}
    assert final.usage.to_dict() == body["usage"]
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert (
        0
        < body["usage"]["output_tokens_details"]["reasoning_tokens"]
        < body["usage"]["output_tokens"]
    )
    with client_of(json.dumps(body), "application/json") as client:
        assert client.responses.create(model="demo", input="Hello").output_text == "It is: "


def test_an_answer_that_is_too_long_is_incomplete():
    raw, body = answers(
        call_of(stream=True), [(0, d) for d in deltas(["ab"], FinishReason.LENGTH)], SERVED
    )
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert body["output"][0]["status"] == events(raw)[-2]["item"]["status"] == "incomplete"


@pytest.mark.parametrize("stop", ["END", 7, None])
def test_what_ended_an_answer_is_told(stop):
    output = CompletionDelta(0, [20], "ab", None, FinishReason.STOP, stop, None)
    raw, body = answers(call_of(stream=True), [(0, RequestDelta("r1", [output], True))], SERVED)
    assert (body["status"], body["stop_reason"]) == ("completed", stop)
    assert events(raw)[-1]["response"]["stop_reason"] == stop
    assert events(raw)[0]["response"]["stop_reason"] is None


def test_a_stream_that_fails_ends_with_the_response_that_failed():
    call = call_of(SERVED, stream=True)
    reply = call.reply(HEAD, SERVED, tokenized(call))
    raw = reply.advance(0, next(deltas(["ab", "c"])))  # the status line waits for the first token
    raw = reply.start() + raw
    output = CompletionDelta(0, [], "", None, FinishReason.TIMEOUT, None, None)
    with pytest.raises(ApiError) as error:
        reply.advance(0, RequestDelta("r1", [output], True))
    last = events(raw + reply.failure(error.value))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": error.value.message}
    assert last["response"]["output"][0]["content"][0]["text"] == "ab"


@pytest.mark.parametrize("arguments", ['{"a": ', '"Bonn"', "[]"])
def test_arguments_of_a_call_that_are_no_object_are_refused_by_path(arguments):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    with pytest.raises(ApiError) as error:
        messages([{"role": "user", "content": "a"}, call])
    assert error.value.param == "input[1].arguments"


def test_items_become_a_conversation():
    items = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "x"}],
        },
        {"type": "message", "role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "f",
            "arguments": '{"a": 1}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}], "summary": []},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]
    function = {"type": "function"}
    assert messages(items, instructions="First.") == [
        {"role": "system", "content": "First.\n\nBe x"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "content": "b",
            "tool_calls": [
                {"id": "c1", **function, "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "c2", **function, "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {
            "role": "assistant",
            "reasoning": "so",
            "reasoning_content": "so",
            "tool_calls": [{"id": "c3", **function, "function": {"name": "f", "arguments": "{}"}}],
        },
    ]


def test_an_answer_can_be_sent_back_as_it_is():
    text = "<think>so</think>It is: " + CALL
    _, body = answers(call_of(tools=[TOOL]), [(0, delta) for delta in deltas([text])], WITH_PARSER)
    output = {
        "type": "function_call_output",
        "call_id": body["output"][2]["call_id"],
        "output": "rain",
    }
    call = call_of(input=[{"role": "user", "content": "x"}, *body["output"], output])
    assert call.ignored == ()
    assert [message["role"] for message in call.work[0].prompt.messages] == [
        "user",
        "assistant",
        "tool",
    ]


def test_what_agents_send_beside_is_named_and_not_refused():
    body = {
        "tools": [
            {"type": "web_search"},
            {**TOOL, "defer_loading": True},
            {"type": "custom", "name": "apply_patch"},
        ],
        "tool_choice": {"type": "web_search"},
        "input": [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "ws_1"}],
        "include": ["reasoning.encrypted_content"],
        "store": True,
        "background": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low"},
        "client_metadata": {"x": 1},
        "service_tier": None,
    }
    call = call_of(**body)
    assert set(call.ignored) == {
        *(
            "tools[].web_search",
            "tools[].defer_loading",
            "tools[].custom",
            "tool_choice.web_search",
        ),
        *(
            "input[].web_search_call",
            "include",
            "store",
            "reasoning.summary",
            "text.verbosity",
            "client_metadata",
        ),
    }
    values = call.work[0].prompt.template_values
    assert [tool["function"]["name"] for tool in values["tools"]] == ["weather"]
    assert values["reasoning_effort"] == "high"


def test_fields_reach_the_sampler():
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    call = call_of(max_output_tokens=7, temperature=0.5, top_p=0.25, seed=3, text={"format": form})
    params = call.work[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (7, 0.5, 0.25, 3)
    assert params.structured_outputs is not None
    _, body = answers(call, [(0, delta) for delta in deltas(["{}"])])
    assert body["text"] == {"format": form}
    assert (body["temperature"], body["max_output_tokens"], body["store"]) == (0.5, 7, False)


def test_allowed_tools_leave_the_others_out():
    other = {**TOOL, "name": "other"}
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "other"}],
    }
    call = call_of(tools=[TOOL, other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in call.work[0].prompt.template_values["tools"]] == [
        "other"
    ]
    choice["tools"] = [{"name": {}}]  # no name at all
    assert "tools" not in call_of(tools=[TOOL], tool_choice=choice).work[0].prompt.template_values


def test_a_function_that_is_named_is_called_once_and_wins_over_a_form():
    asked = []
    served = replace(
        WITH_PARSER,
        forced_call=lambda tools, names, many, prompt: asked.append(many) or {"regex": "x"},
    )
    form = {
        "format": {
            "type": "json_schema",
            "name": "x",
            "schema": {"type": "array", "uniqueItems": True},
        }
    }
    call = call_of(
        served, tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, text=form
    )
    assert (asked, call.ignored) == ([False], ("text.format",))
    call_of(served, tools=[TOOL], tool_choice="required")
    assert asked[1:] == [True]
    assert call_of(text=form).ignored == ("text.format.schema.uniqueItems",)
    tool = {**TOOL, "parameters": {"type": "object", "dependentRequired": {}}}
    assert call_of(served, tools=[tool], tool_choice="required").ignored == (
        "tools[].parameters.dependentRequired",
    )


def test_a_call_of_a_tool_that_nobody_offered_is_text():
    _, body = answers(call_of(), [(0, delta) for delta in deltas([CALL])], WITH_PARSER)
    [item] = body["output"]
    assert json.loads(item["content"][0]["text"]) == {
        "name": "weather",
        "arguments": {"city": "Zürich"},
    }


def test_a_second_call_can_be_declined():
    feed = [(0, delta) for delta in deltas([CALL + CALL])]
    for parallel, count in ((True, 2), (False, 1)):
        call = call_of(tools=[TOOL], parallel_tool_calls=parallel)
        assert len(answers(call, feed, WITH_PARSER)[1]["output"]) == count


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": False, "role": "user", "content": "x"}]}, "input[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "mcp"}, {**TOOL, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_at_fault_is_named_as_the_client_sent_it(body, param):
    assert refused(**body) == param


@pytest.mark.parametrize(
    "form", [{"type": "regex", "value": "a+"}, {"type": "json"}, {"type": "xml"}]
)
def test_a_form_of_another_api_is_refused_with_those_that_there_are(form):
    with refuses(ApiError, "text, json_object or json_schema"):
        call_of(SERVED, text={"format": form})


def test_a_form_that_cannot_be_compiled_is_told_by_the_clients_field():
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert call_of(SERVED, text={"format": form}).work[0].form_from == "text.format"


def test_a_response_that_cannot_fit_is_refused():
    call = call_of(max_output_tokens=1022)
    with pytest.raises(ApiError) as error:
        call.reply(HEAD, SERVED, tokenized(call))
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
