"""ModelConfig: a model's hyperparameters, read from a config.json. Imports no torch.

Every key of config.json is either used, on a list of keys that do not affect the model, or has a
value that disables its feature. Any other key raises a CheckpointError that names it and its value,
because ignoring it could silently change the output. An absent key has the default of transformers'
configuration class of that model_type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from freight.config.attention import parse_mixers, soft_cap
from freight.config.dtype import DtypeSource, checkpoint_dtype
from freight.config.family import Family
from freight.config.fields import JsonObject, flag, integer, number, token_ids
from freight.config.keys import UnreadKeys, check_keys, decoder_config, find_family, with_defaults
from freight.config.layer import (
    AttentionConfig,
    DeltaNetConfig,
    DenseConfig,
    KimiDeltaConfig,
    LatentConfig,
    LayerConfig,
    Mamba2Config,
    MoEConfig,
    NormKind,
    PagedMixer,
)
from freight.config.moe import has_experts, layers_with_experts, parse_moe
from freight.config.registry import FAMILIES
from freight.config.rope import RopeConfig as RopeConfig
from freight.config.rope import parse_ropes
from freight.errors import CheckpointError, choices
from freight.fp8.formats import Format
from freight.operands.activation import Activation, AnyActivation, GatedActivation

# last or inner names of modules that choose experts
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate", "wg", "classifier"))


@dataclass(frozen=True)
class ForeignModel:
    """What is known of a model that runs through the modules of transformers
    (`models/fallback.py`).

    attention          the name of each layer's attention module
    tensors            names of the parameters with their shapes
    embedding, head    names of these matrices; the same where they are tied
    linears            names of the matrices of Linear modules, without the head: these can be in
                       FP8
    """

    attention: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    embedding: str
    head: str
    linears: tuple[str, ...]

    @property
    def rounded(self) -> tuple[str, ...]:
        """Those that `--quantization fp8` rounds: routers stay in 16 bits."""
        return tuple(name for name in self.linears if not _ROUTERS.intersection(name.split(".")))


@dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters of one decoder.

    layers                 from the first to the last
    ropes                  the rotary embeddings that layers name by index
    dense_limit            tokens of the longest context in which sparse attention attends to every
                           token, which is all that runs (`index_topk`); `max_position_embeddings`
                           is no larger. None: attention is dense
    norm_eps               of every norm
    post_norm_eps          of norms of what layers add, where theirs is another; None: it is
                           `norm_eps`
    norm_offset            what is added to a stored norm weight
    final_norm_offset      whether it is added to that of the last norm, too
    wide_norms             whether norm weights are float32 numbers (`KernelSet.add_rms_norm`)
    float32_head           whether final states and head are multiplied in float32, so that logits
                           are not rounded
    embedding_multiplier   multiplies the embedding's rows; None: nothing does
    embedding_norm         whether the embedding's rows are divided by their root mean square
    per_layer_vocab_size   rows of the table of `LayerConfig.per_layer`, of all layers side by side;
                           None: there is none
    prediction_layers      layers of the checkpoint behind these, which predict further tokens; they
                           do not run
    rounds_multiplier      whether that is rounded to the compute dtype first
    residual_multiplier    multiplies what a layer adds to the residual stream
    logit_divisor          divides the logits; None: nothing does
    logit_soft_cap         a logit x becomes logit_soft_cap * tanh(x / logit_soft_cap); None:
                           unbounded
    checkpoint_format      the dtype of the weights that are not quantized
    dtype_source           where that was found
    separate_experts       whether experts that this family has in one tensor for a layer are
                           separate matrices here
    prefixes               what precedes the names of the decoder's tensors in the checkpoint, and
                           the name of its head
    norm_kind              of every norm
    final_norm             whether the output of the last layer is normed
    position_offset        row of position 0 in the embedding of positions; None: there is none
    embedding_size         of a token, if it is projected to hidden_size, and back before the head;
                           None: hidden_size
    ignored_keys           keys that compute, and that the user wants read over: they are part of
                           the fingerprint
    unread_keys            all keys of config.json that decide nothing here
    foreign                None for a model of Freight's own decoder. Otherwise `layers` says what
                           the cache and attention of each layer need, and norms, ropes and
                           multipliers are transformers' own
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
    final_norm_offset: bool = True
    post_norm_eps: float | None = None
    embedding_norm: bool = False
    position_offset: int | None = None
    embedding_size: int | None = None
    foreign: ForeignModel | None = None
    dense_limit: int | None = None
    prediction_layers: int = 0
    rounds_multiplier: bool = False
    residual_multiplier: float = 1.0
    logit_divisor: float | None = None
    wide_norms: bool = False
    float32_head: bool = False
    per_layer_vocab_size: int | None = None
    separate_experts: bool = False
    ignored_keys: tuple[str, ...] = ()
    unread_keys: UnreadKeys = field(default_factory=UnreadKeys, compare=False, repr=False)
    dtype_source: DtypeSource = DtypeSource.CONFIG

    @property
    def position_limit(self) -> int:
        """Positions that the ropes cover; linear and yarn scaling may reach past
        `max_position_embeddings`. None is beyond `dense_limit`."""
        covered = max((self.max_position_embeddings, *map(self._covered, self.ropes)))
        return covered if self.dense_limit is None else min(covered, self.dense_limit)

    @property
    def limit_words(self) -> str:
        """What no context is longer than, for errors."""
        if self.position_limit != self.dense_limit:
            return f"the {self.position_limit} positions of this model"
        return (
            f"index_topk = {self.dense_limit} of config.json: in longer contexts this model attends to keys that an "
            "indexer chooses, which Freight does not have, and up to that length to all of them"
        )

    def for_context(self, max_len: int) -> ModelConfig:
        """With the ropes of contexts of up to `max_len` tokens: tables of any length then have the
        same values.
        """
        return replace(self, ropes=tuple(rope.for_context(max_len) for rope in self.ropes))

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

    @cached_property
    def attention(self) -> dict[int, AttentionConfig]:
        """The layers whose mixer is attention with keys and values of their own, by index."""
        return {
            index: mixer
            for index, mixer in self.paged.items()
            if isinstance(mixer, AttentionConfig)
        }

    @cached_property
    def paged(self) -> dict[int, PagedMixer]:
        """The layers that read stored keys and values, by index: with attention, or with latent
        attention.
        """
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, PagedMixer)}

    @property
    def without_pages(self) -> frozenset[int]:
        """The layers that neither store keys and values nor read another's: they have no KV scales
        and miss none.
        """
        return frozenset(range(self.num_layers)).difference(
            self.paged
        )  # `-` of keys is a set, which has no hash

    @property
    def recurrent(self) -> bool:
        """Whether a layer keeps a recurrent state, whose format --state-dtype chooses."""
        return any(
            isinstance(layer.mixer, DeltaNetConfig | KimiDeltaConfig | Mamba2Config)
            for layer in self.layers
        )

    @property
    def per_layer_size(self) -> int:
        """Columns of the table of `LayerConfig.per_layer`: those of each layer in turn, all alike;
        0: there is none.
        """
        return sum(layer.per_layer.size for layer in self.layers if layer.per_layer is not None)


_ACTIVATIONS: Mapping[str, GatedActivation] = {
    "silu": GatedActivation.SILU,
    "swish": GatedActivation.SILU,
    "gelu_pytorch_tanh": GatedActivation.GELU_TANH,
}
_UNGATED: Mapping[str, Activation] = {"relu": Activation.RELU, "relu2": Activation.RELU_SQUARED}


def parse_model_config(
    config: JsonObject,
    tensors: Collection[str] = (),
    stored: Format | None = None,
    ignore_keys: Collection[str] = (),
) -> ModelConfig:
    """Read the content of a config.json. Raises CheckpointError for what is missing, contradictory
    or not implemented.

    `tensors` are the names of the checkpoint's tensors: where the decoder is one part of a model,
    they show where. `stored` is the dtype of those that are not quantized, which counts where
    config.json names none. `ignore_keys` are read over though they compute (`keys.check_keys`).
    """
    outer, unread = config, check_keys(config, ignore_keys)
    model_type, _ = find_family(config)
    family, config = decoder_config(config)
    config = with_defaults(config, family)
    config = config if family.translate is None else family.translate(config)
    prefixes = _prefixes(family, tensors)
    hidden_size = integer(config, "hidden_size")
    limit = integer(config, "max_position_embeddings")
    mixers = parse_mixers(config, family)
    feed_forwards = _feed_forwards(config, family, len(mixers))
    layers = [
        LayerConfig(*parts, family.norms) for parts in zip(mixers, feed_forwards, strict=True)
    ]
    dtype, dtype_source = checkpoint_dtype(outer, stored)
    model = ModelConfig(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        ropes=(),
        max_position_embeddings=limit,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        norm_offset=0.0,
        embedding_multiplier=float(hidden_size**0.5) if family.scales_embedding else None,
        tie_word_embeddings=_tied(outer, config, family, prefixes[1], tensors),
        logit_soft_cap=soft_cap(config, "final_logit_softcapping"),
        checkpoint_format=dtype,
        dtype_source=dtype_source,
        bos_token_id=next(iter(token_ids(config, "bos_token_id", None)), None),
        eos_token_ids=token_ids(config, "eos_token_id", None),
        prefixes=prefixes,
        prediction_layers=max(
            [integer(config, key, 0, least=0) for key in family.next_token_keys], default=0
        ),
        rounds_multiplier=family.scales_embedding,
        wide_norms=family.wide_norms,
        ignored_keys=unread.ignored,
        unread_keys=unread,
    )
    model = model if family.derive is None else family.derive(config, model)
    return replace(model, ropes=_ropes(config, family, model))


def stop_token_ids(config: JsonObject, generation_config: JsonObject | None) -> frozenset[int]:
    """The ids that end a completion: the union of config.json's and generation_config.json's
    `eos_token_id`.

    The default of the model_type applies only if neither file has that key.
    """
    generation = generation_config or {}
    if config.get("model_type") not in FAMILIES:
        return frozenset(token_ids(generation, "eos_token_id", None))
    default = (
        None
        if "eos_token_id" in generation
        else find_family(config)[1].defaults.get("eos_token_id")
    )
    own = token_ids(decoder_config(config)[1], "eos_token_id", default)
    return frozenset(own) | frozenset(token_ids(generation, "eos_token_id", None))


def sampling_defaults(generation_config: JsonObject | None) -> dict[str, float]:
    """What generation_config.json says of sampling, by SamplingParams' names.

    `do_sample` is not followed: its absence in many files that give a temperature does not mean
    greedy.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: (generation_config or {}).get(name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _prefixes(family: Family, tensors: Collection[str]) -> tuple[str, str]:
    found = (body for body in family.bodies if any(name.startswith(body[0]) for name in tensors))
    return next(found, family.bodies[0])


def _tied(
    outer: JsonObject,
    config: JsonObject,
    family: Family,
    prefix: str,
    tensors: Collection[str],
) -> bool:
    """Of a decoder that is one part of a model, transformers reads the key outside, which ties
    without being there; but a head that is stored is used."""
    if family.text_type is not None and outer.get("tie_word_embeddings") is None and tensors:
        return f"{prefix}lm_head.weight" not in tensors
    return flag(config, "tie_word_embeddings")


def _ropes(config: JsonObject, family: Family, model: ModelConfig) -> tuple[RopeConfig, ...]:
    """By `AttentionConfig.rope`; a rope that no layer has is made for heads like the others."""
    mixers = list(model.paged.values())
    unrotated = all(
        isinstance(mixer, LatentConfig) and mixer.rope is None for mixer in mixers
    )  # or there is none
    if model.position_offset is not None or unrotated:
        return ()
    sizes = {mixer.rope: _rotary_size(mixer) for mixer in mixers}
    head_dims = tuple(sizes.get(rope, _rotary_size(mixers[0])) for rope in (0, 1))
    return parse_ropes(config, family, integer(config, "max_position_embeddings"), head_dims)


def _rotary_size(mixer: PagedMixer) -> int:
    """Channels of a head of which a rope rotates all, or a share."""
    return mixer.rotated if isinstance(mixer, LatentConfig) else mixer.k_dim


def _activation(config: JsonObject, family: Family) -> AnyActivation:
    """What the family's key names; another key, which transformers does not read, must not name
    another.
    """
    known: Mapping[str, AnyActivation] = _ACTIVATIONS if family.gated else _UNGATED
    own = config.get(family.activation_key, "silu")
    for key in dict.fromkeys((family.activation_key, "hidden_act", "hidden_activation")):
        named = config.get(key, own)
        if not isinstance(named, str) or named not in known:
            raise CheckpointError(
                f"config.json: {key} = {named!r} is not implemented; {choices(known)} are"
            )
        if known[named] is not known.get(own):
            raise CheckpointError(
                f"config.json contradicts itself: {key} = {named!r}, but {family.activation_key} is {own!r}"
            )
    return known[own]


def _feed_forwards(
    config: JsonObject, family: Family, num_layers: int
) -> list[DenseConfig | MoEConfig]:
    """The feed-forward of each layer."""
    activation = _activation(config, family)
    described = family.moe if family.moe is not None and has_experts(config, family.moe) else None
    experts = [False] * num_layers if described is None else layers_with_experts(config, num_layers)
    dense: DenseConfig | MoEConfig | None = None
    if not all(experts):
        dense = DenseConfig(
            integer(config, "intermediate_size"), activation, flag(config, family.bias_keys[2])
        )
    if described is None:
        assert dense is not None
        return [dense] * num_layers
    moe = parse_moe(config, described, activation)
    return [moe if sparse else dense or moe for sparse in experts]
