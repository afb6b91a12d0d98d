"""Expressions that come from files: a checkpoint's module names, an adapter's ranks, a recipe.

Those of a response template are among them. Python's `re` goes back and forth without a limit:
`(a*)*b` in a file would hold the process for ever. The `regex` package has the same syntax and
stops when its time is up. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

import regex

from freight.errors import CheckpointError, FreightError, shown

MOST_EXPRESSIONS = 2_000  # of a list, without plain names; published lists have hundreds
LONGEST = 4096  # characters; the longest published expression has some hundred
SECONDS = (
    2.0  # for all names that one expression is compared with; published ones take microseconds each
)

ANSWER_SECONDS = 1.0  # for one look into an answer or a prompt, which takes microseconds


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
            result = method(name, timeout=self._seconds_left)  # type: ignore[operator]
        except TimeoutError:
            self._seconds_left = 0.0
            raise self._error(
                f"{self._source}: the expression {shown(self.expression)} takes more than {SECONDS:g} s to compare "
                "with the names of modules; write it without nested repeats"
            ) from None
        self._seconds_left -= monotonic() - started
        return result is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FilePattern) and other.expression == self.expression

    def __hash__(self) -> int:
        return hash(self.expression)


@dataclass(frozen=True)
class AnswerPattern:
    """A compiled expression of a response template, in the place of a `regex.Pattern`: each look
    into a text ends after ANSWER_SECONDS with a CheckpointError that names the expression.
    """

    compiled: Any

    @property
    def groupindex(self) -> dict[str, int]:
        """The numbers of the named groups."""
        return dict(self.compiled.groupindex)

    def match(self, text: str, *at: int, **more: Any) -> Any:
        """Match as `regex.Pattern.match`."""
        return self._within_time(self.compiled.match, text, *at, **more)

    def search(self, text: str, *at: int, **more: Any) -> Any:
        """Search as `regex.Pattern.search`."""
        return self._within_time(self.compiled.search, text, *at, **more)

    def finditer(self, text: str) -> Iterator[Any]:
        """Give all matches in `text`. The time is that of all together."""
        started = monotonic()
        try:
            for match in self.compiled.finditer(text, timeout=ANSWER_SECONDS):
                if monotonic() - started > ANSWER_SECONDS:
                    raise TimeoutError
                yield match
        except TimeoutError:
            raise self._too_slow() from None

    def _within_time(self, method: Any, text: str, *at: int, **more: Any) -> Any:
        try:
            return method(text, *at, timeout=ANSWER_SECONDS, **more)
        except TimeoutError:
            raise self._too_slow() from None

    def _too_slow(self) -> CheckpointError:
        return CheckpointError(
            f"response template: the expression {shown(self.compiled.pattern)} takes more than {ANSWER_SECONDS:g} s "
            "in a text; write it without nested repeats in response_template of tokenizer_config.json, or choose "
            "another parser with --tool-call-parser and --reasoning-parser"
        )
