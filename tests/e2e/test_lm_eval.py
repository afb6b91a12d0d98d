"""lm-eval with Freight: in its process, by its own command, by `freight evaluate tasks`, and against
`freight serve` as `local-completions`. All of them find the log-probabilities of `LLM`.

Offline, on task files in a folder.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.demo_chat import DEMO
from tests.e2e.conftest import OPTIONS, DemoServer
from tests.forked_server import run_forked
from tests.refusals import assert_names
from tests.serving import freight_serve

from freight import SamplingParams
from freight.llm import LLM

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)
TEXT = (DEMO / "heldout.txt").read_text()
PARTS = [TEXT[start : start + 300] for start in range(0, 1200, 300)]
OWN = {"kv_cache_dtype": "fp8", "kv_cache_memory": "64MiB"}


def run(folder: Path, *commands: Sequence[str], **environ: str) -> list[tuple[int, str, str]]:
    """The status and output of each command (`lm_eval_run.py`), which all keep data in `folder`."""
    data = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "HF_DATASETS_CACHE": f"{folder}/data"}
    variables = os.environ | data | environ
    done = run_forked([json.dumps(commands)], variables, "tests.e2e.lm_eval_run")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task called `local_text`: the perplexity of held-out text."""
    path = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"text": part}) + "\n" for part in PARTS]
    (path / "documents.jsonl").write_text("".join(lines))
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


def with_generation(folder: Path, path: Path, name: str, **options: object) -> None:
    """Write a task that generates: the words after a document of `folder`."""
    neutral = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False, "num_beams": 1}
    task = json.loads((folder / "local_text.yaml").read_text()) | {
        "task": name,
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "x",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": neutral | {"temperature": 0.0} | options,
    }
    (path / f"{name}.yaml").write_text(json.dumps(task))


def byte_perplexity(dtype: str) -> float:
    """Of all documents, each after BOS: from the log-probabilities of `LLM`."""
    llm = LLM("demo", kv_cache_dtype=dtype, kv_cache_memory="64MiB")
    total = sum(score(llm, ids(llm, part, begin=True), 1)[0] for part in PARTS)
    return math.exp(-total / len("".join(PARTS).encode()))


@pytest.mark.slow
def test_lm_eval_s_command_runs_freight(folder: Path, tmp_path: Path) -> None:
    options = "pretrained=demo,kv_cache_dtype=fp8,kv_cache_memory=64MiB"
    argv = ["--model", "freight", "--model_args", options, "--tasks", "local_text"]
    where = ["--include_path", str(folder), "--output_path", str(tmp_path)]
    [(status, _, errors)] = run(folder, ["freight.lm_eval", "run", *argv, *where])
    assert status == 0, errors
    (written,) = tmp_path.rglob("results_*.json")
    value = json.loads(written.read_text())["results"]["local_text"]["byte_perplexity,none"]
    assert value == pytest.approx(byte_perplexity("fp8"), rel=1e-12)


def test_evaluate_tasks_gives_both_caches_and_their_difference_and_refuses_what_is_not_meant(
    folder: Path, tmp_path: Path
) -> None:
    """A task's neutral arguments are taken, and others end it before weights are read. lm-eval's own
    command says how it is used.
    """
    with_generation(folder, tmp_path, "one_beam")
    with_generation(folder, tmp_path, "ten_beams", num_beams=10)
    options = ["--kv-cache-dtype", "fp8", "--json", "--kv-cache-memory", "64MiB"]
    argv = ["freight", "evaluate", "tasks", "demo", *options, "--tasks"]
    older = ["freight", "evaluate", "demo", *options, "--tasks"]
    refused, generated, scored, described = run(
        folder,
        [*argv, "one_beam,ten_beams", "--include-path", str(tmp_path)],
        [*argv, "one_beam", "--limit", "2", "--include-path", str(tmp_path)],
        [*older, "local_text", "--include-path", str(folder)],
        ["freight.lm_eval", "--help"],
    )

    assert described[0] == 0
    assert "usage: lm-eval" in described[1]

    assert refused[0] == 2
    assert_names(refused[2], "--tasks ten_beams", "generation_kwargs", "num_beams: 10")
    assert "weights" not in refused[2]

    assert generated[0] == 0, generated[2]
    assert [score["task"] for score in json.loads(generated[1])["tasks"]] == ["one_beam"]

    assert scored[0] == 0, scored[2]
    answer = json.loads(scored[1])
    assert [facts["dtype"] for facts in answer["caches"]] == ["bfloat16", "fp8_e4m3fn"]
    (row,) = answer["tasks"]
    assert [row[key] for key in ("task", "metric", "num_documents", "method")] == [
        "local_text", "byte_perplexity", len(PARTS), "bootstrap",
    ]  # fmt: skip
    assert row["reference"] == pytest.approx(byte_perplexity("bfloat16"), rel=1e-12)
    assert row["value"] == pytest.approx(byte_perplexity("fp8"), rel=1e-12)
    assert row["difference"] == row["value"] - row["reference"] != 0
    assert 0 < row["difference_stderr"] < row["reference_stderr"]


def documents(llm: LLM) -> list[dict[str, str]]:
    """Held-out text in two parts; in the last document the second part is what the model says by
    itself.
    """
    docs = []
    for start in (0, 700, 1400):
        context = TEXT[start : start + 400].rstrip()
        docs.append({"context": context, "rest": TEXT[start + len(context) : start + 700]})
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    own = llm.generate([ids(llm, docs[0]["context"])], greedy)[0].outputs[0].text
    return [*docs, {"context": docs[0]["context"], "rest": own}]


def ids(llm: LLM, text: str, begin: bool = False) -> list[int]:
    assert llm.engine.tokenizer is not None
    return llm.engine.tokenizer.encode(text, add_special_tokens=begin)


def score(llm: LLM, prompt: list[int], start: int) -> tuple[float, bool]:
    """The log-probability of prompt[start:], and whether each of its tokens was the most likely
    one.
    """
    scores = llm.generate([prompt], SCORED)[0].prompt_logprobs
    assert scores is not None
    scored = zip(scores[start:], prompt[start:], strict=True)
    entries = [entry[token] for entry, token in scored if entry is not None]
    assert len(entries) == len(prompt) - start
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def require_scores(
    llm: LLM, docs: list[dict[str, str]], answers: dict[str, list[Any]], begin: bool
) -> list[bool]:
    """Require the log-probabilities of `LLM` for the rests; return which of them are greedy."""
    for doc, (logprob, is_greedy) in zip(docs, answers["loglikelihood"], strict=True):
        context = ids(llm, doc["context"], begin)
        joined = ids(llm, doc["context"] + doc["rest"], begin)
        expected = score(llm, context + joined[len(context) :], len(context))  # as lm-eval joins
        assert (logprob, is_greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    return [is_greedy for _, is_greedy in answers["loglikelihood"]]


def answers_of(
    model: str, options: dict[str, object], docs: list[dict[str, str]], folder: Path
) -> dict[str, list[Any]]:
    """What lm-eval finds with `model` and these model_args: task -> an answer for each of `docs`."""
    folder.mkdir()
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    command = ["compare", str(folder), model, json.dumps(options)]
    [(status, _, errors)] = run(folder, command, OPENAI_API_KEY=str(options.get("auth_token")))
    assert status == 0, errors
    answers: dict[str, list[Any]] = json.loads((folder / "answers.json").read_text())
    return answers


@pytest.mark.slow
def test_lm_eval_with_the_models_own_tokenizer_finds_what_it_finds_in_process(
    served_folder: Path, served_llm: LLM, tmp_path: Path
) -> None:
    """What docs/server.md tells users of lm-eval to pass: BOS is in front of every text, as `LLM`
    has it.
    """
    docs = documents(served_llm)
    name = str(
        served_folder
    )  # lm-eval can load a tokenizer by it, as by that of a model on the hub
    with freight_serve(served_folder, [*OPTIONS, "--served-model-name", name]) as url:
        served = {"model": name, "base_url": f"{url}/v1/completions", "max_length": 1024}
        begun = served | {"add_bos_token": True}
        answers = answers_of("local-completions", begun, docs, tmp_path / "served")
        plain = answers_of("local-completions", served, docs, tmp_path / "plain")
    answers["loglikelihood_rolling"] = plain["loglikelihood_rolling"]  # which lm-eval begins itself
    own = {"pretrained": name, **OWN}
    assert answers_of("freight", own, docs, tmp_path / "own") == answers
    require_scores(served_llm, docs, answers, begin=True)


@pytest.mark.slow
def test_lm_eval_finds_the_log_probabilities_of_llm(
    demo_server: DemoServer, served_llm: LLM, tmp_path: Path
) -> None:
    docs = documents(served_llm)
    served = {
        "model": demo_server.name,
        "base_url": f"{demo_server.url}/v1/completions",
        "auth_token": demo_server.key,
        "tokenizer_backend": "auto",
        "max_length": 1024,
        "batch_size": 2,
    }
    answers = answers_of("local-completions", served, docs, tmp_path / "served")
    # lm-eval takes a first token with id 0, as this model's, for none
    begin = ids(served_llm, "<|end_of_text|>")
    own = {"pretrained": str(demo_server.folder), "prefix_token_id": begin[0], **OWN}
    own_answers = answers_of("freight", own | {"add_bos_token": False}, docs, tmp_path / "own")
    assert own_answers == answers
    greedy = require_scores(served_llm, docs, answers, begin=False)
    assert greedy == [False, False, False, True]
    for doc, logprob in zip(docs, answers["loglikelihood_rolling"], strict=True):
        prompt = begin + ids(served_llm, doc["context"] + doc["rest"])
        assert logprob == pytest.approx(score(served_llm, prompt, 1)[0], abs=1e-4)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=["\n\n"])
    for doc, text in zip(docs, answers["generate_until"], strict=True):
        prompt = ids(served_llm, doc["context"])
        assert text == served_llm.generate([prompt], params)[0].outputs[0].text
