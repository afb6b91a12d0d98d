"""lm-eval's `local-completions` against `freight serve`: its log-probabilities are those of `LLM`.

And lm-eval with Freight in its process: what it finds is what the server answers, to the last
digit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.demo_chat import DEMO
from tests.e2e.conftest import OPTIONS, DemoServer
from tests.serving import freight_serve

from freight import SamplingParams
from freight.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)
DOCUMENT = 700  # characters


def documents(llm: LLM) -> list[dict[str, str]]:
    """Held-out text in two parts; in the last document the second part is what the model says by
    itself.
    """
    text = (DEMO / "heldout.txt").read_text()
    parts = [text[start : start + DOCUMENT] for start in range(0, 3 * DOCUMENT, DOCUMENT)]
    found = [
        {"context": part[:400].rstrip(), "rest": part[len(part[:400].rstrip()) :]} for part in parts
    ]
    own = llm.generate([ids(llm, found[0]["context"])], GREEDY)[0].outputs[0].text
    return [*found, {"context": found[0]["context"], "rest": own}]


def ids(llm: LLM, text: str) -> list[int]:
    assert llm.engine.tokenizer is not None
    return llm.engine.tokenizer.encode(text, add_special_tokens=False)


def score(llm: LLM, prompt: list[int], start: int) -> tuple[float, bool]:
    """The log-probability of prompt[start:], and whether each of its tokens was the most likely
    one.
    """
    scores = llm.generate([prompt], SCORED)[0].prompt_logprobs
    assert scores is not None
    entries = [
        entry[token]
        for entry, token in zip(scores[start:], prompt[start:], strict=True)
        if entry is not None
    ]
    assert len(entries) == len(prompt) - start
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def found_by(
    model: str, options: dict[str, object], docs: list[dict[str, str]], folder: Path
) -> dict[str, list[Any]]:
    """What lm-eval finds with `model` and these model_args: task -> an answer for each of `docs`."""
    folder.mkdir()
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    environ = os.environ | {"OPENAI_API_KEY": str(options.get("auth_token")), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("lm_eval_run.py")),
            str(folder),
            model,
            json.dumps(options),
        ],
        env=environ | {"HF_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers: dict[str, list[Any]] = json.loads((folder / "found.json").read_text())
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
    )  # a name that lm-eval can load a tokenizer by, as that of a model on the hub
    with freight_serve(served_folder, [*OPTIONS, "--served-model-name", name]) as url:
        served = {"model": name, "base_url": f"{url}/v1/completions", "max_length": 1024}
        found = found_by(
            "local-completions", served | {"add_bos_token": True}, docs, tmp_path / "served"
        )
        plain = found_by("local-completions", served, docs, tmp_path / "plain")
    found["loglikelihood_rolling"] = plain[
        "loglikelihood_rolling"
    ]  # lm-eval puts BOS before these by itself
    own = {"pretrained": name, "kv_cache_dtype": "fp8", "kv_cache_memory": "64MiB"}
    assert found_by("freight", own, docs, tmp_path / "own") == found
    tokenizer = served_llm.engine.tokenizer
    assert tokenizer is not None
    for doc, (logprob, is_greedy) in zip(docs, found["loglikelihood"], strict=True):
        context = tokenizer.encode(doc["context"])
        assert context[0] == tokenizer.bos_token_id
        prompt = (
            context + tokenizer.encode(doc["context"] + doc["rest"])[len(context) :]
        )  # as lm-eval joins them
        expected = score(served_llm, prompt, len(context))
        assert (logprob, is_greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])


@pytest.mark.slow
def test_lm_eval_finds_the_log_probabilities_of_llm(
    demo_server: DemoServer, served_llm: LLM, tmp_path: Path
) -> None:
    docs = documents(served_llm)
    url = f"{demo_server.url}/v1/completions"
    served = {
        "model": demo_server.name,
        "base_url": url,
        "auth_token": demo_server.key,
        "tokenizer_backend": "auto",
    }
    found = found_by(
        "local-completions",
        served | {"max_length": 1024, "batch_size": 2},
        docs,
        tmp_path / "served",
    )

    own = {
        "pretrained": str(demo_server.folder),
        "kv_cache_dtype": "fp8",
        "kv_cache_memory": "64MiB",
    }
    alike = {
        "add_bos_token": False,
        "prefix_token_id": ids(served_llm, "<|end_of_text|>")[0],
    }  # see `begin`
    assert found_by("freight", own | alike, docs, tmp_path / "own") == found

    greedy = []
    for doc, (logprob, is_greedy) in zip(docs, found["loglikelihood"], strict=True):
        context = ids(served_llm, doc["context"])
        prompt = (
            context + ids(served_llm, doc["context"] + doc["rest"])[len(context) :]
        )  # as lm-eval joins them
        expected, greedy_here = score(served_llm, prompt, len(context))
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert is_greedy == greedy_here
        greedy.append(is_greedy)
    assert greedy == [False, False, False, True]

    begin = ids(
        served_llm, "<|end_of_text|>"
    )  # lm-eval takes a first token with id 0, as this model's, for none
    for doc, logprob in zip(docs, found["loglikelihood_rolling"], strict=True):
        prompt = begin + ids(served_llm, doc["context"] + doc["rest"])
        assert logprob == pytest.approx(score(served_llm, prompt, 1)[0], abs=1e-4)

    params = SamplingParams(temperature=0.0, max_tokens=12, stop=["\n\n"])
    for doc, text in zip(docs, found["generate_until"], strict=True):
        prompt = ids(served_llm, doc["context"])
        assert text == served_llm.generate([prompt], params)[0].outputs[0].text
