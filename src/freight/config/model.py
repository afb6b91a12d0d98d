"""ModelConfig: a model's hyperparameters, read from a config.json. Imports no torch.

Every key of config.json is either used, on a list of keys that do not affect the model, or has a value that disables
its feature. Any other key raises a CheckpointError that names it and its value, because ignoring it could silently
change the output. An absent key has the default of transformers' configuration class of that model_type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from freight.config.experts import layers_with_experts, parse_moe
from freight.config.families import FAMILIES
from freight.config.family import Family
from freight.config.fields import flag, integer, number, token_ids
from freight.config.keys import decoder_config, find_family, with_defaults
from freight.config.layer import AttentionConfig, DenseConfig, LayerConfig, MoEConfig, NormKind, NormPlacement
from freight.config.rope import RopeConfig as RopeConfig
from freight.config.rope import parse_ropes
from freight.errors import CheckpointError, choices
from freight.fp8.formats import COMPUTE_FORMATS, Format
from freight.operands.activation import Activation, GatedActivation


@dataclass(frozen=True)
class ForeignModel:
    """What is known of a model that runs through the modules of transformers (`models/fallback.py`).

    attention          the name of each layer's attention module
    tensors            names of the parameters with their shapes
    embedding, head    names of these matrices; the same where they are tied
    """

    attention: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    embedding: str
    head: str


@dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters of one decoder.

    layers                 from the first to the last
    ropes                  the rotary embeddings that layers name by index
    norm_eps               of every norm
    norm_offset            what is added to a stored norm weight
    wide_norms             whether norm weights are float32 numbers (`KernelSet.add_rms_norm`)
    float32_head           whether final states and head are multiplied in float32, so that logits are not rounded
    embedding_multiplier   multiplies the embedding's rows; None: nothing does
    prediction_layers      layers of the checkpoint behind these, which predict further tokens; they do not run
    rounds_multiplier      whether that is rounded to the compute dtype first
    residual_multiplier    multiplies what a layer adds to the residual stream
    logit_divisor          divides the logits; None: nothing does
    logit_soft_cap         a logit x becomes logit_soft_cap * tanh(x / logit_soft_cap); None: unbounded
    checkpoint_format      the dtype that config.json names for the weights
    prefixes               what precedes the names of the decoder's tensors in the checkpoint, and the name of its head
    norm_kind              of every norm
    final_norm             whether the output of the last layer is normed
    position_offset        row of position 0 in the embedding of positions; None: there is none
    embedding_size         of a token, if it is projected to hidden_size, and back before the head; None: hidden_size
    foreign                None for a model of Freight's own decoder. Otherwise `layers` says what the cache and
                           attention of each layer need, and norms, ropes and multipliers are transformers' own
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_position_embeddings: int
    norm_eps: float
    norm_offset: float
    embedding_multiplier: float | None
    tie_word_embeddings: bool
    logit_soft_cap: float | None
    checkpoint_format: Format
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefixes: tuple[str, str] = ("model.", "")
    norm_kind: NormKind = NormKind.RMS
    final_norm: bool = True
    position_offset: int | None = None
    embedding_size: int | None = None
    foreign: ForeignModel | None = None
    prediction_layers: int = 0
    rounds_multiplier: bool = False
    residual_multiplier: float = 1.0
    logit_divisor: float | None = None
    wide_norms: bool = False
    float32_head: bool = False

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


_ACTIVATIONS: Mapping[str, GatedActivation] = {
    "silu": GatedActivation.SILU,
    "swish": GatedActivation.SILU,
    "gelu_pytorch_tanh": GatedActivation.GELU_TANH,
}
_UNGATED: Mapping[str, Activation] = {"relu": Activation.RELU}


def parse_model_config(config: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelConfig:
    """Read the content of a config.json. Raises CheckpointError for what is missing, contradictory or not implemented.

    `tensors` are the names of the checkpoint's tensors: where the decoder is one part of a model, they show where.
    A config.json that names no dtype means float32, as it did before transformers wrote one.
    """
    outer = config
    model_type, family, config = decoder_config(config)
    config = with_defaults(config, family)
    prefixes = _prefixes(family, tensors)
    hidden_size = integer(config, "hidden_size")
    limit = integer(config, "max_position_embeddings")
    mixer = _mixer(config, family, hidden_size)
    norms, final_norm = _norms(config, family)
    rotary = family.position_offset is None
    local = 0 if family.local_theta is None else 1  # the rope of layers with a window
    windows = _windows(config, family, integer(config, "num_hidden_layers"))
    rotated = _rotated(config, family, len(windows))
    mixers = [
        replace(mixer, window=window, rope=(0 if window is None else local) if rotates else None)
        for window, rotates in zip(windows, rotated, strict=True)
    ]
    feed_forwards = _feed_forwards(config, family, len(windows))
    layers = [LayerConfig(*parts, norms) for parts in zip(mixers, feed_forwards, strict=True)]
    return ModelConfig(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        ropes=parse_ropes(config, family, limit, mixer.k_dim) if rotary else (),
        max_position_embeddings=limit,
        norm_eps=number(config, "rms_norm_eps", 1e-6) if family.norm_eps is None else family.norm_eps,
        norm_offset=family.norm_offset,
        embedding_multiplier=_embedding_multiplier(config, family, hidden_size),
        tie_word_embeddings=_tied(outer, config, family, prefixes[1], tensors),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping"),
        checkpoint_format=declared_format(config),
        bos_token_id=next(iter(token_ids(config, "bos_token_id", None)), None),
        eos_token_ids=token_ids(config, "eos_token_id", None),
        prefixes=prefixes,
        norm_kind=family.norm_kind,
        final_norm=final_norm,
        position_offset=family.position_offset,
        embedding_size=_embedding_size(config, hidden_size),
        prediction_layers=max([integer(config, key, 0, least=0) for key in family.next_token_keys], default=0),
        rounds_multiplier=family.scales_embedding,
        residual_multiplier=number(config, "residual_multiplier") if family.multipliers else 1.0,
        logit_divisor=_unless_1(config, "logits_scaling") if family.multipliers else None,
        wide_norms=family.wide_norms or family.norm_offset != 0,
        float32_head=family.float32_head_key is not None and flag(config, family.float32_head_key),
    )


def stop_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> frozenset[int]:
    """The ids that end a completion: the union of config.json's and generation_config.json's `eos_token_id`.

    The default of the model_type applies only if neither file has that key.
    """
    generation = generation_config or {}
    if config.get("model_type") not in FAMILIES:
        return frozenset(token_ids(generation, "eos_token_id", None))
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
    found = (body for body in family.bodies if any(name.startswith(body[0]) for name in tensors))
    return next(found, family.bodies[0])


def _tied(
    outer: Mapping[str, Any], config: Mapping[str, Any], family: Family, prefix: str, tensors: Collection[str]
) -> bool:
    """Of a decoder that is one part of a model, transformers reads the key outside, which ties without being there; but
    a head that is stored is used."""
    if family.text_type is not None and outer.get("tie_word_embeddings") is None and tensors:
        return f"{prefix}lm_head.weight" not in tensors
    return flag(config, "tie_word_embeddings")


def _norms(config: Mapping[str, Any], family: Family) -> tuple[NormPlacement, bool]:
    """What is normed in each layer, and whether the output of the last layer is. Only OPT has keys for it."""
    if "do_layer_norm_before" not in family.keys:
        return family.norms, True
    if not flag(config, "layer_norm_elementwise_affine"):
        raise CheckpointError("config.json: layer_norm_elementwise_affine = False is not implemented; only True is")
    if flag(config, "do_layer_norm_before"):
        return NormPlacement.PRE, not flag(config, "_remove_final_layer_norm")
    return NormPlacement.POST, False


def _embedding_size(config: Mapping[str, Any], hidden_size: int) -> int | None:
    size = integer(config, "word_embed_proj_dim", hidden_size)
    return None if size == hidden_size else size


def _embedding_multiplier(config: Mapping[str, Any], family: Family, hidden_size: int) -> float | None:
    if family.scales_embedding:
        return float(hidden_size**0.5)
    return _unless_1(config, "embedding_multiplier") if family.multipliers else None


def _unless_1(config: Mapping[str, Any], key: str) -> float | None:
    value = number(config, key)
    return None if value == 1 else value


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
    qkv_bias, o_bias = (key in family.keys and flag(config, key) for key in family.bias_keys[:2])
    head_dim = _head_dim(config, hidden_size, heads)
    scaled_by = number(config, "query_pre_attn_scalar", head_dim)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        softmax_scale=number(config, "attention_multiplier") if family.multipliers else scaled_by**-0.5,
        qk_norm=family.qk_norm if family.qk_norm_key is None else flag(config, family.qk_norm_key),
        qk_norm_whole=family.qk_norm_whole,
        qkv_bias=family.qkv_bias or qkv_bias,
        o_bias=o_bias,
        soft_cap=_soft_cap(config, "attn_logit_softcapping"),
        sinks=family.sinks,
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


def _activation(config: Mapping[str, Any], family: Family) -> GatedActivation | Activation:
    """What the family's key names; another key, which transformers does not read, must not name another."""
    known: Mapping[str, GatedActivation | Activation] = _ACTIVATIONS if family.gated else _UNGATED
    own = config.get(family.activation_key, "silu")
    for key in dict.fromkeys((family.activation_key, "hidden_act", "hidden_activation")):
        named = config.get(key, own)
        if named not in known:
            raise CheckpointError(f"config.json: {key} = {named!r} is not implemented; {choices(known)} are")
        if known[named] is not known.get(own):
            raise CheckpointError(
                f"config.json contradicts itself: {key} = {named!r}, but {family.activation_key} is {own!r}"
            )
    return known[own]


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
    if "no_rope_layers" in family.keys:  # layers that rotate see everything
        rotated = _rotated(config, family, num_layers)
        default = [window is not None and not rotates for rotates in rotated]
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


def _rotated(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Which layers rotate queries and keys: those with a 1 in `no_rope_layers`, else all but every n-th (SmolLM3)."""
    if "no_rope_layers" not in family.keys:
        return [family.position_offset is None] * num_layers
    interval = integer(config, "no_rope_layer_interval")
    found = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(found, list) or len(found) != num_layers or not set(found) <= {0, 1}:
        raise CheckpointError(
            f"config.json: no_rope_layers = {found!r} must be a list of num_hidden_layers = {num_layers} entries, each "
            "0 or 1"
        )
    return [one == 1 for one in found]


def _feed_forwards(config: Mapping[str, Any], family: Family, num_layers: int) -> list[DenseConfig | MoEConfig]:
    """The feed-forward of each layer."""
    activation = _activation(config, family)
    experts = [False] * num_layers if family.moe is None else layers_with_experts(config, num_layers)
    dense: DenseConfig | MoEConfig | None = None
    if not all(experts):
        dense = DenseConfig(integer(config, family.width_key), activation, flag(config, family.bias_keys[2]))
    if family.moe is None:
        assert dense is not None
        return [dense] * num_layers
    assert isinstance(activation, GatedActivation)
    moe = parse_moe(config, family.moe, activation)
    return [moe if sparse else dense or moe for sparse in experts]


def _soft_cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def declared_format(config: Mapping[str, Any]) -> Format:
    """The dtype that a config.json names for the weights. Raises CheckpointError for one that is not implemented."""
    declared = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    if len(set(map(str, declared.values()))) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: dtype = {declared['dtype']}, torch_dtype = {declared['torch_dtype']}"
        )
    name = next(iter(declared.values()), Format.FLOAT32)
    if name not in tuple(COMPUTE_FORMATS):
        raise CheckpointError(f"config.json: dtype {name!r} is not implemented; {choices(COMPUTE_FORMATS)} are")
    return Format(name)
