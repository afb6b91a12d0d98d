"""The wheel: what must be in it, and that it runs where there is neither a compiler nor a checkout."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import build_wheel
import pytest
from tests.refusals import assert_names, refuses

ROOT = Path(__file__).parents[2]
WHEEL = "freight-0.1.0-py3-none-linux_x86_64.whl"
BUILDS = ("amx", "avx512", "avx512_vnni", "avx_vnni", "avx2", "portable")
WHOLE = [
    *(f"freight/kernels/cpu/freight_{name}.so" for name in BUILDS),
    *build_wheel.REQUIRED,
    "freight/llm.py",
    "freight-0.1.0.dist-info/licenses/LICENSE",
]


def wheel_of(folder: Path, names: list[str], name: str = WHEEL) -> Path:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for member in names:
            wheel.writestr(member, b"")
    return folder / name


def test_a_wheel_has_all_of_the_package_and_no_more(tmp_path: Path) -> None:
    def faults(names: list[str]) -> list[str]:
        return build_wheel.faults(wheel_of(tmp_path, names), ["freight/llm.py"], "x86_64")

    assert faults(WHOLE) == []
    for lost in WHOLE:
        lacking = [name for name in WHOLE if name != lost]
        assert faults(lacking) == [f"lacks {lost.rpartition('licenses/')[2]}"]
    for extra in ("tests/test_x.py", "freight/csrc/linear.cpp", "csrc/freight.h", "setup.py"):
        assert faults([*WHOLE, extra]) == [f"has {extra}"]


def test_a_wheel_without_kernels_is_refused(tmp_path: Path) -> None:
    """What scikit-build-core makes where there is no compiler."""
    names = [name for name in WHOLE if not name.endswith(".so")]
    wheel = wheel_of(tmp_path, names, "freight-0.1.0-py3-none-any.whl")
    faults = build_wheel.faults(wheel, ["freight/llm.py"], "x86_64")
    assert len(faults) == len(BUILDS) + 1
    assert_names(faults[-1], "py3-none-PLATFORM")


def test_a_wheel_for_arm64_has_the_kernels_of_arm64(tmp_path: Path) -> None:
    names = [f"freight/kernels/cpu/freight_{name}.so" for name in ("neon", "neon_bf16")]
    names += [*build_wheel.REQUIRED, WHOLE[-1]]
    wheel = wheel_of(tmp_path, names, "freight-0.1.0-py3-none-linux_aarch64.whl")
    assert build_wheel.faults(wheel, [], "aarch64") == []
    assert build_wheel.faults(wheel, [], "x86_64")[0] == "lacks freight/kernels/cpu/freight_amx.so"


def test_another_architecture_needs_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_wheel.shutil, "which", lambda _: None)
    with refuses(SystemExit, "aarch64-linux-gnu-g++", "apt install g++-aarch64"):
        build_wheel.cross_settings("aarch64")


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() == "aarch64" or shutil.which("aarch64-linux-gnu-g++") is None,
    reason="needs aarch64-linux-gnu-g++ on another machine",
)
def test_the_wheel_for_arm64_is_of_arm64(tmp_path: Path) -> None:
    """tools/release.py runs it in emulation; other wheels in the folder stay."""
    other = tmp_path / "freight-0.1.0-py3-none-linux_x86_64.whl"
    other.touch()
    command = [sys.executable, ROOT / "tools" / "build_wheel.py", tmp_path, "--machine", "aarch64"]
    subprocess.run(command, check=True, timeout=1800)
    (wheel,) = tmp_path.glob("freight-*-py3-none-manylinux_*_aarch64.whl")
    assert other.exists()
    with zipfile.ZipFile(wheel) as opened:
        kernels = [name for name in opened.namelist() if name.endswith(".so")]
        machines = {opened.read(name)[18] for name in kernels}  # e_machine of the ELF header
    assert len(kernels) == 2
    assert machines == {183}  # EM_AARCH64


@pytest.mark.slow
def test_the_wheel_runs_the_demo_without_compiler_or_checkout(tmp_path: Path) -> None:
    """Installed into a fresh virtual environment, which borrows the dependencies of this one."""
    run = {"check": True, "stdout": subprocess.PIPE, "text": True, "timeout": 1800}
    subprocess.run([sys.executable, ROOT / "tools" / "build_wheel.py", tmp_path], **run)
    (wheel,) = tmp_path.glob("*.whl")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], **run)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], **run)
    (packages,) = venv.glob("lib/python*/site-packages")
    borrowed = sysconfig.get_paths()["purelib"]
    # a path alone: this environment's own freight is not found by it
    (packages / "borrowed.pth").write_text(borrowed)
    alone = run | {"cwd": tmp_path, "env": {"PATH": str(venv / "bin"), "HOME": str(tmp_path)}}
    program = "import freight; print(freight.__file__)"
    where = subprocess.run([venv / "bin" / "python", "-c", program], **alone)
    assert Path(where.stdout.strip()).is_relative_to(packages)
    command = venv / "bin" / "freight"
    facts = json.loads(subprocess.run([command, "env", "--json"], **alone).stdout)
    assert facts["kernels"].startswith("cpu"), facts["kernels_because"]
    demo = subprocess.run([command, "demo", "--max-tokens", "4", "--json"], **alone)
    found = json.loads(demo.stdout)
    assert len(found["caches"]) == 3
    assert all(len(texts) == 3 and all(texts) for texts in found["completions"].values())
