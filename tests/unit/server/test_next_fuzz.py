"""Bodies that make no sense: responses and messages refuse them as ApiErrors, and nothing else is
raised.
"""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.server.openai_cases import LIMITS, SERVED

from freight.serve.anthropic.messages_request import MessagesBody, parse_count, parse_messages
from freight.serve.openai.responses_request import ResponsesBody, parse_responses
from freight.serve.transport.errors import ApiError

WORDS = [
    "",
    "x",
    "user",
    "assistant",
    "text",
    "auto",
    "function",
    "message",
    "tool_use",
    "tool_result",
    "thinking",
]
WORDS += [
    "function_call",
    "function_call_output",
    "reasoning",
    "allowed_tools",
    "tool",
    "any",
    "json_schema",
    "enabled",
]
INSIDE = [
    "type",
    "role",
    "content",
    "text",
    "name",
    "arguments",
    "call_id",
    "output",
    "input",
    "tool_use_id",
    "id",
]
INSIDE += [
    "tools",
    "mode",
    "format",
    "schema",
    "effort",
    "thinking",
    "summary",
    "input_schema",
    "parameters",
]
FIELDS = sorted({"n", *ResponsesBody.model_fields, *MessagesBody.model_fields})
LEAVES = st.none() | st.booleans() | st.integers(-2, 2**64) | st.sampled_from(WORDS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INSIDE), inner, max_size=4)
    ),
    max_leaves=12,
)
ITEM = st.dictionaries(st.sampled_from(INSIDE), VALUES, max_size=5)
GOOD = {"input": "Hello", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@settings(max_examples=100)
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES | st.lists(ITEM, max_size=3), max_size=4),
    st.booleans(),
)
def test_any_body_is_read_or_refused(body, with_good):
    body = (GOOD if with_good else {}) | body
    for parse in (parse_responses, parse_messages, parse_count):
        with contextlib.suppress(ApiError):
            call = parse(body, SERVED, LIMITS)
            assert all(name.isascii() and len(name) <= 64 for name in call.ignored)
