"""The answers of completions: choices by prompt, echo, and log-probabilities as evaluators read
them.
"""

from __future__ import annotations

import json
import math
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from tests.unit.server.openai_cases import (
    HEAD,
    LIMITS,
    SERVED,
    TOKENIZER,
    answers,
    as_scores,
    chunks,
    deltas,
    prompt_scores,
    scores,
    split,
    tokenized,
)

from freight.outputs import CompletionDelta, FinishReason, Logprob, RequestDelta
from freight.serve.openai import completion_reply
from freight.serve.openai.completion_request import parse_completion
from freight.serve.openai.logprobs import PromptLogprobs
from freight.serve.openai.stream import Usage
from freight.serve.transport.errors import ApiError
from freight.serve.transport.slices import json_bytes, json_in_slices

IDS = TOKENIZER.encode("Hello world", add_special_tokens=False)


def call_of(**body):
    return parse_completion({"prompt": "Hello", "stream": True, **body}, SERVED, LIMITS)


@given(
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.lists(st.integers(1, 30), max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_a_stream_is_the_body_in_parts_however_the_text_is_split(text, cuts, echo, logprobs):
    call = call_of(
        prompt=["ab", "cd"],
        n=2,
        echo=echo,
        logprobs=1 if logprobs else None,
        stream_options={"include_usage": True},
    )
    feed = [
        (prompt, d)
        for prompt in (1, 0)
        for i in (1, 0)
        for d in deltas(split(text, cuts), index=i, logprobs=logprobs)
    ]
    if echo and logprobs:  # in parts, and later than the first tokens
        late = [
            RequestDelta("r1", [], False, part)
            for part in (prompt_scores([5, 6]), prompt_scores([6, 7]))
        ]
        feed[1:1] = [(1, late[0]), (0, late[0])]
        feed += [(0, late[1]), (1, late[1])]
    raw, body = answers(call, feed)
    if not (echo and logprobs):  # OpenAI's types do not know the null of an echoed prompt
        Completion.model_validate_json(json.dumps(body), strict=True)
    parts = chunks(raw)
    assert parts[-1] == {**parts[-1], "choices": [], "usage": body["usage"]}
    assert body["usage"]["prompt_tokens"] == 6
    for index, whole in enumerate(body["choices"]):
        mine = [
            choice
            for part in parts
            for choice in part["choices"]
            if choice["index"] == whole["index"] == index
        ]
        assert "".join(choice["text"] for choice in mine) == whole["text"]
        assert (
            whole["text"] == "Hello" * echo + text
        )  # the tokenized prompts of these tests are all "Hello"
        assert (
            [c["finish_reason"] for c in mine if c["finish_reason"]]
            == [whole["finish_reason"]]
            == ["stop"]
        )
        if logprobs:
            for name, values in whole["logprobs"].items():
                assert [value for choice in mine for value in choice["logprobs"][name]] == values
            assert len(whole["logprobs"]["tokens"]) == 3 * echo + len(split(text, cuts))
        else:
            assert whole["logprobs"] is None


def test_an_evaluators_request_gets_what_the_evaluator_reads():
    body = {
        "prompt": [IDS],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    call = call_of(**body, stream=False)
    params = call.work[0].params
    assert (params.logprobs, params.prompt_logprobs, params.max_tokens, params.seed) == (
        1,
        1,
        1,
        1234,
    )
    feed = [
        (0, RequestDelta("r1", [], False, prompt_scores(IDS))),
        *((0, d) for d in deltas([" x"], logprobs=True)),
    ]
    _, answer = answers(call, feed, ids=IDS, text=None)
    [choice] = answer["choices"]
    assert choice["text"] == "Hello world x"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [TOKENIZER.token_text(token) for token in [*IDS, 20]]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * len(IDS)
    assert logprobs["top_logprobs"][0] is None
    for token, top, offset in list(
        zip(logprobs["tokens"], logprobs["top_logprobs"], logprobs["text_offset"], strict=True)
    )[1:-1]:
        assert top[token] == -0.5
        assert choice["text"][offset:].startswith(token)
    assert -9999.0 in logprobs["top_logprobs"][1].values()


def test_the_likelier_of_two_tokens_with_the_same_text_counts():
    entry = {3: Logprob(-0.1, 1, "é"), 4: Logprob(-2.0, 2, "é"), 5: Logprob(-3.0, 3, "e")}
    output = CompletionDelta(0, [4], "é", [entry], FinishReason.LENGTH, None, None)
    _, body = answers(call_of(logprobs=2), [(0, RequestDelta("r1", [output], True))])
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["é"],
        "token_logprobs": [-2.0],
        "top_logprobs": [{"é": -0.1, "e": -3.0}],
        "text_offset": [0],
    }


def test_special_tokens_that_are_left_out_take_no_room():
    end = TOKENIZER.eos_token_id
    output = CompletionDelta(
        0,
        [IDS[0], end, IDS[0]],
        "",
        [scores(IDS[0]), scores(end), scores(IDS[0])],
        FinishReason.LENGTH,
        None,
        None,
    )
    width = len(TOKENIZER.token_text(IDS[0]))
    for skip, last in ((True, width), (False, width + len(TOKENIZER.token_text(end)))):
        output.text = TOKENIZER.decode(output.token_ids, skip)
        call = call_of(logprobs=0, skip_special_tokens=skip)
        _, body = answers(call, [(0, RequestDelta("r1", [output], True))])
        assert body["choices"][0]["logprobs"]["text_offset"] == [0, width, last]


def test_scoring_alone_gives_the_prompt():
    call = call_of(max_tokens=0, echo=True)
    assert (call.work[0].params.max_tokens, call.work[0].params.prompt_logprobs) == (0, 0)
    output = CompletionDelta(0, [], "", None, FinishReason.LENGTH, None, None)
    raw, body = answers(call, [(0, RequestDelta("r1", [output], True, prompt_scores([5, 6, 7])))])
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert [part["choices"][0]["text"] for part in chunks(raw)] == ["Hello", ""]


@pytest.mark.parametrize("stop", ["END", 7, None])
def test_what_ended_an_answer_is_told_with_its_finish_reason(stop):
    first = CompletionDelta(0, [20], "x", None, None, None, None)
    last = CompletionDelta(0, [21], "y", None, FinishReason.STOP, stop, None)
    feed = [(0, RequestDelta("r1", [one], one is last)) for one in (first, last)]
    raw, body = answers(call_of(), feed)
    told = [part["choices"][0] for part in chunks(raw)]
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == (
        "stop",
        stop,
    )
    assert (told[-1]["finish_reason"], told[-1]["stop_reason"]) == ("stop", stop)
    assert (told[0]["finish_reason"], "stop_reason" in told[0]) == (None, False)


def test_ids_and_scores_come_where_asked_for():
    call = call_of(prompt_logprobs=0, return_token_ids=True, stream=False)
    feed = [
        (0, RequestDelta("r1", [], False, prompt_scores([5, 6, 7]))),
        *((0, d) for d in deltas(["x", "y"])),
    ]
    _, body = answers(call, feed)
    [choice] = body["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6, 7], [20, 21])
    assert choice["prompt_logprobs"][1]["6"]["logprob"] == -0.5
    raw, _ = answers(call_of(return_token_ids=True), feed[1:])
    parts = [chunk["choices"][0] for chunk in chunks(raw)]
    assert [part["token_ids"] for part in parts] == [[20], [21]]
    assert [part.get("prompt_token_ids") for part in parts] == [[5, 6, 7], None]


def test_cached_tokens_of_all_prompts_are_counted_once():
    call = call_of(prompt=["a", "b"])
    feed = [(prompt, delta) for prompt in (0, 1) for delta in deltas(["x", "y"], cached=2)]
    assert answers(call, feed)[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_failed_completion_raises():
    call = call_of(n=2)
    reply = call.reply(HEAD, SERVED, tokenized(call))
    output = CompletionDelta(1, [], "", None, FinishReason.ERROR, None, "row of NaN")
    with pytest.raises(ApiError, match="row of NaN") as error:
        reply.advance(0, RequestDelta("r1", [output], False))
    assert error.value.headers["x-should-retry"] == "false"
    assert (
        json.loads(reply.failure(error.value).split(b"\n\n")[0].removeprefix(b"data: "))["error"][
            "type"
        ]
        == "server_error"
    )


def test_a_prompt_that_exceeds_the_context_is_refused_with_three_numbers():
    for asked, fits in (({}, 1023), ({"max_tokens": 100}, 924)):
        call = call_of(**asked)
        call.reply(HEAD, SERVED, tokenized(call, ids=range(fits)))
        with pytest.raises(ApiError, match=rf"1024 tokens.*{fits + 1} tokens") as error:
            call.reply(HEAD, SERVED, tokenized(call, ids=range(fits + 1)))
        assert (error.value.status, error.value.code, error.value.param) == (
            400,
            "context_length_exceeded",
            "prompt",
        )
    assert "and 100 are asked for" in error.value.message


def test_usage_in_every_chunk_counts_tokens_that_add_no_text_yet():
    call = call_of(stream_options={"include_usage": True, "continuous_usage_stats": True})
    raw, body = answers(call, [(0, delta) for delta in deltas(["", "a", "", "b"])])
    assert [part["usage"]["completion_tokens"] for part in chunks(raw)] == [1, 2, 3, 4, 4]
    assert body["choices"][0]["text"] == "ab"


@given(st.builds(Usage, *[st.integers(0, 2**40)] * 4))
def test_usage_is_the_same_as_an_object_and_as_text(usage):
    assert usage.json() == json.dumps(usage.body())


def test_millions_of_scores_are_written_as_a_list_of_them_would_be():
    ids = [*range(2, 150), *IDS, 4095]
    rng = random.Random(5)
    entries = []
    for token in ids[1:]:
        likely = rng.sample([other for other in range(4096) if other != token], 3)
        values = sorted((-math.inf, -1e-9, rng.random() * -9, -1.5), reverse=True)
        own = rng.randint(0, 2)  # beside the likely, or among them
        order = [*likely[:own], token, *likely[own:]][:3] if own else [*likely, token]
        ranks = range(1, 4) if own else (1, 2, 3, 77)
        entries.append(
            {
                other: Logprob(single(value), rank)
                for other, value, rank in zip(order, values, ranks, strict=False)
            }
        )
    plain = [None] + [
        {
            str(token): {
                "logprob": one.logprob if math.isfinite(one.logprob) else -9999.0,
                "rank": one.rank,
                "decoded_token": TOKENIZER.token_text(token),
            }
            for token, one in entry.items()
        }
        for entry in entries
    ]
    scores = as_scores(ids[1:], entries)
    for parts in (
        [scores],
        [scores.part(0, 1), scores.part(1, 100), scores.part(100, len(scores))],
    ):
        assert b"".join(json_in_slices({"x": PromptLogprobs(parts, TOKENIZER)})) == json_bytes(
            {"x": plain}
        )
        assert json_bytes({"x": PromptLogprobs(parts, TOKENIZER)}) == json_bytes({"x": plain})


def single(value: float) -> float:
    return array("f", [value])[0]


def test_a_long_prompt_is_told_in_several_chunks(monkeypatch: pytest.MonkeyPatch):
    ids = list(range(20, 70))
    feed = [
        (0, RequestDelta("r1", [], False, prompt_scores(ids))),
        *((0, d) for d in deltas([" x"], logprobs=True)),
    ]
    call = call_of(echo=True, logprobs=1, return_token_ids=True)
    [whole, *_], body = chunks(answers(call, feed, ids=ids)[0]), answers(call, feed, ids=ids)[1]
    monkeypatch.setattr(completion_reply, "_TOKENS_OF_CHUNK", 16)
    raw, _ = answers(call, feed, ids=ids)
    *parts, last = [chunk["choices"][0] for chunk in chunks(raw)]
    assert [part["text"] for part in parts] == [whole["choices"][0]["text"], "", "", ""]
    assert [len(part["logprobs"]["tokens"]) for part in parts] == [16, 16, 16, 2]
    assert [part.get("prompt_token_ids") for part in parts] == [ids, None, None, None]
    assert [part["finish_reason"] for part in (*parts, last)] == [None] * 4 + ["stop"]
    for name, values in body["choices"][0]["logprobs"].items():
        assert [value for part in (*parts, last) for value in part["logprobs"][name]] == values
