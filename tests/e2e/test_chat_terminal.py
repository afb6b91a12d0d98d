"""`freight chat` at a terminal: Ctrl-C, commands, and a terminal that asks for no colours."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Sequence

import pytest
from tests.demo_chat import demo_with_chat_template
from tests.refusals import assert_names

pytestmark = pytest.mark.clock

PROMPT = "> "


class Terminal:
    """A command on a terminal of its own; stdout and stderr both come here, as a person sees them."""

    def __init__(
        self, *argv: str, program: Sequence[str] = ("-m", "freight"), **environ: str
    ) -> None:
        plain = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")
        }
        self.seen = ""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable,
                [sys.executable, *program, *argv],
                plain | {"TERM": "xterm"} | environ,
            )

    def until(self, text: str, seconds: float = 300) -> str:
        """What comes up to `text`."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.file], [], [], 0.2)[0]:
                self.seen += os.read(self.file, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self, text: str) -> None:
        """Ctrl-C, and `text`. readline loses a signal between two of its waits: a person presses
        once more.
        """
        for _ in range(3):
            time.sleep(0.2)
            self.type("\x03")
            try:
                self.until(text, 60)
            except AssertionError:
                continue
            return
        raise AssertionError(self.seen)

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def end(self, again: str = "") -> int:
        """The exit status; `again` is typed where nothing comes for long."""
        try:
            for _ in range(5):
                while select.select([self.file], [], [], 60)[0] and (
                    data := os.read(self.file, 4096)
                ):
                    self.seen += data.decode()
                self.type(again)
            os.kill(self.pid, signal.SIGKILL)
        except OSError:  # the other end is closed
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(demo_with_chat_template(tmp_path_factory.mktemp("chat")))


def chat(model: str, *argv: str, **environ: str) -> Terminal:
    found = Terminal(
        "chat", model, "--temperature", "0", "--kv-cache-memory", "64MiB", *argv, **environ
    )
    found.until("/help says more.")
    found.until(PROMPT)
    return found


def answer(terminal: Terminal, message: str) -> str:
    terminal.type(message + "\n")
    return terminal.until("\n" + PROMPT)


def test_ctrl_c_at_the_prompt_clears_the_line_and_keeps_the_conversation(model: str) -> None:
    terminal = chat(model, "--max-tokens", "4")
    try_commands(terminal)
    answer(terminal, "/clear")
    first = answer(terminal, "def f(x):")
    second = answer(terminal, "def f(x):")
    answer(terminal, "/clear")
    assert answer(terminal, "def f(x):") == first
    terminal.type("half a li")
    terminal.until("half a li")  # its echo: the prompt reads now
    terminal.interrupt("Ctrl-C again, Ctrl-D or /exit ends")
    terminal.until(PROMPT)
    assert answer(terminal, "def f(x):") == second  # as the second message of the same conversation
    terminal.interrupt(PROMPT)
    time.sleep(0.2)
    terminal.type("\x03")
    assert terminal.end(again="\x03") == 0


def test_ctrl_c_stops_an_answer_and_not_the_conversation(model: str) -> None:
    terminal = chat(model, "--max-tokens", "900", "--ignore-eos")
    terminal.type("def f(x):\n")
    terminal.until("def f(x):\r\n")  # the echo
    while not terminal.seen.strip():  # the answer has begun
        terminal.seen += os.read(terminal.file, 64).decode()
    terminal.type("\x03")
    terminal.until(PROMPT)
    terminal.type("/exit\n")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    "end", [pytest.param(text, marks=pytest.mark.slow) for text in ("/exit\n", "/quit \n", "\x04")]
)
def test_commands(model: str, end: str) -> None:
    terminal = chat(model, "--max-tokens", "2")
    try_commands(terminal)
    terminal.type(end)
    assert terminal.end() == 0


def try_commands(terminal: Terminal) -> None:
    shown = answer(terminal, "/help")
    assert all(name in shown for name in ("/clear", "/exit", "/quit", "//", "Ctrl-C"))
    assert_names(answer(terminal, "/clean it"), "/clean", "did you mean /clear")
    assert "did you mean" not in answer(terminal, "//clean it")


# A model that is never read to its end, so that the signal comes within the start.
ENDLESS = """
import time
from freight.__main__ import main
from freight.model import open as opening
def load(*_):
    print("begun", flush=True)
    time.sleep(600)
opening.OpenModel.load = load
main()
"""


def test_sigint_during_the_start_is_130(model: str) -> None:
    terminal = Terminal("chat", model, "--kv-cache-memory", "64MiB", program=("-c", ENDLESS))
    terminal.until("begun")
    os.kill(terminal.pid, signal.SIGINT)
    assert terminal.end() == 130


STYLE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(
    ("environ", "styled"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
@pytest.mark.parametrize(
    "line", ["generate --prompt x --kv-cache-dtype fp9", "plan demo --memory 1GiB"]
)
def test_one_place_decides_about_styles(line: str, environ: dict[str, str], styled: bool) -> None:
    terminal = Terminal(*line.split(), **environ)
    terminal.end()
    assert bool(STYLE.search(terminal.seen)) == styled, terminal.seen
