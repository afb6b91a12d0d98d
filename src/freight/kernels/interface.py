"""KernelSet: the operations that a model is built from, as every set of kernels implements them.

`kernels/reference.py` defines what each operation computes, to the formula; the compiled sets are
tested against it. Layers take a set as a value and call its methods; `kernels/select.py` chooses
it. Shapes are named as in the rest of the source: rows are tokens, laid end to end over all
sequences of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor

from freight.operands.activation import Activation, AnyActivation, GatedActivation, GateFunction
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages
from freight.operands.packed import JoinedPart, PackedExperts, PackedWeight, Rows
from freight.operands.rotary import Rotary
from freight.operands.routing import Routing
from freight.operands.states import States
from freight.operands.weight import Weight, Weights

First = TypeVar("First")
P = ParamSpec("P")
T = TypeVar("T")


def method_on(
    attribute: str, function: Callable[Concatenate[First, P], T]
) -> Callable[Concatenate[object, P], T]:
    """Make `function` a method of a kernel set, which passes its own `attribute` first."""

    @wraps(function)
    def method(kernels: object, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(getattr(kernels, attribute), *args, **kwargs)

    return method


class KernelSet(Protocol):
    """Functions on tensors of one device.

    A `consumer` is the packed weight that alone takes an operation's output as its input, or None.
    With a consumer, a set may return the output in the form that its `linear` takes for that weight
    (`QuantizedRows`), instead of a tensor; without one it returns a tensor. A set takes only what
    it packed and quantized itself.
    """

    @property
    def name(self) -> str:
        """The value of `--kernels`, with the build: 'reference', 'cpu-avx512', 'triton'."""
        ...

    @property
    def note(self) -> str:
        """Why this set was chosen, for the log at start-up; may be ''."""
        ...

    @property
    def packs_mxfp4(self) -> bool:
        """Whether `pack` and `pack_experts` take matrices in MXFP4 as they are, and products have
        the bits of those with the same values in bfloat16."""
        ...

    def pack(self, weight: Weight) -> PackedWeight:
        """`weight` as this set's `linear` takes it; called once, at load. Raises KernelError for
        other formats.
        """
        ...

    def lookup(
        self,
        table: Tensor,
        ids: Tensor,
        multiplier: float = 1.0,
        base: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """(base + table[ids] * multiplier) * factor, [rows, size] in base's dtype, or in table's
        without `base`.

        table: [table_rows, size] in a dtype of 16 or 32 bits; ids: [rows] int64; base: [rows,
        size]. The rows, each product and the sum are rounded to that dtype.
        """
        ...

    def linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, float32: bool = False
    ) -> Tensor:
        """x @ weight.T + bias, [rows, out_features] in x's dtype; with `float32` the same values,
        stored as float32.

        x: [rows, in_features], or what an operation returned for `consumer=weight`; weight: what
        `pack` returned; bias: [out_features] in x's dtype.
        """
        ...

    def add_rms_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
        delta_weight: Tensor | None = None,
    ) -> tuple[Tensor, Rows]:
        """x + delta in x's dtype (x if delta is None), and the RMSNorm of that sum, for `consumer`.

        x, delta: [rows, size]; weight: [size], in x's dtype: the normed values are rounded before
        they are multiplied with it, or float32: they are multiplied first and rounded once. With
        `delta_weight`, as `weight`, the RMSNorm of delta is added instead of delta (the sandwich
        norms of Gemma 2).
        """
        ...

    def add_layer_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        consumer: PackedWeight | None = None,
    ) -> tuple[Tensor, Rows]:
        """x + delta in x's dtype (x if delta is None), and the LayerNorm of that sum, for
        `consumer`.

        x, delta: [rows, size]; weight, bias: [size], in x's dtype.
        """
        ...

    def activated(
        self, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
    ) -> Rows:
        """activation(x), [rows, size], for `consumer`."""
        ...

    def gated(
        self, gate_up: Tensor, activation: GatedActivation, consumer: PackedWeight | None = None
    ) -> Rows:
        """activation(gate) * up, [rows, size], for `consumer`. gate_up: [rows, 2 * size], gate
        first.
        """
        ...

    def gate(self, x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
        """x * function(logits), [rows, size], rounded once.

        x: [rows, size]; logits: [rows, groups] in x's dtype, one for each of `groups` equal parts
        of a row, or [1, groups] for all rows. Both may be columns of larger tensors.
        """
        ...

    def join(self, parts: Sequence[JoinedPart], eps: float = 0.0) -> Tensor:
        """The columns of all parts side by side, [rows, sum of sizes]. A part: x, and the weight of
        a norm or None.

        x: [rows, size], which may be columns of a larger tensor; weight: [group] as in
        `add_rms_norm`, of the RMSNorm of each `group` columns. Or every x has heads, [rows, heads,
        size], and so has what is returned.
        """
        ...

    def pack_experts(self, weights: Weights, bias: Tensor | None = None) -> PackedExperts:
        """One matrix of each expert as this set's `experts` takes them; called once, at load.

        weights: of one shape, format and way of quantizing, read once
        bias: [num_experts, out_features] in the dtype of the rows
        """
        ...

    def route(
        self,
        x: Tensor,
        router: PackedWeight,
        routing: Routing,
        bias: Tensor | None = None,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The experts of each row: ids [rows, top_k] int32, ascending in a row, and their weights,
        float32.

        x: [rows, hidden_size]; router: what `pack` returned for [num_experts, hidden_size] in
        float32. The logits are x @ router.T + bias in float32, and a row's do not depend on the
        other rows. bias, choice_bias, expert_scale: [num_experts] float32; `choice_bias` is added
        to the scores for the choice alone, not to the weights; `expert_scale` multiplies the
        finished weights.
        """
        ...

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
        """base + the sum over a row's experts e of weight * down_e(activation(gate_e(x)) *
        up_e(x)), in x's dtype; with an `Activation`, which has no gate, of weight *
        down_e(activation(up_e(x))).

        x, base: [rows, hidden_size]; ids, weights: as `route` returns them; gate_up, down: what `pack_experts` returned
        for [2 * intermediate_size, hidden_size], gate first, or without a gate [intermediate_size, hidden_size], and
        for [hidden_size, intermediate_size]. Each expert's result is rounded to x's dtype. The sum is in float32 in the
        order of ids, beginning with base, and rounded once.
        """
        ...

    def by_head(self, x: Tensor, matrices: PackedExperts) -> Tensor:
        """Each head times its own matrix, [rows, heads, out_features] in x's dtype: of head h the
        bits of `linear`.

        x: [rows, heads, in_features], inputs one after another, which may be columns of a larger
        tensor; matrices: what `pack_experts` returned for one [out_features, in_features] of each
        head, in x's dtype and without biases. Where `linear` is torch's, on a GPU, its bits may
        differ.
        """
        ...

    def rotate_store(
        self, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
    ) -> Tensor:
        """Norm q and k, subtract the center of keys, rotate q and k, multiply q by its factor,
        quantize k and v into `slots`; returns q.

        qkv: [rows, num_heads * k_dim + num_kv_heads * (k_dim + v_dim)], the heads of q, then of k,
        then of v; positions and slots: [rows] int64, slot -1 stores nothing. Without slots `qkv`
        has the heads of q alone, for keys that another layer has stored in `pages`. Returns [rows,
        num_heads, k_dim].
        """
        ...

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
    ) -> Rows:
        """Causal grouped-query attention of each row over its own sequence, read back from the
        pages.

        q: [num_tokens, num_heads, k_dim]; returns [num_tokens, num_heads, v_dim] in q's dtype, or
        what a set makes of [num_tokens, num_heads * v_dim] for `consumer`. A key at distance <
        window is seen. With a soft cap, scores are bounded by a tanh. The center that
        `rotate_store` subtracted is added back here, to the whole score of every key, so that sinks
        count as they do without a center. sinks: [num_heads] float32, one more score of each row,
        which takes part in the sum of the softmax alone. Raises KernelError for a context shorter
        than its queries.
        """
        ...

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        states: States,
        sequences: Sequences,
    ) -> Tensor:
        """A causal convolution of each channel over its own sequence, [rows, channels] in x's
        dtype.

        The row at position t becomes f(bias + sum over j of weight[:, j] * x[t - width + 1 + j]), j ascending, in
        float32, rounded once; f is SiLU or nothing, and inputs before the sequence are 0. Inputs before this step come
        from `states.parts["columns"]`, and the last width - 1 of each block go there.

        x: [rows, channels], which may be columns of a larger tensor; weight: [channels, width],
        width 2 to 8; bias: [channels]; both in x's dtype.
        """
        ...

    def decays(
        self,
        a: Tensor,
        b: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        limits: tuple[float, float] = (0.0, math.inf),
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What `recurrence` takes of each row and head: beta and log_decay, [rows, heads] float32.

        dt = softplus(a + dt_bias), bounded by `limits`; log_decay = -exp(a_log) * dt; beta =
        sigmoid(b), or dt without b (Mamba-2). a, b: [rows, heads], which may be columns of a larger
        tensor; a_log, dt_bias: [heads] float32.

        With a decay of each key channel (Kimi Delta Attention) a is [rows, heads * k_dim], dt_bias
        [heads * k_dim] and log_decay [rows, heads, k_dim]; b is there then. With `bound`, a
        negative number, log_decay is instead bound * sigmoid(exp(a_log) * (a + dt_bias)), and b is
        there as well.
        """
        ...

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
        """Linear attention with a decay over each row's own sequence, [rows, heads * v_dim] in v's
        dtype.

        Of each head, S is a matrix [k_dim, v_dim] that decays by exp(log_decay) and then gains k uᵀ
        at every token; a row's result is qᵀ S. u = beta * v, or with `delta` beta * (v - kᵀ S), S
        decayed (gated delta net, Yang et al. 2024; without: Mamba-2, Dao and Gu 2024). With
        log_decay [rows, heads, k_dim] each row of S has a decay of its own (Kimi Delta Attention,
        2025): below, exp(G) multiplies channels of k and q, and rows of S. With `norm` each head of
        q and k is divided by the root of its sum of squares plus 1e-6, and q by the root of k_dim
        as well. `skip`, [heads] float32, adds skip * v.

        Tokens come in tiles of STATE_TILE at absolute positions. S0 is S at the start of a row's
        tile as `states` stores it, G_t the sum of log_decay, each at least LEAST_DECAY, from the
        tile's start to row t. In float32, in this order:

            u_t = round(beta_t (v_t - [delta] (exp(G_t) k_tᵀ S0 + sum over j < t of (exp(G_t - G_j) k_j · k_t) u_j)))
            o_t = exp(G_t) q_tᵀ S0 + sum over j <= t of (exp(G_t - G_j) k_j · q_t) u_j + skip v_t

        with k and u rounded to v's dtype, as they are kept in `states`. The first row of the next
        tile sets S0 to exp(G) S0 + sum over j of (exp(G - G_j) k_j) u_jᵀ, G that of the tile's last
        row, and stores it. So S is rounded once per tile, in prefill and in decoding alike.

        q, k: [rows, key_heads * k_dim], v: [rows, heads * v_dim], which may be columns of larger
        tensors; the heads of one key head are neighbours. beta: [rows, heads] float32; log_decay:
        [rows, heads] or [rows, heads, k_dim] float32, as the part `decay` of `states`. Products of
        decays are exponentials of sums, so none overflows.
        """
        ...

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
        """The RMSNorm of each `group` columns of x, and SiLU of `gate` as a factor, [rows, size],
        for `consumer`.

        With `norm_first` the norm, as `add_rms_norm` rounds it, times the factor, rounded; else the
        norm of x times the factor, which is not rounded. x, gate: [rows, size], which may be
        columns of larger tensors; weight: [size], or [group] for all groups.
        """
        ...
