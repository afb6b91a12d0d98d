"""openai, langchain-openai, cohere and huggingface_hub: embeddings and rankings. Run as:
try_embeddings.py URL_OF_AN_EMBEDDER URL_OF_A_SCORER
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import cohere
import numpy
from cohere.errors import BadRequestError as CohereBadRequestError
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from langchain_openai import OpenAIEmbeddings
from openai import AsyncOpenAI, BadRequestError, OpenAI
from wanted import raises, tell

URL, SCORER = sys.argv[1:]
TEXTS = ["a cat on the mat", "def main(argv):", "the sea at night"]
HERE: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}


def near(left: Any, right: Any) -> None:
    assert numpy.allclose(left, right, atol=1e-5), (left, right)


def openai() -> None:
    """Its default asks for base64, which it decodes itself."""
    client = OpenAI(base_url=f"{URL}/v1", **HERE)
    coded = client.embeddings.create(model="embeds", input=TEXTS)
    plain = client.embeddings.create(model="embeds", input=TEXTS, encoding_format="float")
    assert [one.index for one in coded.data] == [0, 1, 2]
    for one, other in zip(coded.data, plain.data, strict=True):
        near(one.embedding, other.embedding)
    assert coded.usage.total_tokens == coded.usage.prompt_tokens > 0
    [short] = client.embeddings.create(model="embeds", input=TEXTS[0], dimensions=8).data
    assert len(short.embedding) == 8


def openai_asynchronous() -> None:
    async def several() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{URL}/v1", **HERE) as client:
            create = client.embeddings.create
            return await asyncio.gather(*(create(model="embeds", input=text) for text in TEXTS))

    assert all(len(one.data[0].embedding) == 32 for one in asyncio.run(several()))


def openai_errors() -> None:
    client = OpenAI(base_url=f"{URL}/v1", **HERE)
    create = client.embeddings.create
    raises(BadRequestError, lambda: create(model="embeds", input="x", dimensions=999), "dimensions")
    error: Any = raises(BadRequestError, lambda: create(model="embeds", input="word " * 999))
    assert error.code == "context_length_exceeded"
    ask = client.completions.create
    error = raises(BadRequestError, lambda: ask(model="embeds", prompt="x"), "/v1/embeddings")
    assert error.code == "unsupported_task"


def langchain() -> None:
    """It may split texts by tokens of its own; here it sends them as they are."""
    model = OpenAIEmbeddings(
        base_url=f"{URL}/v1", model="embeds", check_embedding_ctx_length=False, **HERE
    )
    near(model.embed_documents(TEXTS)[0], model.embed_query(TEXTS[0]))
    assert len(asyncio.run(model.aembed_documents(TEXTS))) == 3


def rankings(client: Any) -> None:
    answer = client.rerank(model="scores", query="cat", documents=TEXTS, top_n=2)
    scores = [one.relevance_score for one in answer.results]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert {one.index for one in answer.results} < {0, 1, 2}
    assert answer.meta.tokens.input_tokens > 0


def cohere_v1() -> None:
    client = cohere.Client(api_key="none", base_url=SCORER)
    rankings(client)
    answer = client.rerank(
        model="scores",
        query="cat",
        documents=[{"text": text} for text in TEXTS],
        return_documents=True,
    )
    assert all(one.document.text == TEXTS[one.index] for one in answer.results)


def cohere_v2() -> None:
    rankings(cohere.ClientV2(api_key="none", base_url=SCORER))
    client = cohere.ClientV2(api_key="none", base_url=URL)
    answer = client.rerank(model="embeds", query=TEXTS[1], documents=TEXTS)
    assert answer.results[0].index == 1
    assert math.isclose(answer.results[0].relevance_score, 1, abs_tol=1e-5)
    raises(
        CohereBadRequestError,
        lambda: client.rerank(model="embeds", query="x", documents=[]),
        "documents",
    )


def feature_extraction() -> None:
    """Of text-embeddings-inference, at the address alone."""
    client = InferenceClient(base_url=URL)
    found = client.feature_extraction(TEXTS, normalize=True, truncate=True)  # type: ignore[arg-type]
    assert found.shape == (3, 32)
    near(numpy.linalg.norm(found, axis=1), numpy.ones(3))
    near(client.feature_extraction(TEXTS[0], normalize=True), found[:1])
    raises(HfHubHTTPError, lambda: client.feature_extraction("word " * 999), "tokens")


tell(
    [
        openai,
        openai_asynchronous,
        openai_errors,
        langchain,
        cohere_v1,
        cohere_v2,
        feature_extraction,
    ]
)
