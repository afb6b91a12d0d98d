"""MoE: a mixture of experts as a feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.layers.linear import Linear, Projection
from freight.layers.norm import RMSNorm
from freight.operands.activation import AnyActivation, GateFunction
from freight.operands.packed import PackedExperts, PackedWeight, Rows, plain
from freight.operands.routing import Routing


@dataclass(frozen=True)
class Latent:
    """What surrounds experts that work in a smaller space (`MoEConfig.latent_size`).

    inner, outer   the projections to that space and back
    add            adds what `outer` and the shared experts return: kernels add and norm in one
                   pass, and what this one norms is not used. None without shared experts
    """

    inner: Projection
    outer: Projection
    add: RMSNorm | None = None


@dataclass(frozen=True)
class MoE:
    """Each row goes through the experts that the router chooses for it, and through `shared`.

    router          its matrix in float32, as `kernels.pack` returned it, with `bias` and
                    `choice_bias`
    gate_up, down   the matrices of all experts, as `kernels.pack_experts` returned them; without a
                    gate, `gate_up` has those of up alone
    expert_scale    [num_experts] float32, or None: multiplies the weights that the router gives
    shared          the experts that every row goes through, as one feed-forward; times a sigmoid of
                    `shared_gate`
    latent          None: the routed experts take the row itself
    """

    router: PackedWeight
    routing: Routing
    gate_up: PackedExperts
    down: PackedExperts
    activation: AnyActivation
    kernels: KernelSet
    bias: Tensor | None = None
    choice_bias: Tensor | None = None
    shared: Callable[[Tensor], Tensor] | None = None
    shared_gate: Linear | None = None
    expert_scale: Tensor | None = None
    latent: Latent | None = None

    consumer: ClassVar[None] = None  # the router and every expert take the input

    def __call__(self, x: Rows, routed: Rows | None = None) -> Tensor:
        """x: [num_tokens, hidden_size], and so are the result and `routed`, what the router takes
        if that is not x.
        """
        x = plain(x)
        chosen_by = x if routed is None else plain(routed)
        by_expert = (self.bias, self.choice_bias, self.expert_scale)
        ids, weights = self.kernels.route(chosen_by, self.router, self.routing, *by_expert)
        base = None if self.shared is None else self.shared(x)
        if base is not None and self.shared_gate is not None:
            base = self.kernels.gate(base, self.shared_gate(x), GateFunction.SIGMOID)
        sides, latent = (self.gate_up, self.down, self.activation), self.latent
        if latent is None:
            return self.kernels.experts(x, ids, weights, *sides, base)
        chosen = latent.outer(self.kernels.experts(latent.inner(x), ids, weights, *sides))
        if base is None:
            return chosen
        assert latent.add is not None
        return latent.add(chosen, base)[0]


@dataclass(frozen=True)
class ExpertsBeside:
    """Experts beside a feed-forward: each takes the residual stream with a norm of its own, and the
    norms of both results are added (Gemma 4 26B-A4B). `post` is the weight of the experts' norm.
    """

    router_norm: RMSNorm
    norm: RMSNorm
    moe: MoE
    shared_norm: RMSNorm
    post: Tensor

    def __call__(self, x: Tensor, shared: Tensor) -> Tensor:
        """x: the stream, shared: what the feed-forward made of it; both [num_tokens, hidden_size],
        and the result.
        """
        (_, routed), (_, normed) = self.router_norm(x, None), self.norm(x, None)
        _, first = self.shared_norm(shared, None)
        total, _ = self.shared_norm(plain(first), self.moe(normed, routed), None, self.post)
        return total
