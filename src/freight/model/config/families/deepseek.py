"""DeepSeek-V2, V3, R1 and V3.2; Kimi K2 and K2.5 of Moonshot, whose text models are as V3. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject
from freight.model.config.family import LANGUAGE_MODEL, NEXTN, Family, words
from freight.model.config.latent import (
    INDEXED,
    INDEXER,
    INDEXER_KEYS,
    LATENT_FIXED,
    LATENT_KEYS,
    translate_indexed,
    translate_latent,
    with_indexed,
    with_latent,
)
from freight.model.config.moe import DEEPSEEK_EXPERTS, DEEPSEEK_EXPERTS_BY_LAYER
from freight.model.config.tensor_names import VISION_TOWER, TensorNames, not_run
from freight.operands.routing import Scoring

_GREEDY = "greedy"
_IN_GROUPS = "group_limited_greedy"


def _translate_v2(config: JsonObject) -> JsonObject:
    """Switch the norm of weights off whatever `norm_topk_prob` says, as transformers 5.23 does.
    (DeepSeek's code norms them and leaves `routed_scaling_factor` out; no published file asks for
    it.) A greedy choice has no groups.
    """
    config = {**config, "norm_topk_prob": False}
    if config["topk_method"] == _GREEDY:
        config = {
            key: value for key, value in config.items() if key not in ("n_group", "topk_group")
        }
    return translate_latent(config)


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
    predicting=NEXTN,
    tensors=TensorNames(shared="mlp.shared_experts."),
    translate=translate_latent,
    derive=with_latent,
)
_DEEPSEEK_V2 = replace(
    _DEEPSEEK_V3,
    architecture="DeepseekV2ForCausalLM",
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "topk_method": _GREEDY,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    fixed={
        **LATENT_FIXED,
        "scoring_func": ("softmax",),
        "topk_method": (_GREEDY, _IN_GROUPS),
        "moe_layer_freq": (1,),
    },
    moe=replace(
        DEEPSEEK_EXPERTS, count=64, scoring=Scoring.SOFTMAX, choice_bias=False, group_best=1
    ),
    translate=_translate_v2,
)
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    defaults={
        **_DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "indexer_rope_interleave": False,
    },
    keys=LATENT_KEYS | INDEXER_KEYS,
    other_layers=(INDEXED,),
    moe=DEEPSEEK_EXPERTS_BY_LAYER,
    tensors=TensorNames(shared="mlp.shared_experts.", unused=INDEXER),
    translate=translate_indexed,
    derive=with_indexed,
)
ROWS = {
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32,
    "kimi_k2": _DEEPSEEK_V3,  # the same computation, of files that name every key
    "kimi_k25": replace(
        _DEEPSEEK_V3,
        architecture="KimiK25ForConditionalGeneration",
        bodies=LANGUAGE_MODEL,
        text_type="kimi_k2",
        other_texts=("deepseek_v3",),
        wrapper_keys=words(
            "vision_config media_placeholder_token_id use_unified_vision_chunk video_placeholder "
            "projection_hidden_size projection_layer_norm_eps image_token_id video_token_id "
            "ignore_index vision_start_token_id vision_end_token_id"
        ),
        tensors=TensorNames(
            shared="mlp.shared_experts.",
            unused=(*VISION_TOWER, *not_run("vision", "*mm_projector.*")),
        ),
    ),
}
