"""Experts in calibration: computed one after the other, so that what each side of them takes as
input can be observed.

Kernels for experts keep what lies between the two products to themselves, and may pack all experts
of a layer as one. Here every expert is packed alone and computed by the set's own products, as
`kernels.reference_experts` defines the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor

from freight.kernels import reference_experts
from freight.kernels.interface import KernelSet
from freight.model.feed_forward.moe import MoE
from freight.operands.activation import Activation, GatedActivation
from freight.operands.experts import ExpertLayers
from freight.operands.packed import PackedWeight, Rows, as_tensor


class Side(StrEnum):
    """The two products of an expert."""

    GATE_UP = "gate_up"
    DOWN = "down"


@dataclass(frozen=True)
class ExpertWatch:
    """Observes the experts of one layer.

    gate_up, down   take inputs [rows, in_features] of all experts together: those of each token
                    once, and what is between for each of its experts
    num_tokens      int64 [num_experts], counted up: the tokens that reached each expert
    of_expert       takes the inputs of one side of one expert, by its id; None: nobody asks
    """

    gate_up: Callable[[Tensor], None]
    down: Callable[[Tensor], None]
    num_tokens: Tensor
    of_expert: Callable[[Side, int, Tensor], None] | None = None

    def around(self, moe: MoE) -> MoE:
        """Return `moe` observed. It was built with kernels of `one_by_one`."""
        return replace(moe, kernels=cast(KernelSet, _OneByOne(moe.kernels, self)))

    def unseen(self) -> list[int]:
        """Return the experts that no token reached."""
        return (self.num_tokens == 0).nonzero()[:, 0].tolist()


def one_by_one(kernels: KernelSet) -> KernelSet:
    """Return `kernels` with experts that `ExpertWatch` can observe."""
    return cast(KernelSet, _OneByOne(kernels))  # mypy does not see what `__getattr__` provides


@dataclass(frozen=True)
class _OneByOne:
    """A kernel set that has the operations of another, but for experts."""

    inner: KernelSet
    watch: ExpertWatch | None = None
    places: Mapping[int, tuple[Side, int]] = field(default_factory=dict)  # of a matrix, by its id()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gated(
        self, gate_up: Tensor, activation: GatedActivation, consumer: PackedWeight | None = None
    ) -> Rows:
        return self._seen(self.inner.gated(gate_up, activation, consumer))

    def activated(
        self, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
    ) -> Rows:
        return self._seen(self.inner.activated(x, activation, consumer))

    def _seen(self, hidden: Rows) -> Rows:
        if self.watch is not None:
            # Plain: weights in calibration are not quantized
            self.watch.down(as_tensor(hidden))
        return hidden

    def linear(self, x: Rows, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        place = self.places.get(id(weight))
        if place is not None:
            assert self.watch is not None
            assert self.watch.of_expert is not None
            self.watch.of_expert(*place, as_tensor(x))
        return self.inner.linear(x, weight, bias)

    pack_experts = reference_experts.pack
    by_head = reference_experts.by_head

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layers: ExpertLayers,
        base: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """`KernelSet.experts`, without adapters."""
        assert adapters is None
        if self.watch is not None:
            self.watch.gate_up(x)
            self.watch.num_tokens.add_(
                torch.bincount(ids.flatten(), minlength=len(self.watch.num_tokens))
            )
        products = self
        if self.watch is not None and self.watch.of_expert is not None:
            products = replace(self, places=_places(layers))
        return reference_experts.experts(cast(KernelSet, products), x, ids, weights, layers, base)


def _places(layers: ExpertLayers) -> dict[int, tuple[Side, int]]:
    """Return which side of which expert each matrix is."""
    places = {}
    for side, packed in ((Side.GATE_UP, layers.gate_up), (Side.DOWN, layers.down)):
        assert isinstance(packed, reference_experts.ExpertList)
        for expert, matrix in enumerate(packed.matrices):
            places[id(matrix)] = (side, expert)
    return places
