"""What the system refuses — a file, a disk, memory — is one line on stderr, from whatever place in a
command it comes, and never a traceback.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.demo_chat import DEMO
from tests.refusals import refuses

from freight.checkpoint.convert import convert
from freight.cli import main as cli
from freight.errors import CheckpointError, ConfigError
from freight.quantizer.quantize import quantize


def error(code: int, *names: str | None) -> OSError:
    return OSError(code, os.strerror(code), *names)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (error(errno.EIO, "report.json"), "report.json"),
        (error(errno.EACCES, "a\x1b[31m"), r"a\x1b[31m"),
        (error(errno.ENOSPC, "cache.bin"), "make room"),
        (error(errno.EMFILE), "Too many open files"),
        (OSError("several\nlines"), "several lines"),
        (OSError(), "OSError"),
        (MemoryError(), "not enough memory"),
        (MemoryError("Unable to allocate 3 GiB"), "3 GiB"),
    ],
)
def test_a_command_ends_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    refusal: BaseException,
    words: str,
) -> None:
    def refused() -> None:
        raise refusal

    for name in [name for name in os.environ if name.startswith("FREIGHT_")]:
        monkeypatch.delenv(name)  # a warning of it would come first
    monkeypatch.setattr(sys, "argv", ["freight", "env"])
    monkeypatch.setattr(cli, "app", refused)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert words in said


def quantized(out: Path) -> None:
    quantize("demo", out, kv_cache="none")


def converted(out: Path) -> None:
    folder = out.with_name("pickled")
    shutil.copytree(DEMO, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    convert(str(folder), out)


@pytest.mark.parametrize("write", [quantized, converted])
def test_a_disk_that_does_not_say_its_size_refuses_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    def refused(path: Path) -> None:
        raise error(errno.EIO)

    monkeypatch.setattr(shutil, "disk_usage", refused)
    with refuses(ConfigError, "out cannot be written", "Input/output error"):
        write(tmp_path / "out")


def test_a_process_that_does_not_start_is_a_fault_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of everything between the first file and the last one."""

    def refused(*arguments: object, **options: object) -> None:
        raise error(errno.EAGAIN)

    monkeypatch.setattr(subprocess, "Popen", refused)
    with refuses(CheckpointError, "out cannot be written", "temporarily unavailable"):
        converted(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pickled"]
