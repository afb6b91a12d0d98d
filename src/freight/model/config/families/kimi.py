"""Kimi Linear of Moonshot: Kimi delta attention, and latent attention without a rope in every
fourth layer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freight.base.fields import JsonObject, integer
from freight.errors import CheckpointError
from freight.model.config.deriving import conv_width, require_silu, with_layers
from freight.model.config.family import Family, words
from freight.model.config.latent import (
    LATENT_FIXED,
    LATENT_KEYS,
    latent_of,
    refuse_tied,
    translate_latent,
)
from freight.model.config.model import ModelConfig
from freight.model.config.moe import DEEPSEEK_EXPERTS_BY_LAYER
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig

_STATEFUL = "linear_attention"
_ATTENTION = "full_attention"
_NESTED = "linear_attn_config"  # in the publisher's files
# keys in it -> keys that transformers writes
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# lists of layers, counted from 1
_LISTS = {"kda_layers": _STATEFUL, "full_attn_layers": _ATTENTION}


def _translate(config: JsonObject) -> JsonObject:
    """Translate `linear_attn_config` to the keys that transformers writes. `head_dim` is dropped:
    no layer has it.

    Raises CheckpointError for keys in it that are not implemented, and for layers that have no kind
    or two.
    """
    nested = config.get(_NESTED) or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: {_NESTED} = {nested!r} must be an object")
    for key, value in nested.items():
        if value and key not in _SIZES and key not in _LISTS:
            raise CheckpointError(
                f"config.json: {_NESTED} has {key} = {value!r}, which is not implemented"
            )
    sizes = {_SIZES[key]: value for key, value in nested.items() if key in _SIZES}
    kinds = config.get("layer_types") or _kinds(nested, integer(config, "num_hidden_layers"))
    plain = {
        key: value
        for key, value in config.items()
        if key not in ("head_dim", "rope_scaling", "rope_parameters")
    }
    return translate_latent({**plain, **sizes, "layer_types": kinds})


def _kinds(nested: JsonObject, num_layers: int) -> list[str]:
    """Return the kind of each layer; without lists every fourth but the first attends, as in
    transformers.
    """
    if not _LISTS.keys() <= nested.keys():
        return [
            _ATTENTION if index and index % 4 == 0 else _STATEFUL for index in range(num_layers)
        ]
    listed: list[tuple[Any, str]] = []
    for key, kind in _LISTS.items():
        numbers = nested[key] if isinstance(nested[key], list) else [nested[key]]
        listed += [(number, kind) for number in numbers]
    if sorted(str(number) for number, _ in listed) != sorted(
        str(index + 1) for index in range(num_layers)
    ):
        lists = ", ".join(f"{key} = {nested[key]!r}" for key in _LISTS)
        raise CheckpointError(
            f"config.json contradicts itself: {_NESTED} has {lists}, which are not the layers 1 to num_hidden_layers = "
            f"{num_layers}, each once"
        )
    return [kind for _, kind in sorted(listed)]


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    require_silu(config)
    refuse_tied(config)
    head_dim = integer(config, "linear_head_dim")
    recurrent = KimiDeltaConfig(
        heads=integer(config, "linear_num_heads"),
        head_dim=head_dim,
        width=conv_width(config, "linear_conv_kernel_dim"),
        rank=head_dim,
    )
    latent = replace(latent_of(config), rope=None)
    return with_layers(config, model, {_STATEFUL: recurrent, _ATTENTION: latent})


# keys of files that are older than transformers' support of these models
KIMI_SYNONYMS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}

ROWS = {
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        {
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 1024,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
        },
        LATENT_KEYS
        | words(
            "layer_types linear_attn_config linear_head_dim linear_num_heads linear_conv_kernel_dim"
        ),
        fixed={
            **LATENT_FIXED,
            "mla_use_nope": (True,),
            "moe_router_activation_func": ("sigmoid",),
            "moe_layer_freq": (1,),
            "use_grouped_topk": (True,),
            "topk_method": ("noaux_tc",),
        },
        synonyms=KIMI_SYNONYMS,
        other_layers=(_STATEFUL,),
        moe=DEEPSEEK_EXPERTS_BY_LAYER,
        next_token_keys=words("num_nextn_predict_layers"),
        tensors=TensorNames(
            router="block_sparse_moe.gate",
            choice_bias="block_sparse_moe.gate.e_score_correction_bias",
            expert="block_sparse_moe.experts.{}.",
            expert_gate_up=("w1", "w3"),
            expert_down="w2",
            shared="block_sparse_moe.shared_experts.",
            also=tuple(
                (f"block_sparse_moe.{part}", f"mlp.{part}")
                for part in ("gate_proj", "up_proj", "down_proj")
            ),
        ),
        translate=_translate,
        derive=_derive,
    ),
}
