"""Run the steps of the Dockerfile without Docker, then query the server of its entry point.

    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python-is-python3 bookworm BASE
    sudo python tools/try_dockerfile.py BASE [--bind PATH …]

Needs root, Linux, and a folder BASE with a Debian and a `python`, which replaces the image after
FROM. Each stage is a copy of it. RUN, ENV, USER and ENTRYPOINT act in a chroot; COPY takes what
.dockerignore leaves. The container gets its own network, in which only root may bind port 80, as
with `docker run --net host`, and a /data that is owned by root, with root's files in it. Its server
must run without root's rights, pass its HEALTHCHECK, answer POST /generate and own /data. Not
tested: the base image itself, layers, published ports, TORCH=cuda and TORCH=rocm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN = {
    "FROM",
    "ARG",
    "RUN",
    "COPY",
    "WORKDIR",
    "ENV",
    "USER",
    "ENTRYPOINT",
    "HEALTHCHECK",
    "EXPOSE",
    "VOLUME",
}
READY_SECONDS = 300.0
ARGUMENTS = ("--model-id", "demo", "--kv-cache-dtype", "fp8_e5m2")
ASK = """
import json, urllib.request as r
body = json.dumps({"inputs": "def main(", "parameters": {"max_new_tokens": 8}}).encode()
request = r.Request("http://127.0.0.1/generate", body, {"Content-Type": "application/json"})
print(r.urlopen(request, timeout=60).read().decode())
"""


@dataclass
class Stage:
    """A container's root folder, and the settings of its instructions."""

    root: Path
    env: dict[str, str]
    args: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    health: str = ""

    def command(self, argv: Sequence[str], more: dict[str, str]) -> list[str]:
        """Return a command that runs `argv` in this root, as this user, with exactly this
        environment and `more`.
        """
        env = [f"{name}={value}" for name, value in (self.env | self.args | more).items()]
        inside = ["env", "-i", "-C", self.folder, *env, *argv]
        identity = [] if self.user == "root" else [f"--userspec={self.user}"]
        return ["chroot", *identity, str(self.root), *inside]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, rest of its line), with comments dropped and continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", "", lines).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            if word not in KNOWN:
                raise SystemExit(
                    f"{word} is an instruction of the Dockerfile that this script does not know"
                )
            yield word, rest.strip()


def expand(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda result: values.get(result[1], ""), text)


def in_context(folder: Path, lines: Sequence[str]) -> list[Path]:
    """Return the files below `folder` that a .dockerignore of these lines leaves, as paths from it.

    Knows the patterns in use: `*`, then `!PATH` for exceptions, then `**/NAME`.
    """
    sent = [folder / line[1:] for line in lines if line.startswith("!")]
    files: list[Path] = []
    for path in sent:
        files += [path] if path.is_file() else path.rglob("*")
    never = [line[3:] for line in lines if line.startswith("**/")]

    def is_left(path: Path) -> bool:
        return not any(Path(part).match(name) for part in path.parts for name in never)

    paths = [file.relative_to(folder) for file in files if file.is_file()]
    return [path for path in paths if is_left(path)]


def copy(rest: str, stages: dict[str, Stage], stage: Stage, context: Path) -> None:
    options = [word for word in shlex.split(rest) if word.startswith("--from=")]
    *origins, target = [word for word in shlex.split(rest) if not word.startswith("--")]
    source = stages[options[0][7:]].root if options else context
    if target.startswith("/"):
        end = stage.root / target[1:]
    else:
        end = stage.root / stage.folder.lstrip("/") / target
    for origin in origins:
        path = source / origin.lstrip("/")
        if path.is_dir():
            shutil.copytree(path, end, symlinks=True, dirs_exist_ok=True)
        else:
            to = end / path.name if target.endswith("/") else end
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)


def build(dockerfile: str, base: Path, work: Path, context: Path, binds: Sequence[Path]) -> Stage:
    """Run every instruction; the last stage."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name == "SSL_CERT_FILE"
    }
    stages: dict[str, Stage] = {}
    stage = Stage(work, {})
    for word, rest in instructions(dockerfile):
        began = time.monotonic()
        if word == "FROM":
            name = rest.split(" AS ")[1] if " AS " in rest else "final"
            path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            stage = stages[name] = Stage(work / name, {"PATH": path})
            subprocess.run(["cp", "-ax", str(base), str(stage.root)], check=True)
            shutil.copy("/etc/resolv.conf", stage.root / "etc/resolv.conf")
            for target in (Path("/proc"), Path("/dev"), *binds):
                inside = stage.root / str(target).lstrip("/")
                inside.mkdir(parents=True, exist_ok=True)
                how = ["--bind", "-o", "ro"] if target in binds else ["--rbind"]
                subprocess.run(["mount", *how, str(target), str(inside)], check=True)
        elif word == "ARG":
            name, _, value = rest.partition("=")
            stage.args[name] = value  # an ARG before the first FROM goes to an unused stage
        elif word == "RUN":
            subprocess.run(stage.command(["/bin/sh", "-c", rest], passed), check=True)
        elif word == "COPY":
            copy(rest, stages, stage, context)
        elif word == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "ENV":
            stage.env |= dict(pair.split("=", 1) for pair in shlex.split(expand(rest, stage.env)))
        elif word == "USER":
            stage.user = rest
        elif word == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif word == "HEALTHCHECK":
            stage.health = rest.split("CMD ", 1)[1]
        print(f"{time.monotonic() - began:7.1f} s  {word} {rest[:90]}", flush=True)
    stage.args = {}
    return stage


def try_server(stage: Stage) -> None:
    """Start the entry point in a network of its own; its HEALTHCHECK must pass, and /generate
    answer.
    """
    blobs = stage.root / "data" / "models--x" / "blobs"  # as a container that ran as root leaves it
    blobs.mkdir(parents=True)
    for path in (stage.root / "data", blobs.parent, blobs):
        os.chown(path, 0, 0)
        path.chmod(0o755)
    ports = "ip link set lo up && echo 1024 >/proc/sys/net/ipv4/ip_unprivileged_port_start"
    container = shlex.join(stage.command([*stage.entrypoint, *ARGUMENTS], {}))
    server = subprocess.Popen(["unshare", "--net", "sh", "-c", f"{ports} && exec {container}"])
    inside = ["nsenter", f"--net=/proc/{server.pid}/ns/net"]
    try:
        began = time.monotonic()
        check = [*inside, *stage.command(["/bin/sh", "-c", stage.health], {})]
        while (
            answer := subprocess.run(check, capture_output=True, text=True, check=False)
        ).returncode:
            if server.poll() is not None or time.monotonic() - began > READY_SECONDS:
                raise SystemExit(f"HEALTHCHECK fails: {answer.stderr.strip()[-300:]}")
            time.sleep(1)
        owner = int(
            re.findall(
                r"^Uid:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text(), re.MULTILINE
            )[0]
        )
        print(
            f"{time.monotonic() - began:7.1f} s  until HEALTHCHECK passed; the server's uid is {owner}",
            flush=True,
        )
        assert owner != 0, "the server runs as root"
        assert blobs.stat().st_uid == owner, "/data was not taken over"
        subprocess.run([*inside, *stage.command(["python", "-c", ASK], {})], check=True)
        server.send_signal(signal.SIGTERM)
        print(f"after SIGTERM the exit status is {server.wait(60)}")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, help="a root folder for FROM")
    parser.add_argument(
        "--bind", type=Path, action="append", default=[], help="a folder that pip needs; read only"
    )
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Run again in a namespace, so that its mounts are gone before the folder is removed
    if options.work is None:
        work = tempfile.mkdtemp(prefix="freight-image-")
        Path(work).chmod(0o755)  # for the container's user
        again = [sys.executable, __file__, *sys.argv[1:], "--work", work]
        status = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", *again], check=False
        ).returncode
        subprocess.run(["rm", "-rf", "--one-file-system", work], check=True)
        sys.exit(status)
    context = options.work / "context"
    for path in in_context(ROOT, (ROOT / ".dockerignore").read_text().splitlines()):
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, context / path)
    dockerfile = (ROOT / "Dockerfile").read_text()
    try_server(build(dockerfile, options.base.resolve(), options.work, context, options.bind))


if __name__ == "__main__":
    main()
