"""DeepSeek-V3 and R1, and Kimi K2 of Moonshot, which is the same. Imports no torch."""

from __future__ import annotations

from freight.config.experts import DEEPSEEK_EXPERTS
from freight.config.family import Family, words
from freight.config.latent import LATENT_FIXED, LATENT_KEYS, translate_latent, with_latent
from freight.config.tensor_names import TensorNames

_DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    LATENT_KEYS,
    fixed={
        **LATENT_FIXED,
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    interleaved=True,
    moe=DEEPSEEK_EXPERTS,
    next_token_keys=words("num_nextn_predict_layers num_mtp_layers"),
    tensors=TensorNames(shared="mlp.shared_experts."),
    translate=translate_latent,
    derive=with_latent,
)
ROWS = {
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,  # the same computation, of files that name every key
}
