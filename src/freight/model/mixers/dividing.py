"""What a rank has of a mixer: rows of its tensors, and shares of its cache. Imports no torch.

A rank has some heads, or channels of a short convolution, and its part of the outputs
(`parallel/shards.py`). A store puts together what several ranks divide (`cache/store/pages.py`), so
that its blocks are those of any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

Piece: TypeAlias = "slice[int, int, None]"
Pieces = tuple[tuple[int | slice, ...], ...]  # of a tensor, joined along their first dimension
Cut = tuple[str, Pieces]
# [block_size, heads, …]
_PAGES = ("k", "v", "k_scale", "v_scale", "rotated", "index_k", "index_scale")


class Rank(NamedTuple):
    """Rank `number`, from 0, of `size` ranks."""

    number: int
    size: int

    def part(self, count: int) -> slice:
        """Return its elements among `count`, which the ranks share evenly."""
        assert count % self.size == 0
        share = count // self.size
        return slice(self.number * share, (self.number + 1) * share)

    def kv_part(self, num_kv_heads: int) -> slice:
        """Return its KV heads: those that its query heads attend to."""
        share = max(1, num_kv_heads // self.size)
        first = self.number * num_kv_heads // self.size
        return slice(first, first + share)


class CacheShare(NamedTuple):
    """A rank's share of a part: along dimension `axis` of a block, `pieces` of the whole, one after
    another.
    """

    axis: int
    pieces: tuple[Piece, ...]


class HeadShare(NamedTuple):
    """The heads of a rank, `own`, among `total`, with `channels` each."""

    total: int
    own: Piece
    channels: int


def scaled(heads: slice, each: int) -> slice:
    """Return the rows of `heads`, which have `each` rows."""
    return slice(heads.start * each, heads.stop * each)


def moved(rows: slice, by: int) -> slice:
    """Return `rows`, `by` rows further down."""
    return slice(rows.start + by, rows.stop + by)


def rows_of(*rows: slice) -> Pieces:
    """Return these rows as pieces."""
    return tuple((piece,) for piece in rows)


def of_module(module: str, *rows: slice) -> Iterator[Cut]:
    """Yield weight and bias of `module` with `rows`."""
    yield f"{module}.weight", rows_of(*rows)
    yield f"{module}.bias", rows_of(*rows)


def of_modules(
    modules: Sequence[str], sizes: Sequence[int], rows: Sequence[slice]
) -> Iterator[Cut]:
    """Yield weight and bias of `modules` with `rows` of each projection, which has `sizes` rows; one
    module may have the rows of all.
    """
    if len(modules) == 1:
        starts = accumulate(sizes, initial=0)
        yield from of_module(modules[0], *map(moved, rows, starts))
        return
    for module, piece in zip(modules, rows, strict=True):
        yield from of_module(module, piece)


def unshared(what: str, count: int, size: int) -> Iterator[str]:
    """Yield a fault unless each rank has some of `count`, or several ranks have the same one."""
    if size % count:
        yield from uneven(what, count, size)


def uneven(what: str, count: int, size: int) -> Iterator[str]:
    """Yield a fault unless `size` ranks share `count` evenly."""
    if count % size:
        yield f"its ranks cannot share the {count} {what} evenly"


def page_shares(heads: Piece) -> Mapping[str, CacheShare]:
    """Return the shares of the parts of pages: `heads` of each."""
    return dict.fromkeys(_PAGES, CacheShare(1, (heads,)))


def state_shares(keys: HeadShare, values: HeadShare) -> dict[str, CacheShare]:
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


def column_share(*inputs: HeadShare) -> CacheShare:
    """Return the share of the inputs of a convolution, which stand side by side."""
    pieces: list[Piece] = []
    start = 0
    for heads in inputs:
        pieces.append(moved(scaled(heads.own, heads.channels), start))
        start += heads.total * heads.channels
    return CacheShare(1, tuple(pieces))
