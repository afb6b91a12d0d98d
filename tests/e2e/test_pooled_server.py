"""A server of a model that embeds, and one of a model that scores pairs: every API's answer is what
`LLM` gives, and what is not served is refused in its shape.
"""

from __future__ import annotations

import json
import math
import re
import socket
import time
from array import array
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.wire import Api
from tests.pooling_models import HIDDEN, save_body, save_encoder
from tests.serving import freight_serve
from transformers import AutoModelForSequenceClassification

from freight.llm import LLM
from freight.pooling import PoolingParams, PoolingTask

TEXTS = ["a cat on the mat", "def main(argv):", "the sea at night", "x"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPTIONS = ["--kv-cache-memory", "16MiB", "--max-num-seqs", "4", "--max-queue", "16"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_body(
        tmp_path_factory.mktemp("models") / "embeds", "qwen3", "Model", chat_template=TEMPLATE
    )
    kind = "sentence_transformers.models"
    modules = [{"path": "", "type": f"{kind}.Transformer"}]
    modules += [{"path": "1_Pooling", "type": f"{kind}.Pooling"}]
    numbered = [{"idx": index, "name": str(index), **one} for index, one in enumerate(modules)]
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    prompts = {"prompts": {"query": "Query: "}, "default_prompt_name": None}
    (folder / "1_Pooling").mkdir()
    for name, value in (
        ("modules.json", numbered),
        ("1_Pooling/config.json", pooling),
        ("config_sentence_transformers.json", prompts),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "scores"
    return save_body(folder, "qwen3", "ForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def embeds(embedder: Path) -> Iterator[Api]:
    with freight_serve(embedder, OPTIONS) as url:
        yield Api(url, "embeds")


@pytest.fixture(scope="module")
def scores(scorer: Path) -> Iterator[Api]:
    with freight_serve(scorer, OPTIONS) as url:
        yield Api(url, "scores")


@pytest.fixture(scope="module")
def embedding_llm(embedder: Path) -> LLM:
    return LLM(str(embedder), kv_cache_memory="16MiB")


@pytest.fixture(scope="module")
def scoring_llm(scorer: Path) -> LLM:
    return LLM(str(scorer), kv_cache_memory="16MiB")


def answer(api: Api, path: str, **body: Any) -> Any:
    reply = api.post(path, body)
    assert reply.status == 200, reply.body[:500]
    return reply.json()


def vectors_of(llm: LLM, texts: Any, **params: Any) -> list[Any]:
    found = llm.embed(texts, pooling_params=PoolingParams(**params))
    return [pytest.approx(one.outputs.embedding, abs=1e-5) for one in found]


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-5)


def test_embeddings(embeds: Api, embedding_llm: LLM) -> None:
    expected = vectors_of(embedding_llm, TEXTS)
    body = answer(embeds, "/v1/embeddings", input=TEXTS, model="embeds")
    assert [entry["embedding"] for entry in body["data"]] == expected
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2, 3]
    tokenizer = embedding_llm.engine.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert body["usage"]["total_tokens"] == sum(map(len, ids))
    by_ids = answer(embeds, "/v1/embeddings", input=ids, encoding_format="base64")
    for entry, vector in zip(by_ids["data"], expected, strict=True):
        assert array("f", b64decode(entry["embedding"])).tolist() == vector
    [cut] = vectors_of(embedding_llm, TEXTS[0], dimensions=8, normalize=True)
    body = {"input": TEXTS[0], "dimensions": 8, "normalize": True}
    [entry] = answer(embeds, "/v1/embeddings", **body)["data"]
    assert entry["embedding"] == cut
    assert math.hypot(*entry["embedding"]) == pytest.approx(1)


def test_prompts_and_conversations(embeds: Api, embedding_llm: LLM) -> None:
    [expected] = vectors_of(embedding_llm, "Query: x")
    [entry] = answer(embeds, "/v1/embeddings", input="x", prompt_name="query")["data"]
    assert entry["embedding"] == expected
    [expected] = vectors_of(
        embedding_llm, {"prompt_token_ids": _ids(embedding_llm, "user: x\n", False)}
    )
    messages = [{"role": "user", "content": "x"}]
    [entry] = answer(embeds, "/v1/embeddings", messages=messages)["data"]
    assert entry["embedding"] == expected


def _ids(llm: LLM, text: str, specials: bool = True) -> list[int]:
    assert llm.engine.tokenizer is not None
    return llm.engine.tokenizer.encode(text, specials)


def test_what_is_too_long_is_refused_or_cut_at_its_end(embeds: Api, embedding_llm: LLM) -> None:
    long = "word " * 400
    reply = embeds.post("/v1/embeddings", {"input": ["x", long]})
    assert (reply.status, reply.error()["code"]) == (400, "context_length_exceeded")
    assert reply.error()["param"] == "input[1]"
    ids = _ids(embedding_llm, long)
    for kept, count in ((-1, 256), (7, 7)):
        [expected] = vectors_of(embedding_llm, {"prompt_token_ids": ids[:count]})
        body = {"input": long, "truncate_prompt_tokens": kept}
        found = answer(embeds, "/v1/embeddings", **body)
        assert found["data"][0]["embedding"] == expected
        assert found["usage"]["prompt_tokens"] == count


def test_tei_and_pooling_give_the_same(embeds: Api, embedding_llm: LLM) -> None:
    normal = vectors_of(embedding_llm, TEXTS, normalize=True)
    for path in ("/embed", "/"):
        assert answer(embeds, path, inputs=TEXTS) == normal
        assert answer(embeds, path, inputs=TEXTS[0]) == normal[:1]
    plain = vectors_of(embedding_llm, TEXTS)
    assert answer(embeds, "/embed", inputs=TEXTS, normalize=False) == plain
    found = answer(embeds, "/pooling", input=TEXTS)["data"]
    assert [entry["data"] for entry in found] == plain
    invoked = answer(embeds, "/invocations", input=TEXTS[0])["data"]
    assert invoked[0]["embedding"] == plain[0]


def test_scores_of_embeddings_are_cosines(embeds: Api, embedding_llm: LLM) -> None:
    expected = [one.outputs.score for one in embedding_llm.score("cat", TEXTS)]
    for path in ("/score", "/v1/score"):
        found = answer(embeds, path, text_1="cat", text_2=TEXTS)["data"]
        assert [entry["score"] for entry in found] == near(expected)
    ranked = sorted(range(4), key=lambda place: -expected[place])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = answer(embeds, path, query="cat", documents=TEXTS)["results"]
        assert [entry["index"] for entry in found] == ranked
        assert [entry["relevance_score"] for entry in found] == near(sorted(expected)[::-1])
        assert [entry["document"]["text"] for entry in found] == [TEXTS[place] for place in ranked]


def test_scores_of_pairs(scores: Api, scoring_llm: LLM) -> None:
    expected = [one.outputs.score for one in scoring_llm.score("cat", TEXTS)]
    found = answer(scores, "/score", queries="cat", documents=TEXTS)["data"]
    assert [entry["score"] for entry in found] == near(expected)
    found = answer(scores, "/rerank", query="cat", documents=TEXTS, top_n=2)["results"]
    assert [entry["relevance_score"] for entry in found] == near(sorted(expected)[::-1][:2])
    found = answer(scores, "/rerank", query="cat", texts=TEXTS, return_text=True)
    assert [entry["score"] for entry in found] == near(sorted(expected)[::-1])
    assert all(TEXTS[entry["index"]] == entry["text"] for entry in found)
    raw = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False)
    logits = [one.outputs.score for one in scoring_llm.score("cat", TEXTS, pooling_params=raw)]
    found = answer(scores, "/rerank", query="cat", texts=TEXTS, raw_scores=True)
    assert [entry["score"] for entry in found] == near(sorted(logits)[::-1])
    probs = scoring_llm.classify(TEXTS[0])[0].outputs.probs
    [entry] = answer(scores, "/classify", input=TEXTS[0])["data"]
    assert (entry["probs"], entry["num_classes"]) == (near(probs), 1)
    assert answer(scores, "/predict", inputs=TEXTS[0])[0]["score"] == pytest.approx(
        probs[0], abs=1e-5
    )


def test_the_second_text_of_a_pair_has_its_token_type(tmp_path: Path) -> None:
    """As a cross encoder of BERT's has them: read here, and in the process for large texts."""
    auto = AutoModelForSequenceClassification
    encoder = save_encoder(tmp_path, "bert", auto, num_labels=1)
    # the last has more characters than the server itself tokenizes, and few tokens
    texts = [*TEXTS, "sea" + " " * (1 << 18) + "night"]
    llm = LLM(str(encoder), kv_cache_memory="16MiB", max_num_batched_tokens=512)
    expected = [one.outputs.score for one in llm.score("cat", texts)]
    with freight_serve(encoder, [*OPTIONS, "--max-num-batched-tokens", "512"]) as url:
        found = answer(Api(url, ""), "/score", queries="cat", documents=texts)["data"]
    assert [entry["score"] for entry in found] == near(expected)


def test_a_long_document_is_cut_and_a_long_query_refused(scores: Api) -> None:
    long = "word " * 400
    reply = scores.post("/rerank", {"query": "cat", "documents": ["x", long]})
    assert (reply.status, reply.error()["param"]) == (400, "documents[1]")
    cut = {"truncate_prompt_tokens": -1}
    body = {"query": "cat", "documents": ["x", long]}
    assert answer(scores, "/rerank", **body, **cut)["usage"]["prompt_tokens"] > 256
    answer(scores, "/rerank", **body, max_tokens_per_doc=9)
    reply = scores.post("/rerank", {"query": long, "documents": ["x"], **cut})
    assert (reply.status, reply.error()["param"]) == (400, "documents[0]")


def test_other_tasks_are_refused_in_the_shape_of_the_path(embeds: Api, scores: Api) -> None:
    messages = [{"role": "user", "content": "x"}]
    for api, path, body, way in (
        (embeds, "/v1/chat/completions", {"messages": messages}, "/v1/embeddings"),
        (embeds, "/v1/completions", {"prompt": "x"}, "/v1/embeddings"),
        (embeds, "/v1/responses", {"input": "x"}, "/v1/embeddings"),
        (embeds, "/invocations", {"prompt": "x"}, "/v1/embeddings"),
        (embeds, "/classify", {"input": "x"}, "/v1/embeddings"),
        (scores, "/v1/embeddings", {"input": "x"}, "/rerank"),
        (scores, "/v1/completions", {"prompt": "x"}, "/rerank"),
    ):
        reply = api.post(path, body)
        assert (reply.status, reply.error()["code"]) == (400, "unsupported_task"), path
        assert way in reply.error()["message"]
    reply = embeds.post("/v1/messages", {"messages": messages, "max_tokens": 3})
    assert (reply.status, reply.json()["type"]) == (400, "error")
    for path in ("/generate", "/predict"):
        reply = embeds.post(path, {"inputs": "x"})
        assert (reply.status, reply.json()["error_type"]) == (422, "validation")


PATHS = {
    "/v1/embeddings": "input",
    "/pooling": "input",
    "/rerank": "documents",
    "/score": "text_1",
    "/embed": "inputs",
}


@pytest.mark.parametrize("path", PATHS)
def test_faults(path: str, embeds: Api) -> None:
    status = 422 if path == "/embed" else 400
    for body, expected in (
        (b"{", status),
        (b'{"input": "\xff"}', status),
        (b"[]", status),
        (b"{}", status),
        (json.dumps({"query": "x", PATHS[path]: 5}).encode(), status),
        (b'{"input": "' + b"x" * (5 << 20) + b'"}', 413),
    ):
        reply = embeds.post(path, body)
        assert reply.status == expected, reply.body[:300]
        if path != "/embed":
            assert reply.error()["message"]
    assert answer(embeds, "/embed", inputs="x")


def test_what_the_model_does_is_told(embeds: Api, scores: Api) -> None:
    for api, tasks in ((embeds, ["embed", "score"]), (scores, ["classify", "score"])):
        [model] = api.get("/v1/models").json()["data"]
        info = api.get("/info").json()
        assert model["tasks"] == info["tasks"] == tasks
        assert info["pooling"]["task"] == tasks[0]
        assert info["max_client_batch_size"] == 2048
        assert api.get("/model_info").json()["is_generation"] is False
    assert embeds.get("/info").json()["pooling"]["prompts"] == ["query"]


def metric(api: Api, series: str) -> float:
    text = api.get("/metrics").body.decode()
    found = re.search(rf"^{re.escape(series)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found, series
    return float(found[1])


def test_a_list_that_is_longer_than_the_queue_is_one_call(embeds: Api, embedding_llm: LLM) -> None:
    """It has 4 places to run and 16 to wait; others are served meanwhile."""
    texts = [f"text {number}" for number in range(100)]
    before = metric(embeds, "freight:key_prompt_tokens_total")
    body = answer(embeds, "/v1/embeddings", input=texts)
    [last] = vectors_of(embedding_llm, texts[-1])
    assert len(body["data"]) == 100
    assert body["data"][-1]["embedding"] == last
    count = metric(embeds, "freight:key_prompt_tokens_total") - before
    assert count == body["usage"]["prompt_tokens"]
    reply = embeds.post("/v1/embeddings", {"input": ["x"] * 2049})
    assert (reply.status, reply.error()["param"]) == (400, "input")


@pytest.mark.clock
def test_a_list_stops_when_its_client_leaves(embeds: Api) -> None:
    texts = [f"{number} " + "word " * 200 for number in range(500)]
    body = json.dumps({"input": texts}).encode()
    before = metric(embeds, "freight:key_prompt_tokens_total")
    with socket.create_connection(embeds.place) as connection:
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        end = time.monotonic() + 60
        while metric(embeds, "freight:key_prompt_tokens_total") == before:
            assert time.monotonic() < end
            time.sleep(0.02)
    answer(embeds, "/v1/embeddings", input="x")
    end = time.monotonic() + 60
    while metric(embeds, "vllm:num_requests_running") + metric(embeds, "vllm:num_requests_waiting"):
        assert time.monotonic() < end
        time.sleep(0.1)
    done = metric(embeds, "freight:key_prompt_tokens_total") - before
    assert done < 400 * 200, "the rest was not computed"
