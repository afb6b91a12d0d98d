"""`freight bench`: what is refused before anything is loaded, and what a program reads from --json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from freight.lab.bench import timing
from freight.model.config.presets import PRESETS

TINY = PRESETS["llama-1b"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["latency", "--random-weights", "llama-2b"], "'llama-2b' is not a file"),
        (["latency", "some/model", "--random-weights", "llama-1b"], "give one of the two"),
        (["throughput", "--random-weights", "llama-1b", "--kv-cache-dtype", "int4"], "int4"),
        (["kernels", "--matrix", "14336"], "--matrix '14336': write it as 14336x4096"),
        (["kernels", "--matrix", "0x4"], "write it as 14336x4096"),
        (["kernels", "--after", "3", "--device", "cpu"], "--after is for --device cuda"),
        (["kernels", "--only", "softmax"], "--only 'softmax' is unknown"),
        (["kernels", "--only", "torch.sdpa", "--device", "cpu"], "--only 'torch.sdpa' is unknown"),
        (
            ["kernels", "--seconds", "0"],
            "--seconds 0: give a number of seconds for each row, above 0",
        ),
        (["kernels", "--seconds", "inf"], "--seconds inf"),
        (["kernels", "--device", "gpu"], "choose auto, cpu or cuda"),
        (["kernels", "--kernels", "fast"], "--kernels 'fast' is unknown"),
    ],
)
def test_refused(freight, arguments, said):
    answer = freight("bench", *arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert said in answer.err


@pytest.mark.parametrize(
    ("verb", "keys"),
    [
        (
            "latency",
            "prefill_tokens_per_second decode_step_ms decode_bandwidth_fraction overhead_fraction",
        ),
        ("throughput", "requests_per_second batch_occupancy cache_occupancy steps"),
    ],
)
def test_one_object_for_a_program_a_table_for_people(freight, tiny, verb, keys):
    sizes = ["--input-len", "8", "--output-len", "4", "--kv-cache-memory", "4MiB"]
    options = ["--random-weights", tiny, *sizes]
    count = ["--batch-size", "2"] if verb == "latency" else ["--num-requests", "3"]
    answer = freight(
        "bench", verb, *options, *count, "--repeats", "1", "--json", "--quantization", "fp8"
    )
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    common = "decode_tokens_per_second peak_rss_bytes kernels threads spread"
    assert {*keys.split(), *common.split()} <= set(found)
    assert found["weight_dtype"] == "fp8_e4m3fn"
    table = freight("bench", verb, *options, *count, "--repeats", "1")
    assert table.code == 0, table.err
    assert all(key in table.out for key in keys.split())
    assert "…" not in table.out  # a figure cut short is lost
    assert re.search(r"peak_rss_bytes +\| [\d.]+ [GM]B +\|", table.out)
    assert "| kv_cache.bytes_per_token" in table.out


def test_kernels_prints_one_object_per_row_and_takes_threads(freight, tiny, monkeypatch):
    monkeypatch.setattr(timing, "CACHE_SIZE", 2**20)
    monkeypatch.setattr(timing, "last_level_cache", lambda root: None)
    before = torch.get_num_threads()
    sizes = ["--matrix", "32x16", "--rows", "2", "--only", "linear", "--seconds", "0.001"]
    options = ["--random-weights", tiny, *sizes]
    answer = freight("bench", "kernels", *options, "--threads", "1", "--json")
    assert answer.code == 0, answer.err
    rows = [json.loads(line) for line in answer.out.splitlines()]
    assert rows[0]["shape"] == [2, 32, 16]
    eight = {f"{format}, activations dynamic" for format in ("fp8_e4m3fn", "int8")}
    four = {"int4, groups of 128", "e2m1, groups of 16"}
    in_int8 = {f"{name}, inputs in int8" for name in four}
    assert {row["format"] for row in rows} == {*four, *in_int8, *eight, "bfloat16"}
    assert all({"kernel", "median_us", "bandwidth_fraction"} <= set(row) for row in rows)
    assert {row["threads"] for row in rows} == {1}
    table = freight("bench", "kernels", *options)
    assert table.out.splitlines()[0].split()[:2] == ["kernel", "format"]
    assert len(table.out.splitlines()) == 1 + len(rows)
    assert torch.get_num_threads() == before
