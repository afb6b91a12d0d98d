"""Every verb that loads a model says at start, on stderr, how large its weights are and how long
they took to load.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.serving import ServeProcess

from freight.checkpoint.reader import resolve_model

LINE = re.compile(r"loading weights took (\S+) GB and (\d+\.\d\d) s")
SMALL = ["--kv-cache-memory", "8MiB", "--max-model-len", "64"]
BENCH = ["--input-len", "4", "--output-len", "3", "--repeats", "1", "--kv-cache-memory", "8MiB"]


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "--prompt", "a", "--max-tokens", "1", *SMALL],
        ["evaluate", "--data", "TEXT", "--no-noise", "--caches", "unit", "--no-speed", *SMALL],
        ["bench", "latency", *BENCH],
        ["bench", "throughput", "--num-requests", "1", *BENCH],
    ],
)
def test_the_line(
    freight: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str]
):
    for name in (None, "freight"):  # no logging is set up, as in a program that has just begun
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    (tmp_path / "text").write_text("def main():\n    return 1\n")
    answer = freight(*(str(tmp_path / "text") if part == "TEXT" else part for part in argv))
    assert answer.code == 0, answer.err
    [(size, _)] = LINE.findall(answer.err)
    stored = load_file(resolve_model("demo") / "model.safetensors")
    total, head = (
        sum(tensor.nbytes for tensor in stored.values()),
        stored["model.embed_tokens.weight"].nbytes,
    )
    # the head is the embedding, which some kernels keep packed for their products as well
    assert total / 1e9 * 0.99 < float(size) < (total + head) / 1e9 * 1.01
    assert not LINE.search(answer.out)


def test_a_server_says_it_too():
    server = ServeProcess("demo", SMALL, forked=True)
    try:
        server.wait_until_healthy()
        assert server.stop() == 0
        assert LINE.search(server.said), server.said
    finally:
        server.close()
