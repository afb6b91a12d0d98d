"""Anthropic's client: messages, streams, tools, forms, count_tokens, errors. Run as:
try_anthropic.py URL
"""

from __future__ import annotations

import sys
from typing import Any

from anthropic import Anthropic, BadRequestError, NotFoundError
from wanted import LENGTH, MESSAGES, Plain, Weather, raises, tell

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
ASKED: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 24}
TOOLS = [
    {"name": kind.__name__, "description": kind.__doc__, "input_schema": kind.model_json_schema()}
    for kind in (Weather, Plain)
]
FORCED = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "Weather"}}


def messages() -> None:
    answer = client.messages.create(**ASKED)
    assert answer.content[0].type == "text"
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 24


def stream_is_the_whole_answer() -> None:
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def tools() -> None:
    asked = ASKED | FORCED | {"max_tokens": LENGTH}
    answer = client.messages.create(**asked)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "Weather"
    assert answer.stop_reason == "tool_use"
    Weather.model_validate(call.input)
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert [block.input for block in final.content if block.type == "tool_use"] == [call.input]
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "sunny"}],
    }
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    following = client.messages.create(**ASKED | {"messages": turns, "tools": TOOLS})
    assert following.usage.input_tokens + following.usage.cache_read_input_tokens > 20


def parsed_form() -> None:
    answer = client.messages.parse(**ASKED | {"max_tokens": LENGTH}, output_format=Plain)
    assert isinstance(answer.parsed_output, Plain)


def count_tokens() -> None:
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES)
    answer = client.messages.create(**ASKED)
    assert counted.input_tokens == answer.usage.input_tokens + (
        answer.usage.cache_read_input_tokens or 0
    )
    assert (
        client.messages.count_tokens(model="demo", messages=MESSAGES, tools=TOOLS).input_tokens
        > counted.input_tokens
    )


def errors() -> None:
    raises(
        NotFoundError,
        lambda: client.messages.create(**ASKED | {"model": "none"}),
        "not_found_error",
    )
    raises(
        BadRequestError, lambda: client.messages.create(**ASKED | {"max_tokens": 0}), "max_tokens"
    )
    raises(
        BadRequestError,
        lambda: list(client.messages.create(**ASKED | {"messages": []}, stream=True)),
        "messages",
    )


tell([messages, stream_is_the_whole_answer, tools, parsed_form, count_tokens, errors])
