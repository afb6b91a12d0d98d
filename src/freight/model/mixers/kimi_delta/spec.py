"""Kimi delta attention: its config, tensors, state, and what ranks divide. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from freight.fp8.formats import Format
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.dividing import (
    CacheShare,
    Cut,
    HeadShare,
    Rank,
    column_share,
    of_module,
    rows_of,
    scaled,
    state_shares,
    uneven,
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
class KimiDeltaNames:
    """Names of Kimi delta attention within a layer (`KimiDeltaConfig`).

    decay, output_gate   one projection, or two in the order of their use
    conv                 convolutions of q, k and v
    wide                 whether `a_log` has the shape [1, 1, heads, 1]
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    decay: tuple[str, ...] = ("self_attn.f_a_proj", "self_attn.f_b_proj")
    beta: str = "self_attn.b_proj"
    output_gate: tuple[str, ...] = ("self_attn.g_a_proj", "self_attn.g_b_proj")
    conv: tuple[str, ...] = (
        "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight",
        "self_attn.v_conv1d.weight",
    )
    a_log: str = "self_attn.A_log"
    dt_bias: str = "self_attn.dt_bias"
    norm: str = "self_attn.o_norm.weight"
    out: str = "self_attn.o_proj"
    wide: bool = True


@dataclass(frozen=True)
class KimiDeltaConfig(StateMixer):
    """Kimi delta attention (Kimi Linear, 2025): a gated delta net with a decay per key channel.

    q, k and v each go through a convolution of `width` inputs and SiLU. The result of each head is
    normed, and multiplied by a sigmoid of a gate, before it is projected.

    head_dim   channels of a head of q, k and v
    rank       values between the two projections that produce decays, and gates; None: there is one
               projection for each
    bound      lower bound of log decays, below 0 (`KernelSet.decays`); None: unbounded
    """

    heads: int
    head_dim: int
    width: int
    rank: int | None = None
    bound: float | None = None

    @property
    def size(self) -> int:
        """Channels of q, over all heads; k and v have as many."""
        return self.heads * self.head_dim

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""
        names = all_names.of(KimiDeltaNames)
        size = self.size
        rank = self.rank
        unquantized = {
            names.decay[0]: (rank or size, hidden_size),
            names.beta: (self.heads, hidden_size),
        }
        first = names.qkv
        alone: tuple[str, ...] = ()
        if rank is None:
            # A full-rank gate's projection shares its input with q, k and v, and is merged with them
            first += names.output_gate
        else:
            alone = (names.decay[1], names.output_gate[1])
            unquantized[names.output_gate[0]] = (rank, hidden_size)
            unquantized |= dict.fromkeys(alone, (size, rank))
        return MixerParts(
            module=names.out.rpartition(".")[0],
            projections={
                "first": Projected(first, (size,) * len(first), hidden_size),
                "out": Projected((names.out,), (hidden_size,), size),
            },
            kept=unquantized,
            alone=alone,
            exact={
                names.a_log: (1, 1, self.heads, 1) if names.wide else (self.heads,),
                names.dt_bias: (size,),
            },
            plain={
                **dict.fromkeys(names.conv, (size, 1, self.width)),
                names.norm: (self.head_dim,),
            },
        )

    def state_parts(self, compute: Format, state: Format) -> tuple[StatePart, ...]:
        """Return the parts of a sequence's state."""
        matrices = matrix_parts(
            key_heads=self.heads,
            heads=self.heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            compute=compute,
            state=state,
            by_channel=True,
        )
        return (*matrices, column_part(3 * self.size, self.width, compute))

    def rank_faults(self, where: str, size: int) -> Iterator[str]:
        """Yield what `size` ranks cannot divide."""
        yield from uneven(f"heads of {where}", self.heads, size)

    def divided(self, size: int) -> KimiDeltaConfig:
        """Return the layer of one of `size` ranks."""
        return replace(self, heads=self.heads // size)

    def inner_pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the rows of a rank's heads."""
        names = all_names.of(KimiDeltaNames)
        heads = rank.part(self.heads)
        channels = scaled(heads, self.head_dim)
        last = 0 if self.rank is None else 1  # values between two steps are whole on every rank
        for module in (*names.qkv, names.decay[last], names.output_gate[last]):
            yield from of_module(module, channels)
        yield from of_module(names.beta, heads)
        for name in (*names.conv, names.dt_bias):
            yield name, rows_of(channels)
        outer = (slice(None), slice(None)) if names.wide else ()
        yield names.a_log, ((*outer, heads),)

    def cache_shares(self, rank: Rank) -> Mapping[str, CacheShare]:
        """Return the heads of a rank."""
        heads = HeadShare(self.heads, rank.part(self.heads), self.head_dim)
        return state_shares(heads, heads) | {"columns": column_share(heads, heads, heads)}
