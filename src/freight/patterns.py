"""Expressions that come from files: a checkpoint's module names, an adapter's ranks, a recipe.

Python's `re` goes back and forth without a limit: `(a*)*b` in a file would hold the process for
ever. The `regex` package has the same syntax and stops when its time is up. Imports no torch.
"""

from __future__ import annotations

from time import monotonic

import regex

from freight.errors import CheckpointError, FreightError, shown

LONGEST = 4096  # characters; the longest published expression has some hundred
SECONDS = (
    2.0  # for all names that one expression is compared with; published ones take microseconds each
)


class FilePattern:
    """An expression, and the time that is left for its matches.

    Two are equal if their expressions are.
    """

    def __init__(
        self, expression: str, source: str, error: type[FreightError] = CheckpointError
    ) -> None:
        """Compile `expression`.

        source: what it is called in messages, such as "config.json: ignore"
        error: what is raised here and by the methods

        Raises `error` for one that is longer than LONGEST characters, or that is not a regular
        expression.
        """
        self.expression = expression
        self._source = source
        self._error = error
        self._seconds_left = SECONDS
        if len(expression) > LONGEST:
            raise error(
                f"{source}: an expression of {len(expression):,} characters; the limit is {LONGEST:,}"
            )
        try:
            self._compiled = regex.compile(expression)
        except (regex.error, RecursionError, OverflowError) as cause:
            raise error(
                f"{source}: {shown(expression)} is not a regular expression: {cause}"
            ) from None

    def match(self, name: str) -> bool:
        """Return whether the expression matches at the start of `name`. Raises `error` when its
        time is up.
        """
        return self._within_time(self._compiled.match, name)

    def search(self, name: str) -> bool:
        """Return whether the expression matches anywhere in `name`. Raises as `match`."""
        return self._within_time(self._compiled.search, name)

    def _within_time(self, method: object, name: str) -> bool:
        started = monotonic()
        try:
            if self._seconds_left <= 0:
                raise TimeoutError
            found = method(name, timeout=self._seconds_left)  # type: ignore[operator]
        except TimeoutError:
            self._seconds_left = 0.0
            raise self._error(
                f"{self._source}: the expression {shown(self.expression)} takes more than {SECONDS:g} s to compare "
                "with the names of modules; write it without nested repeats"
            ) from None
        self._seconds_left -= monotonic() - started
        return found is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FilePattern) and other.expression == self.expression

    def __hash__(self) -> int:
        return hash(self.expression)
