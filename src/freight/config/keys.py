"""The keys of a config.json: which are read, which do not matter, and which are refused. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freight.config.families import FAMILIES
from freight.config.family import Family, words
from freight.errors import CheckpointError, choices

# keys that every family reads
READ = words(
    """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    original_max_position_embeddings tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id
    quantization_config compression_config kv_cache_torch_dtype kv_cache_dtype freight
    attn_logit_softcapping final_logit_softcapping hidden_act hidden_activation partial_rotary_factor
    """
)
# of these, keys that a model of several parts has outside of `text_config`, and that hold for the decoder
_SHARED = words(
    """
    dtype torch_dtype bos_token_id eos_token_id tie_word_embeddings quantization_config compression_config
    kv_cache_torch_dtype kv_cache_dtype freight
    """
)
# training, bookkeeping, and defaults of transformers' generate()
HARMLESS = words(
    """
    transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_dropout embd_dropout
    resid_pdrop embd_pdrop
    pad_token_id sep_token_id decoder_start_token_id tokenizer_class auto_map name_or_path torchscript use_bfloat16
    id2label label2id num_labels problem_type task_specific_params finetuning_task output_attentions
    output_hidden_states return_dict return_dict_in_generate output_scores chunk_size_feed_forward
    max_sequence_length max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty begin_suppress_tokens
    output_router_logits router_aux_loss_coef router_jitter_noise activation_dropout dropout layerdrop init_std prefix
    attn_implementation residual_dropout unsloth_version unsloth_fixed is_llama_config transformers.js_config is_decoder
    """
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {  # keys that change the computation, and the values that do not
    "rotary_pct": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "pretraining_tp": (1,),
    "ep_size": (1,),
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
_NONE: Mapping[str, tuple[object, ...]] = {}
# an explicit null of these is a value of its own; of any other key it means the default
_NULLABLE = words(
    """
    num_key_value_heads head_dim sliding_window bos_token_id eos_token_id attn_logit_softcapping
    final_logit_softcapping
    """
)


# what the row of a decoder takes from that of the model around it
_OF_WRAPPER = ("architecture", "bodies", "text_type", "text_key", "flat", "wrapper_keys")


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
    """(model_type, its row, the keys that describe the decoder), out of `Family.text_key` if that is where they are.

    Raises CheckpointError for keys that are neither read, nor harmless, nor switched off (null, false, empty), and for
    another value of a key in `Family.fixed`, false too.
    """
    model_type, family = find_family(config)
    family, text_type, text = _decoder_row(config, family)
    own = (READ - family.lacks) | family.keys | family.next_token_keys
    own |= {"attention_bias"} if family.qkv_bias else set()
    own |= family.moe.keys if family.moe is not None else set()
    own |= family.wrapper_keys  # transformers repeats them in `text_config`
    if text_type is None:
        _refuse_unknown_keys(config, own, model_type, family.fixed)
        return model_type, family, config
    _refuse_unknown_keys(text, own, text_type, family.fixed)
    outside = _SHARED | family.wrapper_keys | {"model_type", "architectures", family.text_key}
    outside |= own if family.flat else set()  # `text_config` has them again, and decides
    _refuse_unknown_keys(config, outside, model_type)
    return model_type, family, {**text, **{key: config[key] for key in sorted(_SHARED) if config.get(key) is not None}}


def _decoder_row(
    config: Mapping[str, Any], family: Family
) -> tuple[Family, str, Mapping[str, Any]] | tuple[Family, None, Mapping[str, Any]]:
    """(the row of the decoder, the model_type in `text_config`, that object), or (family, None, config) without one.

    The decoder's row has the wrapper's architecture, names of tensors and keys outside.
    """
    if family.text_type is None:
        return family, None, config
    text, types = config.get(family.text_key), (family.text_type, *family.other_texts)
    if text is None and family.flat:
        return family, None, config
    text_type = text.get("model_type", family.text_type) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or text_type not in types:
        raise CheckpointError(
            f"config.json: {family.text_key} = {text!r} with model_type {config.get('model_type')!r} is not "
            f"implemented; an object of model_type {choices(map(repr, types))} is"
        )
    if text_type == family.text_type:
        return family, text_type, text
    outer = {name: getattr(family, name) for name in _OF_WRAPPER}
    return replace(FAMILIES[text_type], **outer), text_type, text


def _refuse_unknown_keys(
    config: Mapping[str, Any], known: frozenset[str], model_type: str, fixed: Mapping[str, tuple[object, ...]] = _NONE
) -> None:
    neutral = {**NEUTRAL, **fixed}
    for key, value in config.items():
        off = value is None or value in ({}, [], "") or (value is False and key not in fixed)
        if off or key in known or key in HARMLESS or key.startswith("_"):
            continue
        if key not in neutral:
            raise CheckpointError(
                f"config.json: {key} = {value!r} is unknown to Freight for model_type {model_type}; it may change what "
                "the model computes. If it does not, remove it from config.json"
            )
        if any(one not in neutral[key] for one in (value if isinstance(value, list) else [value])):
            only = f"only {choices(map(repr, neutral[key]))} is" if neutral[key] else "only null is"
            raise CheckpointError(f"config.json: {key} = {value!r} is not implemented; {only}")


def with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """`config` with the family's defaults of what it lacks."""
    return {**family.defaults, **{k: v for k, v in config.items() if v is not None or k in _NULLABLE}}
