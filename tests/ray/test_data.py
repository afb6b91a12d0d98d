"""Offline work: a data set of prompts through Ray Data."""

from __future__ import annotations

import numpy as np
import pytest

from freight import LLM, SamplingParams
from freight.ray import BatchLLM

pytestmark = pytest.mark.ray

PROMPTS = [f"def f{n}(x):\n    return" for n in range(40)]


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_data_set_is_answered_as_by_one_model(cluster: str) -> None:
    import ray

    params = SamplingParams(max_tokens=8, temperature=0.0)
    rows = [{"prompt": text, "number": n} for n, text in enumerate(PROMPTS)]
    answered = (
        ray.data.from_items(rows)
        .map_batches(
            BatchLLM,
            fn_constructor_kwargs={
                "model": "demo",
                "sampling_params": {"max_tokens": 8, "temperature": 0.0},
                "kv_cache_memory": "16MiB",
                "threads": 1,
            },
            concurrency=2,
            batch_size=10,
            num_cpus=1,
        )
        .take_all()
    )
    alone = LLM("demo", kv_cache_memory="16MiB", threads=1).generate(PROMPTS, params)
    found = {row["number"]: row for row in answered}
    assert sorted(found) == list(range(len(PROMPTS)))
    for number, output in enumerate(alone):
        row = found[number]
        assert row["prompt"] == PROMPTS[number]
        assert row["generated_text"] == output.outputs[0].text
        assert np.array_equal(row["generated_tokens"], output.outputs[0].token_ids)
        assert row["finish_reason"] == str(output.outputs[0].finish_reason)
