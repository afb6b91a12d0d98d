"""The terminal: the one place that decides whether text is styled and progress bars move.

Nothing is styled if NO_COLOR is set (https://no-color.org) or TERM is dumb, and nothing in a pipe
or a file. A bar moves on a terminal only, and not on a dumb one, which cannot rewrite a line;
elsewhere a task that takes long says in plain lines how far it is.

What is printed may quote a model's files. So `say`, `write` and `console` escape what a terminal
would take as a command, and no markup of rich is read.
Imports no torch, and rich only where it is used.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from freight.errors import legible, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LAYOUT = "\n\t"
FIRST_LINE = 10.0  # seconds without a terminal before a line says how far a task is
LINE_SHARE = 0.1  # of the time taken: as long at least until the next line
OnProgress = Callable[[int, int], None]  # (done, total)
OnStage = Callable[[str, int, int], None]  # (what, done, total)


def is_plain() -> bool:
    """Return whether the environment asks for text without escape sequences of style."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "").lower() in (
        "dumb",
        "unknown",
    )


def console(stderr: bool = False, **options: Any) -> Console:
    """Make a console of rich, on stdout or stderr. It reads no markup, and prints no control
    characters but its own.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Legible(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield (
                    segment
                    if segment.control
                    else segment._replace(text=printable(segment.text, _LAYOUT))
                )

    return Legible(
        stderr=stderr,
        color_system=None if is_plain() else "auto",
        **{"markup": False, "highlight": False, **options},
    )


def write(text: str, err: bool = False, newline: bool = True, **style: Any) -> None:
    """Print with a style of `typer.style`, such as dim=True or fg="red"."""
    import typer

    styled = typer.style(printable(text, _LAYOUT), **style)
    typer.echo(styled, err=err, nl=newline, color=False if is_plain() else None)


def say(text: str, err: bool = False) -> None:
    """Print lines, each of at most LONGEST_MESSAGE characters."""
    import typer

    typer.echo("\n".join(legible(line) for line in text.split("\n")), err=err)


def on_stdout(text: str) -> str:
    """Return what a model wrote as it goes to standard output: as it is into a file or a pipe, and
    with escapes for what a terminal would take as a command.
    """
    return printable(text, _LAYOUT) if sys.stdout.isatty() else text


def time_left(elapsed: float, done: float, total: float) -> str:
    """Say how long something took so far, and about how long the rest will take at that rate.

    `elapsed` in seconds; `done` and `total` in any unit of work.
    """
    passed = str(timedelta(seconds=int(elapsed)))
    if done <= 0:
        return f"after {passed}"
    left = math.ceil(elapsed * max(0.0, total - done) / done)
    return f"after {passed}, about {timedelta(seconds=left)} left"


def bars(label: str = "{task.description}") -> Progress:
    """Make bars on stderr with a label, a share, the time taken and about that which is left.

    Where stderr is not a terminal, or a dumb one, lines say the same: the first after FIRST_LINE
    seconds, later ones ever more seldom (LINE_SHARE).
    """
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
    from rich.text import Text

    def said(task: Task) -> str:
        elapsed = task.elapsed
        first = task.fields.get("first", 0)
        if task.total is None or elapsed is None:
            return ""
        left = time_left(elapsed, task.completed - first, task.total - first)
        return f"{task.percentage:.0f} % {left}"

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(said(task))

    class Bars(Progress):
        def add_task(self, *args: Any, **more: Any) -> TaskID:
            """Add a task; what it begins with was done before, and is no part of its rate."""
            return super().add_task(*args, first=more.get("completed", 0), **more)

        def update(self, task_id: TaskID, **more: Any) -> None:
            super().update(task_id, **more)
            task = self._tasks[task_id]
            if not self.disable or task.finished or task.elapsed is None or task.total is None:
                return
            if task.elapsed >= next_line.get(task_id, FIRST_LINE):
                print(f"{task.description}: {said(task)}", file=sys.stderr, flush=True)
                next_line[task_id] = task.elapsed + max(FIRST_LINE, LINE_SHARE * task.elapsed)

    next_line: dict[TaskID, float] = {}  # seconds of a task before which it has no further line
    on = console(stderr=True)
    return Bars(
        *(TextColumn(label), BarColumn(), Times()),
        console=on,
        disable=not on.is_terminal or on.is_dumb_terminal,
        transient=True,
        get_time=time.monotonic,
    )


def unseen(*progress: object) -> None:
    """Show no progress: an `OnProgress` or `OnStage`."""


@contextmanager
def progress(what: str) -> Iterator[OnProgress]:
    """Show a bar, or lines; give a function (done, total) that moves it. Its time begins with the
    first call: what is loaded before is no part of the rate.
    """
    with bars() as bar:
        task = bar.add_task(what, start=False, total=None)

        def move(done: int, total: int) -> None:
            bar.start_task(task)
            bar.update(task, completed=done, total=total)

        yield move
