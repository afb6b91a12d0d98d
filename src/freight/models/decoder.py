"""The decoder: embedding, layers of attention and SwiGLU, norm, head. Data tells the families apart, not classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freight.cache.pool import LayerKV
from freight.config.model import ModelConfig
from freight.kernels.interface import KernelSet
from freight.layers.attention import Attention
from freight.layers.embedding import Embedding, LogitsHead
from freight.layers.linear import Projection
from freight.layers.norm import RMSNorm
from freight.operands.activation import GatedActivation
from freight.operands.batch import ForwardBatch


@dataclass(frozen=True)
class MLP:
    """down(activation(gate(x)) * up(x)); `gate_up` computes both, concatenated along the output."""

    gate_up: Projection
    down: Projection
    activation: GatedActivation
    kernels: KernelSet

    def __call__(self, x: Any) -> Tensor:
        """x: [num_tokens, hidden_size], a tensor or what the norm returned for `gate_up.consumer`."""
        return self.down(self.kernels.gated(self.gate_up(x), self.activation, self.down.consumer))


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm residual block. The final residual add is fused into the next norm."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: LayerKV) -> tuple[Tensor, Tensor]:
        """The residual stream is x + delta, [num_tokens, hidden_size], in the arguments and in the result."""
        x, normed = self.attention_norm(x, delta, self.attention.qkv.consumer)
        x, normed = self.mlp_norm(x, self.attention(normed, batch, kv), self.mlp.gate_up.consumer)
        return x, self.mlp(normed)


@dataclass(frozen=True)
class Decoder:
    """A whole model. Parameters are final at construction."""

    config: ModelConfig
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: LogitsHead

    @property
    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin, [max_positions, head_dim / 2] float32: the rotary angles of every layer."""
        rotary = self.layers[0].attention.rotary
        return rotary.cos, rotary.sin

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """Run one step and return float32 logits [num_logit_rows, vocab_size]; K and V go into `kv_cache`."""
        return self.logits(self.hidden(batch, kv_cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [num_rows, vocab_size] of final states [num_rows, hidden_size]."""
        return self.head(hidden)

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """Run one step and return its final states, normed, [num_logit_rows, hidden_size]; K and V go into `kv_cache`.

        Logits take far more memory than these, so their rows can be computed a few at a time.
        """
        x = self.embedding(batch.token_ids)
        delta: Tensor | None = None
        for layer, kv in zip(self.layers, kv_cache, strict=True):
            x, delta = layer(x, delta, batch, kv)
        assert delta is not None
        if len(batch.logit_rows) < len(x):
            x, delta = x[batch.logit_rows], delta[batch.logit_rows]
        _, normed = self.norm(x, delta)
        assert isinstance(normed, Tensor)  # this norm has no consumer, so it is not quantized
        return normed
