"""A checkpoint that is written: whatever fails, and at whichever call of the file system, there is
the old model or the new one, whole.

Every call of a run fails in turn: once, for good, by a signal, and as if the process were killed.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from freight.checkpoint import partial, writer
from freight.checkpoint.partial import PATTERN, exchange, remove_abandoned, restore
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.writer import CheckpointWriter
from freight.errors import FreightError

# What changes or reads the file system; `Path` calls these as well
_CALLS = (
    *("rename", "replace", "mkdir", "rmdir", "unlink", "open", "write", "fsync", "chown"),
    *("listdir", "scandir"),
)


class Fault(StrEnum):
    ONCE = "once"  # the call fails, and those after it do not
    FOR_GOOD = "for good"
    KILLED = "killed"  # nothing happens any more
    SIGNAL = "signal"


class KilledError(BaseException):
    """The end of the process, for the code that runs until then."""


class Injected:
    """Has the n-th call fail. `calls` counts, `reached` says whether there was an n-th."""

    def __init__(self, number: int, fault: Fault, code: int) -> None:
        self.number = number
        self.fault = fault
        self.code = code
        self.calls = 0

    @property
    def reached(self) -> bool:
        return self.calls >= self.number

    def before_call(self) -> None:
        self.calls += 1
        later = self.calls > self.number
        if not self.reached or (later and self.fault in (Fault.ONCE, Fault.SIGNAL)):
            return
        if self.fault is Fault.KILLED:
            raise KilledError
        if self.fault is Fault.SIGNAL:
            signal.raise_signal(signal.SIGINT)
            return
        raise OSError(self.code, os.strerror(self.code))

    def wrapping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.before_call()
            return function(*args, **options)

        return wrapped


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.txt").write_text("a")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write(out: Path, source: Path, value: float, overwrite: bool) -> None:
    """Two shards for the old model, one for the new one."""
    with CheckpointWriter(out, 100 if value == 1 else 1000, overwrite or None) as made:
        made.add({"a": torch.full((64,), value)})
        made.add({"b": torch.full((64,), value)})
        made.finish({"model_type": "llama", "value": value}, source)


def contents(out: Path) -> dict[str, bytes] | None:
    """Files of the model by name; None where there is none."""
    if not out.is_dir():
        return None
    hidden = (PATTERN.replace("*", ""), partial.LOCK)
    return {
        path.name: path.read_bytes()
        for path in out.iterdir()
        if not path.match(PATTERN) and path.name not in hidden
    }


@pytest.fixture
def models(tmp_path: Path, source: Path) -> tuple[dict[str, bytes] | None, dict[str, bytes] | None]:
    write(tmp_path / "old", source, 1.0, overwrite=False)
    write(tmp_path / "new", source, 2.0, overwrite=False)
    return contents(tmp_path / "old"), contents(tmp_path / "new")


def run(out: Path, source: Path, injected: Injected, overwrite: bool) -> BaseException | None:
    """Write the new model with the fault; return what was raised."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(os, name, injected.wrapping(getattr(os, name)))
        patch.setattr(builtins, "open", injected.wrapping(open))
        patch.setattr(shutil, "copyfile", injected.wrapping(shutil.copyfile))
        patch.setattr(writer, "save_file", injected.wrapping(writer.save_file))
        patch.setattr(partial, "exchange", injected.wrapping(partial.exchange))
        try:
            write(out, source, 2.0, overwrite)
        except (FreightError, OSError, KilledError, KeyboardInterrupt) as error:
            return error
    return None


def release_locks(out: Path) -> None:
    """As the end of the process does."""
    for entry in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{entry}"
        if os.path.islink(path) and partial.LOCK in os.readlink(path):
            os.close(int(entry))


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(partial, "exchange", refused)


def each_call(fault: Fault) -> Iterator[Injected]:
    """Yield a fault for each call, until a run had fewer."""
    number = 1
    while True:
        code = (errno.ENOSPC, errno.EPERM, errno.EIO)[number % 3]
        injected = Injected(number, fault, code)
        yield injected
        if not injected.reached:
            assert number > 30, "the calls are not seen"
            return
        number += 1


def check_each(tmp_path: Path, source: Path, models: Any, fault: Fault, state: str) -> set[str]:
    """Try each call on an output in `state`; return which model was found afterwards."""
    old, new = models
    seen = set()
    for injected in each_call(fault):
        place = tmp_path / f"at{injected.number}"
        place.mkdir()
        out = place / "out"
        before: dict[str, bytes] | None = None
        if state == "old model":
            shutil.copytree(tmp_path / "old", out)
            before = old
        elif state == "empty folder":
            out.mkdir()
            before = {}
        error = run(out, source, injected, overwrite=state == "old model")
        where = f"{fault}, call {injected.number}: {error!r}"
        release_locks(out)
        if fault in (Fault.ONCE, Fault.SIGNAL):
            assert contents(out) in (before, new), where
            assert error is not None or contents(out) == new, where
        restore(out)
        assert contents(out) in (before, new), where
        if contents(out):
            assert Checkpoint(out).names == {"a", "b"}, where
        seen.add("new" if contents(out) == new else "before")
        remove_abandoned(out)
        assert not list(place.rglob(".freight.*.partial")), where
        assert contents(out) in (before, new), where
        if injected.number % 5 == 0:
            write(out, source, 2.0, overwrite=bool(contents(out)))
            assert contents(out) == new, where
        shutil.rmtree(place)
    return seen


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize(
    "state", ["nothing", pytest.param("empty folder", marks=pytest.mark.slow), "old model"]
)
def test_every_call_may_fail(tmp_path: Path, source: Path, models: Any, fault: Fault, state: str):
    assert check_each(tmp_path, source, models, fault, state) == {"new", "before"}


@pytest.mark.usefixtures("without_exchange")
@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize(
    "state", [pytest.param("empty folder", marks=pytest.mark.slow), "old model"]
)
def test_every_call_may_fail_where_folders_are_not_exchanged(
    tmp_path: Path, source: Path, models: Any, fault: Fault, state: str
):
    assert check_each(tmp_path, source, models, fault, state) == {"new", "before"}


def test_folders_are_exchanged_here(tmp_path: Path) -> None:
    """Otherwise the first test would try what the second does."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    try:
        exchange(tmp_path / "a", tmp_path / "b")
    except OSError as error:
        pytest.skip(f"this file system does not exchange folders: {error}")
    assert (tmp_path / "a" / "b").exists()
