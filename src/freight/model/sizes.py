"""Memory of a loaded model, from its ModelConfig alone, without a checkpoint. Imports no torch.

It counts the loader's tensors to the byte: projections merged where the loader merges them,
matrices as the kernels hold them, scales, norms and biases in the format that they are kept in.
`model.weight_bytes` counts the same for a model that has been loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from freight.checkpoint.headers import Shape
from freight.fp8.block_formats import BlockFormat
from freight.fp8.formats import Format
from freight.fp8.scheme import (
    INT4_GROUP,
    Activations,
    FourBits,
    LinearScheme,
    Packing,
    WeightScales,
    held_group,
    int4_group,
)
from freight.model.architectures import tensor_names
from freight.model.config.eagle import EAGLE_FC, EagleConfig
from freight.model.config.layer import (
    DenseConfig,
    FeedForward,
    LayerConfig,
    NormKind,
    NormPlacement,
)
from freight.model.config.model import ForeignModel, ModelConfig
from freight.model.config.predicting import PredictingConfig
from freight.model.config.rope import QUERY_SCALING
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import Rank
from freight.model.mixers.spec import Mixer, mixer_parts
from freight.model.shapes import shared_names, tensor_shapes
from freight.model.shares import share_of, share_of_eagle, share_of_predicting
from freight.parallel.stages import StageCosts

# How the matrix of a module is quantized; None: it is not
LinearOf = Callable[[str], LinearScheme | None]

# The scheme of `--quantization fp8` for every matrix of the layers
ONLINE = LinearScheme(WeightScales.ROW, Activations.DYNAMIC)
_BLOCK = 128  # outputs and inputs that share a block scale
_SCALE = 4  # bytes of a scale
_ID = 8  # bytes of a token id
# Bytes of 32 inputs of 16 rows: 256 of 4-bit codes, and a byte per row for the scale
_MXFP4_UNIT = 272
# Bytes of a block of a row as kernels hold it, where scales of 6 bits become bytes (csrc/packed.h)
_UNPACKED = {BlockFormat.Q4_K: 148, BlockFormat.Q5_K: 180, BlockFormat.IQ4_XS: 138}


def int4_online(module: str) -> LinearScheme:
    """Return the scheme of `--quantization int4` for every matrix of the layers: groups of 128, or
    of fewer where these do not divide the inputs.
    """
    return LinearScheme.in_four_bits(Packing.INT4, INT4_GROUP)


class Layout(StrEnum):
    """The layout in which kernels hold a matrix."""

    PLAIN = "plain"  # [outputs, inputs] as it is: GPUs, and the reference kernels
    PACKED = "packed"  # csrc/packed.h: outputs padded to bands of 32, inputs to a unit
    TILES = "tiles"  # the same, with inputs of bfloat16, E4M3 and INT8 padded to the tiles of AMX


@dataclass(frozen=True)
class LoadedBytes:
    """Bytes of a loaded model. `embeddings`: embedding, head and their projections; `layers`:
    layers and norms, with scales and biases; `tables`: cos, sin and the factor of queries of every
    position; `adapters`: the memory for adapters; `head`: what drafts, with its tables.
    """

    layers: int
    embeddings: int
    tables: int
    adapters: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return self.layers + self.embeddings + self.tables + self.adapters + self.head

    def __add__(self, other: LoadedBytes) -> LoadedBytes:
        return LoadedBytes(
            self.layers + other.layers,
            self.embeddings + other.embeddings,
            self.tables + other.tables,
            self.adapters + other.adapters,
            self.head + other.head,
        )


def online(model: ModelConfig) -> LinearOf:
    """Return the scheme that `--quantization fp8` gives to each module's matrix."""
    if model.foreign is None:
        return lambda module: ONLINE
    rounded = frozenset(model.foreign.rounded)
    return lambda module: ONLINE if f"{module}.weight" in rounded else None


def matrix_bytes(
    rows: int, columns: int, format: Format, scales: WeightScales | None, layout: Layout
) -> int:
    """Return the bytes of a matrix of `rows` outputs and `columns` inputs and of its scales; None:
    it has none.

    One scale per tensor is held as one per row.
    """
    blocks = (
        _SCALE * -(-rows // _BLOCK) * -(-columns // _BLOCK) if scales is WeightScales.BLOCK else 0
    )
    if layout is Layout.PLAIN:
        scale_bytes = 0 if scales is None else blocks or _SCALE * rows
        return rows * columns * format.bytes + scale_bytes
    unit = 4 // format.bytes  # inputs of 16 rows in 64 bytes
    if layout is Layout.TILES:
        unit = {Format.BFLOAT16: 32, Format.E4M3FN: 32, Format.INT8: 64}.get(format, unit)
    band = 32 * _up(columns, unit) * format.bytes
    if format is Format.INT8:
        band += 32 * _SCALE  # where sums begin, int32 for each row
    return -(-rows // 32) * band + _SCALE * _up(rows, 16) + blocks


def mxfp4_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix in MXFP4 as the CPU kernels hold it, in either packed layout."""
    return -(-rows // 32) * 2 * _MXFP4_UNIT * -(-columns // 32) + _SCALE * _up(rows, 16)


def group_bytes(rows: int, columns: int, four: FourBits, layout: Layout) -> int:
    """Return the bytes of a matrix in 4 bits with scales of groups. A file that may have an order
    of its own for the inputs is counted with one.
    """
    size = held_group(four, columns)
    assert size is not None
    nvfp4 = four.packing.codes == "NVFP4"  # scales in E4M3, and one per row
    of_group = (1 if nvfp4 else 2) + four.zeros  # scale and zero point
    if layout is Layout.PLAIN:
        more = _SCALE * rows * nvfp4 + 8 * columns * four.ordered
        return rows * columns // 2 + rows * columns // size * of_group + more
    # csrc/packed.h: for bands of 32 rows, groups as they are stored, of NVFP4 two together
    together = 2 * size if nvfp4 else size
    unit = 32 * (together // 2 + together // size * of_group)
    more = _SCALE * _up(rows, 16) + 4 * columns * four.ordered
    return -(-rows // 32) * -(-columns // together) * unit + more


def block_bytes(rows: int, columns: int, format: BlockFormat, layout: Layout) -> int:
    """Return the bytes of a matrix in a GGUF file's blocks that is multiplied as it is stored."""
    if layout is Layout.PLAIN:
        return rows * format.row_bytes(columns)
    piece = _UNPACKED.get(format, format.bytes)  # of a row
    return 32 * -(-rows // 32) * columns // format.inputs * piece + _SCALE * _up(rows, 16)


def loaded_bytes(
    model: ModelConfig,
    compute: Format,
    weights: Format,
    linear_of: LinearOf,
    layout: Layout,
    max_len: int,
    ranks: int = 1,
) -> LoadedBytes:
    """Count the bytes of a model that computes in `compute`, for positions below `max_len`.

    Of several `ranks` they are those of each one: of its share of the matrices (`model/shares.py`),
    and of what all ranks have.

    Matrices of the layers for whose module `linear_of` has a scheme are in `weights`, an E4M3
    variant or INT8. Experts in MXFP4 stay so where kernels pack; their tensors may show that some cannot
    (`fp8.mxfp4.normal`). Embedding and head are counted in `compute`: only a checkpoint's tensors
    show whether its head is in FP8. Projections with different static input scales are not merged
    at load; here they are, which matters for padding only.
    """
    if model.foreign is not None:
        parts = foreign_bytes(model.foreign, compute, weights, linear_of, layout)
        return LoadedBytes(parts.fp8 + parts.stacked + parts.other, parts.embeddings, 0)
    count = _Count.of_rank(model, compute, weights, linear_of, layout, ranks)
    tables = table_bytes(count.model, range(model.num_layers), max_len)
    return LoadedBytes(sum(count.layers()) + count.final(), count.embeddings(), tables)


def predicting_bytes(
    model: ModelConfig,
    predicting: PredictingConfig,
    compute: Format,
    weights: Format,
    linear_of: LinearOf,
    layout: Layout,
    max_len: int,
    ranks: int = 1,
) -> int:
    """Count the first of the layers of `model` that predict further tokens, which is the one that
    drafts, with its tables. Its embedding and head are the model's. Arguments are those of
    `loaded_bytes`.
    """
    alone = replace(model, layers=(predicting.layer,))
    form = predicting.form
    names = replace(tensor_names(alone), layer=predicting.prefixes[0])
    share = share_of_predicting(alone, predicting, Rank(0, ranks))
    alone = share.model
    count = _Count(alone, compute, weights, linear_of, layout, names, share.shapes)
    size = count.layer(0, alone.layers[0])
    size += count.kept([predicting.module(0, form.projection)])
    size += 2 * count.norm_weight(model.hidden_size) + count.norm(model.hidden_size)
    if form.masks_first:
        size += max_len * compute.bytes
    return size + table_bytes(alone, range(1), max_len)


def eagle_bytes(
    eagle: EagleConfig,
    shapes: Mapping[str, Shape],
    compute: Format,
    layout: Layout,
    max_len: int,
    ranks: int = 1,
) -> int:
    """Count an EAGLE-3 head, with its tables and the ids of its vocabulary, for positions below
    `max_len`; that of each of several `ranks`. shapes: its tensors but those ids; without an embedding
    it takes the model's.
    """
    share = share_of_eagle(eagle, shapes, Rank(0, ranks))
    model = share.model
    shapes = share.shapes
    names = tensor_names(model)
    prefix = names.layer.format(0)
    layer = model.layers[0]
    count = _Count(model, compute, compute, lambda _: None, layout, names, shapes)
    size = count.mixer(prefix, layer.mixer) + count.feed_forward(prefix, layer.feed_forward)
    for name, shape in shapes.items():
        if "norm" in name and ".self_attn." not in name:  # those are the mixer's
            size += count.norm_weight(prod(shape))
    if EAGLE_FC in shapes:
        size += count.kept(["fc"])
    rows, columns = shapes[names.head]
    size += matrix_bytes(rows, columns, compute, scales=None, layout=layout)
    if names.embedding in shapes:
        size += count.values("", names.embedding) * compute.bytes
    if eagle.draft_vocab_size != model.vocab_size:
        size += _ID * eagle.draft_vocab_size
    return size + table_bytes(model, range(1), max_len)


def table_bytes(model: ModelConfig, layers: Iterable[int], max_len: int) -> int:
    """Return the bytes of the rotary tables of these layers, for positions below `max_len`. Layers hold
    them: a config may describe a rope that none of them has.
    """
    named = {model.paged[index].rope for index in layers if index in model.paged}
    ropes = [rope for index, rope in enumerate(model.ropes) if index in named]
    tables = sum(2 * _SCALE * max_len * (rope.rotary_dim // 2) for rope in ropes)
    return tables + sum(_SCALE * max_len for rope in ropes if rope.parameters.get(QUERY_SCALING))


def stage_costs(
    model: ModelConfig,
    compute: Format,
    weights: Format,
    linear_of: LinearOf,
    layout: Layout,
    ranks: int = 1,
) -> StageCosts:
    """Return the bytes of each layer's weights, as `loaded_bytes` counts them, and those that the first
    and the last stage have besides. A head that is tied to the embedding is a copy on the last stage.
    """
    count = _Count.of_rank(model, compute, weights, linear_of, layout, ranks)
    head = count.head() if model.has_head else 0
    return StageCosts(count.layers(), count.embedding(), count.final() + count.narrowed() + head)


@dataclass(frozen=True)
class ForeignBytes:
    """Bytes of a model that runs through transformers' modules. `fp8`: Linear modules in FP8, with
    scales; `stacked`: parameters of three dimensions, which are experts; `embeddings`: embedding
    and head; `other`: all else.
    """

    fp8: int
    stacked: int
    other: int
    embeddings: int


def foreign_bytes(
    foreign: ForeignModel, compute: Format, weights: Format, linear_of: LinearOf, layout: Layout
) -> ForeignBytes:
    """Count the bytes of a model's parameters: Linear modules for which `linear_of` has a scheme
    are in `weights`, and packed; so is the head, in `compute`. A head that is tied to the embedding
    is held twice where kernels pack.
    """
    parts = dict.fromkeys(("fp8", "stacked", "other", "embeddings"), 0)
    linears = frozenset(foreign.linears)
    outer = {name.rpartition(".")[0] for name in (foreign.embedding, foreign.head)}
    for name, shape in foreign.tensors:
        module = name.rpartition(".")[0]
        size = prod(shape) * compute.bytes
        scheme = linear_of(module) if name in linears else None
        if scheme is not None and not scheme.mxfp8:
            rows, columns = shape
            parts["fp8"] += matrix_bytes(
                rows, columns, weights, _held(scheme, (rows, columns)), layout
            )
        elif name == foreign.head and layout is not Layout.PLAIN:
            rows, columns = shape
            parts["embeddings"] += matrix_bytes(rows, columns, compute, None, layout)
            parts["embeddings"] += size if name == foreign.embedding else 0
        elif module in outer:
            parts["embeddings"] += size
        else:
            parts["stacked" if len(shape) > 2 else "other"] += size
    return ForeignBytes(**parts)


@dataclass(frozen=True)
class _Count:
    """A counter of the parts of one model."""

    model: ModelConfig
    compute: Format
    weights: Format
    linear_of: LinearOf
    layout: Layout
    names: TensorNames
    shapes: Mapping[str, Shape]  # of every tensor, as a rank has it

    @classmethod
    def of_rank(
        cls,
        model: ModelConfig,
        compute: Format,
        weights: Format,
        linear_of: LinearOf,
        layout: Layout,
        ranks: int,
    ) -> _Count:
        """Return the counter of what one of `ranks` has of `model`, the whole one."""
        shapes: Mapping[str, Shape] = tensor_shapes(model)
        if ranks > 1:
            share = share_of(model, 0, ranks)
            model = share.model
            shapes = share.shapes
        return cls(model, compute, weights, linear_of, layout, tensor_names(model), shapes)

    def layers(self) -> tuple[int, ...]:
        """Bytes of each layer."""
        return tuple(self.layer(index, layer) for index, layer in enumerate(self.model.layers))

    def layer(self, index: int, layer: LayerConfig) -> int:
        hidden = self.model.hidden_size
        prefix = self.names.layer.format(index)
        parts = (layer.mixer is not None) + (layer.feed_forward is not None)
        inputs = parts - layer.raw_mixer
        norms = 0 if layer.norms is NormPlacement.OUTPUT else inputs * self.norm(hidden)
        if layer.norms.has_outputs:
            norms += parts * self.norm_weight(hidden)
        if layer.scalar:
            norms += self.compute.bytes
        feed_forward = self.feed_forward(prefix, layer.feed_forward)
        return (
            norms + self.mixer(prefix, layer.mixer) + feed_forward + self.per_layer(prefix, layer)
        )

    def mixer(self, prefix: str, mixer: Mixer) -> int:
        parts = mixer_parts(mixer, self.model.hidden_size, self.names)
        size = sum(
            self.projections(prefix, projection.modules, projection.bias)
            for projection in parts.projections.values()
        )
        size += sum(count * self.matrix(rows, columns) for count, rows, columns in parts.by_head)
        size += sum(self.kept([prefix + name]) for name in parts.alone)
        size += self.kept(
            [prefix + name for name in parts.kept if name not in (*parts.alone, parts.cut)]
        )
        size += sum(self.norm_weight(self.values(prefix, name)) for name in parts.norms)
        plain = sum(self.values(prefix, name) for name in parts.plain)
        size += self.compute.bytes * (plain + parts.factors)
        return size + 4 * (sum(self.values(prefix, name) for name in parts.exact) + parts.made)

    def kept(self, modules: Sequence[str]) -> int:
        """Count projections of one input that stay in the compute dtype, or in blocks: one matrix, so
        one padding, if all are in the same.
        """
        schemes = [self.outer_blocks(module) for module in modules]
        rows = [self.shape(module)[0] for module in modules]
        columns = [self.shape(module)[1] for module in modules]
        if len({None if scheme is None else scheme.blocks for scheme in schemes}) == 1:
            return self.quantized(sum(rows), columns[0], schemes[0])
        parts = zip(rows, columns, schemes, strict=True)
        return sum(self.quantized(*part) for part in parts)

    def per_layer(self, prefix: str, layer: LayerConfig) -> int:
        """Count the projections of the layer's own embedding, and the norm after them."""
        if layer.per_layer is None:
            return 0
        names = self.names
        gate = self.projections(prefix, (names.per_layer_gate,), bias=False)
        down = self.projections(prefix, (names.per_layer_down,), bias=False)
        return gate + down + self.norm_weight(self.model.hidden_size)

    def feed_forward(self, prefix: str, mlp: FeedForward) -> int:
        names = self.names
        hidden = self.model.hidden_size
        if mlp is None:
            return 0
        if isinstance(mlp, DenseConfig):
            return self.dense(prefix, mlp, names.gate_up, names.down)
        router = matrix_bytes(
            mlp.num_experts, hidden, Format.FLOAT32, scales=None, layout=self.layout
        )
        size = router + mlp.num_experts * 4 * (
            mlp.router_bias + mlp.choice_bias + mlp.parallel_experts
        )
        size += 4 * hidden + 3 * self.norm_weight(hidden) if mlp.parallel_experts else 0
        size += sum(
            self.expert(prefix + names.expert.format(index), mlp.expert)
            for index in range(mlp.num_experts)
        )
        if mlp.latent_size is not None:
            size += self.projections(prefix, (names.latent_in,), bias=False)
            size += self.projections(prefix, (names.latent_out,), bias=False)
            if mlp.shared is not None:
                # A norm adds experts and shared expert, and has a weight
                size += 4 * hidden
        if mlp.shared is not None:
            size += self.dense(prefix, mlp.shared, *shared_names(names))
            size += self.matrix(1, hidden) if mlp.shared_gate else 0
        return size

    def expert(self, prefix: str, mlp: DenseConfig) -> int:
        """Count an expert. Gate and up in different blocks are decoded, because they become one matrix."""
        names = self.names
        shapes = [self.shape(prefix + part) for part in names.expert_gate_up]
        schemes = [self.linear_of(prefix + part) for part in names.expert_gate_up]
        blocks = {None if scheme is None else scheme.blocks for scheme in schemes}
        if len(blocks) == 1:
            return self.dense(prefix, mlp, names.expert_gate_up, names.expert_down)
        rows = sum(outputs for outputs, _ in shapes)
        bias = rows * self.compute.bytes if mlp.bias else 0
        gate_up = self.matrix(rows, shapes[0][1]) + bias
        return gate_up + self.projections(prefix, (names.expert_down,), mlp.bias)

    def dense(self, prefix: str, mlp: DenseConfig, gate_up: tuple[str, ...], down: str) -> int:
        """Count a feed-forward."""
        return self.projections(prefix, gate_up, mlp.bias) + self.projections(
            prefix, (down,), mlp.bias
        )

    def shape(self, module: str) -> tuple[int, int]:
        """Return the outputs and inputs of a module; of one expert where a tensor has all of them."""
        weight = self.shapes.get(f"{module}.weight") or self.shapes[module][:0:-1]
        rows, columns = weight
        return rows, columns

    def values(self, prefix: str, name: str) -> int:
        """Return how many values a tensor has."""
        return prod(self.shapes[prefix + name])

    def projections(self, prefix: str, parts: Sequence[str], bias: bool) -> int:
        """Count projections of one input, merged where `Weight.mergeable`. One module for several
        projections has the rows of all.
        """
        shapes = [self.shape(prefix + part) for part in parts]
        rows = [outputs for outputs, _ in shapes]
        columns = shapes[0][1]
        schemes = [self.linear_of(prefix + part) for part in parts]
        kinds: list[tuple[object, ...] | None] = []
        blocks = False
        for one, count in zip(schemes, rows, strict=True):
            if one is not None and one.mxfp8:
                one = None
            stored = None if one is None else _held(one, (count, columns))
            blocks |= stored is WeightScales.BLOCK
            kinds.append(
                None
                if one is None
                else (stored, one.activations, one.input_limit, one.four, one.blocks)
            )
        spanning = blocks and any(count % _BLOCK for count in rows[:-1])
        if len(set(kinds)) == 1 and not spanning:
            rows = [sum(rows)]
            schemes = schemes[:1]
        size = sum(rows) * self.compute.bytes if bias else 0
        for count, scheme in zip(rows, schemes, strict=True):
            size += self.quantized(count, columns, scheme)
        return size

    def quantized(self, rows: int, columns: int, scheme: LinearScheme | None) -> int:
        """Count a matrix of the layers and its scales."""
        if scheme is None or scheme.mxfp8:  # which becomes 16 bits
            return self.matrix(rows, columns)
        if scheme.blocks is not None:
            if not scheme.blocks.is_multiplied:
                return self.matrix(rows, columns)
            return block_bytes(rows, columns, scheme.blocks, self.layout)
        if scheme.four is not None and scheme.four.packing is not Packing.MXFP4:
            four = scheme.four
            if four.group is not None and columns % four.group:  # of `--quantization int4`
                four = replace(four, group=int4_group(columns) or 1)
            if held_group(four, columns) is None:
                return self.matrix(rows, columns)
            return group_bytes(rows, columns, four, self.layout)
        if scheme.bits == 4 and self.layout is not Layout.PLAIN:
            return mxfp4_bytes(rows, columns)
        return self.matrix(rows, columns, _held(scheme, (rows, columns)))

    def matrix(self, rows: int, columns: int, scales: WeightScales | None = None) -> int:
        return matrix_bytes(
            rows, columns, self.compute if scales is None else self.weights, scales, self.layout
        )

    def norm_weight(self, size: int) -> int:
        return size * (4 if self.model.wide_norms else self.compute.bytes)

    def norm(self, size: int) -> int:
        if self.model.norm_kind is NormKind.LAYER:
            return 2 * size * self.compute.bytes
        return self.norm_weight(size)

    def outer_blocks(self, module: str) -> LinearScheme | None:
        """Return the scheme of a projection beside the layers if it is in blocks, else None."""
        scheme = self.linear_of(module)
        return scheme if scheme is not None and scheme.blocks is not None else None

    def in_blocks(self, name: str) -> BlockFormat | None:
        """Return the blocks that the embedding or the head is multiplied in; None for other forms."""
        scheme = self.outer_blocks(module_of(name))
        if scheme is None or scheme.blocks is None or not scheme.blocks.is_multiplied:
            return None
        return scheme.blocks

    def embeddings(self) -> int:
        """Count embedding and head. Packing copies a matrix, so a head that is tied to the
        embedding is held twice where kernels pack.
        """
        c = self.model
        size = self.embedding() + self.narrowed()
        if not c.has_head:
            return size
        packed = self.in_blocks(self.names.embedding) is None and self.layout is not Layout.PLAIN
        if packed or not c.tie_word_embeddings:
            size += self.head()
        return size

    def final(self) -> int:
        """Count the norm behind the layers."""
        return self.norm(self.model.hidden_size) if self.model.final_norm else 0

    def narrowed(self) -> int:
        """Count the projection from the layers' width to that of the embedding."""
        c = self.model
        return 0 if c.embedding_size is None else self.matrix(c.embedding_size, c.hidden_size)

    def head(self) -> int:
        """Count the head; one that is tied to the embedding as a copy."""
        c = self.model
        width = c.embedding_size or c.hidden_size
        name = self.names.head
        if c.tie_word_embeddings and self.in_blocks(self.names.embedding) is not None:
            name = self.names.embedding
        rows = self.shapes.get(self.names.head, self.shapes[self.names.embedding])[0]
        blocks = self.in_blocks(name)
        if blocks is None:
            return matrix_bytes(rows, width, self.compute, scales=None, layout=self.layout)
        return block_bytes(rows, width, blocks, self.layout)

    def embedding(self) -> int:
        """Count what is before the layers."""
        c = self.model
        width = c.embedding_size or c.hidden_size
        size = 4 * width * c.embedding_norm
        table = self.in_blocks(self.names.embedding)
        if table is None:
            size += self.values("", self.names.embedding) * self.compute.bytes
        else:
            size += block_bytes(*self.shape(module_of(self.names.embedding)), table, self.layout)
        if c.embedding_size is not None:
            size += self.matrix(c.hidden_size, width)
        if c.per_layer_vocab_size is not None:
            name = self.names.per_layer_table
            blocks = self.in_blocks(name)
            if blocks is None:
                held = min(self.compute, c.checkpoint_format, key=lambda format: format.bytes)
                size += self.values("", name) * held.bytes
            else:
                size += block_bytes(*self.shape(module_of(name)), blocks, self.layout)
            size += self.norm_weight(c.per_layer_size // c.num_layers)
            projection = self.names.per_layer_projection
            size += self.quantized(*self.shape(projection), self.outer_blocks(projection))
        size += self.norm(c.hidden_size) * c.norms_embedded
        if c.position_offset is not None:
            rows = c.max_position_embeddings * max(1, c.token_types)
            size += rows * c.hidden_size * self.compute.bytes
        return size


def _held(scheme: LinearScheme, shape: tuple[int, int]) -> WeightScales:
    """Return how scales are held.

    Scales of other blocks than 128 x 128, and of experts in MXFP4 that become E4M3, become scales
    of rows (`fp8.weights.regroup`).
    """
    if scheme.scales is not WeightScales.BLOCK or scheme.block is None or scheme.bits == 4:
        return WeightScales.ROW
    tall, wide = scheme.block
    fits_blocks = tall % _BLOCK == 0 and wide % _BLOCK == 0
    return WeightScales.ROW if not fits_blocks and wide >= shape[1] else WeightScales.BLOCK


def module_of(name: str) -> str:
    """Return the module of a tensor's name."""
    return name.rpartition(".")[0]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
