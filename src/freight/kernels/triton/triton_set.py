"""TritonKernels: FP8 and 16-bit models on NVIDIA and AMD GPUs.

A kernel is compiled when it is first launched, once for each combination of types, compile-time
constants and known divisors of its arguments. Arguments that change from step to step are therefore
marked `do_not_specialize`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.kernels import reference_rows
from freight.kernels.triton import (
    convolution,
    elementwise,
    experts,
    gates,
    linear,
    paged,
    recurrence,
    route,
    store,
)
from freight.kernels.triton.experts import ExpertStack
from freight.kernels.triton.formats import Target
from freight.kernels.triton.rows import Quantized
from freight.operands.activation import Activation, AnyActivation, GatedActivation, GateFunction
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.packed import PackedExperts, PackedWeight, Rows
from freight.operands.rotary import Rotary
from freight.operands.routing import Routing
from freight.operands.states import States
from freight.operands.weight import Weight, Weights


def _own(consumer: PackedWeight | None) -> Weight | None:
    """`consumer`, which `TritonKernels.pack` returned."""
    assert consumer is None or isinstance(consumer, Weight)
    return consumer


@dataclass(frozen=True)
class TritonKernels:
    """The set for `target`; `fp8_attention` as in `select_kernels`."""

    target: Target
    fp8_attention: bool = False
    note: str = ""

    name: ClassVar[str] = "triton"

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
        assert isinstance(x, (Tensor, Quantized))
        assert isinstance(weight, Weight)
        out = linear.linear(self.target, x, weight, bias)
        return out.float() if float32 else out

    def add_rms_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
        delta_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | Quantized]:
        return elementwise.add_rms_norm(
            self.target, x, delta, weight, eps, _own(consumer), delta_weight
        )

    def add_layer_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
    ) -> tuple[Tensor, Tensor | Quantized]:
        return elementwise.add_layer_norm(self.target, x, delta, weight, bias, eps, _own(consumer))

    def activated(
        self, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
    ) -> Tensor | Quantized:
        return elementwise.activated(self.target, x, activation, _own(consumer))

    def gated(
        self, gate_up: Tensor, activation: GatedActivation, consumer: PackedWeight | None = None
    ) -> Tensor | Quantized:
        return elementwise.gated(self.target, gate_up, activation, _own(consumer))

    def gate(self, x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
        return gates.gate(x, logits, function)

    def join(self, parts: Sequence[tuple[Tensor, Tensor | None]], eps: float = 0.0) -> Tensor:
        return gates.join(parts, eps)

    def pack_experts(self, weights: Weights, bias: Tensor | None = None) -> ExpertStack:
        return experts.pack(weights, bias)

    def route(
        self,
        x: Tensor,
        router: PackedWeight,
        routing: Routing,
        bias: Tensor | None = None,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(router, Weight)
        return route.route(x, router, routing, bias, choice_bias, expert_scale)

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
        assert isinstance(gate_up, ExpertStack)
        assert isinstance(down, ExpertStack)
        return experts.experts(self.target, x, ids, weights, gate_up, down, activation, base)

    def by_head(self, x: Tensor, matrices: PackedExperts) -> Tensor:
        assert isinstance(matrices, ExpertStack)
        return experts.by_head(self.target, x, matrices)

    def rotate_store(
        self, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
    ) -> Tensor:
        return store.rotate_store(self.target, qkv, rotary, positions, slots, pages)

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
    ) -> Tensor | Quantized:
        return paged.attention(
            self.target,
            q,
            pages,
            sequences,
            softmax_scale,
            window,
            soft_cap,
            self.fp8_attention,
            sinks,
            _own(consumer),
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
        return convolution.convolve(x, weight, bias, silu, states, sequences)

    def decays(
        self,
        a: Tensor,
        b: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        limits: tuple[float, float] = (0.0, math.inf),
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return gates.decays(a, b, a_log, dt_bias, limits, bound)

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
        return recurrence.recurrence(
            self.target,
            q,
            k,
            v,
            beta,
            log_decay,
            states,
            sequences,
            delta=delta,
            norm=norm,
            skip=skip,
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
    ) -> Tensor | Quantized:
        return gates.gated_norm(
            self.target, x, gate, weight, eps, group, norm_first, _own(consumer)
        )
