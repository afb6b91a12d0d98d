"""tools/release.py: what it asks of CHANGELOG.md, its checksums, and its clean environments."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import release
from tests.refusals import refuses

from freight.settings.cpu_builds import ARM64_BUILDS
from freight.settings.device import cpu_features

ROOT = release.ROOT
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-01-01

News.

### Added

- a

## [0.1.10]

Old.
"""


def test_this_version_has_notes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(release.notes(text, release.version())) > 500


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.2.0", "News.\n\n### Added\n\n- a"), ("0.1.10", "Old."), ("0.1.1", ""), ("0.2", "")],
)
def test_the_notes_are_those_of_the_version(version: str, says: str) -> None:
    assert release.notes(CHANGELOG, version) == says


def test_a_version_without_notes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    with pytest.raises(SystemExit, match=r"no part `## \[0\.3\.0\]`"):
        release.version(tmp_path)


def test_sums_are_what_sha256sum_checks(tmp_path: Path) -> None:
    for name in ("freight-0.2.0.tar.gz", "freight-0.2.0-py3-none-any.whl"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "SHA256SUMS").write_text(release.sums(tmp_path))
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK") == 2
    (tmp_path / "freight-0.2.0.tar.gz").write_bytes(b"other")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_an_environment_sees_no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by PATH nor by what this process was told of compilers and of Freight."""
    monkeypatch.setattr(release.Environment, "run", lambda *_, **__: "")  # no torch
    monkeypatch.setenv("CXX", "/usr/bin/g++")
    monkeypatch.setenv("FREIGHT_MODEL_ID", "other")
    with monkeypatch.context() as patched:  # nor is the environment made
        patched.setattr(release.subprocess, "run", lambda *_, **__: None)
        found = release.Environment(tmp_path / "env", "2.13.0").environ
    assert (found["CC"], found["CXX"]) == ("/bin/false", "/bin/false")
    assert "FREIGHT_MODEL_ID" not in found
    which = subprocess.run(["/bin/sh", "-c", "command -v cc c++ g++ cmake"], env=found, stdout=-1)
    assert which.stdout == b""
    assert found["PATH"].startswith(str(tmp_path / "env" / "bin"))


def test_the_workflow_s_notes_are_the_same(tmp_path: Path) -> None:
    """release.yml takes them with awk, since it runs before anything is installed."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    [program] = re.findall(r"awk -v version=\S+ '(.*)' CHANGELOG", workflow)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    command = ["awk", "-v", "version=0.2.0", program, "CHANGELOG.md"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == release.notes(CHANGELOG, "0.2.0")


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        (["cpu-amx", "cpu-avx2", "reference"], ""),
        (["reference", "cpu-avx2", "reference"], "wheel: reference are not the kernels"),
        (["cpu-amx", "reference", "reference"], "source: reference are not the kernels"),
        (["cpu-amx", "cpu-avx2", "cpu-amx"], "no-compiler: cpu-amx are not the kernels"),
    ],
)
def test_each_environment_must_have_its_kernels(
    kernels: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(kernels)
    monkeypatch.setattr(release.Environment, "__init__", lambda *_: None)
    monkeypatch.setattr(release.Environment, "first_token", lambda *_: 1.0)
    monkeypatch.setattr(release.Environment, "kernels", lambda _: next(left))
    tried = partial(release.try_all, Path("s.tar.gz"), Path("w.whl"), "2.13.0", False)
    if says:
        with pytest.raises(SystemExit, match=says):
            tried()
    else:
        assert tried() == {"wheel": 1.0, "source": 1.0, "no-compiler": 1.0}


def test_arm64_needs_an_emulator_and_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release.shutil, "which", lambda _: None)
    with refuses(SystemExit, "qemu-aarch64, uv", f"{tmp_path}/usr/bin/python3.11"):
        release.Emulated(tmp_path, tmp_path / "packages", Path("w.whl"))


class Pretended(release.Emulated):
    """An emulator that is a shell script, and chooses kernels by the file that it is shown."""

    def __init__(self, root: Path, folder: Path, wheel: Path) -> None:
        self._root, self._folder, self._python = root, folder, Path("python3.11")

    def run(self, build: str, *words: str) -> str:
        processor, *_, verb = super().run(build, words[0]).split()
        features = cpu_features(self._root)
        chosen = next(name for name, needs in ARM64_BUILDS.items() if needs <= set(features))
        assert processor == release.PROCESSORS[build][0]
        return f'{{"kernels": "cpu-{chosen}"}}' if verb == "env" else release.ANSWER


def test_each_build_for_arm64_runs_on_a_processor_that_chooses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "emulator"
    script.write_text("#!/bin/sh\nshift\necho $*\n")
    script.chmod(0o755)
    monkeypatch.setattr(release, "EMULATOR", str(script))
    monkeypatch.setattr(release, "Emulated", Pretended)
    release.try_arm64(tmp_path, Path("w.whl"))
    printed = capsys.readouterr().out
    assert re.findall(r"kernels: cpu-(\w+)", printed) == ["neon", "neon_bf16"]
    assert set(release.PROCESSORS) == set(ARM64_BUILDS)
    monkeypatch.setattr(release, "PROCESSORS", {"neon_bf16": release.PROCESSORS["neon"]})
    with refuses(SystemExit, "cpu-neon", "cpu-neon_bf16"):
        release.try_arm64(tmp_path, Path("w.whl"))
