"""Per-layer embeddings of Gemma 4 (E2B, E4B): one vector of each token for each layer.

The vectors of a token are a row of a table, of which a step reads only the rows of its tokens, plus
a norm of the projected embedding. They are computed once per step, for all layers; each layer gates
its vector.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.model.layers.norm import RMSNorm
from freight.operands.activation import GatedActivation
from freight.operands.packed import PackedWeight

_HALF = 0.5**0.5  # so that the sum of two parts has the variance of one


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """The vectors of all layers: (norm(projection(embedded)) + multiplier * table's row) / sqrt(2).

    table   [vocab_size, layers * size]; its dtype may differ from the compute dtype, because rows
            are converted as they are read; or packed from blocks
    norm    norm of the `size` values of each layer
    own     first column of this rank and the one after its last, where `table` has them alone
            (`KernelSet.gather`)
    """

    table: Tensor | PackedWeight
    multiplier: float
    projection: Projection
    norm: RMSNorm
    own: tuple[int, int] | None = None

    def __call__(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        """Return the vectors, [num_tokens, layers, size] in the dtype of `embedded`.

        embedded: [num_tokens, hidden_size]; token_ids: [num_tokens]
        """
        weight = self.norm.weight
        kernels = self.norm.kernels
        # Layers are columns: as rows they would be more than the rows of the batch.
        normed = kernels.join(((self.projection(embedded), weight),), self.norm.eps)
        if self.own is not None:
            begin, end = self.own
            normed = kernels.join(((normed[:, begin:end], None),))
        if isinstance(self.table, Tensor):
            vectors = kernels.lookup(self.table, token_ids, self.multiplier, normed, _HALF)
        else:
            vectors = kernels.packed_rows(
                self.table, token_ids, normed.dtype, self.multiplier, normed, _HALF
            )
        if self.own is not None:
            vectors = kernels.gather(vectors)
        return vectors.view(len(token_ids), -1, len(weight))


@dataclass(frozen=True)
class PerLayerEmbedding:
    """One layer's part: down(activation(gate(x)) * vector).

    The caller adds its norm, with the weight `post`, to x.
    """

    gate: Projection
    down: Projection
    post: Tensor
    activation: GatedActivation
    kernels: KernelSet

    def __call__(self, x: Tensor, vectors: Tensor, adapters: Tensor | None) -> Tensor:
        """Return [num_tokens, hidden_size].

        x: [num_tokens, hidden_size]; vectors: [num_tokens, size], this layer's; adapters: as in
        `ForwardBatch`
        """
        gate_up = self.kernels.join(((self.gate(x, adapters), None), (vectors, None)))
        gated = self.kernels.gated(gate_up, self.activation, self.down.consumer)
        return self.down(gated, adapters)
