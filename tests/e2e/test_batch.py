"""`freight batch` on the model that ships: the server's own answers, and runs that are killed and
continued.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from tests.asking import ENDLESS, ONE_BY_ONE
from tests.e2e.conftest import DemoServer
from tests.environment import without_options
from tests.forked_server import Forked, forked
from tests.serving import CAN_FORK, children_of
from tests.unit.server.raw_http import wait_for

from freight.cli.main import main
from freight.serve.processes import children
from freight.serve.rendering.renderer import MAX_WAITING

CACHE = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "64MiB"]
SECONDS = 300.0
ENVIRON = without_options()


def entry(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def completion(number: int) -> dict[str, Any]:
    return entry(number, prompt=f"def number_{number}(", max_tokens=8 + number % 23, temperature=0)


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text(
        "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in entries)
    )
    return path


def start(source: Path, out: Path, *options: str) -> Forked | subprocess.Popen[bytes]:
    arguments = ["batch", str(source), str(out), *CACHE, *options]
    if CAN_FORK:
        return Forked(arguments, ENVIRON, piped=False)
    return subprocess.Popen([sys.executable, "-m", "freight", *arguments], env=ENVIRON)


def answers(out: Path) -> list[dict[str, Any]]:
    """The lines of OUT, without what no two runs share: times, and what the prefix cache happened
    to hold.
    """
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for one in found:
        body = (one["response"] or {}).get("body", {})
        body.pop("created", None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
    return found


def test_each_line_has_the_answer_of_the_server_or_an_error_of_its_own(
    demo_server: DemoServer, served_folder: Path, tmp_path: Path
) -> None:
    say = [{"role": "user", "content": "Write a function."}]
    scored = {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    entries: list[Any] = [
        entry(1, "/v1/chat/completions", messages=say, max_tokens=6, **scored),
        entry(2, prompt=["def f(", "import "], n=2, max_tokens=5, seed=3),
        "{bad",
        entry(4, "/v1/responses", input="Hello", max_output_tokens=5, temperature=0),
        entry(5, "/v1/messages", messages=say, max_tokens=5, temperature=0),
        entry(6, prompt="x", max_tokens=-1),
        entry(7, "/v1/messages", messages=say, max_tokens=0),
        entry(8, "/v1/embeddings", input="x"),
        entry(9, prompt="x", stream=True),
        {"custom_id": "line-10", "method": "GET", "url": "/v1/completions", "body": {}},
        entry(11, prompt="x", model="another"),
        entry(12, prompt="x", max_tokens=3, structured_outputs={"regex": "("}),
    ]
    source, out = write(tmp_path / "in.jsonl", entries), tmp_path / "out.jsonl"
    assert start(source, out, "--model-id", str(served_folder)).wait(SECONDS) == 0
    found = answers(out)
    assert [one["custom_id"] for one in found] == [
        None if number == 3 else f"line-{number}" for number in range(1, 13)
    ]
    assert found[2]["response"] is None
    assert found[2]["error"]["message"].startswith("line 3: body is not valid JSON")
    assert "/v1/completions" in found[7]["error"]["message"]
    assert "POST" in found[9]["error"]["message"]
    assert "stream" in found[8]["error"]["message"]
    headers = {"Authorization": f"Bearer {demo_server.key}"}
    with httpx.Client(base_url=demo_server.url, headers=headers, timeout=SECONDS) as client:
        for number in (1, 2, 4, 5, 6, 7, 11, 12):
            one, asked = found[number - 1], entries[number - 1]
            reply = client.post(asked["url"], json=asked["body"])
            assert one["response"]["status_code"] == reply.status_code
            assert (one["error"] is None) == (reply.status_code == 200)
            assert _without_ids(one["response"]["body"]) == _without_ids(reply.json())


def _without_ids(body: Any) -> Any:
    """An answer without ids, times and what the prefix cache held."""
    if isinstance(body, list):
        return [_without_ids(item) for item in body]
    if not isinstance(body, dict):
        return body
    dropped = ("id", "created", "created_at", "completed_at", "request_id", "prompt_tokens_details")
    dropped += ("input_tokens_details", "cache_read_input_tokens", "input_tokens")
    return {name: _without_ids(value) for name, value in body.items() if name not in dropped}


def test_more_conversations_than_may_wait_for_the_template(tmp_path: Path) -> None:
    say = [{"role": "user", "content": "Write a function."}]
    lines = 2 * MAX_WAITING + 2  # as many as the engine has at a time, and more
    entries = [
        entry(number, "/v1/chat/completions", messages=say, max_tokens=1) for number in range(lines)
    ]
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    source = write(tmp_path / "in.jsonl", entries)
    out = tmp_path / "out.jsonl"
    assert start(source, out, "--chat-template", str(template)).wait(SECONDS) == 0
    assert [line["error"] for line in answers(out)] == [None] * lines


def test_a_killed_run_is_continued_to_the_same_file(tmp_path: Path) -> None:
    _kill_and_continue(tmp_path, num_lines=60, kills=1)


@pytest.mark.slow
def test_a_run_killed_many_times_is_continued_to_the_same_file(tmp_path: Path) -> None:
    _kill_and_continue(tmp_path, num_lines=1500, kills=12)


def _kill_and_continue(folder: Path, num_lines: int, kills: int) -> None:
    """Kill at random moments, by lines that are there or by time, and compare with a run that
    nobody disturbs.
    """
    chance = random.Random(num_lines)
    source = write(folder / "in.jsonl", [completion(number) for number in range(num_lines)])
    whole, out = folder / "whole.jsonl", folder / "out.jsonl"
    assert start(source, whole).wait(SECONDS) == 0
    done = 0
    for _ in range(kills):
        running = start(source, out)
        wanted = done + chance.randrange(1, max(2, (num_lines - done) // 2))
        end = time.monotonic() + SECONDS
        while _num_lines(out) < wanted and running.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        running.kill()
        running.wait(SECONDS)
        assert _num_lines(out) >= wanted
        done = _num_lines(out)
        with out.open(
            "ab"
        ) as file:  # as of a write that was cut short, which a small one hardly is
            file.write(whole.read_bytes().splitlines()[done][:40] if done < num_lines else b"")
    assert start(source, out).wait(SECONDS) == 0
    assert answers(out) == answers(whole)
    before = out.read_bytes()
    assert start(source, out).wait(SECONDS) == 0
    assert out.read_bytes() == before


def _num_lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def test_pipes_and_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [completion(0), "{", completion(2)]
    source, out = write(tmp_path / "in.jsonl", entries), tmp_path / "out.jsonl"
    if CAN_FORK:  # the engine's process, in place of an interpreter that begins anew
        monkeypatch.setattr(children, "subprocess", SimpleNamespace(Popen=forked))
    stdin = io.TextIOWrapper(io.BytesIO(source.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "argv", ["freight", "batch", "-", "-", *CACHE])
    with pytest.raises(SystemExit, match="0"):
        main()
    out.write_text(capsys.readouterr().out)
    assert [one["custom_id"] for one in answers(out)] == ["line-0", None, "line-2"]
    monkeypatch.setattr(sys, "argv", ["freight", "batch", str(source), str(out), "--json", *CACHE])
    with pytest.raises(SystemExit, match="0"):
        main()
    summary = json.loads(capsys.readouterr().out)
    assert summary.pop("seconds") >= 0
    counts = {"lines": 3, "before": 3, "answered": 0, "failed": 1}
    assert summary == counts | {"prompt_tokens": 0, "generated_tokens": 0}


def test_a_model_that_cannot_be_loaded_leaves_an_empty_output_and_its_status(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    source, out = write(tmp_path / "in.jsonl", [completion(0)]), tmp_path / "out.jsonl"
    assert start(source, out, "--model-id", str(tmp_path / "model")).wait(SECONDS) == 1
    assert out.read_bytes() == b""


@pytest.mark.skipif(not CAN_FORK, reason="finds the engine's process in /proc")
def test_an_engine_that_dies_leaves_its_lines_to_the_next_run(tmp_path: Path) -> None:
    short, out = [completion(number) for number in range(8)], tmp_path / "out.jsonl"
    endless = [*short[:4], *(entry(number, **ENDLESS) for number in range(4, 8))]
    running = start(
        write(tmp_path / "endless.jsonl", endless), out, *ONE_BY_ONE[:2], *ONE_BY_ONE[-2:]
    )
    wait_for(lambda: _num_lines(out) >= 2 or running.poll() is not None)
    for child in children_of(running.pid):
        os.kill(child, 9)
    assert running.wait(SECONDS) == 1
    assert all(one["error"] is None for one in answers(out))
    assert 2 <= _num_lines(out) <= 4
    assert start(write(tmp_path / "short.jsonl", short), out).wait(SECONDS) == 0
    assert [one["custom_id"] for one in answers(out)] == [f"line-{number}" for number in range(8)]
