"""Every family and variant against transformers, on tiny random models that transformers itself writes to disk."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from freight.cache.pool import allocate_pool
from freight.config.engine import EngineArgs
from freight.engine.runner import ModelRunner
from freight.kernels.select import select_kernels
from freight.models.open import open_model

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALE = {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "beta_slow": 2}

VARIANTS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-1-head-each": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "llama-head-dim": LlamaConfig(**SHAPE, head_dim=32),
    "llama-biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-linear": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama-llama3": LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": LlamaConfig(**SHAPE, rope_parameters={**YARN, "rope_theta": 10000.0}),
    "llama-yarn-mscale": LlamaConfig(**SHAPE, rope_parameters=MSCALE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=24),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-window-off": Qwen2Config(**SHAPE, use_sliding_window=False, sliding_window=24),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3-tied-theta": Qwen3Config(
        **SHAPE, head_dim=16, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
}  # fmt: skip


def save_random(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> Any:
    """A model with every parameter random, biases and norms too, saved as its users save theirs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.1 if parameter.ndim == 1 else 0.12))
    model.save_pretrained(folder)
    return model


def freight_logits(folder: Path, token_ids: list[int], dtype: str) -> torch.Tensor:
    opened = open_model(EngineArgs(model=str(folder), dtype=dtype, skip_tokenizer_init=True))
    config = opened.resolve(opened.args)
    kernels = select_kernels("auto")
    spec, num_blocks = opened.cache_spec(config), -(-len(token_ids) // config.block_size)
    pool = allocate_pool(spec, config.kv, [num_blocks] * len(spec.groups), kernels)
    runner = ModelRunner(opened.load(config), pool, "cpu")
    return runner.logits(token_ids, 0, pool.whole)


def tokens(count: int = 150) -> list[int]:
    return torch.randint(0, SHAPE["vocab_size"], (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_equal_transformers(variant: str, tmp_path: Path):
    model = save_random(VARIANTS[variant], tmp_path, torch.float32)
    ids = tokens()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    assert (freight_logits(tmp_path, ids, "auto") - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", ["llama-llama3", "mistral-window", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(variant: str, tmp_path: Path):
    """Roundings to bfloat16 fall differently in any two programs; transformers' own move top-5 log-probabilities by
    0.05 to 0.06 at most. So: 99 of 100 lie within 0.05 of transformers', and on average no farther from the truth."""
    model = save_random(VARIANTS[variant], tmp_path, torch.bfloat16)
    ids = tokens()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        exact = model.float()(torch.tensor([ids])).logits[0].log_softmax(-1)
    top = theirs.topk(5).indices
    ours = freight_logits(tmp_path, ids, "auto").log_softmax(-1)
    ours, theirs, exact = (logprobs.gather(1, top) for logprobs in (ours, theirs, exact))
    assert (ours - theirs).abs().quantile(0.99) <= 0.05
    assert (ours - exact).abs().mean() <= 1.05 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("variant", ["llama-llama3", "llama-linear", "llama-yarn-mscale", "qwen3-tied-theta"])
def test_the_older_spelling_of_config_json_means_the_same(variant: str, tmp_path: Path):
    save_random(VARIANTS[variant], tmp_path, torch.float32)
    ids = tokens(40)
    expected = freight_logits(tmp_path, ids, "auto")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if kind != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    assert torch.equal(freight_logits(tmp_path, ids, "auto"), expected)


def test_soft_caps_are_those_of_gemma_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Llama whose attention is Gemma 2's, and whose logits are capped as Gemma 2's are."""
    model = save_random(VARIANTS["llama"], tmp_path, torch.float32)
    ids, cap = tokens(), 0.5
    with torch.no_grad():
        uncapped = model(torch.tensor([ids])).logits[0]
        capped_attention = partial(modeling_gemma2.eager_attention_forward, softcap=cap)
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped_attention)
        expected = model(torch.tensor([ids])).logits[0]
    assert (expected - uncapped).abs().max() > 0.1
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"attn_logit_softcapping": cap}
    path.write_text(json.dumps(config))
    assert (freight_logits(tmp_path, ids, "auto") - expected).abs().max() <= 1e-4
    path.write_text(json.dumps(config | {"final_logit_softcapping": 3.0}))
    assert (freight_logits(tmp_path, ids, "auto") - 3 * torch.tanh(expected / 3)).abs().max() <= 1e-4
