"""No advice for a cache that ruins the model: a real model, texts of every kind, and what a reader
is shown.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from safetensors.torch import load_file, save_file
from tests.refusals import assert_names

from freight.checkpoint.reader import resolve_model
from freight.lab.evaluate.advice import advice
from freight.lab.evaluate.figures import Evaluation
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.report_page import write_report
from freight.lab.evaluate.safety import MIN_UNITS, Verdict
from freight.lab.evaluate.table import legend, table
from freight.quantizer.quantize import quantize
from freight.settings.engine import EngineArgs

ARTICLES = (  # of the Universal Declaration of Human Rights
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "人人有资格享有本宣言所载的一切权利和自由，不分种族、肤色、性别、语言、宗教、政治或其他见解。",
    "人人有权享有生命、自由和人身安全。",
    "任何人不得使为奴隶或奴役；一切形式的奴隶制度和奴隶买卖，均应予以禁止。",
    "任何人不得加以酷刑，或施以残忍的、不人道的或侮辱性的待遇或刑罚。",
)


def text_of(kind: str) -> str:
    """More than 20,000 of the demo's tokens."""
    draw = random.Random(0)
    if kind == "prose":
        return "\n\n".join(topics[name] for name in sorted(topics))[:120_000]
    if kind == "code":
        return (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")
    if kind == "digits":
        return "".join(draw.choices("0123456789", k=60_000))
    if kind == "Chinese":
        return "".join(draw.choices(ARTICLES, k=600))
    return "The quick brown fox jumps over the lazy dog.\n" * 4000


KINDS = ("prose", "code", "digits", "Chinese", "one line")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo with keys 1,024 times as large and queries as much smaller: the same function,
    powers of two.
    """
    folder = tmp_path_factory.mktemp("scaled") / "model"
    shutil.copytree(resolve_model("demo"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "k_proj" in name:
            tensors[name] = tensors[name] * 1024
        elif "q_proj" in name:
            tensors[name] = tensors[name] / 1024
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def evaluated(
    model: str, kind: str, tokens: int, window: int | None, caches: tuple[str, ...]
) -> Evaluation:
    grid = GridArgs(caches=caches, speed=False, window=window, max_tokens=tokens)
    return evaluate_grid(EngineArgs(model), [text_of(kind)[: 12 * tokens]], grid)


SHORT = [pytest.param(kind, 200, None) for kind in KINDS] + [pytest.param("prose", 2400, 128)]
LONG = [pytest.param(kind, 20_000, None, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize(("kind", "tokens", "window"), SHORT + LONG)
def test_a_cache_that_clips_the_keys_is_never_recommended(
    scaled: str, kind: str, tokens: int, window: int | None
):
    evaluation = evaluated(scaled, kind, tokens, window, ("unit",))
    assert evaluation.sample.num_tokens >= tokens - 1
    assert (evaluation.sample.num_units >= MIN_UNITS) == (
        tokens > 200 and kind not in ("Chinese", "one line")
    )
    run, found = evaluation.runs[1], advice(evaluation)
    assert (run.name, run.verdict) == ("unit", Verdict.NOT_SAFE)
    assert run.clipped_share > 0.01
    assert any("clipped" in reason for reason in run.reasons)
    assert found.chosen is None
    assert found.verdict in (Verdict.NOT_SAFE, Verdict.CANNOT_BE_SAID)
    assert "Take" not in found.text
    assert "--kv-cache-dtype bfloat16" in found.command


def test_a_text_that_repeats_itself_is_no_evidence():
    """Without this rule the figures of 62 equal windows have narrow intervals, and the cache is
    recommended.
    """
    evaluation = evaluated("demo", "one line", 8000, 128, ("token",))
    sample = evaluation.sample
    assert sample.num_repeats > 50
    assert sample.num_units < MIN_UNITS
    found = advice(evaluation)
    assert (found.verdict, found.chosen) == (Verdict.CANNOT_BE_SAID, None)
    (warning,) = evaluation.warnings
    assert_names(warning, "repeats", "63 windows", str(sample.num_units), "interval")
    assert evaluation.as_json()["num_repeats"] == sample.num_repeats
    assert f"{sample.num_repeats} more of the windows repeat those" in legend(evaluation)


def test_scales_calibrated_on_3_tokens_are_never_recommended(tmp_path: Path):
    data, model = tmp_path / "short.jsonl", tmp_path / "model"
    data.write_text('{"input_ids": [11, 12, 13]}')
    options = {"weights": "none", "kv_cache": "fp8", "kv_granularity": "channel"}
    quantize("demo", model, calibration_data=str(data), **options)
    args = EngineArgs(str(model), kv_cache_dtype="fp8")
    evaluation = evaluate_grid(
        args, [text_of("code")[:20_000]], GridArgs(speed=False, window=128, max_tokens=2400)
    )
    run = evaluation.runs[1]
    assert run.scale_source == "checkpoint"
    assert run.same_top < 0.7
    assert run.verdict is Verdict.NOT_SAFE
    found = advice(evaluation)
    assert found.chosen is None
    assert "--kv-cache-dtype bfloat16" in found.command


def test_a_text_that_the_model_does_not_know_is_said_and_gets_no_advice(tmp_path: Path):
    evaluation = evaluated("demo", "Chinese", 2400, 128, ("token",))
    assert evaluation.runs[0].perplexity > 4096, "more than a guess among the vocabulary"
    warning, repeats = evaluation.warnings  # five sentences at random
    assert repeats.startswith("the text repeats itself")
    assert "does not know this text" in warning
    found = advice(evaluation)
    assert found.chosen is None
    assert found.text.startswith("No setting is recommended")
    write_report(evaluation, tmp_path)
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["warnings"] == [warning, repeats]
    assert said["advice"]["recommended"] is None
    assert said["runs"][1]["verdict"] == "cannot be said"
    assert warning in said["runs"][1]["reasons"]
    for name in ("report.md", "report.html"):
        assert "does not know this text" in (tmp_path / name).read_text()


def test_a_text_that_is_enough_gets_advice_with_the_number_of_windows():
    evaluation = evaluated("demo", "code", 4000, 128, ("token",))
    found = advice(evaluation)
    assert found.chosen is evaluation.runs[1]
    assert "over 31 windows" in found.text
    assert "95 % interval, over 31 windows" in legend(evaluation)
    assert found.as_json()["verdict"] == "safe"
    assert evaluation.runs[1].reasons == ()


def test_what_shows_a_catastrophe_stands_first_in_the_table(scaled: str):
    evaluation = evaluated(scaled, "prose", 200, None, ("unit",))
    first, second, _ = table(evaluation).split("\n\n")
    heads = [
        [cell.strip() for cell in part.splitlines()[0].strip("| ").split("|")]
        for part in (first, second)
    ]
    assert heads[0][1:4] == ["verdict", "same top", "mean KL"]
    assert heads[1][1:3] == ["clipped", "to zero"]
    assert "(—)" in table(evaluation)
    assert "no interval over 1 windows" in legend(evaluation)
