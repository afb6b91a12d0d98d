"""langchain-openai and langchain-anthropic: structured output, tools, streams, errors. Run as:
try_langchain.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from langchain_openai.chat_models.base import OpenAIInvalidRequestError, OpenAIModelNotFoundError
from wanted import LENGTH, PROMPT, Order, Plain, Weather, is_order, raises, tell

URL = sys.argv[1]


def chat(**more: Any) -> Any:
    given = {
        "model": "demo",
        "max_tokens": LENGTH,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 60,
    } | more
    return ChatOpenAI(base_url=f"{URL}/v1", api_key="none", **given)


def anthropic(**more: Any) -> Any:
    given = {"model": "demo", "max_tokens": LENGTH, "max_retries": 0, "timeout": 60} | more
    return ChatAnthropic(base_url=URL, api_key="none", **given)


def structured(client: Callable[..., Any], **how: Any) -> Callable[[], None]:
    def case() -> None:
        is_order(client().with_structured_output(Order, **how).invoke(PROMPT))

    case.__name__ = "_".join(("structured", client.__name__, *map(str, how.values())))
    return case


def json_mode() -> None:
    """It asks for some JSON object only, so the object of a schema is not to be expected."""
    found = (
        chat().with_structured_output(None, method="json_mode", include_raw=True).invoke('{"a": 1}')
    )
    assert found["parsing_error"] is None, found
    assert isinstance(found["parsed"], dict), found


def structured_responses() -> None:
    is_order(
        chat(use_responses_api=True)
        .with_structured_output(Order, method="json_schema")
        .invoke(PROMPT)
    )


def bound_tools() -> None:
    for choice in ("Weather", "any", "required", True):
        model = chat().bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
        (call,) = model.invoke(PROMPT).tool_calls
        Weather.model_validate(call["args"])
    answer = model.invoke(PROMPT)
    result = ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
    following = chat(max_tokens=8).bind_tools([Weather]).invoke([("user", PROMPT), answer, result])
    assert following.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def anthropic_tools() -> None:
    (call,) = anthropic().bind_tools([Weather], tool_choice="Weather").invoke(PROMPT).tool_calls
    Weather.model_validate(call["args"])


def anthropic_structured() -> None:
    """Anthropic's client moves `maxLength` and its like from the schema into descriptions: types
    alone are forced.
    """
    found = (
        anthropic()
        .with_structured_output(Order, method="json_schema", include_raw=True)
        .invoke(PROMPT)
    )
    order = json.loads(found["raw"].text)
    assert set(order) == set(Order.model_fields), order
    assert isinstance(order["secret"], str), order
    assert set(order["tags"]) <= {"new", "old"}, order
    assert order["payment"]["kind"] in ("card", "cash"), order


def streams(client: Callable[..., Any], **more: Any) -> Callable[[], None]:
    def case() -> None:
        model = client(max_tokens=24, **more)
        whole, pieces = model.invoke(PROMPT), list(model.stream(PROMPT))
        assert "".join(piece.text for piece in pieces) == whole.text
        total = sum(
            piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata
        )
        assert total == whole.usage_metadata["output_tokens"] == 24, total

    case.__name__ = f"stream_{client.__name__}"
    return case


def streamed_tools() -> None:
    model = chat().bind_tools([Weather], tool_choice="Weather")
    pieces = list(model.stream(PROMPT))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [call["args"] for call in whole.tool_calls] == [
        call["args"] for call in model.invoke(PROMPT).tool_calls
    ]


def completions() -> None:
    model = OpenAI(
        base_url=f"{URL}/v1",
        api_key="none",
        model="demo",
        max_tokens=12,
        temperature=0,
        max_retries=0,
    )
    assert model.invoke(PROMPT) == "".join(model.stream(PROMPT)) != ""
    assert len(model.generate([PROMPT, "def main("]).generations) == 2


def asynchronous() -> None:
    async def several() -> list[Any]:
        return await asyncio.gather(
            *(chat().with_structured_output(Plain).ainvoke(PROMPT) for _ in range(3))
        )

    assert all(isinstance(found, Plain) for found in asyncio.run(several()))


def errors() -> None:
    raises(
        OpenAIModelNotFoundError, lambda: chat(model="none").invoke(PROMPT)
    )  # it read the error's code
    error = raises(OpenAIInvalidRequestError, lambda: list(chat(top_p=7).stream(PROMPT)))
    assert error.param == "top_p"


tell(
    [
        structured(chat, method="json_schema"),
        structured(chat, method="json_schema", strict=True),
        structured(chat, method="function_calling"),
        structured(chat, method="function_calling", strict=True),
        json_mode,
        structured_responses,
        structured(anthropic, method="function_calling"),
        anthropic_structured,
        bound_tools,
        anthropic_tools,
        streams(chat, stream_usage=True),  # only OpenAI's own address is asked for usage by itself
        streams(anthropic),
        streamed_tools,
        completions,
        asynchronous,
        errors,
    ]
)
