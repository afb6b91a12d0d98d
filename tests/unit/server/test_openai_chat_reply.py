"""The answers of chat completions: streamed and whole ones are equal, and OpenAI's own client reads
both.
"""

from __future__ import annotations

import json
from dataclasses import replace

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.unit.server.openai_cases import (
    HEAD,
    HELLO,
    LIMITS,
    SERVED,
    TOOL,
    WITH_PARSER,
    answers,
    chunks,
    deltas,
    prompt_scores,
    scores,
    split,
    tokenized,
)

from freight.outputs import CompletionDelta, FinishReason, RequestDelta, RequestTimes
from freight.serve.openai.chat_request import parse_chat
from freight.serve.transport.errors import ApiError

CALL = '<call>{"name": "weather", "arguments": {"city": "Zürich"}}</call>'
TEXTS = [
    "",
    "Grüße, 世界 \u2028 👋",
    "<think>hm, 1 < 2</think>So: ",
    "a" + CALL,
    CALL + CALL + "|eot|",
    "<call>{'x",
    "<thi",
]


def call_of(served=WITH_PARSER, **body):
    return parse_chat({"messages": HELLO, "stream": True, **body}, served, LIMITS)


def joined(parts, index):
    """What a client has of a choice at the end of a stream."""
    message, logprobs, reasons = (
        {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []},
        [],
        [],
    )
    for chunk in parts:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    message[name] += [
                        {key: call[key] for key in call if key != "index"} for call in value
                    ]
                elif name != "role":
                    message[name] += value
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            reasons += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    return message, logprobs, reasons


@given(
    st.lists(st.sampled_from(TEXTS), max_size=4).map("".join),
    st.lists(st.integers(1, 200), max_size=8),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.booleans(),
)
def test_a_stream_is_the_body_in_parts_however_the_text_is_split(text, cuts, reason, logprobs):
    call = call_of(
        n=2,
        tools=[TOOL],
        stream_options={"include_usage": True},
        logprobs=logprobs,
        top_logprobs=2 if logprobs else None,
    )
    feed = [
        (0, delta)
        for index in (1, 0)
        for delta in deltas(split(text, cuts), reason, index, logprobs, cached=2)
    ]
    raw, body = answers(call, feed, WITH_PARSER)
    parts = chunks(raw)
    _, unsplit = answers(
        call, [(0, d) for i in (0, 1) for d in deltas([text], reason, i, logprobs)], WITH_PARSER
    )
    for index, choice in enumerate(body["choices"]):
        message, entries, reasons = joined(parts, index)
        assert reasons == [choice["finish_reason"]]
        assert message["content"] == (choice["message"]["content"] or "")
        assert (
            message["reasoning"]
            == message["reasoning_content"]
            == choice["message"].get("reasoning", "")
        )
        assert message["tool_calls"] == choice["message"].get("tool_calls", [])
        assert entries == ((choice["logprobs"] or {}).get("content") or [])
        assert choice["message"] == unsplit["choices"][index]["message"]
    assert parts[-1] == {**parts[-1], "choices": [], "usage": body["usage"]}
    assert all(part["usage"] is None for part in parts[:-1])
    for part in parts:
        ChatCompletionChunk.model_validate(part, strict=False)
    ChatCompletion.model_validate_json(json.dumps(body), strict=True)


@pytest.mark.parametrize("stop", ["END", 7, None])
def test_what_ended_an_answer_is_told_with_its_finish_reason(stop):
    first = CompletionDelta(0, [20], "x", None, None, None, None)
    last = CompletionDelta(0, [21], "y", None, FinishReason.STOP, stop, None)
    feed = [(0, RequestDelta("r1", [one], one is last)) for one in (first, last)]
    raw, body = answers(call_of(), feed)
    told = [part["choices"][0] for part in chunks(raw)]
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == (
        "stop",
        stop,
    )
    assert (told[-1]["finish_reason"], told[-1]["stop_reason"]) == ("stop", stop)
    assert all(one["finish_reason"] is None and "stop_reason" not in one for one in told[:-1])


def test_roles_come_first_and_in_order():
    parts = chunks(answers(call_of(n=3), [])[0])
    assert [part["choices"][0]["index"] for part in parts] == [0, 1, 2]
    assert {json.dumps(part["choices"][0]["delta"]) for part in parts} == {
        '{"role": "assistant", "content": ""}'
    }
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert "usage" not in parts[0]


def client_of(raw, content_type="text/event-stream"):
    answer = httpx2.Response(200, headers={"content-type": content_type}, content=raw)
    transport = httpx2.MockTransport(lambda request: answer)
    return openai.OpenAI(
        api_key="x", base_url="http://test", http_client=httpx2.Client(transport=transport)
    )


def test_the_accumulator_of_openais_client_reads_two_choices():
    call = call_of(n=2, tools=[TOOL], logprobs=True, stream_options={"include_usage": True})
    text = "<think>so</think>It is: " + CALL
    feed = [
        (0, delta)
        for index in (1, 0)
        for delta in deltas(split(text, range(0, 90, 7)), index=index, logprobs=True)
    ]
    raw, body = answers(call, feed, WITH_PARSER)
    with (
        client_of(raw) as client,
        client.chat.completions.stream(model="demo", messages=HELLO, n=2) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {
        "content.delta",
        "tool_calls.function.arguments.delta",
        "logprobs.content.delta",
    } <= kinds
    assert final.usage.model_dump() == ChatCompletion.model_validate(body).usage.model_dump()
    for choice, whole in zip(final.choices, body["choices"], strict=True):
        assert choice.finish_reason == whole["finish_reason"] == "tool_calls"
        assert choice.message.content == whole["message"]["content"] == "It is: "
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Z\\u00fcrich"}'
        assert len(choice.logprobs.content) == len(whole["logprobs"]["content"])
    assert len({call.id for choice in final.choices for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize(
    ("parts", "reason", "finish", "content", "calls"),
    [
        ([CALL], FinishReason.STOP, "tool_calls", None, 1),
        ([CALL], FinishReason.LENGTH, "length", None, 1),
        ([CALL[:20]], FinishReason.LENGTH, "length", CALL[:20], 0),
        ([CALL + CALL[:20]], FinishReason.STOP, "stop", CALL[:20], 1),
        ([CALL + "x" + CALL], FinishReason.STOP, "tool_calls", "x", 2),
        (["x", CALL], FinishReason.STOP, "tool_calls", "x", 1),
        (["x"], FinishReason.STOP, "stop", "x", 0),
    ],
)
def test_tool_calls_are_only_the_reason_where_the_engine_stopped(
    parts, reason, finish, content, calls
):
    _, body = answers(
        call_of(tools=[TOOL]), [(0, delta) for delta in deltas(parts, reason)], WITH_PARSER
    )
    [choice] = body["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == (finish, content)
    assert len(choice["message"].get("tool_calls", [])) == calls


def test_parallel_calls_can_be_declined():
    feed = [(0, delta) for delta in deltas([CALL + CALL])]
    for parallel, count in ((True, 2), (False, 1)):
        raw, body = answers(call_of(tools=[TOOL], parallel_tool_calls=parallel), feed, WITH_PARSER)
        assert (
            len(body["choices"][0]["message"]["tool_calls"])
            == len(joined(chunks(raw), 0)[0]["tool_calls"])
            == count
        )


def test_a_call_that_no_tool_was_offered_for_is_content():
    _, body = answers(call_of(), [(0, delta) for delta in deltas([CALL])], WITH_PARSER)
    message = body["choices"][0]["message"]
    assert "tool_calls" not in message
    assert json.loads(message["content"]) == {"name": "weather", "arguments": {"city": "Zürich"}}
    assert body["choices"][0]["finish_reason"] == "stop"


def test_usage_counts_reasoning_and_cached_tokens():
    parts = ["<think>", "a", "b", "</think>", "c", "d", ""]
    call = call_of(stream_options={"include_usage": True, "continuous_usage_stats": True})
    raw, body = answers(call, [(0, delta) for delta in deltas(parts, cached=2)], WITH_PARSER)
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},  # of the text "ab"
    }
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(raw)]
    assert counts == [0, 2, 3, 5, 6, 7, 7]


@pytest.mark.parametrize(
    ("prediction", "drafted", "accepted", "counts"),
    [
        ("ab", 5, 3, {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}),
        ("x", 0, 0, {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}),
        (None, 5, 3, {}),  # what is drafted depends on what else runs
    ],
)
def test_usage_counts_drafts_of_a_request_with_a_prediction(prediction, drafted, accepted, counts):
    body = {"stream_options": {"include_usage": True}}
    if prediction is not None:
        body["prediction"] = {"type": "content", "content": prediction}
    call = call_of(replace(SERVED, drafts=True), **body)
    first, last = deltas(["a", "b"])
    times = RequestTimes(0.1, 0.1, 0.1, drafted=drafted, accepted=accepted)
    raw, answer = answers(call, [(0, first), (0, replace(last, times=times))])
    details = {"reasoning_tokens": 0} | counts
    assert answer["usage"]["completion_tokens_details"] == details
    assert chunks(raw)[-1]["usage"]["completion_tokens_details"] == details


def test_logprobs_have_what_was_asked_for():
    call = call_of(SERVED, logprobs=True, top_logprobs=1)
    _, body = answers(call, [(0, delta) for delta in deltas(["x"], logprobs=True)])
    [entry] = body["choices"][0]["logprobs"]["content"]
    assert (entry["logprob"], len(entry["top_logprobs"]), entry["top_logprobs"][0]["logprob"]) == (
        -0.5,
        1,
        -0.25,
    )
    assert entry["bytes"] == list(entry["token"].encode())
    call = call_of(SERVED, logprobs=True, top_logprobs=3)
    _, body = answers(call, [(0, delta) for delta in deltas(["x"], logprobs=True)])
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][2]["logprob"] == -9999.0


def test_the_bytes_of_a_part_of_a_character_are_its_own():
    pieces = SERVED.tokenizer.pieces(False)
    token = next(i for i in range(SERVED.vocab_size) if isinstance(pieces[i], bytes))
    pieces.clear()  # as in a server that has just started: they are computed at the first use
    output = CompletionDelta(0, [token], "", [scores(token)], FinishReason.LENGTH, None, None)
    call = call_of(SERVED, logprobs=True)
    _, body = answers(call, [(0, RequestDelta("r1", [output], True))])
    assert body["choices"][0]["logprobs"]["content"][0]["bytes"] == list(pieces[token])


def test_token_ids_and_prompt_logprobs_come_where_asked_for():
    feed = [(0, delta) for delta in deltas(["x", "y"])]
    raw, body = answers(call_of(return_token_ids=True), feed)
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ([5, 6, 7], [20, 21])
    parts = [chunk["choices"][0] for chunk in chunks(raw)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks(raw)] == [[5, 6, 7]] + [None] * (
        len(parts) - 1
    )
    assert [token for part in parts for token in part["token_ids"]] == [20, 21]
    call = call_of(prompt_logprobs=1, stream=False)
    scored = RequestDelta("r1", [], False, prompt_scores([5, 6, 7]))
    _, body = answers(call, [(0, scored), *feed])
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1]["11"]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("reason", "status", "retry"),
    [
        (FinishReason.ERROR, 500, "false"),
        (FinishReason.TIMEOUT, 504, "false"),
        (FinishReason.ABORT, 503, None),
    ],
)
def test_a_failed_completion_raises_and_its_stream_ends_with_an_error(reason, status, retry):
    call = call_of(SERVED)
    reply = call.reply(HEAD, SERVED, tokenized(call))
    raw = reply.start()
    output = CompletionDelta(0, [], "", None, reason, None, "row of NaN")
    with pytest.raises(ApiError) as error:
        reply.advance(0, RequestDelta("r1", [output], True))
    assert (error.value.status, error.value.headers.get("x-should-retry")) == (status, retry)
    raw += reply.failure(error.value)
    assert raw.endswith(b"data: [DONE]\n\n")
    with client_of(raw) as client, pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="demo", messages=HELLO, stream=True))


def test_names_of_the_answer_are_the_heads():
    head = replace(HEAD, model="other")
    call = call_of(SERVED)
    body = call.reply(head, SERVED, tokenized(call)).body()
    assert (body["id"], body["model"], body["system_fingerprint"]) == (
        "chatcmpl-r1",
        "other",
        "fp_1",
    )
