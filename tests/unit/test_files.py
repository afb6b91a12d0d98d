"""Only regular files are read: a FIFO does not hang, a device does not fill memory, and sizes have
a bound.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.demo_chat import DEMO, demo_with_chat_template
from tests.forked_server import run_forked
from tests.refusals import assert_names, refuses

from freight.base.files import open_regular, outside, read_bytes, read_text, write_whole, writing
from freight.errors import CapacityError, ConfigError

MORE = 16 << 30  # bytes of address space: a device without end would not stop below it


def refused(*argv: str) -> str:
    """What `freight ARGV` says, in little memory, when it refuses."""
    done = run_forked(argv, more_memory=MORE)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        pytest.param("tokenizer.json", marks=pytest.mark.slow),
        pytest.param("tokenizer_config.json", marks=pytest.mark.slow),
    ],
)
def test_a_fifo_in_a_model_s_folder_does_not_hang(tmp_path: Path, name: str) -> None:
    folder = demo_with_chat_template(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert_names(refused("generate", str(folder), "--prompt", "x"), "FIFO")


@pytest.mark.parametrize(
    "argv",
    [
        "generate demo --prompt-file FILE",
        "generate demo --prompt x --json-schema FILE",
        "evaluate demo --data FILE",
        pytest.param("evaluate demo --data FILE --per-layer", marks=pytest.mark.slow),
        pytest.param("audit demo --data FILE", marks=pytest.mark.slow),
        pytest.param("quantize demo OUT --calibration-data FILE --kv-cache fp8", marks=pytest.mark.slow),
        "serve demo --chat-template FILE",
        pytest.param("serve demo --api-key-file FILE", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_options_read_regular_files_only(tmp_path: Path, argv: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for file in [fifo, Path("/dev/zero")]:
        words = argv.replace("FILE", str(file)).replace("OUT", str(tmp_path / "out"))
        error = refused(*words.split())
        assert "only regular files are read" in error, error


def test_bounds_are_stated(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(300 * 2**20)  # takes no room on disk
    for read, limit in (
        (read_bytes, "256 MiB"),
        (read_text, "256 MiB"),
        (lambda path: open_regular(path, 2**20), "1 MiB"),
    ):
        with refuses(OSError, f"more than {limit}"):
            read(large)  # type: ignore[operator]
    assert_names(refused("generate", "--prompt-file", str(large)), "more than 64 MiB")
    command = [sys.executable, "-m", "freight", "generate", "--prompt-file", "-"]
    given = {"input": "x" * (65 * 2**20), "capture_output": True, "text": True, "check": False}
    assert "more than 64 MiB" in subprocess.run(command, timeout=300, **given).stderr  # type: ignore[call-overload]
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


def test_a_regular_file_is_read_as_before(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfa\r\nb\xc3\xa9\n")
    assert read_text(file, "utf-8-sig") == file.read_text("utf-8-sig") == "a\nbé\n"
    assert read_text(file, "utf-8-sig", newline="\n") == "a\r\nbé\n"
    (tmp_path / "link").symlink_to(file)
    assert read_bytes(tmp_path / "link") == file.read_bytes()
    assert read_text(Path("/proc/self/comm"))  # a size of 0, and content
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
    with pytest.raises(UnicodeDecodeError):
        read_text(DEMO / "model.safetensors")


@pytest.mark.parametrize("name", ["open", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    path = tmp_path / "report.json"
    write_whole(path, "old")

    def fails(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        expected = CapacityError if code == errno.ENOSPC else ConfigError
        with (
            pytest.raises(expected, match=rf"--report.*{path}.*cannot be written"),
            writing("--report"),
        ):
            write_whole(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_writing_keeps_permissions_and_links_and_takes_long_names(tmp_path: Path) -> None:
    path, link = tmp_path / ("é" * 127), tmp_path / "link"
    link.symlink_to(path)
    write_whole(link, b"1", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    write_whole(link, "2")
    assert path.read_text() == "2"
    assert path.stat().st_mode & 0o777 == 0o600
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_lies_outside_of_a_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot / "sub", blobs, tmp_path / "home"):
        folder.mkdir(parents=True)
    for file in (blobs / "sha", tmp_path / "home" / "secret", snapshot / "own"):
        file.write_text("x")
    links = {
        "a": "../../blobs/sha",
        "b": "own",
        "c": str(tmp_path / "home" / "secret"),
        "d": "../../../home/secret",
        "e": "c",
        "f": "../../blobs/../../home/gone",
        "sub/g": "../own",
    }
    for name, target in links.items():
        (snapshot / name).symlink_to(target)
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        names = {name for name in ("own", *links) if outside(folder, folder / name) is not None}
        assert names == {"c", "d", "e", "f"}


def test_a_cache_whose_blobs_are_a_link_is_not_the_hub_s(tmp_path: Path) -> None:
    snapshot = tmp_path / "model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("x")
    (tmp_path / "model" / "blobs").symlink_to(tmp_path / "home")
    (snapshot / "vocab.txt").symlink_to("../../blobs/secret")
    assert outside(snapshot, snapshot / "vocab.txt") is not None
