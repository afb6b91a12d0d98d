"""Keys with a large bias (Qwen2, Qwen2.5): 8-bit caches store them without it.

The models are transformers' own, random but for biases of the size that published ones have: 354 in
the first layer of Qwen2.5-Coder-1.5B. What the pages hold is recomputed from transformers' modules and
ml_dtypes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.parity.random_models import save_random
from transformers import AutoModelForCausalLM, GlmConfig, PretrainedConfig, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from freight import LLM, SamplingParams
from freight.fp8.cast import decode
from freight.lab.evaluate.report import compare_caches
from freight.operands import kv_pages
from freight.operands.kv_pages import KeyCenter, read_slots, spread
from freight.settings.engine import EngineArgs

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    # pairs of neighbours, and half of the channels are not rotated
    "glm": GlmConfig(**SIZES, attention_bias=True, partial_rotary_factor=0.5),
}
# layer 0: (KV head, channel) -> bias. Channels 2 and 3 are a pair of GLM's; the last two are
# above SMALL_BIAS, and below
BIASES = {(0, 3): 354.0, (0, 2): -120.0, (1, 0): 60.0, (1, 5): 5.0, (1, 6): 3.0}
TOKENS = [(37 * index * index + 11) % 256 for index in range(160)]


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer's keys have BIASES, and whose second layer's have small ones."""
    path = tmp_path_factory.mktemp(request.param)
    model = save_random(CONFIGS[request.param], path, torch.float32)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            bias = layer.self_attn.k_proj.bias
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(index)))
            if index == 0:
                for (head, channel), value in BIASES.items():
                    bias.view(2, 32)[head, channel] = value
    model.save_pretrained(path)
    return path


def _args(folder: Path, **more: Any) -> EngineArgs:
    return EngineArgs(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory="8MiB",
        **more,
    )


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_an_8_bit_cache_costs_little_and_without_it_much(
    folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [("fp8_e4m3", "dynamic"), ("fp8_e4m3", "unit"), ("fp8_e5m2", "unit"), ("int8", "auto")]
    args = _args(folder, kernels=kernels)
    scores = compare_caches(args, caches, TOKENS)[1:]
    monkeypatch.setattr(kv_pages, "LARGE_BIAS", float("inf"))
    drowned = compare_caches(args, caches, TOKENS)[1:]
    for score, other in zip(scores, drowned, strict=True):
        assert other.mean_kl > 3 * score.mean_kl, score.dtype


def test_the_pages_hold_keys_without_bias_rounded_as_a_cache_rounds(
    tmp_path: Path,
) -> None:
    model = save_random(CONFIGS["qwen2"], tmp_path, torch.float32)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.bias.zero_()
        attention.k_proj.bias.view(2, 32)[0, 3] = 354.0
        attention.k_proj.bias.view(2, 32)[1, 2] = 5.0  # of a pair of SMALL_BIAS
        attention.k_proj.bias.view(2, 32)[1, 7] = 3.0  # stays
    model.save_pretrained(tmp_path)
    subtracted = torch.zeros(2, 32)
    subtracted[0, 3] = 354.0
    subtracted[1, 2] = 5.0
    keys = {}
    attention.k_proj.register_forward_hook(lambda module, x, out: keys.update(projected=out))
    with torch.inference_mode():
        model(torch.tensor([TOKENS[:48]]))
        k = keys["projected"].view(1, 48, 2, 32).transpose(1, 2) - subtracted[:, None]
        cos, sin = model.model.rotary_emb(k, torch.arange(48)[None])
        rotated = apply_rotary_pos_emb(k, k, cos, sin)[1][0].transpose(0, 1).numpy()
    amax = np.abs(rotated).max(-1, keepdims=True)
    scale = (amax / np.float32(448)).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = (rotated / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale

    llm = LLM(**vars(_args(tmp_path, kv_cache_dtype="fp8", kernels="reference")))
    llm.generate([TOKENS[:48]], SamplingParams(max_tokens=1, temperature=0.0))
    pages = llm.engine.runner.pool.paged[0].pages
    written = pages.k_scale.float().flatten(0, 1).sum(-1).nonzero()[:48, 0]  # in order
    stored = decode(read_slots(pages.k, written), spread(read_slots(pages.k_scale, written)))
    same = np.isclose(stored.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert same.mean() > 0.995  # a key at the middle of two codes may fall to either
    assert np.abs(stored.numpy() - expected).max() <= 0.07 * amax.max()


def test_which_pairs_are_subtracted() -> None:
    bias = torch.zeros(2, 32)
    bias[0, 3] = 6.0
    bias[0, 11] = 6.0  # of the same pair: a norm of 8.5
    bias[1, 2] = 4.5
    bias[1, 3] = 3.5
    bias[1, 20] = 100.0  # is not rotated
    b = KeyCenter.of_bias(bias, 16)
    assert b is not None
    assert {(int(head), int(channel)) for head, channel in b.nonzero()} == {(0, 3), (0, 11), (1, 2)}
    assert KeyCenter.of_bias(bias / 2, 16) is None
    bias[0, 3] = torch.nan
    assert KeyCenter.of_bias(bias, 16) is None
    assert KeyCenter.of_bias(bias, 0) is None


def test_caches_of_16_bits_and_skipped_layers_keep_the_bias(folder: Path) -> None:
    for more, centered in (
        ({}, []),
        ({"kv_cache_dtype": "fp8"}, [0]),
        ({"kv_cache_dtype": "int8"}, [0]),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ("0",)}, []),
    ):
        llm = LLM(**vars(_args(folder, **more)))
        assert llm.engine.runner.pool.less_bias(llm.config.kv) == centered


def test_prefix_hits_and_chunks_give_the_same_tokens(folder: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
    args = _args(folder, kv_cache_dtype="fp8")
    plain = LLM(**vars(replace(args, enable_prefix_caching=False)))
    first = plain.generate([TOKENS], params)[0].outputs[0]
    llm = LLM(**vars(replace(args, max_num_batched_tokens=32)))
    for _ in range(2):  # a miss, then a hit
        again = llm.generate([TOKENS], params)[0].outputs[0]
        assert again.token_ids == first.token_ids
        assert again.logprobs == first.logprobs


def test_two_ranks_give_the_bits_of_one(folder: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)
    args = _args(folder, kv_cache_dtype="fp8")
    texts = []
    for ranks in (1, 2):
        llm = LLM(**vars(replace(args, tensor_parallel_size=ranks)))
        output = llm.generate([TOKENS], params)[0].outputs[0]
        texts.append((output.token_ids, output.logprobs))
        del llm
    assert texts[0] == texts[1]


def test_greedy_answers_are_those_of_transformers(folder: Path) -> None:
    """16 bits as before: the bias is subtracted and added back in 8-bit caches alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0, -1]
    llm = LLM(**vars(_args(folder)))
    output = llm.generate([TOKENS], SamplingParams(max_tokens=1, temperature=0.0))[0]
    assert output.outputs[0].token_ids[0] == int(logits.argmax())
