"""MiniMax-M2. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, integer, number
from freight.errors import CheckpointError
from freight.model.config.attention import parse_head_dim
from freight.model.config.families.mistral import MIXTRAL_TENSORS
from freight.model.config.family import Family, words
from freight.model.config.moe import MoEFamily
from freight.model.mixers.attention.spec import NormSpan, QKNormConfig
from freight.operands.routing import Scoring


def _translate(config: JsonObject) -> JsonObject:
    """Derive `partial_rotary_factor` from `rotary_dim`, the number of rotated channels."""
    if config.get("rotary_dim") is None:
        return config
    key = "partial_rotary_factor"
    share = integer(config, "rotary_dim") / parse_head_dim(config)
    if config.get(key) and number(config, key) != share:
        raise CheckpointError(
            f"config.json: {key} = {number(config, key)!r} and {share!r} is not implemented for MiniMaxM2ForCausalLM; "
            "one value between 0 and 1 is"
        )
    return {**config, key: share}


ROWS = {
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        {
            "vocab_size": 200064,
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            "num_experts_per_tok": 8,
        },
        words("rotary_dim mlp_intermediate_size use_mtp num_mtp_modules mtp_transformer_layers"),
        fixed={
            "attn_type_list": (1,),
            "qk_norm_type": ("per_layer",),
            "use_qk_norm": (True,),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            "shared_moe_mode": ("sigmoid",),
            "layernorm_full_attention_beta": (1,),
            "layernorm_linear_attention_beta": (1,),
            "layernorm_mlp_beta": (1,),
        },
        qk_norm=QKNormConfig(NormSpan.ALL_HEADS),
        translate=_translate,
        theta=5e6,
        rotary_factor=1.0,
        moe=MoEFamily(
            256,
            width_key="intermediate_size",
            scoring=Scoring.SIGMOID,
            norm_key=None,
            choice_bias=True,
        ),
        tensors=replace(MIXTRAL_TENSORS, choice_bias="block_sparse_moe.e_score_correction_bias"),
    ),
}
