"""Every producer's form of a mixture of experts computes what its bytes and scales stand for; no
scale is unused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.formats.experts import (
    CASES,
    FORMS,
    LAYER,
    TOKENS,
    expert_modules,
    make,
    one_of_each_kind,
)
from tests.formats.forms import algo
from tests.refusals import refuses
from tests.shares import one_in
from torch import Tensor

from freight import LLM, SamplingParams
from freight.checkpoint.kv_scales import parse_scale_name
from freight.errors import CheckpointError
from freight.model.open import open_checkpoint

WIDE = {"dtype": "float32", "kv_cache_dtype": "float32"}


def logprobs(folder: str, kernels: str = "reference", **options: str) -> Tensor:
    llm = LLM(model=folder, skip_tokenizer_init=True, kernels=kernels, max_num_seqs=1, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    rows = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].prompt_logprobs
    assert rows is not None
    return torch.tensor(
        [row[token].logprob for row, token in zip(rows, TOKENS, strict=True) if row is not None]
    )


@pytest.mark.parametrize(("name", "family"), CASES)
def test_logits_are_those_of_the_model_dequantized_by_hand(name: str, family: str, tmp_path: Path):
    """Sums in another order round an input to another code now and then, which changes the row of
    that token.
    """
    made = make(name, family)
    expected = made.logprobs(tmp_path / "plain")
    folder = made.save(tmp_path / "fp8")
    for kernels in ("reference", "auto"):
        agree = (logprobs(folder, kernels, **WIDE) - expected).abs() < 1e-4
        assert agree.sum() >= len(TOKENS) - 4, kernels


@pytest.mark.parametrize(("name", "family"), one_in(3, CASES))
def test_every_scale_changes_the_output(name: str, family: str, tmp_path: Path):
    """Three times as large: FP8 rounds alike under a scale that is 2 or 4 times as large."""
    made = make(name, family)
    before = logprobs(made.save(tmp_path), kv_cache_dtype="fp8")
    scales = one_of_each_kind(made)
    assert len(scales) >= 4
    for scale in scales:
        kept = made.tensors[scale]
        made.tensors[scale] = (kept.float() * 3).to(kept.dtype)
        assert not torch.equal(logprobs(made.save(tmp_path), kv_cache_dtype="fp8"), before), scale
        made.tensors[scale] = kept


@pytest.mark.parametrize(("name", "family"), CASES)
def test_kv_scales_of_every_name_are_read(name: str, family: str, tmp_path: Path):
    made = make(name, family)
    stored = {n: float(t) for n, t in made.tensors.items() if parse_scale_name(n) is not None}
    (layer,) = open_checkpoint(made.save(tmp_path)).kv_scales.layers
    assert bool(stored) == (layer is not None) == bool(FORMS[name].kv(0))
    if layer is not None:
        assert {*layer.k, *layer.v} == set(stored.values())
        assert sorted(layer.names) == sorted(stored)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_missing_scale_of_an_expert_is_named(name: str, family: str, tmp_path: Path):
    made = make(name, family)
    down = expert_modules(family)[1][2]
    for scale in [n for n in made.tensors if n.startswith(f"{down}.") and "scale" in n]:
        kept = made.tensors.pop(scale)
        with pytest.raises(CheckpointError, match=rf"{down}\.\w*scale\w* is missing"):
            LLM(model=made.save(tmp_path), skip_tokenizer_init=True)
        made.tensors[scale] = kept


def test_clipped_inputs_of_experts_are_refused(tmp_path: Path):
    """fbgemm's limit holds between gate, up and down too, where experts are computed in one
    operation.
    """
    made = make("weights alone, saved by vLLM", "qwen3_moe")
    made.config["quantization_config"] = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1.5,
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }
    for name in [name for name in made.tensors if name.endswith("weight_scale")]:
        rows = len(made.tensors[name.removesuffix("_scale")])
        made.tensors[name] = made.tensors[name].reshape(1, 1).repeat(rows, 1)
    with refuses(
        CheckpointError, "experts.0.gate_proj.weight", "clips", "1.5", "activation_scale_ub"
    ):
        LLM(model=made.save(tmp_path), skip_tokenizer_init=True)


def test_modelopt_s_mixed_files_with_int4_are_refused(tmp_path: Path):
    """INT4 in the feed-forwards, FP8 in attention and cache: the module and the way out are named."""
    made = make("modelopt own file", "qwen3_moe")
    down = expert_modules("qwen3_moe")[0][2]
    layers = {
        f"{LAYER}self_attn.q_proj": {"quant_algo": "FP8"},
        down: {"quant_algo": "W4A8_AWQ", "group_size": 128},
    }
    declared = algo("MIXED_PRECISION", kv_cache_quant_algo="FP8", quantized_layers=layers)
    made.form = replace(made.form, files={"hf_quant_config.json": declared})
    with refuses(CheckpointError, f"'W4A8_AWQ' of {down}", "FP8", "16 bits"):
        open_checkpoint(made.save(tmp_path))


def test_experts_that_are_not_quantized_alike_are_refused(tmp_path: Path):
    made = make("weights alone, saved by vLLM", "qwen3_moe")
    module = expert_modules("qwen3_moe")[1][2]
    made.config["quantization_config"] = {**made.form.said, "ignored_layers": ["lm_head", module]}  # type: ignore[dict-item]
    made.tensors[f"{module}.weight"] = made.dequantized[module].to(torch.bfloat16)
    del made.tensors[f"{module}.weight_scale"]
    with refuses(CheckpointError, f"{LAYER}mlp.experts.0.down_proj.weight"):
        LLM(model=made.save(tmp_path), skip_tokenizer_init=True)
