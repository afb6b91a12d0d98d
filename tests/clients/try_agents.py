"""pydantic-ai and openai-agents over chat and responses. Run as: try_agents.py URL"""

from __future__ import annotations

import sys
from typing import Any

from agents import Agent as OpenAIAgent
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelNotFoundError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponses
from pydantic_ai.providers.openai import OpenAIProvider
from wanted import LENGTH, PROMPT, Order, Plain, is_order, raises, tell

URL = sys.argv[1]
set_tracing_disabled(True)
SETTINGS: Any = {
    "temperature": 0,
    "max_tokens": LENGTH,
    "timeout": 60,
    "parallel_tool_calls": False,
}


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def pydantic_ai(kind: Any, output: Any) -> Any:
    """The answer of a new agent, with a client of its own: each run has an event loop."""
    model = kind("demo", provider=OpenAIProvider(openai_client=client()))
    return (
        Agent(model, output_type=output, model_settings=SETTINGS, retries=0).run_sync(PROMPT).output
    )


def pydantic_ai_chat() -> None:
    for output in (NativeOutput(Order), ToolOutput(Order)):
        is_order(pydantic_ai(OpenAIChatModel, output))


def pydantic_ai_responses() -> None:
    for output in (NativeOutput(Order), ToolOutput(Order)):
        is_order(pydantic_ai(PydanticResponses, output))


def pydantic_ai_errors() -> None:
    model = OpenAIChatModel("none", provider=OpenAIProvider(openai_client=client()))
    raises(ModelNotFoundError, lambda: Agent(model).run_sync(PROMPT), "404")


@function_tool
def weather(unit: str) -> str:
    """The weather."""
    return "sunny " + unit[:4]


def agents(kind: Any) -> None:
    settings = ModelSettings(temperature=0, max_tokens=LENGTH)
    agent = OpenAIAgent(
        name="a",
        model=kind(model="demo", openai_client=client()),
        output_type=Plain,
        model_settings=settings,
    )
    assert isinstance(Runner.run_sync(agent, PROMPT).final_output, Plain)


def agents_chat() -> None:
    agents(OpenAIChatCompletionsModel)


def agents_responses() -> None:
    agents(OpenAIResponsesModel)


tell([pydantic_ai_chat, pydantic_ai_responses, pydantic_ai_errors, agents_chat, agents_responses])
