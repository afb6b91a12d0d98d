"""What a run makes of the hidden folders of living runs, of killed ones, and of those for other
outputs.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from freight.checkpoint.partial import LOCK, PATTERN, REPLACED, Partial, remove_abandoned
from freight.errors import ConfigError


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
def test_replaced_files_are_kept_where_the_output_is_not_complete(
    tmp_path: Path, complete: bool
) -> None:
    left = abandon(Partial.make(tmp_path))
    (left / REPLACED).mkdir()
    (left / REPLACED / "config.json").write_text("{}")
    if complete:  # the run was killed after the new files were in place
        (tmp_path / "config.json").write_text("{}")
        remove_abandoned(tmp_path)
    else:
        with pytest.raises(ConfigError, match="the files that it replaced are in"):
            remove_abandoned(tmp_path)
    assert left.exists() != complete


def test_an_output_has_no_lock_file(tmp_path: Path) -> None:
    partial = Partial.make(tmp_path / "out")
    (partial.path / "config.json").write_text("{}")
    partial.become(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(partial.descriptor)


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
