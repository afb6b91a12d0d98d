"""Forced calls with tagged arguments, by a server and OpenAI's client: the demo under the template
of Qwen3-Coder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI
from tests.serving import freight_serve

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "templates" / "Qwen3-Coder.jinja"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
    },
    "required": ["city", "days", "units"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    options = [
        "--kv-cache-memory",
        "16MiB",
        "--chat-template",
        str(TEMPLATE),
        "--enable-auto-tool-choice",
    ]
    with freight_serve("demo", [*options, "--tool-call-parser", "qwen3_coder"]) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none")


def test_a_forced_call_fits_its_schema_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 400,
        "parallel_tool_calls": False,
        "seed": 3,
    }
    answer = client.chat.completions.create(**asked)
    choice = answer.choices[0]
    assert choice.finish_reason in ("tool_calls", "stop")
    assert not choice.message.content
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema_rs.validate(SCHEMA, json.loads(call.function.arguments))
    streamed = [
        part.function.arguments
        for chunk in client.chat.completions.create(**asked, stream=True)
        for part in (chunk.choices[0].delta.tool_calls or () if chunk.choices else ())
        if part.function is not None
    ]
    assert "".join(text or "" for text in streamed) == call.function.arguments
