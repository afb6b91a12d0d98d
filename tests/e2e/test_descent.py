"""No process outlives the one that started it, not even while it is stopped: SIGSTOP to one process of
a server and SIGKILL to another.

`make test` tries the two rounds in which nothing but the kernel can end the others. The slow test
tries every pair of server, engine, rank and renderer, and moments while the model loads, in as
many rounds as FREIGHT_TEST_KILLS says (40). Its figures are printed (`pytest -s`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import cycle, permutations
from pathlib import Path

import pytest
from tests.demo_chat import demo_with_chat_template
from tests.serving import ServeProcess, children_of, has_ended

from freight.base.descent import PARENT, from_lasting_thread, with_parent
from freight.kernels.cpu import library

pytestmark = [
    pytest.mark.clock,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent"),
]
needs_kernels = pytest.mark.skipif(
    not library.installed(), reason="ranks gather in the compiled kernels"
)
WITHIN = 5.0  # seconds
OPTIONS = ["-tp", "2", "--threads", "1", "--kv-cache-memory", "4MiB"]
ROLES = ("server", "engine", "rank", "renderer")


def roles_of(server: ServeProcess) -> dict[str, int]:
    """The processes of a server that are there, by what they do."""
    children = server.children()
    roles = {"server": server.process.pid}
    if "worker" in children:
        roles["engine"] = children["worker"]
        ranks = children_of(children["worker"])
        if ranks:
            roles["rank"] = ranks[0]
    if "render_process" in children:
        roles["renderer"] = children["render_process"]
    return roles


def below(pid: int) -> list[int]:
    """All processes that descend from this one."""
    children = children_of(pid)
    return [*children, *(other for child in children for other in below(child))]


def seconds_until_ended(pids: list[int]) -> float:
    """How long it takes until all of these are gone; WITHIN seconds at most, and then it fails."""
    begun = time.monotonic()
    while not all(map(has_ended, pids)):
        left = [pid for pid in pids if not has_ended(pid)]
        assert time.monotonic() - begun < WITHIN, [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left
        ]
        time.sleep(0.01)
    return time.monotonic() - begun


def stop_and_kill(server: ServeProcess, stopped: list[int], killed: int) -> float:
    """Stop some processes and kill another, and at last the server; return the longest time in which
    those below a killed one had ended.
    """
    everyone, theirs = below(server.process.pid), below(killed)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    seconds = seconds_until_ended([killed, *theirs])
    if not has_ended(server.process.pid):
        everyone = sorted({*everyone, *below(server.process.pid)})
        os.kill(server.process.pid, signal.SIGKILL)
    return max(seconds, seconds_until_ended([server.process.pid, *everyone]))


@needs_kernels
@pytest.mark.parametrize(
    ("stopped", "killed"), [(("engine", "rank", "renderer"), "server"), (("rank",), "engine")]
)
def test_stopped_processes_end_with_the_one_that_started_them(
    tmp_path: Path, stopped: tuple[str, ...], killed: str
) -> None:
    server = ServeProcess(demo_with_chat_template(tmp_path / "demo"), OPTIONS)
    try:
        server.wait_until_healthy()
        roles = roles_of(server)
        assert set(roles) == set(ROLES)
        stop_and_kill(server, [roles[role] for role in stopped], roles[killed])
    finally:
        server.close()


@pytest.mark.slow
@needs_kernels
def test_of_every_pair_one_is_stopped_and_one_is_killed(tmp_path: Path) -> None:
    """Two rounds of three when the server is ready, the third at any moment before."""
    model = demo_with_chat_template(tmp_path / "demo")
    rounds = int(os.environ.get("FREIGHT_TEST_KILLS", "40"))
    rng, loading, longest = random.Random(57), 1.0, 0.0
    pairs = cycle(permutations(ROLES, 2))
    for number in range(rounds):
        server = ServeProcess(model, OPTIONS)
        try:
            begun = time.monotonic()
            if number % 3 < 2:
                server.wait_until_healthy()
                loading = time.monotonic() - begun
                roles = roles_of(server)
                stopped, killed = next(pairs)
            else:
                _ = server.url
                time.sleep(rng.uniform(0.0, max(0.0, loading - (time.monotonic() - begun))))
                roles = roles_of(server)
                stopped, killed = rng.sample(sorted(roles), 2) if len(roles) > 1 else ["server"] * 2
            seconds = stop_and_kill(server, [roles[stopped]], roles[killed])
        finally:
            server.close()
        longest = max(longest, seconds)
        print(f"{number + 1}: {stopped} stopped, {killed} killed: {seconds:.2f} s", flush=True)
    print(f"{rounds} rounds, nothing left; the longest took {longest:.2f} s")


CHILD = """
import os, sys, time
from freight.base.descent import end_with_parent
end_with_parent()
print(os.getpid(), "FREIGHT_PARENT" in os.environ, flush=True)
time.sleep(60)
"""


def start_child(environ: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def test_a_child_outlives_the_thread_that_asked_for_it() -> None:
    """The kernel counts the end of the starting thread as that of the parent."""
    started: list[subprocess.Popen[str]] = []
    environ = with_parent(os.environ)
    thread = threading.Thread(
        target=lambda: started.append(from_lasting_thread(lambda: start_child(environ)))
    )
    thread.start()
    thread.join()
    with started[0] as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"{child.pid} False\n"
        time.sleep(0.2)
        assert child.poll() is None
        child.kill()


def test_a_child_whose_parent_has_ended_before_it_asked_ends_itself() -> None:
    with start_child({**os.environ, PARENT: "1"}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == ""
    assert child.returncode == 1


def test_what_cannot_be_started_is_said_to_the_caller() -> None:
    with pytest.raises(FileNotFoundError):
        from_lasting_thread(lambda: subprocess.Popen(["/no/such/program"]))


def test_a_fork_starts_children_of_its_own() -> None:
    """Its parent's lasting thread is not in it."""
    from_lasting_thread(os.getpid)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        os._exit(0 if from_lasting_thread(os.getpid) == os.getpid() else 1)
    assert os.waitpid(pid, 0)[1] == 0
