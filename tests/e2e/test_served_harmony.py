"""Harmony, gpt-oss's format, through a server: forms, forced calls, and the conversation that
follows them.

The model is the demo with seven tokens renamed to the format's control tokens, which `logit_bias`
makes likely enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.asking import Server
from tests.demo_chat import demo_with_chat_template
from tests.serving import freight_serve
from tests.unit.server.harmony_cases import SCHEMA, TEMPLATE, TOOLS

from freight.text.harmony import CALL, CHANNEL, END, MARKERS, RETURN

IDS = {
    marker: 4096 - len(MARKERS) + index for index, marker in enumerate(MARKERS)
}  # of which no other token is made
LIKELY = [{str(IDS[END]): bias} for bias in (9, 12, 15)]  # under one of them messages end in time
USER = {"role": "user", "content": "How is the weather?"}


def demo_of_harmony(folder: Path) -> Path:
    """The demo model in `folder` with tokens and a template of harmony."""
    demo_with_chat_template(folder)
    files = [
        folder / name
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    ]
    tokenizer, config, generation = (json.loads(file.read_text()) for file in files)
    model, texts = tokenizer["model"], {number: marker for marker, number in IDS.items()}
    model["vocab"] = {texts.get(number, name): number for name, number in model["vocab"].items()}
    model["merges"] = model["merges"][: -len(MARKERS)]
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, **special} for text, number in IDS.items()
    ]
    generation["eos_token_id"] = [IDS[RETURN], IDS[CALL]]
    for file, value in zip(
        files, (tokenizer, config | {"chat_template": TEMPLATE}, generation), strict=True
    ):
        file.write_text(json.dumps(value))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = demo_of_harmony(tmp_path_factory.mktemp("model") / "demo")
    with freight_serve(folder, ["--kv-cache-memory", "8MiB"]) as url:
        yield Server(url)


def asked(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The choices of an answer, whose messages are the same whole and streamed."""
    body = {"messages": [USER], "max_tokens": 160, "n": 3, "seed": 1, **fields}
    answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.raw
    choices: list[dict[str, Any]] = answer.body["choices"]
    streamed = [{"reasoning": "", "content": "", "calls": []} for _ in choices]
    for event in server.ask("/v1/chat/completions", {**body, "stream": True}).events[:-1]:
        for choice in event["choices"]:
            one: dict[str, Any] = streamed[choice["index"]]
            for name in ("reasoning", "content"):
                one[name] += choice["delta"].get(name) or ""
            one["calls"] += [call["function"] for call in choice["delta"].get("tool_calls") or []]
    for one, choice in zip(streamed, choices, strict=True):
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        assert one == {name: message.get(name) or "" for name in ("reasoning", "content")} | {
            "calls": calls
        }
    return choices


def test_the_final_message_has_the_form_and_reasoning_is_free(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    choices = [
        choice
        for bias in LIKELY
        for choice in asked(
            server, response_format=form, logit_bias=bias, skip_special_tokens=True
        )  # as some clients send
    ]
    ended = [choice["message"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    for message in ended:
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(message["content"])), message
    assert any(choice["message"].get("reasoning") for choice in choices)


def test_a_forced_call_is_read_and_the_conversation_goes_on(server: Server) -> None:
    choices = [
        choice
        for bias in LIKELY
        for choice in asked(server, tools=TOOLS, tool_choice="required", logit_bias=bias)
    ]
    called = [choice["message"] for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert called
    for message in called:
        (call,) = message["tool_calls"]
        assert call["function"]["name"] in ("get_weather", "get-time")
        schema = SCHEMA if call["function"]["name"] == "get_weather" else {"maxProperties": 0}
        assert jsonschema_rs.is_valid(schema, json.loads(call["function"]["arguments"])), message
        result = {"role": "tool", "tool_call_id": call["id"], "content": "grey"}
        said = message | {"content": "I will look.", "reasoning": "hm"}
        answer = server.ask(
            "/v1/chat/completions", {"messages": [USER, said, result], "max_tokens": 1}
        )
        assert answer.status == 200, answer.raw


@pytest.mark.parametrize("marker", [RETURN, CALL])
def test_both_end_tokens_end_an_answer(server: Server, marker: str) -> None:
    (choice,) = asked(server, n=1, logit_bias={str(IDS[marker]): 100})
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")


def test_a_header_that_is_cut_is_no_text(server: Server) -> None:
    bias = {str(IDS[CHANNEL]): 100}
    (choice,) = asked(server, n=1, max_tokens=1, logit_bias=bias)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
