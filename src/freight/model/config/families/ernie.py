"""ERNIE 4.5 of Baidu. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject
from freight.errors import CheckpointError
from freight.model.config.family import M_ROPE, Family, words
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import PREDICTS, TensorNames, not_run


def _of_text(config: JsonObject) -> JsonObject:
    """Take the width of experts for text from `moe_intermediate_size`, [text, pictures]."""
    key = "moe_intermediate_size"
    widths = config[key]
    if not isinstance(widths, list) or len(widths) != 2:
        raise CheckpointError(
            f"config.json: {key} = {widths!r} must be a list of two widths: for text, for pictures"
        )
    return {**config, key: widths[0]}


_EXPERTS = MoEFamily(
    64,
    count_keys=("moe_num_experts", "num_experts", "num_local_experts"),
    top_k_keys=("moe_k",),
    norm_key=None,
    choice_bias=True,
    shared_count_key="moe_num_shared_experts",
    dense_keys=words("moe_layer_start_index moe_layer_end_index moe_layer_interval"),
)
_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    {
        "vocab_size": 103424,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    # `moe_norm_min` bounds a sum of weights that is never so small; capacities are for training
    words("moe_norm_min moe_capacity"),
    synonyms={"num_experts_per_tok": "moe_k"},
    fixed={"moe_gate": ("topk",), "moe_use_aux_free": (True,)},
    theta=5e5,
    interleaved=True,
    moe=_EXPERTS,
    next_token_keys=words("num_nextn_predict_layers"),
    tensors=TensorNames(
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        choice_bias_outer=(1,),
        shared="mlp.shared_experts.",
        unused=(("model.mtp_*", PREDICTS),),
    ),
)
_OUTSIDE = words(
    "vision_config image_token_id image_start_token_id image_end_token_id video_token_id "
    "video_start_token_id video_end_token_id"
)

ROWS = {
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        {
            "vocab_size": 103424,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        },
        words("use_bias"),
        bias_keys=("use_bias",) * 3,
        theta=5e5,
        interleaved=True,
    ),
    "ernie4_5_moe": _MOE,
    "ernie4_5_vl_moe": replace(
        _MOE,
        architecture="Ernie4_5_VLMoeForConditionalGeneration",
        defaults={
            **{key: value for key, value in _MOE.defaults.items() if not key.endswith("_token_id")},
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "moe_intermediate_size": [1536, 512],
        },
        ropes=M_ROPE,
        text_type="ernie4_5_vl_moe_text",
        wrapper_keys=_OUTSIDE,
        next_token_keys=frozenset(),
        translate=_of_text,
        moe=replace(_EXPERTS, dense_keys=_EXPERTS.dense_keys | words("mlp_layer_types")),
        tensors=replace(
            _MOE.tensors,
            choice_bias_outer=(2,),
            for_pictures=True,
            unused=not_run(
                "vision",
                "*vision_model.*",
                "*vision_tower.*",
                "*resampler_model.*",
                "*mlp.gate.weight_1",
            ),
        ),
    ),
}
