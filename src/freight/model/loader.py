"""Loader: checkpoint -> Decoder. Every tensor is taken, or skipped by name with a reason.

The tensors that a model needs follow from ModelConfig alone (`tensor_shapes`), so a config that
contradicts the checkpoint is an error that names both, before a weight is read. Where it is exact,
q, k and v become one matrix, and gate and up another, stacked along the output. Mixers are built by
`model/mixers/`. A 16-bit weight that becomes FP8 is released before the next one is read, so
memory peaks near the FP8 size.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.checkpoint.four_bits import StoredGroups, StoredPowers
from freight.checkpoint.gguf.stored import StoredBlocks, find_blocks
from freight.checkpoint.headers import Shape
from freight.checkpoint.linears import StoredLinear
from freight.checkpoint.mxfp4 import StoredExperts, describe
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError, ConfigError, listed
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme
from freight.kernels.interface import KernelSet
from freight.model.adapters import AdapterBanks
from freight.model.architectures import tensor_names
from freight.model.building import Builder
from freight.model.config.layer import (
    DenseConfig,
    FeedForward,
    MoEConfig,
    NormPlacement,
    PerLayerEmbeddingConfig,
)
from freight.model.config.model import ModelConfig
from freight.model.config.pooling import PoolingConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.decoder import Decoder, DecoderLayer
from freight.model.feed_forward.expert_modules import expert_modules
from freight.model.feed_forward.expert_weights import Read, expert_matrices
from freight.model.feed_forward.mlp import MLP
from freight.model.feed_forward.moe import Latent, MoE, ParallelExperts
from freight.model.layers.embedding import Embedding, LogitsHead
from freight.model.layers.linear import GatheredLinear
from freight.model.layers.norm import RMSNorm
from freight.model.layers.per_layer_embeddings import PerLayerEmbedding, PerLayerEmbeddings
from freight.model.layers.rope import build_ropes
from freight.model.mixers.dividing import Pieces, Rank
from freight.model.mixers.registry import build_mixer
from freight.model.moved import Mover
from freight.model.pooler import LoadedLayer, Pooler
from freight.model.shapes import shared_names
from freight.model.shapes import tensor_shapes as tensor_shapes
from freight.model.shares import Share, share_of
from freight.model.sources import CheckpointSource, RankSource, Stored, WeightSource, in_halves
from freight.model.stored import find_stored
from freight.operands.adapters import ExpertBanks
from freight.operands.experts import ExpertLayers, Router
from freight.operands.packed import PackedExperts, PackedWeight
from freight.operands.rotary import Rotary
from freight.operands.weight import Weight
from freight.parallel.stages import Stage
from freight.settings.lora import LoraConfig

UNQUANTIZED = Scheme()
logger = logging.getLogger("freight")


@dataclass(frozen=True)
class ModelBuilder(Builder):
    """A builder of layers, and of the embeddings before them."""

    def embedding(self) -> Embedding:
        """Build the embedding. Its rows are multiplied by `ModelConfig.embedding_multiplier` and
        divided by `divisor`.
        """
        stored = self.source.embedding(self.names.embedding, self.shapes[self.names.embedding])
        weight: Tensor | PackedWeight
        if isinstance(stored, Weight):
            weight = self.kernels.pack(stored)
        else:
            weight = stored
        device = stored.data.device if isinstance(stored, Weight) else stored.device
        dtype = torch_dtype(self.source.compute_format)
        multiplier = self.config.embedding_multiplier
        if multiplier is not None and self.config.rounds_multiplier:
            exact = torch.tensor(multiplier, dtype=torch.float32, device="cpu")
            multiplier = exact.to(dtype).item()
        norm = None
        if self.config.embedding_norm:
            # The norm has no weights of the model: these divide its result by `divisor`.
            width = self.config.embedding_size or self.config.hidden_size
            factors = torch.full((width,), 1 / self.divisor, dtype=torch.float32, device=device)
            norm = RMSNorm(factors, self.config.norm_eps, self.kernels)
        elif self.divisor != 1:
            multiplier = (1.0 if multiplier is None else multiplier) / self.divisor
        return Embedding(
            weight,
            self.kernels,
            multiplier,
            projection=self.outer(self.names.project_in),
            positions=self.positions(),
            num_positions=self.config.max_position_embeddings,
            norm=norm,
            last_norm=self.norm(self.names.embedded_norm) if self.config.norms_embedded else None,
            gathers=self.share is not None,
            dtype=dtype,
        )

    def positions(self) -> Tensor | None:
        """Read the embedding of positions, in a model with token types once for each of these, each row
        plus that of the type; None if the model has none.
        """
        offset = self.config.position_offset
        if offset is None:
            return None
        rows = self.tensor(self.names.positions)[offset:]
        if not self.config.token_types:
            return rows
        types = self.tensor(self.names.token_types)
        return (types[:, None] + rows).flatten(0, 1)

    def layer(self, index: int, ropes: Mapping[int | None, Rotary]) -> DecoderLayer:
        """Build layer `index`."""
        layer = self.config.layers[index]
        names = self.names
        prefix = names.layer.format(index)
        has_mlp = layer.feed_forward is not None
        has_posts = layer.norms.has_outputs
        mixer = build_mixer(layer.mixer, self, prefix, ropes)
        mixer_post = mlp_post = None
        if has_posts and mixer is not None:
            mixer_post = self.post_weight(prefix + names.attention_post)
        if has_posts and has_mlp:
            mlp_post = self.post_weight(prefix + names.mlp_post)
        mixer_norm = mlp_norm = None
        if layer.norms is NormPlacement.OUTPUT:
            # No input is normed: these norms only add the stream up (`Residual.summed`), and the
            # weights of the outputs' norms stand in for theirs.
            if mixer_post is not None:
                mixer_norm = self.norm(prefix + names.attention_norm, mixer_post)
            if mlp_post is not None:
                mlp_norm = self.norm(prefix + names.mlp_norm, mlp_post)
        else:
            if has_mlp:
                mlp_norm = self.norm(prefix + names.mlp_norm)
            if layer.raw_mixer:
                mixer_norm = mlp_norm  # it only adds the stream up
            elif mixer is not None:
                mixer_norm = self.norm(prefix + names.attention_norm)
        scalar = self.tensor(prefix + names.scalar) if layer.scalar else None
        per_layer = None
        if layer.per_layer is not None:
            per_layer = self.per_layer_embedding(layer.per_layer, prefix, scalar)
        if scalar is not None:
            assert mlp_post is not None, "the weight of a post norm absorbs the scalar"
            assert self.config.wide_norms, "a weight in 16 bits would be rounded again"
            if per_layer is None:  # else the norm of `per_layer` is the last one
                mlp_post = mlp_post * scalar.float()
        return DecoderLayer(
            mixer_norm=mixer_norm,
            mixer=mixer,
            mixer_post=mixer_post,
            mlp_norm=mlp_norm,
            mlp=self.feed_forward(layer.feed_forward, prefix),
            parallel_experts=self.parallel_experts(layer.feed_forward, prefix),
            mlp_post=mlp_post,
            placement=layer.norms,
            raw_mixer=layer.raw_mixer,
            scalar=scalar,
            per_layer=per_layer,
        )

    def per_layer_embedding(
        self, config: PerLayerEmbeddingConfig, prefix: str, scalar: Tensor | None
    ) -> PerLayerEmbedding:
        """Build a layer's part of the per-layer embeddings. The weight of its norm is multiplied by
        `scalar`, the layer's factor, if there is one.
        """
        names = self.names
        post = self.norm_weight(prefix + names.per_layer_post)
        return PerLayerEmbedding(
            gate=self.gathered(prefix, names.per_layer_gate, inputs=False),
            down=self.gathered(prefix, names.per_layer_down, inputs=False),
            post=post if scalar is None else post * scalar.float(),
            activation=config.activation,
            kernels=self.kernels,
        )

    def per_layer_embeddings(self, only: int | None = None) -> PerLayerEmbeddings | None:
        """Build the per-layer embeddings of all layers, or of layer `only` alone; None if the model
        has none.
        """
        c = self.config
        names = self.names
        if c.per_layer_vocab_size is None:
            return None
        stored = self.source.table(
            names.per_layer_table, self.shapes[names.per_layer_table], c.checkpoint_format
        )
        table: Tensor | PackedWeight
        if isinstance(stored, Weight):
            table = self.kernels.pack(stored)
        else:
            table = stored
        name = f"{names.per_layer_projection}.weight"
        weight = self.source.head(name, self.shapes[name])
        size = c.per_layer_size // c.num_layers  # values of a token's vector for one layer
        if only is not None:
            assert weight.scale is None, "calibration reads weights that are not quantized"
            assert isinstance(table, Tensor)
            part = slice(only * size, (only + 1) * size)
            table = table[:, part]
            weight = Weight(weight.data[part].contiguous())
        # Gemma 4 divides the norm's input by sqrt(hidden_size); a larger eps has the same effect
        norm = RMSNorm(
            self.norm_weight(names.per_layer_norm), c.norm_eps * c.hidden_size, self.kernels
        )
        projection = self.packed(weight, None)
        if self.share is None:
            return PerLayerEmbeddings(table, size**0.5, projection, norm)
        columns = Rank(self.share.rank, self.share.size).part(c.per_layer_size)
        gathered = GatheredLinear(projection, self.kernels, inputs=False)
        return PerLayerEmbeddings(table, size**0.5, gathered, norm, (columns.start, columns.stop))

    def feed_forward(self, mlp: FeedForward, prefix: str) -> MLP | MoE | None:
        """Build a layer's feed-forward; None if the layer has none. If experts run in parallel with
        it, it is the dense part alone: `parallel_experts` builds the experts.
        """
        names = self.names
        if mlp is None:
            return None
        if isinstance(mlp, DenseConfig):
            return self.dense(mlp, prefix, names.gate_up, names.down)
        if mlp.parallel_experts:
            assert mlp.shared is not None
            return self.dense(mlp.shared, prefix, *shared_names(names))
        return self.mixture(mlp, prefix)

    def parallel_experts(self, mlp: FeedForward, prefix: str) -> ParallelExperts | None:
        """Build the experts that run in parallel with a feed-forward (`MoEConfig.parallel_experts`); None if
        the layer has none.
        """
        if not isinstance(mlp, MoEConfig) or not mlp.parallel_experts:
            return None
        names = self.names
        c = self.config
        # The router's norm has no weights; the model multiplies its result by these factors.
        router_factors = self.exact(prefix + names.router_scale) * c.hidden_size**-0.5
        return ParallelExperts(
            router_norm=RMSNorm(router_factors, c.norm_eps, self.kernels),
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
        router = prefix + names.router
        matrix = self.exact(f"{router}.weight")
        choice_bias = None
        if mlp.choice_bias:
            choice_bias = self.exact(prefix + names.choice_bias).flatten()
        if names.for_pictures:  # the router is stored transposed; the text's bias comes first
            assert choice_bias is not None
            matrix = matrix.t().contiguous()
            choice_bias = choice_bias[: mlp.num_experts].clone()
        gate_up = self.experts(mlp, prefix, *names.expert_gate_up)
        down = self.experts(mlp, prefix, names.expert_down)
        shared = None
        if mlp.shared is not None:
            shared = self.dense(mlp.shared, prefix, *shared_names(names))
        return MoE(
            router=Router(
                matrix=self.kernels.pack(Weight(matrix)),
                routing=mlp.routing,
                bias=self.exact(f"{router}.bias") if mlp.router_bias else None,
                choice_bias=choice_bias,
                expert_scale=self.exact(prefix + names.expert_scale)
                if mlp.parallel_experts
                else None,
            ),
            experts=ExpertLayers(gate_up, down, mlp.activation, self.expert_banks(mlp, prefix)),
            kernels=self.kernels,
            shared=shared,
            shared_gate=self.gate(prefix + names.shared_gate) if mlp.shared_gate else None,
            latent=self.latent(mlp, prefix, matrix.device),
        )

    def latent(self, mlp: MoEConfig, prefix: str, device: torch.device) -> Latent | None:
        """Build the projections around experts that work in a smaller space
        (`MoEConfig.latent_size`); None if they do not.
        """
        if mlp.latent_size is None:
            return None
        inner = self.gathered(prefix, self.names.latent_in, inputs=False)
        outer = self.gathered(prefix, self.names.latent_out, inputs=False)
        add = None
        if mlp.shared is not None:  # only the sum is used, so the norm's weight does not matter
            ones = torch.ones(self.config.hidden_size, dtype=torch.float32, device=device)
            add = RMSNorm(ones, self.config.norm_eps, self.kernels)
        return Latent(inner, outer, add)

    def dense(self, mlp: DenseConfig, prefix: str, gate_up: tuple[str, ...], down: str) -> MLP:
        """Build a feed-forward from the modules `gate_up` and `down`."""
        return MLP(
            self.linear(prefix, *gate_up), self.gathered(prefix, down), mlp.activation, self.kernels
        )

    def experts(self, mlp: MoEConfig, prefix: str, *parts: str) -> PackedExperts:
        """Build one matrix for each expert: its projections `parts`, merged.

        Experts with static input scales all get the largest one, because rows are quantized once
        for all experts.
        """
        if self.names.interleaved:
            return self.interleaved(
                prefix + self.names.expert + parts[0], pairs=parts == self.names.expert_gate_up
            )
        weight_names: list[list[str]] = []
        biases: list[Tensor] = []
        for index in range(mlp.num_experts):
            expert = prefix + self.names.expert.format(index)
            weight_names.append([f"{expert}{part}.weight" for part in parts])
            if mlp.bias:
                biases.append(torch.cat([self.tensor(f"{expert}{part}.bias") for part in parts]))

        def read() -> Iterator[Weight]:
            return expert_matrices(self.source, self.shapes, weight_names)

        weights = Read(mlp.num_experts, read)
        return self.kernels.pack_experts(weights, torch.stack(biases) if biases else None)

    def expert_banks(self, mlp: MoEConfig, prefix: str) -> ExpertBanks | None:
        """Build the banks of a mixture's experts; None if projections have no banks."""
        if self.banks is None:
            return None
        experts = expert_modules(self.names, mlp.num_experts)
        gate_up = [[prefix + module for module in expert.gate_up] for expert in experts]
        down = [[prefix + expert.down] for expert in experts]
        if self.names.interleaved:
            of_all = prefix + self.names.expert
            _, inputs, both = self.shapes[of_all + self.names.expert_gate_up[0]]
            _, width, outputs = self.shapes[of_all + self.names.expert_down]
            of_gate_up: list[Shape] = [(both // 2, inputs)] * 2
            of_down: list[Shape] = [(outputs, width)]
        else:
            of_gate_up = [self.shapes[f"{module}.weight"] for module in gate_up[0]]
            of_down = [self.shapes[f"{down[0][0]}.weight"]]
        return ExpertBanks(
            self.banks.add_experts(gate_up, of_gate_up),
            self.banks.add_experts(down, of_down),
            mlp.num_experts,
        )

    def interleaved(self, name: str, pairs: bool) -> PackedExperts:
        """Build one matrix for each expert from the tensor `name`, which has all of them
        (`TensorNames.interleaved`). `pairs`: its outputs of gate and up alternate.
        """
        shape = self.shapes[name]  # [experts, inputs, outputs]

        def read() -> Iterator[Weight]:
            return iter(self.source.experts(name, shape, pairs))

        bias = self.tensor(f"{name}_bias")  # [experts, outputs]
        if pairs:
            bias = in_halves(bias, 1)
        return self.kernels.pack_experts(Read(shape[0], read), bias)


def model_builder(
    config: ModelConfig,
    source: WeightSource,
    kernels: KernelSet,
    share: Share | None = None,
    banks: AdapterBanks | None = None,
) -> ModelBuilder:
    """Return a builder of the parts of a model. `build_decoder` builds all of them; work that goes
    through a model layer by layer builds one at a time and never holds all.

    `share`: the part of it that a rank has; `config` and `source` are then the rank's. `banks`: as in
    `Builder`.
    """
    names = tensor_names(config)
    if share is not None:
        return replace(builder_of_share(source, share, names, kernels), config=config, banks=banks)
    return ModelBuilder(source, config, names, tensor_shapes(config), kernels, None, banks)


def builder_of_share(
    source: WeightSource, share: Share, names: TensorNames, kernels: KernelSet
) -> ModelBuilder:
    """Return a builder of the parts that a rank has. `source` reads the rank's tensors."""
    own = RankSource(source, share.uncut)
    return ModelBuilder(own, share.model, names, dict(share.shapes), kernels, share)


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    kernels: KernelSet,
    max_len: int,
    device: str,
    share: Share | None = None,
    lora: LoraConfig | None = None,
    stages: tuple[Stage, ...] = (),
) -> Decoder:
    """Build the model that `config` describes from the tensors of `source`, for positions below
    `max_len`. `share` is as for `model_builder`; `lora`: the memory for adapters, None for none.
    `stages`: where the layers are, the first on `device`; none if all is there.
    """
    banks = None
    if lora is not None:
        dtype = torch_dtype(source.compute_format)
        banks = AdapterBanks(lora.num_slots, lora.max_rank, dtype, device, share)
    builder = model_builder(config, source, kernels, share, banks)
    ropes = build_ropes(config.ropes, max_len, device)
    layers = tuple(_staged_layers(builder, ropes, stages))
    to_last = Mover(stages[-1].device if stages else device)
    names = builder.names
    final_norm = None
    if config.final_norm:
        weight = None  # the stored one, with the offset that all norms have
        if not config.final_norm_offset:
            weight = builder.norm_weight(names.norm, offset=False)
        final_norm = to_last(builder.norm(names.norm, weight))
    embedding = builder.embedding()
    per_layer = builder.per_layer_embeddings()
    parts = (config, embedding, layers, final_norm)
    if not config.has_head:
        return Decoder(*parts, None, per_layer, banks, stages=stages)
    input_limit = None
    packed_head: PackedWeight
    if not config.tie_word_embeddings:
        head = builder.source.head(names.head, builder.shapes[names.head])
        input_limit = head.input_limit
        packed_head = kernels.pack(head)
    elif isinstance(embedding.weight, Tensor):
        packed_head = kernels.pack(Weight(embedding.weight))
    else:
        packed_head = embedding.weight
    logits_head = LogitsHead(
        packed_head,
        kernels,
        input_limit=input_limit,
        soft_cap=config.logit_soft_cap,
        projection=builder.outer(names.project_out),
        divisor=config.logit_divisor,
        gathered=None if share is None else config.vocab_size,
    )
    return Decoder(*parts, to_last(logits_head), per_layer, banks, stages=stages)


def _staged_layers(
    builder: ModelBuilder, ropes: Mapping[int | None, Rotary], stages: Sequence[Stage]
) -> Iterator[DecoderLayer]:
    """Build each layer, on the device of its stage. On a GPU no more than one is on the first device
    on its way to another.
    """
    if not stages:
        for index in range(builder.config.num_layers):
            yield builder.layer(index, ropes)
    for stage in stages:
        move = Mover(stage.device)
        if builder.banks is not None:
            builder.banks.device = stage.device
        for index in stage.layers:
            yield move(builder.layer(index, ropes))


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    kernels: KernelSet,
    compute_format: Format,
    weight_format: Format,
    max_len: int,
    device: str,
    scheme: Scheme = UNQUANTIZED,
    share: Share | None = None,
    int4: bool = False,
    lora: LoraConfig | None = None,
    stages: tuple[Stage, ...] = (),
) -> Decoder:
    """Read a checkpoint for computing in `compute_format`, for positions below `max_len`.

    `config` is the whole model, of which a rank reads its `share` alone. `stages` as in
    `build_decoder`.

    Matrices that `scheme` declares to be FP8 or INT8 become `weight_format`, an E4M3 variant or
    INT8, those that it declares to be in 4 bits stay so, and the others become `compute_format`. If
    it declares no matrix quantized and `weight_format` has 8 bits, every Linear but the head is
    rounded to that, with a scale per output row and dynamic activations, or with `int4` to INT4 in
    groups. Before the first weight is read, raises CheckpointError for tensors that are missing,
    misshapen or left over, for contradictions between declaration and tensors, and for invalid
    scales; ConfigError for weights in 4 bits that the kernels do not compute with.
    """
    matrices = find_stored(checkpoint, config, scheme)
    linears = matrices.linears
    packed = matrices.packed
    require_groups(kernels, matrices.four, int4)
    stored: dict[str, Stored] = {**linears, **matrices.four}
    if kernels.multiplies_blocks and not weight_format.is_quantized:
        stored |= computed_blocks(checkpoint, config, tensor_names(config), tensor_shapes(config))
    if share is not None:
        of_all = (share_of(share.whole, rank, share.size) for rank in range(share.size))
        require_whole_blocks(of_all, linears)
        stored, packed = present_share(checkpoint, share, stored, packed)
        config = replace(share.model, ropes=config.ropes)
    source = CheckpointSource(
        checkpoint,
        compute_format,
        weight_format,
        device,
        stored,
        rounds=scheme.weight_format is None,  # a quantized one keeps its 16-bit matrices
        packed=packed,
        keeps_mxfp4=kernels.packs_mxfp4,
        int4=int4,
    )
    if packed:
        logger.info("%s", describe(packed, compute_format, kernels.packs_mxfp4))
    for pattern, reason in scheme.unused:
        count = len(fnmatch.filter(checkpoint.skipped, pattern))
        if count:
            logger.info("%d tensors are not used: scales %s", count, reason)
    pooler = None
    if config.pooling is not None:
        pooler = load_pooler(checkpoint, source, config.pooling)
    decoder = build_decoder(config, source, kernels, max_len, device, share, lora, stages)
    return replace(decoder, pooler=pooler)


def load_pooler(checkpoint: Checkpoint, source: WeightSource, config: PoolingConfig) -> Pooler:
    """Read the layers after pooling, on the CPU in float32. Raises CheckpointError for tensors that
    are missing or misshapen, and for others in a layer's own folder.
    """
    layers = []
    for layer in config.layers:
        if layer.folder:
            read_names = {layer.weight, layer.bias}
            unread = [
                name for name in checkpoint.names_beside(layer.folder) if name not in read_names
            ]
            if unread:
                raise CheckpointError(
                    f"{checkpoint.path / layer.folder}: model.safetensors has {listed(unread)}, of which its "
                    "config.json says nothing (bias true, for linear.bias); fetch the model again"
                )

        def read(name: str, shape: Shape, folder: str = layer.folder) -> Tensor:
            if folder:
                return checkpoint.beside(folder, name, shape).to(torch.float32)
            return source.exact(name, shape).to("cpu")

        weight = read(layer.weight, (layer.outputs, layer.inputs))
        bias = None
        if layer.bias is not None:
            bias = read(layer.bias, (layer.outputs,))
        norm = None
        if layer.norm is not None:
            norm = read(layer.norm, (layer.outputs,))
        layers.append(LoadedLayer(weight, bias, layer.activation, norm, layer.norm_eps))
    return Pooler(config, tuple(layers))


def computed_blocks(
    checkpoint: Checkpoint, config: ModelConfig, names: TensorNames, shapes: Mapping[str, Shape]
) -> dict[str, StoredBlocks]:
    """Return the matrices of `shapes` that are computed in a GGUF file's blocks. Experts whose gate and
    up have different blocks are decoded, because the two become one matrix.
    """
    blocks = find_blocks(checkpoint, shapes)
    for index, layer in enumerate(config.layers):
        if not isinstance(layer.feed_forward, MoEConfig) or names.interleaved:
            continue
        prefix = names.layer.format(index)
        decoded = []
        for expert in range(layer.feed_forward.num_experts):
            module = prefix + names.expert.format(expert)
            parts = [f"{module}{part}.weight" for part in names.expert_gate_up]
            formats = {blocks[part].format if part in blocks else None for part in parts}
            if len(formats) > 1:
                decoded += parts
        if decoded:
            logger.info(
                "%s and others: decoded, because gate and up have different blocks", decoded[0]
            )
        for part in decoded:
            blocks.pop(part, None)
    return blocks


def require_groups(
    kernels: KernelSet,
    four: Mapping[str, StoredGroups | StoredPowers],
    int4: bool = False,
) -> None:
    """Raise ConfigError for matrices in 4 bits with scales of groups that `kernels` do not take."""
    if kernels.packs_groups:
        return
    if int4:
        raise ConfigError(
            f"int4: the {kernels.name} kernels do not compute with weights in 4 bits with scales of groups; use "
            "--device cpu, or fp8"
        )
    first = next((groups for groups in four.values() if isinstance(groups, StoredGroups)), None)
    if first is not None:
        raise ConfigError(
            f"{first.module} has weights in 4 bits ({first.four}), with which the {kernels.name} kernels do not "
            "compute; use --device cpu, or the model in FP8 or 16 bits"
        )


def require_whole_blocks(shares: Iterable[Share], stored: Mapping[str, StoredLinear]) -> None:
    """Raise ConfigError if any rank would cut a block of scales: where the others do not, they would
    read all of their weights first. shares: of all ranks.
    """
    blocks = {name: matrix for name, matrix in stored.items() if matrix.cuts_blocks}
    if not blocks:
        return
    for share in shares:
        pieces = share.pieces
        for name in blocks.keys() & pieces.keys() - {tensor_names(share.whole).embedding}:
            blocks[name].of_rows(_rows(pieces[name]))


def _rows(pieces: Pieces) -> list[slice]:
    return [rows for rows, *_ in pieces if isinstance(rows, slice)]


def present_share(
    checkpoint: Checkpoint,
    share: Share,
    stored: Mapping[str, Stored],
    packed: Mapping[str, StoredExperts],
) -> tuple[dict[str, Stored], dict[str, StoredExperts]]:
    """Present the tensors of `share` in the place of the whole ones; return its quantized matrices,
    and its experts in MXFP4.

    Raises ConfigError for a matrix that cannot be cut so.
    """
    cut = dict(stored)
    experts = dict(packed)
    head, of_head = share.head
    embedding = tensor_names(share.whole).embedding
    looked_up = (embedding, tensor_names(share.whole).per_layer_table)
    # the head first: it may be a part of the embedding
    for name in sorted(share.pieces, key=lambda name: name != head):
        pieces = share.pieces[name]
        of_model = of_head if name == head else name
        matrix = stored.get(of_model)
        if name in packed:
            outputs = pieces[0][-1]
            assert isinstance(outputs, slice)
            experts[name] = packed[name].of_outputs(checkpoint, outputs)
        elif matrix is None:
            checkpoint.narrow(of_model, pieces, name)
        elif name in looked_up and isinstance(matrix, StoredBlocks):
            del cut[name]  # its columns are cut: decoded
            checkpoint.narrow(of_model, pieces, name)
        elif of_model != embedding or isinstance(matrix, StoredBlocks):
            cut[name] = matrix.of_rows(_rows(pieces))
            if isinstance(matrix, StoredLinear):
                checkpoint.narrow(matrix.weight, pieces)
        else:
            raise ConfigError(
                f"--tensor-parallel-size {share.size}: {of_model} is a quantized embedding, which is not divided over "
                "ranks yet; omit it"
            )
    return cut, experts
