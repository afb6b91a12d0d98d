"""The architectures of GGUF files that Freight reads: a row for each, with the keys of a config.json
that its metadata has. Imports no torch.

`KEYS` of all of them are read in `config.py`. What a row adds is either the value of a key under
another name (`Row.keys`), or what llama.cpp's graph of the architecture does whatever the file says
(`Row.constants`), or the result of `Row.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from freight.base.fields import JsonDict
from freight.checkpoint.gguf.keys import Keys
from freight.checkpoint.gguf.ropes import FREQUENCIES, proportional_share
from freight.errors import CheckpointError

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_STATEFUL = "linear_attention"
# values of `expert_gating_func`
_SOFTMAX = 1
_SIGMOID = 2
_CHOSEN_SOFTMAX = 3

Finish = Callable[[Keys, JsonDict], Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One architecture.

    model_type, architecture   those of config.json
    keys         key of the metadata -> key of config.json, of numbers that are taken as they are
    constants    keys of config.json that the file does not have
    biased       whether tensors decide `attention_bias` and `mlp_bias`
    scoring      the only `expert_gating_func`, which is also its default; None: no experts
    yarn         parameters of a YaRN that the file does not have
    whole_rope   whether all channels of a head may rotate; otherwise `finish` reads which do
    by_layer     keys of `config._SIZES` that `finish` reads, by layer
    predicting   key of config.json for the number of layers that predict further tokens
    finish       returns further keys, from the metadata and from the keys so far
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    biased: tuple[str, ...] = ("attention_bias",)
    scoring: int | None = None
    yarn: Mapping[str, Any] = field(default_factory=dict)
    whole_rope: bool = True
    by_layer: frozenset[str] = frozenset()
    predicting: str | None = None
    finish: Finish | None = None


_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_NARROW = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_BOTH_BIASES = ("attention_bias", "mlp_bias")


def _llama(keys: Keys, config: JsonDict) -> JsonDict:
    """Return what a mixture of experts needs: Mixtral has the architecture of Llama here."""
    keys.require("expert_weights_scale", (0.0, 1.0), 0.0)
    keys.require("attention.scale", (0.0,), 0.0)
    if not keys.integer("expert_count", 0):
        keys.get("expert_used_count")
        return {}
    keys.require("expert_gating_func", (0, _SOFTMAX), _SOFTMAX)
    config.pop("mlp_bias", None)
    if config.pop("attention_bias", False):
        raise CheckpointError(
            "GGUF: biases of attention in a mixture of experts are not implemented"
        )
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": None,
    }


def _dense_layers(keys: Keys, config: JsonDict) -> JsonDict:
    """Return the layers without experts: those without a router."""
    routers = keys.layers_with("ffn_gate_inp.weight", config["num_hidden_layers"])
    dense = [index for index, routed in enumerate(routers) if not routed]
    keys.require("expert_weights_scale", (0.0, 1.0), 0.0)
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def _qwen2_moe(keys: Keys, config: JsonDict) -> JsonDict:
    return {**_dense_layers(keys, config), "qkv_bias": config.pop("attention_bias")}


def _layer_types(keys: Keys, layers: int, pattern: int) -> list[str]:
    """Return the kinds of layers: by a list of flags, or every n-th layer has no window.

    pattern: that n if the file does not say
    """
    name = "attention.sliding_window_pattern"
    slides = keys.flags(name, layers)
    if slides is None:
        every = keys.integer(name, pattern)
        slides = [every == 0 or index % every < every - 1 for index in range(layers)]
    return [_SLIDING if slide else _FULL for slide in slides]


def _gemma_scale(config: JsonDict, largest: int) -> JsonDict:
    """Return the divisor of scores: the size of a head, but in the model with most layers
    hidden_size / heads, as llama.cpp has it.
    """
    is_largest = config["num_hidden_layers"] == largest
    share = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": share if is_largest else config["head_dim"]}


def _gemma2(keys: Keys, config: JsonDict) -> JsonDict:
    layers = config["num_hidden_layers"]
    theta = config["rope_parameters"]["rope_theta"]
    keys.require("rope.freq_base_swa", (theta,), theta)
    return {
        **_gemma_scale(config, 46),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, layers, 2),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, config: JsonDict) -> JsonDict:
    layers = config["num_hidden_layers"]
    window = keys.integer("attention.sliding_window", 0)
    types = _layer_types(keys, layers, 6) if window else [_FULL] * layers
    local = keys.number("rope.freq_base_swa", 10000.0)
    cap = keys.number("final_logit_softcapping", 0.0)
    return {
        **_gemma_scale(config, 62),
        "sliding_window": window or None,
        "layer_types": types,
        "final_logit_softcapping": cap or None,
        "rope_parameters": {
            _FULL: config["rope_parameters"],
            _SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _gemma4(keys: Keys, config: JsonDict) -> JsonDict:
    layers = config["num_hidden_layers"]
    types = _layer_types(keys, layers, 0)
    shared = keys.integer("attention.shared_kv_layers", 0)
    if shared >= layers:
        keys.refuse("attention.shared_kv_layers", f"fewer than the {layers} layers are")
    wide = config["head_dim"]
    for name in ("attention.value_length", "rope.dimension_count"):
        keys.require(name, (wide,), wide)
    if config["rope_parameters"]["rope_type"] != "default":
        keys.refuse("rope.scaling.type", "no scaling is")
    narrow = keys.integer("attention.key_length_swa")
    keys.require("attention.value_length_swa", (narrow,), narrow)
    keys.require("rope.dimension_count_swa", (narrow,), narrow)
    cap = keys.number("final_logit_softcapping", 0.0)
    own = keys.integer("embedding_length_per_layer_input", 0)
    described: JsonDict = {
        "head_dim": narrow,
        "global_head_dim": wide,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": types,
        "final_logit_softcapping": cap or None,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": own,
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": proportional_share(keys, wide),
                "rope_theta": config["rope_parameters"]["rope_theta"],
            },
            _SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 10000.0),
            },
        },
    }
    if own:
        described["vocab_size_per_layer_input"] = keys.rows("per_layer_token_embd.weight")
    described |= _gemma4_experts(keys)
    described |= _gemma4_heads(keys, types, layers - shared)
    return described | _gemma4_widths(keys, layers, shared)


def _gemma4_experts(keys: Keys) -> JsonDict:
    count = keys.integer("expert_count", 0)
    if not count:
        keys.get("expert_used_count")
        keys.get("expert_feed_forward_length")
        return {"enable_moe_block": False}
    keys.require("expert_gating_func", (0, _SOFTMAX), _SOFTMAX)
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def _gemma4_heads(keys: Keys, types: list[str], own_layers: int) -> JsonDict:
    """Return the KV heads by kind of layer, and whether layers without a window use keys as values:
    those of the first `own_layers` that have no window have no projection of values.
    """
    heads = keys.by_layer(
        "attention.head_count_kv", len(types), keys.integer("attention.head_count")
    )
    by_kind = {
        kind: {n for n, its in zip(heads, types, strict=True) if its == kind} for kind in types
    }
    if any(len(counts) > 1 for counts in by_kind.values()):
        keys.refuse("attention.head_count_kv", "one number for each kind of layer is")
    full = next(iter(by_kind.get(_FULL, {heads[0]})))
    sliding = next(iter(by_kind.get(_SLIDING, {full})))
    apart = keys.layers_with("attn_v.weight", len(types))
    joined = keys.layers_with("attn_qkv.weight", len(types))
    own = [
        apart[index] or joined[index]
        for index, kind in enumerate(types[:own_layers])
        if kind == _FULL
    ]
    same = bool(own) and not any(own)
    described: JsonDict = {"num_key_value_heads": sliding, "attention_k_eq_v": same}
    if same:
        described["num_global_key_value_heads"] = full
    elif full != sliding:
        described["per_layer_config"] = {
            str(index): {
                "num_key_value_heads": full,
                "head_dim": keys.integer("attention.key_length"),
            }
            for index, kind in enumerate(types)
            if kind == _FULL
        }
    return described


def _gemma4_widths(keys: Keys, layers: int, shared: int) -> JsonDict:
    """Return the width of the feed-forward, which layers without keys of their own may double."""
    widths = keys.by_layer("feed_forward_length", layers)
    width = widths[0]
    doubled = [width] * (layers - shared) + [2 * width] * shared
    if widths not in ([width] * layers, doubled):
        keys.refuse(
            "feed_forward_length", "one width, doubled in layers that share keys and values, is"
        )
    return {"intermediate_size": width, "use_double_wide_mlp": bool(shared) and widths == doubled}


def _phi3(keys: Keys, config: JsonDict) -> JsonDict:
    window = keys.integer("attention.sliding_window", 0)
    length = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": length}


def _olmo2(keys: Keys, config: JsonDict) -> JsonDict:
    """Return the windows of OLMo 3, which has the architecture of OLMo 2 here."""
    window = keys.integer("attention.sliding_window", 0)
    if not window:
        return {}
    rope = config["rope_parameters"]
    theta = keys.number("rope.freq_base_swa", rope["rope_theta"])
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": _layer_types(keys, config["num_hidden_layers"], 4),
        "rope_parameters": {
            _FULL: rope,
            _SLIDING: {"rope_type": "default", "rope_theta": theta},
        },
    }


def _granite(keys: Keys, config: JsonDict) -> JsonDict:
    keys.require("rope.scaling.finetuned", (True,), True)  # false: no rope
    keys.require("expert_weights_scale", (0.0, 1.0), 0.0)
    scale = keys.number("attention.scale", 0.0)
    described = {
        "logits_scaling": keys.number("logit_scale"),
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": scale or config["head_dim"] ** -0.5,
    }
    if keys.architecture == "granite":
        keys.require("expert_count", (0,), 0)
        keys.get("expert_used_count")
        return described
    config.pop("mlp_bias", None)
    return described


def _gpt_oss(keys: Keys, config: JsonDict) -> JsonDict:
    theta = config["rope_parameters"]["rope_theta"]
    keys.require("rope.freq_base_swa", (theta,), theta)
    keys.require("expert_weights_scale", (0.0, 1.0), 0.0)
    width = keys.integer("expert_feed_forward_length")
    return {
        "intermediate_size": width,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _layer_types(keys, config["num_hidden_layers"], 2),
    }


def _glm4(keys: Keys, config: JsonDict) -> JsonDict:
    if any(keys.by_layer("rope.dimension_sections", 3, 0)):
        keys.refuse("rope.dimension_sections", "only a rope without sections is")
    return {"partial_rotary_factor": config["rope_parameters"].pop("partial_rotary_factor", 1.0)}


def _glm4_moe(keys: Keys, config: JsonDict) -> JsonDict:
    keys.get("rope.dimension_sections")  # a text token has one position in all of them
    return {
        "partial_rotary_factor": config["rope_parameters"].pop("partial_rotary_factor", 1.0),
        "use_qk_norm": any(keys.layers_with("attn_q_norm.weight", config["num_hidden_layers"])),
        **_deepseek_experts(keys),
    }


def _deepseek_experts(keys: Keys) -> JsonDict:
    """Return the experts of DeepSeek and of models like it."""
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "n_group": keys.integer("expert_group_count", 0) or 1,
        "topk_group": keys.integer("expert_group_used_count", 0) or 1,
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def _deepseek2(keys: Keys, config: JsonDict) -> JsonDict:
    """Return the keys of DeepSeek-V3 or, with a softmax of the router's scores, of V2.

    Older files have whole heads, `attn_kv_b`. Later ones have the sizes of one head that reads the
    latents, and those of whole heads in keys of their own.
    """
    rank = keys.integer("attention.kv_lora_rank")
    rotated = keys.integer("rope.dimension_count")
    absorbed = keys.get("attention.key_length_mla") is not None
    whole = keys.integer("attention.key_length_mla" if absorbed else "attention.key_length")
    values = keys.integer("attention.value_length_mla" if absorbed else "attention.value_length")
    if absorbed:
        keys.require("attention.key_length", (rank + rotated,), rank + rotated)
        keys.require("attention.value_length", (rank,), rank)
    if keys.has(FREQUENCIES):
        raise CheckpointError(f"GGUF: {FREQUENCIES} is not implemented for {keys.architecture}")
    q_rank = keys.integer("attention.q_lora_rank", 0)
    if keys.has("blk.0.attn_q.weight"):
        q_rank = 0  # llama.cpp ignores the key in models without a latent of q
    scoring = keys.integer("expert_gating_func", 0) or _deepseek_scoring(keys, config)
    if scoring not in (_SOFTMAX, _SIGMOID):
        keys.refuse("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID} is")
    for name in ("head_dim", "num_key_value_heads"):
        config.pop(name, None)
    described = {
        **_deepseek_experts(keys),
        "q_lora_rank": q_rank or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": values,
        "rope_parameters": _with_mscale(keys, config["rope_parameters"]),
    }
    if scoring == _SIGMOID:
        return described
    greedy = described["n_group"] == 1
    return {
        **described,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "greedy" if greedy else "group_limited_greedy",
    }


def _deepseek_scoring(keys: Keys, config: JsonDict) -> int:
    """Return what llama.cpp takes for a missing `expert_gating_func`."""
    if config["num_hidden_layers"] in (47, 48) and config["vocab_size"] == 154880:
        return _SIGMOID  # GLM-4.7-Flash
    for tensor in ("exp_probs_b", "exp_probs_b.bias"):
        if any(keys.layers_with(tensor, config["num_hidden_layers"])):
            raise CheckpointError(
                f"GGUF metadata lacks {keys.full('expert_gating_func')}, and llama.cpp takes a softmax: that is not "
                f"implemented with tensors {tensor}"
            )
    return _SOFTMAX


def _with_mscale(keys: Keys, rope: JsonDict) -> JsonDict:
    """Return a YaRN with the factors of DeepSeek: the file has a tenth of the factor of scores, and
    llama.cpp takes the same for the factor of the rope.
    """
    tenth = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not tenth or rope["rope_type"] != "yarn":
        return rope
    factor = round(10 * tenth, 6)
    return {**rope, "mscale": factor, "mscale_all_dim": factor}


def _lfm2(keys: Keys, config: JsonDict) -> JsonDict:
    """Return the kinds of layers: those with no KV heads have a short convolution."""
    layers = config["num_hidden_layers"]
    heads = keys.by_layer("attention.head_count_kv", layers)
    counts = {count for count in heads if count}
    if len(counts) != 1:
        keys.refuse("attention.head_count_kv", "0, and one other number, is")
    return {
        "num_key_value_heads": counts.pop(),
        "layer_types": [_FULL if count else "conv" for count in heads],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": any(keys.layers_with("shortconv.conv.bias", layers)),
        "norm_eps": config.pop("rms_norm_eps"),
    }


def _lfm2_dense(keys: Keys, config: JsonDict) -> JsonDict:
    return {**_lfm2(keys, config), "block_auto_adjust_ff_dim": False}


def _lfm2_moe(keys: Keys, config: JsonDict) -> JsonDict:
    layers = config["num_hidden_layers"]
    biased = keys.layers_with("exp_probs_b.bias", layers)
    return {
        **_lfm2(keys, config),
        "use_expert_bias": any(biased),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def _delta_net(keys: Keys, config: JsonDict) -> JsonDict:
    """Return the delta nets of Qwen3-Next and Qwen3.5, and which layers have one."""
    layers = config["num_hidden_layers"]
    stateful = keys.flags("attention.recurrent_layers", layers)
    interval = keys.integer("full_attention_interval", 4)
    if stateful is None:
        stateful = [(index + 1) % max(interval, 1) != 0 for index in range(layers)]
    heads = keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if not heads or inner % heads:
        keys.refuse("ssm.inner_size", f"a multiple of ssm.time_step_rank = {heads} is")
    keys.get("rope.dimension_sections")  # a text token has one position in all of them
    return {
        "layer_types": [_STATEFUL if state else _FULL for state in stateful],
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def _qwen35_moe(keys: Keys, config: JsonDict) -> JsonDict:
    keys.require("expert_weights_scale", (0.0, 1.0), 0.0)
    return _delta_net(keys, config)


def _qwen3_next(keys: Keys, config: JsonDict) -> JsonDict:
    return {**_delta_net(keys, config), **_dense_layers(keys, config)}


def _ministral3(keys: Keys, config: JsonDict) -> JsonDict:
    """Return the rope of Ministral 3, whose queries are scaled by their position."""
    rope = config["rope_parameters"]
    beta = keys.number("attention.temperature_scale", 0.0)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    keys.require("expert_count", (0,), 0)
    keys.get("expert_used_count")
    if rope["rope_type"] != "yarn":
        if beta:
            keys.refuse(
                "attention.temperature_scale", "only 0 is, or a rope.scaling.type of 'yarn'"
            )
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
        }
    rope = {**rope, "llama_4_scaling_beta": beta}
    if multiplier:
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return {"rope_parameters": rope}


_KV_HEADS = frozenset({"attention.head_count_kv"})
_NEXT = "num_nextn_predict_layers"
_MTP = "mtp_num_hidden_layers"

ROWS: Mapping[str, Row] = {
    "llama": Row("llama", "LlamaForCausalLM", biased=_BOTH_BIASES, finish=_llama),
    "qwen2": Row("qwen2", "Qwen2ForCausalLM", constants={"use_sliding_window": False}, biased=()),
    "qwen3": Row("qwen3", "Qwen3ForCausalLM", constants={"use_sliding_window": False}),
    "gemma3": Row(
        "gemma3_text",
        "Gemma3ForCausalLM",
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        finish=_gemma3,
    ),
    "gemma2": Row(
        "gemma2",
        "Gemma2ForCausalLM",
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        finish=_gemma2,
    ),
    "phi3": Row("phi3", "Phi3ForCausalLM", biased=(), finish=_phi3),
    "qwen2moe": Row(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        keys=_EXPERTS | _NARROW | _SHARED,
        constants={"use_sliding_window": False, "norm_topk_prob": False},
        scoring=_SOFTMAX,
        finish=_qwen2_moe,
    ),
    # the divisor of weights is always their sum
    "qwen3moe": Row(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys=_EXPERTS | _NARROW,
        constants={"use_sliding_window": False, "norm_topk_prob": True},
        scoring=_SOFTMAX,
        finish=_dense_layers,
    ),
    # llama.cpp has this interval for every file
    "smollm3": Row(
        "smollm3",
        "SmolLM3ForCausalLM",
        constants={"no_rope_layer_interval": 4, "use_sliding_window": False},
        biased=_BOTH_BIASES,
    ),
    "olmo2": Row("olmo2", "Olmo2ForCausalLM", finish=_olmo2),
    "granite": Row("granite", "GraniteForCausalLM", biased=_BOTH_BIASES, finish=_granite),
    "granitemoe": Row(
        "granitemoe",
        "GraniteMoeForCausalLM",
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        scoring=_SOFTMAX,
        finish=_granite,
    ),
    # llama.cpp rounds the bounds of a YaRN to whole channels; the model was trained without
    "gpt-oss": Row(
        "gpt_oss",
        "GptOssForCausalLM",
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        scoring=_CHOSEN_SOFTMAX,
        yarn={"truncate": False},
        finish=_gpt_oss,
    ),
    "glm4": Row("glm4", "Glm4ForCausalLM", finish=_glm4),
    "glm4moe": Row(
        "glm4_moe", "Glm4MoeForCausalLM", scoring=_SIGMOID, predicting=_NEXT, finish=_glm4_moe
    ),
    "deepseek2": Row(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        biased=(),
        whole_rope=False,
        predicting=_NEXT,
        finish=_deepseek2,
    ),
    "lfm2": Row("lfm2", "Lfm2ForCausalLM", biased=(), by_layer=_KV_HEADS, finish=_lfm2_dense),
    "lfm2moe": Row(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        keys=_EXPERTS | _NARROW,
        constants={"norm_topk_prob": True},
        biased=(),
        scoring=_SIGMOID,
        by_layer=_KV_HEADS,
        finish=_lfm2_moe,
    ),
    "qwen35": Row("qwen3_5_text", "Qwen3_5ForCausalLM", predicting=_MTP, finish=_delta_net),
    "qwen35moe": Row(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        keys=_EXPERTS | _NARROW | _SHARED,
        scoring=_SOFTMAX,
        predicting=_MTP,
        finish=_qwen35_moe,
    ),
    "qwen3next": Row(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        keys=_EXPERTS | _NARROW | _SHARED,
        constants={"norm_topk_prob": True},
        scoring=_SOFTMAX,
        finish=_qwen3_next,
    ),
    "gemma4": Row(
        "gemma4_text",
        "Gemma4ForCausalLM",
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        whole_rope=False,
        by_layer=_KV_HEADS | {"feed_forward_length"},
        finish=_gemma4,
    ),
    "mistral3": Row("ministral3", "Ministral3ForCausalLM", biased=(), finish=_ministral3),
}
