"""A gated delta net: its config, tensors, state, and what ranks divide. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from freight.fp8.formats import Format
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import (
    CacheShare,
    Cut,
    HeadShare,
    Rank,
    column_share,
    moved,
    of_module,
    of_modules,
    rows_of,
    scaled,
    state_shares,
    uneven,
    unshared,
)
from freight.model.mixers.spec import (
    MixerParts,
    Projected,
    StateMixer,
    StatePart,
    column_part,
    matrix_parts,
)


@dataclass(frozen=True)
class DeltaNetNames:
    """Names of a gated delta net within a layer.

    qkvz, ba   projections; a single name has the rows of all, by key head, each with its value
               heads (Qwen3-Next)
    """

    qkvz: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    ba: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    conv: str = "linear_attn.conv1d.weight"
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm.weight"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True)
class DeltaNetConfig(StateMixer):
    """A gated delta net (Yang et al. 2024): linear attention whose state decays, and whose update
    replaces the value stored for a key (the delta rule).

    q, k and v go through one convolution of `width` inputs and SiLU. The result of each head is
    normed, and multiplied by SiLU of a gate, before it is projected.

    key_heads   heads of q and k; each serves heads / key_heads neighbouring value heads
    """

    key_heads: int
    heads: int
    k_dim: int
    v_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k, v."""
        return 2 * self.key_heads * self.k_dim + self.heads * self.v_dim

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""
        names = all_names.of(DeltaNetNames)
        values = self.heads * self.v_dim
        of_heads = self.heads if len(names.ba) > 1 else 2 * self.heads
        by_head = {}
        if len(names.qkvz) == 1:
            by_head = {names.qkvz[0]: (self.k_dim, values // self.key_heads)}
        return MixerParts(
            module=names.out.rpartition(".")[0],
            projections={
                "qkvz": Projected(names.qkvz, (self.channels, values), hidden_size),
                "out": Projected((names.out,), (hidden_size,), values),
            },
            kept=dict.fromkeys(names.ba, (of_heads, hidden_size)),
            whole=by_head,
            exact={names.a_log: (self.heads,), names.dt_bias: (self.heads,)},
            plain={
                names.conv: (self.channels, 1, self.width),
                names.norm: (self.v_dim,),
            },
        )

    def state_parts(self, compute: Format, state: Format) -> tuple[StatePart, ...]:
        """Return the parts of a sequence's state."""
        matrices = matrix_parts(
            key_heads=self.key_heads,
            heads=self.heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            compute=compute,
            state=state,
        )
        return (*matrices, column_part(self.channels, self.width, compute))

    def rank_faults(self, where: str, size: int) -> Iterator[str]:
        """Yield what `size` ranks cannot divide."""
        yield from uneven(f"value heads of {where}", self.heads, size)
        yield from unshared(f"key heads of {where}", self.key_heads, size)

    def divided(self, size: int) -> DeltaNetConfig:
        """Return the delta net of one of `size` ranks."""
        key_heads = max(1, self.key_heads // size)
        return replace(self, heads=self.heads // size, key_heads=key_heads)

    def inner_pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the rows of a rank's heads; its key heads are cut as KV heads."""
        names = all_names.of(DeltaNetNames)
        key_heads = rank.kv_part(self.key_heads)
        heads = rank.part(self.heads)
        keys = scaled(key_heads, self.k_dim)
        values = scaled(heads, self.v_dim)
        all_keys = self.key_heads * self.k_dim
        each = self.heads // self.key_heads
        channels = keys, moved(keys, all_keys), moved(values, 2 * all_keys)
        if len(names.qkvz) > 1:
            of_qkv, of_z = names.qkvz
            yield from of_module(of_qkv, *channels)
            yield from of_module(of_z, values)
        else:
            rows = _by_key_head(key_heads, heads, each, 2 * self.k_dim, self.v_dim)
            yield from of_module(names.qkvz[0], *rows)
        if len(names.ba) > 1:
            yield from of_modules(names.ba, (self.heads,) * 2, (heads,) * 2)
        else:
            yield from of_module(names.ba[0], *_by_key_head(key_heads, heads, each, 0, 1))
        yield names.conv, rows_of(*channels)
        yield names.a_log, rows_of(heads)
        yield names.dt_bias, rows_of(heads)

    def cache_shares(self, rank: Rank) -> Mapping[str, CacheShare]:
        """Return the heads of a rank."""
        keys = HeadShare(self.key_heads, rank.kv_part(self.key_heads), self.k_dim)
        values = HeadShare(self.heads, rank.part(self.heads), self.v_dim)
        return state_shares(keys, values) | {"columns": column_share(keys, keys, values)}


def _by_key_head(
    key_heads: slice, heads: slice, each: int, key_rows: int, of_head: int
) -> Sequence[slice]:
    """Return the rows of `key_heads` and `heads` where a key head has `own` rows, then twice the
    rows of its `each` heads, which have `of_head`.
    """
    side = each * of_head
    block = key_rows + 2 * side
    if heads.start == key_heads.start * each and heads.stop == key_heads.stop * each:
        return [scaled(key_heads, block)]
    first = key_heads.start * block  # of the only one, whose heads several ranks share
    of_heads = moved(scaled(heads, of_head), first + key_rows - key_heads.start * side)
    owned = [slice(first, first + key_rows)] if key_rows else []
    return [*owned, of_heads, moved(of_heads, side)]
