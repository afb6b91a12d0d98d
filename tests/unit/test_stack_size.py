"""OMP_STACKSIZE: what is too small for the kernels' threads is refused before it ends the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.forked_server import run_forked
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.kernels.cpu import library
from freight.kernels.select import select_kernels
from freight.settings.device import check_threads


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("OMP_STACKSIZE", "16k", True),
        ("OMP_STACKSIZE", " 64 K ", True),
        ("OMP_STACKSIZE", "100", True),
        ("OMP_STACKSIZE", "200000B", True),
        ("GOMP_STACKSIZE", "255", True),
        ("OMP_STACKSIZE", "256K", False),
        ("OMP_STACKSIZE", "8M", False),
        ("OMP_STACKSIZE", "1g", False),
        ("OMP_STACKSIZE", "much", False),  # the runtime ignores it, and says so
        ("OMP_STACKSIZE", "", False),
    ],
)
def test_a_stack_on_which_the_kernels_overrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, refused: bool
) -> None:
    monkeypatch.setenv(name, value)
    if not refused:
        check_threads(1, 1)
        return
    with refuses(ConfigError, name, "256K"):
        check_threads(1, 1)


@pytest.mark.skipif(not library.runnable(), reason="no compiled kernels")
def test_the_compiled_kernels_are_not_loaded_with_such_a_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks for them: calibration and measurements take kernels without an engine."""
    library.load.cache_clear()
    monkeypatch.setenv("OMP_STACKSIZE", "16k")
    with refuses(ConfigError, "OMP_STACKSIZE=16k"):
        select_kernels("auto")
    monkeypatch.delenv("OMP_STACKSIZE")
    select_kernels("auto")


def test_calibration_refuses_such_a_stack_and_leaves_nothing(tmp_path: Path) -> None:
    argv = ["quantize", "demo", str(tmp_path / "out"), "--kv-cache", "fp8", "--num-samples", "1"]
    given = os.environ | {"OMP_STACKSIZE": "16k"}
    done = run_forked(argv, given)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: OMP_STACKSIZE=16k is too small")
    assert list(tmp_path.iterdir()) == []
