"""litellm through its OpenAI, text-completion and Anthropic routes. Run as: try_litellm.py URL"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = (
    "True"  # before the import, or it asks the internet for prices
)

import litellm
from wanted import LENGTH, MESSAGES, PROMPT, Order, Plain, Weather, is_order, raises, tell

URL = sys.argv[1]
HERE: dict[str, Any] = {"api_key": "none", "max_retries": 0, "num_retries": 0, "timeout": 60}
CHAT: dict[str, Any] = HERE | {
    "model": "openai/demo",
    "api_base": f"{URL}/v1",
    "messages": MESSAGES,
    "temperature": 0,
}
TOOLS = [
    {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}
]
FORCED = {
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "Weather"}},
    "max_tokens": LENGTH,
}
THEIRS: dict[str, Any] = HERE | {"model": "anthropic/demo", "api_base": URL, "messages": MESSAGES}


def text_of(pieces: Any) -> str:
    return "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)


def completion() -> None:
    whole = litellm.completion(**CHAT, max_tokens=24)
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"
    assert (
        text_of(litellm.completion(**CHAT, max_tokens=24, stream=True))
        == whole.choices[0].message.content
    )


def acompletion() -> None:
    async def both() -> tuple[str, str]:
        whole = await litellm.acompletion(**CHAT, max_tokens=24)
        pieces = [
            piece async for piece in await litellm.acompletion(**CHAT, max_tokens=24, stream=True)
        ]
        return whole.choices[0].message.content, text_of(pieces)

    whole, streamed = asyncio.run(both())
    assert whole == streamed != ""


def tools() -> None:
    whole = litellm.completion(**CHAT, **FORCED)
    (call,) = whole.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    built = litellm.stream_chunk_builder(list(litellm.completion(**CHAT, **FORCED, stream=True)))
    assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def response_format() -> None:
    answer = litellm.completion(**CHAT, response_format=Order, max_tokens=LENGTH)
    is_order(Order.model_validate_json(answer.choices[0].message.content))


def text_completion() -> None:
    asked = HERE | {
        "model": "text-completion-openai/demo",
        "api_base": f"{URL}/v1",
        "prompt": PROMPT,
    }
    asked |= {"max_tokens": 12, "temperature": 0}
    whole = litellm.text_completion(**asked)
    pieces = litellm.text_completion(**asked, stream=True)
    assert "".join(piece.choices[0].text or "" for piece in pieces) == whole.choices[0].text != ""


def anthropic() -> None:
    whole = litellm.completion(**THEIRS, max_tokens=24)
    assert (
        text_of(litellm.completion(**THEIRS, max_tokens=24, stream=True))
        == whole.choices[0].message.content
        != ""
    )
    (call,) = litellm.completion(**THEIRS, **FORCED).choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)


def anthropic_response_format() -> None:
    answer = litellm.completion(**THEIRS, response_format=Plain, max_tokens=LENGTH)
    Plain.model_validate_json(answer.choices[0].message.content)


def responses() -> None:
    asked = HERE | {
        "model": "openai/demo",
        "api_base": f"{URL}/v1",
        "input": PROMPT,
        "max_output_tokens": 12,
    }
    assert litellm.responses(**asked).output[0].content[0].text


def router() -> None:
    """The router of litellm's proxy, as a library."""
    entry = {
        "model_name": "mine",
        "litellm_params": {n: v for n, v in CHAT.items() if n != "messages"},
    }
    answer = litellm.Router(model_list=[entry]).completion(
        model="mine", messages=MESSAGES, max_tokens=4
    )
    assert answer.usage.completion_tokens == 4


def errors() -> None:
    raises(litellm.NotFoundError, lambda: litellm.completion(**CHAT | {"model": "openai/none"}))
    raises(
        litellm.ContextWindowExceededError, lambda: litellm.completion(**CHAT, max_tokens=50_000)
    )
    raises(litellm.BadRequestError, lambda: litellm.completion(**CHAT, top_p=7), "top_p")


tell(
    [
        completion,
        acompletion,
        tools,
        response_format,
        text_completion,
        anthropic,
        anthropic_response_format,
        responses,
        router,
        errors,
    ]
)
