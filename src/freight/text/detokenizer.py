"""Detokenizer: turns the tokens of one completion into text, one at a time.

Guarantees: the released pieces, joined, are the text of all tokens. A piece holds complete
characters only (a character of several byte tokens comes with its last byte). The text stops
exactly before the first stop string, wherever token boundaries fall, and text that may begin one is
held back until that is decided; with include_stop_str_in_output it stops exactly after the string,
and nothing is held back. A token costs the same at every position.

One exception to "the text of all tokens": with byte fallback, a byte that is not UTF-8 makes the
decoder reject the full run of byte tokens around it. Characters that were released already stay;
the rest of the run becomes U+FFFD, one per byte.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from freight.sampling import SamplingParams
from freight.text.token_pieces import ByteDecoder, Pieces, TextDecoder
from freight.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character
_LONGEST_UNFINISHED = 3  # bytes of a UTF-8 character that can be there without the last one
_WINDOW = 24  # tokens that are decoded again, at most
_KEPT = 12  # tokens that stay when the window is full
# Last tokens of the prompt, which decide whether the completion begins with a space
_PROMPT_CONTEXT = 8


class Detokenizer:
    """The text of one completion, growing with its tokens. `stop_reason` is the stop string that
    ended it, if one did.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """Prepare to decode a completion.

        With `prompt_token_ids`, the text continues the prompt's: "▁world" after "Hello" is "
        world". Without them the completion is decoded as the beginning of a text, where some
        tokenizers drop the first space.
        """
        self.stop_reason: str | None = None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._stops = None
        if params.stop:
            self._stops = _StopStrings(params.stop, params.include_stop_str_in_output)
        self._text = _text_of(
            tokenizer, params.skip_special_tokens, prompt_token_ids[-_PROMPT_CONTEXT:]
        )

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain. Nothing comes after a stop string."""
        if self._stops is None:
            return "".join(map(self._text.push, token_ids))
        released = []
        for token in token_ids:
            if self.stop_reason is not None:
                break
            self._num_tokens += 1
            released.append(self._release(self._text.push(token), self._stops))
        return "".join(released)

    def finish(self) -> str:
        """End the completion: return what was held back, with U+FFFD for bytes that never became a
        character.
        """
        if self.stop_reason is not None:
            return ""
        text = self._text.flush()
        if self._stops is None:
            return text
        return self._release(text, self._stops) + self._stops.flush()

    def _release(self, text: str, stops: _StopStrings) -> str:
        released, self.stop_reason = stops.feed(text, self._num_tokens > self._min_tokens)
        return released


class _Text(Protocol):
    """A decoder of tokens into complete characters."""

    def push(self, token: int) -> str:
        """Add a token; return the text that becomes certain with it."""

    def flush(self) -> str:
        """Return the text that was waiting for more tokens."""


def _text_of(tokenizer: Tokenizer, skip_special: bool, prompt_end: Sequence[int]) -> _Text:
    pieces = tokenizer.pieces(skip_special)
    if pieces is None:
        return _Window(tokenizer, skip_special, prompt_end)
    if isinstance(pieces.decoder, ByteDecoder):
        return _Bytes(pieces)
    begins = all(pieces[token] is None for token in prompt_end)
    return _Joined(pieces, pieces.decoder, begins)


class _Bytes:
    """The text of a byte-level decoder: the bytes of all tokens, as UTF-8. A prompt before them
    makes no difference.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._held = b""  # a character's first bytes

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, str) and not self._held:
            return piece
        if piece is None:
            return ""
        if isinstance(piece, str):
            piece = piece.encode()
        data = self._held + piece
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        pending = self._held
        self._held = b""
        return pending.decode("utf-8", "replace")


class _Joined:
    """The text of a decoder that joins the texts of tokens, with runs of byte tokens between them."""

    def __init__(self, pieces: Pieces, decoder: TextDecoder, begins: bool) -> None:
        """Prepare to join pieces. `begins`: the completion is the beginning of a text, where the
        decoder removes spaces.
        """
        self._pieces = pieces
        self._drop_in_first = ""
        self._strip = decoder.strip
        self._strip_most = 0
        if begins:
            self._drop_in_first = decoder.drop_in_first
            self._strip_most = decoder.strip_most
        self._held = b""  # a character's first bytes
        self._broken = False  # the run of byte tokens is not UTF-8

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, str):
            if self._held or self._broken:
                piece = self.flush() + piece
        elif piece is None:
            return ""
        else:
            piece = self._byte(piece)
        if self._strip_most or self._drop_in_first:
            return self._first(token, piece)
        return piece

    def flush(self) -> str:
        pending = self._held
        self._held = b""
        self._broken = False
        return _UNFINISHED * len(pending)

    def _byte(self, byte: bytes) -> str:
        if self._broken:
            return _UNFINISHED
        data = self._held + byte
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._held = b""
            self._broken = True
            return _UNFINISHED * len(data)
        self._held = data[used:]
        return text

    def _first(self, token: int, text: str) -> str:
        """Return what is left of a text's beginning, without the spaces that the decoder removes."""
        if self._drop_in_first:
            string = self._pieces.token_string(token)
            text = (string or "").replace(self._drop_in_first, "")
            self._drop_in_first = ""
            return text
        spaces = 0
        while spaces < min(self._strip_most, len(text)) and text[spaces] == self._strip:
            spaces += 1
        self._strip_most -= spaces
        if spaces < len(text):
            self._strip_most = 0
        return text[spaces:]


class _Window:
    """The text of any other decoder: the last few tokens are decoded again with each new one."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, prompt_end: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Tokens that are decoded together; the first `_context` are context, on which the text of
        # the others depends. `_shown` is the part of their text that was released already.
        self._window = self._whole(prompt_end)
        self._context = len(self._window)
        self._shown = self._decode(self._window)

    def push(self, token: int) -> str:
        if not self._has_text(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # A byte that begins no character makes some decoders reject the full run of bytes
            # before it, which was released already. Bytes need no context.
            del self._window[: self._context]
            self._context = 0
            self._shown = ""
            text = self._decode(self._window)
        certain = max(len(text.rstrip(_UNFINISHED)), len(text) - _LONGEST_UNFINISHED)
        new = text[len(self._shown) : certain]
        if new:
            self._shown = text[:certain]
        if new and certain == len(text):
            del self._window[: self._context]
            self._shown = self._decode(self._window)
            self._context = len(self._window)
        elif len(self._window) > _WINDOW:
            withheld = len(text) - len(self._shown)
            del self._window[:-_KEPT]
            decoded = self._decode(self._window)
            self._context = 0
            self._shown = decoded[: max(0, len(decoded) - withheld)]
        return new

    def flush(self) -> str:
        text = self._decode(self._window)[len(self._shown) :]
        self._shown = ""
        self._window = []
        self._context = 0
        return text

    def _whole(self, prompt_end: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt that begin and end with complete characters; none if
        there are no such.
        """
        last = list(filter(self._has_text, prompt_end))
        for start in range(min(len(last), _LONGEST_UNFINISHED + 1)):
            if _UNFINISHED not in self._decode(last[start:]):
                return last[start:]
        return []

    def _has_text(self, token: int) -> bool:
        return self._tokenizer.token_string(token, self._skip_special) is not None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special)


class _StopStrings:
    """A search for the first of several strings in a text that comes in pieces; text that may begin
    one is held back.

    `included`: the string belongs to the text, so nothing has to be held back; its beginning is
    only remembered.

    The first is the one that ends first and, of those that end together, the longest. Reading
    character by character finds the same one, so the result does not depend on where pieces are
    cut.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        self._stops = stops
        self._included = included
        self._held = ""  # text that may begin a stop string: held back, or remembered if `included`
        # Most pieces contain no character that begins a stop string: they cost this one search
        first = "".join(map(re.escape, sorted({stop[0] for stop in stops})))
        self._may_begin = re.compile(f"[{first}]").search

    def feed(self, text: str, checked: bool) -> tuple[str, str | None]:
        """Return the text that is certain, and the stop string found. `checked` False: none may end
        within this piece.
        """
        if not self._held and not self._may_begin(text):
            return text, None
        settled = len(self._held)  # a stop string has to end after this
        text = self._held + text
        self._held = ""
        if checked:
            stops: list[tuple[int, int, str]] = []
            for stop in self._stops:
                begin = text.find(stop, max(0, settled + 1 - len(stop)))
                if begin >= 0:
                    stops.append((begin + len(stop), begin, stop))
            if stops:
                end, begin, stop = min(stops)
                if self._included:
                    return text[settled:end], stop
                return text[:begin], stop
        overlap = max(_overlap(text, stop) for stop in self._stops)
        certain = len(text) - overlap
        self._held = text[certain:]
        if self._included:
            return text[settled:], None
        return text[:certain], None

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        pending = self._held
        self._held = ""
        if self._included:
            return ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` that begin `stop`, without being all of it."""
    begin = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
    while begin >= 0 and not stop.startswith(text[begin:]):
        begin = text.find(stop[0], begin + 1)
    if begin < 0:
        return 0
    return len(text) - begin
