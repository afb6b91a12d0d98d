"""Parser of harmony, the format of gpt-oss: divides a model's text into pieces.

`analysis` is reasoning; `final`, `commentary` without a recipient, and any unknown channel are
content; a message to `functions.NAME`, or to the name of a tool, is a call. The recipient may stand
before or after the channel.

- Nothing raises. A call that cannot be read, or is incomplete, is content, exactly as the model
  wrote it.
- Texts are kept to the character. A blank line separates two messages of one kind.
- A header cut by the end of the answer is dropped: it has no text. One that the model ends itself
  is content.
- Chunks of any size give the same pieces once these are joined, and the cost is linear.

A response template of transformers could not express this: it finds a region by one pattern, and no
pattern matches a header with its parts in any order, or one that is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum, auto

from freight.base.fields import JsonObject
from freight.serve.answers.argument_types import names_of
from freight.serve.answers.out import Pieces, SpecialTokens, Splitter
from freight.serve.answers.pieces import Piece, PieceKind
from freight.serve.answers.verbatim import arguments_texts
from freight.text.harmony import CALL, CHANNEL, END, MARKERS, MESSAGE, RETURN, START

_MARKERS = SpecialTokens(MARKERS)
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(?!to=)([A-Za-z]+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_LONGEST_HEADER = 512  # characters; longer ones are content
_LONGEST_CALL = 1 << 20  # characters; longer ones are content


class Place(Enum):
    """A position in a message."""

    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


_KINDS = {Place.REASONING: PieceKind.REASONING, Place.CONTENT: PieceKind.CONTENT}


def _begun(prompt_text: str | None) -> str:
    """Return the message that a prompt ends with; "" if it consists of a role only."""
    _, start, begun = (prompt_text or "").rpartition(START)
    if start and _MARKERS.pattern.search(begun):
        return begun
    return ""


class HarmonyParser:
    """Reads one answer in harmony; a `MessageParser`.

    special      strips the tokenizer's other special tokens
    prompt_text  the prompt; None, if unknown, counts as one that ends before a header
    tools        without any, calls are content, as written

    `place` is the position at the end of the text so far: at first, at the end of the prompt.
    """

    def __init__(
        self,
        special: SpecialTokens,
        prompt_text: str | None,
        tools: Sequence[JsonObject],
    ) -> None:
        self.place = Place.HEADER
        self._has_tools = bool(tools)
        self._names = set(names_of(tools))
        self._special = Splitter(special)
        self._markers = Splitter(_MARKERS)
        self._header = ""
        self._call: list[str] = []  # text of the call
        self._call_size = 0
        self._name = ""  # of the function that is called
        self._last_kind: PieceKind | None = None  # the kind of the last text
        self._is_new_message = False  # whether a message has begun since then
        self._out = Pieces()
        self._feed(_begun(prompt_text))
        self._text(self._markers.finish())
        self._out = Pieces()
        self._last_kind = None

    def feed(self, text: str) -> list[Piece]:
        """Take more text, special tokens included; returns the pieces that are certain by now."""
        self._feed(self._special.strip(text))
        return self._out.take()

    def finish(self, complete: bool) -> list[Piece]:
        """End the text; returns the last pieces. complete: the model ended by itself. An incomplete
        call is content.
        """
        self._feed(self._special.finish())
        tail = self._markers.finish()
        header = self._header.lstrip()
        is_cut = self.place is Place.HEADER and not complete
        if is_cut and header.startswith((START, CHANNEL, "to=")):
            return self._out.take()
        self._text(tail)
        if self.place is Place.CALL:
            self._close_call("", complete)
        elif self.place is Place.HEADER:
            self._header_is_text()
        return self._out.take()

    def _feed(self, text: str) -> None:
        for index, part in enumerate(self._markers.split(text)):
            if index % 2:
                self._marker(part)
            else:
                self._text(part)

    def _text(self, text: str) -> None:
        if not text:
            return
        if self.place is Place.HEADER:
            self._add_to_header(text)
        elif self.place is Place.CALL:
            self._add_to_call(text)
        else:
            self._say(_KINDS[self.place], text)

    def _marker(self, marker: str) -> None:
        # START and CHANNEL begin a message: the model did not end the one before
        end = ""
        begin = marker
        if marker in (END, CALL, RETURN):
            end = marker
            begin = ""
        if self.place is Place.HEADER:
            if marker == MESSAGE:
                self._begin_message()
            elif end or marker == START:
                self._header_is_text(end)
                self._begin_header(begin)
            else:
                self._add_to_header(marker)
        elif end or marker in (START, CHANNEL):
            if self.place is Place.CALL:
                self._close_call(end, True)
            self._begin_header(begin)
        elif self.place is Place.CALL:
            self._add_to_call(marker)

    def _begin_header(self, text: str) -> None:
        self.place = Place.HEADER
        self._header = text
        self._is_new_message = True

    def _add_to_header(self, text: str) -> None:
        self._header += text
        if len(self._header) > _LONGEST_HEADER or self._is_text():
            self._header_is_text()

    def _is_text(self) -> bool:
        """Return whether the header has text where only a control token, white space or a recipient
        may begin.
        """
        text = self._header.lstrip()
        return not text.startswith((START, CHANNEL)) and not "to=".startswith(text[:3])

    def _message_header(self) -> str:
        """Return the header without `<|start|>assistant`, which the prompt has for the first
        message.
        """
        return self._header.removeprefix(f"{START}assistant")

    def _header_is_text(self, closing: str = "") -> None:
        """Turn what was read as a header into the beginning of content."""
        text = self._message_header()
        self.place = Place.CONTENT
        # White space between messages is dropped.
        if text.strip() or len(self._header) > _LONGEST_HEADER:
            self._say(PieceKind.CONTENT, text + closing)

    def _begin_message(self) -> None:
        channel = _CHANNEL_NAME.search(self._header)
        recipient = _RECIPIENT.search(self._header)
        self._is_new_message = True
        if recipient and self._is_function(recipient[1]):
            self._name = recipient[1].removeprefix("functions.")
            self.place = Place.CALL
            self._call = [self._message_header(), MESSAGE]
            self._call_size = 0
        elif channel and channel[1] == "analysis":
            self.place = Place.REASONING
        else:
            self.place = Place.CONTENT

    def _is_function(self, recipient: str) -> bool:
        return recipient.startswith("functions.") or recipient in self._names

    def _say(self, kind: PieceKind, text: str) -> None:
        if self._is_new_message and self._last_kind is kind:
            text = f"\n\n{text}"
        self._last_kind = kind
        self._is_new_message = False
        self._out.verbatim(text, kind)

    def _add_to_call(self, text: str) -> None:
        self._call.append(text)
        self._call_size += len(text)
        if self._call_size > _LONGEST_CALL:
            self.place = Place.CONTENT
            self._say(PieceKind.CONTENT, "".join(self._call))

    def _close_call(self, closing: str, is_complete: bool) -> None:
        self.place = Place.HEADER
        arguments = None
        if is_complete and self._has_tools:
            arguments = self._arguments("".join(self._call[2:]))
        if arguments is None:
            self._say(PieceKind.CONTENT, "".join([*self._call, closing]))
        else:
            self._out.calls([Piece(PieceKind.TOOL_CALL, arguments, self._name)])

    def _arguments(self, body: str) -> str | None:
        """Return the arguments of a call, as JSON, or None if its text is not a JSON object."""
        if not self._name:
            return None
        try:
            self._name.encode()  # raises for a lone surrogate
            arguments = None
            if body.strip():
                arguments = json.loads(body)
            texts = arguments_texts(body, [arguments])
        except Exception:  # also RecursionError
            return None
        if texts is None:
            return None
        return texts[0]
