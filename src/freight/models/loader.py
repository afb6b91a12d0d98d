"""Checkpoint -> Decoder. Every tensor of the checkpoint is taken here, or skipped by name with a reason.

What a model needs follows from ModelConfig alone (`tensor_shapes`), so a config that contradicts the tensors is an
error that names both, before a weight is read. q, k, v and gate, up are merged along the output, which is exact.
A 16-bit weight that becomes FP8 is let go before the next one is read, so memory peaks near the FP8 size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freight.checkpoint.reader import Checkpoint
from freight.config.model import ModelConfig
from freight.fp8.formats import Format
from freight.fp8.quantize import torch_dtype
from freight.fp8.values import Activations, Weight
from freight.fp8.weights import quantize_rows
from freight.kernels.kernel_set import KernelSet
from freight.layers.attention import Attention
from freight.layers.embedding import Embedding, LogitsHead
from freight.layers.linear import Linear
from freight.layers.norm import RMSNorm
from freight.layers.rope import Rope, build_rope
from freight.models.architectures import ARCHITECTURES, TensorNames
from freight.models.decoder import MLP, Decoder, DecoderLayer


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model must have, with its shape."""
    c, names = config, ARCHITECTURES[config.architecture]
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    projections = {
        **dict(zip(names.qkv, ((q_size, c.qkv_bias), (kv_size, c.qkv_bias), (kv_size, c.qkv_bias)), strict=True)),
        **dict.fromkeys(names.gate_up, (c.intermediate_size, c.mlp_bias)),
        names.o: (c.hidden_size, c.o_bias),
        names.down: (c.hidden_size, c.mlp_bias),
    }
    inputs = {names.o: q_size, names.down: c.intermediate_size}
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (c.vocab_size, c.hidden_size),
        names.norm: (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes[names.head] = (c.vocab_size, c.hidden_size)
    for index in range(c.num_layers):
        prefix = names.layer.format(index)
        for name, (rows, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, inputs.get(name, c.hidden_size))
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {prefix + names.attention_norm: (c.hidden_size,), prefix + names.mlp_norm: (c.hidden_size,)}
        if c.qk_norm:
            shapes |= {prefix + names.q_norm: (c.head_dim,), prefix + names.k_norm: (c.head_dim,)}
    return shapes


class WeightSource(Protocol):
    """Where the tensors of a model come from, on the device that it will run on."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An embedding, a head, a norm or a bias, in the compute dtype."""
        ...

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """The matrix of a Linear, as it will be kept."""
        ...


@dataclass(frozen=True)
class CheckpointSource:
    """Takes tensors from a checkpoint; rounds the matrices to `weight_format` if that is FP8."""

    checkpoint: Checkpoint
    compute_format: Format
    weight_format: Format
    device: str

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self.checkpoint.take(name, shape)
        return stored.to(device=self.device, dtype=torch_dtype(self.compute_format)).contiguous()

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        if not self.weight_format.is_fp8:
            return Weight(self.tensor(name, shape))
        stored = self.checkpoint.take(name, shape).to(self.device)
        data, scale = quantize_rows(stored, self.weight_format)
        return Weight(data, scale, Activations.DYNAMIC)


@dataclass(frozen=True)
class _Builder:
    """Puts a model's parts together from the tensors of a source."""

    source: WeightSource
    config: ModelConfig
    names: TensorNames
    shapes: dict[str, tuple[int, ...]]
    kernels: KernelSet

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(name, self.shapes[name])

    def linear(self, prefix: str, *parts: str) -> Linear:
        """The projections `parts`, merged into one."""
        names = [f"{prefix}{part}.weight" for part in parts]
        weights = [self.source.weight(name, self.shapes[name]) for name in names]
        biases = [self.tensor(name) for part in parts if (name := f"{prefix}{part}.bias") in self.shapes]
        packed = self.kernels.pack(Weight.concat(weights))
        return Linear(packed, torch.cat(biases) if biases else None, self.kernels)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(name), self.config.rms_norm_eps, self.kernels)

    def layer(self, index: int, rope: Rope) -> DecoderLayer:
        c, names, prefix = self.config, self.names, self.names.layer.format(index)
        attention = Attention(
            qkv=self.linear(prefix, *names.qkv),
            o=self.linear(prefix, names.o),
            q_norm=self.norm(prefix + names.q_norm) if c.qk_norm else None,
            k_norm=self.norm(prefix + names.k_norm) if c.qk_norm else None,
            rope=rope,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            window=c.windows[index],
            kernels=self.kernels,
        )
        mlp = MLP(self.linear(prefix, *names.gate_up), self.linear(prefix, names.down), self.kernels)
        attention_norm, mlp_norm = self.norm(prefix + names.attention_norm), self.norm(prefix + names.mlp_norm)
        return DecoderLayer(attention_norm, attention, mlp_norm, mlp)


def build_decoder(config: ModelConfig, source: WeightSource, kernels: KernelSet, max_len: int, device: str) -> Decoder:
    """The model that `config` describes, from the tensors of `source`, for positions below `max_len`."""
    names = ARCHITECTURES[config.architecture]
    builder = _Builder(source, config, names, tensor_shapes(config), kernels)
    rope = build_rope(config.rope, config.head_dim, max_len, kernels, device)
    layers = tuple(builder.layer(index, rope) for index in range(config.num_layers))
    norm, embedding = builder.norm(names.norm), builder.tensor(names.embedding)
    head = Weight(embedding if config.tie_word_embeddings else builder.tensor(names.head))
    return Decoder(config, Embedding(embedding), layers, norm, LogitsHead(kernels.pack(head), kernels))


def build_layer(config: ModelConfig, source: WeightSource, kernels: KernelSet, index: int, rope: Rope) -> DecoderLayer:
    """One layer alone, for work that goes through a model layer by layer and never holds all of it."""
    names = ARCHITECTURES[config.architecture]
    return _Builder(source, config, names, tensor_shapes(config), kernels).layer(index, rope)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    kernels: KernelSet,
    compute_format: Format,
    weight_format: Format,
    max_len: int,
    device: str,
) -> Decoder:
    """Read a 16- or 32-bit checkpoint for computing in `compute_format`, for positions below `max_len`.

    `weight_format` is `compute_format`, or an FP8 format that every Linear but the head is rounded to, with a scale
    per output row and dynamic activations.
    Raises CheckpointError for missing and misshapen tensors before the first is read, and for left-over ones.
    """
    checkpoint.check(tensor_shapes(config))
    if config.tie_word_embeddings:
        checkpoint.skip(ARCHITECTURES[config.architecture].head, "tied to the embedding")
    source = CheckpointSource(checkpoint, compute_format, weight_format, device)
    decoder = build_decoder(config, source, kernels, max_len, device)
    checkpoint.finish()
    return decoder
