"""What a rank has of a layer's pages or state, by the names of their parts. Imports no torch.

A store puts together what several ranks divide (`cache/store/pages.py`), so that its blocks are those
of any number of ranks. The rules are those of `parallel/shards.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from freight.model.config.layer import (
    AttentionConfig,
    DeltaNetConfig,
    KimiDeltaConfig,
    LatentConfig,
    Mamba2Config,
    Mixer,
    ShortConvConfig,
)
from freight.parallel.shards import kv_part, part

Piece: TypeAlias = "slice[int, int, None]"
_PAGES = ("k", "v", "k_scale", "v_scale", "rotated")  # [block_size, heads, …]


class CacheShare(NamedTuple):
    """A rank's share of a part: along dimension `axis` of a block, `pieces` of the whole, one after
    another.
    """

    axis: int
    pieces: tuple[Piece, ...]


class _Heads(NamedTuple):
    """The heads of a rank, `own`, among `total`, with `channels` each."""

    total: int
    own: Piece
    channels: int


def cache_shares(mixer: Mixer, rank: int, size: int) -> Mapping[str, CacheShare]:
    """Return what `rank` of `size` has of each part that a layer with this mixer may keep."""
    match mixer:
        case AttentionConfig():
            heads = kv_part(mixer.num_kv_heads, rank, size)
            return dict.fromkeys(_PAGES, CacheShare(1, (heads,)))
        case LatentConfig():  # all of them
            return dict.fromkeys(_PAGES, CacheShare(1, (slice(0, 1),)))
        case ShortConvConfig():
            channels = _Heads(mixer.channels, part(mixer.channels, rank, size), 1)
            return {"columns": _columns(channels)}
        case DeltaNetConfig():
            keys = _Heads(mixer.key_heads, kv_part(mixer.key_heads, rank, size), mixer.k_dim)
            values = _Heads(mixer.heads, part(mixer.heads, rank, size), mixer.v_dim)
            return _state(keys, values) | {"columns": _columns(keys, keys, values)}
        case KimiDeltaConfig():
            both = _Heads(mixer.heads, part(mixer.heads, rank, size), mixer.head_dim)
            return _state(both, both) | {"columns": _columns(both, both, both)}
        case Mamba2Config():
            keys = _Heads(mixer.groups, kv_part(mixer.groups, rank, size), mixer.state_size)
            values = _Heads(mixer.heads, part(mixer.heads, rank, size), mixer.head_dim)
            return _state(keys, values) | {"columns": _columns(values, keys, keys)}
        case None:
            return {}


def _state(keys: _Heads, values: _Heads) -> dict[str, CacheShare]:
    """Return the shares of the parts that `KernelSet.recurrence` keeps (`operands/states.py`)."""
    by_head = CacheShare(0, (values.own,))
    of_token = CacheShare(1, (values.own,))
    return {
        "state": by_head,
        "scale": by_head,
        "k": CacheShare(1, (keys.own,)),
        "u": of_token,
        "decay": of_token,
    }


def _columns(*inputs: _Heads) -> CacheShare:
    """Return the share of the inputs of a convolution, which stand side by side."""
    pieces = []
    start = 0
    for heads in inputs:
        begin = start + heads.own.start * heads.channels
        end = start + heads.own.stop * heads.channels
        pieces.append(slice(begin, end))
        start += heads.total * heads.channels
    return CacheShare(1, tuple(pieces))
