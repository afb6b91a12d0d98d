"""The terminal: the one place that decides whether text is styled and progress bars move.

Nothing is styled if NO_COLOR is set (https://no-color.org) or TERM is dumb, and nothing in a pipe
or a file. A bar moves on a terminal only, and not on a dumb one, which cannot rewrite a line.
Imports no torch, and rich only where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

OnProgress = Callable[[int, int], None]  # (done, total)


def is_plain() -> bool:
    """Return whether the environment asks for text without escape sequences of style."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "").lower() in (
        "dumb",
        "unknown",
    )


def console(stderr: bool = False, **options: Any) -> Console:
    """Make a console of rich, on stdout or stderr."""
    from rich.console import Console

    return Console(stderr=stderr, color_system=None if is_plain() else "auto", **options)


def write(text: str, err: bool = False, newline: bool = True, **style: Any) -> None:
    """Print with a style of `typer.style`, such as dim=True or fg="red"."""
    import typer

    typer.echo(typer.style(text, **style), err=err, nl=newline, color=False if is_plain() else None)


def bars(label: str = "{task.description}") -> Progress:
    """Make bars on stderr with a label, a count and the time that is left; none if stderr is not a
    terminal.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    on = console(stderr=True)
    return Progress(
        *columns, console=on, disable=not on.is_terminal or on.is_dumb_terminal, transient=True
    )


def unseen(done: int, total: int) -> None:
    """Show no progress."""


@contextmanager
def progress(what: str) -> Iterator[OnProgress]:
    """Show a bar; give a function (done, total) that moves it."""
    with bars(what) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
