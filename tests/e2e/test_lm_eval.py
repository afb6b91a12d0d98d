"""lm-eval's `local-completions` against `freight serve`: its log-probabilities are those of `LLM`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.demo_chat import DEMO
from tests.e2e.conftest import DemoServer

from freight import SamplingParams
from freight.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)
DOCUMENT = 700  # characters


def documents(llm: LLM) -> list[dict[str, str]]:
    """Held-out text in two parts; in the last document the second part is what the model says by itself."""
    text = (DEMO / "heldout.txt").read_text()
    parts = [text[start : start + DOCUMENT] for start in range(0, 3 * DOCUMENT, DOCUMENT)]
    found = [{"context": part[:400].rstrip(), "rest": part[len(part[:400].rstrip()) :]} for part in parts]
    own = llm.generate([ids(llm, found[0]["context"])], GREEDY)[0].outputs[0].text
    return [*found, {"context": found[0]["context"], "rest": own}]


def ids(llm: LLM, text: str) -> list[int]:
    assert llm.engine.tokenizer is not None
    return llm.engine.tokenizer.encode(text, add_special_tokens=False)


def score(llm: LLM, prompt: list[int], start: int) -> tuple[float, bool]:
    """The log-probability of prompt[start:], and whether each of its tokens was the most likely one."""
    scores = llm.generate([prompt], SCORED)[0].prompt_logprobs
    assert scores is not None
    entries = [entry[token] for entry, token in zip(scores[start:], prompt[start:], strict=True) if entry is not None]
    assert len(entries) == len(prompt) - start
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def test_lm_eval_finds_the_log_probabilities_of_llm(demo_server: DemoServer, served_llm: LLM, tmp_path: Path) -> None:
    docs = documents(served_llm)
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    environ = os.environ | {"OPENAI_API_KEY": demo_server.key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    script = Path(__file__).with_name("lm_eval_run.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), demo_server.url, demo_server.name, demo_server.key],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())

    greedy = []
    for doc, (logprob, is_greedy) in zip(docs, found["loglikelihood"], strict=True):
        context = ids(served_llm, doc["context"])
        prompt = context + ids(served_llm, doc["context"] + doc["rest"])[len(context) :]  # as lm-eval joins them
        expected, greedy_here = score(served_llm, prompt, len(context))
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert is_greedy == greedy_here
        greedy.append(is_greedy)
    assert greedy == [False, False, False, True]

    begin = ids(served_llm, "<|end_of_text|>")  # lm-eval takes a first token with id 0, as this model's, for none
    for doc, logprob in zip(docs, found["loglikelihood_rolling"], strict=True):
        prompt = begin + ids(served_llm, doc["context"] + doc["rest"])
        assert logprob == pytest.approx(score(served_llm, prompt, 1)[0], abs=1e-4)

    params = SamplingParams(temperature=0.0, max_tokens=12, stop=["\n\n"])
    for doc, text in zip(docs, found["generate_until"], strict=True):
        prompt = ids(served_llm, doc["context"])
        assert text == served_llm.generate([prompt], params)[0].outputs[0].text
