"""Qwen3-Next and Qwen3.5: three layers with a gated delta net for each one with attention. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, integer
from freight.model.config.attention import require_multiple
from freight.model.config.deriving import conv_width, require_silu, with_attention, with_layers
from freight.model.config.family import (
    ATTENTION_BIAS,
    LANGUAGE_MODEL,
    M_ROPE,
    Family,
    PredictingForm,
    words,
)
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import PREDICTS, VISUAL, TensorNames, not_run
from freight.model.mixers.attention.spec import OutputGateConfig, QKNormConfig
from freight.model.mixers.delta_net.spec import DeltaNetConfig, DeltaNetNames
from freight.operands.activation import GateFunction

_STATEFUL = "linear_attention"
_KEYS = words(
    "attention_bias layer_types full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim"
)
_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _translate(config: JsonObject) -> JsonObject:
    """Fill in `layer_types`: every n-th layer has attention, with n = `full_attention_interval`."""
    if config.get("layer_types"):
        return config
    interval = integer(config, "full_attention_interval")
    num_layers = integer(config, "num_hidden_layers")
    kinds = [
        _STATEFUL if (index + 1) % interval else "full_attention" for index in range(num_layers)
    ]
    return {**config, "layer_types": kinds}


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Set norms that multiply by 1 + weight, gated attention, and a delta net in other layers."""
    if _STATEFUL in config["layer_types"]:
        require_silu(config)
    key_heads = integer(config, "linear_num_key_heads")
    heads = integer(config, "linear_num_value_heads")
    require_multiple(heads, key_heads, "linear_num_key_heads", "linear_num_value_heads")
    net = DeltaNetConfig(
        key_heads=key_heads,
        heads=heads,
        k_dim=integer(config, "linear_key_head_dim"),
        v_dim=integer(config, "linear_value_head_dim"),
        width=conv_width(config, "linear_conv_kernel_dim"),
    )
    model = with_attention(
        model, output_gate=OutputGateConfig(GateFunction.SIGMOID, by_head=False, in_q=True)
    )
    return replace(with_layers(config, model, {_STATEFUL: net}), norm_offset=1.0, wide_norms=True)


_PREDICTING = (("mtp.*", PREDICTS),)
# github.com/vllm-project/vllm, vllm/model_executor/models/qwen3_5_mtp.py (01d9980) and qwen3_next_mtp.py
# (055e47c), and github.com/sgl-project/sglang, python/sglang/srt/models/qwen3_5_mtp.py (008b79d) and
# qwen3_next_mtp.py (0053421): the same in all. The layer has attention, also where most have a delta net
_FORM = PredictingForm(
    "layers.{}.",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    outside="mtp.",
)
_TEXT = Family(
    "Qwen3_5ForCausalLM",
    {
        **_DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    # mamba_ssm_dtype: the format of states in the publisher's code; here --state-dtype
    _KEYS | words("mtp_use_dedicated_embeddings mamba_ssm_dtype mlp_only_layers"),
    fixed={
        "attn_output_gate": (True,),
        "mlp_only_layers": (),
        "output_gate_type": ("swish", "silu"),  # the gate of gated norms
    },
    bias_keys=ATTENTION_BIAS,
    qk_norm=QKNormConfig(),
    rotary_factor=0.25,
    ropes=M_ROPE,
    other_layers=(_STATEFUL,),
    bodies=(("model.", ""), *LANGUAGE_MODEL),
    next_token_keys=words("mtp_num_hidden_layers"),
    predicting=_FORM,
    tensors=TensorNames(unused=_PREDICTING),
    translate=_translate,
    derive=_derive,
)
_MOE_TEXT = replace(
    _TEXT,
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **_TEXT.defaults,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    moe=MoEFamily(
        256, norm_key=None, shared_width_key="shared_expert_intermediate_size", shared_gate=True
    ),
)
_OUTSIDE = words(
    "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id"
)


# outer keys in which transformers and the publisher repeat sizes of pictures
_MINICPM = words(
    "vision_config insert_layer_id image_size drop_vision_last_layer image_token_id video_token_id downsample_mode "
    "merge_kernel_size merger_times patch_size"
)


def _with_vision(text: Family, text_type: str, architecture: str) -> Family:
    return replace(
        text,
        architecture=architecture,
        bodies=LANGUAGE_MODEL,
        text_type=text_type,
        wrapper_keys=_OUTSIDE,
        tensors=TensorNames(unused=_PREDICTING + VISUAL),
    )


ROWS = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            **_DEFAULTS,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        _KEYS,
        bias_keys=ATTENTION_BIAS,
        qk_norm=QKNormConfig(),
        rotary_factor=0.25,
        other_layers=(_STATEFUL,),
        predicting=_FORM,
        moe=MoEFamily(
            512,
            shared_width_key="shared_expert_intermediate_size",
            shared_gate=True,
            dense_keys=words("decoder_sparse_step mlp_only_layers"),
        ),
        tensors=TensorNames(
            mixers=(
                DeltaNetNames(qkvz=("linear_attn.in_proj_qkvz",), ba=("linear_attn.in_proj_ba",)),
            ),
            unused=_PREDICTING,
        ),
        translate=_translate,
        derive=_derive,
    ),
    "qwen3_5_text": _TEXT,
    "qwen3_5": _with_vision(_TEXT, "qwen3_5_text", "Qwen3_5ForConditionalGeneration"),
    "minicpmv4_6": replace(
        _with_vision(_TEXT, "qwen3_5_text", "MiniCPMV4_6ForConditionalGeneration"),
        wrapper_keys=_MINICPM,
        tensors=TensorNames(unused=_PREDICTING + not_run("vision", "*vision_tower.*", "*merger.*")),
    ),
    "qwen3_5_moe_text": _MOE_TEXT,
    "qwen3_5_moe": _with_vision(
        _MOE_TEXT, "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration"
    ),
}
