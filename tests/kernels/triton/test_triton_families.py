"""The families whose layers differ most from Llama's on the Triton kernel set, beside transformers
and the reference.

Gemma 2 and 3 have sandwich norms, GELU, windows and soft caps or norms of heads; Gemma 4 has two
head sizes, keys that are values, and a norm of values; Phi-3 rotates a part of each head; OPT has
learned positions, LayerNorm and a feed-forward without a gate; gpt-oss has sinks, windows and
experts with biases. Arcee squares a ReLU; Olmo 3 norms what layers add to the residual; Laguna has
gates of heads, numbers of heads that differ, and a shared expert. MiMo-V2 has values of another
width than keys, with a factor; Step-3.7 bounds what SiLU returns. Gemma 4's larger models add
inputs of their own to layers, share keys between them, or add experts to a feed-forward. LFM2 has
short convolutions. Granite-H and Nemotron-H have Mamba-2; Nemotron-H's layers have one part, its
experts no gate and a smaller space. DeepSeek-V3 stores latents, whose keys are of all heads and
have the values in them. Kimi Linear has such layers without a rope, and states that decay by
channel. A layer with a window has a cache group of its own: its block table is another, and loses
what the window has left.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import STEP_VISION
from transformers import (
    ArceeConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    LagunaConfig,
    Lfm2Config,
    MiMoV2FlashConfig,
    NemotronHConfig,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Step3p7Config,
)

from freight.cache.manager import CacheManager, SequenceBlocks
from freight.cache.pool import allocate_pool
from freight.cache.spec import cache_spec
from freight.engine.runner import ModelRunner
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import ReferenceKernels
from freight.kernels.select import select_kernels
from freight.model.loader import load_model
from freight.model.open import open_checkpoint
from freight.operands.tiles import KEY_TILE
from freight.settings.engine import KVCacheConfig

BLOCK, NUM_BLOCKS = 16, 7
WINDOW = 8
PROMPT, CHUNK = KEY_TILE + WINDOW, 4  # after the prompt, no token sees the first tile of keys
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
}
WITHOUT_WINDOW: dict[str, Any] = {**SHAPE, "sliding_window": None}
TYPES: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA: dict[str, Any] = {**SHAPE, **TYPES, "head_dim": 16}
GEMMA4: dict[str, Any] = {**GEMMA, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
MOE: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 16}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.75}
FAMILIES: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(
        **GEMMA, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=24, rope_parameters=ROPES),
    "gemma4": Gemma4TextConfig(**GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True),
    "gemma4-own-inputs": Gemma4TextConfig(
        **GEMMA4 | {"num_hidden_layers": 3, "layer_types": [*TYPES["layer_types"], "full_attention"]}
        | {"hidden_size_per_layer_input": 16}, vocab_size_per_layer_input=320, num_kv_shared_layers=1,
        use_double_wide_mlp=True,
    ),
    "deepseek-v3": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 2, "sliding_window": None}, q_lora_rank=24, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "kimi-linear": KimiLinearConfig(
        **SHAPE | {"num_key_value_heads": 2, "sliding_window": None}, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        linear_head_dim=16, linear_num_heads=2, layer_types=["linear_attention", "full_attention"], pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    ),
    "gemma4-moe": Gemma4TextConfig(**GEMMA4, **MOE, enable_moe_block=True, top_k_experts=2),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0, rope_parameters=PARTIAL),
    "gpt-oss": GptOssConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "opt": OPTConfig(
        vocab_size=320, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128,
    ),
    "arcee": ArceeConfig(**WITHOUT_WINDOW),
    "olmo3": Olmo3Config(**SHAPE, **TYPES),
    "laguna": LagunaConfig(
        **SHAPE, **TYPES, **MOE, head_dim=16, num_experts_per_tok=2, shared_expert_intermediate_size=16,
        num_attention_heads_per_layer=[2, 4], mlp_layer_types=["dense", "sparse"], moe_routed_scaling_factor=1.7,
    ),
    "mimo-v2-flash": MiMoV2FlashConfig(
        **SHAPE, **TYPES, head_dim=24, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "step3p7": Step3p7Config(
        text_config={**SHAPE, **TYPES, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
                     "moe_intermediate_size": 16, "share_expert_dim": 16, "num_sliding_attention_heads": 4,
                     "mlp_layer_types": ["dense", "sparse"], "swiglu_limits": [0, 0.2],
                     "swiglu_limits_shared": [0.3, 0.1]},
        vision_config=STEP_VISION,
    ),
    "lfm2": Lfm2Config(
        **WITHOUT_WINDOW, layer_types=["conv", "full_attention"], conv_bias=True,
        block_multiple_of=16,
    ),
    "granite-h": GraniteMoeHybridConfig(
        **WITHOUT_WINDOW, layer_types=["linear_attention", "full_attention"], mamba_n_heads=4, mamba_d_state=16,
        shared_intermediate_size=16, num_local_experts=4, time_step_limit=(0.3, 0.8),
    ),
    "nemotron-h": NemotronHConfig(
        **WITHOUT_WINDOW, layers_block_type=["linear_attention", "full_attention", "moe"], head_dim=16,
        mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=16, time_step_min=1e-30, n_routed_experts=4,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, moe_latent_size=24,
    ),
}  # fmt: skip


# each kind of cache: of layers with windows, of two head sizes, shared by layers, under sinks, of
# one group
WITH_FP8_CACHE = ("gemma4", "gemma4-own-inputs", "gpt-oss", "opt", "lfm2", "nemotron-h")
OVER_FP8 = [
    name if name in WITH_FP8_CACHE else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_random(FAMILIES[request.param], folder, torch.float32)


def freight_logits(
    folder: Path, ids: list[int], kernel_set: str, kv: KVCacheConfig, device: str
) -> torch.Tensor:
    """float32 [len(ids) - PROMPT, vocab_size]: a chunk of CHUNK tokens after the prompt, then step
    by step the others.

    The reference computes the prompt, because the interpreter would take long. Before every step,
    all blocks that it may not read are made NaN.
    """
    opened = open_checkpoint(str(folder))
    spec = cache_spec(kv, opened.model, BLOCK)
    pool = allocate_pool(spec, kv, [NUM_BLOCKS] * len(spec.groups), ReferenceKernels(), device)

    def runner(kernels: KernelSet) -> ModelRunner:
        decoder = load_model(
            opened.checkpoint, opened.model, kernels, Format.FLOAT32, Format.FLOAT32, 128, device
        )
        layers = {index: replace(layer, kernels=kernels) for index, layer in pool.paged.items()}
        return ModelRunner(decoder, pool.with_layers(layers), device)

    manager = CacheManager(spec.groups, pool.num_blocks, BLOCK, PROMPT)
    nothing = SequenceBlocks(((),) * len(spec.groups), (0,) * len(spec.groups))
    assert manager.grow(nothing, BLOCK) is not None  # block 0 is another sequence's
    held = manager.grow(nothing, PROMPT)
    assert held is not None
    runner(ReferenceKernels()).logits(ids[:PROMPT], 0, held.block_ids)
    under_test, rows = runner(select_kernels(kernel_set, device)), []
    for start, end in [
        (PROMPT, PROMPT + CHUNK),
        *((end - 1, end) for end in range(PROMPT + CHUNK + 1, len(ids) + 1)),
    ]:
        held = manager.grow(manager.trim(held, start), end)
        assert held is not None
        kept = [(layer.group, (layer.pages.k, layer.pages.v)) for layer in pool.paged.values()]
        kept += [
            (layer.group, tuple(layer.states.parts.values())) for layer in pool.states.values()
        ]
        for group, tensors in kept:
            others = sorted(set(range(NUM_BLOCKS)) - set(held.block_ids[group]) | {0})
            for tensor in tensors:
                tensor.view(torch.uint8)[others] = 0xFF  # NaN in float32 and in E4M3
        rows.append(under_test.logits(ids[start:end], start, held.block_ids))
    for group, given_back in zip(spec.groups, held.given_back, strict=True):
        kept_of = (
            {"window": KEY_TILE // BLOCK, "state": PROMPT // BLOCK} if not group.keeps_all else {}
        )
        assert given_back == kept_of.get("window" if group.has_slots else "state", 0)
    return torch.cat(rows).cpu()


def test_logits_are_those_of_transformers(family: tuple[Path, Any], device: str):
    folder, model = family
    ids = tokens(PROMPT + CHUNK + 1)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, PROMPT:]
    assert expected.std() > 0.1
    kv = KVCacheConfig(Format.FLOAT32, None, None, None)
    got = freight_logits(folder, ids, "triton", kv, device)
    assert (got - expected).abs().max() <= (1e-4 if device == "cpu" else 0.02)


@pytest.mark.parametrize("family", OVER_FP8, indirect=True, scope="module")
def test_logits_over_an_fp8_cache_are_those_of_the_reference(family: tuple[Path, Any], device: str):
    folder, _ = family
    ids = tokens(PROMPT + CHUNK + 1)
    kv = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)
    expected = freight_logits(folder, ids, "reference", kv, device)
    got = freight_logits(folder, ids, "triton", kv, device)
    assert (got - expected).abs().max() <= (1e-4 if device == "cpu" else 0.02)
