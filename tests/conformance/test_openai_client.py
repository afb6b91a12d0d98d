"""The `openai` client against the server: what people's programs do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from openai import APIStatusError, LengthFinishReasonError, OpenAI
from tests.conformance.wire import Api

MESSAGES: list[Any] = [{"role": "user", "content": "def main("}]


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[OpenAI]:
    with OpenAI(base_url=api.url + "/v1", api_key=api.api_key or "none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI, api: Api) -> None:
    assert api.model in [model.id for model in client.models.list()]


def test_chat_streamed_and_whole(client: OpenAI, api: Api) -> None:
    fields: dict[str, Any] = {
        "model": api.model,
        "messages": MESSAGES,
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_the_helper_for_streams_with_two_choices(client: OpenAI, api: Api) -> None:
    """It fails with an IndexError where the second index comes before the first."""
    with client.chat.completions.stream(
        model=api.model, messages=MESSAGES, max_tokens=8, n=2
    ) as stream:
        with suppress(
            LengthFinishReasonError
        ):  # what the helper makes of an answer that reached its limit
            for _ in stream:
                pass
        assert [choice.index for choice in stream.current_completion_snapshot.choices] == [0, 1]


def test_completions(client: OpenAI, api: Api) -> None:
    fields: dict[str, Any] = {
        "model": api.model,
        "prompt": "def main(",
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = client.completions.create(**fields)
    text = "".join(
        c.text for chunk in client.completions.create(**fields, stream=True) for c in chunk.choices
    )
    assert whole.choices[0].text == text


def test_logprobs_of_completions(client: OpenAI, api: Api) -> None:
    found = (
        client.completions.create(model=api.model, prompt="x", max_tokens=2, logprobs=2)
        .choices[0]
        .logprobs
    )
    assert found is not None
    assert len(found.tokens or []) == len(found.token_logprobs or []) > 0


def test_errors_have_the_client_s_classes(client: OpenAI, api: Api) -> None:
    with pytest.raises(APIStatusError) as bad:
        client.chat.completions.create(model=api.model, messages=MESSAGES, temperature=-1)
    assert (bad.value.status_code, bad.value.param) == (400, "temperature")  # type: ignore[attr-defined]
    with pytest.raises(APIStatusError) as absent:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert absent.value.status_code == 404
