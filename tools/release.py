"""Make a release: sdist and wheel into dist/, tried in clean environments, with SHA256SUMS.

    make release
    python tools/release.py [--out dist] [--only-wheel]

Three environments are made, each with pip and torch alone. None sees the checkout, and PATH has
neither a compiler nor a tool of this machine, except in the second:

    wheel       the wheel; from the start of pip until a token of the demo model it takes so many
                seconds, without torch's download
    source      the sdist, compiled here: it has kernels too
    no-compiler the sdist where nothing compiles: the reference kernels run

The version is that of pyproject.toml, and CHANGELOG.md must have a part for it. arm64 is not tried:
its wheel is built and run by .github/workflows/wheels.yml, and the arm64 kernels by
tests/kernels/test_arm.py in emulation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 90.0  # from pip to the first token: how long a newcomer should wait at most
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PROMPT, ANSWER = "def main(", "master=None"  # what the demo model is known to answer
GREEDY = ("--max-tokens", "4", "--temperature", "0")


def version(root: Path = ROOT) -> str:
    """Return the version to release. Raises SystemExit if CHANGELOG.md has nothing about it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name: str = project["version"]
    if not notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), name):
        sys.exit(f"CHANGELOG.md has no part `## [{name}]`, the version of pyproject.toml")
    return name


def notes(changelog: str, name: str) -> str:
    """Return the part of a version; "" without one."""
    found = re.search(rf"^## \[{re.escape(name)}\].*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    return found[1].strip() if found else ""


def build(out: Path) -> tuple[Path, Path]:
    """Build sdist and wheel into an empty `out`, and return them."""
    from scikit_build_core.build import build_sdist

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.chdir(ROOT)
    sdist = out / build_sdist(str(out))
    subprocess.run([sys.executable, ROOT / "tools" / "build_wheel.py", out], check=True)
    [wheel] = out.glob("*.whl")
    return sdist, wheel


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
        if ANSWER not in (answer or ""):
            sys.exit(f"the demo model answered {answer!r} to {PROMPT!r}, not {ANSWER!r}")
        return taken

    def kernels(self) -> str:
        """Return the kernels that the installed package runs."""
        found: str = json.loads(self.run("freight", "env", "--json") or "")["kernels"]
        return found


def try_all(sdist: Path, wheel: Path, torch: str, only_wheel: bool) -> Mapping[str, float]:
    """Try both in clean environments, and return seconds to the first token of each."""
    found: dict[str, float] = {}
    cases = (("wheel", wheel, False), ("source", sdist, True), ("no-compiler", sdist, False))
    for name, package, has_tools in cases[:1] if only_wheel else cases:
        with tempfile.TemporaryDirectory(prefix=f"freight-{name}-") as folder:
            environment = Environment(Path(folder), torch, has_tools)
            found[name] = environment.first_token(package)
            kernels = environment.kernels()
            print(f"{name}: first token after {found[name]:.1f} s, kernels: {kernels}", flush=True)
            if (kernels == "reference") != (name == "no-compiler"):
                sys.exit(f"{name}: {kernels} are not the kernels that were expected")
    return found


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
    asked = parser.parse_args()
    name = version()
    sdist, wheel = build(asked.out.resolve())
    if f"-{name}" not in sdist.name or f"-{name}-" not in wheel.name:
        sys.exit(f"{sdist.name} and {wheel.name} are not of version {name}")
    seconds = try_all(sdist, wheel, asked.torch, asked.only_wheel)
    (asked.out / "SHA256SUMS").write_text(sums(asked.out), encoding="utf-8")
    print("arm64 was not tried here: .github/workflows/wheels.yml builds and runs its wheel")
    print(f"{asked.out}: {', '.join(path.name for path in sorted(asked.out.iterdir()))}")
    if seconds["wheel"] > MOST_SECONDS:
        sys.exit(
            f"the wheel took {seconds['wheel']:.0f} s to its first token, not {MOST_SECONDS:.0f}"
        )


if __name__ == "__main__":
    main()
