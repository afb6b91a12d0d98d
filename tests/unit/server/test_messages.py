"""Anthropic's messages: what a body means, and that streamed and whole answers are equal and read
by its client.
"""

from __future__ import annotations

import json
from dataclasses import replace

import anthropic
import httpx2
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.server.openai_cases import (
    HEAD,
    HELLO,
    LIMITS,
    SERVED,
    WITH_PARSER,
    answers,
    deltas,
    split,
    tokenized,
)

from freight.outputs import CompletionDelta, FinishReason, RequestDelta
from freight.serve.anthropic.messages_request import parse_count, parse_messages
from freight.serve.transport.errors import ApiError
from freight.serve.transport.middleware import error_body

CALL = '<call>{"name": "weather", "arguments": {"city": "Zürich"}}</call>'
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
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
    return parse_messages({"messages": HELLO, "max_tokens": 500, **body}, served, LIMITS)


def prompt(messages, **body):
    return call_of(messages=messages, **body).work[0].prompt


def refused(**body):
    with pytest.raises(ApiError) as error:
        call_of(**body)
    assert error.value.status == 400
    assert error.value.message.startswith(error.value.param)
    return error.value.param


def events(raw):
    """Events by their data; each has its name twice."""
    parts = raw.decode("ascii").split("\n\n")
    assert parts.pop() == ""
    pairs = [part.split("\n") for part in parts]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in found]
    return found


def client_of(raw, content_type="text/event-stream", status=200):
    answer = httpx2.Response(status, headers={"content-type": content_type}, content=raw)
    transport = httpx2.MockTransport(lambda request: answer)
    http = httpx2.Client(transport=transport)
    return anthropic.Anthropic(api_key="x", base_url="http://test", http_client=http, max_retries=0)


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
    content, growing = [], None
    for event in told[1:-2]:
        assert event["index"] == len(content)
        if event["type"] == "content_block_start":
            assert growing is None
            growing, arguments = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                growing[name] += delta[name]
        else:
            content.append(growing | ({"input": json.loads(arguments)} if arguments else {}))
            growing = None
    assert content == body["content"] == unsplit["content"]
    assert told[0]["type"] == "message_start"
    assert told[0]["message"]["content"] == []
    ending = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    assert told[-2] == {"type": "message_delta", "delta": ending, "usage": body["usage"]}
    assert told[-1] == {"type": "message_stop"}
    Message.model_validate_json(json.dumps(body), strict=True)


def test_the_accumulator_of_anthropics_client_reads_a_stream():
    text = "<think>so</think>It is: " + CALL
    feed = [(0, delta) for delta in deltas(split(text, range(0, 90, 7)), cached=2)]
    raw, body = answers(call_of(tools=[TOOL], stream=True), feed, WITH_PARSER)
    asked = {"model": "demo", "max_tokens": 9, "messages": HELLO}
    with client_of(raw) as client, client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "It is: "
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[0].thinking, final.content[2].input) == ("so", {"city": "Zürich"})
    assert final.stop_reason == "tool_use"
    assert final.usage.to_dict() == body["usage"]
    assert (body["usage"]["input_tokens"], body["usage"]["cache_read_input_tokens"]) == (1, 2)
    assert (
        0
        < body["usage"]["output_tokens_details"]["thinking_tokens"]
        < body["usage"]["output_tokens"]
    )
    with client_of(json.dumps(body), "application/json") as client:
        assert client.messages.create(**asked).content[2] == final.content[2]


@pytest.mark.parametrize(
    ("text", "reason", "stop", "most", "told"),
    [
        ("x", FinishReason.STOP, None, 9, "end_turn"),
        ("x", FinishReason.STOP, "END", 9, "stop_sequence"),
        ("x", FinishReason.STOP, 2, 9, "end_turn"),
        ("x", FinishReason.LENGTH, None, 1, "max_tokens"),
        ("x", FinishReason.LENGTH, None, 5000, "model_context_window_exceeded"),
        (CALL, FinishReason.STOP, None, 9, "tool_use"),
        (CALL, FinishReason.LENGTH, None, 1, "max_tokens"),
        (CALL + CALL[:20], FinishReason.STOP, None, 9, "end_turn"),
    ],
)
def test_the_reason_why_an_answer_ended(text, reason, stop, most, told):
    output = CompletionDelta(0, [20], text, None, reason, stop, None)
    call = call_of(tools=[TOOL], max_tokens=most)
    _, body = answers(call, [(0, RequestDelta("r1", [output], True))], WITH_PARSER)
    assert (body["stop_reason"], body["stop_sequence"]) == (
        told,
        stop if isinstance(stop, str) else None,
    )


def test_a_second_call_can_be_declined():
    for declined, count in ((False, 2), (True, 1)):
        choice = {"type": "auto", "disable_parallel_tool_use": declined}
        call = call_of(tools=[TOOL], tool_choice=choice)
        _, body = answers(call, [(0, delta) for delta in deltas([CALL + CALL])], WITH_PARSER)
        assert len(body["content"]) == len({block["id"] for block in body["content"]}) == count


def test_a_stream_that_fails_raises_in_anthropics_client():
    call = call_of(SERVED, stream=True)
    reply = call.reply(HEAD, SERVED, tokenized(call))
    raw = reply.start() + reply.advance(0, next(deltas(["ab", "c"])))
    output = CompletionDelta(0, [], "", None, FinishReason.TIMEOUT, None, None)
    with pytest.raises(ApiError) as error:
        reply.advance(0, RequestDelta("r1", [output], True))
    raw += reply.failure(error.value)
    asked = {"model": "demo", "max_tokens": 9, "messages": HELLO}
    with client_of(raw) as client, pytest.raises(anthropic.APIStatusError, match="took longer"):
        list(client.messages.create(**asked, stream=True))


def test_blocks_become_a_conversation():
    told = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "c"},
                {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "2"}],
                },
                {"type": "text", "text": "e"},
            ],
        },
    ]
    read = prompt(told, system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}])
    assert read.add_generation_prompt
    assert not read.continue_final_message
    assert read.messages == [
        {"role": "system", "content": "One.\nTwo."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "content": "cd",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "tool", "tool_call_id": "t2", "content": "2"},
        {"role": "user", "content": "e"},
    ]


def test_an_answer_can_be_sent_back_as_it_is():
    _, body = answers(
        call_of(tools=[TOOL]), [(0, d) for d in deltas(["<think>so</think>Go" + CALL])], WITH_PARSER
    )
    result = {"type": "tool_result", "tool_use_id": body["content"][2]["id"], "content": "rain"}
    told = [
        *HELLO,
        {"role": "assistant", "content": body["content"]},
        {"role": "user", "content": [result]},
    ]
    call = call_of(messages=told)
    assert call.ignored == ()
    assert [message["role"] for message in call.work[0].prompt.messages] == [
        "user",
        "assistant",
        "tool",
    ]


def test_a_last_message_of_the_assistant_is_continued():
    read = prompt([*HELLO, {"role": "assistant", "content": "The best is ("}])
    assert read.continue_final_message
    assert not read.add_generation_prompt


def test_the_block_of_system_that_varies_is_left_out():
    def read(head):
        system = [{"type": "text", "text": head}, {"type": "text", "text": "You help."}]
        call = call_of(system=system)
        assert call.ignored == ("system[]",)
        return call.work[0].prompt

    first, second = (
        read(f"x-anthropic-billing-header: cc_version=2.1; cch={salt};") for salt in ("1a", "2b")
    )
    assert first == second
    assert first.messages[0] == {"role": "system", "content": "You help."}


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_is_on_where_it_is_asked_for(thinking, enabled):
    call = call_of(thinking=thinking)
    assert call.work[0].prompt.template_values == {"enable_thinking": enabled}
    assert call.ignored == (("thinking.budget_tokens",) if enabled else ())


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, 0),
        ({"thinking": {"type": "disabled", "budget_tokens": 7}}, 0),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}, "thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": -1}, None),
    ],
)
def test_thinking_has_the_budget_that_is_asked_for(fields, budget):
    thinks = replace(SERVED, thinking_tags=("<think>", "</think>"))
    call = call_of(thinks, **fields)
    params = call.work[0].params
    assert params.thinking_token_budget == budget
    assert call.ignored == ()
    if "thinking_token_budget" in fields or budget is not None:
        assert params.thinking_tags == ("<think>", "</think>")


@pytest.mark.parametrize("budget", [-2, True, "5", 5.5])
def test_a_wrong_budget_is_refused_by_its_own_name(budget):
    thinks = replace(SERVED, thinking_tags=("<think>", "</think>"))
    given = {"type": "enabled", "budget_tokens": budget}
    assert refused(served=thinks, thinking=given) == "thinking.budget_tokens"


def test_what_agents_send_beside_is_named_and_not_refused():
    text = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    call = call_of(
        messages=[{"role": "user", "content": [text, {"type": "search_result", "title": "y"}]}],
        tools=[
            {"type": "web_search_20250305", "name": "web_search"},
            {**TOOL, "eager_input_streaming": True},
        ],
        metadata={"user_id": "u"},
        context_management={},
        service_tier=None,
    )
    assert set(call.ignored) == {
        *("content[].cache_control", "content[].search_result", "tools[].web_search_20250305"),
        *("tools[].eager_input_streaming", "metadata", "context_management"),
    }
    assert [tool["function"]["name"] for tool in call.work[0].prompt.template_values["tools"]] == [
        "weather"
    ]


def test_fields_reach_the_sampler():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    call = call_of(
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        stop_sequences=["a", "b"],
        output_config={"format": form, "effort": "low"},
    )
    params = call.work[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (
        500,
        0.5,
        0.25,
        4,
    )
    assert tuple(params.stop) == ("a", "b")
    assert params.structured_outputs is not None
    assert call.work[0].prompt.template_values["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("kind", "forced"), [("any", ("weather",)), ("auto", ()), ("tool", ("weather",))]
)
def test_a_choice_of_tools_is_one_of_a_chat(kind, forced):
    seen = []
    served = replace(
        WITH_PARSER,
        forced_call=lambda tools, names, parallel, prompt: (
            seen.append(tuple(names)) or {"regex": "x"}
        ),
    )
    call = call_of(served, tools=[TOOL], tool_choice={"type": kind, "name": "weather"})
    assert seen == ([forced] if forced else [])
    assert (call.work[0].params.structured_outputs is not None) == bool(forced)


def test_a_tool_that_is_named_is_used_once_and_what_no_grammar_holds_is_named():
    asked = []
    served = replace(
        WITH_PARSER,
        forced_call=lambda tools, names, many, prompt: asked.append(many) or {"regex": "x"},
    )
    tool = {**TOOL, "input_schema": {"type": "object", "if": {}, "then": {}}}
    call = call_of(served, tools=[tool], tool_choice={"type": "tool", "name": "weather"})
    assert (asked, call.ignored) == (
        [False],
        ("tools[].input_schema.if", "tools[].input_schema.then"),
    )
    call_of(served, tools=[tool], tool_choice={"type": "any"})
    assert asked[1:] == [True]
    form = {"format": {"type": "json_schema", "schema": {"type": "string", "format": "password"}}}
    assert call_of(output_config=form).ignored == ("output_config.format.schema.format",)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].name",
        ),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [{"type": "bash_20250124"}, {**TOOL, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "type": 3}]}, "tools[0].type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": False}],
                    }
                ]
            },
            "messages[0].content[0].content",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_what_is_at_fault_is_named_as_the_client_sent_it(body, param):
    assert refused(**body) == param


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0.*1 or more$"),
        (
            {"tool_choice": {"type": "any"}},
            "tool_choice.*no tools",
        ),
    ],
)
def test_errors_name_nothing_that_another_api_has(body, says):
    with pytest.raises(ApiError, match=says):
        call_of(**body)


def test_max_tokens_may_be_more_than_there_is_room_for_but_the_prompt_has_to_fit():
    call = call_of(max_tokens=32_000)
    call.reply(HEAD, SERVED, tokenized(call, range(1023)))
    with pytest.raises(ApiError) as error:
        call.reply(HEAD, SERVED, tokenized(call, range(1024)))
    assert error.value.code == "context_length_exceeded"


def test_a_count_needs_no_max_tokens():
    assert parse_count({"messages": HELLO}, SERVED, LIMITS).work[0].prompt.messages == HELLO


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (404, "not_found_error", anthropic.NotFoundError),
        (413, "request_too_large", anthropic.RequestTooLargeError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.ServiceUnavailableError),
    ],
)
def test_errors_have_the_shape_of_the_paths_api(status, kind, raised):
    error = ApiError(status, "no")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = error_body(path, error)
        assert body == {"type": "error", "error": {"type": kind, "message": "no"}}
        with (
            client_of(json.dumps(body), "application/json", status) as client,
            pytest.raises(raised),
        ):
            client.messages.create(model="demo", max_tokens=9, messages=HELLO)
    assert "param" in error_body("/v1/responses", error)["error"]
    assert call_of(SERVED).failure_body(error) == body
