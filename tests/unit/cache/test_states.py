"""Which rows of a step go on from which state, and where what comes of them is written."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.hybrids import HYBRIDS
from tests.shares import examples

from freight.cache.pool import KVPool, PagedState, allocate_pool
from freight.cache.spec import KVCacheSpec, LayerStateSpec, cache_spec
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.model.mixers.spec import StatePart
from freight.model.open import open_model
from freight.operands.states import Stretch
from freight.settings.engine import EngineArgs, KVCacheConfig

PARTS = StatePart("sum", (2, 3), Format.FLOAT32), StatePart("columns", (4,), Format.BFLOAT16)


def pool_of(num_blocks: int, every: int) -> KVPool:
    spec = KVCacheSpec((None, LayerStateSpec(PARTS), LayerStateSpec(PARTS[:1])), 16, every)
    return allocate_pool(
        spec, KVCacheConfig(Format.BFLOAT16, None, None, None), [num_blocks], REFERENCE
    )


def stretches(layer: PagedState, *slices: SequenceSlice) -> list[Stretch]:
    pool = pool_of(8, layer.states.every)
    return list(layer.stretches(prepare(slices, pool.spec.groups)))


def part(start: int, count: int, *blocks: int) -> SequenceSlice:
    return SequenceSlice([0] * count, start, [blocks], Logits.LAST)


def test_a_layer_has_its_parts_for_every_block() -> None:
    pool = pool_of(8, 32)
    assert list(pool.states) == [1, 2]
    assert not pool.paged
    shapes = {
        name: (tuple(one.shape), one.dtype) for name, one in pool.states[1].states.parts.items()
    }
    assert shapes == {"sum": ((8, 2, 3), torch.float32), "columns": ((8, 4), torch.bfloat16)}
    held = sum(one.nbytes for kept in pool.states.values() for one in kept.states.parts.values())
    assert held == pool.num_bytes == 8 * (24 + 8 + 24)
    assert pool.capacity_tokens == 8 * 32


def test_a_boundary_begins_a_block_from_the_one_before() -> None:
    layer = pool_of(8, 32).states[1]
    assert stretches(layer, part(0, 5, 3)) == [Stretch(slice(0, 5), 0, None, 3)]
    assert stretches(layer, part(5, 1, 3)) == [Stretch(slice(0, 1), 5, 3, 3)]
    assert stretches(layer, part(31, 2, 3, 6)) == [
        Stretch(slice(0, 1), 31, 3, 3),
        Stretch(slice(1, 2), 32, 3, 6),
    ]
    assert stretches(layer, part(32, 1, 3, 6)) == [Stretch(slice(0, 1), 32, 3, 6)]
    assert stretches(layer, part(33, 1, 0, 6)) == [Stretch(slice(0, 1), 33, 6, 6)]
    assert stretches(layer, part(32, 1, 3, 6), part(0, 33, 1, 2)) == [
        Stretch(slice(0, 1), 32, 3, 6),
        Stretch(slice(1, 33), 0, None, 1),
        Stretch(slice(33, 34), 32, 1, 2),
    ]


@settings(max_examples=examples(200))
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    every=st.sampled_from([16, 32, 64]),
    data=st.data(),
)
def test_however_a_sequence_is_cut_its_blocks_have_its_own_prefixes(
    lengths: list[int], every: int, data: st.DataObject
) -> None:
    """A state is a list of tokens here: each row appends its own."""
    numbers = iter(data.draw(st.permutations(range(60))))
    tables = [[next(numbers) for _ in range(-(-length // every))] for length in lengths]
    layer, memory, done = (
        pool_of(60, every).states[1],
        dict[int, list[tuple[int, int]]](),
        [0] * len(lengths),
    )
    while left := [index for index, length in enumerate(lengths) if done[index] < length]:
        counts = {index: data.draw(st.integers(1, lengths[index] - done[index])) for index in left}
        rows = [(index, done[index] + i) for index, count in counts.items() for i in range(count)]
        slices = [part(done[index], count, *tables[index]) for index, count in counts.items()]
        for one in stretches(layer, *slices):
            state = [] if one.source is None else memory[one.source]
            new = rows[one.rows]
            assert new[0][1] == one.position
            full = memory.get(one.target, [])
            assert len(full) % every or not full, "a full block is written"
            memory[one.target] = [*state, *new]
        for index, count in counts.items():
            done[index] += count
    for index, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        for entry, block in enumerate(table):
            assert memory[block] == [(index, at) for at in range(min(length, (entry + 1) * every))]


@pytest.mark.parametrize(
    ("drafts", "more"), [(0, 0), (1, 1), (14, 14), (15, 15), (16, 15), (63, 15)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ring_keeps_as_many_more_inputs_as_drafts_of_a_tile(
    drafts: int, more: int, ranks: int
) -> None:
    """Nothing else of a state grows with drafts, and each rank has the same room."""
    opened = open_model(EngineArgs(str(HYBRIDS / "delta_net")))
    config = opened.resolve(opened.args)
    kinds = config.kv, opened.model, config.block_size, config.compute_format
    plain = cache_spec(*kinds, ranks=ranks)
    found = cache_spec(*kinds, ranks=ranks, drafts=drafts)
    num_states = 0
    for layer, before in zip(found.layers, plain.layers, strict=True):
        if not isinstance(before, LayerStateSpec):
            assert layer == before
            continue
        assert isinstance(layer, LayerStateSpec)
        num_states += 1
        for part, own in zip(layer.parts, before.parts, strict=True):
            if part.name != "columns":
                assert part == own
                continue
            assert own.shape[0] == 3
            assert part == replace(own, shape=(3 + more, own.shape[1]))
    assert num_states == 3


def test_where_nothing_drafts_states_have_no_room_for_it() -> None:
    """As on a GPU, where the next step is launched before the tokens of the last are known."""
    opened = open_model(EngineArgs(str(HYBRIDS / "delta_net"), speculate=8))
    config = opened.resolve(opened.args)
    assert config.most_drafts == 8
    plain = opened.cache_spec(replace(config, most_drafts=0))
    assert opened.cache_spec(replace(config, device="cuda")) == plain
    assert opened.cache_spec(config).bytes_per_state > plain.bytes_per_state
