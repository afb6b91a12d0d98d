"""Make a release: sdist and wheel into dist/, tried in clean environments, with SHA256SUMS.

    make release
    make release ARM64=FOLDER     the wheel for arm64 as well
    python tools/release.py [--out dist] [--only-wheel] [--arm64 FOLDER]

Three environments are made, each with pip and torch alone. None sees the checkout, and PATH has
neither a compiler nor a tool of this machine, except in the second:

    wheel       the wheel; from the start of pip until a token of the demo model it takes so many
                seconds, without torch's download
    source      the sdist, compiled here: it has kernels too
    no-compiler the sdist where nothing compiles: the reference kernels run

FOLDER is the root of an arm64 Debian with python3 and no compiler. `mmdebstrap --variant=extract
--architectures=arm64 --include=python3,libstdc++6 bookworm FOLDER` makes one on any machine. The
wheel for arm64 is compiled by g++-aarch64-linux-gnu and run by qemu-user on that root, once for
each of its builds of the kernels, with the lowest versions of the dependencies (tests/lowest.txt):
that torch has no CUDA on arm64. uv installs them, since pip takes the markers of dependencies from
the machine that it runs on. Emulation says nothing about speed.

The version is that of pyproject.toml, and CHANGELOG.md must have a part for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 90.0  # from pip to the first token: how long a newcomer should wait at most
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PROMPT = "def main("  # what the demo model is known to answer
ANSWER = "master=None"
GREEDY = ("--max-tokens", "4", "--temperature", "0")
EMULATOR = "qemu-aarch64"
# By the build of the kernels that it should choose: QEMU's processor, and what Linux on it lists in
# /proc/cpuinfo. QEMU's user mode shows the file of the machine that emulates.
PROCESSORS = {
    "neon": ("cortex-a72", "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"),
    "neon_bf16": ("max", "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics asimddp bf16"),
}


def version(root: Path = ROOT) -> str:
    """Return the version to release. Raises SystemExit if CHANGELOG.md has nothing about it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name: str = project["version"]
    if not notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), name):
        sys.exit(f"CHANGELOG.md has no part `## [{name}]`, the version of pyproject.toml")
    return name


def notes(changelog: str, name: str) -> str:
    """Return the part of a version; "" without one."""
    match = re.search(rf"^## \[{re.escape(name)}\].*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    return match[1].strip() if match else ""


def build(out: Path, machines: Sequence[str]) -> tuple[Path, list[Path]]:
    """Build sdist and a wheel for each architecture into an empty `out`, and return them."""
    from scikit_build_core.build import build_sdist

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.chdir(ROOT)
    sdist = out / build_sdist(str(out))
    wheels: list[Path] = []
    for machine in machines:
        builder = str(ROOT / "tools" / "build_wheel.py")
        subprocess.run([sys.executable, builder, str(out), "--machine", machine], check=True)
        wheels += out.glob(f"*_{machine}.whl")
    return sdist, wheels


class Environment:
    """A virtual environment with pip and torch. `has_tools`: whether PATH is that of this process."""

    def __init__(self, folder: Path, torch: str, has_tools: bool = False) -> None:
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        kept = ("HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environ = {name: os.environ[name] for name in kept if name in os.environ} | settings
        path = os.environ["PATH"] if has_tools else os.fspath(folder / "nothing")
        self.environ["PATH"] = f"{self.bin}{os.pathsep}{path}"
        if not has_tools:  # in case a build looks beyond PATH
            self.environ |= {"CC": "/bin/false", "CXX": "/bin/false"}
        self._folder = folder
        wanted = f"torch=={torch}"
        quick = ("--retries", "0", "--timeout", "15", "--index-url", TORCH_INDEX)
        if self.run("pip", "install", "-q", *quick, wanted, check=False) is None:
            self.run("pip", "install", "-q", wanted)

    def run(self, *words: str | Path, check: bool = True) -> str | None:
        """Run a command of the environment; what it prints, or None if it failed and `check` is
        False.
        """
        command = [os.fspath(self.bin / words[0]), *map(str, words[1:])]
        quiet = None if check else subprocess.DEVNULL
        done = subprocess.run(
            command, cwd=self._folder, env=self.environ, stdout=-1, stderr=quiet, text=True
        )
        if done.returncode and check:
            sys.exit(f"{' '.join(command)} ended with status {done.returncode}")
        return None if done.returncode else done.stdout

    def first_token(self, package: Path) -> float:
        """Install `package` and generate. Returns seconds from the start of pip."""
        start = time.monotonic()
        self.run("pip", "install", "-q", package)
        answer = self.run("freight", "generate", "demo", "--prompt", PROMPT, *GREEDY)
        taken = time.monotonic() - start
        expect(answer)
        return taken

    def kernels(self) -> str:
        """Return the kernels that the installed package runs."""
        result: str = json.loads(self.run("freight", "env", "--json") or "")["kernels"]
        return result


class Emulated:
    """An arm64 system on this machine: the packages that `wheel` needs, and an emulator.

    root: a system with python3; its proc/cpuinfo is written
    """

    def __init__(self, root: Path, folder: Path, wheel: Path) -> None:
        lacking = [tool for tool in (EMULATOR, "uv") if shutil.which(tool) is None]
        pythons = sorted(root.glob("usr/bin/python3.*[0-9]"))
        lacking += [] if pythons else [f"{root}/usr/bin/python3.11"]
        if lacking:
            sys.exit(f"to try the wheel for arm64 there must be {', '.join(lacking)}")
        self._root = root
        self._folder = folder
        self._python = pythons[0]
        command = ["uv", "pip", "install", "-q", "--no-config", "--target", str(folder)]
        command += ["--python-version", self._python.name.removeprefix("python")]
        command += ["--python-platform", "aarch64-manylinux_2_35"]
        command += ["--constraints", str(ROOT / "tests" / "lowest.txt"), str(wheel)]
        subprocess.run(command, check=True)

    def run(self, build: str, *words: str) -> str:
        """Run a command of Freight on the processor whose build of the kernels is `build`."""
        processor, features = PROCESSORS[build]
        cpuinfo = self._root / "proc" / "cpuinfo"
        cpuinfo.parent.mkdir(exist_ok=True)
        cpuinfo.write_text(f"processor\t: 0\nFeatures\t: {features}\n", encoding="utf-8")
        started = [EMULATOR, "-cpu", processor, "-L", self._root, self._python, "-m", "freight"]
        environ = {"PATH": os.environ["PATH"], "HOME": os.fspath(self._folder)}
        environ["PYTHONPATH"] = os.fspath(self._folder)
        command = list(map(str, (*started, *words)))
        done = subprocess.run(command, cwd=self._folder, env=environ, stdout=-1, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with status {done.returncode}")
        return done.stdout


def try_arm64(root: Path, wheel: Path) -> None:
    """Generate with the demo model on each build of the wheel's kernels, in emulation."""
    with tempfile.TemporaryDirectory(prefix="freight-arm64-") as folder:
        system = Emulated(root, Path(folder), wheel)
        for build in PROCESSORS:
            kernels = json.loads(system.run(build, "env", "--json"))["kernels"]
            if kernels != f"cpu-{build}":
                sys.exit(f"arm64: {kernels} are not the kernels that were expected, cpu-{build}")
            expect(system.run(build, "generate", "demo", "--prompt", PROMPT, *GREEDY))
            print(f"arm64: the demo model answers in emulation, kernels: {kernels}", flush=True)


def expect(answer: str | None) -> None:
    """Raise SystemExit unless the demo model answered what it is known to answer."""
    if ANSWER not in (answer or ""):
        sys.exit(f"the demo model answered {answer!r} to {PROMPT!r}, not {ANSWER!r}")


def try_all(sdist: Path, wheel: Path, torch: str, only_wheel: bool) -> Mapping[str, float]:
    """Try both in clean environments, and return seconds to the first token of each."""
    results: dict[str, float] = {}
    cases = (("wheel", wheel, False), ("source", sdist, True), ("no-compiler", sdist, False))
    for name, package, has_tools in cases[:1] if only_wheel else cases:
        with tempfile.TemporaryDirectory(prefix=f"freight-{name}-") as folder:
            environment = Environment(Path(folder), torch, has_tools)
            results[name] = environment.first_token(package)
            kernels = environment.kernels()
            print(
                f"{name}: first token after {results[name]:.1f} s, kernels: {kernels}", flush=True
            )
            if (kernels == "reference") != (name == "no-compiler"):
                sys.exit(f"{name}: {kernels} are not the kernels that were expected")
    return results


def sums(folder: Path) -> str:
    """Return the lines of SHA256SUMS, as `sha256sum --check` reads them."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.glob("freight-*"))
    ]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a release, try it, and write checksums.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the release")
    parser.add_argument("--only-wheel", action="store_true", help="do not try the sdist")
    parser.add_argument("--torch", default="2.13.0", help="the version of torch to try with")
    parser.add_argument(
        "--arm64",
        type=Path,
        metavar="FOLDER",
        help="also build the wheel for arm64, and run it in emulation on the root FOLDER",
    )
    asked = parser.parse_args()
    name = version()
    arm64 = [] if asked.arm64 is None else ["aarch64"]
    sdist, [wheel, *crossed] = build(asked.out.resolve(), [platform.machine(), *arm64])
    for package in (sdist, wheel, *crossed):
        if f"freight-{name}" not in package.name:
            sys.exit(f"{package.name} is not of version {name}")
    seconds = try_all(sdist, wheel, asked.torch, asked.only_wheel)
    for package in crossed:
        try_arm64(asked.arm64.resolve(), package)
    (asked.out / "SHA256SUMS").write_text(sums(asked.out), encoding="utf-8")
    if not crossed:
        print("arm64 was not built: --arm64 does; .github/workflows/wheels.yml builds it natively")
    print(f"{asked.out}: {', '.join(path.name for path in sorted(asked.out.iterdir()))}")
    if seconds["wheel"] > MOST_SECONDS:
        sys.exit(
            f"the wheel took {seconds['wheel']:.0f} s to its first token, not {MOST_SECONDS:.0f}"
        )


if __name__ == "__main__":
    main()
