"""How memory is split over groups: what a long request takes, and what short ones find."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.clock import takes_less
from tests.refusals import assert_names
from tests.shares import examples

from freight.cache.groups import Pages, StateBlocks
from freight.cache.pool import allocate_pool
from freight.cache.sizing import (
    bytes_of_request,
    bytes_over,
    held_memory,
    longest_request,
    memory_over,
    split_memory,
    useful_memory,
)
from freight.cache.spec import KVCacheSpec, LayerKVSpec, LayerStateSpec, cache_spec, default_every
from freight.engine.build import describe_cache
from freight.fp8.formats import Format, Granularity
from freight.kernels.reference_set import REFERENCE
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import shape_config
from freight.model.mixers.spec import StatePart
from freight.model.open import open_random
from freight.settings.engine import EngineArgs, KVCacheConfig

BFLOAT16 = KVCacheConfig(Format.BFLOAT16, None, None, None)
GIB = 2**30


def gemma_3_27b() -> ModelConfig:
    """Its cache: 62 layers, five of six with a window of 1024, 16 KV heads of 128 channels."""
    model = parse_model_config(shape_config("llama-1b"))
    mixer = replace(model.layers[0].mixer, num_heads=32, num_kv_heads=16, k_dim=128, v_dim=128)
    layers = [
        replace(model.layers[0], mixer=replace(mixer, window=None if index % 6 == 5 else 1024))
        for index in range(62)
    ]
    return replace(model, layers=tuple(layers), max_position_embeddings=131072)


def spec_of(*windows: int | None, heads: int = 2, block_size: int = 16) -> KVCacheSpec:
    return KVCacheSpec(
        tuple(LayerKVSpec(Format.BFLOAT16, None, heads, 8, 8, window) for window in windows),
        block_size,
    )


def test_layers_with_equal_windows_form_a_group_whatever_their_bytes() -> None:
    wide = LayerKVSpec(Format.BFLOAT16, None, 4, 8, 8, None)
    scaled = LayerKVSpec(Format.E4M3FN, Granularity.TOKEN, 2, 8, 8, 24)
    spec = KVCacheSpec((*spec_of(24, None, 24).layers, wide, scaled), 16)
    assert spec.groups == (
        Pages((0, 2, 4), 2 * 64 + 40, 24, 16),
        Pages((1, 3), 64 + 128, None, 16),
    )
    assert spec.bytes_of((1, 2)) == 16 * (168 + 2 * 192)


def test_windows_make_a_long_request_five_times_smaller() -> None:
    spec = cache_spec(BFLOAT16, gemma_3_27b(), 16)
    assert [len(group.layers) for group in spec.groups] == [52, 10]
    whole = 131072 * spec.bytes_per_token
    assert whole == 62 * 2**30
    takes = bytes_of_request(spec, 131072, 2048)
    assert (
        takes == 52 * 2 * 16 * 128 * 2 * 3136 + 10 * GIB
    )  # 1024 + 2048 tokens and a tile; every token
    assert whole >= 5 * takes


@settings(max_examples=examples(200))
@given(
    windows=st.lists(st.sampled_from([None, None, 24, 100, 1024]), min_size=1, max_size=6),
    block_size=st.sampled_from([8, 16, 128]),
    max_model_len=st.integers(1, 5000),
    max_num_seqs=st.integers(1, 80),
    step_tokens=st.integers(1, 9000),
    more=st.floats(1.0, 100.0),
)
def test_what_is_split_fits_and_holds_a_request(
    windows: list[int | None],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    step_tokens: int,
    more: float,
) -> None:
    spec = spec_of(*windows, block_size=block_size)
    needed = bytes_of_request(spec, max_model_len, step_tokens)
    memory = int(needed * more)
    num_blocks = split_memory(spec, memory, max_model_len, max_num_seqs, step_tokens)
    assert spec.bytes_of(num_blocks) <= memory
    assert memory - spec.bytes_of(num_blocks) < sum(group.bytes_per_block for group in spec.groups)
    for group, count in zip(spec.groups, num_blocks, strict=True):
        assert count >= group.most_blocks(max_model_len, step_tokens)
        if group.window is not None and None in windows:
            assert count <= max_num_seqs * group.most_blocks(max_model_len, step_tokens)
    longest = longest_request(spec, memory, max_model_len, step_tokens)
    assert longest >= max_model_len
    assert longest_request(spec, needed - 1, max_model_len, step_tokens) < max_model_len
    assert (
        needed
        <= useful_memory(spec, max_model_len, max_num_seqs, step_tokens)
        <= max_num_seqs * needed
    )
    held = [group.window is not None and None in windows for group in spec.groups]
    if any(held):
        assert [
            count for count, of_window in zip(num_blocks, held, strict=True) if of_window
        ] == next(
            of_windows
            for num_seqs in range(max_num_seqs, 0, -1)
            if (of_windows := blocks_of_windows(spec, memory, max_model_len, num_seqs, step_tokens))
        )


def blocks_of_windows(
    spec: KVCacheSpec, memory: int, max_model_len: int, num_seqs: int, step_tokens: int
) -> list[int] | None:
    """Blocks of the groups with a window, by the rules of `split_memory`; None where the rest would
    be too small.
    """
    whole = next(group for group in spec.groups if group.window is None)
    blocks = [
        min(
            num_seqs * group.most_blocks(max_model_len, step_tokens),
            num_seqs * group.most_blocks(max_model_len, 1)
            - (-step_tokens // group.tokens_per_block),
        )
        for group in spec.groups
        if group is not whole
    ]
    of_windows = (group for group in spec.groups if group is not whole)
    rest = memory - sum(
        count * group.bytes_per_block for count, group in zip(blocks, of_windows, strict=True)
    )
    one = whole.bytes_per_block * whole.most_blocks(max_model_len, 1)
    return blocks if rest >= (one if 2 * rest >= memory else num_seqs * one) else None


def test_a_million_sequences_are_counted_at_once() -> None:
    spec = cache_spec(BFLOAT16, gemma_3_27b(), 16)
    assert takes_less(0.5, lambda: split_memory(spec, 200 * GIB, 131072, 10**9, 2048))


@pytest.mark.parametrize("window", [None, 1024])
def test_a_model_with_one_group_has_all_memory_in_it(window: int | None) -> None:
    spec = spec_of(window, window, heads=3)
    assert spec.bytes_per_token == 192
    assert split_memory(spec, 192 * 16 * 100 + 99, 1600, 64, 512) == (100,)
    if window is None:
        assert useful_memory(spec, 1601, 64, 512) == 64 * 101 * 16 * 192
        assert longest_request(spec, 192 * 16 * 100 + 99, 5000, 512) == 1600


@pytest.mark.parametrize(
    ("memory", "long", "short"),
    [
        (24, 1, 26),
        (48, 2, 54),
        (96, 6, 64),
        (200, 17, 64),
    ],  # GiB; requests of 128k tokens; of 1,024 while decoding
)
def test_short_requests_find_room_beside_long_ones(memory: int, long: int, short: int) -> None:
    spec = cache_spec(BFLOAT16, gemma_3_27b(), 16)
    windows, whole = split_memory(spec, memory * GIB, 131072, 64, 2048)
    assert min(whole * 16 // 131072, windows * 16 // 3136) == long
    assert min(whole * 16 // 1024, windows * 16 // 1088, 64) == short


def test_the_line_at_start_tells_what_is_allocated() -> None:
    opened = open_random(
        EngineArgs(max_model_len=4096, max_num_batched_tokens=256, device="cpu"), "llama-1b"
    )
    config = opened.resolve(opened.args)
    layers = [replace(one, mixer=replace(one.mixer, window=(512, None)[index % 2]))
              for index, one in enumerate(opened.model.layers[:4])]  # fmt: skip
    spec = cache_spec(config.kv, replace(opened.model, layers=tuple(layers)), config.block_size)
    pool = allocate_pool(spec, config.kv, split_memory(spec, 64 * 2**20, 4096, 8, 256), REFERENCE)
    allocated = [
        sum(
            pages.nbytes
            for layer in group.layers
            for pages in (pool.layers[layer].pages.k, pool.layers[layer].pages.v)
        )
        for group in spec.groups
    ]
    assert sum(allocated) == pool.num_bytes
    line = describe_cache(pool, config)
    for index, (group, size) in enumerate(
        zip(("a window of 512", "out a window"), allocated, strict=True)
    ):
        blocks = pool.num_blocks[index]
        assert (
            f"2 layers with{' ' * (index == 0)}{group}: {blocks:,} blocks, {blocks * 16:,} tokens, "
            in line
        )
        assert f"{size / 2**20:.1f} MiB" in line
    assert_names(line, "4,096 tokens", "19.2 MiB", "32.0 MiB", "windows")


# --------------------------------------------------------------------------------------------------------------
# states


def with_states(state_bytes: int, every: int | None, *windows: int | None) -> KVCacheSpec:
    """Two layers with a state of `state_bytes` together, and layers with these windows, of 64 bytes
    a token each.
    """
    state = LayerStateSpec((StatePart("s", (state_bytes // 2,), Format.INT8),))
    return KVCacheSpec((state, *spec_of(*windows).layers, state), 16, every)


def test_layers_with_a_state_form_a_group() -> None:
    parts = StatePart("columns", (3, 8), Format.BFLOAT16), StatePart("decay", (16,), Format.FLOAT32)
    spec = KVCacheSpec(
        (LayerStateSpec(parts), *spec_of(None).layers, LayerStateSpec(parts[:1])), 16, 64
    )
    assert spec.groups == (StateBlocks((0, 2), 3 * 8 * 2 * 2 + 64, 64), Pages((1,), 64, None, 16))
    assert (spec.bytes_per_token, spec.bytes_per_state, spec.repeatable) == (64, 160, False)
    assert spec.blocks_of(65) == (2, 5)
    assert [group.read_bytes(1000) for group in spec.groups] == [160, 64000]


@pytest.mark.parametrize(
    ("state_bytes", "heads", "layers", "format", "every"),
    # bytes of a state of one byte a value with its kept rows and columns; KV heads of 256 or 128
    # channels and layers
    [
        (53_900_000, (4, 256), 16, Format.E4M3FN, 2048),  # Qwen3.6-27B
        (18_600_000, (4, 256), 8, Format.E4M3FN, 2048),  # Qwen3.5-9B
        (23_200_000, (2, 256), 10, Format.E4M3FN, 4096),  # Qwen3.6-35B-A3B
        (16_850_000, (2, 128), 6, Format.E4M3FN, 8192),  # Nemotron-3-Nano-30B-A3B
        (49_500_000, (8, 128), 4, Format.E4M3FN, 8192),  # Granite-4.0-H-Small
        (82_000, (8, 64), 6, Format.BFLOAT16, 64),  # LFM2-1.2B
    ],
)
def test_a_state_costs_no_more_than_the_pages_beside_it(
    state_bytes: int, heads: tuple[int, int], layers: int, format: Format, every: int
) -> None:
    granularity = Granularity.TOKEN if format is Format.E4M3FN else None
    pages = LayerKVSpec(format, granularity, heads[0], heads[1], heads[1])
    spec = KVCacheSpec(
        (LayerStateSpec((StatePart("s", (state_bytes,), Format.INT8),)), *[pages] * layers), 16
    )
    assert default_every(spec, 262144) == every
    assert default_every(spec, 4096) == min(every, 512)
    assert default_every(spec, 100) == 16


@settings(max_examples=examples(200))
@given(
    windows=st.lists(st.sampled_from([None, 24, 100]), max_size=3),
    every=st.sampled_from([16, 64, 1024]),
    state_bytes=st.sampled_from([2, 1000, 100_000]),
    max_model_len=st.integers(1, 5000),
    max_num_seqs=st.integers(1, 80),
    step_tokens=st.integers(1, 9000),
    more=st.floats(1.0, 100.0),
)
def test_a_split_with_states_fits_and_holds_a_request(
    windows: list[int | None],
    every: int,
    state_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    step_tokens: int,
    more: float,
) -> None:
    spec = with_states(state_bytes, every, *windows)
    limits = (max_model_len, max_num_seqs, step_tokens)
    needed = bytes_of_request(spec, max_model_len, step_tokens)
    assert held_memory(spec, max_model_len, 1, step_tokens) == needed
    assert needed <= held_memory(spec, *limits) <= useful_memory(spec, *limits)
    memory = int(needed * more)
    num_blocks = split_memory(spec, memory, *limits)
    assert spec.bytes_of(num_blocks) <= memory
    for group, count in zip(spec.groups, num_blocks, strict=True):
        assert count >= group.most_blocks(max_model_len, step_tokens)


def test_states_come_first_and_pages_get_the_rest() -> None:
    spec = with_states(20_000, 64, None)
    num_states, num_pages = split_memory(spec, 2**24, 4096, 16, 512)
    assert num_states == 2 * (
        16 + 2 + 8
    )  # one each, an eighth more, what a step begins; as many to be found again
    assert num_pages == (2**24 - num_states * 20_000) // (64 * 16)
    assert held_memory(spec, 4096, 16, 512) == 26 * 20_000 + 16 * 4096 * 64
    assert useful_memory(spec, 4096, 16, 512) == 52 * 20_000 + 16 * 4096 * 64


def test_states_take_more_than_half_only_beside_as_many_contexts() -> None:
    spec = with_states(100_000, 64, None)
    num_states, num_pages = split_memory(spec, 4 * 10**6, 4096, 64, 512)
    assert num_states == 2 * (4 + 1 + 8)  # pages for 4 contexts are left, and for 5 would not be
    assert 4 * 4096 <= num_pages * 16 < 6 * 4096
    least = bytes_of_request(spec, 4096, 512)
    assert split_memory(spec, least, 4096, 64, 512) == (9, 256)


@pytest.mark.parametrize("free", [(1000, 1000, 1000), (1000, 300, 900), (90, 1000, 1000)])
def test_each_device_has_room_for_its_layers_however_groups_divide_the_cache(
    free: tuple[int, ...],
) -> None:
    """Of two kinds of layers, over three devices; with a share more, one of them has not."""
    of_layer = {0: 10, 1: 30, 2: 10, 3: 10, 4: 20, 5: 30}
    groups = ((0, 2, 3), (1, 4, 5))
    devices: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    spec: Any = SimpleNamespace(
        layers=[SimpleNamespace(bytes_per_token=of_layer[i], bytes_per_state=0) for i in of_layer],
        groups=[SimpleNamespace(layers=layers) for layers in groups],
    )
    there = dict(zip(devices, free, strict=True))
    memory = memory_over(spec, devices, there)
    needed = bytes_over(spec, devices, memory)
    assert all(needed[device] <= there[device] for device in devices)
    more = bytes_over(spec, devices, memory + max(2, memory // 50))
    assert any(more[device] > there[device] for device in devices)
    for device, layers in devices.items():
        parts = []
        for group in groups:
            own = sum(of_layer[layer] for layer in group if layer in layers)
            parts.append(-(-memory * own // sum(of_layer[layer] for layer in group)))
        assert needed[device] == max(parts)
