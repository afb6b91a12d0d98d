"""Checkpoint -> Decoder. Every tensor of the checkpoint is taken here, or skipped by name with a reason.

Shapes come from ModelConfig, so a config that contradicts the tensors is an error that names both. q, k, v and gate,
up are merged along the output, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freight.checkpoint.reader import Checkpoint
from freight.config.model import ModelConfig
from freight.fp8.formats import Format
from freight.fp8.quantize import torch_dtype
from freight.fp8.values import Weight
from freight.kernels.kernel_set import KernelSet
from freight.layers.attention import Attention
from freight.layers.embedding import Embedding, LogitsHead
from freight.layers.linear import Linear
from freight.layers.norm import RMSNorm
from freight.layers.rope import Rope, build_rope
from freight.models.architectures import ARCHITECTURES, TensorNames
from freight.models.decoder import MLP, Decoder, DecoderLayer


@dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    config: ModelConfig
    names: TensorNames
    kernels: KernelSet
    dtype: torch.dtype
    device: str
    rope: Rope

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(name, shape).to(device=self.device, dtype=self.dtype).contiguous()

    def linear(self, prefix: str, parts: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
        """The projections `parts`, of `rows` outputs each, merged into one."""
        weights = [Weight(self.tensor(f"{prefix}{p}.weight", n, columns)) for p, n in zip(parts, rows, strict=True)]
        biases = [self.tensor(f"{prefix}{p}.bias", n) for p, n in zip(parts, rows, strict=True)] if bias else None
        return Linear(Weight.concat(weights), torch.cat(biases) if biases else None, self.kernels)

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.tensor(name, size), self.config.rms_norm_eps, self.kernels)

    def layer(self, index: int) -> DecoderLayer:
        c, names, prefix = self.config, self.names, self.names.layer.format(index)
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention = Attention(
            qkv=self.linear(prefix, names.qkv, (q_size, kv_size, kv_size), c.hidden_size, c.qkv_bias),
            o=self.linear(prefix, (names.o,), (c.hidden_size,), q_size, c.o_bias),
            q_norm=self.norm(prefix + names.q_norm, c.head_dim) if c.qk_norm else None,
            k_norm=self.norm(prefix + names.k_norm, c.head_dim) if c.qk_norm else None,
            rope=self.rope,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            window=c.windows[index],
            kernels=self.kernels,
        )
        inner = c.intermediate_size
        mlp = MLP(
            gate_up=self.linear(prefix, names.gate_up, (inner, inner), c.hidden_size, c.mlp_bias),
            down=self.linear(prefix, (names.down,), (c.hidden_size,), inner, c.mlp_bias),
            kernels=self.kernels,
        )
        return DecoderLayer(
            attention_norm=self.norm(prefix + names.attention_norm, c.hidden_size),
            attention=attention,
            mlp_norm=self.norm(prefix + names.mlp_norm, c.hidden_size),
            mlp=mlp,
        )

    def head(self, embedding: Tensor) -> LogitsHead:
        c, name = self.config, self.names.head
        if c.tie_word_embeddings:
            if name in self.checkpoint.names:
                self.checkpoint.skip(name, "tied to the embedding")
            return LogitsHead(Weight(embedding), self.kernels)
        return LogitsHead(Weight(self.tensor(name, c.vocab_size, c.hidden_size)), self.kernels)


def load_model(
    checkpoint: Checkpoint, config: ModelConfig, kernels: KernelSet, compute_format: Format, max_len: int, device: str
) -> Decoder:
    """Read the weights in `compute_format`, for positions below `max_len`.

    Raises CheckpointError for a missing, misshapen or left-over tensor.
    """
    rope = build_rope(config.rope, config.head_dim, max_len, kernels, device)
    names = ARCHITECTURES[config.architecture]
    loader = _Loader(checkpoint, config, names, kernels, torch_dtype(compute_format), device, rope)
    embedding = loader.tensor(names.embedding, config.vocab_size, config.hidden_size)
    decoder = Decoder(
        config=config,
        embedding=Embedding(embedding),
        layers=tuple(loader.layer(index) for index in range(config.num_layers)),
        norm=loader.norm(names.norm, config.hidden_size),
        head=loader.head(embedding),
    )
    checkpoint.finish()
    return decoder
