"""Weights chosen by layer: the search against brute force, and what is promised of a budget on a tiny
model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from tests.refusals import refuses

from freight import quantize
from freight.cli.quantize import choice_table, facts, sentences
from freight.errors import CheckpointError, ConfigError
from freight.quantizer.budget import Budget, BudgetKind, parse_weight_budget
from freight.quantizer.candidates import SIXTEEN_BITS
from freight.quantizer.kv_budget import Option, split
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import QuantizeResult
from freight.quantizer.weight_budget import upgrades, within

pytestmark = pytest.mark.usefixtures("reference_kernels")

IDS = tokens(512)
SAMPLES = [IDS[begin : begin + 64] for begin in range(0, 512, 64)]
COST = st.one_of(st.floats(0, 1), st.just(float("inf")))
COSTS = st.lists(st.tuples(COST, COST, st.floats(0, 1), st.just(0.0)), min_size=1, max_size=4)
SIZES = [(4, 5, 8, 16), (40, 44, 80, 160)]  # of small layers and large ones


@given(COSTS)
def test_no_choice_of_as_many_bytes_is_predicted_to_cost_less(kl):
    sizes = [SIZES[index % 2] for index in range(len(kl))]
    front = upgrades(kl, sizes)
    totals = [
        (
            sum(sizes[i][c] for i, c in enumerate(choice)),
            sum(kl[i][c] for i, c in enumerate(choice)),
        )
        for choice in itertools.product(range(4), repeat=len(kl))
    ]
    for option in front:
        least = min(cost for size, cost in totals if size <= option.num_bytes)
        assert option.predicted_kl == pytest.approx(least, abs=1e-9)
        assert option.num_bytes == sum(sizes[i][c] for i, c in enumerate(option.choice))
    assert [option.num_bytes for option in front] == sorted(option.num_bytes for option in front)
    assert front[-1].predicted_kl == pytest.approx(0, abs=1e-9)


@given(
    st.lists(st.floats(0.001, 1), min_size=1, max_size=20),
    st.floats(0.01, 1),
    st.floats(0.3, 3),
    st.floats(0.3, 9),
)
def test_what_is_taken_keeps_within_the_limit_on_both_texts(costs, limit, first, second):
    front = [Option(i, cost, ()) for i, cost in enumerate([*sorted(costs, reverse=True), 0.0])]

    def measure(factor: float) -> Callable[[Option], float]:
        return lambda option: option.predicted_kl * factor

    index = within(front, limit, (measure(first), measure(second)))
    worst = max(first, second)
    assert front[index].predicted_kl * worst <= limit * (1 + 1e-9)
    if index and second <= first:  # nothing cheaper would do
        assert front[index - 1].predicted_kl * first > limit * (1 - 1e-9)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_random(VARIANTS["llama"], folder, torch.float32)
    return folder


def run(plain: Path, out: Path, budget: str, **options: Any) -> QuantizeResult:
    return quantize(str(plain), out, budget=budget, calibration_data=SAMPLES, **options)


@pytest.fixture(scope="module")
def result(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> QuantizeResult:
    return run(plain, tmp_path_factory.mktemp("out") / "model", "KL=0.015")


def test_a_model_keeps_within_its_budget_as_it_is_run(plain: Path, result: QuantizeResult):
    choice = result.weight_choice
    assert choice is not None
    print([layer.name for layer in choice.layers], choice.kl_chosen, choice.kl_verified)
    assert max(choice.kl_chosen, choice.kl_verified) <= 0.015
    assert len({layer.name for layer in choice.layers}) > 1
    assert choice.num_bytes < choice.bytes_unquantized
    total = 0.0
    for ids in split(SAMPLES)[1]:
        p, q = (
            freight_logits(folder, ids, "float32", kv_cache_dtype="auto").log_softmax(-1)
            for folder in (plain, result.path)
        )
        total += float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))
    # weights in 4 bits are computed with inputs that the kernels may round
    assert total / choice.num_verified == pytest.approx(choice.kl_verified, rel=0.2)


def test_what_is_declared_names_each_matrix_once(result: QuantizeResult):
    choice = result.weight_choice
    assert choice is not None
    declared = json.loads((result.path / "config.json").read_text())["quantization_config"]
    names = {layer.name for layer in choice.layers} - {SIXTEEN_BITS}
    groups = list(declared["config_groups"].values())
    assert len(groups) == len(names)
    assert {group["format"] for group in groups} <= {"pack-quantized", "naive-quantized"}
    formats = {group["format"] for group in groups}
    assert declared["format"] == ("mixed-precision" if len(formats) > 1 else formats.pop())
    assert set(choice.in_16_bits) <= set(declared["ignore"])


def test_the_choice_is_said_and_written_beside_the_model(result: QuantizeResult):
    choice = result.weight_choice
    assert choice is not None
    said = facts(result)
    assert said["weights"] == "by layer"
    lines = list(sentences(result))
    assert any(line.startswith("weights within kl=0.015") for line in lines)
    table = choice_table(choice)
    assert table.row_count <= len(choice.layers)
    report = json.loads((result.path / "freight_quantization.json").read_text())
    assert report["budget"] == json.loads(json.dumps(said["budget"]))
    assert report["calibration"]["num_tokens"] == 256
    for layer, chosen in zip(report["layers"], choice.layers, strict=True):
        assert layer["weights"] == chosen.name
        modules = [name for group in layer["groups"] for name in group["modules"]]
        assert sorted(modules) == sorted(chosen.modules)
        for group in layer["groups"]:
            assert group["num_tokens"] == 256
            if chosen.name != SIXTEEN_BITS:
                assert 0 < group["error"] < group["error_nearest"]
    page = (result.path / "freight_quantization.md").read_text()
    for layer in choice.layers:
        assert f"| {layer.name} |" in page
    again = quantize(
        "demo", result.path.parent / "demo", weights="fp8"
    )  # no data, and nothing to report
    assert not list(again.path.glob("freight_quantization*"))


def test_bits_are_a_limit_as_well(plain: Path, tmp_path: Path):
    by_bits = run(plain, tmp_path / "out", "bits=6", method="nearest", kv_cache="fp8")
    choice = by_bits.weight_choice
    assert choice is not None
    assert 4.5 < choice.bits <= 6
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert declared["kv_cache_scheme"]["strategy"] == "tensor"
    logits = freight_logits(tmp_path / "out", IDS[:64], "float32", kv_cache_dtype="auto")
    assert logits.isfinite().all()
    report = json.loads((tmp_path / "out" / "freight_quantization.json").read_text())
    for layer in report["layers"]:
        for group in layer["groups"]:
            assert group["error"] == group["error_nearest"]
    # a report is Freight's own: the folder may be overwritten
    again = run(plain, tmp_path / "out", "bits=16", method="rotation,gptq", overwrite=True)
    assert again.weight_choice is not None
    assert again.weight_choice.kl_verified < choice.kl_verified


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("KL=0.01", Budget(BudgetKind.KL, 0.01)),
        ("kl=1e-3", Budget(BudgetKind.KL, 0.001)),
        (" bits = 4.5", Budget(BudgetKind.BITS, 4.5)),
    ],
)
def test_a_budget_is_parsed(text, budget):
    assert parse_weight_budget(text) == budget


@pytest.mark.parametrize("text", ["0.01", "kl=", "kl=0", "kl=-1", "kl=nan", "ppl=3", "bits=4"])
def test_what_is_no_budget_is_named(text):
    with refuses(ConfigError, "--budget", text.partition("=")[0]):
        parse_weight_budget(text)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": "int4"}, "--weights int4"),
        ({"group_size": 64}, "--group-size 64"),
        ({"activations": "dynamic"}, "--activations dynamic"),
        ({"asymmetric": True}, "--asymmetric"),
        ({"lm_head": True}, "--lm-head"),
        ({"format": "gptq"}, "--format gptq"),
        ({"format": "fp8"}, "--format fp8"),
        ({"kv_budget": "kl=0.1"}, "--kv-budget kl=0.1"),
        ({"method": "awq,gptq"}, "--method awq,gptq"),
        ({"method": "smoothquant"}, "--method smoothquant"),
        ({"method": "nearest,gptq"}, "--method nearest,gptq"),
        ({"method": "nearest", "damping": 0.1}, "--damping 0.1"),
    ],
)
def test_choices_that_a_budget_makes_are_refused_with_it(options, says):
    with refuses(ConfigError, says):
        plan(QuantizeArgs(budget="kl=0.01", **options))


def test_what_cannot_be_chosen_is_refused(plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    with refuses(ConfigError, "--budget needs --calibration-data"):
        quantize(str(plain), out, budget="kl=0.01")
    with refuses(ConfigError, "--budget needs at least 2 samples"):
        quantize(str(plain), out, budget="kl=0.01", calibration_data=SAMPLES[:1])
    with refuses(ConfigError, "--budget bits=4.2", "4.500 a weight", "give more"):
        run(plain, out, "bits=4.2")
    with refuses(ConfigError, "--budget kl=1e-12", "16 bits"):
        run(plain, out, "kl=1e-12", ignore=["re:mlp"])
    save_random(VARIANTS["gemma4-shared"], tmp_path / "shared", torch.float32)
    with refuses(CheckpointError, "reads the keys and values of layer", "--budget"):
        run(tmp_path / "shared", out, "kl=1")
    assert not out.exists()
