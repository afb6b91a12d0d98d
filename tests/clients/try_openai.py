"""OpenAI's client and its helpers: parse, streams, tools, responses, lines of a batch. Run as:
try_openai.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import (
    AsyncOpenAI,
    BadRequestError,
    LengthFinishReasonError,
    NotFoundError,
    OpenAI,
    pydantic_function_tool,
)
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from wanted import LENGTH, MESSAGES, PROMPT, Order, Plain, Weather, is_order, raises, tell

URL = sys.argv[1]
client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=100)
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": LENGTH}
FORCED = {"type": "function", "function": {"name": "Order"}}


def chat_parse() -> None:
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Order, **GREEDY)
    is_order(answer.choices[0].message.parsed)


def chat_parse_cut_short() -> None:
    cut = GREEDY | {"max_tokens": 4}
    raises(
        LengthFinishReasonError,
        lambda: client.chat.completions.parse(messages=MESSAGES, response_format=Order, **cut),
    )


def function_tool() -> None:
    tools = [pydantic_function_tool(Order), pydantic_function_tool(Weather)]
    answer = client.chat.completions.parse(
        messages=MESSAGES, tools=tools, tool_choice=FORCED, **GREEDY
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    is_order(call.function.parsed_arguments)


def function_tool_required() -> None:
    tools = [pydantic_function_tool(Plain), pydantic_function_tool(Weather)]
    answer = client.chat.completions.parse(
        messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False, **GREEDY
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Plain | Weather)


def chat_stream_is_the_whole_answer() -> None:
    whole = client.chat.completions.create(messages=MESSAGES, seed=1, **GREEDY | {"max_tokens": 40})
    with client.chat.completions.stream(
        messages=MESSAGES, seed=1, **GREEDY | {"max_tokens": 40}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = (
            stream.current_completion_snapshot
        )  # get_final_completion raises where max_tokens ended the answer
    assert "".join(deltas) == whole.choices[0].message.content == final.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def chat_stream_parsed() -> None:
    whole = client.chat.completions.parse(messages=MESSAGES, response_format=Order, **GREEDY)
    with client.chat.completions.stream(
        messages=MESSAGES, response_format=Order, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds
    is_order(final.choices[0].message.parsed)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def chat_stream_tools() -> None:
    asked = {
        "messages": MESSAGES,
        "tools": [pydantic_function_tool(Order)],
        "tool_choice": FORCED,
        **GREEDY,
    }
    (whole,) = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (
        call.function.arguments
        == whole.function.arguments
        == "".join(e.arguments_delta for e in deltas)
    )
    is_order(call.function.parsed_arguments)


def chat_conversation_with_a_result() -> None:
    tools = [pydantic_function_tool(Weather)]
    first = client.chat.completions.create(
        messages=MESSAGES, tools=tools, tool_choice="required", **GREEDY
    )
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    cut = GREEDY | {"max_tokens": 8}
    answer = client.chat.completions.create(
        messages=[*MESSAGES, message, *results], tools=tools, **cut
    )
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens


def choices_and_logprobs() -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES, n=3, seed=7, logprobs=True, top_logprobs=2, model="demo", max_tokens=6
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(len(choice.logprobs.content[0].top_logprobs) >= 2 for choice in answer.choices)


def responses_parse() -> None:
    answer = client.responses.parse(
        model="demo", input=PROMPT, text_format=Order, temperature=0, max_output_tokens=LENGTH
    )
    assert answer.status == "completed"
    is_order(answer.output_parsed)


def responses_stream_parsed() -> None:
    asked = {
        "model": "demo",
        "input": PROMPT,
        "text_format": Order,
        "temperature": 0,
        "max_output_tokens": LENGTH,
    }
    whole = client.responses.parse(**asked)
    with client.responses.stream(**asked) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert text == whole.output_text == final.output_text
    is_order(final.output_parsed)


def responses_tools() -> None:
    tool = {
        "type": "function",
        "name": "Weather",
        "parameters": Weather.model_json_schema() | {"additionalProperties": False},
        "strict": True,
    }
    asked = {"model": "demo", "temperature": 0, "max_output_tokens": LENGTH, "tools": [tool]}
    answer = client.responses.create(
        input=PROMPT, tool_choice={"type": "function", "name": "Weather"}, **asked
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked["max_output_tokens"] = 16
    following = client.responses.create(
        input=[{"role": "user", "content": PROMPT}, call, result], **asked
    )
    assert following.usage.input_tokens > answer.usage.input_tokens


def errors() -> None:
    raises(NotFoundError, lambda: client.chat.completions.create(messages=MESSAGES, model="none"))
    long = GREEDY | {"max_tokens": 50_000}
    error = raises(
        BadRequestError, lambda: client.chat.completions.create(messages=MESSAGES, **long)
    )
    assert error.param == "messages", error.param
    stream = GREEDY | {"temperature": -1, "stream": True}
    error = raises(
        BadRequestError, lambda: client.chat.completions.create(messages=MESSAGES, **stream)
    )
    assert error.param == "temperature"


def asynchronous() -> None:
    async def several() -> list[Any]:
        async with AsyncOpenAI(
            base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=100
        ) as clients:
            asked = [
                clients.chat.completions.parse(messages=MESSAGES, response_format=Plain, **GREEDY)
                for _ in range(4)
            ]
            return await asyncio.gather(*asked)

    names = {answer.choices[0].message.parsed.name for answer in asyncio.run(several())}
    assert len(names) == 1


def raw_answers() -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, **GREEDY | {"max_tokens": 2}
    )
    assert raw.parse().id.startswith("chatcmpl-")
    assert raw.headers["content-type"] == "application/json"
    with client.chat.completions.with_streaming_response.create(
        messages=MESSAGES, stream=True, **GREEDY | {"max_tokens": 2}
    ) as streamed:
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]


def batch_lines() -> None:
    """A line of a batch has the types that the client sends, and its body the meaning of a request."""
    body: CompletionCreateParamsNonStreaming = {"messages": MESSAGES, **GREEDY, "max_tokens": 4}  # type: ignore
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    read = json.loads(json.dumps(line))
    answer = client.post(read["url"].removeprefix("/v1"), body=read["body"], cast_to=object)
    assert answer["object"] == "chat.completion"


tell(
    [
        chat_parse,
        chat_parse_cut_short,
        function_tool,
        function_tool_required,
        chat_stream_is_the_whole_answer,
        chat_stream_parsed,
        chat_stream_tools,
        chat_conversation_with_a_result,
        choices_and_logprobs,
        responses_parse,
        responses_stream_parsed,
        responses_tools,
        errors,
        asynchronous,
        raw_answers,
        batch_lines,
    ]
)
