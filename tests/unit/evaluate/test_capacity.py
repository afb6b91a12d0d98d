"""What `freight plan` counts is what the engine allocates, to the block, and its choice is the
first that serves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.parity.variants import VARIANTS
from tests.refusals import assert_names, refuses
from tests.shares import examples
from tests.unit.evaluate.published import GEMMA_3_27B, LLAMA_3_1_8B, LLAMA_3_1_70B, SMALL

from freight.cache.pool import PagedState
from freight.cache.sizing import MEMORY_SHARE, bytes_of_request, split_memory, useful_memory
from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.engine import build
from freight.engine.build import cache_facts, start_engine
from freight.errors import CapacityError, CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.kernels.cpu.library import runnable
from freight.lab.capacity import (
    GIB,
    Setting,
    Wish,
    as_json,
    longest_of,
    make_plan,
    needed_for,
    read_memory,
    requests_in,
    verdict,
)
from freight.model.config.parse import parse_model_config
from freight.model.open import open_random
from freight.model.sizes import Layout, table_bytes
from freight.model.weight_bytes import weight_bytes
from freight.settings.engine import EngineArgs
from freight.settings.speculation import DEFAULT_DRAFTS

MIB = 2**20
LAYOUT = Layout.TILES if runnable()[:1] == ("amx",) else Layout.PACKED


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_planned(variant: str) -> None:
    """With bytes for weights and cache in every setting, and the cache's groups cover its layers."""
    plan = make_plan(VARIANTS[variant].to_dict(), Wish(64 * MIB, 128, 2, "cpu", LAYOUT))
    assert plan.choice is not None
    model = parse_model_config(VARIANTS[variant].to_dict())
    stored = sum(mixer.kv_from is None for mixer in model.paged.values())
    mixers = sum(layer.mixer is not None for layer in model.layers)
    for setting in plan.settings:
        assert setting.loaded.layers > 0
        assert setting.loaded.embeddings > 0
        assert setting.requests >= 2
        assert len(setting.num_blocks) == len(setting.spec.groups)
        kept = setting.spec.kept.values()
        assert sum(layer.bytes_per_token > 0 for layer in kept) == stored
        assert sum(layer.bytes_per_state > 0 for layer in kept) == mixers - len(model.paged)


def engine_args(setting: Setting, wish: Wish) -> EngineArgs:
    """What `freight serve` makes of the options that a plan gives."""
    pairs = dict(zip(setting.options[::2], setting.options[1::2], strict=True))
    options: dict[str, Any] = {flag[2:].replace("-", "_"): value for flag, value in pairs.items()}
    if (
        options.get("kv_scales") == "checkpoint"
    ):  # these weights come without scales; any static ones take as much
        options["kv_scales"] = "0.03"
    more = {} if wish.concurrency is None else {"max_num_seqs": wish.concurrency}
    return EngineArgs(
        **options,
        **more,
        max_model_len=wish.context,
        kv_cache_memory=setting.cache_bytes,
        device="cpu",
    )


SKIPPED = [
    ("llama-3.1-8b", ("0", "2")),
    ("gemma-3-27b", ("sliding_window",)),
    ("gemma-3-27b", ("0", "6")),
]


@pytest.mark.parametrize(("context", "concurrency"), [(512, 4), (100, None), (None, None)])
@pytest.mark.parametrize(("name", "skipped"), [*((name, ()) for name in SMALL), *SKIPPED])
def test_every_setting_is_what_the_engine_allocates(
    name: str,
    skipped: tuple[str, ...],
    context: int | None,
    concurrency: int | None,
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL[name]))
    wish = Wish(7 * MIB, context, concurrency, "cpu", LAYOUT, skip_layers=skipped)
    plan = make_plan(SMALL[name], wish)
    assert len(plan.settings) == 20
    weights = [one.weights for one in plan.settings[::5]]
    assert weights == ["bfloat16", "fp8_e4m3fn", "int8", "int4"]
    for one in plan.settings:
        args = engine_args(one, wish)
        engine, config = start_engine(open_random(args, str(file)))
        pool = engine.runner.pool
        assert pool.spec == one.spec
        assert pool.num_blocks == one.num_blocks
        assert pool.capacity_tokens == engine.cache.capacity_tokens == one.capacity_tokens
        assert cache_facts(pool, config)["bytes_per_token"] == one.spec.bytes_per_token
        assert config.max_model_len == (context or one.longest)
        held = weight_bytes(engine.runner.model)
        assert (held.layers, held.embeddings) == (one.loaded.layers, one.loaded.embeddings)
        pages = [layer.pages for layer in pool.layers]
        stored = sum(page.k.nbytes + page.v.nbytes for page in pages)
        scales = [scale for page in pages if page.dynamic for scale in (page.k_scale, page.v_scale)]
        assert bool(scales) is (one.kv.granularity is Granularity.TOKEN)
        stored += sum(scale.nbytes for scale in scales if scale is not None)
        assert stored == pool.num_bytes <= one.cache_bytes


STATEFUL = json.loads(
    (Path(__file__).parents[2] / "fixtures/hybrids/delta_net/config.json").read_text()
)


@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "int8", "fp8"])
def test_states_are_what_the_engine_allocates(asked: str, tmp_path: Path) -> None:
    """To the byte, in every setting, whose options give the engine the same format of states."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(STATEFUL))
    wish = Wish(16 * MIB, 256, 4, "cpu", LAYOUT, state_every=32, state_dtype=asked)
    plan = make_plan(STATEFUL, wish)
    assert (f"--state-dtype {asked}" in verdict(plan)) is (asked != "auto")
    for one, said in zip(plan.settings, as_json(plan)["settings"], strict=True):
        args = replace(engine_args(one, wish), state_every=32, state_dtype=asked)
        args = replace(args, speculate=DEFAULT_DRAFTS)  # none by default with random weights
        engine, config = start_engine(open_random(args, str(file)))
        pool, facts = engine.runner.pool, cache_facts(engine.runner.pool, config)
        eight = asked == "auto" and one.kv.format.is_quantized
        wanted = {"auto": "int8" if eight else "bfloat16", "fp8": "fp8_e4m3fn"}.get(asked, asked)
        assert config.kv.state == said["state_dtype"] == facts["state_dtype"] == wanted
        assert (pool.spec, pool.num_blocks) == (one.spec, one.num_blocks)
        of_layers = [layer.states.parts for layer in pool.layers if isinstance(layer, PagedState)]
        states = sum(part.nbytes for parts in of_layers for part in parts.values())
        assert (
            states
            == pool.num_blocks[0] * said["bytes_per_state"]
            == pool.num_blocks[0] * facts["bytes_per_state"]
        )
        pages = [page for layer in pool.paged.values() for page in (layer.pages.k, layer.pages.v)]
        scales = [
            scale
            for layer in pool.paged.values()
            for scale in (layer.pages.k_scale, layer.pages.v_scale)
        ]
        measured = sum(
            scale.nbytes for scale in scales if scale is not None and one.kv.granularity == "token"
        )
        assert (
            states + sum(page.nbytes for page in pages) + measured
            == pool.num_bytes
            <= one.cache_bytes
        )
        held = weight_bytes(engine.runner.model)
        assert (held.layers, held.embeddings) == (one.loaded.layers, one.loaded.embeddings)


def in_8_bits(kind: str) -> dict[str, Any]:
    """A model whose matrices have a scale per output, as compressed-tensors declares them."""
    eight = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    return LLAMA_3_1_8B | {"quantization_config": {"config_groups": {"group_0": group}}}


def test_int8_weights_are_planned_for_cpus_alone() -> None:
    """GPUs refuse them, so no plan says that they fit there."""
    here = Wish(64 * GIB, device="cpu", layout=Layout.PACKED)
    planned, fp8 = (make_plan(in_8_bits(kind), here) for kind in ("int", "float"))
    assert planned.choice is not None
    assert {one.weights for one in planned.settings} == {"int8"}
    # 4 bytes more for each output of the 7 matrices of a layer (csrc/int8.h)
    rows = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    more = planned.settings[0].loaded.layers - fp8.settings[0].loaded.layers
    assert more == 32 * 4 * rows
    with refuses(ConfigError, "weights in INT8", "--device cuda"):
        make_plan(in_8_bits("int"), Wish(24 * GIB, device="cuda"))


def in_4_bits(method: str) -> dict[str, Any]:
    said = {"quant_method": method, "bits": 4, "group_size": 128, "sym": True}
    return LLAMA_3_1_8B | {"quantization_config": said}


def test_weights_in_4_bits_are_planned_for_cpus_alone() -> None:
    """Of 128 inputs: 64 bytes of codes and a scale in 16 bits, and one float32 number for a row."""
    here = Wish(64 * GIB, device="cpu", layout=Layout.PACKED)
    stored, plain = make_plan(in_4_bits("gptq"), here), make_plan(LLAMA_3_1_8B, here)
    assert {one.weights for one in stored.settings} == {"int4"}
    (rounded, *_) = (one for one in plain.settings if one.weights == "int4")
    assert rounded.options[:2] == ("--quantization", "int4")
    assert rounded.loaded == stored.settings[0].loaded
    of_layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 4096 * 14336 * 3
    rows = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    norms = 2 * 4096 * (2 * 32 + 1)
    assert rounded.loaded.layers == 32 * (of_layer * 66 // 128 + 4 * rows) + norms
    assert all(one.weights != "int4" for one in make_plan(LLAMA_3_1_8B, Wish(64 * GIB)).settings)
    with refuses(ConfigError, "weights in 4 bits", "--device cuda"):
        make_plan(in_4_bits("gptq"), Wish(24 * GIB, device="cuda"))


@pytest.mark.parametrize(
    ("weights", "command"),
    [
        ("bfloat16", "freight quantize --weights none --kv-cache fp8"),
        ("fp8_e4m3fn", "freight quantize --kv-cache fp8"),
        ("int4", "freight quantize --weights none --kv-cache fp8"),
    ],
)
def test_static_scales_are_measured_for_the_weights_that_are_planned(
    weights: str, command: str
) -> None:
    wish = Wish(64 * GIB, 8192, 16, "cpu", Layout.PACKED)
    static = next(
        one
        for one in make_plan(LLAMA_3_1_8B, wish).settings
        if one.weights == weights and one.kv.scale_source is ScaleSource.CALIBRATED
    )
    line = verdict(make_plan(LLAMA_3_1_8B, replace(wish, memory=static.needed_bytes)))
    assert_names(line, f"Take {weights}", "fp8_e4m3fn, static", f"scales {command} measures")


def test_static_scales_of_a_quantized_checkpoint_come_from_the_model_before_it() -> None:
    """`freight quantize` refuses the checkpoint itself."""
    config, wish = in_4_bits("gptq"), Wish(64 * GIB, 8192, 16, "cpu", Layout.PACKED)
    static = next(one for one in make_plan(config, wish).settings if "static" in one.cache_name)
    line = verdict(make_plan(config, replace(wish, memory=static.needed_bytes)))
    assert_names(line, "Take int4", "fp8_e4m3fn, static", "scales")
    assert (
        "freight quantize BASE OUT --weights none --kv-cache fp8 --calibration-data FILE, then freight scales"
        in line
    )
    assert "--kv-cache-dtype fp8 --kv-scales scales.json --max" in line


def test_models_of_transformers_modules_are_not_planned_in_4_bits() -> None:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    foreign = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "dtype": "float16",
        "quantization_config": said,
    }
    with refuses(ConfigError, "4 bits", "'gpt_neox'", "transformers"):
        make_plan(foreign, Wish(GIB, device="cpu"))
    plain = make_plan(foreign | {"quantization_config": None}, Wish(GIB, device="cpu"))
    assert {one.weights for one in plain.settings} == {"float16", "fp8_e4m3fn"}


def test_a_plan_refuses_what_an_engine_does() -> None:
    with refuses(ConfigError, "--state-dtype int8", "llama", "recurrent state"):
        make_plan(LLAMA_3_1_8B, Wish(24 * GIB, state_dtype="int8"))
    with refuses(ConfigError, "--state-dtype fp8_e5m2", "two bits"):
        make_plan(STATEFUL, Wish(GIB, state_dtype="fp8_e5m2"))


def test_a_rank_has_its_part_of_the_matrices() -> None:
    """Of Llama 3.1 8B two ranks have the same 32 layers' norms, and half of all else."""
    wish = Wish(32 * GIB, 8192, 4, "cpu")
    alone, divided = (make_plan(LLAMA_3_1_8B, replace(wish, ranks=n)) for n in (1, 2))
    norms = 2 * 4096 * (2 * 32 + 1)
    for one, of_two in zip(alone.settings, divided.settings, strict=True):
        scales = 0 if one.weights is Format.BFLOAT16 else 4
        assert one.loaded.layers - norms == 2 * (of_two.loaded.layers - norms), scales
        assert one.loaded.embeddings == 2 * of_two.loaded.embeddings
        assert one.spec.bytes_per_token == 2 * of_two.spec.bytes_per_token
        assert one.stored_tokens == of_two.stored_tokens  # those of all ranks together
        assert one.needed_bytes == pytest.approx(of_two.needed_bytes, rel=0.02)
    line = verdict(divided)
    assert "--tensor-parallel-size 2" in line
    assert divided.choice is not None
    assert f"--kv-cache-memory {2 * divided.settings[divided.choice].cache_bytes} " in line
    assert as_json(divided)["ranks"] == 2
    assert "ranks" not in as_json(alone)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (Wish(GIB, device="cuda", ranks=3), "share the 32 attention heads of layer 0 evenly"),
        (Wish(GIB, device="cpu", ranks=0), "-size 0 must be an integer from 1 to 64"),
        (Wish(GIB, device="cpu", ranks=3), "share the 32 attention heads of layer 0 evenly"),
    ],
)
def test_ranks_that_cannot_be_had_are_refused(wish: Wish, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel.*{says}"):
        make_plan(LLAMA_3_1_8B, wish)


def test_weights_that_fit_no_gpu_fit_two() -> None:
    """Llama 3.1 70B has 131 GiB in 16 bits: 80 GiB hold half of it, beside a cache."""
    wish = Wish(80 * GIB, 8192)
    alone, divided = (
        make_plan(LLAMA_3_1_70B, wish),
        make_plan(LLAMA_3_1_70B, replace(wish, memory=160 * GIB, stages=2)),
    )
    assert not any(setting.cache_bytes for setting in alone.settings[:4])
    assert divided.choice == 0
    first = divided.settings[0]
    assert [part.layers for part in first.devices] == [40, 40]
    assert sum(part.weight_bytes for part in first.devices) == first.loaded.total
    for part in first.devices:
        left = 80 * GIB - part.weight_bytes
        assert part.cache_bytes <= left * MEMORY_SHARE["cuda"]
    assert first.rest_bytes == 160 * GIB - first.loaded.total - first.cache_bytes
    assert_names(verdict(divided), "--pipeline-parallel-size 2")
    assert "--pp-layers" not in verdict(divided)
    assert alone.settings[0].devices == ()


def test_two_large_parts_do_not_fit_where_the_sum_would() -> None:
    wish = Wish(160 * GIB, 8192, stages=2, pp_layers="70,10")
    plan = make_plan(LLAMA_3_1_70B, wish)
    assert plan.settings[0].cache_bytes == 0
    assert plan.choice is not None
    assert plan.settings[plan.choice].weights == "fp8_e4m3fn"
    assert_names(verdict(plan), "--pipeline-parallel-size 2", "--pp-layers 70,10")
    with refuses(CapacityError, "120.0 GiB", "fullest", "60.0 GiB", "omit --pp-layers"):
        make_plan(LLAMA_3_1_70B, replace(wish, memory=120 * GIB, pp_layers="79,1"))


@pytest.mark.parametrize("pp_layers", [None, "10,22"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_are_planned_as_the_engine_divides_them(
    pp_layers: str | None, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what weights leave on each GPU, the engine takes the cache that is planned."""
    config = LLAMA_3_1_8B | {"tie_word_embeddings": tied}
    plan = make_plan(config, Wish(48 * GIB, 8192, stages=2, pp_layers=pp_layers))
    model = parse_model_config(config)
    for setting in plan.settings[:2]:
        args = engine_args(setting, plan.wish)
        args = replace(args, pipeline_parallel_size=2, pp_layers=pp_layers, kv_cache_memory=None)
        opened = replace(open_random(args, "llama-8b"), model=model)
        resolved = replace(opened.resolve(args), device="cuda")
        stages = opened.stages(resolved)
        assert [len(stage.layers) for stage in stages] == [part.layers for part in setting.devices]
        free = {}
        for stage, part in zip(stages, setting.devices, strict=True):
            tables = table_bytes(model, stage.layers, 8192)
            assert opened.stage_bytes(resolved)[stage.device] + tables == part.weight_bytes
            free[stage.device] = 24 * GIB - part.weight_bytes
        monkeypatch.setattr(build, "free_bytes", lambda _, free=free: free)
        spec = opened.cache_spec(resolved)
        assert build.share_for_cache(opened, resolved, spec) == setting.cache_bytes


def test_what_stages_need_is_enough_and_no_byte_too_much() -> None:
    wish = Wish(64 * GIB, 8192, 4, stages=2, pp_layers="10,22")
    for index, setting in enumerate(make_plan(LLAMA_3_1_8B, wish).settings):
        enough, less = (
            make_plan(LLAMA_3_1_8B, replace(wish, memory=memory)).settings[index]
            for memory in (setting.needed_bytes, setting.needed_bytes - 2)
        )
        assert (enough.requests, less.requests) == (4, 3)


def test_each_rank_has_a_share_of_each_stage() -> None:
    wish = Wish(64 * GIB, 8192, 4, stages=2)
    two = make_plan(LLAMA_3_1_8B, wish)
    four = make_plan(LLAMA_3_1_8B, replace(wish, memory=128 * GIB, ranks=2))
    for one, of_two in zip(two.settings, four.settings, strict=True):
        for part, share in zip(one.devices, of_two.devices, strict=True):
            assert share.layers == part.layers
            assert share.weight_bytes == pytest.approx(part.weight_bytes / 2, rel=0.01)
        assert of_two.spec.bytes_per_token * 2 == one.spec.bytes_per_token
    made = as_json(four)
    assert (made["ranks"], made["stages"]) == (2, 2)
    assert_names(verdict(four), "--tensor-parallel-size 2", "--pipeline-parallel-size 2")


def test_stages_on_a_cpu_have_its_memory_together() -> None:
    wish = Wish(48 * GIB, 8192, device="cpu")
    alone, divided = (make_plan(LLAMA_3_1_8B, replace(wish, stages=n)) for n in (1, 2))
    assert divided.settings == alone.settings
    assert "--pipeline-parallel-size 2" in verdict(divided)
    with refuses(ConfigError, "--pp-layers 1,1", "32"):
        make_plan(LLAMA_3_1_8B, replace(wish, stages=2, pp_layers="1,1"))


def test_a_model_with_windows_has_two_groups() -> None:
    one = make_plan(SMALL["gemma-3-27b"], Wish(8 * MIB, 512, 4, "cpu", LAYOUT)).settings[0]
    assert [(group.window, len(group.layers)) for group in one.spec.groups] == [(96, 6), (None, 1)]


@pytest.mark.parametrize(
    ("config", "parameters", "bytes_per_token"),
    [(LLAMA_3_1_8B, 8_030_261_248, 131_072), (LLAMA_3_1_70B, 70_553_706_496, 327_680)],
)
def test_published_llamas_have_their_published_size(
    config: dict[str, Any], parameters: int, bytes_per_token: int
) -> None:
    one, *_ = make_plan(config, Wish(200 * GIB, 8192)).settings
    assert one.loaded.layers + one.loaded.embeddings == 2 * parameters
    assert one.loaded.tables == 8192 * 128 * 4
    assert one.spec.bytes_per_token == bytes_per_token
    assert one.cache_bytes == int((200 * GIB - one.loaded.total) * 0.9)
    assert one.capacity_tokens == one.cache_bytes // (16 * bytes_per_token) * 16


def test_published_gemma_counts_windows_as_windows() -> None:
    """52 of 62 layers hold 1024 tokens of a request and one step, tiles of 64 keys around them,
    whatever its length.
    """
    plan = make_plan(GEMMA_3_27B, Wish(80 * GIB, 32768, 8))
    one = plan.settings[0]
    layer = 2 * 16 * 128 * 2  # bytes of a token
    matrices = 62 * 412_876_800 + 262_208 * 5376
    assert one.loaded.layers + one.loaded.embeddings == 2 * matrices + 4 * (
        62 * (4 * 5376 + 2 * 128) + 5376
    )
    windows = (
        8 * -(-(63 + 1023 + 1) // 16) + 8192 // 16
    )  # of 8 requests, and one step of 8192 tokens among them
    assert one.num_blocks == (
        windows,
        (one.cache_bytes - windows * 16 * 52 * layer) // (16 * 10 * layer),
    )
    assert (
        one.num_blocks[1] * 16
        == one.capacity_tokens
        > 3 * one.cache_bytes / one.spec.bytes_per_token
    )


@pytest.mark.parametrize(
    ("gib", "choice"),
    [
        (80, ("bfloat16", "bfloat16", None)),
        (24, ("bfloat16", "fp8_e4m3fn", "token")),
        (20, ("fp8_e4m3fn", "fp8_e4m3fn", "token")),
        (26.5, ("bfloat16", "fp8_e4m3fn", "token")),
        (18, ("fp8_e4m3fn", "fp8_e4m3fn", "token")),
        (17.38, ("fp8_e4m3fn", "fp8_e4m3fn", "tensor")),
        (12, None),
    ],
)
def test_the_first_that_serves_the_wish_is_taken(
    gib: float, choice: tuple[str, str, str | None] | None
) -> None:
    plan = make_plan(LLAMA_3_1_8B, Wish(int(gib * GIB), 8192, 16))
    assert (plan.choice is None) == (choice is None)
    if plan.choice is not None:
        one = plan.settings[plan.choice]
        assert (one.weights, one.kv.format, one.kv.granularity) == choice
        assert one.requests >= 16
        assert all(before.requests < 16 for before in plan.settings[: plan.choice])
        assert f"--kv-cache-memory {one.cache_bytes} --max-num-seqs 16" in verdict(plan)
    else:
        assert "No setting serves 16 requests of 8,192 tokens" in verdict(plan)


@settings(max_examples=examples(25))
@given(
    config=st.sampled_from([LLAMA_3_1_8B, LLAMA_3_1_70B, GEMMA_3_27B]),
    context=st.integers(1, 131072),
    concurrency=st.integers(1, 200),
    device=st.sampled_from(["cpu", "cuda"]),
    index=st.integers(0, 7),
)
def test_what_a_setting_needs_is_enough_and_no_byte_too_much(
    config: dict[str, Any], context: int, concurrency: int, device: str, index: int
) -> None:
    wish = Wish(300 * GIB, context, concurrency, device)
    needed = make_plan(config, wish).settings[index].needed_bytes
    for less, serves in ((0, True), (1, False)):
        plan = make_plan(config, replace(wish, memory=needed - less))
        one = plan.settings[index]
        assert (one.requests >= concurrency) is serves
        assert (longest_of(plan, one) + one.spec.block_size > context) or not serves


@settings(max_examples=examples(100))
@given(
    windows=st.lists(st.sampled_from([None, 24, 24, 512]), min_size=1, max_size=6).filter(
        lambda found: len({window for window in found if window}) < 2
    ),
    heads=st.integers(1, 4),
    context=st.integers(1, 4000),
    step=st.sampled_from([16, 512, 8192]),
    memory=st.integers(1, 2**26),
)
def test_a_cache_split_for_the_requests_that_fit_holds_them(
    windows: list[int | None], heads: int, context: int, step: int, memory: int
) -> None:
    layers = [
        LayerKVSpec(Format.E4M3FN, Granularity.TOKEN, heads, 16, 16, window) for window in windows
    ]
    spec = KVCacheSpec(tuple(layers), 16)
    count = requests_in(spec, memory, context, step)
    assert (count == 0) == (bytes_of_request(spec, context, step) > memory)
    assert useful_memory(spec, context, count + 1, step) > memory
    if count:
        for blocks, group in zip(
            split_memory(spec, memory, context, count, step), spec.groups, strict=True
        ):
            assert blocks >= count * group.most_blocks(context, 1)
            assert blocks >= group.most_blocks(context, step)


@given(cache=st.integers(0, 2**45), share=st.sampled_from([0.5, 0.9]))
def test_the_least_memory_of_which_a_share_is_enough(cache: int, share: float) -> None:
    needed = needed_for(cache, share)
    assert int(needed * share) >= cache
    assert needed == 0 or int((needed - 1) * share) < cache


def test_gpt_oss_is_planned_in_16_bits_though_its_config_names_no_dtype() -> None:
    published = Path(__file__).parents[2] / "fixtures" / "published" / "openai--gpt-oss-20b.json"
    wish = Wish(24 * GIB, device="cpu", layout=Layout.PACKED)
    plan = make_plan(json.loads(published.read_text()), wish)
    assert (plan.dtype, plan.dtype_source) == (Format.BFLOAT16, "assumed")
    assert plan.settings[0].kv.format is Format.BFLOAT16
    assert plan.settings[0].capacity_tokens == 230_160
    wide = make_plan(json.loads(published.read_text()), replace(wish, dtype="float32"))
    assert (wide.dtype, wide.dtype_source) == (Format.FLOAT32, "--dtype")
    assert wide.settings[0].capacity_tokens == 84_112


def test_an_fp8_checkpoint_keeps_its_weights_and_its_scales() -> None:
    fixture = Path(__file__).parents[2] / "fixtures" / "autofp8_static_kv" / "config.json"
    plan = make_plan(json.loads(fixture.read_text()), Wish(GIB, device="cpu"))
    assert {one.weights for one in plan.settings} == {Format.E4M3FN}
    assert not any("--quantization" in one.options for one in plan.settings)
    assert [one.kv.scale_source for one in plan.settings] == [
        None,
        "dynamic",
        "dynamic",
        "checkpoint",
        "unit",
    ]


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ("24", "write 24GiB"),
        ("0", "must be positive"),
        ("-3GiB", "is not an amount"),
        ("lots", "--memory 'lots'"),
    ],
)
def test_memory_without_sense_is_refused(memory: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        read_memory(memory)
    assert "--kv-cache-memory" not in str(error.value)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (
            Wish(24 * GIB, 200_000),
            r"--context 200000 is more than the 131072 positions .* use at most 131072",
        ),
        (Wish(24 * GIB, 0), "--context 0 must be"),
        (Wish(24 * GIB, 8, -1), "--concurrency -1 must be"),
        (Wish(24 * GIB, dtype="fp9"), "--dtype 'fp9' is unknown"),
        (Wish(24 * GIB, device="tpu"), "--device 'tpu' is unknown"),
    ],
)
def test_a_wish_that_no_memory_serves_is_refused(wish: Wish, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_plan(LLAMA_3_1_8B, wish)


def test_a_context_of_sparse_attention_is_none_beyond_index_topk() -> None:
    glm_5 = json.loads(
        (Path(__file__).parents[2] / "fixtures/published/zai-org--GLM-5.json").read_text()
    )
    assert make_plan(glm_5, Wish(2000 * GIB)).context == 2048
    with refuses(ConfigError, "--context 2049", "index_topk = 2048", "at most 2048"):
        make_plan(glm_5, Wish(2000 * GIB, 2049))


def test_less_memory_than_the_weights_is_refused_with_what_would_be_enough() -> None:
    with refuses(CapacityError, "8.5 GiB", "fp8_e4m3fn", "at least 17.4 GiB"):
        make_plan(LLAMA_3_1_8B, Wish(8 * GIB, 8192, 16))


@pytest.mark.parametrize(("key", "value"), [("model_type", "mamba2"), ("num_local_experts", 8)])
def test_a_model_that_does_not_run_is_refused_by_the_key_in_the_way(
    key: str, value: object
) -> None:
    with pytest.raises(CheckpointError, match=rf"{key}.*{value}"):
        make_plan(LLAMA_3_1_8B | {key: value}, Wish(24 * GIB))


SMALL_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8192,
    "sliding_window": 128,
    "dtype": "bfloat16",
}


def test_the_steps_of_a_mixture_are_those_of_the_engine() -> None:
    """A window keeps a step's tokens beside its own, so the larger steps of a mixture on a CPU need
    more cache.
    """
    wish = Wish(GIB, context=4096, concurrency=2, device="cpu")
    few, many = (
        make_plan(SMALL_GPT_OSS | {"num_local_experts": count}, wish).settings[0]
        for count in (4, 64)
    )
    assert (few.step_tokens, many.step_tokens) == (512, 2048)
    for setting in (few, many):
        cache = useful_memory(setting.spec, 4096, 2, setting.step_tokens)
        assert setting.needed_bytes == setting.loaded.total + needed_for(cache, MEMORY_SHARE["cpu"])
    assert useful_memory(many.spec, 4096, 2, 2048) > useful_memory(few.spec, 4096, 2, 512)


def test_skipped_layers_are_counted_in_16_bits_in_every_8_bit_cache() -> None:
    """Of 32 layers with 8 KV heads of 128: 2 x 8 x 128 values a token, scales of 2 x 8 x 2 bytes."""
    plan = make_plan(LLAMA_3_1_8B, Wish(24 * GIB, 8192, 4, skip_layers=("0", "31")))
    sixteen, token, static, e5m2 = [one.spec.bytes_per_token for one in plan.settings[:4]]
    assert (sixteen, token) == (32 * 4096, 30 * (2048 + 32) + 2 * 4096)
    assert static == e5m2 == 30 * 2048 + 2 * 4096
    found = as_json(plan)["settings"]
    assert "layers" not in found[0]
    assert found[1]["kv_cache_dtype"] == "mixed"
    assert [one["dtype"] for one in found[1]["layers"]] == [
        "bfloat16",
        *["fp8_e4m3fn"] * 30,
        "bfloat16",
    ]
    assert "--kv-cache-dtype-skip-layers" not in found[0]["options"]
    assert found[1]["options"][-2:] == ["--kv-cache-dtype-skip-layers", "0,31"]
    for names, says in (
        (("32",), "'32': this model has 32 layers, 0 to 31"),
        (("sliding_window",), "no layer of this model has a window"),
        (("x",), "'x' is unknown"),
        (tuple(map(str, range(32))), "no layer with an 8-bit cache is left"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_plan(LLAMA_3_1_8B, Wish(24 * GIB, 8192, 4, skip_layers=names))


@pytest.mark.parametrize(
    ("device", "rank", "offered"), [("cpu", 512, True), ("cpu", 192, False), ("cuda", 512, False)]
)
def test_scales_per_group_are_planned_for_latents(device: str, rank: int, offered: bool) -> None:
    """Where their kernels are, before one scale per token."""
    latents = {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "kv_lora_rank": rank,
    }
    plan = make_plan(latents | {"dtype": "bfloat16"}, Wish(80 * GIB, 4096, 2, device, LAYOUT))
    names = [one.cache_name for one in plan.settings if one.weights is Format.BFLOAT16]
    assert ("fp8_e4m3fn, group" in names) == offered
    if offered:
        assert names[:3] == ["bfloat16", "fp8_e4m3fn, group", "fp8_e4m3fn, token"]
        assert plan.settings[1].options == ("--kv-cache-dtype", "fp8", "--kv-scales", "group")
        assert plan.settings[1].spec.bytes_per_token == 47 * 648
        assert as_json(plan)["settings"][1]["granularity"] == "group"
