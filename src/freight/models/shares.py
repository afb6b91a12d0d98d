"""Share: which parts of a model's tensors a rank reads, from the ModelConfig alone. Imports no
torch.

The rules are those of `parallel/shards.py`, by the names of the checkpoint. A tensor that is not
listed is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from freight.checkpoint.headers import Index, Shape, narrowed
from freight.config.layer import (
    AttentionConfig,
    DenseConfig,
    FeedForward,
    LayerConfig,
    MoEConfig,
)
from freight.config.model import ModelConfig
from freight.config.tensor_names import TensorNames
from freight.models.architectures import tensor_names
from freight.models.mixer_parts import mixer_parts
from freight.models.shapes import shared_names, tensor_shapes
from freight.parallel.shards import kv_part, of_rank, part

Pieces = tuple[Index, ...]


@dataclass(frozen=True)
class Share:
    """A rank's part of a model.

    whole     the complete model
    model     the model as the rank computes it
    pieces    parts of each tensor that is cut, which are joined along their first dimension; by
              the tensor's name
    shapes    every tensor of the rank, with its shape there
    """

    whole: ModelConfig
    model: ModelConfig
    rank: int
    size: int
    pieces: Mapping[str, Pieces]
    shapes: Mapping[str, Shape]

    @property
    def head(self) -> tuple[str, str]:
        """The name of the head here, and that of the tensor that it is a part of."""
        names = tensor_names(self.whole)
        return names.head, names.embedding if self.whole.tie_word_embeddings else names.head


def share_of(model: ModelConfig, rank: int, size: int) -> Share:
    """Return what `rank` of `size` has of `model`. Raises ConfigError as `of_rank`."""
    model_of_rank = of_rank(model, size)
    names, shapes = tensor_names(model), tensor_shapes(model)
    width = model.embedding_size or model.hidden_size
    if model.tie_word_embeddings:
        shapes[names.head] = shapes[names.embedding]
    pieces: dict[str, Pieces] = {
        names.embedding: ((slice(None), part(width, rank, size)),),
        names.head: _vocabulary(model.vocab_size, rank, size),
    }
    for index, layer in enumerate(model.layers):
        prefix = names.layer.format(index)
        for name, ranges in _layer_rows(layer, model.hidden_size, names, rank, size):
            if prefix + name in shapes:
                pieces[prefix + name] = tuple((rows,) for rows in ranges)
        if names.interleaved:
            for name, outputs in _interleaved(layer.feed_forward, names):
                own = part(shapes[prefix + name][-1], rank, size)
                pieces[prefix + name] = ((*[slice(None)] * outputs, own),)
    for name, cut in pieces.items():
        shapes[name] = narrowed(shapes[name], cut)
    return Share(model, model_of_rank, rank, size, pieces, shapes)


def _vocabulary(size_of_all: int, rank: int, size: int) -> Pieces:
    """Return the rows of the head of `rank`, as many on each. Where the vocabulary does not divide
    evenly, the last rank has the first rows again, whose logits are dropped.
    """
    own = -(-size_of_all // size)
    first = rank * own
    rows = [slice(first, min(first + own, size_of_all))] if first < size_of_all else []
    over = min(own, first + own - size_of_all)
    if over > 0:
        rows.append(slice(0, over))
    return tuple((one,) for one in rows)


def _layer_rows(
    layer: LayerConfig, hidden: int, names: TensorNames, rank: int, size: int
) -> Iterator[tuple[str, Sequence[slice]]]:
    """Yield the tensors of a layer that are cut, relative to it, with the rows of `rank`; also
    biases that it may not have.
    """
    of_hidden = [part(hidden, rank, size)]
    if isinstance(layer.mixer, AttentionConfig):
        mixer, parts = layer.mixer, mixer_parts(layer.mixer, hidden, names)
        qkv = parts.projections["qkv"]
        sizes = qkv.sizes
        rows = [part(sizes[0], rank, size)]
        for of_kv in sizes[1:]:
            heads, each = kv_part(mixer.num_kv_heads, rank, size), of_kv // mixer.num_kv_heads
            rows.append(slice(heads.start * each, heads.stop * each))
        yield from _of_modules(qkv.modules, sizes, rows)
        yield from _of_modules(parts.projections["o"].modules, (hidden,), of_hidden)
        for module, (outputs, _) in parts.kept.items():
            yield from _of_modules((module,), (outputs,), [part(outputs, rank, size)])
        for name in parts.exact:  # sinks
            yield name, [part(mixer.num_heads, rank, size)]
    for mlp, gate_up, down in _feed_forwards(layer.feed_forward, names):
        ups = [part(each, rank, size) for each in mlp.up_sizes]
        yield from _of_modules(gate_up, mlp.up_sizes, ups)
        yield from _of_modules((down,), (hidden,), of_hidden)


def _interleaved(mlp: FeedForward, names: TensorNames) -> Iterator[tuple[str, int]]:
    """Yield the tensors of all experts of a layer, with the number of their dimension of outputs.
    Of gate and up, which alternate, a rank has neighbouring pairs.
    """
    if isinstance(mlp, MoEConfig):
        for module in (*names.expert_gate_up, names.expert_down):
            yield names.expert + module, 2  # [experts, inputs, outputs]
            if mlp.bias:
                yield f"{names.expert}{module}_bias", 1


def _feed_forwards(
    mlp: FeedForward, names: TensorNames
) -> Iterator[tuple[DenseConfig, Sequence[str], str]]:
    """Yield every feed-forward of a layer with the names of its modules: experts, and shared ones."""
    if isinstance(mlp, DenseConfig):
        yield mlp, names.gate_up, names.down
    elif mlp is not None:
        for index in range(0 if names.interleaved else mlp.num_experts):
            prefix = names.expert.format(index)
            yield (
                mlp.expert,
                [prefix + name for name in names.expert_gate_up],
                prefix + names.expert_down,
            )
        if mlp.shared is not None:
            yield mlp.shared, *shared_names(names)


def _of_modules(
    modules: Sequence[str], sizes: Sequence[int], rows: Sequence[slice]
) -> Iterator[tuple[str, Sequence[slice]]]:
    """Yield weight and bias of `modules` with `rows` of each projection, which has `sizes` rows; one
    module may have the rows of all.
    """
    if len(modules) == 1:
        starts = accumulate(sizes, initial=0)
        moved = [
            slice(start + one.start, start + one.stop)
            for start, one in zip(starts, rows, strict=False)
        ]
        each: list[Sequence[slice]] = [moved]
    else:
        each = [[one] for one in rows]
    for module, ranges in zip(modules, each, strict=True):
        yield f"{module}.weight", ranges
        yield f"{module}.bias", ranges
