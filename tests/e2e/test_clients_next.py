"""`/v1/responses` and `/v1/messages` with the clients that are made for them, against a server."""

from __future__ import annotations

import http.client
import json
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field
from tests.e2e.conftest import KEY, DemoServer

PATHS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
MODEL = "demo-tools"  # of the server of conftest.py
GREEDY = {"temperature": 0}  # no parameter of Anthropic's client any more
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def responses(demo_server: DemoServer) -> Iterator[openai.OpenAI]:
    url = f"{demo_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def messages(demo_server: DemoServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_server.url, api_key=KEY, max_retries=0) as client:
        yield client


class Trip(BaseModel):
    city: str = Field(json_schema_extra={"enum": ["Paris", "Rome"]})
    days: int = Field(json_schema_extra={"maximum": 9, "minimum": 1})


def test_a_response_is_the_same_streamed_and_whole_and_as_a_chat(responses: openai.OpenAI) -> None:
    asked = {"model": MODEL, "instructions": "Be short.", **GREEDY, "max_output_tokens": 12}
    whole = responses.responses.create(input="The license", **asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 12
    told = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "The license"}]
    chat = responses.chat.completions.create(model=MODEL, messages=told, **GREEDY, max_tokens=12)
    assert whole.output_text == chat.choices[0].message.content != ""
    with responses.responses.stream(input="The license", **asked) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert len(deltas) > 1


def test_a_response_that_is_parsed(responses: openai.OpenAI) -> None:
    parsed = responses.responses.parse(
        model=MODEL, input="A trip", text_format=Trip, max_output_tokens=100
    )
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, Trip)
    with responses.responses.stream(model=MODEL, input="A trip", text_format=Trip) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Trip)


def test_a_response_that_calls_and_gets_the_result(responses: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "trip", "parameters": SCHEMA, "strict": True}
    asked = {"model": MODEL, "tools": [{"type": "web_search"}, tool], "tool_choice": "required"}
    with responses.responses.stream(input="A trip", parallel_tool_calls=False, **asked) as stream:
        deltas = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        final = stream.get_final_response()
    [call] = final.output
    assert (call.type, call.name, "".join(deltas)) == ("function_call", "trip", call.arguments)
    assert set(json.loads(call.arguments)) == {"city", "days"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "booked"}
    history = [{"role": "user", "content": "A trip"}, call.model_dump(exclude_none=True), result]
    raw = responses.responses.with_raw_response.create(
        model=MODEL, input=history, tools=asked["tools"], max_output_tokens=16
    )
    assert raw.headers["x-freight-ignored"] == "input[].parsed_arguments, tools[].web_search"
    assert raw.parse().usage.input_tokens > final.usage.input_tokens


def test_a_response_that_refers_to_another_is_refused(responses: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        responses.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"


def test_a_message_is_the_same_streamed_and_whole_and_as_a_chat(
    messages: anthropic.Anthropic, responses: openai.OpenAI
) -> None:
    asked = {"model": MODEL, "system": "Be short.", "max_tokens": 12, "extra_body": GREEDY}
    told = [{"role": "user", "content": "The license"}]
    whole = messages.messages.create(messages=told, **asked)
    chat = responses.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be short."}, *told],
        temperature=0,
        max_tokens=12,
    )
    assert whole.content[0].text == chat.choices[0].message.content != ""
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with messages.messages.stream(messages=told, **asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert len(texts) > 1
    usage = final.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    count = messages.messages.count_tokens(model=MODEL, system="Be short.", messages=told)
    assert count.input_tokens == chat.usage.prompt_tokens


def test_a_message_ends_at_a_stop_sequence_and_goes_on_where_it_was_begun(
    messages: anthropic.Anthropic,
) -> None:
    told = [{"role": "user", "content": "The license"}]
    asked = {"model": MODEL, "extra_body": GREEDY}
    whole = messages.messages.create(messages=told, max_tokens=24, **asked).content[0].text
    words = whole.split()
    stop = words[2]
    ended = messages.messages.create(messages=told, max_tokens=24, stop_sequences=[stop], **asked)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    begun = ended.content[0].text.rstrip()
    going = messages.messages.create(
        messages=[*told, {"role": "assistant", "content": begun}], max_tokens=24, **asked
    )
    assert whole.removeprefix(begun)[:8] == going.content[0].text[:8]


def test_a_message_that_calls_and_gets_the_result(messages: anthropic.Anthropic) -> None:
    tool = {"name": "trip", "input_schema": SCHEMA}
    told = [{"role": "user", "content": "A trip"}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"model": MODEL, "max_tokens": 100, "tools": [tool]}
    with messages.messages.stream(messages=told, tool_choice=choice, **asked) as stream:
        final = stream.get_final_message()
    [call] = final.content
    assert (call.type, call.name, set(call.input)) == ("tool_use", "trip", {"city", "days"})
    assert final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "booked"}
    history = [
        *told,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [result]},
    ]
    assert messages.messages.create(messages=history, **asked).usage.output_tokens > 0
    count = messages.messages.count_tokens(model=MODEL, messages=history, tools=[tool]).input_tokens
    assert count > messages.messages.count_tokens(model=MODEL, messages=told).input_tokens


def test_a_count_goes_beyond_the_context_and_an_answer_does_not(
    messages: anthropic.Anthropic,
) -> None:
    told = [{"role": "user", "content": "The license. " * 2000}]
    assert messages.messages.count_tokens(model=MODEL, messages=told).input_tokens > 1024
    with pytest.raises(anthropic.BadRequestError, match="1024"):
        messages.messages.create(model=MODEL, messages=told, max_tokens=1)


def test_errors_have_the_shape_of_their_api(
    demo_server: DemoServer, messages: anthropic.Anthropic
) -> None:
    told: list[Any] = [{"role": "user", "content": "x"}]
    with anthropic.Anthropic(base_url=demo_server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as error:
            stranger.messages.create(model=MODEL, max_tokens=1, messages=told)
        assert error.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.count_tokens(model=MODEL, messages=told)
    with pytest.raises(anthropic.NotFoundError):
        messages.messages.create(model="gpt", max_tokens=1, messages=told)
    status, body = post(demo_server.url, "/v1/messages", "{")
    assert (status, body["type"]) == (400, "error")


def commands() -> Iterator[tuple[str, str]]:
    """(path, body) of the commands in the documents that ask these APIs."""
    for file in sorted((Path(__file__).parents[2] / "docs").glob("server*.md")):
        for line in file.read_text().splitlines():
            if line.startswith("    curl --json "):
                _, _, body, address = shlex.split(line)
                yield urlsplit(address).path, body


def test_the_commands_of_the_documents_work(demo_server: DemoServer) -> None:
    documented = [(path, body) for path, body in commands() if path in PATHS]
    assert sorted(path for path, _ in documented) == sorted(PATHS)
    for path, body in documented:
        status, answer = post(demo_server.url, path, body.replace('"demo"', f'"{MODEL}"'))
        assert status == 200, path
        assert ("usage" in answer) or answer["input_tokens"] > 1


def post(url: str, path: str, body: str) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    headers = {"Content-Type": "application/json", "x-api-key": KEY}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    with closing(connection):
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
