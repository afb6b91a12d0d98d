"""A KV cache chosen by layer: the search against brute force, and what is promised of budgets on
the demo model.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.refusals import refuses

from freight import LLM, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.cli.inspect import describe
from freight.cli.quantize import facts, sentences
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.lab.evaluate.report import run_caches
from freight.quantizer.budget import Budget, BudgetKind, parse_budget
from freight.quantizer.calibration import Calibration
from freight.quantizer.carried import open_scales
from freight.quantizer.kv_budget import (
    CANDIDATES,
    KVChoice,
    Option,
    as_chosen,
    cheapest,
    choose,
    frontier,
    split,
)
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import QuantizeResult, load_samples, open_unquantized, quantize
from freight.quantizer.sensitivity import at_most
from freight.settings.engine import EngineArgs
from freight.settings.resolve import mixed_cache

DATA = {"num_samples": 4, "max_seq_len": 64}
BAD = 3  # the layer that is made hard to quantize
Halves = tuple[list[list[int]], list[list[int]]]


def say(what: str, done: int, total: int) -> None:
    pass


def calibrated(model: str, budget: str) -> tuple[Calibration, Halves, str]:
    opened = open_unquantized(model)
    decided = plan(QuantizeArgs(weights="none", kv_budget=budget, **DATA))
    halves = split(load_samples(opened, decided, resolve_model("demo", None) / "calibration.txt"))
    return opened.calibrate(decided, halves[0], ()), halves, str(opened.checkpoint.path)


@pytest.fixture(scope="module")
def demo() -> tuple[Calibration, Halves, str]:
    return calibrated("demo", "kl=1")


@pytest.fixture(scope="module")
def on_demo(demo: tuple[Calibration, Halves, str]) -> Callable[[str], KVChoice]:
    """The choice within a budget, made once."""
    return cache(lambda budget: chosen(demo, budget))


def chosen(from_: tuple[Calibration, Halves, str], budget: str) -> KVChoice:
    calibration, halves, folder = from_
    return choose(EngineArgs(model=folder), parse_budget(budget), calibration, halves, say)


COSTS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.just(0.0)), min_size=1, max_size=5)


def test_no_more_tokens_are_measured_than_wanted():
    samples = [[1, 2, 3], [4, 5, 6], [7]]
    assert at_most(samples, 4) == [[1, 2, 3], [4]]
    assert at_most(samples, 3) == [[1, 2, 3]]
    assert at_most(samples, 99) == samples


@given(COSTS)
def test_the_search_finds_the_least_divergence_of_every_size(kl):
    sizes = [(4, 5, 8)] * len(kl)
    front = frontier(kl, sizes)
    totals = [
        (
            sum(sizes[i][c] for i, c in enumerate(choice)),
            sum(kl[i][c] for i, c in enumerate(choice)),
        )
        for choice in itertools.product(range(3), repeat=len(kl))
    ]
    for option in front:
        assert option.predicted_kl == pytest.approx(
            min(cost for size, cost in totals if size <= option.num_bytes)
        )
        assert option.num_bytes == sum(sizes[i][c] for i, c in enumerate(option.choice))
    assert [o.num_bytes for o in front] == sorted({o.num_bytes for o in front})
    assert front[-1].predicted_kl == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.01, 1), st.floats(0.3, 3))
def test_what_is_taken_measures_within_the_limit(costs, limit, factor):
    costs = [*sorted(costs, reverse=True)[:-1], 0.0]
    front = [Option(index, cost, ()) for index, cost in enumerate(costs)]
    found = cheapest(front, limit, lambda option: option.predicted_kl * factor)
    assert found == next(index for index, cost in enumerate(costs) if cost * factor <= limit)


@pytest.mark.parametrize("limit", [pytest.param(0.0003, marks=pytest.mark.slow), 0.0008, 0.01])
def test_what_is_measured_keeps_within_the_budget(demo, on_demo, limit):
    choice = on_demo(f"kl={limit}")
    print(choice.granularities, choice.kl_chosen, choice.kl_verified)
    assert choice.kl_chosen <= limit
    assert choice.kl_verified <= limit
    assert choice.bytes_per_token < choice.bytes_unquantized == 6 * 2 * 2 * 2 * 64
    assert choice.num_chosen == choice.num_verified == 2 * 64
    if limit == 0.01:
        assert choice.bits <= 8.25
    else:
        assert None in choice.granularities
    scales = as_chosen(demo[0], choice).kv_finer
    assert scales is not None
    if scales.mixed:  # the engine's own runner, which knows nothing of the budget
        args = EngineArgs(model="demo", max_model_len=64, skip_tokenizer_init=True)
        kv = mixed_cache(scales, Format.BFLOAT16, Format.E4M3FN, ScaleSource.CALIBRATED)
        scores = []
        for ids in demo[1][1]:  # all but the last token, which has no target
            run = run_caches(args, [kv], ids[1:])[1]  # begins with BOS itself
            scores.append(float(run.token_kl.double().mean()))
        assert sum(scores) / len(scores) == pytest.approx(choice.kl_verified, rel=0.1)


def test_bits_are_a_limit_as_well(on_demo):
    least = on_demo("bits=8")
    assert least.bits == 8
    assert not set(least.granularities) & {None, Granularity.TOKEN}
    more = on_demo("bits=10.7")
    assert 8 < more.bits <= 10.7
    assert more.predicted_kl < least.predicted_kl


@pytest.fixture(scope="module")
def bad_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with the keys of one layer 16 times as large, so that errors of its scores are
    as well.
    """
    folder = tmp_path_factory.mktemp("bad") / "model"
    shutil.copytree(resolve_model("demo", None), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{BAD}.self_attn.k_proj.weight"] *= 16
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_bad_layer_is_the_one_that_stays_in_16_bits(bad_model):
    found = calibrated(str(bad_model), "kl=1")
    choice = chosen(found, f"bits={8 + 8 / 6 + 0.01}")
    print(choice.granularities, [min(alone.values()) for alone in choice.kl_by_layer])
    assert [
        index for index, granularity in enumerate(choice.granularities) if granularity is None
    ] == [BAD]
    others = [min(alone.values()) for index, alone in enumerate(choice.kl_by_layer) if index != BAD]
    assert min(choice.kl_by_layer[BAD].values()) > 2 * max(others)
    again = chosen(found, f"kl={1.5 * max(choice.kl_chosen, choice.kl_verified)}")
    assert [
        index for index, granularity in enumerate(again.granularities) if granularity is None
    ] == [BAD]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> QuantizeResult:
    out = tmp_path_factory.mktemp("budget") / "out"
    return quantize("demo", out, weights="none", kv_budget="kl=0.0008", **DATA)


def test_what_was_written_runs_as_what_was_chosen(demo, on_demo, written):
    choice = on_demo("kl=0.0008")
    assert written.kv_choice == choice
    kv = mixed_cache(
        as_chosen(demo[0], choice).kv_finer, Format.BFLOAT16, Format.E4M3FN, ScaleSource.CALIBRATED
    )
    args = EngineArgs(model="demo", max_model_len=128)
    text = "def main(argv):\n    for name in argv:\n        print(name)\n" * 3
    memory, stored = (
        run_caches(replace(args, model=model), [cache], text)[1]
        for model, cache in (("demo", kv), (str(written.path), ("auto", "auto")))
    )
    assert torch.equal(memory.token_logprobs, stored.token_logprobs)
    assert memory.config.kv.layers == stored.config.kv.layers
    llm = LLM(str(written.path), max_model_len=64, kv_cache_memory="4MiB")
    assert [one["granularity"] for one in llm.kv_cache_info()["layers"]] == [
        g and str(g) for g in choice.granularities
    ]
    assert (
        llm.generate(["def "], SamplingParams(max_tokens=4, temperature=0.0))[0]
        .outputs[0]
        .token_ids
    )


def test_a_mixed_checkpoint_declares_no_scheme_and_says_so(written):
    config = json.loads((written.path / "config.json").read_text())
    assert "quantization_config" not in config
    assert "kv_cache_torch_dtype" not in config
    assert not [name for name in load_file(written.path / "model.safetensors") if "scale" in name]
    said = "\n".join(sentences(written))
    assert "config.json declares no KV scheme" in said
    for index in range(6):
        assert f"layer {index}: " in said
    got = facts(written)["kv_budget"]
    assert got["declared"] is False
    assert got["kl_verified"] <= got["limit"]
    with pytest.raises(ConfigError, match="--kv-scales dynamic"):
        LLM(str(written.path), kv_cache_dtype="fp8")


def test_one_granularity_in_every_layer_is_declared(demo, on_demo):
    choice = replace(on_demo("bits=8"), granularities=(Granularity.HEAD,) * 6)
    calibration = as_chosen(demo[0], choice)
    assert calibration.kv is not None
    assert not calibration.kv_finer.mixed
    assert (
        as_chosen(demo[0], replace(choice, granularities=(None, *choice.granularities[1:]))).kv
        is None
    )


@pytest.mark.parametrize(
    "text", ["kl", "kl=", "kl=0", "kl=-1", "kl=nan", "bits=inf", "bytes=3", "0.002", "kl=x"]
)
def test_a_budget_that_says_nothing_is_refused(text):
    with pytest.raises(ConfigError, match=r"kl=0\.002"):
        plan(QuantizeArgs(kv_budget=text))


def test_a_budget_that_nothing_meets_is_refused_with_the_least_there_is():
    with refuses(ConfigError, "bits=7.9", "bits=8"):
        plan(QuantizeArgs(kv_budget="bits=7.9"))
    assert parse_budget(" bits = 8 ") == Budget(BudgetKind.BITS, 8)


@pytest.mark.parametrize(
    "options",
    [{"kv_cache": "none"}, {"kv_granularity": "head"}, {"center": True}, {"format": "tgi"}],
)
def test_what_a_budget_chooses_cannot_be_chosen_beside_it(options):
    with pytest.raises(ConfigError, match=r"--kv-budget kl=0\.01 with --"):
        plan(QuantizeArgs(kv_budget="kl=0.01", **options))


def test_one_sample_cannot_verify(tmp_path):
    with pytest.raises(ConfigError, match="at least 2 samples"):
        quantize("demo", tmp_path / "out", weights="none", kv_budget="kl=1", num_samples=1)
    assert not (tmp_path / "out").exists()
    assert CANDIDATES[-1] is None


def test_a_mixed_checkpoint_is_inspected_and_its_choice_goes_nowhere_else(written):
    chosen = written.kv_choice.granularities
    described = describe(str(written.path))["kv_cache"]["scales"]
    assert [entry["granularity"] for entry in described] == list(chosen)
    assert [entry["k"] is not None for entry in described] == [
        g not in (None, Granularity.TOKEN) for g in chosen
    ]
    with refuses(CheckpointError, "by layer"):
        open_scales(str(written.path))
