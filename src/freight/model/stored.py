"""The quantized matrices of a checkpoint, found and checked before a weight is read: for loading, and
for `freight audit`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from freight.checkpoint.four_bits import StoredGroups, StoredPowers, find_four_bits
from freight.checkpoint.headers import Shape
from freight.checkpoint.linears import StoredLinear, find_linears
from freight.checkpoint.mxfp4 import StoredExperts, find_experts
from freight.checkpoint.reader import Checkpoint, untie_stored_head
from freight.fp8.scheme import Scheme
from freight.model.architectures import skipped_parts, tensor_names
from freight.model.config.model import ModelConfig
from freight.model.shapes import kept_in_16_bits, tensor_shapes

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class StoredMatrices:
    """The quantized matrices of a checkpoint by their names, checked, none of them read."""

    linears: dict[str, StoredLinear]
    four: dict[str, StoredGroups | StoredPowers]
    packed: dict[str, StoredExperts]


def with_stored_head(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Return `config` with a head of its own where the checkpoint stores one
    (`reader.untie_stored_head`).
    """
    if not config.tie_word_embeddings or config.foreign is not None or not config.has_head:
        return config  # transformers' loading compares the two itself
    names = tensor_names(config)
    is_untied = untie_stored_head(checkpoint, names.head, names.embedding)
    return replace(config, tie_word_embeddings=not is_untied)


def find_stored(checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme) -> StoredMatrices:
    """Find the quantized matrices, and account for every tensor of the checkpoint.

    Reads scales, zero points and orders of inputs. Raises CheckpointError for tensors that are
    missing, misshapen or left over, for contradictions between declaration and tensors, and for
    invalid scales.
    """
    names = tensor_names(config)
    matrices, needed = find_matrices(
        checkpoint, scheme, tensor_shapes(config), kept_in_16_bits(config)
    )
    if not config.has_head:
        checkpoint.skip(
            names.head.removesuffix("weight") + "*", "of the vocabulary: the model pools"
        )
    elif config.tie_word_embeddings:
        skip_tied_head(checkpoint, names.head)
    for pattern, reason in (*names.unused, *scheme.unused):
        checkpoint.skip(pattern, reason, needed)
    for reason, count in skipped_parts(config, checkpoint.names - needed.keys()).items():
        logger.info("skipping %d tensors %s", count, reason)
    checkpoint.finish(pending=needed)
    return matrices


def find_matrices(
    checkpoint: Checkpoint, scheme: Scheme, shapes: Mapping[str, Shape], free: frozenset[str]
) -> tuple[StoredMatrices, dict[str, Shape]]:
    """Find the quantized matrices among `shapes`; return them, and what all of `shapes` take of the
    checkpoint, by its own names. `free` as in `find_linears`. Raises CheckpointError as `find_stored`
    does, but for tensors that are left over.
    """
    four = find_four_bits(checkpoint, scheme, shapes)
    linears = find_linears(checkpoint, scheme, shapes, free)
    packed = find_experts(checkpoint, scheme, shapes)
    needed: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name in packed:
            needed |= packed[name].tensors
        elif name in four:
            needed |= four[name].tensors
        elif name in linears:
            needed[linears[name].weight] = shape
        else:
            needed[name] = shape
    checkpoint.check(needed)
    return StoredMatrices(linears, four, packed), needed


def skip_tied_head(checkpoint: Checkpoint, head: str) -> None:
    """Skip the tensors of a head that `with_stored_head` found to be the embedding."""
    checkpoint.skip(head.removesuffix("weight") + "*", "tied to the embedding")
