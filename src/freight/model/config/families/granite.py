"""Granite of IBM. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer, number
from freight.errors import CheckpointError
from freight.model.config.attention import require_multiple
from freight.model.config.deriving import (
    conv_width,
    require_silu,
    step_limits,
    with_attention,
    with_layers,
)
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily, has_experts
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.mamba2.spec import Mamba2Config
from freight.operands.routing import Scoring

_MULTIPLIERS = words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling")


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    model = with_attention(model, softmax_scale=number(config, "attention_multiplier"))
    return replace(
        model,
        embedding_multiplier=_unless_1(config, "embedding_multiplier"),
        residual_multiplier=number(config, "residual_multiplier"),
        logit_divisor=_unless_1(config, "logits_scaling"),
    )


def _unless_1(config: JsonObject, key: str) -> float | None:
    value = number(config, key)
    return None if value == 1 else value


# in `layer_types`: transformers' word, and the word of published files
_STATEFUL = ("linear_attention", "mamba")
_SIZES = words("mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads")


def _translate_hybrid(config: JsonObject) -> JsonObject:
    """Fill in the defaults: without `layer_types` every layer has a state; without experts the
    shared one is the feed-forward.
    """
    translated = dict(config)
    if not config.get("layer_types"):
        translated["layer_types"] = [_STATEFUL[0]] * integer(config, "num_hidden_layers")
    if not has_experts(config, _HYBRID_MOE):
        translated["intermediate_size"] = integer(config, "shared_intermediate_size")
    return translated


def _derive_hybrid(config: JsonObject, model: ModelConfig) -> ModelConfig:
    model = _derive(config, model)
    if config.get("position_embedding_type") != "rope":  # 'nope', or null
        model = with_attention(model, rope=None)
    if not set(_STATEFUL).intersection(config["layer_types"]):
        return model  # Granite 4.0 350M: it has Mamba-2 sizes, but no such layer
    return with_layers(config, model, dict.fromkeys(_STATEFUL, _mamba2(config, model.hidden_size)))


def _mamba2(config: JsonObject, hidden_size: int) -> Mamba2Config:
    require_silu(config)
    heads = integer(config, "mamba_n_heads")
    groups = integer(config, "mamba_n_groups")
    channels = integer(config, "mamba_expand") * hidden_size
    require_multiple(channels, heads, "mamba_n_heads", "mamba_expand * hidden_size")
    require_multiple(heads, groups, "mamba_n_groups", "mamba_n_heads")
    head_dim = channels // heads
    if config["mamba_d_head"] != "auto" and integer(config, "mamba_d_head") != head_dim:
        raise CheckpointError(
            f"config.json contradicts itself: mamba_d_head = {config['mamba_d_head']} with mamba_n_heads = {heads}, "
            f"but mamba_expand * hidden_size = {channels}"
        )
    return Mamba2Config(
        groups=groups,
        heads=heads,
        head_dim=head_dim,
        state_size=integer(config, "mamba_d_state"),
        width=conv_width(config, "mamba_d_conv"),
        norm_groups=groups,
        conv_bias=flag(config, "mamba_conv_bias"),
        bias=flag(config, "mamba_proj_bias"),
        limits=step_limits(config),
    )


_GRANITE = Family(
    "GraniteForCausalLM",
    {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(_MULTIPLIERS, 1.0),
    },
    words("attention_bias mlp_bias") | _MULTIPLIERS,
    bias_keys=ATTENTION_BIAS,
    derive=_derive,
)

_MOE = replace(
    _GRANITE,
    architecture="GraniteMoeForCausalLM",
    defaults={**_GRANITE.defaults, "num_experts_per_tok": 2},
    keys=words("attention_bias") | _MULTIPLIERS,
    moe=MoEFamily(8, width_key="intermediate_size", scoring=Scoring.CHOSEN, norm_key=None),
    tensors=TensorNames(
        router="block_sparse_moe.router.layer",
        expert="block_sparse_moe.experts.{}.",
        stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
)
_HYBRID_MOE = MoEFamily(
    8,
    ("num_local_experts",),
    width_key="intermediate_size",
    scoring=Scoring.CHOSEN,
    norm_key=None,
    shared_width_key="shared_intermediate_size",
    switch_key="num_local_experts",
)

ROWS = {
    "granite": _GRANITE,
    "granitemoe": _MOE,
    "granitemoehybrid": replace(
        _MOE,
        architecture="GraniteMoeHybridForCausalLM",
        defaults={
            **_MOE.defaults,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
        keys=_MOE.keys
        | _SIZES
        | words(
            "layer_types mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit position_embedding_type"
        ),
        synonyms={"layers_block_type": "layer_types"},
        other_layers=_STATEFUL,
        moe=_HYBRID_MOE,
        tensors=replace(
            _MOE.tensors,
            gate_up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            shared="shared_mlp.",
        ),
        translate=_translate_hybrid,
        derive=_derive_hybrid,
    ),
}
