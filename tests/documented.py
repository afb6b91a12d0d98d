"""Pages that are run: the blocks of a Markdown file in order, in one shell, and what each printed.

Blocks with the language `sh` are run by bash, those with `python` by this interpreter. They share a
folder, and those of the shell their variables, as for a reader who types them. A block of `text`
right behind one is what it printed. Figures in it are compared as "some number", because they
depend on the machine; `…` stands for any text within a line, and a line `…` for any lines.

A page names the ports 8000 and 8080. Here they are free ports of this machine.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.environment import without_options

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"#+|\d[\d,.]*")
LANGUAGES = ("sh", "python")
PREAMBLE = """set -eu
finish() {
  status=$?
  started=$(jobs -p)
  [ -z "$started" ] || kill $started 2>/dev/null || true
  wait || true
  exit $status
}
trap finish EXIT
"""


@dataclass(frozen=True)
class Step:
    """A block that is run; `shown` is what the page says that it prints, None where it does not."""

    line: int
    language: str
    code: str
    shown: str | None


def steps(page: Path) -> list[Step]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for at, fence in enumerate(fences):
        if fence[1] not in LANGUAGES:
            continue
        following = fences[at + 1] if at + 1 < len(fences) else None
        between = text[fence.end() : following.start()] if following else ""
        is_shown = following is not None and following[1] == "text" and not between.strip()
        shown = following[2] if following is not None and is_shown else None
        found.append(Step(text.count("\n", 0, fence.start()) + 2, fence[1], fence[2], shown))
    return found


def script(blocks: list[Step], folder: Path, ports: dict[str, str]) -> str:
    """All blocks as one script of bash. What block n prints goes to folder/n.out."""
    parts = [PREAMBLE]
    for number, step in enumerate(blocks):
        code = step.code
        for written, used in ports.items():
            code = re.sub(rf"\b{written}\b", used, code)
        if step.language == "python":
            (folder / f"{number}.py").write_text(code)
            code = f"python '{folder}/{number}.py'\n"
        parts.append(f"exec >'{folder}/{number}.out'\n{code}")
    return "".join(parts)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run_steps(blocks: list[Step], folder: Path, seconds: float = 600) -> list[str]:
    """What each block printed. The commands run in `folder`/work.

    Raises AssertionError with what the shell said if a command fails.
    """
    work, printed = folder / "work", folder / "printed"
    work.mkdir()
    printed.mkdir()
    ports = {"8000": free_port(), "8080": free_port()}
    environ = without_options()
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FREIGHT_PORT": ports["8000"],
        "FREIGHT_KV_CACHE_MEMORY": "64MiB",
        "TERM": "dumb",
    }
    command = ["bash", "-c", script(blocks, printed, ports)]
    with (folder / "errors").open("w+") as errors:
        shell = subprocess.Popen(
            command, cwd=work, env=environ, stderr=errors, start_new_session=True
        )
        try:
            status = shell.wait(seconds)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
        errors.seek(0)
        said = errors.read()
    outputs = sorted(printed.glob("*.out"), key=lambda path: int(path.stem))
    assert status == 0, f"block {len(outputs)} ended with status {status}: {said[-3000:]}"
    return [path.read_text() for path in outputs]


def is_as_shown(printed: str, shown: str, exact: bool = False) -> bool:
    """Whether a block printed these lines, up to the width of columns and, unless `exact`, numbers."""
    pattern = ""
    for line in shown.strip().splitlines():
        parts = [re.escape(part) for part in alike(line, exact).split("…")]
        pattern += r"(.*\n)*" if line.strip() == "…" else ".*".join(parts) + "\n"
    lines = [alike(line, exact) + "\n" for line in printed.strip().splitlines()]
    return re.fullmatch(pattern, "".join(lines)) is not None


def alike(line: str, exact: bool) -> str:
    """A line with single blanks, and `#` for each number or bar."""
    return " ".join((line if exact else NUMBER.sub("#", line)).split())
