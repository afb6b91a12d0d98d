"""The keys of a config.json: read, refused, or skipped. Imports no torch.

A key that no row reads is refused if it decides what some model computes: `computing_keys.txt`
lists these (`tools/config_keys.py`). It is skipped if its value switches it off (null, false, 0,
empty), or if the user names it (`--ignore-config-keys`). Every other key is skipped and logged at
start-up, because publishers add keys freely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from freight.base.fields import JsonObject, shortened
from freight.errors import CheckpointError, ConfigError, choices, nearest
from freight.model.config.family import Family, words
from freight.model.config.mechanisms import refuse_mechanisms, refuse_uncompared_architecture
from freight.model.config.model import UnreadKeys
from freight.model.config.pooling import headless_names
from freight.model.config.registry import FAMILIES

# keys that every family reads
READ = words(
    """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    original_max_position_embeddings tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id
    quantization_config compression_config kv_cache_torch_dtype kv_cache_dtype freight
    attn_logit_softcapping final_logit_softcapping hidden_act hidden_activation partial_rotary_factor is_causal
    """
)
# of these, outer keys that hold for the decoder of a model with several parts
_SHARED = words(
    """
    dtype torch_dtype bos_token_id eos_token_id tie_word_embeddings quantization_config compression_config
    kv_cache_torch_dtype kv_cache_dtype freight
    """
)
# Training, bookkeeping, and defaults of transformers' generate(). pretraining_tp splits products
# into parts of the same sum; max_window_layers matters to Qwen's rows only, but files made from
# Qwen's have it too; model_max_length belongs to tokenizers, except in Kimi's row.
HARMLESS = words(
    """
    transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_dropout embd_dropout
    resid_pdrop embd_pdrop attention_probs_dropout_prob hidden_dropout_prob classifier_dropout embedding_dropout
    mlp_dropout gradient_checkpointing output_past initializer_cutoff_factor deterministic_flash_attn cls_token_id
    sparse_prediction sparse_pred_ignore_index
    pad_token_id sep_token_id decoder_start_token_id tokenizer_class auto_map name_or_path torchscript use_bfloat16
    id2label label2id num_labels problem_type task_specific_params finetuning_task output_attentions
    output_hidden_states return_dict return_dict_in_generate output_scores chunk_size_feed_forward
    max_sequence_length max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty begin_suppress_tokens
    suppress_tokens bad_words_ids forced_bos_token_id forced_eos_token_id remove_invalid_values tf_legacy_loss
    output_router_logits router_aux_loss_coef router_jitter_noise activation_dropout dropout layerdrop init_std prefix
    attn_implementation residual_dropout unsloth_version unsloth_fixed is_llama_config transformers.js_config is_decoder
    model_max_length pretraining_tp ep_size pruned_heads cache_implementation max_window_layers
    aux_loss_alpha seq_aux block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init
    """
)
# keys that change the computation -> the values at which they do not
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "rotary_pct": (1,),
    "rope_ratio": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
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
# an explicit null of these keys is a value; for any other key it means the default
_NULLABLE = words(
    """
    num_key_value_heads head_dim sliding_window bos_token_id eos_token_id attn_logit_softcapping
    final_logit_softcapping attention_value_scale q_lora_rank norm_topk_prob rope_interleave
    """
)


# fields that the row of a decoder takes from the row of the model around it
_OF_WRAPPER = ("architecture", "tensors", "bodies", "text_type", "text_key", "flat", "wrapper_keys")


class _EveryKey(Collection[str]):
    """A collection that contains any key and lists none."""

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


# ignores every key that would be refused, for callers that do not compute the model
EVERY_KEY = _EveryKey()


@cache
def computing_keys() -> frozenset[str]:
    """Return the keys that decide what some language model computes: those of the list, and all
    that the rows read.
    """
    lines = Path(__file__).with_name("computing_keys.txt").read_text(encoding="utf-8").splitlines()
    keys = READ | {line for line in lines if not line.startswith("#")}
    for family in FAMILIES.values():
        keys |= family.keys | family.fixed.keys() | family.synonyms.keys() | family.next_token_keys
        keys |= family.moe.keys if family.moe is not None else frozenset()
    return keys


def find_family(config: JsonObject) -> tuple[str, Family]:
    """Return (model_type, its row). Raises CheckpointError for an unknown model_type, and for an
    architecture that its row does not have.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not implemented; {choices(FAMILIES)} are"
        )
    assert isinstance(model_type, str)
    architectures = config.get("architectures") or [family.architecture]
    refuse_uncompared_architecture(architectures)
    # Spellings vary: the first Llama files have LLaMAForCausalLM, and transformers writes
    # Kimi_K25ForConditionalGeneration
    names = (family.architecture, *family.same, *headless_names(family.architecture))
    known = (str([name]).lower().replace("_", "") for name in names)
    if str(architectures).lower().replace("_", "") not in known:
        in_parts = (
            family.text_type is not None and not family.flat and not config.get(family.text_key)
        )
        lacks = ""
        if in_parts:
            lacks = (
                f". config.json lacks {family.text_key}, in which it describes the language model"
            )
        raise CheckpointError(
            f"config.json: architectures {architectures!r} with model_type {model_type!r} is not implemented; "
            f"Freight runs [{family.architecture!r}]{lacks}"
        )
    return model_type, family


def decoder_config(config: JsonObject) -> tuple[Family, JsonObject]:
    """Return (the decoder's row, the keys that describe it), taken from `Family.text_key` if it is
    there.
    """
    family, text_type, text = _decoder_row(config, find_family(config)[1])
    if text_type is None:
        return family, config
    return family, {
        **text,
        **{key: config[key] for key in sorted(_SHARED) if config.get(key) is not None},
    }


def check_keys(config: JsonObject, ignore: Collection[str] = ()) -> UnreadKeys:
    """Return the keys of `config` that are not read. `ignore` names keys to accept that would be
    refused.

    Raises CheckpointError for a key that computes and is not implemented, and for a value that is
    not in `Family.fixed`, false included; ConfigError for a key in `ignore` that is read or absent.
    """
    model_type, family = find_family(config)
    family, text_type, text = _decoder_row(config, family)
    read = (READ - family.lacks) | family.keys | family.next_token_keys | frozenset(family.synonyms)
    read |= {"attention_bias"} if family.qkv_bias else set()
    read |= family.moe.keys if family.moe is not None else set()
    read |= family.wrapper_keys  # transformers repeats them in `text_config`
    parts = [_Part(text, read, text_type or model_type, family.fixed)]
    if text_type is not None:
        outside = _SHARED | family.wrapper_keys | {"model_type", "architectures", family.text_key}
        outside |= {key for key in config if config[key] == text.get(key)}
        outside |= read if family.flat else set()  # repeated in `text_config`, which decides
        parts.append(_Part(config, outside, model_type))
    for name in ignore:
        _require_ignorable(name, parts)
    keys_of: dict[str, dict[str, None]] = {}  # by kind, each key once and in the file's order
    for part in parts:
        for key in part.config:
            keys_of.setdefault(part.kind(key, ignore), {})[key] = None
    return UnreadKeys(
        unknown=tuple(keys_of.get(_UNKNOWN, {})),
        harmless=tuple(keys_of.get(_HARMLESS, {})),
        ignored=tuple(keys_of.get(_IGNORED, {})),
    )


_READ = "read"
_UNKNOWN = "unknown"
_HARMLESS = "harmless"
_IGNORED = "ignored"


@dataclass(frozen=True)
class _Part:
    """An object of a config.json: all of it, or its `text_config`. `fixed` is the family's."""

    config: JsonObject
    read: frozenset[str]
    model_type: str
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def kind(self, key: str, ignore: Collection[str]) -> str:
        """Return the class of a key. Raises CheckpointError for one that computes and is not
        implemented.
        """
        if key in self.read:
            return _READ
        if key in HARMLESS or key.startswith("_"):
            return _HARMLESS
        obstacle = self._obstacle(key)
        if obstacle is not None and key not in ignore:
            raise CheckpointError(
                f"{obstacle}. --ignore-config-keys {key} ignores it, and results may differ"
            )
        if obstacle is not None:
            return _IGNORED
        decided = key in self.fixed or key in NEUTRAL or key in computing_keys()
        return _READ if decided else _UNKNOWN

    def _obstacle(self, key: str) -> str | None:
        """Return why a key must be refused; None if it need not be."""
        value = self.config[key]
        if (
            value is None
            or value in ({}, [], "")
            or (type(value) in (bool, int) and not value and key not in self.fixed)
        ):
            return None  # switched off
        allowed = self.fixed.get(key, NEUTRAL.get(key))
        if allowed is None:
            if key not in computing_keys():
                return None
            return (
                f"config.json: {key} = {shortened(value, 80)} decides what a model computes, and Freight does not "
                f"implement it for model_type {self.model_type}"
            )
        if all(item in allowed for item in (value if isinstance(value, list) else [value])):
            return None
        only = f"only {choices(map(repr, allowed))} is" if allowed else "only null is"
        return f"config.json: {key} = {shortened(value, 80)} is not implemented; {only}"


def _require_ignorable(name: str, parts: Sequence[_Part]) -> None:
    """Raise ConfigError for a key that --ignore-config-keys cannot skip."""
    if not any(name in part.config for part in parts):
        known = sorted({key for part in parts for key in part.config})
        raise ConfigError(
            f"--ignore-config-keys {name}: config.json has no such key{nearest(name, known)}"
        )
    part = next((part for part in parts if name in part.config and name in part.read), None)
    if part is not None:
        raise ConfigError(
            f"--ignore-config-keys {name}: Freight reads this key of model_type {part.model_type}; only keys that it "
            "does not implement can be ignored"
        )


def _decoder_row(
    config: JsonObject, family: Family
) -> tuple[Family, str, JsonObject] | tuple[Family, None, JsonObject]:
    """Return (the decoder's row, the model_type in `text_config`, that object), or (family, None,
    config) for a config without one.

    The decoder's row has the wrapper's architecture, tensor names and outer keys.
    """
    if family.text_type is None:
        return family, None, config
    text = config.get(family.text_key)
    types = (family.text_type, *family.other_texts)
    if text is None and family.flat:
        return family, None, config
    text_type = text.get("model_type", family.text_type) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or text_type not in types:
        refuse_mechanisms(config, config.get("model_type"))
        decoder = f"{family.text_key} = {shortened(text, 80)}"
        if isinstance(text, Mapping):
            decoder = f"{family.text_key} of model_type {text_type!r}"
        raise CheckpointError(
            f"config.json: {decoder} with model_type {config.get('model_type')!r} is not implemented; an object of "
            f"model_type {choices(map(repr, types))} is"
        )
    if text_type == family.text_type:
        return family, text_type, text
    outer = {name: getattr(family, name) for name in _OF_WRAPPER}
    return replace(FAMILIES[text_type], **outer), text_type, text


def with_defaults(config: JsonObject, family: Family) -> dict[str, Any]:
    """Return `config` with the family's defaults filled in, and each key under the name that is
    read.

    Raises CheckpointError for two names of one value that differ.
    """
    declared = {
        key: value for key, value in config.items() if value is not None or key in _NULLABLE
    }
    for name, read in family.synonyms.items():
        if name in config and name not in declared and read in _NULLABLE:
            declared.setdefault(read, None)
        value = declared.pop(name, None)
        if value is not None and declared.setdefault(read, value) != value:
            raise CheckpointError(
                f"config.json contradicts itself: {name} = {value!r}, but {read} = {declared[read]!r}"
            )
    return {**family.defaults, **declared}
