"""Embeddings, rankings, scores and classes: what becomes of a body, and of the vectors that come."""

from __future__ import annotations

import base64
import json
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.server.openai_cases import (
    CLASSIFIES,
    EMBEDS,
    HEAD,
    HELLO,
    LIMITS,
    SCORES,
    SERVED,
)

from freight.outputs import CompletionDelta, FinishReason, Pooled, RequestDelta
from freight.pooling import PoolingParams, PoolingTask
from freight.serve.app import generating
from freight.serve.call import Conversation, Pair, Served, TokenizedWork
from freight.serve.openai.chat_request import parse_chat
from freight.serve.pooling.call import PooledCall
from freight.serve.pooling.classify_request import parse_classify, parse_pooling
from freight.serve.pooling.embedding_request import parse_embeddings
from freight.serve.pooling.numbers import Numbers
from freight.serve.pooling.pairs import cut_text, read_pair
from freight.serve.pooling.rerank_request import parse_any_rerank, parse_rerank
from freight.serve.pooling.score_request import parse_score
from freight.serve.pooling.tei_request import parse_embed, parse_predict, parse_root
from freight.serve.transport.errors import ApiError
from freight.serve.transport.slices import json_bytes, json_in_slices

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXTS = ["a cat", "a dog", "the sea"]


def delta(values: list[float], finish: FinishReason = FinishReason.LENGTH) -> RequestDelta:
    output = CompletionDelta(0, [], "", None, finish, None, "no" if finish == "error" else None)
    return RequestDelta("1", [output], True, num_cached_tokens=2, pooled=Pooled(array("f", values)))


def answer(call: PooledCall, vectors: list[list[float]], served: Served = EMBEDS) -> Any:
    """The body of an answer, through JSON; each prompt had three tokens."""
    work = [TokenizedWork(None, (1, 2, 3), item.params) for item in call.work]
    reply = call.reply(HEAD, served, work)
    assert len(vectors) == len(work)
    for index, values in reversed(list(enumerate(vectors))):  # they end in any order
        assert reply.advance(index, delta(values)) == b""
    body = reply.body()
    assert b"".join(json_in_slices(body)) == json_bytes(body)
    return json.loads(json_bytes(body))


def refusal(parse: Any, body: dict[str, Any], served: Served = EMBEDS) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(body, served, LIMITS)
    return refused.value


@given(st.lists(FINITE, max_size=40))
def test_numbers_come_back_as_they_were(values: list[float]) -> None:
    vector = array("f", values)
    written = json.loads(json_bytes(Numbers(vector)))
    assert array("f", written) == vector
    assert all(isinstance(value, float) for value in written), "no client gets 0 for 0.0"
    assert json.loads(b"".join(json_in_slices(Numbers(vector)))) == written


def test_numbers_of_a_long_vector_are_written_in_pieces() -> None:
    vector = array("f", range(10_000))
    pieces = list(Numbers(vector).json_slices())
    assert len(pieces) > 2
    assert json.loads("".join(pieces)) == list(range(10_000))
    assert json.loads("".join(Numbers(array("f")).json_slices())) == []


def test_embeddings() -> None:
    call = parse_embeddings({"input": TEXTS[:2], "user": "me"}, EMBEDS, LIMITS)
    assert call.ignored == ("user",)
    body = answer(call, [[0.5, 0.25], [1.0, 0.0]])
    assert body == {
        "id": "embd-r1",
        "object": "list",
        "created": HEAD.created,
        "model": "demo",
        "system_fingerprint": "fp_1",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.0]},
        ],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 0,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_base64_has_little_endian_float32() -> None:
    call = parse_embeddings({"input": "x", "encoding_format": "base64"}, EMBEDS, LIMITS)
    [entry] = answer(call, [[1.0, -2.5]])["data"]
    assert base64.b64decode(entry["embedding"]) == bytes.fromhex("0000803f000020c0")


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_inputs(value: Any, prompts: list[Any]) -> None:
    call = parse_embeddings({"input": value}, EMBEDS, LIMITS)
    assert [item.prompt for item in call.work] == prompts
    params = call.work[0].params
    assert params.max_tokens == 0
    assert params.pooling == PoolingParams()


def test_a_prompt_of_the_model_comes_before_texts() -> None:
    call = parse_embeddings({"input": TEXTS, "prompt_name": "query"}, EMBEDS, LIMITS)
    assert [item.prompt for item in call.work] == [f"Query: {text}" for text in TEXTS]
    for body in ({"input": [5]}, {"input": "x"}):
        error = refusal(parse_embeddings, {**body, "prompt_name": "querry"})
        assert (error.status, error.param) == (400, "prompt_name")
    assert "query" in error.message


def test_a_conversation_is_one_input() -> None:
    call = parse_embeddings({"messages": HELLO}, EMBEDS, LIMITS)
    prompt = call.work[0].prompt
    assert isinstance(prompt, Conversation)
    assert not prompt.add_generation_prompt
    assert refusal(parse_embeddings, {"messages": HELLO, "input": "x"}).param == "input"
    assert refusal(parse_embeddings, {"messages": []}).param == "messages"
    both = {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}
    assert refusal(parse_embeddings, both).param == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": []}, "input", "no tokens"),
        ({"input": ["x"] * 2049}, "input", "at most 2048"),
        ({"input": ["x", [5]]}, "input[1]", "all inputs must be strings"),
        ({"input": [5, SERVED.vocab_size]}, "input[1]", "token ids"),
        ({"input": [5] * 1025}, "input", "truncate_prompt_tokens"),
        ({"encoding_format": "bytes"}, "encoding_format", "base64"),
        ({"embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"dimensions": 0}, "dimensions", "1 or more"),
        ({"truncation_side": "left"}, "truncation_side", "right"),
        ({"normalize": True, "use_activation": False}, "use_activation", "one choice"),
        ({"priority": 3}, "priority", "0"),
        ({"request_id": "a b"}, "request_id", "letters"),
        ({"dimension": 4}, "dimension", "did you mean dimensions"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: Any, param: str, words: str) -> None:
    error = refusal(parse_embeddings, {"input": "x", **fields})
    assert (error.status, error.param) == (400, param)
    assert words in error.message


def test_a_long_list_of_ids_is_taken_where_it_is_cut() -> None:
    body = {"input": [5] * 1025, "truncate_prompt_tokens": -1}
    assert parse_embeddings(body, EMBEDS, LIMITS).work[0].params.truncate_prompt_tokens == -1


def test_documents_are_ranked_by_cosine() -> None:
    body = {"query": "cat", "documents": [*TEXTS[:2], {"text": TEXTS[2]}], "top_n": 2}
    call = parse_rerank(body, EMBEDS, LIMITS)
    assert [item.prompt for item in call.work] == ["cat", *TEXTS]
    assert all(item.params.pooling == PoolingParams(normalize=True) for item in call.work)
    found = answer(call, [[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [1.0, 1.0]])
    assert found["results"] == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "a dog"}},
        {"index": 2, "relevance_score": pytest.approx(0.5**0.5), "document": {"text": "the sea"}},
    ]
    assert found["id"] == "rerank-r1"
    assert found["usage"]["total_tokens"] == found["meta"]["tokens"]["input_tokens"] == 12


def test_documents_are_ranked_by_the_scores_of_pairs() -> None:
    body = {"query": "cat", "documents": TEXTS, "return_documents": False, "instruction": "so"}
    call = parse_rerank({**body, "max_tokens_per_doc": 5}, SCORES, LIMITS)
    assert [item.prompt for item in call.work] == [Pair("cat", text, "so", 5) for text in TEXTS]
    found = answer(call, [[0.25], [0.5], [0.25]], SCORES)["results"]
    assert found == [
        {"index": 1, "relevance_score": 0.5},
        {"index": 0, "relevance_score": 0.25},
        {"index": 2, "relevance_score": 0.25},
    ]
    error = refusal(parse_rerank, body, EMBEDS)
    assert error.param == "instruction"


def test_a_ranking_in_the_form_of_tei() -> None:
    body = {"query": "cat", "texts": TEXTS, "raw_scores": True, "truncate": True}
    call = parse_any_rerank(body, SCORES, LIMITS)
    params = call.work[0].params
    assert params.truncate_prompt_tokens == -1
    assert params.pooling == PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False)
    vectors = [[1.0], [3.0], [2.0]]
    assert answer(call, vectors, SCORES) == [
        {"index": 1, "score": 3.0},
        {"index": 2, "score": 2.0},
        {"index": 0, "score": 1.0},
    ]
    with_text = parse_any_rerank({**body, "return_text": True}, SCORES, LIMITS)
    assert answer(with_text, vectors, SCORES)[0]["text"] == "a dog"
    assert refusal(parse_any_rerank, {**body, "documents": ["x"]}, SCORES).param == "texts"


def test_a_limit_of_documents_is_that_of_their_tokens() -> None:
    body = {"query": "cat", "documents": TEXTS, "max_tokens_per_doc": 5}
    for more, kept in (({}, 5), ({"truncate_prompt_tokens": 3}, 3)):
        call = parse_rerank({**body, **more}, EMBEDS, LIMITS)
        cut = [item.params.truncate_prompt_tokens for item in call.work]
        assert cut == [more.get("truncate_prompt_tokens"), kept, kept, kept]


NAMES = [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]


@pytest.mark.parametrize(("left", "right"), NAMES)
def test_scores_under_each_name(left: str, right: str) -> None:
    call = parse_score({left: "x", right: TEXTS}, EMBEDS, LIMITS)
    found = answer(call, [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert [entry["score"] for entry in found["data"]] == [1.0, 0.0, -1.0]
    assert found["data"][0] == {"index": 0, "object": "score", "score": 1.0}
    paired = parse_score({left: TEXTS, right: TEXTS}, SCORES, LIMITS)
    assert [item.prompt for item in paired.work] == [Pair(text, text) for text in TEXTS]
    assert [item.prompt_from for item in paired.work] == [f"{right}[{i}]" for i in range(3)]
    each = parse_score({left: TEXTS[:2], right: TEXTS[1:]}, EMBEDS, LIMITS)
    found = answer(each, [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert [entry["score"] for entry in found["data"]] == [0.0, 1.0]
    assert refusal(parse_score, {left: TEXTS, right: TEXTS[:2]}).param == right
    assert refusal(parse_score, {left: TEXTS}).param in (right, "documents")
    assert refusal(parse_score, {left: [], right: []}).param == left


def test_texts_are_needed() -> None:
    assert refusal(parse_score, {}).param == "text_1"
    assert refusal(parse_rerank, {"query": "x"}).param == "documents"
    assert refusal(parse_rerank, {"query": "x", "documents": []}).param == "documents"
    error = refusal(parse_rerank, {"query": "x", "documents": [{"image": "x"}]})
    assert (error.param or "").startswith("documents[0]")


def test_classes() -> None:
    call = parse_classify({"input": ["x", "y"]}, CLASSIFIES, LIMITS)
    assert call.work[0].params.pooling == PoolingParams(task=PoolingTask.CLASSIFY)
    first, second = answer(call, [[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]], CLASSIFIES)["data"]
    assert first == {"index": 0, "label": "b", "probs": [0.25, 0.5, 0.25], "num_classes": 3}
    assert second["label"] == "a"
    assert CLASSIFIES.pooling is not None
    nameless = replace(CLASSIFIES, pooling=replace(CLASSIFIES.pooling, labels=()))
    call = parse_classify({"input": "x", "use_activation": False}, nameless, LIMITS)
    assert answer(call, [[0.0, 0.0, 2.0]], nameless)["data"][0]["label"] == "LABEL_2"


def test_pooling_does_what_the_model_does() -> None:
    for served, task in ((EMBEDS, "embed"), (CLASSIFIES, "classify")):
        for body in ({}, {"task": task}):
            call = parse_pooling({"input": "x", **body}, served, LIMITS)
            pooling = call.work[0].params.pooling
            assert pooling is not None
            assert pooling.task == task
            found = answer(call, [[0.5]], served)["data"]
            assert found == [{"index": 0, "object": "pooling", "data": [0.5]}]
    others: list[Any] = ["token_embed", "token_classify", "plugin", 3, ["embed"]]
    for other in others:
        error = refusal(parse_pooling, {"input": "x", "task": other})
        assert (error.param, "embed or classify" in error.message) == ("task", True)
    assert refusal(parse_pooling, {"input": "x", "task": "classify"}).param == "task"
    assert refusal(parse_pooling, {"input": "x", "dimensions": 2}, CLASSIFIES).param == "dimensions"


def test_tei_embeds_normalized_unless_told_otherwise() -> None:
    for body, normalize in (({}, True), ({"normalize": False}, False)):
        call = parse_embed({"inputs": ["x", "y"], **body}, EMBEDS, LIMITS)
        assert call.work[0].params.pooling == PoolingParams(normalize=normalize)
        assert answer(call, [[1.0], [2.0]]) == [[1.0], [2.0]]
    one = parse_root({"inputs": "x"}, EMBEDS, LIMITS)
    assert answer(one, [[1.0]]) == [[1.0]]
    error = refusal(parse_embed, {"inputs": "x", "truncation_direction": "Left"})
    assert (error.param, "Right" in error.message) == ("truncation_direction", True)
    assert one.failure_body(ApiError(422, "so")) == {"error": "so", "error_type": "validation"}


def test_tei_predicts() -> None:
    call = parse_predict({"inputs": "x"}, CLASSIFIES, LIMITS)
    assert answer(call, [[0.25, 0.5, 0.25]], CLASSIFIES) == [
        {"score": 0.5, "label": "b"},
        {"score": 0.25, "label": "a"},
        {"score": 0.25, "label": "c"},
    ]
    call = parse_root({"inputs": [["x"], ["y"]]}, CLASSIFIES, LIMITS)
    found = answer(call, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], CLASSIFIES)
    assert [entry[0]["label"] for entry in found] == ["a", "b"]
    pair = parse_predict({"inputs": ["x", "y"]}, SCORES, LIMITS)
    assert pair.work[0].prompt == Pair("x", "y")
    batch = parse_predict({"inputs": [["x", "y"], ["z"]]}, SCORES, LIMITS)
    assert [item.prompt for item in batch.work] == [Pair("x", "y"), "z"]
    assert refusal(parse_predict, {"inputs": ["x", "y"]}, CLASSIFIES).param == "inputs"
    assert refusal(parse_predict, {"inputs": [[]]}, CLASSIFIES).param == "inputs[0]"
    assert refusal(parse_predict, {"inputs": []}, CLASSIFIES).param == "inputs"


@pytest.mark.parametrize(
    ("parse", "body", "served", "way"),
    [
        (generating(parse_chat), {"messages": HELLO}, EMBEDS, "/v1/embeddings"),
        (generating(parse_chat), {"messages": HELLO}, SCORES, "/rerank"),
        (generating(parse_chat), {"messages": HELLO}, CLASSIFIES, "/classify"),
        (parse_embeddings, {"input": "x"}, SERVED, "/v1/completions"),
        (parse_embeddings, {"input": "x"}, SCORES, "/rerank"),
        (parse_classify, {"input": "x"}, EMBEDS, "/v1/embeddings"),
        (parse_rerank, {"query": "x", "documents": ["y"]}, CLASSIFIES, "/classify"),
        (parse_score, {"text_1": "x", "text_2": "y"}, SERVED, "--pooling"),
        (parse_pooling, {"input": "x"}, SERVED, "/v1/chat/completions"),
        (parse_embed, {"inputs": "x"}, SERVED, "/v1/completions"),
        (parse_predict, {"inputs": "x"}, EMBEDS, "/v1/embeddings"),
        (parse_root, {"texts": ["x"], "query": "x"}, CLASSIFIES, "/classify"),
    ],
)
def test_the_error_of_a_model_of_another_kind_names_the_way(
    parse: Any, body: dict[str, Any], served: Served, way: str
) -> None:
    error = refusal(parse, body, served)
    assert (error.status, error.code) == (400, "unsupported_task")
    assert way in error.message


def test_what_failed_or_is_no_number_ends_the_answer() -> None:
    call = parse_embeddings({"input": "x"}, EMBEDS, LIMITS)
    for values, finish, status in (
        ([1.0, float("nan")], FinishReason.LENGTH, 500),
        ([float("inf"), float("-inf")], FinishReason.LENGTH, 500),
        ([1.0], FinishReason.TIMEOUT, 504),
        ([1.0], FinishReason.ERROR, 500),
    ):
        reply = call.reply(HEAD, EMBEDS, [TokenizedWork(None, (1,), call.work[0].params)])
        with pytest.raises(ApiError) as failed:
            reply.advance(0, delta(values, finish))
        assert failed.value.status == status


def test_a_document_is_cut_and_the_query_is_not() -> None:
    tokenizer = SERVED.tokenizer
    assert tokenizer is not None
    assert SCORES.pooling is not None
    query = "the query"
    document = "one two three four five six seven eight nine ten"
    whole = read_pair(tokenizer, SCORES.pooling, Pair(query, document), None).token_ids
    for most in range(len(whole) - 5, len(whole) + 1):
        cut = read_pair(tokenizer, SCORES.pooling, Pair(query, document), most).token_ids
        assert cut == whole[: len(cut)]
        assert most - 1 <= len(cut) <= most
    short = read_pair(tokenizer, SCORES.pooling, Pair(query, document, None, 2), None)
    assert short == read_pair(
        tokenizer, SCORES.pooling, Pair(query, cut_text(tokenizer, document, 2)), None
    )


@given(st.text(alphabet=" abc\nä€", max_size=300), st.integers(1, 20))
def test_a_text_is_cut_to_its_first_tokens(text: str, most: int) -> None:
    tokenizer = SERVED.tokenizer
    assert tokenizer is not None
    cut = cut_text(tokenizer, text, most)
    assert text.startswith(cut)
    if len(tokenizer.encode(text, False)) <= most:
        assert cut == text
