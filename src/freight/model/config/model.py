"""ModelConfig: a model's hyperparameters, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from freight.errors import listed
from freight.fp8.formats import Format
from freight.model.config.dtype import DtypeSource
from freight.model.config.layer import LayerConfig, NormKind
from freight.model.config.pooling import PoolingConfig
from freight.model.mixers.attention.spec import AttentionConfig
from freight.model.mixers.latent.spec import IndexerConfig
from freight.model.mixers.spec import PagedMixer, StateMixer

# last or inner names of modules that choose experts
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate", "wg", "classifier"))


@dataclass(frozen=True)
class ForeignModel:
    """A model that runs through the modules of transformers (`model/fallback.py`).

    attention          name of each layer's attention module
    tensors            names of the parameters with their shapes
    embedding, head    names of these matrices; the same if they are tied
    linears            names of the matrices of Linear modules that can be in FP8: all but the head
    """

    attention: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    embedding: str
    head: str
    linears: tuple[str, ...]

    @property
    def rounded(self) -> tuple[str, ...]:
        """The matrices that `--quantization fp8` rounds: routers stay in 16 bits."""
        return tuple(name for name in self.linears if not _ROUTERS.intersection(name.split(".")))


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` channels of a head.

    rotary_dim    rotated channels
    theta         base of the frequencies
    kind          default, or one of the following, with its `parameters`:
                  linear: factor
                  llama3: factor, low_freq_factor, high_freq_factor,
                  original_max_position_embeddings
                  yarn: factor, original_max_position_embeddings and, if the checkpoint has them,
                  attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate,
                  llama_4_scaling_beta (for queries: `model.layers.rope`), and attn_factor, a further
                  factor of attention (in YaRN's first code and in vLLM; transformers ignores it)
                  longrope: factor, original_max_position_embeddings, and optionally
                  attention_factor
                  proportional: optionally factor, and partial_rotary_factor, the share of rotated
                  pairs. These have the highest frequencies; the others have frequency 0, and
                  `rotary_dim` counts both
    short_factors, long_factors
                  divisors of the frequencies of longrope, [rotary_dim / 2] each: short ones if no
                  position exceeds the original length, else long ones
    interleaved   whether a checkpoint's pairs of channels are (2i, 2i + 1). In every kernel they are
                  (i, i + rotary_dim / 2): the loader reorders the rows of q and k, and the cache
                  stores keys in the kernels' order
    """

    rotary_dim: int
    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, float | bool] = field(default_factory=dict)
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    interleaved: bool = False

    def for_context(self, max_len: int) -> RopeConfig:
        """Return longrope with both lists set to the factors for contexts of up to `max_len`
        tokens; return other kinds unchanged.
        """
        if self.kind != "longrope":
            return self
        is_long = max_len > self.parameters["original_max_position_embeddings"]
        factors = self.long_factors if is_long else self.short_factors
        return replace(self, short_factors=factors, long_factors=factors)


@dataclass(frozen=True)
class UnreadKeys:
    """Keys of a config.json that decide nothing in Freight, each in the order of the file.

    unknown   keys on no list, such as a publisher's additions
    harmless  keys known to change no result: training, bookkeeping, defaults of other programs
    ignored   keys that would be refused, but are named by --ignore-config-keys
    """

    unknown: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def describe(self) -> str | None:
        """Return one line for the log at start-up; None if every key is read."""
        lists = (
            (self.unknown, "unknown to Freight"),
            (self.ignored, "--ignore-config-keys: results may differ"),
            (self.harmless, "known to change no result"),
        )
        parts = [f"{listed(keys)} ({kind})" for keys, kind in lists if keys]
        return f"config.json: not read: {'; '.join(parts)}" if parts else None


@dataclass(frozen=True)
class SparseConfig:
    """Sparse attention in contexts of more than `ModelConfig.dense_limit` tokens.

    indexer                   the indexers, which are alike
    chosen_by                 for each layer the one whose indexer chooses its keys: itself, or one
                              before that has an indexer (GLM-5.2)
    max_position_embeddings   that of the file
    """

    indexer: IndexerConfig
    chosen_by: tuple[int, ...]
    max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters of one decoder.

    layers                 layers from the first to the last
    ropes                  rotary embeddings, to which layers refer by index
    dense_limit            longest context, in tokens, in which sparse attention attends to every
                           token (`index_topk`), and `max_position_embeddings` is no larger; longer
                           ones need the model of `config.latent.beyond_dense`, which has no such
                           limit. None: attention is dense, or the model is that one
    sparse                 what chooses keys in longer contexts, in models that have a `dense_limit`;
                           `config.latent.beyond_dense` gives it to the layers
    norm_eps               epsilon of every norm
    post_norm_eps          epsilon of the norms of layers' outputs, if different; None: `norm_eps`
    norm_offset            number added to each stored norm weight
    final_norm_offset      whether it is added to the weight of the last norm as well
    wide_norms             whether norm weights are float32 numbers (`KernelSet.add_rms_norm`)
    embedding_multiplier   multiplies the embedding's rows; None: 1
    rounds_multiplier      whether `embedding_multiplier` is first rounded to the compute dtype
    embedding_norm         whether the embedding's rows are divided by their root mean square
    norms_embedded         whether a norm with weights follows the embedding of tokens and positions
    token_types            rows of the embedding of token types, of which that of a token's type is
                           added to its own. 0: there is none
    norm_biases            whether norms of `NormKind.LAYER` have biases
    per_layer_vocab_size   rows of the table of `LayerConfig.per_layer`, in which the columns of all
                           layers are concatenated; None: there is none
    prediction_layers      further layers of the checkpoint, which predict further tokens; they do
                           not run
    residual_multiplier    multiplies each output that a layer adds to the residual stream
    logit_divisor          divides the logits; None: 1
    logit_soft_cap         a logit x becomes logit_soft_cap * tanh(x / logit_soft_cap); None:
                           unbounded
    checkpoint_format      dtype of the weights that are not quantized
    dtype_source           place where that dtype was found
    separate_experts       whether the experts of a layer, one tensor in this family, are separate
                           matrices in this checkpoint
    prefixes               prefix of the decoder's tensors in the checkpoint, and prefix of its head
    norm_kind              kind of every norm
    final_norm             whether the output of the last layer is normed
    position_offset        row of position 0 in the embedding of positions; None: there is none
    embedding_size         channels of the embedding, if projected to hidden_size, and back before
                           the head; None: hidden_size
    has_head               whether there is a matrix of the vocabulary behind the last layer; a
                           model that only pools needs none
    attends_both_ways      whether a token sees those after it as well; a prompt is then computed in
                           one step, and no prefix of it can be kept
    pooling                how a vector comes of a prompt; None: the model only generates
    ignored_keys           keys that compute and that the user chose to ignore: part of the
                           fingerprint
    unread_keys            all keys of config.json that decide nothing here
    foreign                None for a model of Freight's decoder. Otherwise `layers` only describes
                           the cache and attention of each layer, and transformers computes norms,
                           ropes and multipliers
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
    norms_embedded: bool = False
    token_types: int = 0
    norm_biases: bool = True
    position_offset: int | None = None
    embedding_size: int | None = None
    foreign: ForeignModel | None = None
    dense_limit: int | None = None
    sparse: SparseConfig | None = None
    prediction_layers: int = 0
    rounds_multiplier: bool = False
    residual_multiplier: float = 1.0
    logit_divisor: float | None = None
    wide_norms: bool = False
    per_layer_vocab_size: int | None = None
    has_head: bool = True
    attends_both_ways: bool = False
    pooling: PoolingConfig | None = None
    separate_experts: bool = False
    ignored_keys: tuple[str, ...] = ()
    unread_keys: UnreadKeys = field(default_factory=UnreadKeys, compare=False, repr=False)
    dtype_source: DtypeSource = DtypeSource.CONFIG

    @property
    def generates(self) -> bool:
        """Whether text may be asked of it: not of a model that declares pooling."""
        if not self.has_head or self.attends_both_ways:
            return False
        return self.pooling is None or self.pooling.beside

    @property
    def is_sparse(self) -> bool:
        """Whether layers read keys that indexers choose: of a model as `beyond_dense` returns it."""
        return self.sparse is not None and self.dense_limit is None

    @property
    def position_limit(self) -> int:
        """Positions that the ropes cover, at most `dense_limit`; linear and yarn scaling may exceed
        `max_position_embeddings`.
        """
        covered = max((self.max_position_embeddings, *map(self._covered, self.ropes)))
        return covered if self.dense_limit is None else min(covered, self.dense_limit)

    @property
    def limit_words(self) -> str:
        """The limit on contexts and its reason, for errors."""
        if self.position_limit != self.dense_limit:
            return f"the {self.position_limit} positions of this model"
        return (
            f"index_topk = {self.dense_limit} of config.json: in longer contexts this model attends to keys that an "
            "indexer chooses, which runs with --kernels reference alone, slowly"
        )

    def for_context(self, max_len: int) -> ModelConfig:
        """Return the model with its ropes fixed for contexts of up to `max_len` tokens: tables of
        any length then have the same values.
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
        """Layers with attention over keys and values (not latents), by index."""
        return {
            index: mixer
            for index, mixer in self.paged.items()
            if isinstance(mixer, AttentionConfig)
        }

    @cached_property
    def paged(self) -> dict[int, PagedMixer]:
        """Layers that read stored keys and values, by index: with attention, or with latent
        attention.
        """
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, PagedMixer)}

    @property
    def without_pages(self) -> frozenset[int]:
        """Layers that neither store keys and values nor read another's: they need no KV scales."""
        # difference(), because `-` with keys gives a set, which has no hash
        return frozenset(range(self.num_layers)).difference(self.paged)

    @property
    def recurrent(self) -> bool:
        """True if a layer keeps a recurrent state, in the format of --state-dtype."""
        mixers = (layer.mixer for layer in self.layers)
        return any(isinstance(mixer, StateMixer) and mixer.recurrent for mixer in mixers)

    @property
    def per_layer_size(self) -> int:
        """Columns of the table of `LayerConfig.per_layer`, over all layers; 0 without one."""
        return sum(layer.per_layer.size for layer in self.layers if layer.per_layer is not None)
