"""Ling 3.0 of inclusionAI: groups of layers with Kimi delta attention, the last of each with gated
latent attention. Imports no torch.

Ling 2.6, of the same model_type, has lightning attention and is refused
(`mechanisms.UNCOMPARED_ARCHITECTURES`).
"""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer, is_number
from freight.errors import CheckpointError
from freight.model.config.deriving import conv_width, require_silu, with_layers
from freight.model.config.families.kimi import KIMI_SYNONYMS
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
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig, KimiDeltaNames
from freight.model.mixers.latent.spec import LatentNames

_STATEFUL = "linear_attention"
_ATTENTION = "full_attention"
# keys of transformers -> keys of the publisher
_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_attention_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def _translate(config: JsonObject) -> JsonObject:
    """Translate to the keys that transformers writes. `head_dim` is the size of recurrent layers
    that name none.

    Raises CheckpointError for a share of rotated channels that is not `qk_rope_head_dim`, for
    shared experts of another width than experts, and for an incomplete last group of layers.
    """
    sizes = {name: config[key] for name, key in _SIZES.items() if config.get(name) is None}
    _require_rotated(config)
    width = integer(config, "moe_intermediate_size") * integer(
        config, "n_shared_experts", 0, least=0
    )
    if config.get("moe_shared_expert_intermediate_size") not in (
        None,
        width,
        config["moe_intermediate_size"],
    ):
        raise CheckpointError(
            f"config.json: moe_shared_expert_intermediate_size = {config['moe_shared_expert_intermediate_size']!r} is "
            f"not implemented; that of moe_intermediate_size = {config['moe_intermediate_size']} is"
        )
    plain = {
        key: value
        for key, value in config.items()
        if key not in ("head_dim", "partial_rotary_factor")
    }
    return translate_latent(
        {**plain, **sizes, "layer_types": config.get("layer_types") or _kinds(config)}
    )


def _require_rotated(config: JsonObject) -> None:
    """Raise CheckpointError if another key contradicts `qk_rope_head_dim`, the channels that latent
    attention rotates.
    """
    rotated = integer(config, "qk_rope_head_dim")
    share = config.get("partial_rotary_factor")
    of_heads = (1, rotated / integer(config, "head_dim"))  # tuples: a value may have no hash
    for key, value, allowed in (
        ("rotary_dim", config.get("rotary_dim"), (rotated,)),
        ("partial_rotary_factor", share, of_heads),
    ):
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"config.json contradicts itself: {key} = {value!r}, but latent attention with qk_rope_head_dim = "
                f"{rotated} rotates all of these"
            )


def _kinds(config: JsonObject) -> list[str]:
    """Return the kind of each layer: the last layer of each group attends."""
    size = integer(config, "layer_group_size")
    num_layers = integer(config, "num_hidden_layers")
    if num_layers % size:
        raise CheckpointError(
            f"config.json: num_hidden_layers = {num_layers} is not a multiple of layer_group_size = {size}: "
            "implementations differ in the kind of the layers after the last full group; add layer_types"
        )
    return [_STATEFUL if (index + 1) % size else _ATTENTION for index in range(num_layers)]


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    require_silu(config)
    refuse_tied(config)
    recurrent = KimiDeltaConfig(
        heads=integer(config, "linear_num_heads"),
        head_dim=integer(config, "linear_head_dim"),
        width=conv_width(config, "linear_conv_kernel_dim"),
        bound=_bound(config) if flag(config, "kda_safe_gate", True) else None,
    )
    return with_layers(
        config,
        model,
        {_STATEFUL: recurrent, _ATTENTION: replace(latent_of(config), output_gate=True)},
    )


def _bound(config: JsonObject) -> float:
    bound = config["kda_lower_bound"]
    if not is_number(bound) or not -1e4 <= bound <= -1e-30:
        raise CheckpointError(
            f"config.json: kda_lower_bound = {bound!r} must be a number from -10000 to -1e-30"
        )
    return float(bound)


_ROW = Family(
    "BailingHybridForCausalLM",
    {
        "vocab_size": 157184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "layer_group_size": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 156895,
    },
    (LATENT_KEYS - {"q_lora_rank"})
    | words(
        "layer_types layer_group_size short_conv_kernel_size kda_safe_gate kda_lower_bound linear_head_dim "
        "linear_num_heads linear_conv_kernel_dim rotary_dim moe_shared_expert_intermediate_size"
    ),
    same=("BailingMoeV3ForCausalLM",),
    fixed={
        **LATENT_FIXED,
        "q_lora_rank": (),  # transformers' class has one projection of q
        "no_kda_lora": (True,),
        "use_mla_nope": (False,),
        "gated_attention_proj_granularity_type": ("head_wise",),
        "score_function": ("sigmoid",),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_router_enable_expert_bias": (True,),
        "use_qk_norm": (True,),  # of q and k in the recurrence
        "group_norm_size": (1,),
        "linear_silu": (True,),
        # in the publisher's code, but not in transformers' class; 0 means no limit for a layer
        "expert_swiglu_limit_list": (0,),
        "share_expert_swiglu_limit_list": (0,),
        "num_kv_heads_for_linear_attn": (0,),
        **dict.fromkeys(
            ("use_kda_lora", "use_nGPT", "up_proj_norm", "value_norm", "scale_router_input"),
            (False,),
        ),
        "router_dtype": ("fp32", "float32"),
    },
    synonyms=KIMI_SYNONYMS,
    theta=6_000_000.0,
    interleaved=True,
    other_layers=(_STATEFUL,),
    moe=replace(DEEPSEEK_EXPERTS_BY_LAYER, count=512),
    next_token_keys=words("num_nextn_predict_layers num_mtp_layers"),
    tensors=TensorNames(
        embedding="word_embeddings.weight",
        mixers=(
            LatentNames(
                q="attention.q_proj",
                kv_a="attention.kv_a_proj_with_mqa",
                kv_norm="attention.kv_a_layernorm.weight",
                kv_b="attention.kv_b_proj",
                o="attention.dense",
                output_gate="attention.g_proj",
            ),
            KimiDeltaNames(
                qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
                decay=("attention.f_proj",),
                beta="attention.b_proj",
                output_gate=("attention.g_proj",),
                conv=(
                    "attention.q_conv1d.weight",
                    "attention.k_conv1d.weight",
                    "attention.v_conv1d.weight",
                ),
                a_log="attention.A_log",
                dt_bias="attention.dt_bias",
                norm="attention.o_norm.weight",
                out="attention.o_proj",
                wide=False,
            ),
        ),
        choice_bias="mlp.gate.expert_bias",
        shared="mlp.shared_experts.",
        also=(("attention.dense", "attention.o_proj"),),
    ),
    translate=_translate,
    derive=_derive,
)
ROWS = {"bailing_hybrid": _ROW}
