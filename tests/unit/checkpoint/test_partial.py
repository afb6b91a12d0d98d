"""What a run makes of the hidden folders of living runs, of killed ones, and of those for other
outputs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest
from tests.refusals import refuses

from freight.checkpoint import partial as module
from freight.checkpoint.partial import (
    JOURNAL,
    LOCK,
    PATTERN,
    REPLACED,
    Partial,
    exchange,
    remove_abandoned,
    restore,
    signals_deferred,
)
from freight.errors import CheckpointError, ConfigError


def abandon(partial: Partial) -> Path:
    """As its process leaves the folder that is killed: the system closes the lock."""
    os.close(partial.descriptor)
    return partial.path


def test_the_folder_of_a_killed_run_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    left, living = abandon(Partial.make(tmp_path / "out")), Partial.make(tmp_path / "other")
    remove_abandoned(tmp_path / "out")  # `other` is written in the same place
    assert not left.exists()
    assert living.path.exists()
    with pytest.raises(ConfigError, match="another run writes"):
        remove_abandoned(tmp_path / "other")
    living.remove()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_removed_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = abandon(Partial.make(tmp_path / "out"))

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    remove_abandoned(tmp_path / "out")
    assert left.exists()
    Partial.make(tmp_path / "out").remove()  # writing goes on without a lock
    assert list(tmp_path.iterdir()) == [left]


@pytest.mark.parametrize("complete", [False, True])
def test_replaced_files_without_a_journal_are_kept_where_the_output_is_not_complete(
    tmp_path: Path, complete: bool
) -> None:
    """As version 0.2 leaves them when it is killed."""
    left = tmp_path / ".freight.00000000.partial"
    (left / REPLACED).mkdir(parents=True)
    (left / REPLACED / "config.json").write_text("{}")
    if complete:  # the run was killed after the new files were in place
        (tmp_path / "config.json").write_text("{}")
        remove_abandoned(tmp_path)
    else:
        with refuses(ConfigError, "replaced", left.name):
            remove_abandoned(tmp_path)
    assert left.exists() != complete


def test_an_output_has_no_lock_file(tmp_path: Path) -> None:
    partial = Partial.make(tmp_path / "out")
    descriptor = partial.descriptor
    (partial.path / "config.json").write_text("{}")
    partial.replace(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    partial.remove()  # again: nothing is left to remove


def test_a_folder_that_another_run_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            (found,) = tmp_path.glob(PATTERN)
            removed.append(found)
            (found / LOCK).unlink()
            found.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    partial = Partial.make(tmp_path / "out")
    assert partial.path.exists()
    assert partial.path != removed[0]
    partial.remove()


def test_the_hidden_folder_is_beside_an_output_that_can_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    beside = Partial.make(out)
    assert beside.path.parent == tmp_path
    beside.remove()
    monkeypatch.chdir(out)  # the shell would be in a removed folder
    inside = Partial.make(Path())
    assert inside.path.parent == out
    inside.remove()
    assert list(out.iterdir()) == []


def test_a_replaced_folder_keeps_its_permissions(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o2750)
    out.chmod(0o2750)
    partial = Partial.make(out)
    (partial.path / "config.json").write_text("{}")
    partial.replace(out)
    assert out.stat().st_mode & 0o7777 == 0o2750


def test_what_cannot_be_exchanged_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="missing") as failed:
        exchange(tmp_path, tmp_path / "missing")
    assert failed.value.errno == errno.ENOENT
    monkeypatch.setattr(module, "_renameat2", lambda: None)
    with pytest.raises(OSError, match="not implemented"):
        exchange(tmp_path, tmp_path)


def test_signals_wait_and_then_come(tmp_path: Path) -> None:
    done = []

    def interrupted() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_amid_replacing_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    partial = Partial.make(out)
    (partial.path / "config.json").write_text("new")

    def exchanged(hidden: Path, output: Path) -> None:
        exchange(hidden, output)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "exchange", exchanged)
    with pytest.raises(KeyboardInterrupt):
        partial.replace(out)
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert list(tmp_path.iterdir()) == [out]


def name_of(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


@pytest.mark.parametrize("moves", [False, True])
def test_all_is_on_the_disk_before_anything_old_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def exchanged(hidden: Path, output: Path) -> None:
        if moves:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        exchange(hidden, output)
        steps.append("exchange")

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        name = name_of(descriptor)
        steps.append("fsync journal" if name.startswith(JOURNAL) else f"fsync {name}")

    def renamed(old: Path, new: Path) -> None:
        rename(old, new)
        if Path(old).name in ("config.json", "weights"):
            steps.append(f"rename {Path(old).name}")

    partial = Partial.make(out)
    hidden = partial.path.name
    (partial.path / "config.json").write_text("new")
    (partial.path / "weights").write_text("new")
    monkeypatch.setattr(module, "exchange", exchanged)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    partial.replace(out)
    files = {f"fsync {name}" for name in ("config.json", "weights", LOCK)}
    assert set(steps[:3]) == files
    parent = f"fsync {tmp_path.name}"
    if moves:
        journal = ["fsync journal", f"fsync {hidden}"]
        old, new = ["rename config.json"], ["rename weights", "rename config.json"]
        assert steps[3:] == [f"fsync {hidden}", *journal, *old, *new, "fsync out", parent]
    else:
        assert steps[3:] == [f"fsync {hidden}", "exchange", parent]


def interrupted_in(out: Path, journal: str, replaced: Path | None = None) -> Path:
    """A folder as a killed run leaves it, and nothing else in `out`."""
    hidden = out / ".freight.00000000.partial"
    hidden.mkdir(parents=True)
    (hidden / "config.json").write_text("new")
    (hidden / JOURNAL).write_text(journal)
    if replaced is None:
        (hidden / REPLACED).mkdir()
        (hidden / REPLACED / "config.json").write_text("old")
    else:
        (hidden / REPLACED).symlink_to(replaced)
    return hidden


def test_old_files_are_brought_back_by_who_reads(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted_in(out, '["config.json", "model.safetensors"]')
    (out / "model.safetensors").write_text("new")
    restore(out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {"config.json": "old"}


def test_config_is_brought_back_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that all is there: bringing back may be interrupted as well."""
    out = tmp_path / "out"
    hidden = interrupted_in(out, '["config.json"]')
    (hidden / REPLACED / "a").write_text("old")
    (hidden / REPLACED / "z").write_text("old")
    rename = os.rename

    def refused(old: Path, new: Path) -> None:
        if Path(old).name == "z":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        with pytest.raises(CheckpointError, match="killed midway"):
            restore(out)
    assert not (out / "config.json").exists()
    restore(out)
    assert sorted(path.name for path in out.iterdir()) == ["a", "config.json", "z"]


@pytest.mark.parametrize("journal", ["[", '["../secret"]', '[".."]', "{}", "[1]"])
def test_a_journal_moves_nothing_from_elsewhere(tmp_path: Path, journal: str) -> None:
    """A model's folder may be anybody's."""
    (tmp_path / "secret").write_text("secret")
    hidden = interrupted_in(tmp_path / "out", journal)
    with pytest.raises(CheckpointError, match=r"killed midway.*freight inspect"):
        restore(tmp_path / "out")
    assert (tmp_path / "secret").exists()
    assert (hidden / REPLACED / "config.json").exists()


def test_old_files_are_not_taken_from_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("secret")
    interrupted_in(tmp_path / "out", "[]", tmp_path / "home")
    with pytest.raises(CheckpointError, match="killed midway"):
        restore(tmp_path / "out")
    assert (tmp_path / "home" / "secret").exists()


def test_files_are_not_moved_by_a_linked_folder(tmp_path: Path) -> None:
    elsewhere = interrupted_in(tmp_path / "home", '["model.safetensors"]')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("new")
    (tmp_path / "out" / elsewhere.name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="killed midway"):
        restore(tmp_path / "out")
    assert (elsewhere / REPLACED / "config.json").exists()
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_removing_keeps_what_the_output_lacks(tmp_path: Path) -> None:
    hidden = interrupted_in(tmp_path / "out", "[]")
    partial = Partial(hidden, os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT))
    partial.remove()
    restore(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_a_living_run_beside_an_output_says_nothing_of_others(tmp_path: Path) -> None:
    living = Partial.make(tmp_path / "other")
    remove_abandoned(tmp_path / "out")
    living.remove()


def test_a_lock_behind_a_link_is_not_opened(tmp_path: Path) -> None:
    hidden = tmp_path / ".freight.00000000.partial"
    hidden.mkdir()
    (hidden / LOCK).symlink_to(tmp_path / "made")
    remove_abandoned(tmp_path / "out")
    assert not (tmp_path / "made").exists()


def test_files_of_a_living_run_are_not_brought_back(tmp_path: Path) -> None:
    hidden = interrupted_in(tmp_path / "out", "[]")
    descriptor = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another run writes"):
        restore(tmp_path / "out")
    os.close(descriptor)
