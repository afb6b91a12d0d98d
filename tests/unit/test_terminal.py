"""When text is styled and bars move: by NO_COLOR, TERM, and what stdout and stderr are."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from freight import terminal

PLAIN = [
    ({}, False),
    ({"NO_COLOR": "1"}, True),
    ({"NO_COLOR": ""}, False),  # as https://no-color.org has it
    ({"TERM": "dumb"}, True),
    ({"TERM": "DUMB"}, True),
    ({"TERM": "unknown"}, True),
]


@pytest.mark.parametrize(("environ", "plain"), PLAIN)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_terminal_gets_styles_unless_it_asks_for_none(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], plain: bool, stream: str
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environ).items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as shown, os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr(sys, stream, screen)
        terminal.write("text", err=stream == "stderr", fg="red")
        screen.flush()
        assert shown.read(100) == (b"text\r\n" if plain else b"\x1b[31mtext\x1b[0m\r\n")
        console = terminal.console(stderr=stream == "stderr")
        assert console.is_terminal
        assert (console.color_system is None) == plain
        moves = environ.get("TERM", "xterm") == "xterm" and stream == "stderr"
        assert terminal.bars().disable != moves


def test_a_pipe_gets_neither(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal.write("text", fg="red")
    terminal.write("text", err=True, newline=False, dim=True)
    assert capsys.readouterr() == ("text\n", "text")
    assert terminal.bars().disable
