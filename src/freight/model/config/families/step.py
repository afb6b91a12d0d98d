"""Step of StepFun. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freight.base.fields import JsonObject, integer, number
from freight.errors import CheckpointError
from freight.model.config.attention import require_multiple
from freight.model.config.family import ATTENTION_BIAS, Family, words
from freight.model.config.layer import DenseConfig, MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import TensorNames, not_run
from freight.model.mixers.attention.spec import AttentionConfig, OutputGateConfig, QKNormConfig
from freight.operands.activation import GatedActivation, GateFunction, clamped_silu
from freight.operands.routing import Scoring

# lists that may have further entries, for the layers that predict further tokens
_BY_LAYER = words(
    "layer_types mlp_layer_types swiglu_limits swiglu_limits_shared rope_theta partial_rotary_factors"
)
_KINDS = ("full_attention", "sliding_attention")
_FIRST_SPARSE = 3  # the first layer with experts, without a key that lists them


def _translate(config: JsonObject) -> JsonObject:
    """Translate the hub's lists, one entry per layer, to transformers' keys by kind of layer."""
    num_layers = integer(config, "num_hidden_layers")
    padded = num_layers + integer(config, "num_nextn_predict_layers", 0, least=0)
    translated = dict(config)
    for key in sorted(_BY_LAYER & config.keys()):
        value = config[key]
        if isinstance(value, list) and len(value) not in (num_layers, padded):
            raise CheckpointError(
                f"config.json contradicts itself: {key} has {len(value)} entries, num_hidden_layers = {num_layers}"
            )
        translated[key] = value[:num_layers] if isinstance(value, list) else value
    translated["layer_types"] = translated.get("layer_types") or ["full_attention"] * num_layers
    translated["mlp_layer_types"] = translated.get("mlp_layer_types") or _mlp_types(
        config, num_layers
    )
    by_kind = config.get("rope_parameters") or {}
    if not (isinstance(by_kind, Mapping) and any(kind in by_kind for kind in _KINDS)):
        translated["rope_parameters"] = {
            kind: _rope(translated, kind) for kind in _KINDS if kind in translated["layer_types"]
        }
        if translated.get("rope_scaling") and "full_attention" in translated["rope_parameters"]:
            translated["rope_parameters"]["full_attention"] |= translated["rope_scaling"]
    return {
        key: value for key, value in translated.items() if key not in ("rope_theta", "rope_scaling")
    }


def _rope(config: JsonObject, kind: str) -> dict[str, Any]:
    """Return the rope of all layers of this kind. Raises CheckpointError if they differ."""
    index = config["layer_types"].index(kind)
    rope: dict[str, Any] = {"rope_type": "default"}
    for key, of_rope in (
        ("rope_theta", "rope_theta"),
        ("partial_rotary_factors", "partial_rotary_factor"),
    ):
        value = config.get(key)
        if isinstance(value, list):
            of_kind = [
                entry
                for entry, other in zip(value, config["layer_types"], strict=True)
                if other == kind
            ]
            if any(entry != of_kind[0] for entry in of_kind):
                raise CheckpointError(
                    f"config.json: {key} = {value!r} differs among layers of {kind}"
                )
            value = value[index]
        if value is not None:
            rope[of_rope] = value
    return rope


def _mlp_types(config: JsonObject, num_layers: int) -> list[str]:
    """Translate `moe_layers_enum`, the layers with experts: numbers, or text with commas."""
    declared = config.get("moe_layers_enum")
    if declared is None:
        sparse = set(range(_FIRST_SPARSE, num_layers))
    else:
        items = declared.split(",") if isinstance(declared, str) else declared
        if not isinstance(items, list | tuple) or not all(
            str(number).strip().isdecimal() for number in items if number != ""
        ):
            raise CheckpointError(f"config.json: moe_layers_enum = {declared!r} must list layers")
        sparse = {int(number) for number in items if number != ""}
    return ["sparse" if index in sparse else "dense" for index in range(num_layers)]


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Set norms that multiply by 1 + weight, a gate per head, and the bounded activations of some
    layers.
    """
    gate = OutputGateConfig(GateFunction.SIGMOID, by_head=True)
    heads = _sliding_heads(config, model.attention[0])
    routed = _activations(config, "swiglu_limits", model.num_layers)
    shared = _activations(config, "swiglu_limits_shared", model.num_layers)
    layers = []
    for index, layer in enumerate(model.layers):
        mixer = replace(model.attention[index], output_gate=gate)
        mlp = layer.feed_forward
        if mixer.window is not None:
            mixer = replace(mixer, num_heads=heads)
        if isinstance(mlp, MoEConfig):
            assert mlp.shared is not None
            of_shared = replace(mlp.shared, activation=shared[index])
            layers.append(
                replace(
                    layer,
                    mixer=mixer,
                    feed_forward=replace(mlp, activation=routed[index], shared=of_shared),
                )
            )
        else:
            assert isinstance(mlp, DenseConfig)
            layers.append(
                replace(layer, mixer=mixer, feed_forward=replace(mlp, activation=shared[index]))
            )
    _check_per_layer(config, model, heads)
    return replace(model, layers=tuple(layers), norm_offset=1.0, wide_norms=True)


def _sliding_heads(config: JsonObject, mixer: AttentionConfig) -> int:
    """Return the query heads of layers with a window."""
    other = config.get("attention_other_setting") or {}
    if not isinstance(other, Mapping):
        raise CheckpointError(
            f"config.json: attention_other_setting = {other!r} is not a JSON object"
        )
    for key, only in (("num_attention_groups", mixer.num_kv_heads), ("head_dim", mixer.k_dim)):
        if other.get(key) is not None and other[key] != only:
            raise CheckpointError(
                f"config.json: attention_other_setting has {key} = {other[key]!r}, which is not implemented; {only} is"
            )
    heads = integer(
        config,
        "num_sliding_attention_heads",
        integer(other, "num_attention_heads", mixer.num_heads),
    )
    require_multiple(
        heads, mixer.num_kv_heads, "num_key_value_heads", "num_sliding_attention_heads"
    )
    return heads


def _check_per_layer(config: JsonObject, model: ModelConfig, heads: int) -> None:
    """Raise CheckpointError for a `per_layer_config` that says anything but the heads of layers
    with a window.
    """
    declared = config.get("per_layer_config")
    if declared is None:
        return
    usual = model.attention[0].num_heads
    expected = {
        index: {"num_attention_heads": heads}
        for index, mixer in model.attention.items()
        if mixer.window is not None
    }
    read = isinstance(declared, Mapping) and all(str(key).isdecimal() for key in declared)
    by_layer = {int(key): value for key, value in declared.items()} if read else declared
    if by_layer != expected and not (by_layer == {} and heads == usual):
        raise CheckpointError(
            f"config.json: per_layer_config = {declared!r} is not implemented with num_sliding_attention_heads = "
            f"{heads}; {expected!r} is"
        )


def _activations(config: JsonObject, key: str, num_layers: int) -> list[GatedActivation]:
    """Return the activation of each layer, by its bound; 0 and null mean no bound."""
    limits = config.get(key) or [None] * num_layers
    if not isinstance(limits, list) or len(limits) != num_layers:
        raise CheckpointError(
            f"config.json: {key} = {limits!r} must be a list of {num_layers} numbers"
        )
    bounds = [0.0 if limit is None else number({key: limit}, key, least=0.0) for limit in limits]
    return [clamped_silu(bound) if bound else GatedActivation.SILU for bound in bounds]


ROWS = {
    "step3p7": Family(
        "Step3p7ForConditionalGeneration",
        {
            "vocab_size": 128815,
            "hidden_size": 4096,
            "intermediate_size": 11264,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5,
            "use_sliding_window": True,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "moe_router_scaling_factor": 1.0,
        },
        words(
            "attention_bias sliding_window layer_types num_sliding_attention_heads "
            "attention_other_setting per_layer_config query_pre_attn_scalar swiglu_limits "
            "swiglu_limits_shared moe_layers_enum partial_rotary_factors mtp_layer_types "
            "mtp_mlp_layer_types"
        ),
        bias_keys=ATTENTION_BIAS,
        synonyms={
            "num_attention_groups": "num_key_value_heads",
            "moe_top_k": "num_experts_per_tok",
            "share_expert_dims": "share_expert_dim",
        },
        fixed={
            "mlp_bias": (False,),
            "gating": (True,),
            "use_head_wise_attn_gate": (True,),
            "use_rope_layers": (True,),
            "yarn_only_types": ("full_attention",),
            "att_impl_type": ("GQA",),
            "zero_centered": (True,),
            "use_moe": (True,),
            "moe_router_activation": ("sigmoid",),
            "scoring_func": ("sigmoid",),
            "use_moe_router_bias": (True,),
            "norm_expert_weight": (True,),
            "need_fp32_gate": (True,),
            "fp32_residual_connection": (False,),
            "n_shared_experts": (1,),
            "first_k_dense_replace": (_FIRST_SPARSE,),
            "use_bidirectional_attention": (False,),
        },
        qk_norm=QKNormConfig(),
        local_theta=1e4,
        rotary_factor=1.0,
        translate=_translate,
        derive=_derive,
        moe=MoEFamily(
            288,
            count_keys=("n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts"),
            scoring=Scoring.SIGMOID,
            norm_key=None,
            factor_key="moe_router_scaling_factor",
            choice_bias=True,
            shared_width_key="share_expert_dim",
            dense_keys=words("mlp_layer_types"),
        ),
        text_type="step3p5",
        wrapper_keys=words("vision_config image_token_id projector_bias"),
        bodies=(("model.language_model.", ""), ("model.", "")),
        next_token_keys=words("num_nextn_predict_layers num_mtp_layers"),
        tensors=TensorNames(
            router="moe.gate",
            choice_bias="moe.router_bias",
            expert="moe.experts.{}.",
            stacked=("moe.gate_proj.weight", "moe.up_proj.weight", "moe.down_proj.weight"),
            shared="share_expert.",
            unused=not_run(
                "vision", "*vision_model.*", "*vit_large_projector.*", "*multi_modal_projector.*"
            ),
        ),
    ),
}
