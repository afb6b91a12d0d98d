"""torch's defaults belong to the user's process: no default dtype, default device or grad mode
changes a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import freight
from freight import LLM, SamplingParams
from freight.lab.evaluate.report import compare_caches
from freight.settings.engine import EngineArgs

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
PROMPTS = [[1, 2, 3, 4], list(range(5, 45))]
SMALL: dict[str, Any] = {
    "kv_cache_memory": "4MiB",
    "max_model_len": 128,
    "skip_tokenizer_init": True,
}
QUANTIZE: dict[str, Any] = {
    "weights": "fp8",
    "activations": "static",
    "observer": "percentile",
    "kv_cache": "fp8",
    "kv_granularity": "channel",
    "calibration_data": [list(range(64))] * 4,
}
COMMON: dict[str, Any] = {
    "logprobs": 3,
    "prompt_logprobs": 2,
    "detokenize": False,
    "ignore_eos": True,
    "max_tokens": 6,
}
PARAMS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(seed=3, top_p=0.9, top_k=40, min_p=0.01, frequency_penalty=0.5, **COMMON),
]


def generated(model: Path, **options: Any) -> list[Any]:
    """Token ids, log-probabilities and cumulative log-probability of greedy and sampled
    completions.
    """
    outputs = LLM(str(model), **SMALL | options).generate(PROMPTS, PARAMS)
    scores = [output.prompt_logprobs for output in outputs]
    choices = [output.outputs[0] for output in outputs]
    return [scores, [(one.token_ids, one.logprobs, one.cumulative_logprob) for one in choices]]


def results(out: Path) -> list[Any]:
    """What the engine, the quantizer and the evaluation give, with compiled and with reference
    kernels.
    """
    freight.quantize(BASE, out, **QUANTIZE)
    args = EngineArgs(str(BASE), **SMALL)
    scores = compare_caches(args, [("fp8", "auto")], list(range(120)))
    return [
        generated(BASE),
        generated(BASE, kernels="reference", kv_cache_dtype="fp8"),
        generated(BASE, quantization="fp8"),
        (out / "model.safetensors").read_bytes(),
        (out / "config.json").read_bytes(),
        generated(out),
        generated(out, kernels="reference"),
        [(score.perplexity, score.mean_kl, score.cut_off_share) for score in scores],
    ]


@contextmanager
def process_default(name: str) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    try:
        if name in ("float64", "float16", "bfloat16"):
            torch.set_default_dtype(getattr(torch, name))
        elif name == "meta":
            torch.set_default_device("meta")
        with (
            torch.inference_mode(name == "inference_mode"),
            torch.set_grad_enabled(name != "no_grad"),
        ):
            yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with process_default("float32"):
        return results(tmp_path_factory.mktemp("expected") / "out")


@pytest.mark.parametrize(
    "name", ["float64", "float16", "bfloat16", "meta", "no_grad", "inference_mode"]
)
def test_a_default_of_the_process_changes_no_bit(name: str, expected: list[Any], tmp_path: Path):
    with process_default(name):
        found = results(tmp_path / "out")
    assert found == expected


def test_an_engine_made_in_inference_mode_runs_outside_of_it():
    with torch.inference_mode():
        inside = LLM(str(BASE), kernels="reference", **SMALL)
    outputs = (
        llm.generate(PROMPTS, PARAMS)
        for llm in (inside, LLM(str(BASE), kernels="reference", **SMALL))
    )
    first, second = ([output.outputs[0].token_ids for output in found] for found in outputs)
    assert first == second
