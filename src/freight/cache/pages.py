"""The memory of one layer's pages. Kernels follow the strides they find; only this module chooses a
layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from freight.cache.spec import LayerKVSpec
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import SCALE_GROUP, Granularity
from freight.fp8.scheme import LayerScales
from freight.operands.kv_pages import IndexPages, KVPages
from freight.settings.engine import PageLayout


class Empty(Protocol):
    """Allocates a tensor of unspecified content."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor: ...


def empty_on(device: str) -> Empty:
    """Return how tensors are allocated on a device."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return empty


def allocate_pages(
    spec: LayerKVSpec,
    layout: PageLayout,
    scales: LayerScales | None,
    num_blocks: int,
    block_size: int,
    device: str,
    empty: Empty | None = None,
) -> KVPages:
    """Allocate `num_blocks` blocks of one layer. The system commits memory at the first write.
    `scales` are static. `empty` allocates on `device`.
    """
    empty = empty or empty_on(device)
    pages = _kv_pages(spec, layout, scales, (num_blocks, block_size), device, empty)
    if not spec.index_dim:
        return pages
    return replace(pages, index=_index_pages(spec, layout, (num_blocks, block_size), empty))


def _index_pages(
    spec: LayerKVSpec, layout: PageLayout, sizes: tuple[int, int], empty: Empty
) -> IndexPages:
    parts = [(spec.index_dim, torch_dtype(spec.format))]
    if spec.format.is_quantized:
        parts.append((1, torch.float32))
    k, *scales = _tensors(parts, layout, (*sizes, 1), empty)
    return IndexPages(k, scales[0].squeeze(-1) if scales else None)


def _kv_pages(
    spec: LayerKVSpec,
    layout: PageLayout,
    scales: LayerScales | None,
    sizes: tuple[int, int],
    device: str,
    empty: Empty,
) -> KVPages:
    shape = (*sizes, spec.num_kv_heads)
    counters = torch.zeros(2, dtype=torch.int64, device=device)
    if spec.granularity is Granularity.GROUP:
        return _grouped_pages(spec, layout, shape, empty, counters)
    dynamic = spec.granularity is Granularity.TOKEN
    assert scales is None or (spec.format.is_fp8 and not dynamic)
    dtype = torch_dtype(spec.format)
    first = spec.k_dim - spec.v_dim
    parts = [(spec.k_dim, dtype)]
    if not spec.v_in_k:
        parts.append((spec.v_dim, dtype))
    num_sides = len(parts)
    if dynamic:
        parts += [(1, torch.bfloat16)] * num_sides
    tensors = _tensors(parts, layout, shape, empty)
    k = tensors[0]
    v = tensors[num_sides - 1]
    if spec.v_in_k:
        v = k[..., first:]
    k_scale = v_scale = None
    if dynamic:
        k_scale = tensors[num_sides].squeeze(-1)
        v_scale = tensors[-1].squeeze(-1)
    elif scales is not None:
        k_scale = expand_scale(scales.k, spec.num_kv_heads, spec.k_dim).to(device)
        if spec.v_in_k:
            # They are stored with the scale of keys; the checkpoint's for values is ignored
            v_scale = k_scale[:, first:].contiguous()
        else:
            v_scale = expand_scale(scales.v, spec.num_kv_heads, spec.v_dim).to(device)
    return KVPages(k, v, k_scale, v_scale, counters, v_in_k=spec.v_in_k)


def _grouped_pages(
    spec: LayerKVSpec,
    layout: PageLayout,
    shape: tuple[int, int, int],
    empty: Empty,
    counters: Tensor,
) -> KVPages:
    """Allocate pages with `group` scales: codes of the latent, the channels before it in bfloat16,
    and scales.
    """
    parts = [
        (spec.v_dim, torch_dtype(spec.format)),
        (spec.k_dim - spec.v_dim, torch.bfloat16),
        (spec.v_dim // SCALE_GROUP, torch.bfloat16),
    ]
    codes, rotated, scale = _tensors(parts, layout, shape, empty)
    return KVPages(codes, codes, scale, scale, counters, v_in_k=True, rotated=rotated)


def _tensors(
    parts: list[tuple[int, torch.dtype]],
    layout: PageLayout,
    shape: tuple[int, int, int],
    empty: Empty,
) -> list[Tensor]:
    """Allocate [num_blocks, block_size, num_kv_heads, size] for each part's size and dtype, in
    `layout`.
    """
    num_blocks, block_size, heads = shape
    if layout is PageLayout.TOKENS:
        return [empty(*shape, size, dtype=dtype) for size, dtype in parts]
    if layout is PageLayout.HEADS:
        by_head = num_blocks, heads, block_size
        return [empty(*by_head, size, dtype=dtype).transpose(1, 2) for size, dtype in parts]
    widths = [block_size * heads * size * dtype.itemsize for size, dtype in parts]
    blocks = empty(num_blocks, sum(widths), dtype=torch.uint8).split(widths, 1)
    tensors = []
    for block, (_, dtype) in zip(blocks, parts, strict=True):
        tensors.append(block.view(dtype).unflatten(1, (block_size, heads, -1)))
    return tensors


def expand_scale(values: tuple[float, ...], num_kv_heads: int, head_dim: int) -> Tensor:
    """Expand 1, num_kv_heads or num_kv_heads * head_dim scales to a float32 tensor [num_kv_heads,
    head_dim].
    """
    size = num_kv_heads * head_dim
    assert len(values) in (1, num_kv_heads, size), (
        f"{len(values)} scales for {num_kv_heads} KV heads"
    )
    scale = torch.tensor(values, dtype=torch.float32, device="cpu")
    return scale.repeat_interleave(size // len(values)).view(num_kv_heads, head_dim)
