"""Checkpoint -> Decoder. Every tensor of the checkpoint is taken here, or skipped by name with a reason.

What a model needs follows from ModelConfig alone (`tensor_shapes`), so a config that contradicts the tensors is an
error that names both, before a weight is read. q, k, v and gate, up are merged along the output where that is exact.
A 16-bit weight that becomes FP8 is released before the next one is read, so memory peaks near the FP8 size.

A multiplier m of what layers add costs nothing: the residual stream is kept divided by m. It begins with the embedding
divided by m, layers add to it as they are, and a norm with eps / m² of the stream / m is that with eps of the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freight.checkpoint.linears import find_linears
from freight.checkpoint.mxfp4 import describe, find_experts
from freight.checkpoint.reader import Checkpoint
from freight.config.layer import (
    AttentionConfig,
    DenseConfig,
    LayerInputConfig,
    MoEConfig,
    NormKind,
    NormPlacement,
    OutputGate,
)
from freight.config.model import ModelConfig
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme
from freight.kernels.interface import KernelSet
from freight.layers.attention import Attention, HeadGate, QKNorm, ValueNorm
from freight.layers.embedding import Embedding, LogitsHead
from freight.layers.layer_inputs import LayerInput, LayerInputs
from freight.layers.linear import Linear, Projection, UnmergedLinear
from freight.layers.moe import ExpertsBeside, MoE
from freight.layers.norm import LayerNorm, Norm, RMSNorm
from freight.layers.rope import build_ropes, half_pairs
from freight.models.architectures import TensorNames, skipped_parts, tensor_names
from freight.models.decoder import MLP, Decoder, DecoderLayer
from freight.models.shapes import bias_of, kept_in_16_bits, shared_names
from freight.models.shapes import tensor_shapes as tensor_shapes
from freight.models.sources import CheckpointSource, WeightSource, in_halves
from freight.operands.rotary import Rotary
from freight.operands.weight import Weight

UNQUANTIZED = Scheme()
logger = logging.getLogger("freight")


@dataclass(frozen=True)
class _Read:
    """`Weights` that are read as they are asked for."""

    count: int
    read: Callable[[], Iterator[Weight]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Weight]:
        return self.read()


@dataclass(frozen=True)
class _Builder:
    """Builds a model's parts from the tensors of a source."""

    source: WeightSource
    config: ModelConfig
    names: TensorNames
    shapes: dict[str, tuple[int, ...]]
    kernels: KernelSet

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(name, self.shapes[name])

    def exact(self, name: str) -> Tensor:
        return self.source.exact(name, self.shapes[name])

    def linear(self, prefix: str, *parts: str, rows: Sequence[Tensor | None] = ()) -> Projection:
        """The projections `parts`, merged into one matrix if they can be. `rows`: the order of each one's outputs."""
        names = [f"{prefix}{part}.weight" for part in parts]
        weights = [self.source.weight(name, self.shapes[name]) for name in names]
        biases = [self.tensor(name) for part in parts if (name := f"{prefix}{part}.bias") in self.shapes]
        for i, order in enumerate(rows):
            if order is not None:
                weights[i] = weights[i].reordered(order, names[i])
                biases[i : i + 1] = [bias[order] for bias in biases[i : i + 1]]
        if Weight.mergeable(weights):
            return self.packed(Weight.concat(weights), torch.cat(biases) if biases else None)
        return UnmergedLinear(tuple(map(self.packed, weights, biases or (None,) * len(weights))))

    def packed(self, weight: Weight, bias: Tensor | None) -> Linear:
        return Linear(self.kernels.pack(weight), bias, self.kernels, weight.input_limit)

    def norm_weight(self, name: str) -> Tensor:
        """In float32 with an offset, too: 1 + w would be rounded in 16 bits."""
        weight = self.tensor(name)
        return weight.float() + self.config.norm_offset if self.config.wide_norms else weight

    def norm(self, name: str, weight: Tensor | None = None) -> Norm:
        """With the weight of that name, or with `weight`, of a layer whose inputs have no norm (`Residual.summed`)."""
        eps = self.config.norm_eps / self.config.residual_multiplier**2  # the stream is divided by the multiplier
        if self.config.norm_kind is NormKind.LAYER:
            return LayerNorm(self.tensor(name), self.tensor(bias_of(name)), eps, self.kernels)
        return RMSNorm(self.norm_weight(name) if weight is None else weight, eps, self.kernels)

    def embedding(self) -> Embedding:
        weight, multiplier = self.tensor(self.names.embedding), self.config.embedding_multiplier
        if multiplier is not None and self.config.rounds_multiplier:
            multiplier = torch.tensor(multiplier, dtype=torch.float32, device="cpu").to(weight.dtype).item()
        if self.config.residual_multiplier != 1:
            multiplier = (1.0 if multiplier is None else multiplier) / self.config.residual_multiplier
        offset = self.config.position_offset
        positions = None if offset is None else self.tensor(self.names.positions)[offset:]
        return Embedding(weight, multiplier, self.outer(self.names.project_in), positions)

    def outer(self, module: str) -> Linear | None:
        """A projection outside of the layers, if the model has it."""
        name = f"{module}.weight"
        return self.packed(self.source.head(name, self.shapes[name]), None) if name in self.shapes else None

    def layer(self, index: int, ropes: Mapping[int | None, Rotary]) -> DecoderLayer:
        layer, names, prefix = self.config.layers[index], self.names, self.names.layer.format(index)
        mixer, outputs_only = layer.mixer, layer.norms is NormPlacement.OUTPUT
        norms = self.qk_norms(mixer, prefix) if mixer.qk_norm else None
        rotary = replace(ropes[mixer.rope], eps=self.config.norm_eps)
        attention = Attention(
            qkv=self.linear(prefix, *names.qkv_of(mixer), rows=self.qkv_rows(mixer)),
            o=self.linear(prefix, names.o),
            rotary=rotary if norms is None or mixer.qk_norm_whole else replace(rotary, norms=norms),
            softmax_scale=mixer.softmax_scale,
            window=mixer.window,
            soft_cap=mixer.soft_cap,
            shares=mixer.kv_from is not None,
            gate=self.head_gate(mixer.gate, prefix),
            norm=QKNorm(*norms, self.config.norm_eps, self.kernels) if norms and mixer.qk_norm_whole else None,
            v_norm=self.value_norm(mixer, rotary) if mixer.v_norm else None,
            sinks=self.tensor(prefix + names.sinks).float() if mixer.sinks else None,
        )
        attention_post, mlp_post = (
            self.norm_weight(prefix + name) if layer.norms.has_outputs else None
            for name in (names.attention_post, names.mlp_post)
        )
        scalar = self.tensor(prefix + names.scalar) if layer.scalar else None
        assert scalar is None or (mlp_post is not None and self.config.wide_norms), (
            "the norm of what is added takes the scalar in"
        )
        own = None if layer.input is None else self.layer_input(layer.input, prefix, scalar)
        return DecoderLayer(
            attention_norm=self.norm(prefix + names.attention_norm, attention_post if outputs_only else None),
            attention=attention,
            attention_post=attention_post,
            mlp_norm=self.norm(prefix + names.mlp_norm, mlp_post if outputs_only else None),
            mlp=self.feed_forward(layer.feed_forward, prefix),
            beside=self.beside(layer.feed_forward, prefix),
            mlp_post=mlp_post if scalar is None or mlp_post is None or own is not None else mlp_post * scalar.float(),
            post=layer.norms is NormPlacement.POST,
            outputs_only=outputs_only,
            scalar=scalar,
            input=own,
        )

    def layer_input(self, own: LayerInputConfig, prefix: str, scalar: Tensor | None) -> LayerInput:
        names, post = self.names, self.norm_weight(prefix + self.names.own_post)
        return LayerInput(
            gate=self.linear(prefix, names.own_gate),
            down=self.linear(prefix, names.own_down),
            post=post if scalar is None else post * scalar.float(),
            activation=own.activation,
            kernels=self.kernels,
        )

    def layer_inputs(self, only: int | None = None) -> LayerInputs | None:
        """Those of all layers, or of one."""
        c, names = self.config, self.names
        if c.input_vocab_size is None:
            return None
        table = self.source.table(names.own_table, self.shapes[names.own_table], c.checkpoint_format)
        name, size = f"{names.own_projection}.weight", c.input_size // c.num_layers
        weight = self.source.head(name, self.shapes[name])
        if only is not None:
            assert weight.scale is None, "calibration reads weights that are not quantized"
            columns = slice(only * size, (only + 1) * size)
            table, weight = table[:, columns], Weight(weight.data[columns].contiguous())
        # Gemma 4 divides what the norm takes by the root of hidden_size, which a larger eps does as well
        norm = RMSNorm(self.norm_weight(names.own_norm), c.norm_eps * c.hidden_size, self.kernels)
        return LayerInputs(table, size**0.5, self.packed(weight, None), norm)

    def qk_norms(self, mixer: AttentionConfig, prefix: str) -> tuple[Tensor, Tensor]:
        """The weights for q and k. A layer that reads another's keys has none for k: q's stands there, unused."""
        q = self.norm_weight(prefix + self.names.q_norm)
        return q, q if mixer.kv_from is not None else self.norm_weight(prefix + self.names.k_norm)

    def head_gate(self, gate: OutputGate | None, prefix: str) -> HeadGate | None:
        projection = None if gate is None else self.outer(prefix + self.names.head_gate)
        return None if gate is None or projection is None else HeadGate(projection, gate.function)

    def value_norm(self, mixer: AttentionConfig, rotary: Rotary) -> ValueNorm:
        ones = torch.ones(mixer.v_dim, dtype=torch.float32, device=rotary.cos.device)
        return ValueNorm(ones, mixer.qkv_sizes[2], mixer.k_eq_v, self.config.norm_eps, self.kernels)

    def qkv_rows(self, mixer: AttentionConfig) -> tuple[Tensor | None, ...]:
        """The order of the rows of each matrix that q, k and v are stored in; None: as they are (`RopeConfig`)."""
        if mixer.rope is None or not self.config.ropes[mixer.rope].interleaved:
            return ()
        assert not mixer.qk_norm, "the weights of these norms would need the same order"
        rotary_dim = self.config.ropes[mixer.rope].rotary_dim
        q, k = (half_pairs(heads, mixer.k_dim, rotary_dim) for heads in (mixer.num_heads, mixer.num_kv_heads))
        if len(self.names.qkv) > 1:
            return q, k, None
        v = torch.arange(sum(mixer.qkv_sizes), dtype=torch.int64, device="cpu")[len(q) + len(k) :]
        return (torch.cat((q, k + len(q), v)),)

    def feed_forward(self, mlp: DenseConfig | MoEConfig, prefix: str) -> MLP | MoE:
        names = self.names
        if isinstance(mlp, DenseConfig):
            return self.dense(mlp, prefix, names.gate_up, names.down)
        if mlp.beside:
            assert mlp.shared is not None
            return self.dense(mlp.shared, prefix, *shared_names(names))
        return self.mixture(mlp, prefix)

    def beside(self, mlp: DenseConfig | MoEConfig, prefix: str) -> ExpertsBeside | None:
        """The experts beside a feed-forward (`MoEConfig.beside`), if the layer has such."""
        if not isinstance(mlp, MoEConfig) or not mlp.beside:
            return None
        names, c = self.names, self.config
        scale = self.exact(prefix + names.router_scale) * c.hidden_size**-0.5
        return ExpertsBeside(
            router_norm=RMSNorm(scale, c.norm_eps, self.kernels),
            norm=RMSNorm(self.norm_weight(prefix + names.experts_norm), c.norm_eps, self.kernels),
            moe=self.mixture(replace(mlp, shared=None), prefix),
            shared_norm=RMSNorm(self.norm_weight(prefix + names.shared_post), c.norm_eps, self.kernels),
            post=self.norm_weight(prefix + names.experts_post),
        )

    def mixture(self, mlp: MoEConfig, prefix: str) -> MoE:
        names = self.names
        router, biased = prefix + names.router, prefix + names.choice_bias
        gate = Weight(self.exact(f"{router}.weight"))
        return MoE(
            gate=self.kernels.pack(gate),
            routing=mlp.routing,
            gate_up=self.experts(mlp, prefix, *names.expert_gate_up),
            down=self.experts(mlp, prefix, names.expert_down),
            activation=mlp.activation,
            kernels=self.kernels,
            bias=self.exact(f"{router}.bias") if mlp.router_bias else None,
            choice_bias=self.exact(biased).flatten() if mlp.choice_bias else None,
            shared=None if mlp.shared is None else self.dense(mlp.shared, prefix, *shared_names(names)),
            shared_gate=self.outer(prefix + names.shared_gate) if mlp.shared_gate else None,
            expert_scale=self.exact(prefix + names.expert_scale) if mlp.beside else None,
        )

    def dense(self, mlp: DenseConfig, prefix: str, gate_up: tuple[str, ...], down: str) -> MLP:
        return MLP(self.linear(prefix, *gate_up), self.linear(prefix, down), mlp.activation, self.kernels)

    def experts(self, mlp: MoEConfig, prefix: str, *parts: str) -> Any:
        """The projections `parts` of each expert, merged. A static input scale is the largest of all experts', as the
        rows are quantized once for all of them."""
        if self.names.interleaved:
            return self.interleaved(prefix + self.names.expert + parts[0], pairs=parts == self.names.expert_gate_up)
        modules = [[f"{prefix}{self.names.expert.format(i)}{part}" for part in parts] for i in range(mlp.num_experts)]
        names = [[f"{module}.weight" for module in group] for group in modules]
        biases = [torch.cat([self.tensor(f"{m}.bias") for m in group]) for group in modules] if mlp.bias else []
        weights = _Read(mlp.num_experts, lambda: self.merged(names))
        return self.kernels.pack_experts(weights, torch.stack(biases) if biases else None)

    def merged(self, names: list[list[str]]) -> Iterator[Weight]:
        """The matrix of each expert, of the tensors `names`. Raises CheckpointError where they are not of one kind."""
        scales = [scale for group in names for name in group if (scale := self.source.input_scale(name)) is not None]
        largest, first = max(scales, default=None), None
        for group in names:
            weights = [replace(self.source.weight(name, self.shapes[name]), input_scale=largest) for name in group]
            first = first or replace(weights[0], data=weights[0].data[:0])
            if not Weight.mergeable(weights) or not Weight.alike([first, weights[0]]):
                raise CheckpointError(
                    f"{names[0][0]} and the other experts of this layer are not quantized alike, or blocks of scales "
                    f"span gate and up ({len(weights[0].data)} rows each): they cannot be computed together; quantize "
                    "all of them in the same way, with a scale per row if their rows are no multiple of 128"
                )
            if weights[0].input_limit is not None:
                raise CheckpointError(
                    f"{names[0][0]} and the other experts of this layer: config.json clips their inputs to "
                    f"{weights[0].input_limit:g} (activation_scale_ub, activation_value_ub), which is not implemented "
                    "for experts; quantize them without a limit"
                )
            merged = Weight.concat(weights)
            del weights
            yield merged
            del merged

    def interleaved(self, name: str, pairs: bool) -> Any:
        """The experts of one tensor (`TensorNames.interleaved`); `pairs`: rows of gate and up in turn."""
        shape = self.shapes[name]
        weights = _Read(shape[0], lambda: iter(self.source.experts(name, shape, pairs)))
        bias = self.tensor(f"{name}_bias")
        return self.kernels.pack_experts(weights, in_halves(bias, 1) if pairs else bias)


def _builder(config: ModelConfig, source: WeightSource, kernels: KernelSet) -> _Builder:
    return _Builder(source, config, tensor_names(config), tensor_shapes(config), kernels)


def build_decoder(config: ModelConfig, source: WeightSource, kernels: KernelSet, max_len: int, device: str) -> Decoder:
    """The model that `config` describes, from the tensors of `source`, for positions below `max_len`."""
    builder = _builder(config, source, kernels)
    ropes = build_ropes(config.ropes, max_len, device)
    layers = tuple(builder.layer(index, ropes) for index in range(config.num_layers))
    norm = builder.norm(builder.names.norm) if config.final_norm else None
    embedding, names = builder.embedding(), builder.names
    tied = config.tie_word_embeddings
    head = Weight(embedding.weight) if tied else source.head(names.head, builder.shapes[names.head])
    if config.float32_head and head.scale is None:
        head = Weight(head.data.float())
    projection = builder.outer(names.project_out)
    cap, divisor = config.logit_soft_cap, config.logit_divisor
    logits = LogitsHead(kernels.pack(head), kernels, head.input_limit, cap, projection, divisor, config.float32_head)
    return Decoder(config, embedding, layers, norm, logits, builder.layer_inputs())


def build_embedding(config: ModelConfig, source: WeightSource, kernels: KernelSet) -> Embedding:
    """The embedding alone, for work that goes through a model layer by layer and never holds all of it."""
    return _builder(config, source, kernels).embedding()


def build_layer_inputs(config: ModelConfig, source: WeightSource, kernels: KernelSet, index: int) -> LayerInputs | None:
    """What each token has for one layer (`build_embedding`); None in models that have no such thing."""
    return _builder(config, source, kernels).layer_inputs(index)


def build_layer(
    config: ModelConfig, source: WeightSource, kernels: KernelSet, index: int, ropes: Mapping[int | None, Rotary]
) -> DecoderLayer:
    """One layer alone (`build_embedding`)."""
    return _builder(config, source, kernels).layer(index, ropes)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    kernels: KernelSet,
    compute_format: Format,
    weight_format: Format,
    max_len: int,
    device: str,
    scheme: Scheme = UNQUANTIZED,
) -> Decoder:
    """Read a checkpoint for computing in `compute_format`, for positions below `max_len`.

    FP8 matrices, which `scheme` declares, become `weight_format`, an E4M3 variant; the others stay in `compute_format`.
    Where no matrix is declared quantized and `weight_format` is FP8, every Linear but the head is rounded to it, with
    a scale per output row and dynamic activations.
    Raises CheckpointError before the first weight is read for tensors that are missing, misshapen or left over, for
    contradictions between declaration and tensors, and for invalid scales.
    """
    names, shapes = tensor_names(config), tensor_shapes(config)
    stored = find_linears(checkpoint, scheme, shapes, kept_in_16_bits(config))
    packed = find_experts(checkpoint, scheme, shapes)
    needed = {stored[name].weight if name in stored else name: shape for name, shape in shapes.items()}
    for name, experts in packed.items():
        del needed[name]
        needed |= experts.tensors
    checkpoint.check(needed)
    if config.tie_word_embeddings:
        checkpoint.skip(names.head.removesuffix("weight") + "*", "tied to the embedding")
    for pattern, reason in (*names.unused, *scheme.unused):
        checkpoint.skip(pattern, reason)
    for reason, count in skipped_parts(config, checkpoint.names).items():
        logger.info("skipping %d tensors %s", count, reason)
    checkpoint.finish(pending=needed)
    rounds = scheme.weight_format is None
    keeps = kernels.packs_mxfp4
    source = CheckpointSource(checkpoint, compute_format, weight_format, device, stored, rounds, packed, keeps)
    if packed:
        logger.info("%s", describe(packed, compute_format, keeps))
    return build_decoder(config, source, kernels, max_len, device)
