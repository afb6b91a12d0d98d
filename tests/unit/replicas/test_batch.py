"""The class for Ray Data, called as Ray Data calls it: with columns that are arrays of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from freight import LLM, SamplingParams
from freight.errors import ConfigError, RequestError
from freight.ray import BatchLLM

PARAMS = {"max_tokens": 4, "temperature": 0.0}


def of_objects(values: list[Any]) -> Any:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


@pytest.fixture(scope="module")
def model() -> BatchLLM:
    return BatchLLM("demo", sampling_params=PARAMS, kv_cache_memory="16MiB")


def test_texts_and_token_ids_are_answered_as_by_llm(model: BatchLLM) -> None:
    texts = ["def main(", "import os", "class A"]
    llm = LLM("demo", kv_cache_memory="16MiB")
    alone = llm.generate(texts, SamplingParams(max_tokens=4, temperature=0.0))
    ids = [np.array(output.prompt_token_ids) for output in alone]
    for column in (np.array(texts), of_objects(ids)):
        numbers = np.arange(3)
        found = model({"prompt": column, "number": numbers})
        assert found["number"] is numbers
        assert found["generated_text"] == [output.outputs[0].text for output in alone]
        assert found["generated_tokens"] == [output.outputs[0].token_ids for output in alone]
        assert found["finish_reason"] == ["length"] * 3


def test_conversations_go_through_the_template(model: BatchLLM) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        model({"prompt": of_objects([np.array([{"role": "user", "content": "x"}])])})


def test_what_is_refused(model: BatchLLM) -> None:
    with pytest.raises(ConfigError, match="prompt_column"):
        model({"text": np.array(["x"])})
    with pytest.raises(RequestError):
        model({"prompt": np.array(["x " * 5000])})
    with pytest.raises(ConfigError, match="one answer"):
        BatchLLM("demo", sampling_params={"n": 2})
