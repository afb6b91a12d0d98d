"""Hunyuan V1 and V3 of Tencent. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from freight.base.fields import JsonObject, number
from freight.errors import CheckpointError
from freight.model.config.attention import parse_head_dim
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import AttentionNames, NormPlace, QKNormConfig
from freight.operands.routing import Scoring

_ROPES = ("rope_parameters", "rope_scaling")


def _with_theta(config: JsonObject) -> JsonObject:
    """Replace a rope of type dynamic with an `alpha`, which depends on no length: its theta is
    multiplied by alpha ** (d / (d - 2)), for heads of d channels. The other numbers (factor,
    beta_fast, mscale) change nothing.
    """
    stretched = {}
    for key in _ROPES:
        rope = config.get(key)
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
        if kind == "dynamic" and rope is not None and rope.get("alpha"):
            size = parse_head_dim(config)
            theta = number(rope, "rope_theta", number(config, "rope_theta", 10000.0))
            theta *= number(rope, "alpha") ** (size / (size - 2))
            stretched[key] = {"rope_type": "default", "rope_theta": theta}
    if not stretched:
        return config
    return {**{key: value for key, value in config.items() if key != "rope_theta"}, **stretched}


def _one_for_all(config: JsonObject, key: str) -> int | None:
    """Return a number that files have once, or for each layer; None if it is absent."""
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    if len({*map(str, values)}) != 1:
        raise CheckpointError(
            f"config.json: {key} = {value!r}: layers that differ in it are not implemented"
        )
    common: int | None = values[0]
    return common


def _of_experts(config: JsonObject) -> JsonObject:
    """Require experts, and the shared one, as wide as `intermediate_size`; a named width must
    repeat it.
    """
    width = _one_for_all(config, "moe_intermediate_size")
    size = config.get("intermediate_size")
    if width is not None and width != size:
        raise CheckpointError(
            f"config.json: moe_intermediate_size = {width!r} with intermediate_size = {size!r} is not implemented; "
            "only the same is"
        )
    counts = {key: _one_for_all(config, key) for key in ("moe_topk", "num_experts")}
    return _with_theta(
        {**config, **{key: count for key, count in counts.items() if count is not None}}
    )


_V1 = Family(
    "HunYuanDenseV1ForCausalLM",
    {
        "vocab_size": 290943,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    words("attention_bias moe_intermediate_size"),
    bias_keys=("attention_bias", "attention_bias", ""),
    synonyms={"attention_head_dim": "head_dim"},
    # features of the publisher's first code that transformers does not have, such as layers that
    # read the keys of others (cla) and latent attention (mla)
    fixed={
        "use_qk_norm": (True,),
        "norm_topk_prob": (True,),
        "norm_type": ("rms", "hf_rms"),
        "use_rotary_pos_emb": (True,),
        "use_cla": (False,),
        "use_mla": (False,),
        "num_shared_expert": (1,),
        "num_experts": (1,),
        "moe_topk": (1,),
    },
    qk_norm=QKNormConfig(place=NormPlace.AFTER_ROPE),
    translate=_with_theta,
    tensors=TensorNames(
        mixers=(
            AttentionNames(
                q_norm="self_attn.query_layernorm.weight", k_norm="self_attn.key_layernorm.weight"
            ),
        )
    ),
)

ROWS = {
    "hunyuan_v1_dense": _V1,
    "hunyuan_v1_moe": replace(
        _V1,
        architecture="HunYuanMoEV1ForCausalLM",
        defaults={**_V1.defaults, "num_experts": 1, "moe_topk": 1},
        fixed={
            key: values
            for key, values in _V1.fixed.items()
            if key not in ("num_experts", "moe_topk")
        }
        | {
            "use_mixed_mlp_moe": (True,),
            "moe_layer_num_skipped": (0,),
            "group_limited_greedy": (False,),
            "n_group": (0, 1),
            "topk_group": (0, 1),
            "routed_scaling_factor": (0, 1),
        },
        translate=_of_experts,
        moe=MoEFamily(
            top_k_keys=("moe_topk", "num_experts_per_tok"),
            width_key="intermediate_size",
            norm_key=None,
            shared_width_key="intermediate_size",
        ),
        tensors=replace(_V1.tensors, router="mlp.gate.wg", shared="mlp.shared_mlp."),
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        {
            "vocab_size": 120832,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
        },
        # Freight computes experts' sums, the softmax of attention and logits in float32 in any case
        words(
            "attention_bias enable_moe_fp32_combine enable_lm_head_fp32 enable_attention_fp32_softmax"
        ),
        bias_keys=ATTENTION_BIAS,
        synonyms={"expert_hidden_dim": "moe_intermediate_size"},
        fixed={
            "qk_norm": (True,),
            "route_norm": (True,),
            "moe_router_use_sigmoid": (True,),
            "moe_router_enable_expert_bias": (True,),
        },
        qk_norm=QKNormConfig(),
        theta=11158840.0,
        moe=MoEFamily(
            192,
            scoring=Scoring.SIGMOID,
            norm_key=None,
            factor_key="router_scaling_factor",
            choice_bias=True,
            shared_count_key="num_shared_experts",
            dense_keys=words("first_k_dense_replace mlp_layer_types"),
        ),
        next_token_keys=words("num_nextn_predict_layers"),
        tensors=TensorNames(
            router="mlp.router.gate", choice_bias="mlp.expert_bias", shared="mlp.shared_mlp."
        ),
    ),
}
