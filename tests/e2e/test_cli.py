"""The command line on the model that ships: real text, one JSON object, and errors that say the way
out.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
from tests.environment import is_option
from tests.forked_server import run_forked

from freight.cli.main import main

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--kv-cache-memory", "16MiB"]
KV_CACHE = {"dtype", "granularity", "scale_source", "bytes_per_token", "num_blocks", "block_size"}
KV_CACHE |= {"capacity_tokens", "tokens_at_16_bits"}


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str, **environ: str
) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)"""
    for name in filter(is_option, list(os.environ)):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["freight", *argv])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_process_prints_one_json_object_on_stdout_and_its_choices_on_stderr() -> None:
    argv = ["generate", "--prompt", "def main(", "--kv-cache-dtype", "fp8", "--json", *GREEDY]
    answer = run_forked(argv)
    assert answer.returncode == 0, answer.stderr
    got = json.loads(answer.stdout)
    (output,) = got["outputs"]
    assert set(output) == {"prompt", "text", "token_ids", "finish_reason", "stop_reason"}
    assert output["prompt"] == "def main("
    assert len(output["token_ids"]) == 12
    assert output["finish_reason"] == "length"
    assert set(got["kv_cache"]) == KV_CACHE
    cache = got["kv_cache"]
    assert (cache["dtype"], cache["granularity"], cache["scale_source"]) == (
        "fp8_e4m3fn",
        "token",
        "dynamic",
    )
    assert cache["capacity_tokens"] == cache["num_blocks"] * cache["block_size"]
    assert cache["capacity_tokens"] * cache["bytes_per_token"] <= 16 * 2**20
    assert "fp8_e4m3fn" in answer.stderr


def test_streamed_text_is_the_text_of_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "demo", "--prompt", "import os\n", *GREEDY]
    code, streamed, _ = run(monkeypatch, capsys, *argv)
    assert code == 0
    _, printed, _ = run(monkeypatch, capsys, *argv, "--json")
    assert streamed == json.loads(printed)["outputs"][0]["text"] + "\n"


def test_the_older_form_through_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "generate",
        "--model-id",
        "demo",
        "--prompt-token-ids",
        "1,2,3",
        "--skip-tokenizer-init",
        "--json",
        *GREEDY,
    ]
    code, out, _ = run(monkeypatch, capsys, *argv, FREIGHT_KV_CACHE_DTYPE="fp8_e5m2")
    assert code == 0
    got = json.loads(out)
    assert (got["kv_cache"]["dtype"], got["kv_cache"]["scale_source"]) == ("fp8_e5m2", "unit")
    assert got["outputs"][0]["prompt"] is None
    assert len(got["outputs"][0]["token_ids"]) == 12
