"""A prompt that the model computes NaN for fails alone, on every kernel set and kind of cache."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.refusals import refuses
from typer.testing import CliRunner

from freight import LLM, SamplingParams
from freight.cli.main import app
from freight.errors import GenerationError
from freight.kernels.cpu import library
from freight.kernels.select import select_kernels
from freight.model import open as opening

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
BAD = 7  # the token whose embedding is NaN
KERNELS = ["reference", *(f"cpu-{build}" for build in library.runnable())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "nan"
    shutil.copytree(BASE, folder)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in tensors  # another matrix, so that only inputs are damaged
    tensors["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "bfloat16", "quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "max_num_batched_tokens": 24},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_one_bad_prompt_among_sixteen(
    model: Path, kernels: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(opening, "select_kernels", lambda *_: select_kernels(kernels))
    rng = random.Random(0)
    prompts = [
        [rng.choice([3, 4, *range(10, 60)]) for _ in range(rng.randint(4, 40))] for _ in range(16)
    ]
    params = [
        SamplingParams(
            max_tokens=5,
            seed=i,
            temperature=i % 2,
            logprobs=2,
            ignore_eos=True,
            detokenize=False,
            logit_bias={BAD: -100.0},  # a sound prompt does not go on with it
        )
        for i in range(16)
    ]
    small = {"skip_tokenizer_init": True, "kv_cache_memory": "2MiB"}
    small |= {"max_model_len": 64, "max_num_seqs": 16}
    llm = LLM(str(model), **small | options)
    sound = [*prompts[:5], *prompts[6:]], [*params[:5], *params[6:]]
    expected = [output.outputs for output in llm.generate(*sound)]
    prompts[5][len(prompts[5]) // 2] = BAD
    with refuses(GenerationError, "1 of 16 prompts", "prompt 5", "NaN") as error:
        llm.generate(prompts, params)
    outputs = [output.outputs for output in error.value.outputs]
    (bad,) = outputs.pop(5)
    assert (bad.token_ids, bad.finish_reason) == ([], "error")
    assert outputs == expected
    assert llm.engine.cache.num_held == 0
    assert [output.outputs for output in llm.generate(*sound)] == expected


def test_on_the_command_line(model: Path):
    arguments = ["generate", str(model), "--skip-tokenizer-init", "--kv-cache-memory", "1MiB"]
    arguments += ["--max-tokens", "3", "--ignore-eos"]
    prompts = ["--prompt-token-ids", "3,4,5", "--prompt-token-ids", "3,7"]
    result = CliRunner().invoke(app, [*arguments, *prompts, "--json"])
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["outputs"]
    assert "error" not in first
    assert (first["finish_reason"], len(first["token_ids"])) == ("length", 3)
    assert (second["finish_reason"], second["token_ids"]) == ("error", [])
    assert "NaN" in second["error"]
    assert "error: '[3, 7]': the model gave NaN" in result.stderr
    with refuses(GenerationError, "the prompt", "NaN"):
        CliRunner().invoke(app, [*arguments, "--prompt-token-ids", "3,7"], catch_exceptions=False)
