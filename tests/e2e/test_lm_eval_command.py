"""lm-eval's own command with `--model freight`, and `freight evaluate tasks`: offline, on task
files in a folder.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.demo_chat import DEMO
from tests.refusals import assert_names

from freight import SamplingParams
from freight.llm import LLM

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)
CHARACTERS = 300
COUNT = 4  # documents
# lm-eval's command reads all of its 14,000 task files first, which takes seconds; here it reads
# those of the folder
COMMAND = """
import functools, runpy, lm_eval.tasks as tasks
tasks.TaskManager.__init__ = functools.partialmethod(tasks.TaskManager.__init__, include_defaults=False)
runpy.run_module("freight.lm_eval", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task called `local_text`: the perplexity of held-out text."""
    path = tmp_path_factory.mktemp("tasks")
    text = (DEMO / "heldout.txt").read_text()
    documents = [{"text": text[at * CHARACTERS : (at + 1) * CHARACTERS]} for at in range(COUNT)]
    (path / "documents.jsonl").write_text(
        "".join(json.dumps(document) + "\n" for document in documents)
    )
    task = {
        "task": "local_text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }
    (path / "local_text.yaml").write_text(json.dumps(task))  # JSON is YAML
    return path


# Several commands in one process: to import lm-eval takes seconds.
COMMANDS = """
import contextlib, io, json, runpy, sys
for module, *argv in json.loads(sys.argv[1]):
    sys.argv, status = [module, *argv], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            status = ended.code or 0
    print(json.dumps([status, out.getvalue(), errors.getvalue()]))
"""


def run(folder: Path, *argv: str) -> str:
    """The standard output of `python ARGV`."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [sys.executable, *argv],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def byte_perplexity(dtype: str) -> float:
    """Of all documents, each after BOS: from the log-probabilities of `LLM`."""
    llm = LLM("demo", kv_cache_dtype=dtype, kv_cache_memory="64MiB")
    assert llm.engine.tokenizer is not None
    text = (DEMO / "heldout.txt").read_text()
    parts = [text[at * CHARACTERS : (at + 1) * CHARACTERS] for at in range(COUNT)]
    total = 0.0
    for output in llm.generate([llm.engine.tokenizer.encode(part) for part in parts], SCORED):
        assert output.prompt_logprobs is not None
        scored = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        total += sum(entry[token].logprob for token, entry in scored if entry is not None)
    return math.exp(-total / len("".join(parts).encode()))


@pytest.mark.slow
def test_lm_eval_s_command_runs_freight(folder: Path, tmp_path: Path) -> None:
    options = "pretrained=demo,kv_cache_dtype=fp8,kv_cache_memory=64MiB"
    argv = [
        "--model",
        "freight",
        "--model_args",
        options,
        "--tasks",
        "local_text",
        "--include_path",
        str(folder),
    ]
    run(folder, "-c", COMMAND, "run", *argv, "--output_path", str(tmp_path))
    (written,) = tmp_path.rglob("results_*.json")
    found = json.loads(written.read_text())["results"]["local_text"]["byte_perplexity,none"]
    assert found == pytest.approx(byte_perplexity("fp8"), rel=1e-12)


def with_generation(folder: Path, path: Path, name: str, options: dict[str, object]) -> None:
    """Write a task that generates: the words after a document of `folder`."""
    task = json.loads((folder / "local_text.yaml").read_text()) | {
        "task": name,
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "x",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": options,
    }
    (path / f"{name}.yaml").write_text(json.dumps(task))


def test_evaluate_tasks_gives_both_caches_and_their_difference_and_refuses_what_is_not_meant(
    folder: Path, tmp_path: Path
) -> None:
    """A task's neutral arguments are taken, and others end it before weights are read. lm-eval's own
    command says how it is used.
    """
    options = {
        "until": ["\n"],
        "max_gen_toks": 4,
        "do_sample": False,
        "num_beams": 1,
        "temperature": 0.0,
    }
    with_generation(folder, tmp_path, "one_beam", options)
    with_generation(folder, tmp_path, "ten_beams", options | {"num_beams": 10})
    argv = [
        "freight",
        "evaluate",
        "tasks",
        "demo",
        "--kv-cache-dtype",
        "fp8",
        "--json",
        "--kv-cache-memory",
        "64MiB",
        "--tasks",
    ]
    commands = [
        [*argv, "one_beam,ten_beams", "--include-path", str(tmp_path)],
        [*argv, "one_beam", "--limit", "2", "--include-path", str(tmp_path)],
        # the older spelling
        [*argv[:2], *argv[3:], "local_text", "--include-path", str(folder)],
        ["freight.lm_eval", "--help"],
    ]
    refused, generated, scored, described = map(
        json.loads, run(folder, "-c", COMMANDS, json.dumps(commands)).splitlines()
    )

    assert described[0] == 0
    assert "usage: lm-eval" in described[1]

    assert refused[0] == 2
    assert_names(refused[2], "--tasks ten_beams", "generation_kwargs", "num_beams: 10")
    assert "weights" not in refused[2]

    assert generated[0] == 0, generated[2]
    assert [score["task"] for score in json.loads(generated[1])["tasks"]] == ["one_beam"]

    assert scored[0] == 0, scored[2]
    found = json.loads(scored[1])
    assert [facts["dtype"] for facts in found["caches"]] == ["bfloat16", "fp8_e4m3fn"]
    (score,) = found["tasks"]
    assert (score["task"], score["metric"], score["num_documents"]) == (
        "local_text",
        "byte_perplexity",
        COUNT,
    )
    assert score["reference"] == pytest.approx(byte_perplexity("bfloat16"), rel=1e-12)
    assert score["value"] == pytest.approx(byte_perplexity("fp8"), rel=1e-12)
    assert score["difference"] == score["value"] - score["reference"] != 0
    assert score["method"] == "bootstrap"
    assert 0 < score["difference_stderr"] < score["reference_stderr"]
