"""What each token has for each layer alone: the per-layer embeddings of Gemma 4 (E2B, E4B).

A vector of every layer is a row of a table, of which a step reads the rows of its tokens and
nothing else, plus a norm of the projected embedding. They are computed once in a step, for all
layers, and each layer gates its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.layers.linear import Projection
from freight.layers.norm import RMSNorm
from freight.operands.activation import GatedActivation

_HALF = 0.5**0.5  # the sum of two parts keeps the variance of one


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """The vectors of all layers: (norm(projection(embedded)) + multiplier * table's row) / sqrt(2).

    table   [vocab_size, layers * size], in a dtype of its own: rows are converted, not the table
    norm    of the `size` values of one layer
    """

    table: Tensor
    multiplier: float
    projection: Projection
    norm: RMSNorm

    def __call__(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] and [num_tokens] -> [num_tokens, layers, size] in the dtype of
        `embedded`
        """
        weight, kernels = self.norm.weight, self.norm.kernels
        # as columns: rows of all layers, one under another, would be more than those of the batch
        normed = kernels.join(((self.projection(embedded), weight),), self.norm.eps)
        vectors = kernels.lookup(self.table, token_ids, self.multiplier, normed, _HALF)
        return vectors.view(len(token_ids), -1, len(weight))


@dataclass(frozen=True)
class PerLayerEmbedding:
    """One layer's part: down(activation(gate(x)) * vector), of which the norm with the weight
    `post` is added to x.
    """

    gate: Projection
    down: Projection
    post: Tensor
    activation: GatedActivation
    kernels: KernelSet

    def __call__(self, x: Tensor, vectors: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size], vectors: [num_tokens, size] -> [num_tokens, hidden_size]"""
        gate_up = self.kernels.join(((self.gate(x), None), (vectors, None)))
        return self.down(self.kernels.gated(gate_up, self.activation, self.down.consumer))
