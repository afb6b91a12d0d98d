"""What /openapi.json says of null and of fields that nobody knows is what the server does with
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from tests.unit.server.openai_cases import HELLO, LIMITS, SERVED, TOOL

from freight.serve.anthropic.messages_request import CountBody, MessagesBody, parse_messages
from freight.serve.app import INVOCATION
from freight.serve.bodies import schema_of
from freight.serve.openai.chat_request import ChatRequest, parse_chat
from freight.serve.openai.completion_request import CompletionRequest, parse_completion
from freight.serve.openai.responses_request import ResponsesBody, parse_responses
from freight.serve.tgi.request import GenerateBody, parse_generate
from freight.serve.tokens import DetokenizeBody, TokenizeBody, detokenize, parse_tokenize
from freight.serve.transport.errors import ApiError

Parse = Callable[[dict[str, Any], Any], object]
APIS: list[tuple[Any, Parse, dict[str, Any]]] = [
    (
        ChatRequest,
        lambda body, served: parse_chat(body, served, LIMITS),
        {"messages": HELLO, "tools": [TOOL]},
    ),
    (
        CompletionRequest,
        lambda body, served: parse_completion(body, served, LIMITS),
        {"prompt": "x"},
    ),
    (
        GenerateBody,
        lambda body, served: parse_generate(body, served, LIMITS.sampling, None),
        {"inputs": "x", "parameters": {}},
    ),
    (TokenizeBody, lambda body, served: parse_tokenize(body, served, LIMITS), {"prompt": "x"}),
    (
        TokenizeBody,
        lambda body, served: parse_tokenize(body, served, LIMITS),
        {"messages": HELLO},
    ),
    (DetokenizeBody, lambda body, served: detokenize(body, served), {"tokens": [1]}),
]
NULLS = (
    "frob",
    "audio",
    "best_of",
    "suffix",
    "model",
    "stream",
    "parameters.frob",
    "parameters.seed",
)
TOOL_NULLS = ("description", "parameters", "strict")


def accepted(parse: Parse, body: dict[str, Any], served: Any = SERVED) -> bool:
    try:
        parse(body, served)
    except ApiError:
        return False
    return True


def changed(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    body = copy.deepcopy(body)
    inside, _, name = path.rpartition(".")
    (body[inside] if inside else body)[name] = value
    return body


@pytest.mark.parametrize(("model", "parse", "body"), APIS)
def test_null_and_unknown_fields(model: Any, parse: Parse, body: dict[str, Any]):
    assert accepted(parse, body)
    schema, ignoring = schema_of(model), schema_of(model, "ignore")
    for path in NULLS if "parameters" in body else NULLS[:-2]:
        given = changed(body, path, None)
        assert accepted(parse, given), path
        assert jsonschema_rs.is_valid(schema, given), path
    for path in ("frob", "parameters.frob") if "parameters" in body else ("frob",):
        given = changed(body, path, 1)
        assert not accepted(parse, given), path
        assert not jsonschema_rs.is_valid(schema, given), path
        assert accepted(parse, given, replace(SERVED, unknown_fields="ignore")), path
        assert jsonschema_rs.is_valid(ignoring, given), path


@pytest.mark.parametrize("name", TOOL_NULLS)
def test_null_in_a_tool(name: str):
    tool = copy.deepcopy(TOOL)
    tool["function"][name] = None
    body = {"messages": HELLO, "tools": [tool]}
    assert accepted(APIS[0][1], body)
    assert jsonschema_rs.is_valid(schema_of(ChatRequest), body)


def test_invocations_take_each_of_the_three_bodies():
    for _, _, body in APIS[:3]:
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
