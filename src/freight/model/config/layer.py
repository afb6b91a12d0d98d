"""LayerConfig: one decoder layer as data. Imports no torch.

A layer is a mixer (attention over the tokens before, or a state of them), a feed-forward, and norms
around both. It may lack one of the two. Models that differ only in these values need no separate
code, and the layers of one model may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import gcd, inf

from freight.operands.activation import AnyActivation, GatedActivation, GateFunction
from freight.operands.routing import Routing


@dataclass(frozen=True)
class OutputGateConfig:
    """A projection of the layer's input, whose `function` multiplies what attention returns, before
    it is projected.

    by_head   whether all channels of a head share a factor; otherwise there is one per channel
    in_q      whether it is part of the projection of q: the rows of each head's gate follow those
              of its q
    """

    function: GateFunction
    by_head: bool
    in_q: bool = False


class NormSpan(StrEnum):
    """The channels of q, and of k, that one norm spans."""

    HEAD = "head"  # those of each head
    ALL_HEADS = "all heads"  # those of all heads together (OLMo 2)


class NormPlace(StrEnum):
    """Where the norm of q and k is."""

    BEFORE_ROPE = "before the rope"
    AFTER_ROPE = "after the rope"  # (Hunyuan)


@dataclass(frozen=True)
class QKNormConfig:
    """An RMSNorm of q, and one of k.

    weighted   whether it has weights (Muse-Glimmer's has none)
    """

    span: NormSpan = NormSpan.HEAD
    place: NormPlace = NormPlace.BEFORE_ROPE
    weighted: bool = True


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (Ainslie et al. 2023).

    k_dim, v_dim     channels of a query or key head, and of a value head
    softmax_scale    multiplies q . k
    window           sliding window in tokens: a key at distance < window is seen; None: every key
    rope             index into `ModelConfig.ropes`; None: queries and keys are not rotated
    qk_norm          norm of q and k; None: there is none
    v_norm           whether each head of v is divided by its root mean square, without a weight
    v_factor         multiplies v, rounded to the compute dtype, before v is stored; None: v is
                     stored as projected
    k_eq_v           whether v is the projected k, before its norm and rotation: there is no
                     projection of v
    kv_from          index of the layer whose keys and values this one reads; this layer then has
                     neither projections of them nor pages. None: it stores its keys and values
    qkv_bias, o_bias whether the projections have biases
    soft_cap         a score s becomes soft_cap * tanh(s / soft_cap); None: unbounded
    sinks            whether each query head has a sink (`KernelSet.attention`)
    output_gate      gate of the result of each head; None: no gate
    """

    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    softmax_scale: float
    window: int | None = None
    rope: int | None = 0
    qk_norm: QKNormConfig | None = None
    v_norm: bool = False
    v_factor: float | None = None
    k_eq_v: bool = False
    kv_from: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    output_gate: OutputGateConfig | None = None

    @property
    def output_gate_size(self) -> int:
        """Rows of the projection of `output_gate`."""
        if self.output_gate is None:
            return 0
        if self.output_gate.by_head:
            return self.num_heads
        return self.num_heads * self.v_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Values of q, k and v per token."""
        return (
            self.num_heads * self.k_dim,
            self.num_kv_heads * self.k_dim,
            self.num_kv_heads * self.v_dim,
        )

    @property
    def factor_groups(self) -> tuple[int, int]:
        """Equal parts of a token's q and k together, and of its v: the fewest such that no part has
        channels of both.
        """
        q, k, v = self.qkv_sizes
        size = gcd(q + k, v)
        return (q + k) // size, v // size

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Rows of the projections of q and, if the layer has them, k and v."""
        q, k, v = self.qkv_sizes
        if self.output_gate is not None and self.output_gate.in_q:
            q += self.output_gate_size
        if self.kv_from is not None:
            return (q,)
        return (q, k) if self.k_eq_v else (q, k, v)

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Channels of the norm of q, and of k."""
        return self.qkv_sizes[:2] if self.norms_all_heads else (self.k_dim, self.k_dim)

    @property
    def norms_all_heads(self) -> bool:
        """True if one norm spans all heads of q, and one all heads of k."""
        return self.qk_norm is not None and self.qk_norm.span is NormSpan.ALL_HEADS

    @property
    def values_per_token(self) -> int:
        """Values that the cache holds per token."""
        return self.num_kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (MLA, DeepSeek-V2, Liu et al. 2024): keys and values of all heads are
    projections of one latent vector of the token, which the cache holds, and one rotated part
    that the keys of all heads share.

    It is computed in the absorbed form: queries are multiplied by each head's projection of keys,
    and the result of attention by that of values. So there is one KV head. Its key is the rotated
    part followed by the latent, and its value is the latent.

    q_rank          channels of the latent of q, which is normed before q is projected from it;
                    None: q is projected from the input
    latent          channels of the latent of keys and values
    nope, rotated   unrotated and rotated channels of a query
    head_size       channels of a value of each head
    softmax_scale   multiplies q . k
    rope            index into `ModelConfig.ropes`; None: nothing is rotated, and all heads share
                    the `rotated` channels of the key unrotated (Kimi Linear)
    eps             epsilon of the norms of both latents
    output_gate     whether a sigmoid of a further projection multiplies the result of each head
                    (Ling 3.0)
    """

    num_heads: int
    q_rank: int | None
    latent: int
    nope: int
    rotated: int
    head_size: int
    softmax_scale: float
    rope: int | None = 0
    eps: float = 1e-6
    output_gate: bool = False

    num_kv_heads = 1
    window = kv_from = None

    @property
    def k_dim(self) -> int:
        """Channels of a stored key."""
        return self.rotated + self.latent

    @property
    def v_dim(self) -> int:
        """Channels of a value, the last of the key."""
        return self.latent

    @property
    def q_sizes(self) -> tuple[int, int]:
        """Values of q per token, and rows of the first projection towards q: `q_rank` of them if q
        has a latent.
        """
        size = self.num_heads * (self.nope + self.rotated)
        return size, self.q_rank or size


@dataclass(frozen=True)
class ShortConvConfig:
    """out(c * convolution(b * x)), where b, c and x are projections of the input (LFM2).

    channels   of each of the three
    width      inputs of a channel that its convolution sees, the current token's included
    bias       whether the convolution and both projections have a bias
    """

    channels: int
    width: int
    bias: bool = False


@dataclass(frozen=True)
class DeltaNetConfig:
    """A gated delta net (Yang et al. 2024): linear attention whose state decays, and whose update
    replaces the value stored for a key (the delta rule).

    q, k and v go through one convolution of `width` inputs and SiLU. The result of each head is
    normed, and multiplied by SiLU of a gate, before it is projected.

    key_heads   heads of q and k; each serves heads / key_heads neighbouring value heads
    """

    key_heads: int
    heads: int
    k_dim: int
    v_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k, v."""
        return 2 * self.key_heads * self.k_dim + self.heads * self.v_dim


@dataclass(frozen=True)
class KimiDeltaConfig:
    """Kimi delta attention (Kimi Linear, 2025): a gated delta net with a decay per key channel.

    q, k and v each go through a convolution of `width` inputs and SiLU. The result of each head is
    normed, and multiplied by a sigmoid of a gate, before it is projected.

    head_dim   channels of a head of q, k and v
    rank       values between the two projections that produce decays, and gates; None: there is one
               projection for each
    bound      lower bound of log decays, below 0 (`KernelSet.decays`); None: unbounded
    """

    heads: int
    head_dim: int
    width: int
    rank: int | None = None
    bound: float | None = None

    @property
    def size(self) -> int:
        """Channels of q, over all heads; k and v have as many."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 (Dao and Gu 2024): linear attention with a decay per head and token.

    Its x (values), B (keys) and C (queries) go through one convolution of `width` inputs and SiLU.
    The result, multiplied by SiLU of a gate, is normed in `norm_groups` equal parts and projected.

    groups       heads of B and C; each serves heads / groups neighbouring heads of x
    head_dim     channels of a head of x
    state_size   channels of a head of B and C
    bias         whether both projections have a bias
    limits       lower and upper bound of the step size dt
    """

    groups: int
    heads: int
    head_dim: int
    state_size: int
    width: int
    norm_groups: int
    conv_bias: bool = True
    bias: bool = False
    limits: tuple[float, float] = (0.0, inf)

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B, C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size


# The part of a layer that works across tokens; None: the layer has none. A new kind is added here,
# in `model/mixers.py` (its builder), `model/mixer_parts.py` (its tensors) and `cache/spec.py`
# (what the cache keeps for it).
Mixer = (
    AttentionConfig
    | LatentConfig
    | ShortConvConfig
    | DeltaNetConfig
    | KimiDeltaConfig
    | Mamba2Config
    | None
)
PagedMixer = AttentionConfig | LatentConfig  # mixers that read stored keys and values
RecurrentMixer = DeltaNetConfig | KimiDeltaConfig | Mamba2Config  # whose state has --state-dtype


@dataclass(frozen=True)
class DenseConfig:
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))), with
    `intermediate_size` values in between.
    """

    intermediate_size: int
    activation: AnyActivation = GatedActivation.SILU
    bias: bool = False

    @property
    def up_sizes(self) -> tuple[int, ...]:
        """Rows of the projections before the activation: of gate and up, or of up alone."""
        return (self.intermediate_size,) * (
            2 if isinstance(self.activation, GatedActivation) else 1
        )


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: each token goes through the experts that its router chooses, and
    through `shared`.

    routing            choice of experts
    intermediate_size  width of each expert
    activation         activation of each expert, gated or not
    latent_size        channels of the experts' inputs and outputs: one projection maps the token to
                       them, and another maps the sum of its experts back. Router and `shared` take
                       the token itself, and the result of `shared` is added after the second
                       projection (Nemotron 3 Super, "LatentMoE"). None: the experts take the token
    router_bias, choice_bias   whether the router has these (`KernelSet.route`)
    bias               whether the projections of experts have biases
    shared             a feed-forward that every token goes through
    shared_gate        whether a sigmoid of a further projection multiplies the result of `shared`
    beside             whether the experts run parallel to `shared`: router, experts and `shared`
                       each norm the residual stream separately, and both results are normed before
                       they are added; `expert_scale` of the router multiplies the weight of each
                       expert (Gemma 4)
    """

    routing: Routing
    intermediate_size: int
    activation: AnyActivation = GatedActivation.SILU
    router_bias: bool = False
    choice_bias: bool = False
    bias: bool = False
    shared: DenseConfig | None = None
    shared_gate: bool = False
    beside: bool = False
    latent_size: int | None = None

    def __post_init__(self) -> None:
        assert not (self.beside and self.latent_size), (
            "latent experts have no separate norm of the residual stream"
        )

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def expert(self) -> DenseConfig:
        """A single expert as a feed-forward."""
        return DenseConfig(self.intermediate_size, self.activation, self.bias)

    @property
    def up_sizes(self) -> tuple[int, ...]:
        """Rows of each expert's projections before the activation."""
        return self.expert.up_sizes

    def expert_channels(self, hidden_size: int) -> int:
        """Return the channels that each expert takes and returns."""
        return self.latent_size or hidden_size


FeedForward = DenseConfig | MoEConfig | None


@dataclass(frozen=True)
class PerLayerEmbeddingConfig:
    """A vector per token for this layer alone (per-layer embeddings of Gemma 4). After the
    feed-forward, x += norm(projection(activation(gate(x)) * vector)).

    size   channels of the vector
    """

    size: int
    activation: GatedActivation


class NormKind(StrEnum):
    """The formula of a norm."""

    RMS = "rms"  # x / rms(x) * weight (Zhang and Sennrich 2019)
    LAYER = "layer"  # (x - mean(x)) / std(x) * weight + bias (Ba et al. 2016)


class NormPlacement(StrEnum):
    """The tensors of a layer that are normed."""

    @property
    def has_outputs(self) -> bool:
        """True if the outputs of mixer and feed-forward are normed before they are added."""
        return self in (NormPlacement.SANDWICH, NormPlacement.OUTPUT)

    PRE = "pre"  # the inputs of mixer and feed-forward
    # the inputs, and the outputs before they are added to the residual stream (Gemma 2)
    SANDWICH = "sandwich"
    OUTPUT = "output"  # only the outputs, before they are added (OLMo 2, arXiv 2501.00656)
    POST = "post"  # the residual stream after each addition (Vaswani et al. 2017; OPT 350M)


@dataclass(frozen=True)
class LayerConfig:
    """One layer: x += mixer(norm(x)); x += feed_forward(norm(x)), with norms placed by `norms`. A
    layer without a mixer or without a feed-forward has only the other part, with that part's norms.

    scalar      whether the sum is multiplied by a number that the checkpoint has for this layer
                (Gemma 4)
    per_layer   the per-layer embedding; None: there is none

    `scalar` and `per_layer` are applied after the feed-forward, so they need one.
    """

    mixer: Mixer
    feed_forward: FeedForward
    norms: NormPlacement = NormPlacement.PRE
    scalar: bool = False
    per_layer: PerLayerEmbeddingConfig | None = None

    def __post_init__(self) -> None:
        assert self.mixer is not None or self.feed_forward is not None, "a layer without parts"
        assert self.feed_forward is not None or not (self.scalar or self.per_layer), (
            "scalar and per_layer need a feed-forward"
        )
