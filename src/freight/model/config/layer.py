"""LayerConfig: one decoder layer as data. Imports no torch.

A layer is a mixer (attention over the tokens before, or a state of them), a feed-forward, and norms
around both. It may lack one of the two. Models that differ only in these values need no separate
code, and the layers of one model may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from freight.model.mixers.spec import Mixer
from freight.operands.activation import AnyActivation, GatedActivation
from freight.operands.routing import Routing


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
    parallel_experts   whether the experts run parallel to `shared`: router, experts and `shared`
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
    parallel_experts: bool = False
    latent_size: int | None = None

    def __post_init__(self) -> None:
        assert not (self.parallel_experts and self.latent_size), (
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
    raw_mixer   whether the input of the mixer is not normed, whatever `norms` says (ModernBERT's
                first layer, whose input the embedding has normed)

    `scalar` and `per_layer` are applied after the feed-forward, so they need one.
    """

    mixer: Mixer
    feed_forward: FeedForward
    norms: NormPlacement = NormPlacement.PRE
    scalar: bool = False
    per_layer: PerLayerEmbeddingConfig | None = None
    raw_mixer: bool = False

    def __post_init__(self) -> None:
        assert not self.raw_mixer or (
            self.norms is NormPlacement.PRE and self.feed_forward is not None
        ), "another norm adds the stream up"
        assert self.mixer is not None or self.feed_forward is not None, "a layer without parts"
        assert self.feed_forward is not None or not (self.scalar or self.per_layer), (
            "scalar and per_layer need a feed-forward"
        )
