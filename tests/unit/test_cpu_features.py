"""The features of a processor: which are listed, and where there is no /proc (macOS on arm64)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from freight.settings.device import cpu_features


@pytest.mark.parametrize(
    ("said", "features"),
    [("1\n", ("asimd", "bf16")), ("0\n", ("asimd",)), ("", ("asimd",)), (None, ("asimd",))],
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


def test_features_that_no_kernel_uses_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: fpu avx2 amx_fp16 avx512_fp16\n")
    assert cpu_features(tmp_path) == ("avx2",)
