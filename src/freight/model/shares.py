"""Share: which parts of a model's tensors a rank reads, from the ModelConfig alone. Imports no
torch.

The rules are those of `parallel/shards.py`, by the names of the checkpoint. A tensor that is not
listed is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from freight.checkpoint.headers import Shape, narrowed
from freight.model.architectures import tensor_names
from freight.model.config.eagle import EAGLE_FC, EagleConfig
from freight.model.config.layer import DenseConfig, FeedForward, LayerConfig, MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.predicting import PredictingConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import Cut, Pieces, Rank, of_modules, rows_of
from freight.model.shapes import predicting_shapes, shared_names, tensor_shapes
from freight.parallel.shards import of_rank, require_divisible


@dataclass(frozen=True)
class Share:
    """A rank's part of a model.

    whole     the complete model
    model     the model as the rank computes it
    pieces    parts of each tensor that is cut, which are joined along their first dimension; by
              the tensor's name
    shapes    every tensor of the rank, with its shape there
    uncut     every tensor of `shapes`, with its shape in the whole model
    """

    whole: ModelConfig
    model: ModelConfig
    rank: int
    size: int
    pieces: Mapping[str, Pieces]
    shapes: Mapping[str, Shape]
    uncut: Mapping[str, Shape]

    @property
    def head(self) -> tuple[str, str]:
        """The name of the head here, and that of the tensor that it is a part of."""
        names = tensor_names(self.whole)
        return names.head, names.embedding if self.whole.tie_word_embeddings else names.head


def share_of(model: ModelConfig, rank: int, size: int) -> Share:
    """Return what `rank` of `size` has of `model`. Raises ConfigError as `of_rank`."""
    position = Rank(rank, size)
    model_of_rank = of_rank(model, size)
    names = tensor_names(model)
    shapes = tensor_shapes(model)
    width = model.embedding_size or model.hidden_size
    if model.tie_word_embeddings:
        shapes[names.head] = shapes[names.embedding]
    uncut = dict(shapes)
    pieces: dict[str, Pieces] = {
        names.embedding: ((slice(None), position.part(width)),),
        names.head: pieces_of_vocabulary(model.vocab_size, position),
    }
    if model.per_layer_vocab_size is not None:
        of_layers = position.part(model.per_layer_size)
        pieces[names.per_layer_table] = ((slice(None), of_layers),)
        pieces[f"{names.per_layer_projection}.weight"] = ((of_layers,),)
    for index, layer in enumerate(model.layers):
        prefix = names.layer.format(index)
        pieces |= pieces_of_layer(layer, model.hidden_size, names, prefix, position, shapes)
    for name, cut in pieces.items():
        shapes[name] = narrowed(shapes[name], cut)
    return Share(model, model_of_rank, rank, size, pieces, shapes, uncut)


def share_of_part(
    model: ModelConfig, ranks: Rank, shapes: Mapping[str, Shape], pieces: Mapping[str, Pieces]
) -> Share:
    """Return what a rank has of `shapes`, tensors that are no complete model: a head that drafts. `model`
    has its layers, `pieces` are as in `Share`. Raises ConfigError as `of_rank`.
    """
    of_one = of_rank(model, ranks.size)
    own = dict(shapes)
    for name, cut in pieces.items():
        own[name] = narrowed(own[name], cut)
    return Share(model, of_one, ranks.number, ranks.size, pieces, own, dict(shapes))


def share_of_predicting(model: ModelConfig, predicting: PredictingConfig, rank: Rank) -> Share:
    """Return what a rank has of layers that predict further tokens, which divide as the model's last one
    does. `model` has their layer alone. Raises ConfigError as `of_rank`.
    """
    shapes = predicting_shapes(model, predicting)
    names = tensor_names(model)
    hidden = model.hidden_size
    pieces: dict[str, Pieces] = {}
    for index, prefix in enumerate(predicting.prefixes):
        pieces |= pieces_of_layer(predicting.layer, hidden, names, prefix, rank, shapes)
        projection = predicting.weight(index, predicting.form.projection)
        pieces[projection] = rows_of(rank.part(hidden))
    return share_of_part(model, rank, shapes, pieces)


def share_of_eagle(eagle: EagleConfig, shapes: Mapping[str, Shape], rank: Rank) -> Share:
    """Return what a rank has of an EAGLE-3 head with tensors of `shapes`. Raises ConfigError as `of_rank`."""
    model = eagle.model
    require_divisible(model, rank.size)
    names = tensor_names(model)
    size = model.hidden_size
    prefix = names.layer.format(0)
    pieces = pieces_of_layer(model.layers[0], size, names, prefix, rank, shapes)
    pieces[names.head] = pieces_of_vocabulary(eagle.draft_vocab_size, rank)
    if EAGLE_FC in shapes:
        pieces[EAGLE_FC] = rows_of(rank.part(size))
    if names.embedding in shapes:
        pieces[names.embedding] = ((slice(None), rank.part(size)),)
    return share_of_part(model, rank, shapes, pieces)


def pieces_of_layer(
    layer: LayerConfig,
    hidden: int,
    names: TensorNames,
    prefix: str,
    rank: Rank,
    shapes: Mapping[str, Shape],
) -> dict[str, Pieces]:
    """Return the pieces of `rank` of each tensor of a layer that is cut and is in `shapes`, by its name,
    which begins with `prefix`.
    """
    pieces: dict[str, Pieces] = {}
    for name, cut in _layer_pieces(layer, hidden, names, rank):
        if prefix + name in shapes:
            pieces[prefix + name] = cut
    if names.interleaved:
        for name, outputs in _interleaved(layer.feed_forward, names):
            columns = rank.part(shapes[prefix + name][-1])
            pieces[prefix + name] = ((*[slice(None)] * outputs, columns),)
    return pieces


def pieces_of_vocabulary(size_of_all: int, rank: Rank) -> Pieces:
    """Return the rows of the head of `rank`, as many on each. Where the vocabulary does not divide
    evenly, the last rank has the first rows again, whose logits are dropped.
    """
    share = -(-size_of_all // rank.size)
    first = rank.number * share
    rows = [slice(first, min(first + share, size_of_all))] if first < size_of_all else []
    over = min(share, first + share - size_of_all)
    if over > 0:
        rows.append(slice(0, over))
    return tuple((piece,) for piece in rows)


def _layer_pieces(layer: LayerConfig, hidden: int, names: TensorNames, rank: Rank) -> Iterator[Cut]:
    """Yield the tensors of a layer that are cut, relative to it, with the pieces of `rank`; also
    biases that it may not have.
    """
    if layer.mixer is not None:
        yield from layer.mixer.pieces(hidden, names, rank)
    outputs = [(hidden, names.per_layer_down), (hidden, names.latent_out)]
    if layer.per_layer is not None:
        outputs.append((layer.per_layer.size, names.per_layer_gate))
    if isinstance(layer.feed_forward, MoEConfig):
        outputs.append((layer.feed_forward.expert_channels(hidden), names.latent_in))
    for mlp, gate_up, down, channels in _feed_forwards(layer.feed_forward, hidden, names):
        ups = [rank.part(each) for each in mlp.up_sizes]
        yield from of_modules(gate_up, mlp.up_sizes, ups)
        outputs.append((channels, down))
    for count, module in outputs:
        yield from of_modules((module,), (count,), [rank.part(count)])


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
    mlp: FeedForward, hidden: int, names: TensorNames
) -> Iterator[tuple[DenseConfig, Sequence[str], str, int]]:
    """Yield every feed-forward of a layer with the names of its modules, and its outputs: experts,
    and shared ones.
    """
    if isinstance(mlp, DenseConfig):
        yield mlp, names.gate_up, names.down, hidden
    elif mlp is not None:
        for index in range(0 if names.interleaved else mlp.num_experts):
            prefix = names.expert.format(index)
            yield (
                mlp.expert,
                [prefix + name for name in names.expert_gate_up],
                prefix + names.expert_down,
                mlp.expert_channels(hidden),
            )
        if mlp.shared is not None:
            yield mlp.shared, *shared_names(names), hidden
