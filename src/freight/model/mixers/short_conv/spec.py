"""A short convolution: its config, tensors, state, and what ranks divide. Imports no torch."""

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
    of_modules,
    uneven,
)
from freight.model.mixers.spec import MixerParts, Projected, StateMixer, StatePart, column_part


@dataclass(frozen=True)
class ShortConvNames:
    """Names of a short convolution within a layer (`ShortConvConfig`); `conv` has a weight and
    perhaps a bias.
    """

    in_proj: str = "conv.in_proj"
    conv: str = "conv.conv"
    out_proj: str = "conv.out_proj"


@dataclass(frozen=True)
class ShortConvConfig(StateMixer):
    """out(c * convolution(b * x)), where b, c and x are projections of the input (LFM2).

    channels   of each of the three
    width      inputs of a channel that its convolution sees, the current token's included
    bias       whether the convolution and both projections have a bias
    """

    channels: int
    width: int
    bias: bool = False

    def parts(self, hidden_size: int, all_names: TensorNames) -> MixerParts:
        """Return the tensors and modules of a layer."""
        names = all_names.of(ShortConvNames)
        channels = self.channels
        bias = {f"{names.conv}.bias": (channels,)} if self.bias else {}
        return MixerParts(
            module=names.in_proj.rpartition(".")[0],
            projections={
                "in_proj": Projected((names.in_proj,), (3 * channels,), hidden_size, self.bias),
                "out_proj": Projected((names.out_proj,), (hidden_size,), channels, self.bias),
            },
            plain={f"{names.conv}.weight": (channels, 1, self.width), **bias},
        )

    def state_parts(self, compute: Format, state: Format) -> tuple[StatePart, ...]:
        """Return the parts of a sequence's state."""
        return (column_part(self.channels, self.width, compute),)

    def rank_faults(self, where: str, size: int) -> Iterator[str]:
        """Yield what `size` ranks cannot divide."""
        yield from uneven(f"channels of the convolution of {where}", self.channels, size)

    def divided(self, size: int) -> ShortConvConfig:
        """Return the convolution of one of `size` ranks."""
        return replace(self, channels=self.channels // size)

    def inner_pieces(self, hidden_size: int, all_names: TensorNames, rank: Rank) -> Iterator[Cut]:
        """Yield the rows of a rank's channels."""
        names = all_names.of(ShortConvNames)
        channels = rank.part(self.channels)
        yield from of_modules((names.in_proj,), (self.channels,) * 3, (channels,) * 3)
        yield from of_module(names.conv, channels)

    def cache_shares(self, rank: Rank) -> Mapping[str, CacheShare]:
        """Return the channels of a rank."""
        channels = HeadShare(self.channels, rank.part(self.channels), 1)
        return {"columns": column_share(channels)}
