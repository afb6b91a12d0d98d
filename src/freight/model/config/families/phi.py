"""Phi: Phi 3 and 4, and Phi 4 with pictures and sound. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.attention.spec import AttentionNames

_PHI3 = Family(
    "Phi3ForCausalLM",
    {
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "use_sliding_window": True,
    },
    words("sliding_window attention_bias mlp_bias lm_head_bias"),
    bias_keys=ATTENTION_BIAS,
    mixed_windows=False,
    rotary_factor=1.0,
    tensors=TensorNames(
        mixers=(AttentionNames(qkv=("self_attn.qkv_proj",)),), gate_up=("mlp.gate_up_proj",)
    ),
)

ROWS = {
    "phi3": _PHI3,
    "phi4mm": replace(
        _PHI3,
        architecture="Phi4MMForCausalLM",
        text_type="phi3",
        flat=True,
        wrapper_keys=words("audio_processor embd_layer img_processor speech_lora vision_lora"),
        tensors=TensorNames(  # text uses the matrices without their adapters
            mixers=(
                AttentionNames(
                    qkv=("self_attn.qkv_proj.base_layer",), o="self_attn.o_proj.base_layer"
                ),
            ),
            gate_up=("mlp.gate_up_proj.base_layer",),
            down="mlp.down_proj.base_layer",
            unused=(
                (
                    "model.embed_tokens_extend.*",
                    "of the models of pictures and sound: Freight runs the text model alone",
                ),
                (
                    "*.lora_[AB].*",
                    "of an adapter for pictures or sound: Freight runs the text model alone",
                ),
            ),
        ),
    ),
}
