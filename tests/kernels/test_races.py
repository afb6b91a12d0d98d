"""The kernels and the gathers of ranks under ThreadSanitizer, as `make sanitize-threads` runs them, with
ten times the gathers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GATHERS = 1_000_000


def has_sanitizer() -> bool:
    compiler = shutil.which("c++")
    if compiler is None or sys.platform != "linux" or not (ROOT / ".venv/bin/python").exists():
        return False
    command = [compiler, "-fsanitize=thread", "-x", "c++", "-", "-o", "/dev/null"]
    return not subprocess.run(
        command, input=b"int main() {}", capture_output=True, check=False
    ).returncode


@pytest.mark.slow  # compiles the kernels once more, and gathers for minutes
def test_a_million_gathers_have_no_race() -> None:
    if not has_sanitizer():
        pytest.skip("needs GCC with the runtime of ThreadSanitizer")
    command = [str(ROOT / "tools" / "sanitize.sh"), "thread", str(GATHERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert f"{GATHERS // 2} gathers of 2 ranks: no race" in done.stdout
    assert f"{GATHERS // 2} gathers of 3 ranks: no race" in done.stdout
