"""Harmony, gpt-oss's format, through a server: forms, forced calls, and the conversation that
follows them.

The model is the demo with seven tokens renamed to the format's control tokens, which `logit_bias`
makes likely enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from tests.asking import Server
from tests.demo_chat import add_to, demo_with_tokens
from tests.serving import freight_serve
from tests.unit.server.harmony_cases import SCHEMA, TEMPLATE, TOOLS

from freight.text.harmony import CALL, CHANNEL, END, MARKERS, RETURN

IDS = dict(zip(MARKERS, range(4096 - len(MARKERS), 4096), strict=True))
LIKELY = [{str(IDS[END]): bias} for bias in (9, 12, 15)]  # under one of them messages end in time
USER = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model") / "demo"
    texts = {number: marker for marker, number in IDS.items()}
    demo_with_tokens(folder, texts, special=True, config={"chat_template": TEMPLATE})
    add_to(folder / "generation_config.json", {"eos_token_id": [IDS[RETURN], IDS[CALL]]})
    with freight_serve(folder, ["--kv-cache-memory", "8MiB"]) as url:
        yield Server(url)


def asked(server: Server, **fields: Any) -> list[dict[str, Any]]:
    return server.chat(**{"messages": [USER], "max_tokens": 160, "n": 3, "seed": 1, **fields})


def ended(
    server: Server, reason: str, reasons: bool = False, **fields: Any
) -> list[dict[str, Any]]:
    """The messages of answers that ended so, under the first of the biases that has some.

    reasons: and whose answers have reasoning.
    """
    for bias in LIKELY:
        choices = asked(server, logit_bias=bias, **fields)
        messages = [choice["message"] for choice in choices if choice["finish_reason"] == reason]
        has_reasoning = any(choice["message"].get("reasoning") for choice in choices)
        if messages and (has_reasoning or not reasons):
            return messages
    raise AssertionError(choices)


def test_the_final_message_has_the_form_and_reasoning_is_free(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    fields = {"response_format": form, "skip_special_tokens": True}  # as some clients send
    for message in ended(server, "stop", reasons=True, **fields):
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(message["content"])), message


def test_a_forced_call_is_read_and_the_conversation_goes_on(server: Server) -> None:
    for message in ended(server, "tool_calls", tools=TOOLS, tool_choice="required"):
        (call,) = message["tool_calls"]
        assert call["function"]["name"] in ("get_weather", "get-time")
        schema = SCHEMA if call["function"]["name"] == "get_weather" else {"maxProperties": 0}
        assert jsonschema_rs.is_valid(schema, json.loads(call["function"]["arguments"])), message
        result = {"role": "tool", "tool_call_id": call["id"], "content": "grey"}
        said = message | {"content": "I will look.", "reasoning": "hm"}
        body = {"messages": [USER, said, result], "max_tokens": 1}
        answer = server.ask("/v1/chat/completions", body)
        assert answer.status == 200, answer.raw


@pytest.mark.parametrize("marker", [RETURN, CALL])
def test_both_end_tokens_end_an_answer(server: Server, marker: str) -> None:
    (choice,) = asked(server, n=1, logit_bias={str(IDS[marker]): 100})
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")


def test_a_header_that_is_cut_is_no_text(server: Server) -> None:
    bias = {str(IDS[CHANNEL]): 100}
    (choice,) = asked(server, n=1, max_tokens=1, logit_bias=bias)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
