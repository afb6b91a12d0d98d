"""The example and the tutorial that need Ray. Each starts a Ray of its own, with its own token."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documented import free_port, is_as_shown, run_steps, steps

from freight import LLM, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one Ray writes a token into the home folder."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_the_example_answers_as_one_model(tmp_path: Path) -> None:
    """And needs no more processors than two."""
    example = str(ROOT / "examples" / "ray_replicas.py")
    environ = os.environ | {"PORT": free_port()}
    done = subprocess.run(
        [sys.executable, example], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    prompts = [f"def f{n}(x):\n    return" for n in range(8)]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    llm = LLM("demo", kv_cache_dtype="fp8", kv_cache_memory="64MiB", threads=1)
    alone = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert re.findall(r"^'.*' -> (.*)$", done.stdout, re.MULTILINE) == list(map(repr, alone))


def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorials" / "several-machines.md"
    blocks = steps(page)
    printed = run_steps(blocks, tmp_path)
    wrong = [
        f"{page.name}:{step.line} printed\n{found}"
        for step, found in zip(blocks, printed, strict=True)
        if step.shown is not None and not is_as_shown(found, step.shown)
    ]
    assert not wrong, "\n".join(wrong)
