"""The clients that people have, against `freight serve`: openai and huggingface_hub, as their users
call them.

What is tested is what only a real client shows: that it accepts every answer, streamed or not, that
its helpers come to their end, and that failures become the exceptions that programs catch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError
from openai import OpenAI
from pydantic import Base64Str, BaseModel, Field, SecretStr, conlist
from tests.demo_chat import demo_with_chat_template
from tests.e2e.conftest import DemoServer
from tests.serving import freight_serve

PROMPT = "def main("
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
    }
]


class Trip(BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module")
def client(demo_server: DemoServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=demo_server.url + "/v1", api_key=demo_server.key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def hub(demo_server: DemoServer) -> InferenceClient:
    return InferenceClient(demo_server.url, token=demo_server.key, timeout=300)


def asking(server: DemoServer, **more: Any) -> dict[str, Any]:
    return {"model": server.name, "messages": MESSAGES, **more}


def check_trip(text: str | None) -> None:
    trip = json.loads(text or "")
    assert trip["city"] in ("Oslo", "Rome")
    assert 1 <= trip["days"] <= 9
    assert len(trip) == 2


# openai: models, completions


def test_models(client: OpenAI, demo_server: DemoServer) -> None:
    assert [model.id for model in client.models.list()] == [demo_server.name]
    assert client.models.retrieve(demo_server.name).owned_by == "freight"
    with pytest.raises(openai.NotFoundError) as absent:
        client.models.retrieve("another")
    assert absent.value.code == "model_not_found"


def test_completions_echo_their_prompt_with_log_probabilities(
    client: OpenAI, demo_server: DemoServer
) -> None:
    common: dict[str, Any] = {"model": demo_server.name, "prompt": PROMPT, "temperature": 0}
    common["echo"] = True
    found = client.completions.create(**common, max_tokens=5, logprobs=2)
    (choice,) = found.choices
    assert choice.text.startswith(PROMPT)
    assert len(choice.text) > len(PROMPT)
    logprobs: Any = choice.logprobs
    usage: Any = found.usage
    tokens, own = logprobs.tokens, logprobs.token_logprobs
    top, offsets = logprobs.top_logprobs, logprobs.text_offset
    assert len(tokens) == len(own) == len(top) == len(offsets) == usage.total_tokens
    assert own[0] is None
    assert all(value <= 0 for value in own[1:])
    for token, value, entry in zip(tokens[1:], own[1:], top[1:], strict=True):
        assert entry[token] == value
    only = client.completions.create(**common, max_tokens=0, logprobs=2).choices[0]
    assert only.text == PROMPT
    assert only.logprobs is not None
    assert only.logprobs.token_logprobs == own[: usage.prompt_tokens]


def test_several_prompts_as_text_and_as_token_ids(client: OpenAI, demo_server: DemoServer) -> None:
    prompts = ["def main(", "The license"]
    asked = {"model": demo_server.name, "n": 2, "seed": 3, "max_tokens": 6}
    found = client.completions.create(**asked, prompt=prompts)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    ids = [
        client.post("../tokenize", body={"prompt": prompt}, cast_to=object)["tokens"]  # type: ignore[index]
        for prompt in prompts
    ]
    for prompt, half in zip(ids, (found.choices[:2], found.choices[2:]), strict=True):
        alone = client.completions.create(**asked, prompt=prompt)
        assert [choice.text for choice in alone.choices] == [choice.text for choice in half]
    both = client.completions.create(**asked, prompt=ids)
    assert [choice.text for choice in both.choices] == [choice.text for choice in found.choices]


def test_equal_seeds_give_equal_texts(client: OpenAI, demo_server: DemoServer) -> None:
    def answer(seed: int) -> tuple[str | None, str | None]:
        found = client.chat.completions.create(
            model=demo_server.name, messages=MESSAGES, temperature=1.2, seed=seed, max_tokens=24
        )
        return found.choices[0].message.content, found.system_fingerprint

    assert answer(5) == answer(5)
    assert answer(5) != answer(6)


# openai: chat


def test_chat_with_log_probabilities_streamed_and_whole(
    client: OpenAI, demo_server: DemoServer
) -> None:
    asked = asking(demo_server, **GREEDY, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**asked)
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    (choice,) = whole.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    parts = [part for chunk in chunks for part in chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
    assert entries == choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert chunks[-1].usage == whole.usage


def test_the_helper_for_streams_gathers_two_choices(
    client: OpenAI, demo_server: DemoServer
) -> None:
    form = {"structured_outputs": {"choice": ["yes, of course", "no, never"]}}  # so that it ends
    asked = asking(demo_server, n=2, seed=4, max_tokens=200, extra_body=form)
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    assert kinds.count("content.done") == 2
    assert [choice.message.content for choice in final.choices] == [
        choice.message.content for choice in whole.choices
    ]


def test_a_schema_holds_and_is_parsed(client: OpenAI, demo_server: DemoServer) -> None:
    asked = asking(demo_server, temperature=0, max_tokens=200)
    json_schema = {"name": "trip", "schema": SCHEMA, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": json_schema}
    answer = client.chat.completions.create(**asked, response_format=form)
    check_trip(answer.choices[0].message.content)
    parsed = client.chat.completions.parse(**asked, response_format=Trip, logit_bias={"1": 5})
    assert isinstance(parsed.choices[0].message.parsed, Trip)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(max_length=8)


class Record(BaseModel):
    """Types whose schemas have what no grammar enforces, or formats that none knows."""

    secret: SecretStr
    sizes: set[int]
    path: Path
    raw: bytes
    coded: Base64Str
    key: UUID
    at: datetime
    price: Decimal
    pair: conlist(int, min_length=2, max_length=2)  # type: ignore[valid-type]
    pet: Cat | Dog = Field(discriminator="kind")


class Short(BaseModel):
    """Some of them, so that a model without training comes to an end."""

    secret: SecretStr = Field(max_length=6)
    path: Annotated[Path, Field(json_schema_extra={"maxLength": 6})]
    sizes: set[Literal["a", "b"]] = Field(min_length=1, max_length=3)
    pet: Cat | Dog = Field(discriminator="kind")


def test_schemas_of_pydantic_hold_as_far_as_a_grammar_can(
    client: OpenAI, demo_server: DemoServer
) -> None:
    asked, chat = asking(demo_server, temperature=0), client.chat.completions.with_raw_response
    raw = chat.parse(**asked, response_format=Short, max_tokens=300)
    found = raw.parse().choices[0].message.parsed
    assert isinstance(found, Short)
    where = "response_format.schema"
    assert raw.headers["x-freight-ignored"] == f"{where}.format, {where}.uniqueItems"
    tool = openai.pydantic_function_tool(Record)
    forced: Any = {"type": "function", "function": {"name": "Record"}}
    json_schema = {"name": "x", "schema": tool["function"]["parameters"]}
    form: Any = {"type": "json_schema", "json_schema": json_schema}
    whole = chat.create(**asked, response_format=form, max_tokens=1)
    call = chat.create(**asked, tools=[tool], tool_choice=forced, max_tokens=1)
    for answer, place in ((whole, where), (call, "tools[].function.parameters")):
        ignored = {*answer.headers["x-freight-ignored"].split(", ")}
        assert ignored == {f"{place}.{name}" for name in ("format", "uniqueItems")}


def test_a_named_function_is_called_exactly_once(client: OpenAI, demo_server: DemoServer) -> None:
    anything: Any = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": anything}}]
    asked = asking(demo_server, tools=tools, response_format={"type": "json_object"})
    asked |= {"temperature": 1.5, "max_tokens": 150, "n": 4, "seed": 1}
    forced: Any = {"type": "function", "function": {"name": "f"}}
    named = client.chat.completions.create(**asked, tool_choice=forced)
    assert [len(choice.message.tool_calls or []) for choice in named.choices] == [1] * 4
    several = (
        choice
        for seed in range(1, 9)
        for choice in client.chat.completions.create(
            **asked | {"seed": seed}, tool_choice="required"
        ).choices
    )
    assert any(len(choice.message.tool_calls or []) > 1 for choice in several)


def test_a_demanded_call_fits_its_schema_and_its_result_is_taken(
    client: OpenAI, demo_server: DemoServer
) -> None:
    asked: dict[str, Any] = {"model": demo_server.name, "temperature": 0, "tools": TOOLS}
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    forced["max_tokens"] = 100
    free: dict[str, Any] = {"tool_choice": "none", "max_tokens": 4}
    (choice,) = client.chat.completions.create(**asked, **forced, messages=MESSAGES).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    check_trip(call.function.arguments)
    with client.chat.completions.stream(**asked, **forced, messages=MESSAGES) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert not streamed.message.content
    (same,) = streamed.message.tool_calls or []
    assert same.function.name == call.function.name
    assert same.function.arguments == call.function.arguments
    assert same.id != call.id
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "9 degrees"}
    answered = [*MESSAGES, choice.message, result]
    second: Any = client.chat.completions.create(**asked, messages=answered, **free)
    assert second.choices[0].message.content
    first: Any = client.chat.completions.create(**asked, messages=MESSAGES, **free)
    # call and result are in the prompt
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_errors_become_the_classes_that_programs_catch(
    client: OpenAI, demo_server: DemoServer
) -> None:
    chat, name = client.chat.completions, demo_server.name
    with pytest.raises(openai.BadRequestError) as bad:
        chat.create(model=name, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        chat.create(model=name, messages=MESSAGES, max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as absent:
        chat.create(model="another", messages=MESSAGES)
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


# huggingface_hub


def test_hub_text_generation(hub: InferenceClient) -> None:
    text = hub.text_generation(PROMPT, max_new_tokens=12)
    whole = hub.text_generation(
        PROMPT, max_new_tokens=12, details=True, decoder_input_details=True, top_n_tokens=2
    )
    details = whole.details
    assert details is not None
    assert whole.generated_text == text == "".join(token.text for token in details.tokens)
    assert details.generated_tokens == len(details.tokens) == 12
    assert details.finish_reason == "length"
    assert details.prefill
    assert "".join(hub.text_generation(PROMPT, max_new_tokens=12, stream=True)) == text
    events = list(hub.text_generation(PROMPT, max_new_tokens=12, stream=True, details=True))
    assert [event.index for event in events] == list(range(1, 13))
    assert events[-1].generated_text == text
    assert events[-1].details is not None
    assert events[-1].details.input_length == len(details.prefill)
    assert [event.token.id for event in events] == [token.id for token in details.tokens]
    assert hub.text_generation(PROMPT, max_new_tokens=3, return_full_text=True).startswith(PROMPT)


def test_hub_grammar(hub: InferenceClient) -> None:
    form: Any = {"type": "json", "value": SCHEMA}
    check_trip(hub.text_generation(PROMPT, max_new_tokens=200, grammar=form))
    form = {"type": "regex", "value": "[ab]{3}x"}
    assert hub.text_generation(PROMPT, max_new_tokens=9, grammar=form)[3] == "x"


def test_hub_chat(hub: InferenceClient) -> None:
    greedy: dict[str, Any] = {"messages": MESSAGES, "temperature": 0.0}
    whole = hub.chat_completion(**greedy, max_tokens=12)
    chunks = list(hub.chat_completion(**greedy, max_tokens=12, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    for kind in ("json", "json_object"):
        form: Any = {"type": kind, "value": SCHEMA}
        answer = hub.chat_completion(**greedy, max_tokens=200, response_format=form)
        check_trip(answer.choices[0].message.content)
    greedy |= {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
    calls = hub.chat_completion(**greedy).choices[0].message.tool_calls or []
    assert calls
    check_trip(calls[0].function.arguments)
    choices = [
        choice for chunk in hub.chat_completion(**greedy, stream=True) for choice in chunk.choices
    ]
    streamed = [call for choice in choices for call in choice.delta.tool_calls or []]
    first = [call.function.arguments or "" for call in streamed if call.index == 0]
    assert "".join(first) == calls[0].function.arguments


def test_hub_errors_become_the_classes_that_programs_catch(hub: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        hub.text_generation(PROMPT, temperature=-1.0)
    with pytest.raises(ValidationError, match="1024 tokens"):
        list(hub.text_generation(PROMPT, max_new_tokens=100_000, stream=True))


def test_both_clients_see_that_a_server_is_full(tmp_path: Path) -> None:
    """One completion may run and none wait: what comes beside it is refused with a time to try
    again.
    """
    folder = demo_with_chat_template(tmp_path / "demo", 16384)
    options = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "32MiB"]
    with freight_serve(folder, [*options, "--max-num-seqs", "1", "--max-queue", "0"]) as url:
        client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": folder.name, "prompt": "x"}
        asked["extra_body"] = {"ignore_eos": True}
        with client, client.completions.create(**asked, max_tokens=16_000, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(**asked, max_tokens=1)
            assert full.value.code == "queue_full"
            assert 1 <= int(full.value.response.headers["retry-after"]) <= 120
            with pytest.raises(OverloadedError):
                InferenceClient(url).text_generation("x", max_new_tokens=1)
