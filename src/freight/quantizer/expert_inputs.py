"""Experts in calibration: computed one after the other, so that what each side of them takes as
input can be observed.

Kernels for experts keep what lies between the two products to themselves, and may pack all experts
of a layer as one. Here every expert is packed alone and computed by the set's own products, as
`kernels.reference_experts` defines the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from freight.kernels import reference_experts
from freight.kernels.interface import KernelSet
from freight.model.feed_forward.moe import MoE
from freight.operands.activation import Activation, GatedActivation
from freight.operands.experts import ExpertLayers
from freight.operands.packed import PackedWeight, Rows, as_tensor


@dataclass(frozen=True)
class ExpertWatch:
    """Observes the experts of one layer; the inputs of one side are those of all experts together.

    gate_up, down   take inputs as [1, count]: those of each token once, and what is between for
                    each of its experts
    num_tokens      int64 [num_experts], counted up: the tokens that reached each expert
    """

    gate_up: Callable[[Tensor], None]
    down: Callable[[Tensor], None]
    num_tokens: Tensor

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
            self.watch.down(as_tensor(hidden).reshape(1, -1))
        return hidden

    pack_experts = reference_experts.pack
    by_head = reference_experts.by_head

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layers: ExpertLayers,
        base: Tensor | None = None,
    ) -> Tensor:
        """`KernelSet.experts`"""
        if self.watch is not None:
            self.watch.gate_up(x.reshape(1, -1))
            self.watch.num_tokens.add_(
                torch.bincount(ids.flatten(), minlength=len(self.watch.num_tokens))
            )
        return reference_experts.experts(cast(KernelSet, self), x, ids, weights, layers, base)
