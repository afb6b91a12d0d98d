"""benchmarks/client_cost.py: its help, without the measurement."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/client_cost.py"


@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--rounds", 2)])
def test_options_do_not_start_the_measurement(
    option: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), option])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == status
    assert "usage: client_cost.py" in "".join(capsys.readouterr())
