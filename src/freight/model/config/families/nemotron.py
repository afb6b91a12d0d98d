"""Nemotron-H and Nemotron 3 of NVIDIA: layers of one part, Mamba-2, attention or a feed-forward.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freight.base.fields import JsonObject, flag, integer
from freight.errors import CheckpointError, choices
from freight.model.config.attention import require_multiple
from freight.model.config.deriving import conv_width, step_limits
from freight.model.config.family import Family, words
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import PREDICTS, TensorNames, not_run
from freight.model.mixers.attention.spec import AttentionConfig, AttentionNames
from freight.model.mixers.mamba2.spec import Mamba2Config, MambaNames
from freight.operands.routing import Scoring

# transformers' words
_MAMBA = "linear_attention"
_ATTENTION = "full_attention"
_MLP = "mlp"
_MOE = "moe"
_LETTERS = {"M": _MAMBA, "E": _MOE, "*": _ATTENTION, "-": _MLP}  # in `hybrid_override_pattern`
_WORDS = {"mamba": _MAMBA, "attention": _ATTENTION, **{kind: kind for kind in _LETTERS.values()}}


def _translate(config: JsonObject) -> JsonObject:
    """Derive the kinds of layers, and their number, from `layers_block_type` or
    `hybrid_override_pattern`.
    """
    listed = config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if listed is None and pattern is None:
        listed = list(_LETTERS.values())
    all_kinds = [
        _kinds(key, value, form, known)
        for key, value, form, known in (
            ("layers_block_type", listed, list, _WORDS),
            ("hybrid_override_pattern", pattern, str, _LETTERS),
        )
        if value is not None
    ]
    kinds = all_kinds[0]
    if kinds != all_kinds[-1]:
        raise CheckpointError(
            f"config.json contradicts itself: layers_block_type = {listed!r}, but hybrid_override_pattern = {pattern!r}"
        )
    sparse = ["sparse" if kind == _MOE else "dense" for kind in kinds]
    return {
        "num_hidden_layers": len(kinds),
        **config,
        "layer_types": kinds,
        "mlp_layer_types": sparse,
    }


def _kinds(key: str, value: Any, form: type[Sequence[Any]], known: Mapping[str, str]) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError for an unknown kind."""
    if (
        not isinstance(value, form)
        or not value
        or not all(isinstance(letter, str) and letter in known for letter in value)
    ):
        raise CheckpointError(
            f"config.json: {key} = {value!r} is not implemented; layers of {choices(known)} are"
        )
    return [known[letter] for letter in value]


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Give each layer the one part that its kind names. Attention rotates nothing."""
    if flag(config, "mlp_bias") and _MOE in config["layer_types"]:
        raise CheckpointError(
            "config.json: mlp_bias = True is not implemented for layers with experts"
        )
    if flag(config, "tie_word_embeddings"):
        raise CheckpointError(
            "config.json: tie_word_embeddings = True is not implemented: NVIDIA's code then uses the embedding as "
            "head, and transformers a separate head"
        )
    if not {_MAMBA, _ATTENTION}.intersection(config["layer_types"]):
        raise CheckpointError(
            "config.json: layers_block_type has no layer of mamba or attention, so that no token would see another; "
            "such a model is not implemented"
        )
    mamba = _mamba2(config)
    layers = []
    for layer, kind in zip(model.layers, config["layer_types"], strict=True):
        if kind in (_MLP, _MOE):
            layers.append(replace(layer, mixer=None))
        elif kind == _MAMBA:
            layers.append(replace(layer, mixer=mamba, feed_forward=None))
        else:
            assert isinstance(layer.mixer, AttentionConfig)
            layers.append(replace(layer, mixer=replace(layer.mixer, rope=None), feed_forward=None))
    return replace(model, layers=tuple(layers))


def _mamba2(config: JsonObject) -> Mamba2Config:
    """Build the mixer of layers with a state. Its limits are `time_step_limit`: `time_step_min`, to
    which transformers 5.23 raises steps, only bounds initial weights in NVIDIA's code
    (transformers#48989).
    """
    heads = integer(config, "mamba_num_heads")
    groups = integer(config, "n_groups")
    require_multiple(heads, groups, "n_groups", "mamba_num_heads")
    return Mamba2Config(
        groups=groups,
        heads=heads,
        head_dim=integer(config, "mamba_head_dim"),
        state_size=integer(config, "ssm_state_size"),
        width=conv_width(config, "conv_kernel"),
        norm_groups=groups,
        conv_bias=flag(config, "use_conv_bias"),
        bias=flag(config, "use_bias"),
        limits=step_limits(config),
    )


_TENSORS = TensorNames(
    embedding="embeddings.weight",
    norm="norm_f.weight",
    mixers=(
        AttentionNames(qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), o="mixer.o_proj"),
        MambaNames(
            in_proj="mixer.in_proj",
            conv="mixer.conv1d",
            a_log="mixer.A_log",
            skip="mixer.D",
            dt_bias="mixer.dt_bias",
            norm="mixer.norm.weight",
            out="mixer.out_proj",
        ),
    ),
    attention_norm="norm.weight",
    mlp_norm="norm.weight",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    expert="mixer.experts.{}.",
    expert_gate_up=("up_proj",),
    stacked=("mixer.experts.up_proj", "mixer.experts.down_proj"),
    shared="mixer.shared_experts.",
    latent_in="mixer.fc1_latent_proj",
    latent_out="mixer.fc2_latent_proj",
    unused=(("mtp.*", PREDICTS),),
)
_NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    words(
        """
        layer_types hybrid_override_pattern mlp_hidden_act mlp_bias mamba_num_heads mamba_head_dim n_groups
        ssm_state_size conv_kernel use_conv_bias use_bias time_step_limit
        """
    )
    # keys of initial weights, of kernels, and of layers that predict further tokens
    | words(
        """
        chunk_size expand time_step_min time_step_max time_step_floor time_step_rank rescale_prenorm_residual
        use_mamba_kernels mamba_ssm_cache_dtype moe_shared_expert_overlap num_logits_to_keep mtp_layers_block_type
        mtp_hybrid_override_pattern
        """
    ),
    fixed={
        "mamba_hidden_act": ("silu", "swish"),
        "n_shared_experts": (1,),
        "residual_in_fp32": (False,),
    },
    synonyms={
        "layers_block_type": "layer_types",
        "layer_norm_epsilon": "rms_norm_eps",
        "norm_eps": "rms_norm_eps",
        "attention_head_dim": "head_dim",
        "mamba_dt_limit": "time_step_limit",
    },
    wide_norms=True,
    other_layers=(_MAMBA, _MLP, _MOE),
    gated=False,
    activation_key="mlp_hidden_act",
    bodies=(("backbone.", ""), ("model.", "")),
    moe=MoEFamily(
        8,
        ("n_routed_experts", "num_local_experts"),
        scoring=Scoring.SIGMOID,
        factor_key="routed_scaling_factor",
        group_keys=("n_group", "topk_group"),
        choice_bias=True,
        shared_width_key="moe_shared_expert_intermediate_size",
        latent_key="moe_latent_size",
    ),
    next_token_keys=words("num_nextn_predict_layers"),
    tensors=_TENSORS,
    translate=_translate,
    derive=_derive,
)
# outer keys of the multimodal models: NVIDIA's names, and transformers'
_VL = words(
    """
    vision_config downsample_ratio force_image_size image_tag_type img_context_token img_context_token_id img_end_token
    img_start_token max_sequence_length norm_mean norm_std patch_size projector_hidden_size ps_version template
    use_thumbnail video_context_token video_context_token_id video_pruning_rate video_temporal_patch_size
    vit_hidden_size sound_config sound_context_token sound_context_token_id
    """
)
_OMNI = words("audio_config vision_hidden_size image_token_id video_token_id audio_token_id")
_AROUND = not_run(
    "vision", "vision_model.*", "vision_final_layernorm*", "mlp1.*", "multi_modal_projector.*"
)
_AROUND += not_run(
    "audio", "sound_encoder.*", "sound_projection.*", "audio_tower.*", "embed_audio.*"
)


def _around(architecture: str, text_key: str) -> Family:
    return replace(
        _NEMOTRON_H,
        architecture=architecture,
        bodies=(
            ("language_model.backbone.", "language_model."),
            ("language_model.model.", "language_model."),
        ),
        text_type="nemotron_h",
        text_key=text_key,
        wrapper_keys=_VL | _OMNI,
        tensors=replace(
            _TENSORS, unused=(*_TENSORS.unused, ("language_model.mtp.*", PREDICTS), *_AROUND)
        ),
    )


ROWS = {
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_omni": _around("NemotronH_Omni_Reasoning_V3", "text_config"),
    "NemotronH_Nano_Omni_Reasoning_V3": _around("NemotronH_Nano_Omni_Reasoning_V3", "llm_config"),
    "NemotronH_Nano_VL_V2": _around("NemotronH_Nano_VL_V2", "llm_config"),
}
