"""The features of a processor where there is no /proc: macOS on arm64."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from freight.device import cpu_features


@pytest.mark.parametrize(
    ("said", "features"), [("1\n", ("asimd", "bf16")), ("0\n", ("asimd",)), ("", ("asimd",)), (None, ("asimd",))]
)
def test_features_of_an_apple_processor(
    said: str | None, features: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no /proc. Nothing is said where sysctl does not know the name, or is not there."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command == ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
        if said is None:
            raise FileNotFoundError
        return subprocess.CompletedProcess(command, said == "", said)

    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("subprocess.run", run)
    assert cpu_features(tmp_path) == features
