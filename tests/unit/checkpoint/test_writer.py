"""CheckpointWriter: the whole checkpoint or none, whatever interrupts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.refusals import refuses

from freight.checkpoint import partial
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.writer import CheckpointWriter, require_new, require_space
from freight.errors import CapacityError, CheckpointError, ConfigError

CONFIG = {"model_type": "llama"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "chat_template.jinja",
    ):
        (folder / name).write_text(name)
    for name in (
        "generation_config.json",
        "LICENSE.txt",
        "model.safetensors",
        "pytorch_model.bin",
        "notes.txt",
    ):
        (folder / name).write_text("{}")
    return folder


def tensor(value: int, count: int = 64) -> torch.Tensor:
    return torch.full((count,), float(value))


def test_one_shard_when_all_fits(tmp_path: Path, source: Path):
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add({"a": tensor(1), "b": tensor(2)})
        writer.add({"c": tensor(3).bfloat16()})
        writer.finish(CONFIG, source, {"more.json": b"{}"})
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {
        "config.json", "model.safetensors", "more.json", "tokenizer.json", "tokenizer_config.json", "merges.txt",
        "chat_template.jinja", "generation_config.json", "LICENSE.txt",
    }  # fmt: skip
    opened = Checkpoint(out)
    assert opened.config == CONFIG | {"freight": {"checkpoint": 1}}
    assert torch.equal(opened.take("c", (64,)), tensor(3).bfloat16())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    mode = stat.S_IMODE((out / "config.json").stat().st_mode)
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == mode


def test_shards_have_an_index_and_keep_what_came_together(tmp_path: Path, source: Path):
    with CheckpointWriter(tmp_path / "out", shard_bytes=600) as writer:
        for index in range(4):
            writer.add({f"{index}.weight": tensor(index), f"{index}.scale": tensor(index, 1)})
        writer.finish(CONFIG, source)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 65 * 4
    shards = index["weight_map"]
    assert {shards[f"{i}.weight"] for i in range(4)} == {
        f"model-{i:05}-of-00002.safetensors" for i in (1, 2)
    }
    assert all(shards[f"{i}.weight"] == shards[f"{i}.scale"] for i in range(4))
    opened = Checkpoint(tmp_path / "out")
    assert [float(opened.take(f"{i}.weight", (64,))[0]) for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_interruption_leaves_nothing(
    tmp_path: Path, source: Path, interruption: type[BaseException]
):
    def interrupted() -> None:
        with CheckpointWriter(tmp_path / "out", shard_bytes=100) as writer:
            writer.add({"a": tensor(1)})
            writer.add({"b": tensor(2)})
            raise interruption

    with pytest.raises(interruption):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_loads_before_all_is_there(tmp_path: Path):
    with CheckpointWriter(tmp_path / "out", shard_bytes=100) as writer:
        writer.add({"a": tensor(1)})
        writer.add({"b": tensor(2)})
        (hidden,) = tmp_path.iterdir()
        assert list(hidden.glob("*.safetensors"))
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            Checkpoint(hidden)


def test_leaving_without_finish_undoes_it(tmp_path: Path):
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add({"a": tensor(1)})
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_taken(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(ConfigError, match=f"{name} exists"), CheckpointWriter(tmp_path / name):
            pass
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    with pytest.raises(ConfigError, match="no parent folder"):
        require_new(tmp_path / "no" / "such")


def write_two_shards(out: Path, source: Path) -> None:
    with CheckpointWriter(out, shard_bytes=100) as writer:
        writer.add({"a": tensor(1)})
        writer.add({"b": tensor(2)})
        writer.finish(CONFIG, source)


def refuse_to_rename(monkeypatch: pytest.MonkeyPatch, refused: Path, number: int) -> None:
    rename = os.rename

    def limited(old: Path, new: Path) -> None:
        if Path(new) == refused:
            raise OSError(number, os.strerror(number))
        rename(old, new)

    monkeypatch.setattr(os, "rename", limited)


def refuse_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(partial, "exchange", refused)


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_empty_folder_is_filled(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
):
    if not exchanges:
        refuse_to_exchange(monkeypatch)
    out = tmp_path / "out"
    out.mkdir()
    refuse_to_rename(monkeypatch, out, errno.EBUSY)  # as for a mount point
    write_two_shards(out, source)
    assert Checkpoint(out).names == {"a", "b"}
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path, source: Path):
    (tmp_path / "elsewhere").mkdir()
    out = tmp_path / "out"
    out.symlink_to("elsewhere", target_is_directory=True)
    write_two_shards(out, source)
    assert out.is_symlink()
    assert Checkpoint(tmp_path / "elsewhere").names == {"a", "b"}


def test_an_empty_folder_is_empty_again_after_a_fault(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    out.mkdir()
    refuse_to_exchange(monkeypatch)
    refuse_to_rename(monkeypatch, out / "config.json", errno.EIO)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_two_shards(out, source)
    assert list(out.iterdir()) == []


def test_an_empty_folder_that_is_filled_meanwhile_keeps_what_it_has(tmp_path: Path, source: Path):
    out = tmp_path / "out"
    out.mkdir()

    def late() -> None:
        with CheckpointWriter(out) as writer:
            writer.add({"a": tensor(1)})
            (out / "model.safetensors").write_text("mine")
            writer.finish(CONFIG, source)

    with pytest.raises(CheckpointError, match="filled by another program"):
        late()
    assert [path.read_text() for path in out.iterdir()] == ["mine"]


def test_the_longest_name_is_written_and_a_longer_one_refused_at_once(tmp_path: Path, source: Path):
    write_two_shards(tmp_path / ("x" * 255), source)
    assert Checkpoint(tmp_path / ("x" * 255)).names == {"a", "b"}
    with refuses(ConfigError, "cannot be written", "name another"):
        require_new(tmp_path / ("x" * 256))


def test_a_folder_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(path: Path, *args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", fails)
    with refuses(ConfigError, "out cannot be written", os.strerror(errno.EROFS)):
        require_new(tmp_path / "out")


def test_the_disk_is_that_of_the_folder_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []
    usage = shutil.disk_usage

    def noted(path: Path) -> object:
        asked.append(path)
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", noted)
    (tmp_path / "out").mkdir()
    require_space(tmp_path / "out", 1)
    require_space(tmp_path / "new", 1)
    assert asked == [tmp_path / "out", tmp_path]


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, source: Path):
    def late() -> None:
        with CheckpointWriter(tmp_path / "out") as writer:
            writer.add({"a": tensor(1)})
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "mine").write_text("mine")
            writer.finish(CONFIG, source)

    with pytest.raises(CheckpointError, match="filled by another program"):
        late()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_disk_without_room_is_seen_first(tmp_path: Path):
    with pytest.raises(CapacityError, match="make room"):
        require_space(tmp_path / "out", 2**62)
    require_space(tmp_path / "out", 1)


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from freight.checkpoint.writer import CheckpointWriter
from freight.errors import CapacityError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # writes beyond 4 KiB of a file fail, as on a full disk
folder = Path(sys.argv[1])
try:
    with CheckpointWriter(folder / "out") as writer:
        writer.add({"a": torch.zeros(4096)})
        writer.finish({}, folder)
except CapacityError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_nothing(tmp_path: Path):
    answer = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "is full" in answer.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_fault_of_the_last_step_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def fails(*paths: object) -> None:
        raise OSError(number, os.strerror(number))

    def write() -> None:
        with CheckpointWriter(tmp_path / "out") as writer:
            writer.add({"a": tensor(1)})
            monkeypatch.setattr("shutil.copyfile", fails)
            writer.finish(CONFIG, source)

    expected = CapacityError if number == errno.ENOSPC else CheckpointError
    with pytest.raises(
        expected, match="is full" if number == errno.ENOSPC else "cannot be written"
    ):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
