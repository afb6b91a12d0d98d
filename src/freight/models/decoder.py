"""The decoder: embedding, layers of attention and SwiGLU, norm, head. Data tells the families apart, not classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from freight.batch import ForwardBatch
from freight.cache.pool import LayerKV
from freight.config.model import ModelConfig
from freight.kernels.kernel_set import KernelSet
from freight.layers.attention import Attention
from freight.layers.embedding import Embedding, LogitsHead
from freight.layers.linear import Projection
from freight.layers.norm import RMSNorm


@dataclass(frozen=True)
class MLP:
    """down(silu(gate(x)) * up(x)); gate and up lie along the output."""

    gate_up: Projection
    down: Projection
    kernels: KernelSet

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm residual block."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch, kv)
        return x + self.mlp(self.mlp_norm(x))


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
        """cos and sin, [max_positions, head_dim / 2] float32: what every layer turns its keys by."""
        rope = self.layers[0].attention.rope
        return rope.cos, rope.sin

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerKV]) -> Tensor:
        """Run one step and return float32 logits [num_logit_rows, vocab_size]; K and V go into `kv_cache`."""
        x = self.embedding(batch.token_ids)
        for layer, kv in zip(self.layers, kv_cache, strict=True):
            x = layer(x, batch, kv)
        return self.head(self.norm(x[batch.logit_rows]))
