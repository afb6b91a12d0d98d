"""Muse-Glimmer of Meta: the text model. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, integer, number
from freight.errors import CheckpointError
from freight.model.config.deriving import with_mixers
from freight.model.config.families.gemma import GEMMA_TENSORS
from freight.model.config.family import LANGUAGE_MODEL, Family, words
from freight.model.config.layer import NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import not_run
from freight.model.mixers.attention.spec import AttentionNames, OutputGateConfig, QKNormConfig
from freight.operands.activation import GateFunction


def _translate(config: JsonObject) -> JsonObject:
    """Fill in `layer_types`: every fourth layer, counted from the last, has no window."""
    if config.get("layer_types"):
        return config
    last = integer(config, "num_hidden_layers") - 1
    types = [
        "sliding_attention" if (last - index) % 4 else "full_attention" for index in range(last + 1)
    ]
    return {**config, "layer_types": types}


def _rotates(config: JsonObject, num_layers: int) -> list[bool]:
    """Return which layers rotate: those whose `layer_rope_theta` is not 0, else all but every
    fourth from the last.
    """
    key = "layer_rope_theta"
    bases = config.get(key)
    if bases is None:
        return [(num_layers - 1 - index) % 4 != 0 for index in range(num_layers)]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", _THETA))
    if (
        not isinstance(bases, list)
        or len(bases) != num_layers
        or any(base not in (0, theta) for base in bases)
    ):
        raise CheckpointError(
            f"config.json: {key} = {bases!r} must be a list of num_hidden_layers = {num_layers} entries, each 0 or "
            f"rope_theta = {theta!r}; layers with ropes of their own are not implemented"
        )
    return [base != 0 for base in bases]


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Fold `qk_scale_factor`, which multiplies queries, into the scale of the softmax.

    Norms multiply by 1 + weight, except for the last one.
    """
    scale = number(config, "qk_scale_factor")
    gate = OutputGateConfig(GateFunction.SIGMOID, by_head=False)
    mixers = [
        replace(
            mixer,
            rope=0 if rotates else None,
            softmax_scale=scale * mixer.softmax_scale,
            output_gate=gate,
        )
        for mixer, rotates in zip(
            model.attention.values(), _rotates(config, model.num_layers), strict=True
        )
    ]
    return replace(
        with_mixers(model, mixers),
        norm_offset=1.0,
        final_norm_offset=False,
        post_norm_eps=number(config, "post_norm_eps"),
        embedding_norm=True,
        logit_divisor=1 / number(config, "output_multiplier"),
    )


_THETA = 10000.0

ROWS = {
    "muse_glimmer": Family(
        "MuseGlimmerForConditionalGeneration",
        {
            "vocab_size": 202048,
            "hidden_size": 6656,
            "intermediate_size": 19968,
            "num_hidden_layers": 52,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 200000,
            "eos_token_id": 200001,
            "sliding_window": 2048,
            "use_sliding_window": True,
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
            "post_norm_eps": 1e-8,
        },
        words(
            "attention_bias sliding_window layer_types layer_rope_theta qk_scale_factor "
            "output_multiplier post_norm_eps"
        ),
        bias_keys=("attention_bias", "attention_bias", ""),
        qk_norm=QKNormConfig(weighted=False),
        norms=NormPlacement.SANDWICH,
        wide_norms=True,
        activation_key="hidden_activation",
        theta=_THETA,
        bodies=LANGUAGE_MODEL,
        text_type="muse_glimmer_text",
        wrapper_keys=words(
            "vision_config image_token_id video_token_id out_hidden_size projector_hidden_size "
            "projector_hidden_act"
        ),
        translate=_translate,
        derive=_derive,
        tensors=replace(
            GEMMA_TENSORS,
            mixers=(AttentionNames(output_gate="self_attn.gate_proj"),),
            unused=not_run(
                "vision", "*vision_tower.*", "*vision_adapter.*", "*vision_projection.*"
            ),
        ),
    ),
}
