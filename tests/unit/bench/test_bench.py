"""What the benchmarks say about a run: the right steps, bytes and keys, on a model small enough to
run here.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.formats import four_bits

from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.engine.build import start_engine
from freight.errors import ConfigError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import LinearScheme, Packing
from freight.kernels.reference_set import REFERENCE
from freight.kernels.select import select_kernels
from freight.lab.bench.cases import Bench, Heads
from freight.lab.bench.drive import (
    StepRecord,
    TimedRunner,
    drive,
    greedy,
    random_prompt,
    weight_bytes,
)
from freight.lab.bench.kernels import linear_shapes, measure_kernels
from freight.lab.bench.latency import _figures, measure_latency, read_bytes, split
from freight.lab.bench.throughput import draw_length, measure_throughput
from freight.lab.bench.timing import MemoryProbe, Spread, bytes_beyond_caches, time_in_rotation
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.model.open import OpenModel, open_model, open_random
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHAPE = PRESETS["llama-1b"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}


@pytest.fixture
def opened(tmp_path: Path) -> OpenModel:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    args = EngineArgs(
        quantization="fp8", kv_cache_dtype="fp8", skip_tokenizer_init=True, kv_cache_memory="8 MiB"
    )
    return open_random(args, str(path))


def record(sampled: int, seconds: float = 1.0) -> StepRecord:
    return StepRecord(seconds, seconds / 2, sampled, sampled, 0.5, sampled)


def test_spread_of_one_and_of_many():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_calls_rotate_and_the_first_round_does_not_count():
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    assert time_in_rotation(calls, seconds=0.0, least=3).count == 3
    assert order == ["a", "b", "a", "b", "a"]


def test_the_probe_reads_what_it_says():
    probe = MemoryProbe(2**20)
    first, second = probe.sample(), probe.sample()
    assert probe.bandwidth() == Spread.of([first, second])
    assert first > 0


@pytest.mark.parametrize(
    ("cache", "free", "size"),
    [
        ("480M", 64 * 2**30, 960 * 2**20),
        ("32M", 64 * 2**30, 2**27),
        (None, 64 * 2**30, 2**27),
        ("480M", 2**30, 2**28),
    ],
)
def test_what_is_measured_does_not_fit_into_a_cache_but_into_memory(tmp_path, cache, free, size):
    files = {"proc/meminfo": f"MemTotal: {free // 1024} kB\nMemAvailable: {free // 1024} kB\n"}
    if cache:
        files["sys/devices/system/cpu/cpu0/cache/index3/size"] = f"{cache}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bytes_beyond_caches(tmp_path) == size


def test_decode_begins_when_the_last_has_its_first_token():
    steps = ((0, 5.0), (1, 4.0), (2, 3.0), (2, 2.0), (1, 9.0), (2, 1.0))
    records = [record(*step) for step in steps]
    until_first, full = split(records, 2)
    assert until_first == 12.0
    assert [step.seconds for step in full] == [2.0, 1.0]
    with pytest.raises(ConfigError, match="raise --output-len"):
        split(records[:3], 2)


def test_tokens_of_a_step_with_drafts_count():
    full = [replace(record(2, 0.5), num_tokens=5), record(2, 0.25), record(2, 0.25)]
    figures = _figures([(4.0, full), (2.0, [record(2, 0.5)] * 2)], num_input=100)
    assert figures["decode_tokens_per_second"] == Spread.of([9.0, 4.0])
    assert figures["prefill_tokens_per_second"] == Spread.of([25.0, 50.0])


def test_weight_bytes_by_hand():
    model = parse_model_config(SHAPE)
    linear = 2 * ((64 + 2 * 32) * 64 + 64 * 64 + 2 * 96 * 64 + 64 * 96)
    norms, head = 5 * 64, 300 * 64
    outputs = 2 * ((64 + 2 * 32) + 64 + 2 * 96 + 64)
    assert weight_bytes(model, Format.BFLOAT16, Format.BFLOAT16) == 2 * (linear + norms + head)
    assert weight_bytes(model, Format.BFLOAT16, Format.E4M3FN) == linear + 4 * outputs + 2 * (
        norms + head
    )
    formats = Format.BFLOAT16, Format.E4M3FN
    for scheme, count in (
        # 16 bytes of codes, a scale and a zero point
        (LinearScheme.in_four_bits(Packing.INT4, 32, zeros=True), linear // 32 * (16 + 2 + 1)),
        (LinearScheme.in_four_bits(Packing.NVFP4, 16), linear // 16 * (8 + 1)),
    ):
        read = weight_bytes(model, *formats, linear_of=lambda _, scheme=scheme: scheme)
        assert read == count + 2 * (norms + head)


def test_a_table_of_per_layer_inputs_is_not_read_whole():
    config = json.loads(
        (FIXTURES / "llmcompressor_families" / "gemma4_own_inputs" / "config.json").read_text()
    )
    model = parse_model_config(config)
    assert model.per_layer_vocab_size
    bytes_read = weight_bytes(model, Format.BFLOAT16, Format.BFLOAT16)
    longer = replace(model, per_layer_vocab_size=2 * model.per_layer_vocab_size)
    assert weight_bytes(longer, Format.BFLOAT16, Format.BFLOAT16) == bytes_read


def test_of_experts_only_those_count_that_are_chosen():
    """All of them are equally likely: of 8, one row of a step reads 2, two rows 3.5 on average, and
    many rows all.
    """
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    model = parse_model_config(
        {**SHAPE, "model_type": "qwen3_moe", "architectures": None, **experts}
    )
    one, two, all_ = (
        weight_bytes(model, Format.BFLOAT16, Format.BFLOAT16, rows) for rows in (1, 2, 1000)
    )
    values = 2 * 3 * 48 * 64  # of an expert in both layers
    assert (all_ - one, all_ - two) == (6 * 2 * values, 4.5 * 2 * values)

    int4 = LinearScheme.in_four_bits(Packing.INT4, 32)

    def experts_alone(module: str) -> LinearScheme | None:
        """As Kimi K2 and others are stored: attention stays in 16 bits."""
        return int4 if ".experts." in module else None

    formats = Format.BFLOAT16, Format.E4M3FN
    stored = values // 32 * (16 + 2)
    every, few = (weight_bytes(model, *formats, rows, experts_alone) for rows in (1000, 1))
    assert all_ - every == 8 * (2 * values - stored)
    assert every - few == 6 * stored


def test_every_step_is_timed_and_the_model_is_part_of_it(opened: OpenModel):
    engine, _ = start_engine(opened)
    numbers = random.Random(0)
    for _ in range(2):  # a second drive over the same engine counts nothing twice
        records = drive(engine, [random_prompt(9, 300, numbers) for _ in range(3)], [greedy(4)] * 3)
        assert [one.num_sampled for one in records] == [3, 3, 3, 3]
        assert [one.num_running for one in records] == [3, 3, 3, 3]
        assert all(0 < one.model_seconds < one.seconds for one in records)
    assert isinstance(engine.runner, TimedRunner)
    assert engine.runner.captured is not None  # what is measured is what users run
    assert len(engine.runner.seconds) == 2  # of the last step: the layers, and the logits
    assert not engine.has_unfinished


def test_latency_of_a_checkpoint_in_4_bits(tmp_path: Path):
    """Its head stays in 16 bits, as does what the producer left out."""
    written = four_bits.write(four_bits.FORMS["gptq"])
    args = EngineArgs(
        model=str(written.save(tmp_path)), skip_tokenizer_init=True, kv_cache_memory="8MiB"
    )
    found = measure_latency(open_model(args), "tiny", 1, input_len=8, output_len=3, repeats=1)
    assert found["weight_dtype"] == "int4"
    in_16_bits = sum(2 * tensor.numel() for tensor in written.plain.values())
    inner = sum(2 * written.plain[f"{name}.weight"].numel() for name in written.quantized)
    # of 32 values 16 bytes of codes and a scale; the embedding is not read
    embedding = 2 * written.plain["model.embed_tokens.weight"].numel()
    read = in_16_bits - embedding - inner + inner // 64 * (16 + 2)
    assert found["decode_bytes_per_step"]["weights"] == read


def test_latency_reports_the_run(opened: OpenModel):
    found = measure_latency(opened, "tiny", batch_size=2, input_len=12, output_len=5, repeats=2)
    assert json.loads(json.dumps(found)) == found
    assert found["spread"]["decode_step_ms"]["count"] == 2 * 4
    assert found["kernels"] == select_kernels("auto").name
    assert (found["dtype"], found["weight_dtype"], found["kv_cache"]["dtype"]) == (
        "bfloat16",
        "fp8_e4m3fn",
        "fp8_e4m3fn",
    )
    assert 0 < found["overhead_fraction"] < 1
    assert found["overhead_fraction"] == pytest.approx(
        found["overhead_ms"] / found["decode_step_ms"]
    )
    moved = sum(found["decode_bytes_per_step"].values())
    steps, speeds = (
        found["spread"][name] for name in ("decode_step_ms", "read_bandwidth_bytes_per_second")
    )
    assert speeds["count"] == 2 * 2
    assert found["spread"]["decode_bandwidth_fraction"]["count"] == steps["count"]
    assert found["decode_bandwidth_fraction"] < 100 * moved / (steps["low"] / 1e3) / speeds["low"]
    assert (
        found["decode_bandwidth_fraction"] > 0.01 * moved / (steps["high"] / 1e3) / speeds["high"]
    )
    for figure in ("prefill_tokens_per_second", "decode_tokens_per_second", "peak_rss_bytes"):
        assert found[figure] > 0


def test_of_a_window_a_step_reads_no_more_than_the_window():
    whole, window = (
        LayerKVSpec(Format.E4M3FN, Granularity.TENSOR, 2, 16, 16, size) for size in (None, 100)
    )
    assert read_bytes(KVCacheSpec((whole, window, window), 16), 80) == 80 * 3 * 64
    assert read_bytes(KVCacheSpec((whole, window, window), 16), 1000) == (1000 + 2 * 100) * 64


def test_throughput_counts_every_token(opened: OpenModel):
    found = measure_throughput(
        opened, "tiny", num_requests=5, input_len=10, output_len=4, repeats=1
    )
    assert found["num_requests"] == 5
    assert 5 * 5 <= found["input_tokens"] <= 5 * 15
    assert 5 * 2 <= found["output_tokens"] <= 5 * 6
    rate = found["decode_tokens_per_second"] / found["requests_per_second"]
    assert rate == pytest.approx(found["output_tokens"] / 5)
    assert 0 < found["cache_occupancy"] < 1


def test_lengths_are_drawn_around_the_one_asked_for():
    drawn = {draw_length(8, random.Random(seed)) for seed in range(200)}
    assert (min(drawn), max(drawn)) == (4, 12)
    assert draw_length(1, random.Random(0)) >= 1


@pytest.mark.parametrize(
    "kernels", [REFERENCE, select_kernels("auto")], ids=lambda kernels: kernels.name
)
def test_kernels_rows(kernels):
    model = parse_model_config(SHAPE)
    found = list(measure_kernels(kernels, model, (48, 32), [1, 3], 40, 0.0, cache_size=2**12))
    shapes = {tuple(row["shape"]) for row in found if row["kernel"] == "linear"}
    assert shapes == {
        (rows, *shape) for rows in (1, 3) for shape in [(48, 32), *linear_shapes(model)]
    }
    named = "linear attention rotate_store torch.linear torch._scaled_mm"
    assert {row["kernel"] for row in found} == set(named.split())
    in_4_bits = [row for row in found if row["format"].startswith(("int4", "e2m1"))]
    assert {(row["format"], *row["shape"][1:]) for row in in_4_bits} == {
        (name, *shape)
        for name in ("e2m1, groups of 16", "e2m1, groups of 16, inputs in int8")
        for shape in [(48, 32), *linear_shapes(model)]
        if shape[1] % 16 == 0
    }
    assert in_4_bits[0]["bytes"] == 48 * 32 * 4.5 / 8 + 2 * (48 + 32)
    for row in found:
        assert row["kernels"] == ("torch" if row["kernel"].startswith("torch") else kernels.name)
        assert row["threads"] == torch.get_num_threads()
        assert math.isfinite(row["median_us"])
        share = row["bytes"] / (row["median_us"] / 1e6) / row["read_bandwidth_bytes_per_second"]
        assert row["bandwidth_fraction"] == pytest.approx(share)
    only = list(
        measure_kernels(kernels, model, (48, 32), [1], 40, 0.0, ["rotate_store"], cache_size=2**12)
    )
    assert {row["kernel"] for row in only} == {"rotate_store"}


@pytest.mark.parametrize(
    "kernels", [REFERENCE, select_kernels("auto")], ids=lambda kernels: kernels.name
)
def test_latents_are_measured_with_the_products_of_their_heads(kernels):
    name = "glm4_moe_lite"
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
    }
    sizes |= {"qk_rope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": None, "num_hidden_layers": 2}
    architecture = {
        "model_type": name,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "dtype": "bfloat16",
    }
    model = parse_model_config(architecture | sizes)
    only = ["attention", "by_head"]
    found = list(measure_kernels(kernels, model, (48, 32), [1, 3], 40, 0.0, only, cache_size=2**12))
    products = [tuple(row["shape"]) for row in found if row["kernel"] == "by_head"]
    assert products == [(rows, 2, *matrix) for rows in (1, 3) for matrix in [(32, 16), (24, 32)]]
    assert found[-1]["bytes"] == 2 * 2 * 24 * 32 + 2 * 3 * 2 * (24 + 32)
    assert {tuple(row["shape"]) for row in found if row["kernel"] == "attention"} == {
        (1, 1, 40, 2, 1, 48)
    }


def test_values_of_another_width_are_measured_as_they_are() -> None:
    """K and V of MiMo-V2 have 24 and 16 channels: 40 values of a token in bfloat16, and twice as
    many operations.
    """
    bench = Bench(REFERENCE, "cpu")
    heads, same = Heads(2, 1, 24, 16), Heads(2, 1, 24)
    found, wide = (bench.attention(1, 2, 40, one, Format.BFLOAT16, None) for one in (heads, same))
    assert found.num_flops / wide.num_flops == 40 / 48
    assert wide.num_bytes - found.num_bytes == 40 * 8 * 2 + 2 * 2 * 8 * 2  # of V, and of the result
    assert found.calls[0]().shape == (2, 2, 16)  # type: ignore[attr-defined]
    stored = bench.rotate_store(3, heads, Format.E4M3FN, Granularity.CHANNEL)
    assert stored.calls[0]().shape == (3, 2, 24)  # type: ignore[attr-defined]
