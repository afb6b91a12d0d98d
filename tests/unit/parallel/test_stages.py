"""Layers over devices: how they are divided, what each device must have room for, and what is refused.

No weight is read here, and there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity.variants import VARIANTS
from tests.refusals import refuses
from tests.shares import examples

from freight.cache.sizing import MEMORY_SHARE, bytes_over, memory_over
from freight.cache.spec import KVCacheSpec, cache_spec
from freight.engine import build, follower
from freight.engine.build import start_engine
from freight.errors import CapacityError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.model.adapted import adapter_bytes
from freight.model.config.model import ForeignModel, ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.model.open import OpenModel, open_random
from freight.model.sizes import Layout, loaded_bytes, stage_costs, table_bytes
from freight.parallel.ranks import Ranks
from freight.parallel.stages import (
    StageCosts,
    balanced_counts,
    checked_counts,
    devices_of,
    joined_layers,
    layers_by_device,
    require_stages,
    stages_of,
)
from freight.settings.device import require_one_kind
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig
from freight.settings.lora import LoraConfig
from freight.settings.stages import MOST_STAGES, check_stages, listed_counts

FP8_CACHE = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)
GIB = 2**30


def model_of(variant: str) -> ModelConfig:
    return parse_model_config(VARIANTS[variant].to_dict())


LLAMA_8B = parse_model_config(PRESETS["llama-8b"])
SHARED = model_of("gemma4-shared")  # layers 3, 4 and 5 read the pages of layers 1 and 2


def all_divisions(number: int, size: int, joined: frozenset[int]) -> list[tuple[int, ...]]:
    """Every way to divide so many layers, none of whose later stages begins within `joined`."""
    divisions = []
    for begins in combinations(range(1, number), size - 1):
        if joined.isdisjoint(begins):
            bounds = pairwise((0, *begins, number))
            divisions.append(tuple(end - begin for begin, end in bounds))
    return divisions


def sizes_of(costs: StageCosts, counts: Sequence[int]) -> list[int]:
    return [costs.of(stage.layers) for stage in stages_of(counts, [""] * len(counts))]


@st.composite
def divided(draw: st.DrawFn) -> tuple[StageCosts, int, frozenset[int]]:
    """Costs of up to 9 layers, a number of stages that divides them, and layers that none begins with."""
    size = st.integers(0, 20)
    layers = draw(st.lists(size, min_size=1, max_size=9))
    joined = draw(st.frozensets(st.integers(1, 8), max_size=3))
    joined = frozenset(index for index in joined if index < len(layers))
    stages = draw(st.integers(1, len(layers) - len(joined)))
    return StageCosts(tuple(layers), draw(size), draw(size)), stages, joined


@given(divided())
@settings(max_examples=examples(200))
def test_the_largest_stage_is_as_small_as_can_be_and_the_others_even(
    case: tuple[StageCosts, int, frozenset[int]],
) -> None:
    costs, size, joined = case

    def rank(counts: Sequence[int]) -> tuple[int, int]:
        sizes = sizes_of(costs, counts)
        return max(sizes), sum(each * each for each in sizes)

    divisions = all_divisions(len(costs.layers), size, joined)
    counts = balanced_counts(costs, size, joined)
    assert counts in divisions
    assert rank(counts) == min(map(rank, divisions))


def test_the_stages_before_a_large_one_are_divided_with_it_in_mind() -> None:
    """10, 9, 2 and 13 is the best division but for the last stage; 3, 7, 11 and 13 is more even."""
    costs = StageCosts((3, 7, 9, 2, 4), head=9)
    assert balanced_counts(costs, 4, ()) == (1, 1, 2, 1)


def test_embedding_and_head_are_a_part_of_the_first_and_the_last_stage() -> None:
    costs = StageCosts((10,) * 8, embedding=20, head=20)
    assert balanced_counts(costs, 2, ()) == (4, 4)
    assert balanced_counts(costs, 4, ()) == (1, 3, 3, 1)
    assert costs.of(range(8)) == 120


def test_a_layer_that_reads_pages_of_another_is_on_its_device() -> None:
    sources = {index: mixer.kv_from for index, mixer in SHARED.paged.items()}
    assert sources == {0: None, 1: None, 2: None, 3: 1, 4: 2, 5: 1}
    assert joined_layers(SHARED) == {2, 3, 4, 5}
    assert joined_layers(LLAMA_8B) == frozenset()


def test_counts_are_checked_against_the_model() -> None:
    assert checked_counts("10,22", LLAMA_8B, 2) == (10, 22)
    assert checked_counts("1,5", SHARED, 2) == (1, 5)
    with refuses(ConfigError, "--pp-layers 10,21", "31 layers", "32"):
        checked_counts("10,21", LLAMA_8B, 2)
    with refuses(ConfigError, "--pp-layers 3,3", "layer 3", "omit --pp-layers"):
        checked_counts("3,3", SHARED, 2)


def test_counts_are_read_with_spaces() -> None:
    assert listed_counts("20, 20", 2) == (20, 20)


@pytest.mark.parametrize("value", ["", "20", "20,20,20", "20,0", "40,-1", "a,b", "20;20", "20,"])
def test_a_text_that_is_no_list_of_so_many_layers_is_refused(value: str) -> None:
    with refuses(ConfigError, "--pp-layers", repr(value), "2 stages", "20,20"):
        listed_counts(value, 2)


@pytest.mark.parametrize("size", [0, -1, MOST_STAGES + 1, True, 2.0])
def test_a_number_of_stages_that_no_model_could_have_is_refused(size: Any) -> None:
    with refuses(ConfigError, "--pipeline-parallel-size", repr(size), "1", str(MOST_STAGES)):
        check_stages(size, None)


def test_layers_of_stages_need_stages() -> None:
    check_stages(1, None)
    check_stages(2, "20,20")
    with refuses(ConfigError, "--pp-layers", "--pipeline-parallel-size", "omit"):
        check_stages(1, "32")
    with refuses(ConfigError, "pp_layers", "[20, 20]", "text"):
        check_stages(2, [20, 20])  # type: ignore[arg-type]


def test_more_stages_than_layers_are_refused_with_the_most() -> None:
    require_stages(LLAMA_8B, 32)
    with refuses(ConfigError, "--pipeline-parallel-size 33", "32 layers", "up to 32"):
        require_stages(LLAMA_8B, 33)
    require_stages(SHARED, 2)
    with refuses(ConfigError, "--pipeline-parallel-size 3", "6 layers", "up to 2"):
        require_stages(SHARED, 3)


def test_modules_of_transformers_are_not_divided() -> None:
    foreign = ForeignModel((), (), "embed.weight", "head.weight", ())
    model = replace(LLAMA_8B, foreign=foreign)
    require_stages(model, 1)
    with refuses(ConfigError, "--pipeline-parallel-size 2", "transformers", "omit it"):
        require_stages(model, 2)


def test_a_device_may_have_several_stages() -> None:
    stages = stages_of((2, 3, 1), ("cuda:0", "cuda:1", "cuda:0"))
    assert [stage.layers for stage in stages] == [range(2), range(2, 5), range(5, 6)]
    assert layers_by_device(stages) == {"cuda:0": {0, 1, 5}, "cuda:1": {2, 3, 4}}
    assert devices_of(stages, "cuda") == ("cuda:0", "cuda:1")
    assert devices_of((), "cuda") == ("cuda",)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_have_all_weights_of_a_model(variant: str, ranks: int) -> None:
    """In packed layouts, in which a tied head is a matrix of its own without stages, too."""
    model = model_of(variant)
    sizing = (Format.BFLOAT16, Format.BFLOAT16, lambda _: None, Layout.PACKED)
    try:
        whole = loaded_bytes(model, *sizing, 128, ranks)
    except ConfigError as error:
        pytest.skip(str(error))
    costs = stage_costs(model, *sizing, ranks)
    layers = range(model.num_layers)
    assert costs.of(layers) == whole.layers + whole.embeddings
    assert table_bytes(model, layers, 128) == whole.tables
    lora = LoraConfig(3, 8)
    parts = [adapter_bytes(model, lora, 2, ranks, (index,)) for index in layers]
    assert sum(parts) == adapter_bytes(model, lora, 2, ranks)


def test_a_tied_head_is_a_copy_on_the_last_stage() -> None:
    model = replace(LLAMA_8B, tie_word_embeddings=True)
    sizing = (Format.BFLOAT16, Format.BFLOAT16, lambda _: None, Layout.PLAIN)
    alone = loaded_bytes(model, *sizing, 128)
    table = 2 * model.vocab_size * model.hidden_size
    assert stage_costs(model, *sizing).of(range(32)) == alone.layers + alone.embeddings + table


# --- the cache

SPECS = {
    name: cache_spec(FP8_CACHE, model_of(name), 16, Format.BFLOAT16)
    for name in ("llama", "gemma3-two-ropes", "gemma4-shared", "qwen3-next", "kimi-linear")
}


def part_on(spec: KVCacheSpec, layers: frozenset[int], blocks: Sequence[int]) -> int:
    """Bytes of the cache that these layers have, of so many blocks of each group."""
    total = 0
    for group, count in zip(spec.groups, blocks, strict=True):
        for index in layers.intersection(group.layers):
            layer = spec.layers[index]
            assert layer is not None
            size = layer.bytes_per_state or layer.bytes_per_token * group.tokens_per_block
            total += count * size
    return total


@pytest.mark.parametrize("name", SPECS)
@given(st.data())
@settings(max_examples=examples(40))
def test_each_device_has_room_for_its_part_however_a_cache_is_divided(
    name: str, data: st.DataObject
) -> None:
    spec = SPECS[name]
    number = len(spec.layers)
    first = data.draw(st.integers(1, number - 1))
    layers = layers_by_device(stages_of((first, number - first), ("a", "b")))
    largest = max(group.bytes_per_block for group in spec.groups)
    free = {device: data.draw(st.integers(0, 8 * largest)) for device in layers}
    memory = memory_over(spec, layers, free)
    most = [memory // group.bytes_per_block for group in spec.groups]
    parts = bytes_over(spec, layers, memory)
    for blocks in product(*(range(min(count, 40) + 1) for count in most)):
        if spec.bytes_of(blocks) > memory:
            continue
        for device, own in layers.items():
            assert part_on(spec, own, blocks) <= parts[device] <= free[device]
    beyond = bytes_over(spec, layers, memory + 1)
    assert any(beyond[device] > free[device] for device in layers)


def test_the_memory_of_one_device_is_that_of_its_cache() -> None:
    for spec in SPECS.values():
        layers = {"cpu": range(len(spec.layers))}
        assert memory_over(spec, layers, {"cpu": 12_345_678}) == 12_345_678
        assert bytes_over(spec, layers, 12_345_678) == {"cpu": 12_345_678}


# --- devices

NAMES = ("NVIDIA H100", "NVIDIA H100", "NVIDIA A100")


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(NAMES))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: NAMES[index])


@pytest.mark.usefixtures("three_gpus")
def test_gpus_are_of_one_kind() -> None:
    require_one_kind(2, "2 GPUs")
    with refuses(ConfigError, "3 GPUs", *NAMES[1:], "CUDA_VISIBLE_DEVICES"):
        require_one_kind(3, "3 GPUs")


class LoadedError(Exception):
    """The weights would be read now."""


def opened_as_on_gpus(**options: Any) -> tuple[OpenModel, EngineConfig]:
    """Llama 3.1 8B, 32 layers over two stages, as if these were on GPUs."""
    args = EngineArgs("", device="cpu", max_model_len=8192, pipeline_parallel_size=2, **options)
    opened = open_random(args, "llama-8b")
    return opened, replace(opened.resolve(args), device="cuda")


def with_free(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    of_device = {f"cuda:{index}": count for index, count in enumerate(free)}
    monkeypatch.setattr(
        build, "free_bytes", lambda devices: {device: of_device[device] for device in devices}
    )


def test_each_gpu_needs_memory_for_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, config = opened_as_on_gpus()
    needed = opened.stage_bytes(config)
    needed["cuda:0"] += opened.passing_bytes(config)  # layers of the other are built on the first
    assert opened.stages(config) == stages_of((16, 16), ("cuda:0", "cuda:1"))
    with_free(monkeypatch, *needed.values())
    build._check_stages(opened, config)
    with_free(monkeypatch, needed["cuda:0"], needed["cuda:1"] - 1)
    with refuses(CapacityError, "cuda:1", "16 layers", f"{needed['cuda:1']:,}", "--pp-layers"):
        build._check_stages(opened, config)


def test_each_gpu_needs_memory_for_its_part_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, config = opened_as_on_gpus(pp_layers="8,24")
    weights = opened.stage_bytes(config)
    spec = opened.cache_spec(config)
    with_free(monkeypatch, weights["cuda:0"] + GIB, weights["cuda:1"] + 3 * GIB)
    build._check_stages(opened, config, spec, 4 * GIB)
    with refuses(CapacityError, "cuda:0", "8 layers", "--kv-cache-memory"):
        build._check_stages(opened, config, spec, 4 * GIB + 4)


def test_another_rank_says_what_all_its_gpus_have_for_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has the third GPU and the fourth: the first that is full decides."""
    opened, config = opened_as_on_gpus(tensor_parallel_size=2, pp_layers="8,24")
    transport: Any = "never used"
    opened = opened.as_rank(Ranks(1, 2, transport), 1)
    with_free(monkeypatch, 0, 0, 40 * GIB, 40 * GIB)
    said = int(follower._free_bytes(opened, config, opened.cache_spec(config)))
    assert said == int(40 * GIB * MEMORY_SHARE["cuda"]) * 32 // 24
    with_free(monkeypatch, 0, 0, 4 * GIB, 40 * GIB)
    said = int(follower._free_bytes(opened, config, opened.cache_spec(config)))
    assert said == int(4 * GIB * MEMORY_SHARE["cuda"]) * 4


def test_each_gpu_needs_memory_for_its_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, config = opened_as_on_gpus(enable_lora=True, max_loras=4)
    needed = opened.stage_bytes(config)
    needed["cuda:0"] += opened.passing_bytes(config)
    assert config.lora is not None
    adapters = adapter_bytes(opened.model, config.lora, 2) // 2
    assert adapters
    with_free(monkeypatch, *(count + adapters for count in needed.values()))
    build._check_stages(opened, config)
    with_free(monkeypatch, *(count + adapters - 1 for count in needed.values()))
    with refuses(CapacityError, "cuda:0", f"{needed['cuda:0'] + adapters:,}"):
        build._check_stages(opened, config)


def test_the_cache_is_as_large_as_the_fullest_gpu_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, config = opened_as_on_gpus(pp_layers="8,24")
    with_free(monkeypatch, 10 * GIB, 20 * GIB)
    share = build.share_for_cache(opened, config, opened.cache_spec(config))
    # three quarters are on the second, which gives it nine tenths of 20 GiB
    assert share == int(20 * GIB * 0.9) * 4 // 3


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise LoadedError

    monkeypatch.setattr(OpenModel, "load", load)


@pytest.mark.usefixtures("no_weights")
def test_a_division_that_is_not_the_models_is_refused_before_weights_are_read() -> None:
    args = EngineArgs("", device="cpu", max_model_len=64, pipeline_parallel_size=2)
    for layers in (None, "20,12"):
        with pytest.raises(LoadedError):
            start_engine(open_random(replace(args, pp_layers=layers), "llama-8b"))
    with refuses(ConfigError, "--pp-layers 20,20", "40 layers", "32"):
        start_engine(open_random(replace(args, pp_layers="20,20"), "llama-8b"))


@pytest.mark.usefixtures("no_weights")
def test_stages_on_a_cpu_are_said_to_gain_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for size in (1, 2):
        caplog.clear()
        args = EngineArgs("", device="cpu", max_model_len=64, pipeline_parallel_size=size)
        with pytest.raises(LoadedError):
            start_engine(open_random(args, "llama-8b"))
        warned = [line for line in caplog.messages if "stages gain nothing" in line]
        assert len(warned) == size - 1
