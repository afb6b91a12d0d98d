"""The families of models that Freight runs, as data: one row for each model_type of a config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from freight.config.layer import NormKind, NormPlacement
from freight.errors import CheckpointError, choices


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Family:
    """What the models of one model_type have in common. A `..._key` is the key of config.json that has the value.

    architecture       the only value of `architectures`
    defaults           of keys that a config.json lacks, as transformers' configuration class has them
    keys               keys that this family has and others do not
    lacks              keys that every other family has and this one does not
    qkv_bias           whether q, k and v have biases whatever the value of `attention_bias`
    norm_kind, norm_eps  of every norm; an eps of None is read from `rms_norm_eps`
    norm_offset        what is added to a stored norm weight
    scales_embedding   whether the embedding's rows are multiplied by the square root of `hidden_size`
    mixed_windows      whether layers may differ in their window
    gated              whether the feed-forward has a gate
    activation_key     names the activation; the other one is not read
    width_key          of the values between the projections of the feed-forward
    bias_keys          whether attention and feed-forward have biases, where the family has that key
    position_offset    row of the learned embedding of position 0; None: positions are rotary
    theta              of rotary embedding, where config.json names none
    local_theta        the same of layers with a window, if these have a rope of their own (`rope_local_base_freq`)
    partial_rotary     whether `partial_rotary_factor` may leave channels unrotated
    bodies             what may precede the names of the decoder's tensors, and that of its head; the first is usual
    text_type          the model_type in `text_config`, where the decoder is described, if it is one part of the model
    wrapper_keys       keys outside of `text_config`; they describe the other parts
    """

    architecture: str
    defaults: Mapping[str, Any]
    keys: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: NormPlacement = NormPlacement.PRE
    norm_kind: NormKind = NormKind.RMS
    norm_eps: float | None = None
    norm_offset: float = 0.0
    scales_embedding: bool = False
    mixed_windows: bool = True
    gated: bool = True
    activation_key: str = "hidden_act"
    width_key: str = "intermediate_size"
    bias_keys: tuple[str, str] = ("attention_bias", "mlp_bias")
    position_offset: int | None = None
    theta: float = 10000.0
    local_theta: float | None = None
    partial_rotary: bool = False
    bodies: tuple[tuple[str, str], ...] = (("model.", ""),)
    text_type: str | None = None
    wrapper_keys: frozenset[str] = frozenset()


_WINDOW_KEYS = _words("sliding_window use_sliding_window layer_types")
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "use_sliding_window": True,
}
_GEMMA_KEYS = _words("query_pre_attn_scalar attention_bias sliding_window layer_types cache_implementation")
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    _GEMMA_KEYS | _words("sliding_window_pattern rope_local_base_freq"),
    qk_norm=True,
    norms=NormPlacement.SANDWICH,
    norm_offset=1.0,
    scales_embedding=True,
    activation_key="hidden_activation",
    theta=1e6,
    local_theta=1e4,
)

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        _words("attention_bias mlp_bias layer_types"),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": 4096,
            "use_sliding_window": True,
        },
        _WINDOW_KEYS,
        mixed_windows=False,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        _WINDOW_KEYS | {"max_window_layers"},
        qkv_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        _WINDOW_KEYS | {"max_window_layers", "attention_bias"},
        qk_norm=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _GEMMA_KEYS,
        norms=NormPlacement.SANDWICH,
        norm_offset=1.0,
        scales_embedding=True,
        activation_key="hidden_activation",
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(
        _GEMMA3,
        architecture="Gemma3ForConditionalGeneration",
        bodies=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        text_type="gemma3_text",
        wrapper_keys=_words("vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index"),
    ),
    "phi3": Family(
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
        _words("sliding_window attention_bias mlp_bias lm_head_bias"),
        mixed_windows=False,
        partial_rotary=True,
    ),
    "opt": Family(
        "OPTForCausalLM",
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "enable_bias": True,
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        },
        _words("ffn_dim activation_function enable_bias word_embed_proj_dim")
        | _words("do_layer_norm_before layer_norm_elementwise_affine _remove_final_layer_norm"),
        _words("intermediate_size hidden_act hidden_activation num_key_value_heads head_dim rms_norm_eps rope_theta")
        | _words("rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor")
        | _words("attn_logit_softcapping final_logit_softcapping"),
        norm_kind=NormKind.LAYER,
        norm_eps=1e-5,
        gated=False,
        activation_key="activation_function",
        width_key="ffn_dim",
        bias_keys=("enable_bias", "enable_bias"),
        position_offset=2,
        bodies=(("model.decoder.", ""), ("decoder.", "")),  # facebook's own files have the second
    ),
}

# keys that every family reads
READ = _words(
    """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    original_max_position_embeddings tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id
    quantization_config compression_config kv_cache_torch_dtype kv_cache_dtype freight
    attn_logit_softcapping final_logit_softcapping hidden_act hidden_activation partial_rotary_factor
    """
)
# of these, keys that a model of several parts has outside of `text_config`, and that hold for the decoder
_SHARED = _words(
    """
    dtype torch_dtype bos_token_id eos_token_id tie_word_embeddings quantization_config compression_config
    kv_cache_torch_dtype kv_cache_dtype freight
    """
)
# training, bookkeeping, and defaults of transformers' generate()
HARMLESS = _words(
    """
    transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_dropout embd_dropout
    resid_pdrop embd_pdrop
    pad_token_id sep_token_id decoder_start_token_id tokenizer_class auto_map name_or_path torchscript use_bfloat16
    id2label label2id num_labels problem_type task_specific_params finetuning_task output_attentions
    output_hidden_states return_dict return_dict_in_generate output_scores chunk_size_feed_forward
    max_sequence_length max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty begin_suppress_tokens
    activation_dropout dropout layerdrop init_std prefix
    attn_implementation unsloth_version unsloth_fixed is_llama_config transformers.js_config is_decoder
    """
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {  # keys that change the computation, and the values that do not
    "rotary_pct": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "pretraining_tp": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "rope_interleaved": (),
    "num_experts": (),
    "num_local_experts": (),
    "is_encoder_decoder": (),
    "add_cross_attention": (),
}
# an explicit null of these is a value of its own; of any other key it means the default
_NULLABLE = _words(
    """
    num_key_value_heads head_dim sliding_window bos_token_id eos_token_id attn_logit_softcapping
    final_logit_softcapping
    """
)


def find_family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """(model_type, its row). Raises CheckpointError for a model_type, or an architecture of it, that is not here."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(f"config.json: model_type {model_type!r} is not implemented; {choices(FAMILIES)} are")
    assert isinstance(model_type, str)
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise CheckpointError(
            f"config.json: architectures {architectures!r} with model_type {model_type!r} is not implemented; "
            f"Freight runs [{family.architecture!r}]"
        )
    return model_type, family


def decoder_config(config: Mapping[str, Any]) -> tuple[str, Family, Mapping[str, Any]]:
    """(model_type, its row, the keys that describe the decoder), out of `text_config` if that is where they are.

    Raises CheckpointError for keys that are neither read, nor harmless, nor switched off (null, false, empty).
    """
    model_type, family = find_family(config)
    own = (READ - family.lacks) | family.keys | ({"attention_bias"} if family.qkv_bias else set())
    if family.text_type is None:
        _refuse_unknown_keys(config, own, model_type)
        return model_type, family, config
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", family.text_type) != family.text_type:
        raise CheckpointError(
            f"config.json: text_config = {text!r} with model_type {model_type!r} is not implemented; an object of "
            f"model_type {family.text_type!r} is"
        )
    _refuse_unknown_keys(text, own, family.text_type)
    outside = _SHARED | family.wrapper_keys | {"model_type", "architectures", "text_config"}
    _refuse_unknown_keys(config, outside, model_type)
    return model_type, family, {**text, **{key: config[key] for key in sorted(_SHARED) if config.get(key) is not None}}


def _refuse_unknown_keys(config: Mapping[str, Any], known: frozenset[str], model_type: str) -> None:
    for key, value in config.items():
        off = value is None or value is False or value in ({}, [], "")
        if off or key in known or key in HARMLESS or key.startswith("_"):
            continue
        if key not in NEUTRAL:
            raise CheckpointError(
                f"config.json: {key} = {value!r} is unknown to Freight for model_type {model_type}; it may change what "
                "the model computes. If it does not, remove it from config.json"
            )
        if value not in NEUTRAL[key]:
            only = f"only {choices(map(repr, NEUTRAL[key]))} is" if NEUTRAL[key] else "only null is"
            raise CheckpointError(f"config.json: {key} = {value!r} is not implemented; {only}")


def with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """`config` with the family's defaults of what it lacks."""
    return {**family.defaults, **{k: v for k, v in config.items() if v is not None or k in _NULLABLE}}
