"""What a captured step is told: the buffers say what `prepare` would, padded. Capturing itself
needs a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from freight.cache.groups import Pages
from freight.engine.block_tables import BlockTables
from freight.engine.decode_steps import Buffers, DecodeSteps
from freight.engine.graphs import CudaGraphs, bucket_of
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.operands.adapters import NO_ADAPTER

SLICES = [
    SequenceSlice([7], 10, ((3, 1, 4), (5, 0)), Logits.LAST),
    SequenceSlice([9], 0, ((2,), (3, 1)), Logits.ALL),
    SequenceSlice([8], 31, ((5, 6, 9, 8), (0, 0, 4, 7)), Logits.LAST),
]
GROUPS = [Pages((0,), 0, None, 8), Pages((1,), 0, 16, 8)]


def test_buckets_waste_little():
    assert [bucket_of(n) for n in (1, 2, 3, 5, 8, 9, 17, 64, 65, 100, 129)] == [
        1,
        2,
        4,
        8,
        8,
        16,
        24,
        64,
        96,
        128,
        160,
    ]
    assert all(bucket_of(n) >= n for n in range(1, 300))
    assert bucket_of(bucket_of(77)) == bucket_of(77)


@pytest.mark.parametrize("before", [[], SLICES, SLICES[::-1] + SLICES[:1]])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_is_told_what_prepare_tells_and_padding(before, count):
    buffers = Buffers(4, BlockTables(4, (6, 6), "cpu"), GROUPS, "cpu")
    buffers.fill(before)
    buffers.fill(SLICES[:count])
    told, expected = buffers.batch, prepare(SLICES[:count], GROUPS)
    for name in ("token_ids", "positions", "context_lens", "logit_rows"):
        assert torch.equal(getattr(told, name)[:count], getattr(expected, name)), name
        assert getattr(told, name).dtype == getattr(expected, name).dtype
    for group, (slots, tables) in enumerate(zip(told.slots, told.block_tables, strict=True)):
        assert torch.equal(slots[:count], expected.slots[group])
        assert slots[count:].eq(-1).all()
        for row, part in enumerate(SLICES[:count]):
            assert tables[row, : len(part.block_ids[group])].tolist() == list(part.block_ids[group])
    assert told.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert told.context_lens[count:].eq(0).all()
    assert told.num_tokens == told.num_seqs == 4


def test_rows_without_an_adapter_and_padding_have_none():
    """Also where a step before had other adapters there."""
    buffers = Buffers(4, BlockTables(4, (6, 6), "cpu"), GROUPS, "cpu", adapted=True)
    for slots in ([2, 1, 0], [None, 3], [1]):
        slices = [part._replace(adapter=slot) for part, slot in zip(SLICES, slots, strict=False)]
        buffers.fill(slices)
        assert buffers.batch.adapters is not None
        expected = prepare(slices, GROUPS).adapters
        assert expected is not None
        assert torch.equal(buffers.batch.adapters[: len(slots)], expected)
        assert buffers.batch.adapters[len(slots) :].eq(NO_ADAPTER).all()
    assert prepare(SLICES, GROUPS).adapters is None
    assert Buffers(4, BlockTables(4, (6, 6), "cpu"), GROUPS, "cpu").batch.adapters is None


@pytest.mark.parametrize("needed", [1, 20])
def test_the_largest_bucket_is_captured_first(needed, monkeypatch):
    """Graphs share a pool whose pieces do not grow: by rising size each would take memory of its
    own.
    """
    captured: list[int] = []

    def capture(_, batch):
        captured.append(batch.num_seqs)
        return lambda: torch.zeros(batch.num_seqs, 5)

    monkeypatch.setattr(CudaGraphs, "capture", capture)
    pool = SimpleNamespace(
        spec=SimpleNamespace(groups=GROUPS, blocks_of=lambda num_tokens: (num_tokens // 8,) * 2),
        stages=(),
    )
    steps = DecodeSteps(CudaGraphs(None, pool, 20), pool, 64, "cpu")
    for count in (needed, 3, needed):
        assert len(steps.run((SLICES * 7)[:count])) == count
    assert captured == [24, *([1] if needed == 1 else []), 4]
