"""Finds the regions of an answer by the markup of a response template: reasoning, calls, content.

Guarantees: chunks of any size give the same marks, which are those of transformers' ResponseParser:
of several the first, then the longest. The cost is linear, because text that was read is forgotten.
Markup that further text may complete or extend is kept until that comes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freight.base.patterns import AnswerPattern

if TYPE_CHECKING:
    from freight.text.tokenizer import ResponseTemplateField

_SLICE = 4096  # characters that are searched at once, and that may wait for the end of a mark
_BEFORE = 32  # characters before the text that a pattern may look back at
# A pattern whose first character is known.
_BEGIN = re.compile(r"(?:\(\?=|\(\?:(?=<[^()|]*\)\?<))?(?:\\?(<)|\\(\[))(?![*?{])")


@dataclass(frozen=True)
class Delimiter:
    """Markup that opens or closes the region `name`.

    grows   whether a match at the end of a text may become another one with further text
    firsts  the characters that it can begin with; empty if they are not known
    """

    name: str
    pattern: AnswerPattern
    grows: bool
    firsts: frozenset[str]


# The markup that counts in a region, by the name of that region; None: outside of all.
Regions = Mapping[str | None, Sequence[Delimiter]]


@dataclass(frozen=True)
class Mark:
    """Markup in an answer, which opens or closes the region `name`."""

    name: str
    text: str


def regions_of(fields: Iterable[ResponseTemplateField]) -> Regions:
    """Return the regions of `fields`, each of which has an opening."""
    openings: list[Delimiter] = []
    regions: dict[str | None, Sequence[Delimiter]] = {None: openings}
    for field in fields:
        name = field.name
        grows = field.open_literals is None or field.open_literal_can_extend
        firsts = _firsts(field.open_re, field.open_literals)
        openings.append(Delimiter(name, field.open_re, grows, firsts))
        regions[name] = ()
        if field.close_re is not None:
            grows = field.close_literals is None or field.close_literal_can_extend
            firsts = _firsts(field.close_re, field.close_literals)
            regions[name] = (Delimiter(name, field.close_re, grows, firsts),)
    return regions


def _firsts(pattern: AnswerPattern, literals: list[str] | None) -> frozenset[str]:
    if literals is not None:
        return frozenset(text[0] for text in literals)
    expression = pattern.compiled.pattern.replace("\\|", "")
    begin = _BEGIN.match(expression)
    if begin is None or "|" in expression:
        return frozenset()
    return frozenset(begin[1] or begin[2])


class Finder:
    """Looks for marks in one text that comes in chunks."""

    def __init__(self, regions: Regions, before: str = "") -> None:
        """Begin without text. before: what precedes it, in which no mark is looked for."""
        self._regions = regions
        self._waiting: deque[str] = deque()
        self._text = before
        self._at = len(before)  # up to here it was read

    def feed(self, text: str) -> None:
        self._waiting += _slices(text)

    def feed_again(self, text: str) -> None:
        """Read `text` before what is left, as one that does not begin the answer."""
        text += self._text[self._at :]
        self._text = "."
        self._at = 1
        self._waiting.extendleft(reversed(_slices(text)))

    def load(self) -> bool:
        """Take the next part of what was fed; returns False if there is none."""
        if not self._waiting:
            return False
        begin = max(self._at - _BEFORE, 0)
        self._text = self._text[begin:] + self._waiting.popleft()
        self._at -= begin
        return True

    def next(self, region: str | None, is_last: bool) -> tuple[str, Mark | None]:
        """Return the text up to the next mark that counts in `region`, and this mark; without one
        the text that is certain, and None. is_last: no text follows what was fed.
        """
        text = self._text
        begin = self._at
        end = len(text)
        is_last = is_last and not self._waiting
        matches = []
        unread = text[begin:]
        for delimiter in self._regions[region]:
            if delimiter.firsts and delimiter.firsts.isdisjoint(unread):
                continue
            match = delimiter.pattern.search(text, begin, partial=not is_last)
            if match is None:
                continue
            if not is_last and (match.partial or _may_grow(match, delimiter, len(text))):
                end = min(end, match.start())
            else:
                matches.append((match.start(), -match.end(), delimiter.name))
        start, minus_end, name = min(matches, default=(end, 0, ""))
        if start < end:
            self._at = -minus_end
            return text[begin:start], Mark(name, text[start : self._at])
        if len(text) - end > _SLICE:  # a pattern that matches without end
            end = len(text)
        self._at = end
        return text[begin:end], None

    @property
    def has_more(self) -> bool:
        return bool(self._waiting)

    @property
    def following(self) -> str:
        """The next character; "" at the end of the text."""
        return self._text[self._at : self._at + 1]

    def skip(self, count: int) -> None:
        """Leave out the next characters."""
        self._at += count

    def rest(self) -> str:
        """Return the text that was not read."""
        return "".join([self._text[self._at :], *self._waiting])


def _may_grow(match: Any, delimiter: Delimiter, size: int) -> bool:
    return match.end() == size and (delimiter.grows or match.start() == size)


def region_after(regions: Regions, text: str) -> str | None:
    """Return the region at the end of `text`, which begins outside of all."""
    finder = Finder(regions)
    finder.feed(text)
    region: str | None = None
    mark: Mark | None = None
    while mark is not None or finder.load():
        mark = finder.next(region, False)[1]
        if mark is not None:
            region = mark.name if region is None else None
    return region


def _slices(text: str) -> list[str]:
    return [text[at : at + _SLICE] for at in range(0, len(text), _SLICE)]
