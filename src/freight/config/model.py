"""ModelConfig: a model's hyperparameters, read from a config.json. Imports no torch.

Every key of config.json is either used, on a list of keys that do not affect the model, or has a value that disables
its feature. Any other key raises a CheckpointError that names it and its value, because ignoring it could silently
change the output. An absent key has the default of transformers' configuration class of that model_type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from freight.config.families import BODIES, Family, decoder_config, find_family, with_defaults
from freight.config.fields import flag, integer, number, token_ids
from freight.config.layer import AttentionConfig, DenseConfig, LayerConfig
from freight.config.rope import RopeConfig as RopeConfig
from freight.config.rope import parse_ropes
from freight.errors import CheckpointError, choices
from freight.fp8.formats import COMPUTE_FORMATS, Format
from freight.operands.activation import GatedActivation


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
    prefixes               what precedes the names of the decoder's tensors in the checkpoint, and the name of its head
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
    prefixes: tuple[str, str] = ("model.", "")

    @property
    def position_limit(self) -> int:
        """Positions that the ropes cover; linear and yarn scaling may reach past `max_position_embeddings`."""
        return max((self.max_position_embeddings, *map(self._covered, self.ropes)))

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


_ACTIVATIONS = {
    "silu": GatedActivation.SILU,
    "swish": GatedActivation.SILU,
    "gelu_pytorch_tanh": GatedActivation.GELU_TANH,
}


def parse_model_config(config: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelConfig:
    """Read the content of a config.json. Raises CheckpointError for what is missing, contradictory or not implemented.

    `tensors` are the names of the checkpoint's tensors: where the decoder is one part of a model, they show where.
    A config.json that names no dtype means float32, as it did before transformers wrote one.
    """
    model_type, family, config = decoder_config(config)
    config = with_defaults(config, family)
    hidden_size = integer(config, "hidden_size")
    limit = integer(config, "max_position_embeddings")
    feed_forward = DenseConfig(
        integer(config, "intermediate_size"), _activation(config, family), flag(config, "mlp_bias")
    )
    mixer = _mixer(config, family, hidden_size)
    local = 0 if family.local_theta is None else 1  # the rope of layers with a window
    layers = [
        LayerConfig(replace(mixer, window=window, rope=0 if window is None else local), feed_forward, family.norms)
        for window in _windows(config, family, integer(config, "num_hidden_layers"))
    ]
    return ModelConfig(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        ropes=parse_ropes(config, family, limit, mixer.k_dim),
        max_position_embeddings=limit,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        norm_offset=family.norm_offset,
        embedding_multiplier=hidden_size**0.5 if family.scales_embedding else None,
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping"),
        checkpoint_format=_checkpoint_format(config),
        bos_token_id=next(iter(token_ids(config, "bos_token_id", None)), None),
        eos_token_ids=token_ids(config, "eos_token_id", None),
        prefixes=_prefixes(family, tensors),
    )


def stop_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> frozenset[int]:
    """The ids that end a completion: the union of config.json's and generation_config.json's `eos_token_id`.

    The default of the model_type applies only if neither file has that key.
    """
    generation = generation_config or {}
    default = None if "eos_token_id" in generation else find_family(config)[1].defaults.get("eos_token_id")
    own = token_ids(decoder_config(config)[2], "eos_token_id", default)
    return frozenset(own) | frozenset(token_ids(generation, "eos_token_id", None))


def sampling_defaults(generation_config: Mapping[str, Any] | None) -> dict[str, float]:
    """What generation_config.json says of sampling, by SamplingParams' names.

    `do_sample` is not followed: its absence in many files that give a temperature does not mean greedy.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: (generation_config or {}).get(name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _prefixes(family: Family, tensors: Collection[str]) -> tuple[str, str]:
    if family.text_type is None:
        return ModelConfig.prefixes
    found = (body for body in BODIES if any(name.startswith(body[0]) for name in tensors))
    return next(found, BODIES[0])


def _mixer(config: Mapping[str, Any], family: Family, hidden_size: int) -> AttentionConfig:
    """The attention of every layer, without window."""
    heads = integer(config, "num_attention_heads")
    # null means one KV head per attention head, as does absence where the family has no default
    kv_heads = heads if config.get("num_key_value_heads") is None else integer(config, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json contradicts itself: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    attention_bias = "attention_bias" in family.keys and flag(config, "attention_bias")
    head_dim = _head_dim(config, hidden_size, heads)
    scaled_by = number(config, "query_pre_attn_scalar", head_dim)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        softmax_scale=scaled_by**-0.5,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        soft_cap=_soft_cap(config, "attn_logit_softcapping"),
    )


def _head_dim(config: Mapping[str, Any], hidden_size: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = integer(config, "head_dim")
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


def _activation(config: Mapping[str, Any], family: Family) -> GatedActivation:
    """What the family's key names; the other key, which transformers does not read, must not name another."""
    own = config.get(family.activation_key, "silu")
    for key in sorted(("hidden_act", "hidden_activation"), key=family.activation_key.__ne__):
        named = config.get(key, own)
        if named not in _ACTIVATIONS:
            raise CheckpointError(f"config.json: {key} = {named!r} is not implemented; {choices(_ACTIVATIONS)} are")
        if _ACTIVATIONS[named] is not _ACTIVATIONS.get(own):
            raise CheckpointError(
                f"config.json contradicts itself: {key} = {named!r}, but {family.activation_key} is {own!r}"
            )
    return _ACTIVATIONS[own]


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` decides, else `sliding_window_pattern` (every n-th layer has none), else
    `max_window_layers` (the layers before have none), else all layers have it."""
    window = config.get("sliding_window")
    if not flag(config, "use_sliding_window"):
        window = None
    elif window is not None:
        window = integer(config, "sliding_window")
    first = integer(config, "max_window_layers", 0, least=0)
    pattern = integer(config, "sliding_window_pattern", num_layers + 1)
    default = [window is not None and i >= first and (i + 1) % pattern != 0 for i in range(num_layers)]
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
    if not family.mixed_windows and slides != default:
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
