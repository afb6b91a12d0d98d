"""The header of a GGUF file on the hub, by range requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_files import INT32, STRING, UINT16, Stored, Tensor, gguf_bytes
from tests.refusals import assert_names
from tests.stand_in_hub import StandInHub, stand_in_hub

pytestmark = pytest.mark.clock

CODE = """
import json, sys
from freight.checkpoint.gguf.hub import header_on_hub
from freight.errors import CheckpointError
answers = []
for file in sys.argv[1:]:
    try:
        header = header_on_hub("org/model", file)
    except CheckpointError as refusal:
        answers.append(str(refusal))
    else:
        tensors = [[t.name, str(t.file), t.offset, t.size] for t in header.tensors.values()]
        answers.append({"path": str(header.path), "keys": len(header.metadata), "tensors": tensors})
print(json.dumps([answers, "torch" in sys.modules]))
"""
MIB = 2**20
TENSOR = Tensor(0, (MIB,), bytes(4 * MIB))
TOKENS = Stored(STRING, ["x" * 100] * 2**14)  # 1.7 MiB


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    (tmp_path / "files").mkdir()
    with stand_in_hub("org/model", tmp_path / "files") as server:
        yield server


def ask(hub: StandInHub, *files: str, **environ: str) -> list[Any]:
    environ |= {"HF_HOME": str(hub.folder.parent / "home"), **hub.environ}
    answer = subprocess.run(
        [sys.executable, "-c", CODE, *files],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    answers, torch = json.loads(answer.stdout)
    assert not torch
    assert not any("\n" in line for line in answers if isinstance(line, str))
    return list(answers)


def test_as_much_is_fetched_as_the_header_needs(hub: StandInHub) -> None:
    (hub.folder / "small.gguf").write_bytes(gguf_bytes({"a": 1}, {"t": TENSOR}))
    (hub.folder / "large.gguf").write_bytes(gguf_bytes({"a": TOKENS}, {"t": TENSOR}))
    small, large = ask(hub, "small.gguf", "large.gguf")
    assert (small["path"], small["keys"]) == ("small.gguf", 1)
    assert small["tensors"] == [["t", "small.gguf", 96, 4 * MIB]]
    assert large["keys"] == 1
    assert hub.sent == [
        ("small.gguf", f"bytes=0-{MIB - 1}", MIB),
        ("large.gguf", f"bytes=0-{MIB - 1}", MIB),
        ("large.gguf", f"bytes={MIB}-{2 * MIB - 1}", MIB),
    ]


def test_parts_of_a_split(hub: StandInHub) -> None:
    names = [f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for index, name in enumerate(names):
        split = {
            "split.no": Stored(UINT16, index),
            "split.count": Stored(UINT16, 2),
            "split.tensors.count": Stored(INT32, 2),
        }
        (hub.folder / name).write_bytes(gguf_bytes(split, {f"t{index}": TENSOR}))
    first, second = ask(hub, *names)
    assert first == second
    assert [file for _, file, *_ in first["tensors"]] == names
    (hub.folder / names[0]).unlink()
    (missing,) = ask(hub, names[1])
    assert_names(missing, names[1], names[0])


def test_what_cannot_be_had(hub: StandInHub) -> None:
    (hub.folder / "cut.gguf").write_bytes(gguf_bytes({"a": 1}, {"t": TENSOR})[:-1])
    (hub.folder / "other.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    cut, other, none, up = ask(hub, "cut.gguf", "other.gguf", "none.gguf", "../up.gguf")
    assert_names(cut, "org/model:cut.gguf", "cut short")
    assert_names(other, "org/model:other.gguf", "Git LFS")
    assert_names(none, "org/model", "none.gguf")
    assert_names(up, "../up.gguf")
    (offline,) = ask(hub, "cut.gguf", HF_HUB_OFFLINE="1")
    assert_names(offline, "org/model:cut.gguf", "connection")


def test_a_hub_that_ignores_ranges(hub: StandInHub) -> None:
    hub.without_ranges.set()
    (hub.folder / "small.gguf").write_bytes(gguf_bytes({"a": 1}, {"t": TENSOR}))
    (hub.folder / "large.gguf").write_bytes(gguf_bytes({"a": TOKENS}, {"t": TENSOR}))
    small, large = ask(hub, "small.gguf", "large.gguf")
    assert small["keys"] == 1
    assert_names(large, "org/model:large.gguf", "range")
