"""Mellum of JetBrains. Imports no torch."""

from __future__ import annotations

from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import PREDICTS, TensorNames
from freight.model.mixers.attention.spec import QKNormConfig

ROWS = {
    "mellum": Family(
        "MellumForCausalLM",
        {
            "vocab_size": 98304,
            "hidden_size": 2304,
            "intermediate_size": 7168,
            "num_hidden_layers": 28,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "sliding_window": 1024,
            "use_sliding_window": True,
            "sliding_window_pattern": 1,
        },
        words(
            "attention_bias sliding_window use_sliding_window layer_types mtp_layer_types mtp_mlp_layer_types"
        ),
        bias_keys=ATTENTION_BIAS,
        qk_norm=QKNormConfig(),
        theta=5e5,
        local_theta=1e4,
        moe=MoEFamily(64, dense_keys=words("mlp_layer_types")),
        next_token_keys=words("num_nextn_predict_layers num_mtp_layers"),
        tensors=TensorNames(unused=(("mtp.*", PREDICTS),)),
    ),
}
