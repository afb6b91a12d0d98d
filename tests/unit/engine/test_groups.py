"""Groups whose blocks differ in size, and one whose tokens have no places of their own: tables and
slots of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from freight.cache.groups import Pages
from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.engine.block_tables import BlockTables
from freight.engine.decode_steps import Buffers
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.formats import Format


@dataclass(frozen=True)
class States:
    """One block for 32 tokens of a sequence, in which no token has a place."""

    tokens_per_block: int = 32
    has_slots: bool = False


GROUPS: list[Any] = [Pages((0,), 1, None, 8), Pages((1,), 1, None, 16), States()]


def one(start: int, count: int, first: int) -> SequenceSlice:
    """`count` tokens at `start` of a sequence whose blocks are numbered from `first` on in every
    group.
    """
    tables = [
        tuple(range(first, first + -(-(start + count) // group.tokens_per_block)))
        for group in GROUPS
    ]
    return SequenceSlice([0] * count, start, tables, Logits.LAST)


def test_each_group_has_slots_by_its_own_blocks():
    batch = prepare([one(20, 3, 5), one(0, 2, 1)], GROUPS)
    assert batch.slots[0].tolist() == [7 * 8 + 4, 7 * 8 + 5, 7 * 8 + 6, 8, 9]
    assert batch.slots[1].tolist() == [6 * 16 + 4, 6 * 16 + 5, 6 * 16 + 6, 16, 17]
    assert batch.slots[2].shape == (0,)
    assert [tables.tolist() for tables in batch.block_tables] == [
        [[5, 6, 7], [1, 0, 0]],
        [[5, 6], [1, 0]],
        [[5], [1]],
    ]


@pytest.mark.parametrize("bucket", [2, 4])
def test_captured_steps_have_what_prepare_says(bucket):
    slices = [one(20, 1, 5), one(63, 1, 1)]
    buffers = Buffers(bucket, BlockTables(bucket, (8, 4, 2), "cpu"), GROUPS, "cpu")
    buffers.fill(slices[::-1])
    buffers.fill(slices)
    expected = prepare(slices, GROUPS)
    for slots, wanted, padding in zip(
        buffers.batch.slots, expected.slots, (-1, -1, None), strict=True
    ):
        assert slots[:2].tolist() == wanted.tolist()
        assert slots[2:].tolist() == ([] if padding is None else [padding] * (bucket - 2))
    for tables, wanted in zip(buffers.batch.block_tables, expected.block_tables, strict=True):
        assert torch.equal(tables[:2, : wanted.shape[1]], wanted)
    assert all(slots.data_ptr() % 16 == 0 for slots in buffers.batch.slots if len(slots))


def test_groups_are_formed_of_the_layers_that_keep_something():
    full = LayerKVSpec(Format.BFLOAT16, None, 2, 8, 8)
    window = LayerKVSpec(Format.BFLOAT16, None, 1, 8, 8, window=24)
    spec = KVCacheSpec((None, window, full, None, full), 16)
    assert spec.groups == (Pages((1,), 32, 24, 16), Pages((2, 4), 128, None, 16))
    assert [group.keeps_all for group in spec.groups] == [False, True]
    assert (spec.bytes_per_token, spec.blocks_of(33)) == (160, (3, 3))
    assert [group.read_bytes(100) for group in spec.groups] == [24 * 32, 12800]
