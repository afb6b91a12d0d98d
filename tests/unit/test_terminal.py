"""When text is styled and bars move: by NO_COLOR, TERM, and what stdout and stderr are."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from freight.base import terminal

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


def test_the_rest_is_estimated_from_what_is_done() -> None:
    assert terminal.time_left(30, 0, 8) == "after 0:00:30"
    assert terminal.time_left(30, 1, 8) == "after 0:00:30, about 0:03:30 left"
    assert terminal.time_left(7200, 2, 3) == "after 2:00:00, about 1:00:00 left"
    assert terminal.time_left(5, 8, 8).endswith("about 0:00:00 left")


class Clock:
    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal, "time", made)
    return made


def test_without_a_terminal_lines_say_how_far_a_long_task_is(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress("measuring") as move:
        clock.seconds = 100.0  # of loading, which is no part of the rate
        move(0, 50)
        for done in range(1, 51):
            clock.seconds += 4
            move(done, 50)
    out, err = capsys.readouterr()
    first, *others = err.splitlines()
    assert out == ""
    assert first == "measuring: 6 % after 0:00:12, about 0:03:08 left"
    assert 5 < len(others) < 20, "not one for each step"


def test_a_short_task_says_nothing_without_a_terminal(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress("measuring") as move:
        for done in range(100):
            clock.seconds += 0.05
            move(done, 100)
    assert capsys.readouterr() == ("", "")


def test_what_was_done_before_is_no_part_of_the_rate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.bars() as bar:
        task = bar.add_task("answering", total=100, completed=90)
        clock.seconds = 20.0
        bar.update(task, completed=95)
    assert "about 0:00:20 left" in capsys.readouterr().err
