"""Forced calls with tagged arguments, by a server and OpenAI's client: the demo under the template
of Qwen3-Coder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
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


def test_a_forced_call_fits_its_schema_whole_and_streamed() -> None:
    options = ["--kv-cache-memory", "16MiB", "--chat-template", str(TEMPLATE)]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 400,
        "parallel_tool_calls": False,
        "seed": 3,
    }
    with freight_serve("demo", options) as url, OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(**asked)
        chunks = [*client.chat.completions.create(**asked, stream=True)]
    choice = answer.choices[0]
    assert choice.finish_reason in ("tool_calls", "stop")
    assert not choice.message.content
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema_rs.validate(SCHEMA, json.loads(call.function.arguments))
    streamed = [
        part.function.arguments or ""
        for chunk in chunks
        for part in (chunk.choices[0].delta.tool_calls or () if chunk.choices else ())
        if part.function is not None
    ]
    assert "".join(streamed) == call.function.arguments
