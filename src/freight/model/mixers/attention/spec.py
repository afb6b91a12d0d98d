"""Grouped-query attention: its config, tensors, pages, and what ranks divide. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd

from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import (
    CacheShare,
    Cut,
    Rank,
    of_module,
    of_modules,
    page_shares,
    rows_of,
    scaled,
    uneven,
    unshared,
)
from freight.model.mixers.spec import MixerParts, PagedMixer, Projected
from freight.operands.activation import GateFunction


@dataclass(frozen=True)
class OutputGateConfig:
    """A projection of the layer's input, whose `function` multiplies what attention returns, before
    it is projected.

    by_head   whether all channels of a head share a factor; otherwise there is one per channel
    in_q      whether it is part of the projection of q: the rows of each head's gate follow those
              of its q
    """

    function: GateFunction
    by_head: bool
    in_q: bool = False


class NormSpan(StrEnum):
    """The channels of q, and of k, that one norm spans."""

    HEAD = "head"  # those of each head
    ALL_HEADS = "all heads"  # those of all heads together (OLMo 2)


class NormPlace(StrEnum):
    """Where the norm of q and k is."""

    BEFORE_ROPE = "before the rope"
    AFTER_ROPE = "after the rope"  # (Hunyuan)


@dataclass(frozen=True)
class QKNormConfig:
    """An RMSNorm of q, and one of k.

    weighted   whether it has weights (Muse-Glimmer's has none)
    """

    span: NormSpan = NormSpan.HEAD
    place: NormPlace = NormPlace.BEFORE_ROPE
    weighted: bool = True


@dataclass(frozen=True)
class AttentionNames:
    """Names of attention within a layer. `qkv` may be one name, for a tensor of all three.

    sinks         only in models that have them
    output_gate   projection of the gate of attention's result (`AttentionConfig.output_gate`)
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    sinks: str = "self_attn.sinks"
    output_gate: str = "self_attn.g_proj"

    def qkv_of(self, mixer: AttentionConfig) -> tuple[str, ...]:
        """Return the modules of q, k and v that a layer has: those of
        `AttentionConfig.projected_sizes`, or one for all.
        """
        if len(self.qkv) == 1:
            return self.qkv
        return self.qkv[: len(mixer.projected_sizes)]


@dataclass(frozen=True)
class AttentionConfig(PagedMixer):
    """Grouped-query attention (Ainslie et al. 2023).

    k_dim, v_dim     channels of a query or key head, and of a value head
    softmax_scale    multiplies q . k
    window           sliding window in tokens: a key at distance < window is seen, on both sides
                     with `ModelConfig.attends_both_ways`; None: every key
    rope             index into `ModelConfig.ropes`; None: queries and keys are not rotated
    qk_norm          norm of q and k; None: there is none
    v_norm           whether each head of v is divided by its root mean square, without a weight
    v_factor         multiplies v, rounded to the compute dtype, before v is stored; None: v is
                     stored as projected
    k_eq_v           whether v is the projected k, before its norm and rotation: there is no
                     projection of v
    kv_from          index of the layer whose keys and values this one reads; this layer then has
                     neither projections of them nor pages. None: it stores its keys and values
    qkv_bias, o_bias whether the projections have biases
    soft_cap         a score s becomes soft_cap * tanh(s / soft_cap); None: unbounded
    sinks            whether each query head has a sink (`KernelSet.attention`)
    output_gate      gate of the result of each head; None: no gate
    group            query heads of a KV head in the whole model, where this is a rank's part of it
                     (`AttentionCall`); None: it is all
    """

    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    softmax_scale: float
    window: int | None = None
    rope: int | None = 0
    qk_norm: QKNormConfig | None = None
    v_norm: bool = False
    v_factor: float | None = None
    k_eq_v: bool = False
    kv_from: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    output_gate: OutputGateConfig | None = None
    group: int | None = None

    @property
    def output_gate_size(self) -> int:
        """Rows of the projection of `output_gate`."""
        if self.output_gate is None:
            return 0
        if self.output_gate.by_head:
            return self.num_heads
        return self.num_heads * self.v_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Values of q, k and v per token."""
        return (
            self.num_heads * self.k_dim,
            self.num_kv_heads * self.k_dim,
            self.num_kv_heads * self.v_dim,
        )

    @property
    def factor_groups(self) -> tuple[int, int]:
        """Equal parts of a token's q and k together, and of its v: the fewest such that no part has
        channels of both.
        """
        q, k, v = self.qkv_sizes
        size = gcd(q + k, v)
        return (q + k) // size, v // size

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Rows of the projections of q and, if the layer has them, k and v."""
        q, k, v = self.qkv_sizes
        if self.output_gate is not None and self.output_gate.in_q:
            q += self.output_gate_size
        if self.kv_from is not None:
            return (q,)
        return (q, k) if self.k_eq_v else (q, k, v)

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Channels of the norm of q, and of k."""
        return self.qkv_sizes[:2] if self.norms_all_heads else (self.k_dim, self.k_dim)

    @property
    def norms_all_heads(self) -> bool:
        """True if one norm spans all heads of q, and one all heads of k."""
        return self.qk_norm is not None and self.qk_norm.span is NormSpan.ALL_HEADS

    @property
    def values_per_token(self) -> int:
        """Values that the cache holds per token."""
        return self.num_kv_heads * (self.k_dim + self.v_dim)

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""
        names = all_names.of(AttentionNames)
        gate = self.output_gate
        unquantized: dict[str, tuple[int, int]] = {}
        by_head: dict[str, tuple[int, ...]] = {}
        if gate is not None and gate.in_q:
            by_head = {names.qkv[0]: (self.k_dim,)}
        elif gate is not None:
            unquantized = {names.output_gate: (self.output_gate_size, hidden_size)}
        inputs = self.num_heads * self.v_dim
        return MixerParts(
            module=names.qkv[0].rpartition(".")[0],
            projections={
                "qkv": Projected(
                    names.qkv_of(self), self.projected_sizes, hidden_size, self.qkv_bias
                ),
                "o": Projected((names.o,), (hidden_size,), inputs, self.o_bias),
            },
            kept=unquantized,
            norms=self._norms(names),
            exact={names.sinks: (self.num_heads,)} if self.sinks else {},
            made=self._made,
            factors=0 if self.v_factor is None else sum(self.factor_groups),
            whole=by_head,
        )

    def _norms(self, names: AttentionNames) -> dict[str, int]:
        """Return the channels of the norms of q and, if the layer has keys, k, by weight."""
        if self.qk_norm is None or not self.qk_norm.weighted:
            return {}
        of_q, of_k = self.qk_norm_sizes
        if self.kv_from is not None:
            return {names.q_norm: of_q}
        return {names.q_norm: of_q, names.k_norm: of_k}

    @property
    def _made(self) -> int:
        """Ones that stand for the weights of norms without weights."""
        made = self.v_dim if self.v_norm else 0
        if self.qk_norm is not None and not self.qk_norm.weighted:
            made += self.k_dim
        return made

    def rank_faults(self, where: str, size: int) -> Iterator[str]:
        """Yield what `size` ranks cannot divide."""
        yield from uneven(f"attention heads of {where}", self.num_heads, size)
        if self.norms_all_heads:
            yield from uneven(f"KV heads of {where}", self.num_kv_heads, size)
        yield from unshared(f"KV heads of {where}", self.num_kv_heads, size)

    def divided(self, size: int) -> AttentionConfig:
        """Return the attention of one of `size` ranks."""
        kv_heads = max(1, self.num_kv_heads // size)
        heads = self.num_heads // size
        group = self.num_heads // self.num_kv_heads
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, group=group)

    def inner_pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the rows of a rank's heads."""
        parts = self.parts(hidden_size, all_names)
        qkv = parts.projections["qkv"]
        rows = [rank.part(qkv.sizes[0])]
        heads = rank.kv_part(self.num_kv_heads)
        for of_kv in qkv.sizes[1:]:
            rows.append(scaled(heads, of_kv // self.num_kv_heads))
        yield from of_modules(qkv.modules, qkv.sizes, rows)
        for module, (outputs, _) in parts.kept.items():
            yield from of_module(module, rank.part(outputs))
        for name in parts.exact:  # sinks
            yield name, rows_of(rank.part(self.num_heads))

    def cache_shares(self, rank: Rank) -> Mapping[str, CacheShare]:
        """Return the KV heads of a rank."""
        return page_shares(rank.kv_part(self.num_kv_heads))
