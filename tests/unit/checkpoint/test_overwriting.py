"""A checkpoint over an older one: only over what Freight wrote, whole or not at all, and nothing of
the old remains.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.refusals import refuses

from freight.checkpoint import partial
from freight.checkpoint.writer import CheckpointWriter, require_new
from freight.errors import CheckpointError, ConfigError


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two shards with an index, and a tokenizer."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("old")
    with CheckpointWriter(tmp_path / "out", shard_bytes=100) as writer:
        writer.add({"a": torch.full((64,), 1.0)})
        writer.add({"b": torch.full((64,), 1.0)})
        writer.finish({"model_type": "old"}, source)
    return tmp_path / "out"


def write_over(out: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with CheckpointWriter(out, overwrite=True) as writer:
        writer.add({"a": torch.full((64,), 2.0)})
        writer.finish({"model_type": "new"}, tmp_path / "empty")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_of_the_old_remains(out: Path, tmp_path: Path):
    write_over(out, tmp_path)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    expected = {"model_type": "new", "freight": {"checkpoint": 1}}
    assert json.loads((out / "config.json").read_text()) == expected
    assert load_file(out / "model.safetensors")["a"].eq(2).all()


def test_it_has_to_be_asked_for_and_the_error_says_how(out: Path):
    with refuses(ConfigError, "exists", "--overwrite"):
        require_new(out, overwrite=False)
    with refuses(ConfigError, "exists", "remove", "name another") as refused:
        require_new(out)  # of a command without that option
    assert "--overwrite" not in str(refused.value)


def foreign_file(out: Path) -> None:
    (out / "notes.txt").write_text("mine")


def foreign_folder(out: Path) -> None:
    (out / "checkpoint-500").mkdir()


def foreign_tensors(out: Path) -> None:
    save_file({"x": torch.zeros(1)}, out / "model-extra.safetensors", metadata={"format": "pt"})


def config_of_another_tool(out: Path) -> None:
    (out / "config.json").write_text('{"model_type": "llama"}')


def no_config(out: Path) -> None:
    (out / "config.json").unlink()


def linked_tokenizer(out: Path) -> None:
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").symlink_to(out.parent / "source" / "tokenizer.json")


@pytest.mark.parametrize(
    "change",
    [
        foreign_file,
        foreign_folder,
        foreign_tensors,
        config_of_another_tool,
        no_config,
        linked_tokenizer,
    ],
)
def test_a_folder_that_holds_anything_else_is_left_alone(out: Path, change: Callable[[Path], None]):
    change(out)
    before = sorted(path.name for path in out.iterdir())
    with (
        refuses(ConfigError, "only what Freight wrote"),
        CheckpointWriter(out, overwrite=True),
    ):
        pass
    assert sorted(path.name for path in out.iterdir()) == before


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        require_new(tmp_path / "out", overwrite=True)


def refuse_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(partial, "exchange", refused)


@pytest.mark.parametrize("moves", [False, True])
def test_a_file_that_cannot_be_moved_leaves_the_old_model(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
):
    """As `chattr +i` on it: the folder can be exchanged, and the file neither moved nor removed."""
    before, rename = contents(out), os.rename

    def limited(old: Path, new: Path) -> None:
        if Path(old).name == "tokenizer.json":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        rename(old, new)

    monkeypatch.setattr(os, "rename", limited)
    if moves:
        refuse_to_exchange(monkeypatch)
        with refuses(CheckpointError, "cannot be written", "as it was"):
            write_over(out, tmp_path)
        assert contents(out) == before
    else:
        write_over(out, tmp_path)
        assert json.loads((out / "config.json").read_text())["model_type"] == "new"


@pytest.mark.parametrize("step", ["config.json", "model.safetensors"])
def test_a_fault_at_the_end_brings_the_old_back(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
):
    before, rename = contents(out), os.rename
    refuse_to_exchange(monkeypatch)

    def limited(old: Path, new: Path) -> None:
        if Path(new) == out / step and Path(old).parent.name.endswith(".partial"):
            raise OSError(5, "no")
        rename(old, new)

    monkeypatch.setattr(os, "rename", limited)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_over(out, tmp_path)
    assert contents(out) == before


def test_what_appears_meanwhile_is_kept(out: Path, tmp_path: Path):
    with CheckpointWriter(out, overwrite=True) as writer:
        writer.add({"a": torch.zeros(1)})
        (out / "mine").write_text("mine")
        with pytest.raises(CheckpointError, match="filled by another program"):
            writer.finish({"model_type": "new"}, tmp_path)
    assert json.loads((out / "config.json").read_text())["model_type"] == "old"
    assert (out / "mine").read_text() == "mine"
