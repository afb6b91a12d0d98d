"""Where the pages of each layout lie in memory, and that no layout takes more of it."""

from __future__ import annotations

import pytest
import torch

from freight.cache.pages import allocate_pages
from freight.cache.spec import LayerKVSpec
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import LayerScales
from freight.operands.kv_pages import KVPages
from freight.settings.engine import PageLayout

BLOCKS, SIZE, HEADS, K, V = 5, 16, 3, 40, 24
TOKEN = LayerKVSpec(Format.E4M3FN, Granularity.TOKEN, HEADS, K, V)
LAYERS = [
    TOKEN,
    LayerKVSpec(Format.E4M3FN, Granularity.HEAD, HEADS, K, V),
    LayerKVSpec(Format.BFLOAT16, None, 1, 8, 8),
]


def allocated(spec: LayerKVSpec, layout: PageLayout) -> KVPages:
    heads = tuple(float(head + 1) for head in range(HEADS))
    scales = (
        LayerScales(heads, heads, Granularity.HEAD)
        if spec.granularity is Granularity.HEAD
        else None
    )
    return allocate_pages(spec, layout, scales, BLOCKS, SIZE, "cpu")


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize("spec", LAYERS, ids=lambda spec: str(spec.granularity))
def test_no_layout_takes_more_memory_than_another(spec, layout):
    pages = allocated(spec, layout)
    assert pages.k.shape == (BLOCKS, SIZE, spec.num_kv_heads, spec.k_dim)
    assert pages.v.shape == (BLOCKS, SIZE, spec.num_kv_heads, spec.v_dim)
    tensors = [pages.k, pages.v] + ([pages.k_scale, pages.v_scale] if pages.dynamic else [])
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    assert sum(memory.values()) == BLOCKS * SIZE * spec.bytes_per_token
    if spec.granularity is Granularity.HEAD:
        assert pages.k_scale.tolist() == [[head + 1] * K for head in range(HEADS)]


def test_the_strides_are_those_that_the_layout_says():
    """In units of the largest number of values that divides a tensor's steps: a head's K or V, one
    scale.
    """
    tokens, heads, blocks = (allocated(TOKEN, layout).strides for layout in PageLayout)
    block = SIZE * HEADS
    assert tokens == (
        (block, HEADS, 1, K),
        (block, HEADS, 1, V),
        (block, HEADS, 1, 1),
        (block, HEADS, 1, 1),
    )
    assert heads == (
        (block, 1, SIZE, K),
        (block, 1, SIZE, V),
        (block, 1, SIZE, 1),
        (block, 1, SIZE, 1),
    )
    whole = block * (
        K + V + 4
    )  # 3,264 bytes: no multiple of K, which is 40, but one of V, which is 24
    assert blocks[:2] == ((whole // 8, HEADS * K // 8, K // 8, 8), (whole // V, HEADS, 1, V))
    assert blocks[2:] == ((whole // 2, HEADS, 1, 1),) * 2


def test_a_block_is_one_run_of_bytes():
    """Bytes written as one run are its keys, its values and its scales."""
    pages = allocated(TOKEN, PageLayout.BLOCKS)
    storage = pages.k.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).view(BLOCKS, -1)
    memory.zero_()
    memory[3] = 0x40
    for tensor in (pages.k, pages.v, pages.k_scale, pages.v_scale):
        assert [bool(tensor[block].float().all()) for block in range(BLOCKS)] == [
            False,
            False,
            False,
            True,
            False,
        ]
        assert not tensor.float()[[0, 1, 2, 4]].any()
