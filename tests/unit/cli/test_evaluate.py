"""freight evaluate at the terminal."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names

from freight.checkpoint.reader import resolve_model
from freight.cli.evaluate import _named
from freight.lab.evaluate.advice import advice, how_to
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.safety import Verdict
from freight.lab.evaluate.table import table
from freight.settings.engine import EngineArgs

MEASUREMENTS = ["caches", "long", "tasks", "layers", "embeddings"]
Run = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("def main():\n    return 1\n")
    return str(path)


def test_it_tells_what_caches_and_weights_take(freight: Run, text: str):
    argv = [
        "evaluate",
        "caches",
        "--data",
        text,
        "--quantization",
        "fp8",
        "--kernels",
        "reference",
        "--no-speed",
    ]
    argv += ["--caches", "token,e5m2"]
    said = json.loads(freight(*argv, "--json").out)
    assert [run["kv_cache_dtype"] for run in said["runs"]] == ["bfloat16", "fp8_e4m3fn", "fp8_e5m2"]
    assert said["weights"]["dtype"] == "fp8_e4m3fn"
    assert said["weights"]["embedding_bytes"] == 4096 * 256 * 2
    plain = json.loads(freight(*argv[:4], *argv[-3:], "--json").out)["weights"]
    assert said["weights"]["bytes"] < 0.55 * plain["bytes"]
    few_windows, few_tokens, *lines = freight(*argv).out.splitlines()
    assert_names(few_windows, "warning", "1 window", "interval")
    assert_names(few_tokens, "warning", "8 tokens", "2,000", "1,992 more")
    assert lines[:3] == [line for line in lines if line.startswith("|")][:3]
    assert any(
        line.startswith(f"weights: {said['weights']['bytes']:,} bytes in fp8_") for line in lines
    )
    assert max(len(line) for line in lines if line.startswith("|")) <= 100
    assert any(line.startswith("  KL: ") for line in lines), "words are explained"
    assert any(line.startswith("“token”, “e5m2”: cannot be said: ") for line in lines)


def test_a_checkpoint_with_static_scales_needs_no_options(freight: Run, text: str, tmp_path: Path):
    """Its scales stand in the place of measured ones. E5M2 cannot use them: it is measured without
    any.
    """
    out = str(tmp_path / "out")
    options = (
        "--weights",
        "none",
        "--kv-cache",
        "fp8",
        "--num-samples",
        "1",
        "--max-seq-len",
        "64",
    )
    assert freight("quantize", "demo", out, *options).code == 0
    answer = freight("evaluate", "caches", out, "--data", text, "--no-speed", "--json")
    assert answer.code == 0, answer.err
    caches = [
        (run["kv_cache_dtype"], run["scale_source"]) for run in json.loads(answer.out)["runs"]
    ]
    fp8 = [("fp8_e4m3fn", source) for source in ("unit", "checkpoint", "dynamic")]
    assert caches == [("bfloat16", None), *fp8, ("fp8_e5m2", "unit")]


def test_the_16_bit_cache_is_one_row(freight: Run, text: str):
    rows = freight(
        "evaluate", "caches", "--data", text, "--kv-cache-dtype", "bfloat16", "--no-speed"
    ).out.splitlines()
    assert len([row for row in rows if row.startswith("| 16 bits")]) == 3  # of three tables
    assert len([row for row in rows if row.startswith("|")]) == 9


def test_a_report_folder_that_cannot_be_written_is_found_before_the_run(
    freight: Run, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "freight.model.open.OpenModel.load", lambda *_: pytest.fail("weights were read")
    )
    (tmp_path / "file").write_text("")
    answer = freight(
        "evaluate", "caches", "--data", text, "--report", str(tmp_path / "file" / "report")
    )
    assert answer.code == 2
    assert "--report" in answer.err
    assert "name another folder" in answer.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report_that_cannot_be_written_does_not_take_the_measurement(
    freight: Run, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
):
    (tmp_path / "report.json").write_text("old")
    (tmp_path / "report.html").write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    options = ("--caches", "unit", "--no-speed", "--report", str(tmp_path))
    answer = freight("evaluate", "caches", "--data", text, *options, *["--json"] * as_json)
    assert answer.code == 1
    assert "mean" in answer.out or "kl" in answer.out.lower()
    if as_json:
        assert len(json.loads(answer.out)["runs"]) == 2
    message = " ".join(answer.err.split()).replace(" ", "")
    assert str(tmp_path / "report.json") in message
    assert (tmp_path / "report.json").read_text() == "old"
    assert (tmp_path / "report.html").read_text() == "old"
    assert len(list(tmp_path.glob("report*"))) == 2


def test_a_report_is_written_and_named(freight: Run, text: str, tmp_path: Path):
    folder = tmp_path / "new" / "report"
    answer = freight(
        "evaluate",
        "caches",
        "--data",
        text,
        "--caches",
        "unit",
        "--no-speed",
        "--report",
        str(folder),
    )
    assert answer.code == 0, answer.err
    assert str(folder / "report.html") in answer.out
    found = {path.name for path in folder.iterdir()}
    assert found >= {"report.html", "report.md", "report.json", "error-against-memory.svg"}


def test_layers_alone_are_measured_when_asked_for(
    freight: Run, text: str, monkeypatch: pytest.MonkeyPatch
):
    calls = []

    def counted(runs: Any, parts: Any, on_progress: Any) -> list[None]:
        calls.append(len(runs))
        return [None] * len(runs)

    monkeypatch.setattr("freight.lab.evaluate.grid.layer_kl", counted)
    argv = ["evaluate", "caches", "--data", text, "--caches", "unit", "--no-speed", "--json"]
    assert freight(*argv).code == 0
    assert calls == []
    assert freight(*argv, "--kl-by-layer").code == 0
    assert calls == [2]


def test_layers_are_measured_one_at_a_time(freight: Run, text: str):
    said = json.loads(freight("evaluate", "layers", "--data", text, "--json").out)
    assert [layer["layer"] for layer in said["layers"]] == list(range(6))
    assert said["kl_whole"] > 0


@pytest.mark.parametrize("measured", ["caches", "long", "layers"])
def test_bad_documents_and_windows_are_one_line_in_every_measurement(
    freight: Run,
    text: str,
    tmp_path: Path,
    measured: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "freight.model.open.OpenModel.load", lambda *_: pytest.fail("weights were read")
    )
    (tmp_path / "empty").write_text("")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}')
    for argv, said in (
        (("--data", str(tmp_path / "empty")), "is empty"),
        (("--data", str(tmp_path / "other.jsonl")), "has 'body'"),
        (("--data", str(tmp_path / "missing")), "cannot be read as text"),
        (("--data", text, "--window", "2048"), "1024 tokens"),
    ):
        answer = freight("evaluate", measured, *argv)
        assert answer.code == 2, answer
        assert said in answer.err
        assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    "spelling", ["-tp", "--tensor-parallel-size", "--rank-cpus", "-pp", "--pp-layers"]
)
@pytest.mark.parametrize("verb", [["evaluate"], ["evaluate", "layers"], ["bench", "latency"]])
def test_ranks_are_refused_where_a_model_is_measured(
    freight: Run, verb: list[str], spelling: str
) -> None:
    answer = freight(*verb, "demo", spelling, "2")
    assert (answer.code, answer.out) == (2, "")
    assert_names(
        answer.err, "ranks and stages", "freight serve, generate, chat, batch and plan", "omit it"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["layers", "--max-tokens", "64"],
            "--max-tokens; it is an option of freight evaluate caches",
        ),
        (["long", "--caches", "token"], "--caches; it is an option of freight evaluate caches"),
        (["long", "--no-speed"], "--no-speed; it is an option of freight evaluate caches"),
        (["tasks", "--report", "x"], "--report; it is an option of freight evaluate caches"),
        (
            ["tasks", "--data", "x"],
            "--data; it is an option of freight evaluate caches, long, layers, embeddings",
        ),
        (["caches", "--contexts", "4"], "--contexts; it is an option of freight evaluate long"),
        (["--contexts", "4"], "--contexts; it is an option of freight evaluate long"),
        (["--per-layer", "--report", "x"], "--report; it is an option of freight evaluate caches"),
    ],
)
def test_an_option_of_another_measurement_is_refused_with_where_it_is(
    freight: Run, argv: list[str], said: str
):
    answer = freight("evaluate", *argv)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"error: no such option: {said}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--long", "--per-layer"], "different measurements"),
        (["--tasks=x", "--long"], "different measurements"),
        (["caches", "--caches", ""], "--caches '' is unknown"),
        (["tasks"], "Missing option '--tasks'"),
    ],
)
def test_what_cannot_be_measured_is_refused(freight: Run, argv: list[str], said: str):
    answer = freight("evaluate", *argv)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "caches"),
        ("MODEL --data x", "caches MODEL --data x"),
        ("--data x MODEL", "caches --data x MODEL"),
        ("MODEL --help", "caches MODEL --help"),
        ("MODEL --long --contexts 4", "long MODEL --contexts 4"),
        ("--per_layer MODEL", "layers MODEL"),
        ("MODEL --tasks a,b --limit 3", "tasks MODEL --tasks a,b --limit 3"),
        ("--tasks=a_b", "tasks --tasks=a_b"),
        ("long --long", "long long"),  # MODEL is a folder of this name
        ("tasks --per-layer", "layers tasks"),
        ("caches --tasks x", "tasks caches --tasks x"),
        ("-- layers", "caches -- layers"),
    ],
)
def test_a_spelling_without_a_sub_command_means_one(old: str, new: str):
    assert _named(old.split(), MEASUREMENTS) == new.split()


@pytest.mark.parametrize(
    "argv", ["-h", "--help", "caches", "long MODEL --contexts 4", "tasks --tasks x", "layers"]
)
def test_a_sub_command_stays(argv: str):
    assert _named(argv.split(), MEASUREMENTS) == argv.split()


def test_both_spellings_print_the_same(freight: Run, text: str):
    for old, new in (
        (["--per-layer"], ["layers"]),
        (
            ["--long", "--contexts", "2", "--window", "64"],
            ["long", "--contexts", "2", "--window", "64"],
        ),
        (["--caches", "unit", "--no-speed"], ["caches", "--caches", "unit", "--no-speed"]),
    ):
        answers = [freight("evaluate", *argv, "--data", text) for argv in (old, new)]
        assert answers[0].code == 0, answers[0].err
        assert answers[0].out == answers[1].out
        assert ("all at once" in answers[0].out) == ("layers" in new)


def test_help_lists_the_measurements(freight: Run):
    said = freight("evaluate", "--help").out
    assert "Usage: freight evaluate [COMMAND] [MODEL] [OPTIONS]\n" in said
    assert re.findall(r"^  (\w+) +\S.*\.$", said.partition("Commands:")[2], re.M) == MEASUREMENTS
    for name in MEASUREMENTS:
        listed = freight("evaluate", name, "--help").out
        assert f"Usage: freight evaluate {name} [OPTIONS] [MODEL]\n" in listed
        assert ("--contexts" in listed) == (name == "long")


def test_every_command_that_is_printed_runs_and_gives_its_setting(
    freight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a model that has no calibration text of its own, in another dtype than the stored one. A
    server would not end: `generate` takes the same options.
    """
    folder = tmp_path / "my model"
    shutil.copytree(resolve_model("demo"), folder)
    (folder / "calibration.txt").unlink()
    args = EngineArgs(str(folder), dtype="float32", max_model_len=256)
    grid = GridArgs(caches=("unit", "head", "token", "e5m2"), speed=False, window=64)
    evaluation = evaluate_grid(args, [[*range(100, 200)]], grid)
    assert evaluation.runs[0].name == "float32"
    assert "16 bits" not in table(evaluation) + str(advice(evaluation))
    monkeypatch.chdir(tmp_path)
    for run in evaluation.runs:
        *made, served = how_to(run, evaluation.overview).split(" && ")
        for command in made:
            assert freight(*shlex.split(command)[1:]).code == 0
        words = shlex.split(served)[2:]
        answer = freight("generate", *words, "--prompt", "a", "--max-tokens", "1", "--json")
        assert answer.code == 0, (served, answer.err)
        cache = json.loads(answer.out)["kv_cache"]
        assert (cache["dtype"], cache["granularity"]) == (run.kv_cache_dtype, run.granularity)
        assert "--dtype float32 --max-model-len 256" in served


def test_scales_that_no_command_stores_are_not_recommended(freight: Run, tmp_path: Path):
    """`freight quantize` takes unquantized models alone."""
    out = str(tmp_path / "out")
    assert freight("quantize", "demo", out).code == 0
    grid = GridArgs(caches=("tensor", "token"), speed=False, window=64)
    evaluation = evaluate_grid(EngineArgs(out), [[*range(100, 200)]], grid)
    first, *others = evaluation.runs
    safe = [
        replace(run, verdict=Verdict.SAFE, kl_mean=kl, perplexity_ratio_interval=(1.0, 1.0))
        for run, kl in zip(others, (0.001, 0.002), strict=True)
    ]
    found = advice(replace(evaluation, runs=(first, *safe)))
    assert found.chosen is safe[1]
    assert "freight quantize" not in found.command


def test_the_noise_of_16_bits_is_told_apart(freight: Run, text: str):
    argv = ["evaluate", "caches", "--data", text, "--caches", "token", "--no-speed", "--json"]
    said = json.loads(freight(*argv).out)
    noise, run = said["noise"]["kl"], said["runs"][1]
    assert 0 < noise < 0.01
    assert run["kl_without_noise"] == max(0.0, run["kl_mean"] - 2 * noise)
    for more in (["--no-noise"], ["--dtype", "float32"]):
        said = json.loads(freight(*argv, *more).out)
        assert said["noise"] is None
        assert said["runs"][1]["kl_without_noise"] is None


def test_answers_are_scored_after_their_prompts(freight: Run, tmp_path: Path):
    """The report has the log-probability of each answer, and so has what is printed."""
    lines = [
        {"question": "The harbour was ", "answer": "quiet in the morning."},
        {"question": "One day", "answer": " a ship 🚢 came."},
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    argv = ["evaluate", "caches", "--data", str(path), "--field", "answer", "--no-speed"]
    argv += ["--caches", "token", "--prompt-field", "question"]
    said = json.loads(freight(*argv, "--report", str(tmp_path / "report"), "--json").out)
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written["document_tokens"] == said["document_tokens"]
    assert [run["document_logprobs"] for run in written["runs"]] == [
        run["document_logprobs"] for run in said["runs"]
    ]
    assert sum(said["document_tokens"]) == said["num_tokens"]
    assert all(logprob < 0 for run in said["runs"] for logprob in run["document_logprobs"])
    (line,) = [line for line in freight(*argv).out.splitlines() if "judged together" in line]
    assert_names(line, "2 documents", "prompts", "not scored")


def test_prompts_are_of_lines(freight: Run, text: str):
    answer = freight("evaluate", "caches", "--data", text, "--prompt-field", "question")
    assert answer.code == 2
    assert_names(answer.err, "--prompt-field question", ".jsonl")
