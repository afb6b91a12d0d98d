"""Models without a row whose config.json is spelled as transformers 4.40 and before wrote it.

The keys and values are those of published files; only sizes are smaller. The model to compare with
is made from the spelling of transformers 5, in which the rotary embedding is written here by hand.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.test_fallback import FAST, PROMPTS, SLOW, SMALL, expected, llm, tokens
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from freight.model.fallback_probe import foreign_config
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT_SIZES = {"vocab_size": 128, "n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4}

# model_type -> (config.json as published, but for the sizes; its rotary embedding as transformers 5
# writes it)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "gpt_neox": (  # pythia
        {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
        | {
            "architectures": ["GPTNeoXForCausalLM"],
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "rotary_emb_base": 20000,
            "rotary_pct": 0.5,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "use_parallel_residual": True,
        },
        {"rope_type": "default", "rope_theta": 20000, "partial_rotary_factor": 0.5},
    ),
    "phi": (  # phi-2
        SIZES
        | {
            "architectures": ["PhiForCausalLM"],
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.1,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.25,
            "qk_layernorm": False,
            "rope_scaling": None,
            "rope_theta": 30000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
        },
        {"rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.25},
    ),
    "starcoder2": (  # starcoder2-3b
        SIZES
        | {
            "activation_function": "gelu",
            "architectures": ["Starcoder2ForCausalLM"],
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "embedding_dropout": 0.1,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 16384,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "rope_theta": 999999.4420358813,
            "sliding_window": 8,
            "torch_dtype": "bfloat16",
            "use_bias": True,
        },
        {"rope_type": "default", "rope_theta": 999999.4420358813},
    ),
    "cohere": (  # command-r
        SIZES
        | {
            "architectures": ["CohereForCausalLM"],
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "model_max_length": 131072,
            "pad_token_id": 0,
            "rope_theta": 8000000.0,
            "torch_dtype": "float16",
        },
        {"rope_type": "default", "rope_theta": 8000000.0},
    ),
    "olmo": (  # OLMo-1B-hf, with linear scaling
        SIZES
        | {
            "architectures": ["OlmoForCausalLM"],
            "attention_bias": False,
            "clip_qkv": 8.0,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "pad_token_id": 1,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        },
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "olmoe": (  # OLMoE-1B-7B
        SIZES
        | {
            "architectures": ["OlmoeForCausalLM"],
            "clip_qkv": None,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "pad_token_id": 1,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "torch_dtype": "bfloat16",
        },
        {"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gpt_bigcode": (  # starcoder
        GPT_SIZES
        | {
            "activation_function": "gelu",
            "architectures": ["GPTBigCodeForCausalLM"],
            "attention_softmax_in_fp32": True,
            "attn_pdrop": 0.1,
            "inference_runner": 0,
            "layer_norm_epsilon": 1e-05,
            "max_batch_size": None,
            "max_sequence_length": None,
            "multi_query": True,
            "n_positions": 8192,
            "pad_key_length": True,
            "pre_allocate_kv_cache": False,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "torch_dtype": "float32",
            "validate_runner_input": True,
        },
        None,
    ),
    "persimmon": (  # persimmon-8b-chat, with dynamic scaling
        SIZES
        | {
            "architectures": ["PersimmonForCausalLM"],
            "hidden_act": "relu2",
            "hidden_dropout": 0.0,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 16384,
            "num_key_value_heads": 4,
            "partial_rotary_factor": 0.5,
            "qk_layernorm": True,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
            "rope_theta": 25000.0,
            "torch_dtype": "bfloat16",
        },
        {
            "rope_type": "dynamic",
            "rope_theta": 25000.0,
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
        },
    ),
    "helium": (  # helium-1-preview-2b
        SIZES
        | {
            "architectures": ["HeliumForCausalLM"],
            "attention_bias": False,
            "head_dim": 16,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "mlp_bias": False,
            "pad_token_id": 3,
            "rms_norm_eps": 1e-08,
            "rope_theta": 200000.0,
            "torch_dtype": "bfloat16",
        },
        {"rope_type": "default", "rope_theta": 200000.0},
    ),
    "biogpt": (
        {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
        | {
            "activation_dropout": 0.0,
            "architectures": ["BioGptForCausalLM"],
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "layer_norm_eps": 1e-12,
            "layerdrop": 0.0,
            "max_position_embeddings": 1024,
            "pad_token_id": 1,
            "scale_embedding": True,
            "torch_dtype": "float32",
        },
        None,
    ),
    "gemma": (  # gemma-2b
        SIZES
        | {
            "architectures": ["GemmaForCausalLM"],
            "attention_bias": False,
            "head_dim": 16,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "max_position_embeddings": 8192,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        {"rope_type": "default", "rope_theta": 10000.0},
    ),
    # Phi-3.5-MoE: its two tables differ, and transformers' modules use the short one alone
    "phimoe": (
        SIZES
        | {
            "architectures": ["PhiMoEForCausalLM"],
            "attention_bias": True,
            "hidden_act": "silu",
            "input_jitter_noise": 0.01,
            "lm_head_bias": True,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [2.0] * 8,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096,
                "short_factor": [1.5] * 8,
                "short_mscale": 1.243163121016122,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "router_jitter_noise": 0.01,
            "sliding_window": 131072,
            "torch_dtype": "bfloat16",
        },
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [2.0] * 8,
            "long_mscale": 1.243163121016122,
            "short_factor": [1.5] * 8,
            "short_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
        },
    ),
    "internlm3": (  # internlm3-8b-instruct
        SIZES
        | {
            "architectures": ["InternLM3ForCausalLM"],
            "bias": False,
            "qkv_bias": False,
            "head_dim": 16,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "pad_token_id": 2,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
            "rope_theta": 50000000,
            "torch_dtype": "bfloat16",
        },
        {"rope_type": "dynamic", "rope_theta": 50000000, "factor": 6.0},
    ),
}
QUICK = ("gpt_neox", "olmo", "gpt_bigcode", "persimmon")
OLD_ROPE = ("rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")


def old_spelling(saved: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 as 4.40 would have written it."""
    old = {
        key: value
        for key, value in saved.items()
        if key not in ("dtype", "rope_parameters", "layer_types")
    }
    old |= {"torch_dtype": saved["dtype"], "transformers_version": "4.40.0"}
    rope = dict(saved.get("rope_parameters") or {})
    theta, share, kind = (
        rope.pop(key, None) for key in ("rope_theta", "partial_rotary_factor", "rope_type")
    )
    neox = saved["model_type"] == "gpt_neox"
    if theta is not None:
        old["rotary_emb_base" if neox else "rope_theta"] = theta
    if share is not None:
        old["rotary_pct" if neox else "partial_rotary_factor"] = share
    if kind not in (None, "default"):
        old["rope_scaling"] = {"type": kind} | rope
    return old


def save_published(model_type: str, folder: Path) -> Any:
    """The model, made from the spelling of transformers 5 and saved with the published config.json."""
    published, rope = PUBLISHED[model_type]
    torch.manual_seed(0)
    new = {
        key: value
        for key, value in published.items()
        if key not in (*OLD_ROPE, "torch_dtype", "architectures")
    }
    if rope is not None:
        new["rope_parameters"] = rope
    config = CONFIG_MAPPING[model_type](**new | {"bos_token_id": 1, "eos_token_id": 2})
    dtype = getattr(torch, published["torch_dtype"])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(
        folder
    )  # a copy: it rounds the frequencies of the rope too
    saved = json.loads((folder / "config.json").read_text())
    old = published | {
        "model_type": model_type,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "transformers_version": "4.40.0",
    }
    made = old_spelling(saved)
    assert {key: made[key] for key in OLD_ROPE if made.get(key) is not None} == {
        key: _without_repeats(old[key])
        for key in OLD_ROPE
        if old.get(key) is not None and key in made
    }
    (folder / "config.json").write_text(json.dumps(old))
    return model


def _without_repeats(value: Any) -> Any:
    """`rope_scaling` with the kind as 'type', as 4.40 has it; later versions wrote 'rope_type'."""
    if not isinstance(value, dict):
        return value
    return {("type" if key == "rope_type" else key): one for key, one in value.items()}


def difference(folder: Path, model: Any) -> float:
    """The largest difference between logits over the cache and transformers' own, all computed in
    float32.
    """
    runner = llm(folder, dtype="float32").engine.runner
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits[0]
    found = runner.logits(PROMPTS[0], 0, runner.pool.whole)
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


@pytest.mark.parametrize(
    "model_type",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED if name not in QUICK),
    ],
)
def test_a_published_config_gives_the_model(model_type: str, tmp_path: Path) -> None:
    model = save_published(model_type, tmp_path)
    assert (
        open_model(EngineArgs(str(tmp_path))).model.checkpoint_format
        == PUBLISHED[model_type][0]["torch_dtype"]
    )
    assert difference(tmp_path, model) < 1e-4
    assert tokens(llm(tmp_path, dtype="float32", max_num_batched_tokens=4)) == expected(model)


@pytest.mark.parametrize("model_type", sorted(FAST | SLOW))
def test_the_old_spelling_describes_the_same_model(model_type: str) -> None:
    """Every model type whose tokens are compared (`test_fallback`)."""
    config = CONFIG_MAPPING[model_type](**SMALL | (FAST | SLOW)[model_type], dtype="bfloat16")
    saved = json.loads(config.to_json_string())
    assert "torch_dtype" not in saved
    assert foreign_config(old_spelling(saved)) == foreign_config(saved)
