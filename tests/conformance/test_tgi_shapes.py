"""The shapes of text-generation-inference: what `huggingface_hub.InferenceClient` sends and reads."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.wire import Api

REASONS = {"length", "eos_token", "stop_sequence"}


def generate(
    api: Api, path: str = "/generate", *, stream: bool | None = None, **parameters: Any
) -> Any:
    body: dict[str, Any] = {"inputs": "def main(", "parameters": {"max_new_tokens": 6} | parameters}
    return api.post(path, body if stream is None else body | {"stream": stream})


def test_generate(api: Api) -> None:
    reply = generate(api)
    assert reply.status == 200, reply.body[:300]
    assert set(reply.json()) <= {"generated_text", "details"}
    assert isinstance(reply.json()["generated_text"], str)


def test_generate_with_details(api: Api) -> None:
    answer = generate(api, details=True, decoder_input_details=True).json()
    details = answer["details"]
    assert details["finish_reason"] in REASONS
    assert details["generated_tokens"] == len(details["tokens"]) <= 6
    assert details["prefill"]
    for token in details["tokens"]:
        assert {"id", "text", "logprob", "special"} <= set(token)
    assert (
        "".join(t["text"] for t in details["tokens"] if not t["special"])
        == answer["generated_text"]
    )


def test_generate_stream(api: Api) -> None:
    events = generate(api, "/generate_stream", details=True).events()
    assert "[DONE]" not in events
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert all(
        event["generated_text"] is None and event["details"] is None for event in events[:-1]
    )
    last = events[-1]
    assert last["generated_text"] == generate(api).json()["generated_text"], (
        "greedy unless sampling is asked for"
    )
    assert last["details"]["finish_reason"] in REASONS
    assert last["details"]["generated_tokens"] == len(events)
    assert last["details"]["input_length"] > 0


def test_the_bare_url_is_a_list_or_a_stream(api: Api) -> None:
    whole = generate(api, "/").json()
    assert isinstance(whole, list)
    assert len(whole) == 1
    assert (
        generate(api, "/", stream=True).events()[-1]["generated_text"] == whole[0]["generated_text"]
    )


@pytest.mark.parametrize("kind", ["json", "regex"])
def test_grammar(api: Api, kind: str) -> None:
    value: Any = {"type": "boolean"} if kind == "json" else "true|false"
    text = generate(api, grammar={"type": kind, "value": value}, max_new_tokens=20).json()[
        "generated_text"
    ]
    assert text.strip() in ("true", "false")


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": -1},
        {"stop": ["x"] * 10**4},
        {"grammar": {"type": "regex", "value": "("}},
        {"temperatur": 1},
    ],
    ids=lambda parameters: "-".join(parameters),
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_what_cannot_be_served_is_422_with_its_type(
    api: Api, path: str, parameters: dict[str, Any]
) -> None:
    reply = generate(api, path, **parameters)
    assert reply.status == 422, reply.body[:300]
    assert set(reply.json()) == {"error", "error_type"}
    assert reply.json()["error_type"] == "validation"


def test_inputs_that_are_missing_or_too_long_are_422(api: Api, max_model_len: int) -> None:
    for body in (
        {"parameters": {}},
        {"inputs": 3},
        {"inputs": "a b c d " * (max_model_len // 2 + 50)},
    ):
        reply = api.post("/generate", body)
        assert reply.status == 422
        assert reply.json()["error_type"] == "validation"


def test_info(api: Api) -> None:
    info = api.get("/info").json()
    wanted = (
        "model_id",
        "max_concurrent_requests",
        "max_best_of",
        "max_stop_sequences",
        "max_input_tokens",
    )
    wanted += ("max_total_tokens", "max_client_batch_size", "router", "version")
    assert {*wanted, "model_sha"} <= set(info)
