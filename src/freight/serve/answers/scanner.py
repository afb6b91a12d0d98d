"""A text that is read from a position on: what the readers of calls share. Reading is linear."""

from __future__ import annotations

import json
import re

_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class Scanner:
    """`at`: the position in `text` up to which it was read."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at

    @property
    def is_at_end(self) -> bool:
        return self.at >= len(self.text)

    def blanks(self) -> None:
        """Skip white space."""
        self.match(_BLANKS)

    def accept(self, mark: str) -> bool:
        """Skip `mark` if it comes next; return whether it did."""
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def expect(self, mark: str, error: str) -> None:
        """Skip `mark` and white space behind it. Raises ValueError(error) if it does not come next."""
        if not self.accept(mark):
            raise ValueError(error)
        self.blanks()

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Read what `pattern` matches here; None if it does not match."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group()

    def until(self, mark: str) -> str:
        """Read the text before the next `mark`, and skip that. Raises ValueError without one."""
        begin = self.at
        end = self.text.index(mark, begin)
        self.at = end + len(mark)
        return self.text[begin:end]

    def json(self) -> object:
        """Read a JSON value. Raises ValueError if there is none."""
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value
