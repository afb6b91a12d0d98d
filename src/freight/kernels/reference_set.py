"""ReferenceKernels: the functions of `reference.py`, `reference_rows.py` and `reference_states.py`
as a KernelSet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from freight.kernels import reference, reference_experts, reference_rows, reference_states
from freight.kernels.reference import Fp8Products
from freight.kernels.reference_experts import ExpertList
from freight.operands.activation import Activation, AnyActivation, GatedActivation, GateFunction
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.packed import PackedExperts, PackedWeight, Rows
from freight.operands.rotary import Rotary
from freight.operands.routing import Routing
from freight.operands.states import States
from freight.operands.weight import Weight, Weights


@dataclass(frozen=True)
class ReferenceKernels:
    """Plain torch on any device. `products`: which products of attention multiply FP8 by FP8."""

    products: Fp8Products = Fp8Products.NONE
    note: str = ""
    name: str = "reference"

    @property
    def packs_mxfp4(self) -> bool:
        return False

    def pack(self, weight: Weight) -> Weight:
        return weight

    def lookup(
        self,
        table: Tensor,
        ids: Tensor,
        multiplier: float = 1.0,
        base: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        return reference_rows.lookup(table, ids, multiplier, base, factor)

    def linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, float32: bool = False
    ) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(weight, Weight)
        out = reference.linear(x, weight, bias)
        return out.float() if float32 else out

    def add_rms_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
        delta_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, delta, weight, eps, delta_weight)

    def add_layer_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
    ) -> tuple[Tensor, Tensor]:
        return reference_rows.add_layer_norm(x, delta, weight, bias, eps)

    def activated(
        self, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
    ) -> Tensor:
        return reference_rows.activated(x, activation)

    def gated(
        self, gate_up: Tensor, activation: GatedActivation, consumer: PackedWeight | None = None
    ) -> Tensor:
        return reference.gated(gate_up, activation)

    def gate(self, x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
        return reference_rows.gate(x, logits, function)

    def join(self, parts: Sequence[tuple[Tensor, Tensor | None]], eps: float = 0.0) -> Tensor:
        return reference_rows.join(parts, eps)

    def pack_experts(self, weights: Weights, bias: Tensor | None = None) -> ExpertList:
        return reference_experts.pack(self, weights, bias)

    def route(
        self,
        x: Tensor,
        router: PackedWeight,
        routing: Routing,
        bias: Tensor | None = None,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return reference_experts.choose(
            self.linear(x.float(), router, bias), routing, choice_bias, expert_scale
        )

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        activation: AnyActivation,
        base: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(gate_up, ExpertList)
        assert isinstance(down, ExpertList)
        return reference_experts.experts(self, x, ids, weights, gate_up, down, activation, base)

    def by_head(self, x: Tensor, matrices: PackedExperts) -> Tensor:
        assert isinstance(matrices, ExpertList)
        return reference_experts.by_head(self, x, matrices)

    def rotate_store(
        self, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
    ) -> Tensor:
        return reference.rotate_store(qkv, rotary, positions, slots, pages)

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        sequences: Sequences,
        softmax_scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        consumer: PackedWeight | None = None,
    ) -> Tensor:
        return reference.attention(
            q, pages, sequences, softmax_scale, window, soft_cap, self.products, sinks
        )

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        states: States,
        sequences: Sequences,
    ) -> Tensor:
        return reference_states.convolve(x, weight, bias, silu, states, sequences)

    def decays(
        self,
        a: Tensor,
        b: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        limits: tuple[float, float] = (0.0, math.inf),
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return reference_states.decays(a, b, a_log, dt_bias, limits, bound)

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor,
        states: States,
        sequences: Sequences,
        *,
        delta: bool,
        norm: bool,
        skip: Tensor | None = None,
    ) -> Tensor:
        return reference_states.recurrence(
            q, k, v, beta, log_decay, states, sequences, delta=delta, norm=norm, skip=skip
        )

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        group: int,
        norm_first: bool,
        consumer: PackedWeight | None = None,
    ) -> Rows:
        return reference_states.gated_norm(x, gate, weight, eps, group, norm_first)


REFERENCE = ReferenceKernels()
