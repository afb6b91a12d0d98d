"""The shapes of OpenAI's API: whole answers, and every rule of a stream."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.conformance.wire import Api, Reply

REASONS = {"stop", "length", "tool_calls"}


def check_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def check_head(answer: dict[str, Any], kind: str, prefix: str) -> None:
    assert answer["object"] == kind
    assert answer["id"].startswith(prefix)
    assert isinstance(answer["created"], int)
    assert isinstance(answer["model"], str)
    assert isinstance(answer["system_fingerprint"], str)


def chunks_of(reply: Reply, kind: str, prefix: str) -> list[dict[str, Any]]:
    """The chunks of a stream that is in order: same head in each, `[DONE]` last and once."""
    assert reply.status == 200, reply.body[:300]
    *chunks, done = reply.events()
    assert done == "[DONE]"
    assert "[DONE]" not in chunks
    for chunk in chunks:
        check_head(chunk, kind, prefix)
        assert [chunk[name] for name in ("id", "created", "model")] == [
            chunks[0][n] for n in ("id", "created", "model")
        ]
    return chunks


def test_chat_whole(api: Api) -> None:
    answer = api.chat().json()
    check_head(answer, "chat.completion", "chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in REASONS
    check_usage(answer["usage"])
    assert answer["usage"]["completion_tokens"] <= 6
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_has_the_role_of_every_index_first_and_one_end_for_each(
    api: Api, n: int
) -> None:
    chunks = chunks_of(api.chat(stream=True, n=n), "chat.completion.chunk", "chatcmpl-")
    for index, chunk in enumerate(chunks[:n]):
        (choice,) = chunk["choices"]
        assert (choice["index"], choice["delta"]["role"], choice["delta"]["content"]) == (
            index,
            "assistant",
            "",
        )
        assert choice["finish_reason"] is None
    ended: set[int] = set()
    for chunk in chunks[n:]:
        for choice in chunk["choices"]:
            assert choice["index"] not in ended, "nothing comes after the end of an index"
            assert "role" not in choice["delta"]
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] in REASONS
                assert choice["delta"] == {}
                ended.add(choice["index"])
    assert ended == set(range(n))
    assert all(chunk["choices"] and not chunk.get("usage") for chunk in chunks), (
        "usage was not asked for"
    )


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_the_usage_chunk_is_the_last_and_has_no_choice(api: Api, path: str) -> None:
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    if path == "chat":
        chunks = chunks_of(api.chat(**options), "chat.completion.chunk", "chatcmpl-")
    else:
        chunks = chunks_of(api.complete(**options), "text_completion", "cmpl-")
    assert chunks[-1]["choices"] == []
    check_usage(chunks[-1]["usage"])
    assert chunks[-1]["usage"]["completion_tokens"] <= 12
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks[:-1])


def test_usage_in_every_event(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(
        api.complete(stream=True, stream_options=options), "text_completion", "cmpl-"
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > 0


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("path", ["chat", "completions"])
def test_streamed_is_not_streamed(api: Api, path: str, fields: dict[str, Any]) -> None:
    ask = api.chat if path == "chat" else api.complete
    whole = ask(max_tokens=24, **fields).json()["choices"][0]
    *chunks, _ = ask(max_tokens=24, stream=True, **fields).events()
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if path == "chat":
        assert (
            "".join(c["delta"].get("content") or "" for c in choices) == whole["message"]["content"]
        )
    else:
        assert "".join(c["text"] for c in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


def test_chat_logprobs(api: Api) -> None:
    (choice,) = api.chat(logprobs=True, top_logprobs=3).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert -9999.0 <= entry["logprob"] <= 0.0
        assert len(entry["top_logprobs"]) == 3
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    text = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert text.decode("utf-8", "replace").startswith(choice["message"]["content"])


def test_completions_whole(api: Api) -> None:
    answer = api.complete().json()
    check_head(answer, "text_completion", "cmpl-")
    (choice,) = answer["choices"]
    assert isinstance(choice["text"], str)
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert choice["finish_reason"] in REASONS
    check_usage(answer["usage"])


def test_the_index_of_a_choice_is_prompt_times_n_plus_i(api: Api) -> None:
    answer = api.complete(["def main(", "import "], n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == texts[1] == api.complete("def main(").json()["choices"][0]["text"]
    assert texts[2] == texts[3] == api.complete("import ").json()["choices"][0]["text"]


def test_prompts_of_token_ids(api: Api) -> None:
    one, many = api.complete([5, 6, 7]).json(), api.complete([[5, 6, 7], [8]]).json()
    assert one["usage"]["prompt_tokens"] == 3
    assert many["usage"]["prompt_tokens"] == 4
    assert many["choices"][0]["text"] == one["choices"][0]["text"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_as_evaluation_harnesses_ask(api: Api, max_tokens: int) -> None:
    """lm-eval sums the log-probabilities of the prompt's tokens."""
    (choice,) = api.complete(
        [[5, 6, 7, 8]], max_tokens=max_tokens, logprobs=1, echo=True, seed=1234
    ).json()["choices"]
    found = choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(found[name]) for name in found} == {4 + max_tokens}
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for token, logprob, top in list(
        zip(*(found[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert -9999.0 <= logprob <= 0.0
        assert math.isclose(top[token], logprob, abs_tol=1e-6), "the token itself is among the best"
    assert found["text_offset"] == sorted(found["text_offset"])
    assert choice["text"].startswith("".join(found["tokens"][:1]))


def test_stop_strings_end_a_text_before_them(api: Api) -> None:
    text = api.complete(max_tokens=24).json()["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    (choice,) = api.complete(max_tokens=24, stop=[stop]).json()["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_limits_of_length(api: Api) -> None:
    answer = api.complete(max_tokens=5, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"
    newer = api.chat(max_tokens=5, max_completion_tokens=2, ignore_eos=True).json()
    assert newer["usage"]["completion_tokens"] == 2, "max_completion_tokens wins"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_messages_of_all_roles(api: Api, role: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": role, "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "assistant", "content": "two", "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "user", "content": "again"},
    ]
    assert api.chat(messages=messages).status == 200


def test_fields_without_effect_are_named(api: Api) -> None:
    reply = api.chat(
        user="me", store=False, metadata={"a": "b"}, service_tier="auto", verbosity="low"
    )
    assert reply.status == 200
    assert {"user", "store", "metadata"} <= {
        name.strip() for name in reply.headers["x-freight-ignored"].split(",")
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "value": {"type": "boolean"}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "boolean"}},
            }
        },
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "[ab]{3}"},
    ],
    ids=[
        "object",
        "object-value",
        "schema",
        "text",
        "regex",
        "choice",
        "guided-choice",
        "guided-regex",
    ],
)
def test_structured_output_is_taken(api: Api, fields: dict[str, Any]) -> None:
    reply = api.chat(max_tokens=20, **fields)
    assert reply.status == 200, reply.body[:300]
    text, found = reply.json()["choices"][0]["message"]["content"], str(fields)
    if "choice" in found:
        assert text in ("yes", "no")
    if "[ab]{3}" in found:
        assert len(text) == 3
        assert set(text) <= {"a", "b"}
    if "boolean" in found:
        assert text.strip() in ("true", "false")
