"""ModelConfig: a model's hyperparameters, read from a config.json. Imports no torch.

Every key of config.json is either used, on a list of keys that do not affect the model, or has a value that disables
its feature. Any other key raises a CheckpointError that names it and its value, because ignoring it could silently
change the output. An absent key has the default of transformers' configuration class of that model_type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from freight.config.fields import flag, integer, number, token_ids
from freight.config.layer import AttentionConfig, DenseConfig, LayerConfig
from freight.config.rope import RopeConfig as RopeConfig
from freight.config.rope import parse_rope
from freight.errors import CheckpointError, choices
from freight.fp8.formats import COMPUTE_FORMATS, Format


@dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters of one decoder.

    layers                 from the first to the last
    ropes                  the rotary embeddings that layers name by index
    rms_norm_eps           of every norm
    norm_offset            what is added to a stored norm weight; if not 0, norms multiply in float32
    embedding_multiplier   multiplies the embedding's rows; None: nothing does
    logit_soft_cap         a logit x becomes logit_soft_cap * tanh(x / logit_soft_cap); None: unbounded
    checkpoint_format      the dtype that config.json names for the weights
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    norm_offset: float
    embedding_multiplier: float | None
    tie_word_embeddings: bool
    logit_soft_cap: float | None
    checkpoint_format: Format
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def position_limit(self) -> int:
        """Positions that the ropes cover; linear and yarn scaling may reach past `max_position_embeddings`."""
        return max(self.max_position_embeddings, *(self._covered(rope) for rope in self.ropes))

    def _covered(self, rope: RopeConfig) -> int:
        p = rope.parameters
        if rope.kind == "linear":
            return int(self.max_position_embeddings * p["factor"])
        if rope.kind == "yarn":
            return int(p["original_max_position_embeddings"] * p["factor"])
        return 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class _Family:
    """The architecture of one model_type, and its defaults of keys that config.json lacks."""

    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: one per attention head
    head_dim: int | None = None  # None: hidden_size / heads
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    sliding_window: int | None = None
    windowed: bool = False  # whether a window applies when `use_sliding_window` is absent
    window_from: int = 0  # `max_window_layers`: layers from this one on have the window
    qkv_bias: bool = False
    qk_norm: bool = False
    keys: frozenset[str] = frozenset()  # keys that this family has and others do not


_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "layer_types"})
_FAMILIES = {
    "llama": _Family(
        "LlamaForCausalLM",
        2048,
        bos_token_id=1,
        eos_token_id=2,
        keys=frozenset({"attention_bias", "mlp_bias", "layer_types"}),
    ),
    "mistral": _Family(
        "MistralForCausalLM",
        131072,
        num_kv_heads=8,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=4096,
        windowed=True,
        keys=_WINDOW_KEYS,
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        32768,
        num_kv_heads=32,
        sliding_window=4096,
        window_from=28,
        qkv_bias=True,  # always, whatever the value of `attention_bias`
        keys=_WINDOW_KEYS | {"max_window_layers"},
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        32768,
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        window_from=28,
        qk_norm=True,
        keys=_WINDOW_KEYS | {"max_window_layers", "attention_bias"},
    ),
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    original_max_position_embeddings tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id
    quantization_config compression_config kv_cache_torch_dtype kv_cache_dtype freight
    attn_logit_softcapping final_logit_softcapping
    """
)
# training, bookkeeping, and defaults of transformers' generate()
_HARMLESS = _words(
    """
    transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_dropout embd_dropout
    pad_token_id sep_token_id decoder_start_token_id tokenizer_class auto_map name_or_path torchscript use_bfloat16
    id2label label2id num_labels problem_type task_specific_params finetuning_task output_attentions
    output_hidden_states return_dict return_dict_in_generate output_scores chunk_size_feed_forward
    max_sequence_length max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty begin_suppress_tokens
    attn_implementation unsloth_version unsloth_fixed is_llama_config transformers.js_config is_decoder
    """
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {  # keys that change the computation, and the values that do not
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
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


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read the content of a config.json. Raises CheckpointError for what is missing, contradictory or not implemented.

    A config.json that names no dtype means float32, as it did before transformers wrote one.
    """
    model_type, family = _family(config)
    _refuse_unknown_keys(config, model_type, family)
    heads = integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", family.num_kv_heads) if _has_kv_heads(config, family) else heads
    hidden_size = integer(config, "hidden_size")
    num_layers = integer(config, "num_hidden_layers")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json contradicts itself: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    limit = integer(config, "max_position_embeddings", family.max_position_embeddings)
    attention_bias = "attention_bias" in family.keys and flag(config, "attention_bias")
    head_dim = _head_dim(config, family, hidden_size, heads)
    mixer = AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        soft_cap=_soft_cap(config, "attn_logit_softcapping"),
    )
    feed_forward = DenseConfig(integer(config, "intermediate_size"), bias=flag(config, "mlp_bias"))
    windows = _windows(config, family, num_layers)
    return ModelConfig(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(LayerConfig(replace(mixer, window=window), feed_forward) for window in windows),
        ropes=(parse_rope(config, limit, head_dim),),
        max_position_embeddings=limit,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        norm_offset=0.0,
        embedding_multiplier=None,
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping"),
        checkpoint_format=_checkpoint_format(config),
        bos_token_id=next(iter(token_ids(config, "bos_token_id", family.bos_token_id)), None),
        eos_token_ids=token_ids(config, "eos_token_id", family.eos_token_id),
    )


def stop_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> frozenset[int]:
    """The ids that end a completion: the union of config.json's and generation_config.json's `eos_token_id`.

    The default of the model_type applies only if neither file has that key.
    """
    generation = generation_config or {}
    default = None if "eos_token_id" in generation else _family(config)[1].eos_token_id
    own = token_ids(config, "eos_token_id", default)
    return frozenset(own) | frozenset(token_ids(generation, "eos_token_id", None))


def _family(config: Mapping[str, Any]) -> tuple[str, _Family]:
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(f"config.json: model_type {model_type!r} is not implemented; {choices(_FAMILIES)} are")
    assert isinstance(model_type, str)
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise CheckpointError(
            f"config.json: architectures {architectures!r} with model_type {model_type!r} is not implemented; "
            f"Freight runs [{family.architecture!r}]"
        )
    return model_type, family


def _refuse_unknown_keys(config: Mapping[str, Any], model_type: str, family: _Family) -> None:
    """Every key must be read, harmless, or switched off (null, false, empty)."""
    known = _READ | _HARMLESS | family.keys | ({"attention_bias"} if family.qkv_bias else set())
    for key, value in config.items():
        off = value is None or value is False or value in ({}, [], "")
        if off or key in known or key.startswith("_"):
            continue
        if key not in _NEUTRAL:
            raise CheckpointError(
                f"config.json: {key} = {value!r} is unknown to Freight for model_type {model_type}; it may change what "
                "the model computes. If it does not, remove it from config.json"
            )
        if value not in _NEUTRAL[key]:
            only = f"only {choices(map(repr, _NEUTRAL[key]))} is" if _NEUTRAL[key] else "only null is"
            raise CheckpointError(f"config.json: {key} = {value!r} is not implemented; {only}")


def _has_kv_heads(config: Mapping[str, Any], family: _Family) -> bool:
    """An explicit null means one KV head per attention head, as does absence where the family has no default."""
    return config.get("num_key_value_heads", family.num_kv_heads) is not None


def _head_dim(config: Mapping[str, Any], family: _Family, hidden_size: int, heads: int) -> int:
    if config.get("head_dim", family.head_dim) is not None:
        head_dim = integer(config, "head_dim", family.head_dim)
    elif hidden_size % heads:
        raise CheckpointError(
            f"config.json contradicts itself: hidden_size = {hidden_size} is not a multiple of "
            f"num_attention_heads = {heads}, and there is no head_dim"
        )
    else:
        head_dim = hidden_size // heads
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim = {head_dim} is odd; rotary embedding rotates pairs of channels")
    return head_dim


def _windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` decides, else `max_window_layers`, else all layers."""
    window = config.get("sliding_window", family.sliding_window)
    if not flag(config, "use_sliding_window", family.windowed):
        window = None
    elif window is not None:
        window = integer(config, "sliding_window", family.sliding_window)
    first = integer(config, "max_window_layers", family.window_from, least=0)
    default = [window is not None and index >= first for index in range(num_layers)]
    layer_types = config.get("layer_types")
    if not layer_types:
        return tuple(window if slides else None for slides in default)
    kinds = {"full_attention": False, "attention": False, "sliding_attention": True}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json contradicts itself: layer_types = {layer_types!r} is not a list of "
            f"num_hidden_layers = {num_layers} entries"
        )
    for kind in layer_types:
        if kind not in kinds:
            raise CheckpointError(
                f"config.json: layer_types has {kind!r}, which is not implemented; {choices(kinds)} are"
            )
    slides = [kinds[kind] for kind in layer_types]
    if window is None and any(slides):
        raise CheckpointError(
            "config.json contradicts itself: layer_types has 'sliding_attention', but sliding_window = "
            f"{config.get('sliding_window')!r} with use_sliding_window = {config.get('use_sliding_window')!r}"
        )
    if family.windowed and slides != default:
        raise CheckpointError(
            f"config.json: layer_types = {layer_types!r} with sliding_window = {window}: "
            f"in {family.architecture} all layers have the same window"
        )
    return tuple(window if slide else None for slide in slides)


def _soft_cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def _checkpoint_format(config: Mapping[str, Any]) -> Format:
    declared = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    if len(set(map(str, declared.values()))) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: dtype = {declared['dtype']}, torch_dtype = {declared['torch_dtype']}"
        )
    name = next(iter(declared.values()), Format.FLOAT32)
    if name not in tuple(COMPUTE_FORMATS):
        raise CheckpointError(f"config.json: dtype {name!r} is not implemented; {choices(COMPUTE_FORMATS)} are")
    return Format(name)
