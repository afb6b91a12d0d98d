"""A form that an answer must have begins after the model's reasoning, which is free text.

The model is the demo with a response template of its own and two tokens renamed to its tags, which
`logit_bias` makes likely enough. One template ends the prompt within reasoning, so that every
answer begins there; without `enable_thinking` it leaves that to the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from tests.asking import Server
from tests.demo_chat import TEMPLATE, demo_with_tokens
from tests.serving import freight_serve

OPEN, CLOSE = 4094, 4095  # of the demo's tokens, two of which no other is made
TAGS = {OPEN: "<|muse|>", CLOSE: "<|say|>"}
THINKS = (
    TEMPLATE + "{% if add_generation_prompt and enable_thinking is not false %}<|muse|>{% endif %}"
)
PARTS = {
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": TAGS[OPEN], "close": TAGS[CLOSE], "content": "text"},
        "content": {"content": "text"},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "sky": {"enum": ["clear", "grey"]},
        "wind": {"type": "integer", "minimum": 0, "maximum": 12},
    },
    "required": ["sky", "wind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model") / "demo"
    config = {"chat_template": THINKS, "response_template": PARTS}
    demo_with_tokens(folder, TAGS, special=False, config=config)
    with freight_serve(folder, ["--kv-cache-memory", "8MiB"]) as url:
        yield Server(url)


def asked(
    server: Server, n: int = 4, max_tokens: int = 400, **fields: Any
) -> list[tuple[str, str]]:
    """(reasoning, content) of each answer that came to its end."""
    messages = [{"role": "user", "content": "How is the weather?"}]
    body = {"messages": messages, "max_tokens": max_tokens, "n": n, "seed": 1}
    choices = server.chat(**{"response_format": FORM, **body, **fields})
    ended = [choice["message"] for choice in choices if choice["finish_reason"] == "stop"]
    for message in ended:
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(message["content"])), message
    return [(message.get("reasoning") or "", message["content"]) for message in ended]


@pytest.mark.parametrize(
    "form",
    [{}, {"response_format": None, "structured_outputs": {"json": SCHEMA}}],
    ids=["openai", "vllm"],
)
def test_reasoning_is_free_and_what_follows_has_the_form(
    server: Server, form: dict[str, Any]
) -> None:
    """Under one of these biases: how likely a tag is without one is the model's affair."""
    free = (
        len(reasoning.split()) > 1 and "{" not in reasoning
        for bias in (10, 8, 12, 6, 14)
        for reasoning, _ in asked(server, logit_bias={str(CLOSE): bias}, **form)
    )
    assert any(free)


def test_an_answer_without_reasoning_has_the_form_from_its_beginning(server: Server) -> None:
    answers = asked(server, chat_template_kwargs={"enable_thinking": False})
    assert {reasoning for reasoning, _ in answers} == {""}


def test_an_answer_may_open_its_reasoning_itself(server: Server) -> None:
    likely = {str(OPEN): 20, str(CLOSE): 20}  # more than anything else
    template = {"enable_thinking": False}
    answers = asked(server, 8, 200, logit_bias=likely, chat_template_kwargs=template)
    assert any(reasoning for reasoning, _ in answers)
