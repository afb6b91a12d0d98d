"""MiMo of Xiaomi. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, integer, number
from freight.errors import CheckpointError
from freight.model.config.attention import require_multiple
from freight.model.config.deriving import with_mixers
from freight.model.config.families.qwen import QWEN2
from freight.model.config.family import Family, PredictingForm, words
from freight.model.config.model import ModelConfig
from freight.model.config.moe import MoEFamily
from freight.model.config.tensor_names import PREDICTS, TensorNames
from freight.model.mixers.attention.spec import AttentionNames
from freight.operands.routing import Scoring

_SHARE = 0.334  # default of partial_rotary_factor


def _translate(config: JsonObject) -> JsonObject:
    """Translate the hub's keys to those of transformers: layers with a window, layers with experts,
    ropes and the window.

    In SGLang, for which the weights were published, and in transformers a query sees
    `sliding_window_size` tokens before it, so the window is one more.
    """
    num_layers = integer(config, "num_hidden_layers")
    translated = dict(config)
    if config.get("sliding_window_size") is not None:
        translated["sliding_window"] = integer(config, "sliding_window_size") + 1
    kinds = _by_layer(config, "hybrid_layer_pattern", ("full_attention", "sliding_attention"))
    default = [
        "sliding_attention" if i and (i + 1) % 6 else "full_attention" for i in range(num_layers)
    ]
    translated["layer_types"] = config.get("layer_types") or kinds or default
    sparse = _by_layer(config, "moe_layer_freq", ("dense", "sparse"))
    translated["mlp_layer_types"] = (
        config.get("mlp_layer_types") or sparse or ["dense", *["sparse"] * (num_layers - 1)]
    )
    if not config.get("rope_parameters"):
        share = {
            "rope_type": "default",
            "partial_rotary_factor": number(config, "partial_rotary_factor", _SHARE),
        }
        translated["rope_parameters"] = {
            "full_attention": {**share, "rope_theta": number(config, "rope_theta", 5e6)},
            "sliding_attention": {**share, "rope_theta": number(config, "swa_rope_theta", 1e4)},
        }
    return translated


def _by_layer(config: JsonObject, key: str, names: tuple[str, str]) -> list[str] | None:
    """Translate a list of 0 and 1, one for each layer, to `names`; None if it is absent."""
    pattern = config.get(key)
    if pattern is None:
        return None
    if not isinstance(pattern, list) or not all(
        type(flag) is int and flag in (0, 1) for flag in pattern
    ):
        raise CheckpointError(f"config.json: {key} = {pattern!r} must be a list of 0 and 1")
    return [names[flag] for flag in pattern]


def _derive(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Give layers with a window twice as many KV heads, and sinks; give values their head size and
    factor.
    """
    v_dim = integer(config, "v_head_dim")
    factor = None
    if config.get("attention_value_scale") is not None:
        factor = number(config, "attention_value_scale")
    first = model.attention[0]
    _require(config, "swa_num_attention_heads", first.num_heads)
    _require(config, "swa_num_key_value_heads", 2 * first.num_kv_heads)
    _require(config, "swa_head_dim", first.k_dim)
    _require(config, "swa_v_head_dim", v_dim)
    require_multiple(first.num_heads, 2 * first.num_kv_heads, "swa_num_key_value_heads")
    mixers = []
    for mixer in model.attention.values():
        slides = mixer.window is not None
        kv_heads = mixer.num_kv_heads * (2 if slides else 1)
        mixers.append(
            replace(mixer, num_kv_heads=kv_heads, v_dim=v_dim, v_factor=factor, sinks=slides)
        )
    return with_mixers(model, mixers)


def _require(config: JsonObject, key: str, only: int) -> None:
    """Raise CheckpointError for another value of `key` than the one that transformers computes."""
    if config.get(key) is not None and integer(config, key) != only:
        raise CheckpointError(f"config.json: {key} = {config[key]!r} is not implemented; {only} is")


# github.com/vllm-project/vllm, vllm/model_executor/models/mimo_mtp.py (0bb55d6), and
# github.com/sgl-project/sglang, python/sglang/srt/models/mimo_mtp.py (0564b52): the same in both
_PREDICTING = PredictingForm(
    "mtp_layers.{}.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    features_first=True,
    masks_first=True,
)

ROWS = {
    # Qwen2 and layers that predict further tokens; transformers does not know it
    "mimo": replace(
        QWEN2,
        architecture="MiMoForCausalLM",
        next_token_keys=words("num_nextn_predict_layers"),
        predicting=_PREDICTING,
        tensors=TensorNames(unused=(("model.mtp_layers.*", PREDICTS),)),
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        {
            "vocab_size": 152576,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "sliding_window": 129,
            "use_sliding_window": True,
            "attention_value_scale": 0.707,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        # attention_chunk_size repeats the window for another engine
        words(
            "attention_bias v_head_dim sliding_window sliding_window_size layer_types "
            "attention_value_scale hybrid_layer_pattern moe_layer_freq attention_chunk_size "
            "swa_rope_theta swa_num_attention_heads swa_num_key_value_heads swa_head_dim "
            "swa_v_head_dim"
        ),
        bias_keys=("attention_bias", "", ""),
        fixed={
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "add_swa_attention_sink_bias": (True,),
            "add_full_attention_sink_bias": (False,),
        },
        synonyms={"layernorm_epsilon": "rms_norm_eps"},
        theta=5e6,
        local_theta=1e4,
        rotary_factor=_SHARE,
        translate=_translate,
        derive=_derive,
        moe=MoEFamily(
            256,
            scoring=Scoring.SIGMOID,
            factor_key="routed_scaling_factor",
            group_keys=("n_group", "topk_group"),
            choice_bias=True,
            dense_keys=words("mlp_layer_types"),
        ),
        tensors=TensorNames(
            mixers=(AttentionNames(sinks="self_attn.attention_sink_bias"),),
            unused=(("model.mtp.*", PREDICTS),),
        ),
    ),
}
