"""Mamba-2: its config, tensors, state, and what ranks divide. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from freight.fp8.formats import Format
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import (
    CacheShare,
    Cut,
    HeadShare,
    Rank,
    column_share,
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
class MambaNames:
    """Names of Mamba-2 within a layer (`Mamba2Config`); `conv` and the projections have a weight
    and perhaps a bias.
    """

    in_proj: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    a_log: str = "mamba.A_log"
    skip: str = "mamba.D"
    dt_bias: str = "mamba.dt_bias"
    norm: str = "mamba.norm.weight"
    out: str = "mamba.out_proj"


@dataclass(frozen=True)
class Mamba2Config(StateMixer):
    """Mamba-2 (Dao and Gu 2024): linear attention with a decay per head and token.

    Its x (values), B (keys) and C (queries) go through one convolution of `width` inputs and SiLU.
    The result, multiplied by SiLU of a gate, is normed in `norm_groups` equal parts and projected.

    groups       heads of B and C; each serves heads / groups neighbouring heads of x
    head_dim     channels of a head of x
    state_size   channels of a head of B and C
    bias         whether both projections have a bias
    limits       lower and upper bound of the step size dt
    """

    groups: int
    heads: int
    head_dim: int
    state_size: int
    width: int
    norm_groups: int
    conv_bias: bool = True
    bias: bool = False
    limits: tuple[float, float] = (0.0, inf)

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B, C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def values(self) -> int:
        """Channels of x, over all heads."""
        return self.heads * self.head_dim

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""
        names = all_names.of(MambaNames)
        inner = self.values + self.channels + self.heads
        bias = {f"{names.conv}.bias": (self.channels,)} if self.conv_bias else {}
        by_head = (names.a_log, names.skip, names.dt_bias)
        return MixerParts(
            module=names.out.rpartition(".")[0],
            projections={
                "in_proj": Projected((names.in_proj,), (inner,), hidden_size, self.bias),
                "out": Projected((names.out,), (hidden_size,), self.values, self.bias),
            },
            exact=dict.fromkeys(by_head, (self.heads,)),
            plain={
                f"{names.conv}.weight": (self.channels, 1, self.width),
                **bias,
                names.norm: (self.values,),
            },
        )

    def state_parts(self, compute: Format, state: Format) -> tuple[StatePart, ...]:
        """Return the parts of a sequence's state."""
        matrices = matrix_parts(
            key_heads=self.groups,
            heads=self.heads,
            k_dim=self.state_size,
            v_dim=self.head_dim,
            compute=compute,
            state=state,
        )
        return (*matrices, column_part(self.channels, self.width, compute))

    def rank_faults(self, where: str, size: int) -> Iterator[str]:
        """Yield what `size` ranks cannot divide."""
        yield from uneven(f"heads of {where}", self.heads, size)
        yield from unshared(f"groups of heads of {where}", self.groups, size)

    def divided(self, size: int) -> Mamba2Config:
        """Return the mixer of one of `size` ranks."""
        return replace(
            self,
            heads=self.heads // size,
            groups=max(1, self.groups // size),
            norm_groups=self.norm_groups // (size if self.divides_norm(size) else 1),
        )

    def divides_norm(self, size: int) -> bool:
        """Say whether each of `size` ranks has whole groups of the norm. Otherwise all channels are
        gathered before it, and every rank norms them all.
        """
        return self.norm_groups % size == 0

    def inner_pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the rows of a rank's heads; its groups are cut as KV heads."""
        names = all_names.of(MambaNames)
        heads = rank.part(self.heads)
        values = scaled(heads, self.head_dim)
        keys = scaled(rank.kv_part(self.groups), self.state_size)
        all_keys = self.groups * self.state_size
        sizes_of_conv = (self.values, all_keys, all_keys)
        of_conv = (values, keys, keys)
        yield from of_modules((names.conv,), sizes_of_conv, of_conv)
        sizes = (self.values, *sizes_of_conv, self.heads)
        yield from of_modules((names.in_proj,), sizes, (values, *of_conv, heads))
        for name in (names.a_log, names.skip, names.dt_bias):
            yield name, rows_of(heads)
        if self.divides_norm(rank.size):
            yield names.norm, rows_of(values)

    def cache_shares(self, rank: Rank) -> Mapping[str, CacheShare]:
        """Return the heads of a rank."""
        keys = HeadShare(self.groups, rank.kv_part(self.groups), self.state_size)
        values = HeadShare(self.heads, rank.part(self.heads), self.head_dim)
        return state_shares(keys, values) | {"columns": column_share(values, keys, keys)}
