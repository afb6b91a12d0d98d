"""Have a tool called, and get an answer that satisfies a JSON schema, through OpenAI's client.

    freight serve demo --kv-cache-dtype fp8 --chat-template examples/tools.jinja &
    python examples/tools_and_structure.py [URL]

Models with a chat template of their own need no --chat-template. The demo model knows nothing about
weather: what it writes has the right form, which is what the grammar guarantees.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


TOOL = {"name": "weather", "parameters": Weather.model_json_schema()}


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How warm is it in Rome?"}]

    # A forced call: exactly one call of this function, with arguments that fit its parameters.
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    call = answer.choices[0].message.tool_calls[0]
    print("call:", call.function.name, Weather(**json.loads(call.function.arguments)))

    # An answer in the form of a schema, read into the same class.
    parsed = client.chat.completions.parse(
        model=model, messages=messages, temperature=0, response_format=Weather
    )
    print("answer:", parsed.choices[0].message.parsed)


if __name__ == "__main__":
    main(*sys.argv[1:])
