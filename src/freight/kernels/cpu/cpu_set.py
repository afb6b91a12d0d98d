"""CpuKernels: one loaded build of csrc/ as a KernelSet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from freight.kernels.cpu import attention, elementwise, experts, linear, rowwise, store, tuning
from freight.kernels.cpu import states as state_kernels
from freight.kernels.cpu.experts import CpuExperts
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.linear import CpuWeight
from freight.operands.activation import Activation, AnyActivation, GatedActivation, GateFunction
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.packed import PackedExperts, PackedWeight, Rows
from freight.operands.rotary import Rotary
from freight.operands.routing import Routing
from freight.operands.states import States
from freight.operands.weight import Weight, Weights


@dataclass(frozen=True)
class CpuKernels:
    """The compiled kernels. They take no `consumer`: activations are quantized by the product
    itself.
    """

    library: Library
    note: str = ""

    @property
    def name(self) -> str:
        """The build is part of the name: 'cpu-avx2'."""
        return f"cpu-{self.library.build}"

    @property
    def packs_mxfp4(self) -> bool:
        return True

    def pack(self, weight: Weight) -> CpuWeight:
        packed = linear.pack(self.library, weight)
        if packed.num_bytes >= tuning.LARGE:
            tuning.tune(self.library)
        return packed

    def lookup(
        self,
        table: Tensor,
        ids: Tensor,
        multiplier: float = 1.0,
        base: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        return rowwise.lookup(self.library, table, ids, multiplier, base, factor)

    def linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, float32: bool = False
    ) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(weight, CpuWeight)
        return linear.linear(self.library, x, weight, bias, float32)

    def add_rms_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
        delta_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(self.library, x, delta, weight, eps, delta_weight)

    def add_layer_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
    ) -> tuple[Tensor, Tensor]:
        return rowwise.add_layer_norm(self.library, x, delta, weight, bias, eps)

    def activated(
        self, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
    ) -> Tensor:
        return rowwise.activated(self.library, x, activation)

    def gated(
        self, gate_up: Tensor, activation: GatedActivation, consumer: PackedWeight | None = None
    ) -> Tensor:
        return elementwise.gated(self.library, gate_up, activation)

    def gate(self, x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
        return rowwise.gate(self.library, x, logits, function)

    def join(self, parts: Sequence[tuple[Tensor, Tensor | None]], eps: float = 0.0) -> Tensor:
        return rowwise.join(self.library, parts, eps)

    def pack_experts(self, weights: Weights, bias: Tensor | None = None) -> CpuExperts:
        packed = experts.pack(self.library, weights, bias)
        if packed.num_bytes >= tuning.LARGE:
            tuning.tune(self.library)
        return packed

    def route(
        self,
        x: Tensor,
        router: PackedWeight,
        routing: Routing,
        bias: Tensor | None = None,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(router, CpuWeight)
        return experts.route(self.library, x, router, routing, bias, choice_bias, expert_scale)

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
        assert isinstance(gate_up, CpuExperts)
        assert isinstance(down, CpuExperts)
        return experts.experts(self.library, x, ids, weights, gate_up, down, activation, base)

    def by_head(self, x: Tensor, matrices: PackedExperts) -> Tensor:
        assert isinstance(matrices, CpuExperts)
        return experts.by_head(self.library, x, matrices)

    def rotate_store(
        self, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
    ) -> Tensor:
        return store.rotate_store(self.library, qkv, rotary, positions, slots, pages)

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
        return attention.attention(
            self.library, q, pages, sequences, softmax_scale, window, soft_cap, sinks
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
        return state_kernels.convolve(self.library, x, weight, bias, silu, states, sequences)

    def decays(
        self,
        a: Tensor,
        b: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        limits: tuple[float, float] = (0.0, math.inf),
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return state_kernels.decays(self.library, a, b, a_log, dt_bias, limits, bound)

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
        inputs = q, k, v, beta, log_decay
        return state_kernels.recurrence(
            self.library, *inputs, states, sequences, delta=delta, norm=norm, skip=skip
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
    ) -> Tensor:
        return state_kernels.gated_norm(self.library, x, gate, weight, eps, group, norm_first)
