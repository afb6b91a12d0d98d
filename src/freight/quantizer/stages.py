"""Bars on stderr for the stages of a long run, one for each kind of work. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from freight.base.terminal import bars


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr for each kind of work; yield a function (what, done, total) that moves
    them.
    """
    tasks: dict[str, Any] = {}
    with bars() as bar:

        def move(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield move
