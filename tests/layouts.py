"""Pages in other layouts: the same values and scales, elsewhere in memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from freight.operands.kv_pages import KVPages

LAYOUTS = ("heads", "blocks", "part", "reversed")


def laid_out(pages: KVPages, layout: str) -> KVPages:
    """A copy of `pages`; what lies between its vectors is full of NaN where there is such a NaN.

    heads     in a block one head after another
    blocks    a block's K, V and token scales are one run of bytes, an odd one between them where a
              value is a byte
    part      the heads of a wider cache, as a rank's are, and channels of wider vectors
    reversed  the blocks of a token's head are neighbours
    """
    token = pages.dynamic
    given = [pages.k, pages.v] + [
        _vector(scale) for scale in (pages.k_scale, pages.v_scale) if token
    ]
    moved = _one_run(given) if layout == "blocks" else [_moved(tensor, layout) for tensor in given]
    for to, of in zip(moved, given, strict=True):
        _bytes(to).copy_(_bytes(of))
    scales = [scale.squeeze(-1) for scale in moved[2:]] or [pages.k_scale, pages.v_scale]
    return replace(
        pages,
        k=moved[0],
        v=moved[1],
        k_scale=scales[0],
        v_scale=scales[1],
        counters=pages.counters.clone(),
        v_in_k=False,
    )


def latent(pages: KVPages, first: int) -> KVPages:
    """Pages whose values are the channels of `pages`' keys from `first` on, and lie in them; as
    many as V has.
    """
    assert not pages.k_center
    channels = slice(first, first + pages.v.shape[3])
    v_scale = (
        pages.k_scale
        if pages.k_scale is None or pages.dynamic
        else pages.k_scale[:, channels].contiguous()
    )
    return replace(pages, v=pages.k[..., channels], v_scale=v_scale, v_in_k=True)


def apart(pages: KVPages) -> KVPages:
    """Pages of `latent` with values of their own, which are the same."""
    v_scale = None if pages.v_scale is None else pages.v_scale.clone()
    return replace(
        pages, v=pages.v.clone(memory_format=torch.contiguous_format), v_scale=v_scale, v_in_k=False
    )


def _vector(scale: Tensor | None) -> Tensor:
    assert scale is not None
    return scale[..., None]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _moved(tensor: Tensor, layout: str) -> Tensor:
    blocks, tokens, heads, dim = tensor.shape
    if layout == "heads":
        return tensor.new_empty(blocks, heads, tokens, dim).transpose(1, 2)
    if layout == "part":
        wide = tensor.new_empty(blocks, tokens + 1, heads + 3, dim + 2)
        _bytes(wide).fill_(0x7F if wide.itemsize == 1 else torch.nan)
        return wide[:, :tokens, 2 : 2 + heads, 1 : 1 + dim]
    return tensor.new_empty(heads, tokens, blocks, dim).permute(2, 1, 0, 3)


def _one_run(tensors: list[Tensor]) -> list[Tensor]:
    """Scales first, because they need addresses that are even."""
    order = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    widths = [tensor[0].numel() * tensor.itemsize for tensor in order]
    padding = [1 if tensor.itemsize == 1 else 0 for tensor in order]
    spare = -sum(widths + padding) % 4
    raw = torch.full(
        (len(tensors[0]), sum(widths + padding) + spare),
        0x7F,
        dtype=torch.uint8,
        device=order[0].device,
    )
    found: dict[int, Tensor] = {}
    begin = 0
    for tensor, width, gap in zip(order, widths, padding, strict=True):
        part = raw[:, begin : begin + width].view(tensor.dtype)
        found[id(tensor)] = part.unflatten(1, tuple(tensor.shape[1:]))
        begin += width + gap
    return [found[id(tensor)] for tensor in tensors]
