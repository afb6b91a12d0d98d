"""Mixture of experts (MoE) as the feed-forward of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.model.layers.linear import Projection
from freight.model.layers.norm import RMSNorm
from freight.operands.activation import GateFunction
from freight.operands.experts import ExpertLayers, Router
from freight.operands.packed import Rows, as_tensor


@dataclass(frozen=True)
class Latent:
    """The projections around experts that work in a smaller space (`MoEConfig.latent_size`).

    inner, outer   the projections to that space and back
    add            adds the results of `outer` and of the shared experts. Kernels fuse an addition
                   with a norm; the normed result of this one is not used. None without shared
                   experts
    """

    inner: Projection
    outer: Projection
    add: RMSNorm | None = None


@dataclass(frozen=True)
class MoE:
    """The experts that the router chooses for each row, and the shared experts of all rows.

    shared        the shared experts as one feed-forward, or None
    shared_gate   its sigmoid multiplies the result of `shared`; None: nothing does
    latent        projections around the routed experts; None: they take the row itself
    """

    router: Router
    experts: ExpertLayers
    kernels: KernelSet
    shared: Callable[[Tensor, Tensor | None], Tensor] | None = None
    shared_gate: Projection | None = None
    latent: Latent | None = None

    consumer: ClassVar[None] = None  # the router and every expert use the input

    def __call__(
        self, x: Rows, adapters: Tensor | None = None, routed: Rows | None = None
    ) -> Tensor:
        """Return the sum of the chosen and the shared experts, [num_tokens, hidden_size].

        x: [num_tokens, hidden_size]; adapters: as in `ForwardBatch`; routed: the shape of x, the
        router's input if it is not x
        """
        x = as_tensor(x)
        chosen_by = x if routed is None else as_tensor(routed)
        ids, weights = self.kernels.route(chosen_by, self.router)
        base = None if self.shared is None else self.shared(x, adapters)
        if base is not None and self.shared_gate is not None:
            base = self.kernels.gate(base, self.shared_gate(x, adapters), GateFunction.SIGMOID)
        latent = self.latent
        if latent is None:
            return self.kernels.experts(x, ids, weights, self.experts, base, adapters)
        inner = latent.inner(x, adapters)
        chosen = self.kernels.experts(inner, ids, weights, self.experts, adapters=adapters)
        chosen = latent.outer(chosen, adapters)
        if base is None:
            return chosen
        assert latent.add is not None
        return latent.add(chosen, base)[0]


@dataclass(frozen=True)
class ParallelExperts:
    """Experts alongside a feed-forward (Gemma 4 26B-A4B).

    Router and experts have separate norms of the residual stream; the norms of the results of
    feed-forward and experts are added.

    router_norm   norm of the router's input
    norm          norm of the experts' input
    shared_norm   norm of the feed-forward's result
    post          weight of the norm of the experts' result
    """

    router_norm: RMSNorm
    norm: RMSNorm
    moe: MoE
    shared_norm: RMSNorm
    post: Tensor

    def __call__(self, x: Tensor, shared: Tensor, adapters: Tensor | None) -> Tensor:
        """Return the sum of both normed results, [num_tokens, hidden_size].

        x: the residual stream; shared: the result of the feed-forward; both [num_tokens,
        hidden_size]; adapters: as in `ForwardBatch`
        """
        (_, routed) = self.router_norm(x, None)
        (_, normed) = self.norm(x, None)
        _, first = self.shared_norm(shared, None)
        total, _ = self.shared_norm(
            as_tensor(first), self.moe(normed, adapters, routed), None, self.post
        )
        return total
