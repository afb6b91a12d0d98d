"""Loader: checkpoint -> Decoder. Every tensor is taken, or skipped by name with a reason.

The tensors that a model needs follow from ModelConfig alone (`tensor_shapes`), so a config that
contradicts the checkpoint is an error that names both, before a weight is read. q, k, v and gate,
up are merged along the output where that is exact. Mixers are built by `models/mixers.py`. A 16-bit
weight that becomes FP8 is released before the next one is read, so memory peaks near the FP8 size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.checkpoint.linears import find_linears
from freight.checkpoint.mxfp4 import describe, find_experts
from freight.checkpoint.reader import Checkpoint
from freight.config.layer import (
    DenseConfig,
    FeedForward,
    MoEConfig,
    NormPlacement,
    PerLayerEmbeddingConfig,
)
from freight.config.model import ModelConfig
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme
from freight.kernels.interface import KernelSet
from freight.layers.embedding import Embedding, LogitsHead
from freight.layers.moe import ExpertsBeside, Latent, MoE
from freight.layers.norm import Norm, RMSNorm
from freight.layers.per_layer_embeddings import PerLayerEmbedding, PerLayerEmbeddings
from freight.layers.rope import build_ropes
from freight.models.architectures import skipped_parts, tensor_names
from freight.models.building import Builder
from freight.models.decoder import MLP, Decoder, DecoderLayer
from freight.models.expert_weights import Read, expert_matrices
from freight.models.mixers import build_mixer
from freight.models.shapes import kept_in_16_bits, shared_names
from freight.models.shapes import tensor_shapes as tensor_shapes
from freight.models.sources import CheckpointSource, WeightSource, in_halves
from freight.operands.packed import PackedExperts
from freight.operands.rotary import Rotary
from freight.operands.weight import Weight

UNQUANTIZED = Scheme()
logger = logging.getLogger("freight")


@dataclass(frozen=True)
class ModelBuilder(Builder):
    """A builder of layers, and of what comes before and after them."""

    def embedding(self) -> Embedding:
        """Build the embedding, its rows divided by `divisor` and multiplied by the model's
        multiplier.
        """
        weight, multiplier = self.tensor(self.names.embedding), self.config.embedding_multiplier
        if multiplier is not None and self.config.rounds_multiplier:
            multiplier = (
                torch.tensor(multiplier, dtype=torch.float32, device="cpu").to(weight.dtype).item()
            )
        norm = None
        if self.config.embedding_norm:
            ones = torch.full(
                weight.shape[1:], 1 / self.divisor, dtype=torch.float32, device=weight.device
            )
            norm = RMSNorm(ones, self.config.norm_eps, self.kernels)
        elif self.divisor != 1:
            multiplier = (1.0 if multiplier is None else multiplier) / self.divisor
        offset = self.config.position_offset
        positions = None if offset is None else self.tensor(self.names.positions)[offset:]
        return Embedding(
            weight, self.kernels, multiplier, self.outer(self.names.project_in), positions, norm
        )

    def layer(self, index: int, ropes: Mapping[int | None, Rotary]) -> DecoderLayer:
        """Build layer `index`."""
        layer, names, prefix = self.config.layers[index], self.names, self.names.layer.format(index)
        outputs_only, fed = layer.norms is NormPlacement.OUTPUT, layer.feed_forward is not None
        mixer = build_mixer(layer.mixer, self, prefix, ropes)
        mixer_post, mlp_post = (
            self.post_weight(prefix + name) if layer.norms.has_outputs and there else None
            for name, there in ((names.attention_post, mixer is not None), (names.mlp_post, fed))
        )
        scalar = self.tensor(prefix + names.scalar) if layer.scalar else None
        assert scalar is None or (mlp_post is not None and self.config.wide_norms), (
            "the weight of the post norm absorbs the scalar"
        )
        own = (
            None
            if layer.per_layer is None
            else self.per_layer_embedding(layer.per_layer, prefix, scalar)
        )
        return DecoderLayer(
            mixer_norm=self.part_norm(
                prefix + names.attention_norm, mixer_post, outputs_only, mixer is not None
            ),
            mixer=mixer,
            mixer_post=mixer_post,
            mlp_norm=self.part_norm(prefix + names.mlp_norm, mlp_post, outputs_only, fed),
            mlp=self.feed_forward(layer.feed_forward, prefix),
            beside=self.beside(layer.feed_forward, prefix),
            mlp_post=mlp_post
            if scalar is None or mlp_post is None or own is not None
            else mlp_post * scalar.float(),
            post=layer.norms is NormPlacement.POST,
            outputs_only=outputs_only,
            scalar=scalar,
            per_layer=own,
        )

    def part_norm(
        self, name: str, post: Tensor | None, outputs_only: bool, there: bool
    ) -> Norm | None:
        """Build the norm before a part of a layer; None if the part is not `there`. With
        `outputs_only` only its eps is used.
        """
        return self.norm(name, post if outputs_only else None) if there else None

    def per_layer_embedding(
        self, own: PerLayerEmbeddingConfig, prefix: str, scalar: Tensor | None
    ) -> PerLayerEmbedding:
        """Build a layer's part of the per-layer embeddings; `scalar`, if any, becomes part of the
        weight of its norm.
        """
        names, post = self.names, self.norm_weight(prefix + self.names.per_layer_post)
        return PerLayerEmbedding(
            gate=self.linear(prefix, names.per_layer_gate),
            down=self.linear(prefix, names.per_layer_down),
            post=post if scalar is None else post * scalar.float(),
            activation=own.activation,
            kernels=self.kernels,
        )

    def per_layer_embeddings(self, only: int | None = None) -> PerLayerEmbeddings | None:
        """Build the per-layer embeddings of all layers, or of layer `only`; None if the model has
        none.
        """
        c, names = self.config, self.names
        if c.per_layer_vocab_size is None:
            return None
        table = self.source.table(
            names.per_layer_table, self.shapes[names.per_layer_table], c.checkpoint_format
        )
        name, size = f"{names.per_layer_projection}.weight", c.per_layer_size // c.num_layers
        weight = self.source.head(name, self.shapes[name])
        if only is not None:
            assert weight.scale is None, "calibration reads weights that are not quantized"
            columns = slice(only * size, (only + 1) * size)
            table, weight = table[:, columns], Weight(weight.data[columns].contiguous())
        # Gemma 4 divides the norm's input by sqrt(hidden_size); a larger eps has the same effect
        norm = RMSNorm(
            self.norm_weight(names.per_layer_norm), c.norm_eps * c.hidden_size, self.kernels
        )
        return PerLayerEmbeddings(table, size**0.5, self.packed(weight, None), norm)

    def feed_forward(self, mlp: FeedForward, prefix: str) -> MLP | MoE | None:
        """Build a layer's feed-forward: None without one, and the dense part alone if experts run
        in parallel with it.
        """
        names = self.names
        if mlp is None:
            return None
        if isinstance(mlp, DenseConfig):
            return self.dense(mlp, prefix, names.gate_up, names.down)
        if mlp.beside:
            assert mlp.shared is not None
            return self.dense(mlp.shared, prefix, *shared_names(names))
        return self.mixture(mlp, prefix)

    def beside(self, mlp: FeedForward, prefix: str) -> ExpertsBeside | None:
        """Build the experts in parallel with a feed-forward (`MoEConfig.beside`); None if the layer
        has none.
        """
        if not isinstance(mlp, MoEConfig) or not mlp.beside:
            return None
        names, c = self.names, self.config
        scale = self.exact(prefix + names.router_scale) * c.hidden_size**-0.5
        return ExpertsBeside(
            router_norm=RMSNorm(scale, c.norm_eps, self.kernels),
            norm=RMSNorm(self.norm_weight(prefix + names.experts_norm), c.norm_eps, self.kernels),
            moe=self.mixture(replace(mlp, shared=None), prefix),
            shared_norm=RMSNorm(
                self.norm_weight(prefix + names.shared_post), c.norm_eps, self.kernels
            ),
            post=self.norm_weight(prefix + names.experts_post),
        )

    def mixture(self, mlp: MoEConfig, prefix: str) -> MoE:
        """Build a mixture of experts: router, experts, shared expert."""
        names = self.names
        router, biased = prefix + names.router, prefix + names.choice_bias
        matrix = self.exact(f"{router}.weight")
        choice = self.exact(biased).flatten() if mlp.choice_bias else None
        if names.for_pictures:
            assert choice is not None
            matrix, choice = matrix.t().contiguous(), choice[: mlp.num_experts].clone()
        return MoE(
            router=self.kernels.pack(Weight(matrix)),
            routing=mlp.routing,
            gate_up=self.experts(mlp, prefix, *names.expert_gate_up),
            down=self.experts(mlp, prefix, names.expert_down),
            activation=mlp.activation,
            kernels=self.kernels,
            bias=self.exact(f"{router}.bias") if mlp.router_bias else None,
            choice_bias=choice,
            shared=None
            if mlp.shared is None
            else self.dense(mlp.shared, prefix, *shared_names(names)),
            shared_gate=self.outer(prefix + names.shared_gate) if mlp.shared_gate else None,
            expert_scale=self.exact(prefix + names.expert_scale) if mlp.beside else None,
            latent=self.latent(mlp, prefix, matrix.device),
        )

    def latent(self, mlp: MoEConfig, prefix: str, device: torch.device) -> Latent | None:
        """Build the projections around experts in a smaller space (`MoEConfig.latent_size`); None
        if there are none.
        """
        if mlp.latent_size is None:
            return None
        into, out = (
            self.linear(prefix, name) for name in (self.names.latent_in, self.names.latent_out)
        )
        norm = None
        if mlp.shared is not None:
            ones = torch.ones(self.config.hidden_size, dtype=torch.float32, device=device)
            norm = RMSNorm(ones, self.config.norm_eps, self.kernels)
        return Latent(into, out, norm)

    def dense(self, mlp: DenseConfig, prefix: str, gate_up: tuple[str, ...], down: str) -> MLP:
        """Build a feed-forward from the modules `gate_up` and `down`."""
        return MLP(
            self.linear(prefix, *gate_up), self.linear(prefix, down), mlp.activation, self.kernels
        )

    def experts(self, mlp: MoEConfig, prefix: str, *parts: str) -> PackedExperts:
        """Build the projections `parts` of each expert, merged.

        A static input scale is the largest of all experts', because rows are quantized once for all
        experts.
        """
        if self.names.interleaved:
            return self.interleaved(
                prefix + self.names.expert + parts[0], pairs=parts == self.names.expert_gate_up
            )
        modules = [
            [f"{prefix}{self.names.expert.format(i)}{part}" for part in parts]
            for i in range(mlp.num_experts)
        ]
        names = [[f"{module}.weight" for module in group] for group in modules]
        biases = (
            [torch.cat([self.tensor(f"{m}.bias") for m in group]) for group in modules]
            if mlp.bias
            else []
        )
        weights = Read(mlp.num_experts, lambda: expert_matrices(self.source, self.shapes, names))
        return self.kernels.pack_experts(weights, torch.stack(biases) if biases else None)

    def interleaved(self, name: str, pairs: bool) -> PackedExperts:
        """Build the experts of one tensor (`TensorNames.interleaved`). `pairs`: rows of gate and up
        alternate.
        """
        shape = self.shapes[name]
        weights = Read(shape[0], lambda: iter(self.source.experts(name, shape, pairs)))
        bias = self.tensor(f"{name}_bias")
        return self.kernels.pack_experts(weights, in_halves(bias, 1) if pairs else bias)


def model_builder(config: ModelConfig, source: WeightSource, kernels: KernelSet) -> ModelBuilder:
    """Build parts of a model: all of them for `build_decoder`, or one after another for work that
    goes through a model layer by layer and never holds all of it.
    """
    return ModelBuilder(source, config, tensor_names(config), tensor_shapes(config), kernels)


def build_decoder(
    config: ModelConfig, source: WeightSource, kernels: KernelSet, max_len: int, device: str
) -> Decoder:
    """Build the model that `config` describes from the tensors of `source`, for positions below
    `max_len`.
    """
    builder = model_builder(config, source, kernels)
    ropes = build_ropes(config.ropes, max_len, device)
    layers = tuple(builder.layer(index, ropes) for index in range(config.num_layers))
    last = builder.names.norm
    own = None if config.final_norm_offset else builder.norm_weight(last, offset=False)
    norm = builder.norm(last, own) if config.final_norm else None
    embedding, names = builder.embedding(), builder.names
    tied = config.tie_word_embeddings
    head = Weight(embedding.weight) if tied else source.head(names.head, builder.shapes[names.head])
    if config.float32_head and head.scale is None:
        head = Weight(head.data.float())
    projection = builder.outer(names.project_out)
    cap, divisor = config.logit_soft_cap, config.logit_divisor
    logits = LogitsHead(
        kernels.pack(head), kernels, head.input_limit, cap, projection, divisor, config.float32_head
    )
    return Decoder(config, embedding, layers, norm, logits, builder.per_layer_embeddings())


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

    FP8 matrices, which `scheme` declares, become `weight_format`, an E4M3 variant; the others stay
    in `compute_format`. Where no matrix is declared quantized and `weight_format` is FP8, every
    Linear but the head is rounded to it, with a scale per output row and dynamic activations.
    Raises CheckpointError before the first weight is read for tensors that are missing, misshapen
    or left over, for contradictions between declaration and tensors, and for invalid scales.
    """
    names, shapes = tensor_names(config), tensor_shapes(config)
    stored = find_linears(checkpoint, scheme, shapes, kept_in_16_bits(config))
    packed = find_experts(checkpoint, scheme, shapes)
    needed = {
        stored[name].weight if name in stored else name: shape for name, shape in shapes.items()
    }
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
    source = CheckpointSource(
        checkpoint, compute_format, weight_format, device, stored, rounds, packed, keeps
    )
    if packed:
        logger.info("%s", describe(packed, compute_format, keeps))
    return build_decoder(config, source, kernels, max_len, device)
