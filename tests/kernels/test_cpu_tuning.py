"""The prefetching of weights: measured once for a processor, and remembered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freight.kernels.cpu import library, tuning
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.weight import Weight

BUILDS = library.runnable()
FASTER = [(1.0, 0.9)] * tuning.PAIRS


class Recorder:
    """Stands in for a Library: keeps what was set."""

    build = "recorded"

    def __init__(self) -> None:
        self.settings: list[bool] = []

    def set_prefetch(self, non_temporal: bool) -> None:
        self.settings.append(non_temporal)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "freight" / "prefetch.json"


@pytest.mark.parametrize(
    ("pairs", "past"),
    [
        (FASTER, True),
        ([(1.0, 0.99)] * 11, False),  # a gain that is not worth it
        ([(0.9, 1.0)] * 11, False),
        ([(1.0, 0.8)] * 7 + [(1.0, 1.3)] * 4, False),  # noise
        ([(1.0, 0.8)] * 9 + [(1.0, 3.0)] * 2, True),
        ([], False),
    ],
)
def test_it_must_pay_clearly(pairs: list[tuple[float, float]], past: bool) -> None:
    assert tuning.past_the_caches(pairs) is past


def test_what_was_measured_is_remembered(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    measured = []
    monkeypatch.setattr(tuning, "measure", lambda library: measured.append(library) or FASTER)
    for count in (1, 2):
        recorder = Recorder()
        assert tuning.tune.__wrapped__(recorder) is True
        assert recorder.settings == [True]
        assert len(measured) == 1, count
    assert list(json.loads(path.read_text()).values()) == [True]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_build_that_ignores_the_setting_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr(tuning, "measure", lambda library: FASTER)
    recorder = Recorder()
    recorder.build = "amx"
    assert tuning.tune.__wrapped__(recorder) is None
    assert recorder.settings == []
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"x": 1}', b"\xff"])
def test_a_damaged_file_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, path: Path, text: str | bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr(tuning, "measure", lambda library: FASTER)
    recorder = Recorder()
    tuning.tune.__wrapped__(recorder)
    assert recorder.settings == [True]
    assert True in json.loads(path.read_text()).values()


def test_a_folder_that_cannot_be_written_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tuning, "measure", lambda library: FASTER)
    recorder = Recorder()
    tuning.tune.__wrapped__(recorder)
    assert recorder.settings == [True]


def test_a_user_without_a_home_directory_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container has it that runs under an arbitrary user id."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(
        "os.path.expanduser", lambda path: path
    )  # what it returns for an unknown user
    monkeypatch.setattr(tuning, "measure", lambda library: FASTER)
    recorder = Recorder()
    tuning.tune.__wrapped__(recorder)
    assert recorder.settings == [True]


@pytest.mark.parametrize("build", BUILDS)
def test_a_measurement_takes_turns(build: str) -> None:
    pairs = tuning.measure(library.load(build))
    assert len(pairs) == tuning.PAIRS
    assert all(second > 0 for pair in pairs for second in pair)


def test_only_a_large_weight_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []
    monkeypatch.setattr(tuning, "tune", tuned.append)
    kernels = CpuKernels(library.load(BUILDS[-1]))
    kernels.pack(Weight(torch.zeros(64, 64, dtype=torch.bfloat16)))
    assert not tuned
    kernels.pack(Weight(torch.zeros(1024, 2048, dtype=torch.bfloat16)))
    assert tuned == [kernels.library]
