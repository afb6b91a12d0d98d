"""examples/: each runs as it is written, says what it promises, and is short.

They run in this process, which has imported torch already. Clients talk to the server of the tests.
The one that needs Ray is run by tests/ray/test_examples.py.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.e2e.conftest import DemoServer
from tests.forked_server import CAN_FORK, forked, run_forked
from tests.serving import freight_serve

from freight.llm import LLM
from freight.serve.processes import children

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MOST_LINES = 60


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run an example with these arguments; what it prints."""

    def run(name: str, *arguments: object) -> str:
        path = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_all_are_listed_short_and_run_here() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(scripts)
    files = (Path(__file__), ROOT / "tests" / "ray" / "test_examples.py")
    tests = "".join(path.read_text() for path in files)
    assert [name for name in scripts if f'"{name}"' not in tests] == []
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.iterdir()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_offline(run: Any) -> None:
    printed = run("offline.py")
    assert printed.count(" -> ") == 3
    assert "'def main(' -> 'master=None, **options):" in printed
    assert "cache: fp8_e4m3fn, 1584 bytes per token" in printed


def test_async_requests(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if CAN_FORK:  # the engine's process, in place of an interpreter that begins anew
        monkeypatch.setattr(children, "subprocess", SimpleNamespace(Popen=forked))
    printed = run("async_requests.py")
    assert printed.count(" -> ") == 4
    assert "the long request ended with abort" in printed


def test_stream_client(run: Any, demo_server: DemoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", demo_server.key)
    printed = run("stream_client.py", demo_server.url + "/v1")
    assert re.search(rf"^32 tokens of {demo_server.name}\nfirst token after \d+ ms$", printed, re.M)
    assert printed.startswith("master=None, **options):")


def test_tools_and_structure(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the template of examples/, as the example says."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    options = ["--chat-template", str(EXAMPLES / "tools.jinja"), "--kv-cache-memory", "64MiB"]
    with freight_serve("demo", options) as url:
        printed = run("tools_and_structure.py", url + "/v1")
    form = r"city='(Paris|Rome)' unit='[CF]'"
    assert re.fullmatch(rf"call: weather {form}\nanswer: {form}\n", printed)


def test_fp8_cache_transformers(run: Any) -> None:
    printed = run("fp8_cache_transformers.py")
    share = float(re.findall(r": ([\d.]+)%$", printed, re.M)[0])
    assert 51 < share < 55  # 66 bytes of 128, and room for further tokens


def test_quantize_recipe(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run("quantize_recipe.py", out)
    assert "cache: fp8_e4m3fn, scales: checkpoint" in printed
    assert LLM(str(out), kv_cache_memory="4MiB").kv_cache_info()["granularity"] == "tensor"


def test_evaluate_in_ci(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bound that no cache holds; of all bounds it is the only one that fails."""
    if CAN_FORK:  # the command, in place of an interpreter that begins anew
        monkeypatch.setattr(subprocess, "run", lambda command, **_: run_forked(command[3:]))
    with pytest.raises(SystemExit, match="1"):
        run("evaluate_in_ci.py", "--most-kl", "0.0001", "--max-tokens", "12288")
    printed = capsys.readouterr()
    (kl,) = re.findall(r"mean KL ([0-9.]+)", printed.out)
    refused = re.findall(r"^not accepted: (.*)$", printed.err, re.M)
    assert refused == [f"mean KL {kl} is above 0.0001"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"), [(["demo"], 0), (["demo", "--data", "missing.txt"], 2)]
)
def test_evaluate_in_ci_accepts_and_fails(arguments: list[str], status: int) -> None:
    command = [sys.executable, EXAMPLES / "evaluate_in_ci.py", *arguments]
    assert subprocess.run(command, capture_output=True, check=False).returncode == status


@pytest.mark.slow
def test_lm_eval_task() -> None:
    """In a process of its own: lm-eval warns, and leaves settings behind."""
    path = EXAMPLES / "lm_eval_task.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, fp8 = map(float, re.findall(r": ([\d.]+) bits per byte", done.stdout))
    assert 0.5 < plain < 4
    assert abs(fp8 - plain) < 0.05
