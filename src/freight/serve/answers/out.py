"""Output of the parsers: pieces, without white space next to markup and without special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable

from freight.serve.answers.pieces import Piece, PieceKind

_BLANKS = " \t\r\n"
_LIKE_A_TAG = re.compile(r"</?\w+>")


class Pieces:
    """Collects pieces. Drops white space next to markup and keeps all other, in any chunking."""

    def __init__(self) -> None:
        self._ready: list[Piece] = []
        self._texts: list[str] = []  # of the piece that is growing
        self._kind = PieceKind.CONTENT  # of that piece
        self._blanks: list[str] = []  # white space that is part of the answer unless markup follows
        self._after_mark = False

    def add(self, kind: PieceKind, text: str) -> None:
        """Add content or reasoning."""
        if self._after_mark:
            text = text.lstrip(_BLANKS)
            if not text:
                return
            self._after_mark = False
        self._begin(kind)
        inner = text.rstrip(_BLANKS)
        if inner:
            self._texts += self._blanks
            self._blanks.clear()
            self._texts.append(inner)
        if len(inner) < len(text):
            self._blanks.append(text[len(inner) :])

    def mark(self) -> None:
        """Note that markup stands here."""
        self._blanks.clear()
        self._after_mark = True

    def calls(self, calls: Iterable[Piece]) -> None:
        self.mark()
        self._end()
        self._ready += calls

    def verbatim(self, text: str, kind: PieceKind = PieceKind.CONTENT) -> None:
        """Add content or reasoning with all of its white space."""
        if text:
            self._begin(kind)
            self._texts += [*self._blanks, text]
            self._blanks.clear()
            self._after_mark = False

    def finish(self) -> None:
        """Note that no markup follows."""
        self._texts += self._blanks
        self._blanks.clear()

    def take(self) -> list[Piece]:
        """Return the pieces that are certain by now, and forget them."""
        self._end()
        ready = self._ready
        self._ready = []
        return ready

    def _begin(self, kind: PieceKind) -> None:
        if kind is not self._kind:
            self.finish()
            self._end()
            self._kind = kind

    def _end(self) -> None:
        if self._texts:
            text = "".join(self._texts)
            self._texts.clear()
            if text:
                self._ready.append(Piece(self._kind, text))


class SpecialTokens:
    """Special tokens that are found in texts.

    Those that look like HTML tags (`<s>`) are not: a model that writes HTML spells them with
    ordinary tokens.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted(
            {token for token in tokens if token and not _LIKE_A_TAG.fullmatch(token)}, key=len
        )
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self.prefixes = frozenset(token[:size] for token in texts for size in range(1, len(token)))
        self.firsts = frozenset(token[0] for token in texts)
        self.longest = max(map(len, texts), default=1) - 1


class Splitter:
    """Finds special tokens in one text that comes in chunks."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens
        self._tail = ""  # may become a special token

    def split(self, text: str) -> list[str]:
        """Take more text; returns texts and special tokens in turn, a text first and last."""
        tokens = self._tokens
        if not self._tail and tokens.firsts.isdisjoint(text):
            return [text]
        text = self._tail + text
        certain = len(text)
        for size in range(min(tokens.longest, len(text)), 0, -1):
            if text[-size:] in tokens.prefixes:
                certain -= size
                break
        at = 0
        pieces = []
        while (match := tokens.pattern.search(text, at)) is not None and match.start() < certain:
            pieces += [text[at : match.start()], match.group()]
            at = match.end()
        certain = max(certain, at)
        self._tail = text[certain:]
        return [*pieces, text[at:certain]]

    def strip(self, text: str) -> str:
        """Take more text; returns it without special tokens."""
        return "".join(self.split(text)[::2])

    def finish(self) -> str:
        """Return the rest of the text, without special tokens."""
        tail = self._tail
        self._tail = ""
        return self._tokens.pattern.sub("", tail)
