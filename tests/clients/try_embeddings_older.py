"""litellm and llama-index: embeddings and rankings. Run as: try_embeddings_older.py
URL_OF_AN_EMBEDDER URL_OF_A_SCORER
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = (
    "True"  # before the import, or it asks the internet for prices
)

import litellm
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from wanted import raises, tell

URL, SCORER = sys.argv[1:]
TEXTS = ["a cat on the mat", "def main(argv):", "the sea at night"]
HERE: dict[str, Any] = {"api_key": "none", "max_retries": 0, "num_retries": 0, "timeout": 60}


def near(left: Any, right: Any) -> None:
    assert max(abs(a - b) for a, b in zip(left, right, strict=True)) < 1e-5


def litellm_embedding() -> None:
    found = []
    for route in ("openai", "hosted_vllm"):
        asked = HERE | {"model": f"{route}/embeds", "api_base": f"{URL}/v1", "input": TEXTS}
        answer = litellm.embedding(**asked)
        assert answer.usage.prompt_tokens > 0
        found.append([one["embedding"] for one in answer.data])
        answer = asyncio.run(litellm.aembedding(**asked, encoding_format="float"))
        found.append([one["embedding"] for one in answer.data])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            near(one, two)


def litellm_rerank() -> None:
    for route, base in (("hosted_vllm", SCORER), ("cohere", SCORER), ("jina_ai", SCORER)):
        asked = {"model": f"{route}/scores", "api_base": base, "api_key": "none"}
        answer = litellm.rerank(**asked, query="cat", documents=TEXTS, top_n=2)
        scores = [one["relevance_score"] for one in answer.results]
        assert len(scores) == 2, route
        assert scores == sorted(scores, reverse=True), route


def litellm_errors() -> None:
    asked = HERE | {"model": "openai/embeds", "api_base": f"{URL}/v1"}
    raises(litellm.BadRequestError, lambda: litellm.embedding(**asked, input="word " * 999))
    raises(
        litellm.BadRequestError,
        lambda: litellm.embedding(**asked, input="x", dimensions=0),
        "dimensions",
    )


def llama_index() -> None:
    model = OpenAILikeEmbedding(
        model_name="embeds", api_base=f"{URL}/v1", api_key="none", max_retries=0, timeout=60
    )
    near(model.get_text_embedding(TEXTS[0]), model.get_text_embedding_batch(TEXTS)[0])
    assert len(model.get_query_embedding("x")) == 32
    assert len(asyncio.run(model.aget_text_embedding("x"))) == 32


tell([litellm_embedding, litellm_rerank, litellm_errors, llama_index])
