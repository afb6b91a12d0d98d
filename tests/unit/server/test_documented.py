"""What /openapi.json says of null and of fields that nobody knows is what the server does with
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from tests.unit.server.openai_cases import HELLO, LIMITS, SERVED, TOOL

from freight.serve.anthropic.messages_request import CountBody, MessagesBody, parse_messages
from freight.serve.app import INVOCATION
from freight.serve.bodies import schema_of
from freight.serve.openai.chat_request import ChatRequest, parse_chat
from freight.serve.openai.responses_request import ResponsesBody, parse_responses
from freight.serve.transport.errors import ApiError

Parse = Callable[[dict[str, Any], Any], object]
TOOL_NULLS = ("description", "parameters", "strict")


def accepted(parse: Parse, body: dict[str, Any], served: Any = SERVED) -> bool:
    try:
        parse(body, served)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("name", TOOL_NULLS)
def test_null_in_a_tool(name: str):
    tool = copy.deepcopy(TOOL)
    tool["function"][name] = None
    body = {"messages": HELLO, "tools": [tool]}
    assert accepted(lambda body, served: parse_chat(body, served, LIMITS), body)
    assert jsonschema_rs.is_valid(schema_of(ChatRequest), body)


def test_invocations_take_each_of_the_three_bodies():
    for body in (
        {"messages": HELLO, "tools": [TOOL]},
        {"prompt": "x"},
        {"inputs": "x", "parameters": {}},
    ):
        assert jsonschema_rs.is_valid(schema_of(INVOCATION), body)
    assert not jsonschema_rs.is_valid(schema_of(INVOCATION), {"max_tokens": 1})


def parse_next(body: dict[str, Any], served: Any) -> object:
    return (parse_responses if "input" in body else parse_messages)(body, served, LIMITS)


@pytest.mark.parametrize(
    ("model", "good", "bad"),
    [
        (ResponsesBody, {"input": "x"}, {"input": None}),
        (ResponsesBody, {"input": "x"}, {"input": []}),
        (ResponsesBody, {"input": [{"type": "web_search_call"}, *HELLO]}, {"prompt": {}}),
        (ResponsesBody, {"input": HELLO}, {"input": [{"role": "robot", "content": "x"}]}),
        (ResponsesBody, {"input": HELLO}, {"input": [{"type": "function_call", "name": "f"}]}),
        (ResponsesBody, {"input": HELLO, "text": {"format": None}}, {"text": {"format": {}}}),
        (ResponsesBody, {"input": "x", "tools": [{"type": "mcp"}]}, {"tools": [{"type": 1}]}),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1}, {"max_tokens": None}),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1}, {"messages": []}),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1}, {"system": [{"type": "image"}]}),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1}, {"tool_choice": {"type": "some"}}),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1, "thinking": None}, {"thinking": {}}),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1, "frob": 1}, {"tools": [{}]}),
    ],
)
def test_apis_that_are_read_as_chats(model: Any, good: dict[str, Any], bad: dict[str, Any]) -> None:
    schema = schema_of(model)
    assert jsonschema_rs.is_valid(schema, good)
    assert accepted(parse_next, good)
    assert not jsonschema_rs.is_valid(schema, good | bad)
    assert not accepted(parse_next, good | bad)


def test_a_count_needs_no_max_tokens() -> None:
    assert jsonschema_rs.is_valid(schema_of(CountBody), {"messages": HELLO})
