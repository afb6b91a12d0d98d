"""The decoder: embedding, layers of attention and MLP, norm, head. Data tells the families apart, not classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from freight.cache.pool import LayerKV
from freight.config.model import ModelConfig
from freight.kernels.interface import KernelSet
from freight.layers.attention import Attention
from freight.layers.embedding import Embedding, LogitsHead
from freight.layers.layer_inputs import LayerInput, LayerInputs
from freight.layers.linear import Projection
from freight.layers.moe import ExpertsBeside, MoE
from freight.layers.norm import Norm
from freight.operands.activation import Activation, GatedActivation, GateFunction
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary


@dataclass(frozen=True)
class MLP:
    """down(activation(gate(x)) * up(x)); `gate_up` computes both, concatenated along the output.

    Without a gate, `gate_up` is up alone: down(activation(up(x))).
    """

    gate_up: Projection
    down: Projection
    activation: GatedActivation | Activation
    kernels: KernelSet

    @property
    def consumer(self) -> Any:
        """As `Linear.consumer`."""
        return self.gate_up.consumer

    def __call__(self, x: Any) -> Tensor:
        """x: [num_tokens, hidden_size], a tensor or what the norm returned for `consumer`."""
        if isinstance(self.activation, Activation):
            return self.down(self.kernels.activated(self.gate_up(x), self.activation, self.down.consumer))
        return self.down(self.kernels.gated(self.gate_up(x), self.activation, self.down.consumer))


class Residual(NamedTuple):
    """The residual stream, [num_tokens, hidden_size], with its last addition still to come.

    It is x + delta (x if delta is None), or with `delta_weight` x + the RMSNorm of delta: the next norm adds, so that
    both are one pass over the rows. `inputs`, [num_tokens, layers, size], is what the next layer and those behind it
    have of each token (`layers/layer_inputs.py`), in models that have it.
    """

    x: Tensor
    delta: Tensor | None = None
    delta_weight: Tensor | None = None
    inputs: Tensor | None = None

    def normed(self, norm: Norm, consumer: Any = None) -> tuple[Tensor, Any]:
        """The stream, added up, and its norm for `consumer` (`KernelSet`)."""
        return norm(self.x, self.delta, consumer, self.delta_weight)

    def summed(self, norm: Norm) -> Tensor:
        """The stream, added up. `norm` has the eps; what it norms is not used, as kernels add and norm in one pass."""
        return self.x if self.delta is None else self.normed(norm)[0]

    def rows(self, index: Tensor) -> Residual:
        return self._replace(x=self.x[index], delta=None if self.delta is None else self.delta[index], inputs=None)


@dataclass(frozen=True)
class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)); where `attention_post` and `mlp_post` are not None, they are the
    weights of a norm of what is added. With `post` the norms are of the sums instead: x = norm(x + attention(x));
    x = norm(x + mlp(x)).

    With `outputs_only` the inputs are not normed: x += norm(attention(x)); x += norm(mlp(x)).

    The norms of what `mlp` and the experts of `beside` compute are added, where there are such experts.
    `input` adds what the tokens have for this layer alone, as x += input(x). `scalar`, [1] in the compute dtype,
    multiplies the result; the weight of the norm of what is added last then has it already.
    """

    attention_norm: Norm
    attention: Attention
    attention_post: Tensor | None
    mlp_norm: Norm
    mlp: MLP | MoE
    mlp_post: Tensor | None
    post: bool = False
    outputs_only: bool = False
    scalar: Tensor | None = None
    input: LayerInput | None = None
    beside: ExpertsBeside | None = None

    def __call__(self, stream: Residual, batch: ForwardBatch, kv: LayerKV) -> Residual:
        if self.post:
            _, x = Residual(stream.x, self.attention(stream.x, batch, kv)).normed(self.attention_norm)
            _, x = Residual(x, self.mlp(x)).normed(self.mlp_norm)
            return Residual(x)
        if self.outputs_only:
            x = stream.summed(self.attention_norm)
            x = Residual(x, self.attention(x, batch, kv), self.attention_post).summed(self.mlp_norm)
            return Residual(x, self.mlp(x), self.mlp_post)
        x, normed = stream.normed(self.attention_norm, self.attention.consumer)
        x, normed = Residual(x, self.attention(normed, batch, kv), self.attention_post).normed(
            self.mlp_norm, self.mlp.consumer
        )
        delta, weight, inputs = self.mlp(normed), self.mlp_post, stream.inputs
        if self.beside is not None:
            delta = self.beside(x, delta)
        if self.input is not None:
            assert inputs is not None
            x, _ = Residual(x, delta, weight).normed(self.mlp_norm)
            delta, weight, inputs = self.input(x, inputs[:, 0]), self.input.post, inputs[:, 1:]
        if self.scalar is not None:
            x = self.mlp_norm.kernels.gate(x, self.scalar[None], GateFunction.IDENTITY)
        return Residual(x, delta, weight, inputs)

    def whole(self, x: Tensor, batch: ForwardBatch, kv: LayerKV, inputs: Tensor | None = None) -> Tensor:
        """The layer alone, for work that goes through a model layer by layer: x and the result are added up.

        inputs: [num_tokens, 1, size], this layer's, in models that have them.
        """
        x, _ = self(Residual(x, inputs=inputs), batch, kv).normed(self.mlp_norm)
        return x


class LanguageModel(Protocol):
    """What the engine runs: `Decoder`, or the modules of transformers (`models/fallback.py`)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kernels(self) -> KernelSet: ...

    @property
    def rotaries(self) -> tuple[Rotary, ...]: ...

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """As `Decoder.hidden`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`."""
        ...

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """As `Decoder.forward`."""
        ...


@dataclass(frozen=True)
class Decoder:
    """A whole model. Parameters are final at construction."""

    config: ModelConfig
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm | None
    head: LogitsHead
    layer_inputs: LayerInputs | None = None

    @property
    def kernels(self) -> KernelSet:
        return self.head.kernels

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """What each layer does to queries and keys; layers with the same rope share its tables."""
        return tuple(layer.attention.rotary for layer in self.layers)

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """Run one step and return float32 logits [num_logit_rows, vocab_size]; K and V go into `kv_cache`."""
        return self.logits(self.hidden(batch, kv_cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [num_rows, vocab_size] of final states [num_rows, hidden_size]."""
        return self.head(hidden)

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """Run one step and return its final states, [num_logit_rows, hidden_size]; K and V go into `kv_cache`.

        They are normed, if the model has a last norm. Logits take far more memory than these, so their rows can be
        computed a few at a time.
        """
        return self.layers_over(self.begin(batch), batch, kv_cache)

    def begin(self, batch: ForwardBatch) -> Residual:
        """The stream that the first layer takes: the rows of the embedding, and what tokens have for single layers."""
        embedded = self.embedding(batch.token_ids, batch.positions)
        own = None if self.layer_inputs is None else self.layer_inputs(embedded, batch.token_ids)
        return Residual(embedded, inputs=own)

    def layers_over(self, stream: Residual, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """`hidden` behind `begin`: the layers and the last norm."""
        for layer, kv in zip(self.layers, kv_cache, strict=True):
            stream = layer(stream, batch, kv)
        if len(batch.logit_rows) < len(stream.x):
            stream = stream.rows(batch.logit_rows)
        if self.norm is None:
            return stream.summed(self.layers[-1].mlp_norm)
        _, normed = stream.normed(self.norm)
        assert isinstance(normed, Tensor)  # this norm has no consumer, so it is not quantized
        return normed
