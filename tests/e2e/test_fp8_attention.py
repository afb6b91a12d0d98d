"""`attention_compute="fp8"` from the option to the kernel, by the reference kernels, which run it
on a CPU.
"""

from __future__ import annotations

import pytest
from tests.refusals import refuses

from freight import LLM, SamplingParams
from freight.errors import ConfigError
from freight.lab.evaluate.report import compare_caches
from freight.settings.engine import EngineArgs


def test_it_costs_something_and_little_and_leaves_the_first_row_as_it_is():
    text = list(range(40, 140))
    plain, fp8 = (
        compare_caches(
            EngineArgs(kernels="reference", attention_compute=compute), [("fp8", "unit")], text
        )
        for compute in ("auto", "fp8")
    )
    assert fp8[0].perplexity == plain[0].perplexity
    assert plain[1].mean_kl < fp8[1].mean_kl < 20 * plain[1].mean_kl


@pytest.mark.parametrize("scales", ["unit", "dynamic"])
def test_chunks_change_no_token_and_no_log_probability(scales):
    said = {
        "kernels": "reference",
        "attention_compute": "fp8",
        "kv_cache_dtype": "fp8",
        "kv_scales": scales,
    }
    found = []
    for chunk in (512, 16):
        llm = LLM(max_num_batched_tokens=chunk, kv_cache_memory="16MiB", **said)
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
        (output,) = llm.generate([list(range(50, 90))], params)
        found.append(output.outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == found[1].logprobs


def test_it_is_refused_before_weights_are_read_where_it_cannot_run():
    with refuses(ConfigError, "--attention-compute fp8", "CPU"):
        LLM(
            kv_cache_dtype="fp8",
            device="cpu",
            attention_compute="fp8",
            before_weights=lambda _: pytest.fail("read"),
        )
