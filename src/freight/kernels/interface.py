"""KernelSet: the operations that a model is built from, as every set of kernels implements them.

`kernels/reference.py` defines what each operation computes; the compiled sets are tested against
it. Layers take a set as a value and call its methods; `kernels/select.py` chooses it. Shapes are
named as in the rest of the source: rows are tokens, concatenated over all sequences of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from freight.operands.activation import Activation, GatedActivation, GateFunction
from freight.operands.adapters import AdapterBank
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.experts import ExpertLayers, Router
from freight.operands.kv_pages import IndexPages, KVPages
from freight.operands.packed import JoinedPart, PackedExperts, PackedWeight, Rows
from freight.operands.recurrence import (
    Convolution,
    DecayParameters,
    GatedNorm,
    RecurrenceRule,
)
from freight.operands.rotary import Rotary
from freight.operands.states import States
from freight.operands.weight import Weight, Weights
from freight.parallel.ranks import Ranks

First = TypeVar("First")
P = ParamSpec("P")
T = TypeVar("T")


def method_on(
    attribute: str, function: Callable[Concatenate[First, P], T]
) -> Callable[Concatenate[object, P], T]:
    """Make `function` a method of a kernel set: its first argument is the set's `attribute`."""

    @wraps(function)
    def method(kernels: object, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(getattr(kernels, attribute), *args, **kwargs)

    return method


class SparseKernels(Protocol):
    """The operations of sparse attention, whose rows read keys that an indexer chooses (DSA,
    DeepSeek-V3.2-Exp, DeepSeek-AI 2025).
    """

    def store_index(
        self, k: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor, index: IndexPages
    ) -> None:
        """Store the keys of an indexer, [rows, channels], in `slots`, [rows] int64; slot -1 stores
        nothing.

        The first channels are rotated by position; in 8 bits the key is then multiplied by a
        Hadamard matrix and rounded with a scale of its own (`reference_sparse.index_vectors`).
        """
        ...

    def choose(
        self,
        q: Tensor,
        weights: Tensor,
        rotary: Rotary,
        positions: Tensor,
        index: IndexPages,
        sequences: Sequences,
        count: int,
    ) -> Tensor:
        """Return the positions of the `count` best keys of each row among those up to its own, int32
        [num_tokens, count], rising; -1 behind the last, where there are fewer.

        The score of a key is the sum over heads of weight * max(0, q . k), with q rotated and
        rounded as keys are (`reference_sparse.index_scores`). Of equal scores the lowest position is
        chosen, and NaN is above every number. A row's choice depends on its own history alone. q:
        [num_tokens, heads, channels]; weights: float32 [num_tokens, heads]. The keys of this step
        are stored already.
        """
        ...

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        sequences: Sequences,
        call: AttentionCall,
        chosen: Tensor,
    ) -> Tensor:
        """Compute `KernelSet.attention` of each row over the keys that it chose.

        A row that chose every key that it sees has the bits of `KernelSet.attention`. chosen: as
        `choose` returns it, of this layer or of one before.
        """
        ...


class KernelSet(Protocol):
    """Functions on tensors of one device.

    A `consumer` is the packed weight whose product is the only user of an operation's output, or
    None. With a consumer, a set may return the output as its `linear` takes it for that weight
    (`QuantizedRows`), instead of a tensor; without one it returns a tensor. A set accepts only
    weights and rows that it packed and quantized itself.
    """

    @property
    def name(self) -> str:
        """Return the value of `--kernels`, with the build: 'reference', 'cpu-avx512', 'triton'."""
        ...

    @property
    def note(self) -> str:
        """Return the reason why this set was chosen, for the log at start-up; may be ''."""
        ...

    @property
    def ranks(self) -> Ranks:
        """Return those over which the set gathers."""
        ...

    @property
    def packs_mxfp4(self) -> bool:
        """Say whether `pack` and `pack_experts` take MXFP4 matrices without conversion.

        Products with them then have the bits of products with the same values in bfloat16.
        """
        ...

    @property
    def packs_groups(self) -> bool:
        """Say whether `pack` and `pack_experts` take matrices in 4 bits with scales of groups.

        These are INT4 with float16 or bfloat16 scales of 32, 64 or 128 inputs, with or without zero
        points, and E2M1 with E4M3 scales of 16 inputs (NVFP4).
        """
        ...

    @property
    def multiplies_blocks(self) -> bool:
        """Say whether `pack` and `pack_experts` take matrices in a GGUF file's blocks
        (`BlockFormat.is_multiplied`), whose inputs are rounded to INT8 in groups.
        """
        ...

    @property
    def sparse(self) -> SparseKernels | None:
        """Return the operations of sparse attention; None: the set has none."""
        ...

    def pack(self, weight: Weight) -> PackedWeight:
        """Pack `weight` for this set's `linear`; called once, at load.

        Raises KernelError for a format that the set does not compute with.
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
        """Return (base + table[ids] * multiplier) * factor, [rows, size].

        table: [table_rows, size] in a dtype of 16 or 32 bits; ids: [rows] int64; base: [rows,
        size]. The result has base's dtype, or table's without `base`; the rows, each product and
        the sum are rounded to it.
        """
        ...

    def packed_rows(
        self,
        table: PackedWeight,
        ids: Tensor,
        dtype: torch.dtype,
        multiplier: float = 1.0,
        base: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Return (base + table[ids] * multiplier) * factor, [rows, size] in `dtype`: the rows, each
        product and the sum are rounded to it.

        table: packed from blocks, [table_rows, size]; ids: [rows] int64; base: [rows, size] in `dtype`
        """
        ...

    def linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, float32: bool = False
    ) -> Tensor:
        """Return x @ weight.T + bias, [rows, out_features] in x's dtype.

        x: [rows, in_features], or the result of an operation with `consumer=weight`; weight: the
        result of `pack`; bias: [out_features] in x's dtype. With `float32` the result is float32:
        what is otherwise rounded to x's dtype at the end is not rounded.
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
        """Return x + delta in x's dtype (x if delta is None), and its RMSNorm for `consumer`.

        x, delta: [rows, size]; weight: [size]. With a weight in x's dtype the normed values are
        rounded before they are multiplied by it; with a float32 weight they are multiplied first
        and rounded once. With `delta_weight`, as `weight`, the RMSNorm of delta is added instead of
        delta (the sandwich norms of Gemma 2).
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
        """Return x + delta in x's dtype (x if delta is None), and its LayerNorm for `consumer`.

        x, delta: [rows, size]; weight, bias: [size], in x's dtype.
        """
        ...

    def activated(
        self, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
    ) -> Rows:
        """Return activation(x), [rows, size], for `consumer`."""
        ...

    def gated(
        self, gate_up: Tensor, activation: GatedActivation, consumer: PackedWeight | None = None
    ) -> Rows:
        """Return activation(gate) * up, [rows, size], for `consumer`.

        gate_up: [rows, 2 * size], gate first.
        """
        ...

    def gate(self, x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
        """Return x * function(logits), [rows, size], rounded once.

        x: [rows, size]; logits: [rows, groups] in x's dtype, one for each of `groups` equal parts
        of a row, or [1, groups] for all rows. Both may be columns of larger tensors.
        """
        ...

    def join(self, parts: Sequence[JoinedPart], eps: float = 0.0) -> Tensor:
        """Concatenate the columns of all parts, [rows, sum of sizes]; norm those with a weight.

        A part is x, and the weight of a norm or None. x: [rows, size], which may be columns of a
        larger tensor; weight: [group], of the RMSNorm of each `group` columns, as in
        `add_rms_norm`. If every x is [rows, heads, size], the result is [rows, heads, sum of
        sizes].
        """
        ...

    def gather(self, x: Tensor, first: bool = False) -> Tensor:
        """Return the columns of all ranks side by side, [rows, ranks * columns] in x's dtype.

        x: [rows, columns], of one shape on all ranks, which make the same calls in the same order.
        With `first` the values are for ranks that draw tokens: rank 0 alone with kernels for CPUs,
        where those of other ranks may be undefined, and all with kernels for GPUs. Without other
        ranks the result is x. Raises RankError if another rank has ended.
        """
        ...

    def shared_linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, whole: bool = False
    ) -> Tensor:
        """Return the outputs of all ranks side by side, [rows, ranks * out_features] in x's dtype.

        That is `gather(linear(gather(x), weight, bias))`, or with `whole`, where every rank has all
        columns of x, `gather(linear(x, weight, bias))`. Raises as `gather` does.
        """
        ...

    def add_adapters(self, y: Tensor, x: Tensor, bank: AdapterBank, adapters: Tensor) -> Tensor:
        """Add to each row of y what its adapter adds, in place; return y.

        y: [rows, out_features], contiguous, the projection's result for x [rows, in_features] in the
        same dtype; adapters: [rows] int32, a row's slot in `bank`, or NO_ADAPTER. A row without an
        adapter keeps its bits. Sums are float32, and A x is not rounded: y + scaling * B (A x) is
        rounded once. A row's bits depend on that row and its adapter alone.
        """
        ...

    def pack_experts(self, weights: Weights, bias: Tensor | None = None) -> PackedExperts:
        """Pack one matrix of each expert for this set's `experts`; called once, at load.

        weights: of one shape, format and scheme; each is read once
        bias: [num_experts, out_features] in the dtype of the rows
        """
        ...

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row.

        Returns their ids, [rows, top_k] int32, ascending in a row, and their weights, [rows, top_k]
        float32. x: [rows, hidden_size]. The logits are x @ router.matrix.T + bias in float32, and a
        row's do not depend on the other rows.
        """
        ...

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layers: ExpertLayers,
        base: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Return base + the weighted sum of the results of each row's experts, in x's dtype.

        The result of expert e is down_e(activation(gate_e(x)) * up_e(x)), or with an `Activation`,
        which has no gate, down_e(activation(up_e(x))). Each expert's result is rounded to x's
        dtype. The sum is in float32 in the order of ids, beginning with base, and rounded once.

        x, base: [rows, hidden_size]; ids, weights: as `route` returns them; adapters: [rows] int32,
        a row's slot in `layers.banks`, or NO_ADAPTER; None: no row has one. What an adapter adds
        follows each product as `add_adapters` does, and a row without one keeps its bits.
        """
        ...

    def by_head(self, x: Tensor, matrices: PackedExperts) -> Tensor:
        """Multiply each head by the matrix of that head, [rows, heads, out_features] in x's dtype.

        x: [rows, heads, in_features], the last dimension contiguous, which may be columns of a
        larger tensor; matrices: the result of `pack_experts` for one [out_features, in_features]
        matrix of each head, in x's dtype and without biases. Each head has the bits of `linear`; on
        a GPU, where `linear` is torch's, they may differ.
        """
        ...

    def rotate_store(
        self, qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
    ) -> Tensor:
        """Norm and rotate q and k, store k and v in `slots`; return q, [rows, num_heads, k_dim].

        In this order: norm q and k, subtract the center of keys, rotate q and k, multiply q by its
        factor, quantize k and v into `slots`. qkv: [rows, num_heads * k_dim + num_kv_heads * (k_dim
        + v_dim)], the heads of q, then of k, then of v; positions and slots: [rows] int64, slot -1
        stores nothing. Without slots `qkv` holds only the heads of q, and another layer has stored
        the keys in `pages`.
        """
        ...

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        sequences: Sequences,
        call: AttentionCall,
        consumer: PackedWeight | None = None,
    ) -> Rows:
        """Compute grouped-query attention of each row over the stored keys of its sequence.

        Without `call.causal` the step has every row of each sequence (`Sequences.are_whole`). q:
        [num_tokens, num_heads, k_dim]; returns [num_tokens, num_heads, v_dim] in q's dtype, or
        with a `consumer` what the set makes of [num_tokens, num_heads * v_dim]. The center that
        `rotate_store` subtracted is added back to the score of every key, so that sinks weigh the
        same as without a center. Raises KernelError for a context shorter than its queries.
        """
        ...

    def convolve(
        self, x: Tensor, convolution: Convolution, states: States, sequences: Sequences
    ) -> Tensor:
        """Compute a causal convolution of each channel over its sequence, [rows, channels].

        The row at position t becomes f(bias + sum over j of weight[:, j] * x[t - width + 1 + j]),
        j ascending, in float32, rounded once to x's dtype; f is SiLU with `silu`, else the
        identity. Inputs before the sequence are 0. Inputs before this step are read from
        `states.parts["columns"]`, where the last inputs of each block are stored.

        x: [rows, channels], which may be columns of a larger tensor.
        """
        ...

    def decays(
        self, a: Tensor, b: Tensor | None, parameters: DecayParameters
    ) -> tuple[Tensor, Tensor]:
        """Return beta and log_decay of each row and head for `recurrence`, [rows, heads] float32.

        dt = softplus(a + dt_bias), bounded by `limits`; log_decay = -exp(a_log) * dt; beta =
        sigmoid(b), or dt without b (Mamba-2). a, b: [rows, heads], which may be columns of a larger
        tensor.

        With a decay of each key channel (Kimi Delta Attention) a is [rows, heads * k_dim], dt_bias
        [heads * k_dim] and log_decay [rows, heads, k_dim]; b is required then. With `bound`, a
        negative number, log_decay is instead bound * sigmoid(exp(a_log) * (a + dt_bias)); b is
        required there, too.
        """
        ...

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor,
        rule: RecurrenceRule,
        states: States,
        sequences: Sequences,
    ) -> Tensor:
        """Compute linear attention with a decay over each row's sequence, [rows, heads * v_dim].

        Each head has a matrix S [k_dim, v_dim], which at every token first decays by exp(log_decay)
        and then gains k uᵀ; a row's result, in v's dtype, is qᵀ S. u = beta * v, or with `delta`
        beta * (v - kᵀ S) of the decayed S (gated delta net, Yang et al. 2024; without `delta`:
        Mamba-2, Dao and Gu 2024). With log_decay [rows, heads, k_dim] each row of S has its own
        decay (Kimi Delta Attention, 2025): below, exp(G) multiplies channels of k and q, and rows
        of S. With `norm` each head of q and k is divided by the root of its sum of squares plus
        1e-6, and q also by the root of k_dim. `skip` adds skip * v.

        Tokens are processed in tiles of STATE_TILE at absolute positions. S0 is S at the start of a
        row's tile as stored in `states`; G_t is the sum of log_decay, each at least LEAST_DECAY,
        from the tile's start to row t. In float32, in this order:

            u_t = round(beta_t (v_t - [delta] (exp(G_t) k_tᵀ S0 + sum over j < t of (exp(G_t - G_j) k_j · k_t) u_j)))
            o_t = exp(G_t) q_tᵀ S0 + sum over j <= t of (exp(G_t - G_j) k_j · q_t) u_j + skip v_t

        with k and u rounded to v's dtype, as they are kept in `states`. The first row of the next
        tile sets S0 to exp(G) S0 + sum over j of (exp(G - G_j) k_j) u_jᵀ, where G is that of the
        tile's last row, and stores it. So S is rounded once per tile, in prefill as in decoding.

        q, k: [rows, key_heads * k_dim], v: [rows, heads * v_dim], which may be columns of larger
        tensors; the heads of one key head are adjacent. beta: [rows, heads] float32; log_decay:
        [rows, heads] or [rows, heads, k_dim] float32, as the part `decay` of `states`. Products of
        decays are computed as exponentials of sums, so none overflows.
        """
        ...

    def gated_norm(
        self, x: Tensor, gate: Tensor, norm: GatedNorm, consumer: PackedWeight | None = None
    ) -> Rows:
        """Apply RMSNorm to each `group` columns of x, and multiply by SiLU of `gate`, [rows, size].

        With `norm_first` the result is the norm of x, rounded as by `add_rms_norm`, times the
        factor, and rounded again. Otherwise it is the norm of the product of x and the factor,
        which is not rounded before. x, gate: [rows, size], which may be columns of larger tensors.
        The result is for `consumer`.
        """
        ...
