"""Control tokens in conversations: a message's `<|im_start|>` stays text, the template's is a token.

A template mixes its own control tokens with the strings of a conversation, and its output does not
show which is which. Therefore `ControlTokens.mark` puts a random mark around every control token in
those strings before the template runs. `read_marked` finds the marks in the output, removes them
and returns the parts between them, and `encode_marked` gives those parts the ids of ordinary text.

- A conversation without control tokens gets no mark, and the ids of its rendered text.
- A mark is decimal digits: templates that write JSON, Python or HTML leave it as it is.
- A mark that a template has separated from its partner is removed too, and no token spans that
  place.
- Ordinary text never gets the id of a control token; where a vocabulary has no other for it, the
  text is refused.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Encoding, PreTokenizedString, models
from tokenizers import Tokenizer as Backend

from freight.base.fields import JsonDict, JsonObject
from freight.errors import RequestError
from freight.text.messages import check_unicode

_MARKUP = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
_MARK_DIGITS = 20
_OPEN = "0"  # what follows the mark
_CLOSE = "1"
_OF_ANSWERS = ("content", "reasoning", "reasoning_content")


@dataclass(frozen=True)
class ChatText:
    """A rendered conversation.

    plain  parts (begin, end) of `text`, in characters and in order, that are ordinary text whatever
           they contain; no token spans an empty part
    """

    text: str
    plain: tuple[tuple[int, int], ...] = ()


class ControlTokens:
    """The tokens that only a template may write: all special ones, and those that look like markup
    and occur in the template.

    An assistant's answers keep the second kind: `<think>` and `<tool_call>` in them are what the
    model wrote itself, and templates look for them.
    """

    def __init__(self, backend: Backend, template: str) -> None:
        added = list(backend.get_added_tokens_decoder().values())
        special: list[AddedToken] = []
        written: list[AddedToken] = []
        for token in added:
            if token.special and not token.content.isspace():
                special.append(token)
            elif _is_markup(token, template):
                written.append(token)
        self._all = _Finder(backend, [*special, *written])
        self._special = _Finder(backend, special)

    def mark(
        self, messages: Sequence[JsonObject], values: JsonObject
    ) -> tuple[list[JsonDict], JsonDict, str]:
        """Return the messages and template values with marks, and the mark; it is "" if there are
        none.
        """
        # Exactly one 7, at the start, so that two copies never overlap
        mark = "7" + "".join(secrets.choice("012345689") for _ in range(_MARK_DIGITS))
        marked = [self._marked(message, mark) for message in messages]
        marked_values = {name: self._all.mark(value, mark) for name, value in values.items()}
        if marked == list(messages) and marked_values == values:
            return marked, marked_values, ""
        return marked, marked_values, mark

    def _marked(self, message: JsonObject, mark: str) -> JsonDict:
        is_answer = message.get("role") == "assistant"
        marked: JsonDict = {}
        for name, value in message.items():
            tokens = self._all
            if is_answer and name in _OF_ANSWERS:
                tokens = self._special
            marked[self._all.mark(name, mark)] = tokens.mark(value, mark)
        return marked


def _is_markup(token: AddedToken, template: str) -> bool:
    """Return whether a token that is not special looks like markup and occurs in the template."""
    return (
        not token.special
        and token.content in template
        and _MARKUP.fullmatch(token.content) is not None
    )


def read_marked(text: str, mark: str) -> ChatText:
    """Remove the marks of `ControlTokens.mark` from a template's output."""
    if not mark:
        return ChatText(text)
    texts: list[str] = []
    plain: list[tuple[int, int]] = []
    begin: int | None = None  # of the plain part that is open
    at = 0
    for part in re.split(f"({mark}[01])", text):
        if part == mark + _CLOSE:
            plain.append((at if begin is None else begin, at))
            begin = None
        elif part == mark + _OPEN:
            if begin is not None:
                plain.append((begin, begin))  # a mark without its partner
            begin = at
        else:
            texts.append(part)
            at += len(part)
    if begin is not None:
        plain.append((begin, begin))
    return ChatText("".join(texts), tuple(plain))


def encode_marked(
    backend: Backend, chat: ChatText, encoding: Encoding, control: frozenset[int]
) -> list[int]:
    """Return the token ids of `chat`. `encoding` is the ordinary one of its text; `control` are
    the ids that text must not get.

    Raises RequestError where the vocabulary has no other ids for a part.
    """
    added = backend.get_added_tokens_decoder()
    ids: list[int] = []
    text_begin = 0  # start of the text, and of its tokens, since the last kept added token
    first = 0
    starts = [start for start, _ in chat.plain]
    ends = [end for _, end in chat.plain]
    # Read once: each access to an Encoding's attribute copies all of it
    whole_ids = encoding.ids
    offsets = encoding.offsets

    def between(begin: int, end: int, ordinary: list[int]) -> list[int]:
        """Return the ids of the text between two added tokens; `ordinary`: those of the encoding."""
        if bisect_left(starts, begin) < bisect_right(ends, end):
            return _plain_ids(backend, chat, begin, end, control)
        return ordinary

    for index, token in enumerate(whole_ids):
        if token not in added:
            continue
        begin, end = offsets[index]
        if not _overlaps(starts, ends, begin, end):
            ids += between(text_begin, begin, whole_ids[first:index])
            ids.append(token)
            text_begin = end
            first = index + 1
    return ids + between(text_begin, len(chat.text), whole_ids[first:])


def _overlaps(starts: Sequence[int], ends: Sequence[int], begin: int, end: int) -> bool:
    """Return whether a part shares text with begin to end, or is empty and lies within."""
    at = bisect_right(ends, begin)
    return at < len(starts) and starts[at] < end


def _plain_ids(
    backend: Backend, chat: ChatText, begin: int, end: int, control: frozenset[int]
) -> list[int]:
    ids = _without_added_tokens(backend, chat.text[begin:end], begin == 0)
    if control.isdisjoint(ids):
        return ids
    # Some vocabularies turn text into a control token without an added token (Unigram's `</s>`):
    # encode in pieces too short to contain one
    ids = []
    for part_begin, part_end in _pieces(chat, begin, end):
        ids += _without_added_tokens(backend, chat.text[part_begin:part_end], part_begin == 0)
    control_ids = control.intersection(ids)
    if control_ids:
        token = backend.id_to_token(min(control_ids))
        raise RequestError(
            f"a message has the text {token!r}, which the tokenizer can only write as a control token"
        )
    return ids


def _pieces(chat: ChatText, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the text from begin to end in pieces: each character of a plain part, and the text
    between these parts.
    """
    at = begin
    for start, stop in chat.plain[bisect_left(chat.plain, (begin, 0)) :]:
        if start > end:
            break
        if at < start:
            yield at, start
        for position in range(start, min(stop, end)):
            yield position, position + 1
        at = max(at, stop)
    if at < end:
        yield at, end


def _without_added_tokens(backend: Backend, text: str, is_first: bool) -> list[int]:
    """Return the token ids of a text between two added tokens, or of a full text (is_first)."""
    # An "x" before the text, encoded apart, keeps away the prefix that only a full text gets
    before = ""
    if not is_first:
        before = "x"
    pieces = PreTokenizedString(before + text)
    if before:
        pieces.split(lambda _, full: [full[:1], full[1:]])
    normalizer = backend.normalizer
    pre_tokenizer = backend.pre_tokenizer
    model = backend.model
    if normalizer is not None:
        pieces.normalize(normalizer.normalize)
    if pre_tokenizer is not None:
        pre_tokenizer.pre_tokenize(pieces)
    pieces.tokenize(model.tokenize)
    ids: list[int] = []
    for _, (start, _), tokens in pieces.get_splits():
        if start >= len(before):
            ids += [token.id for token in tokens or ()]
    return ids


class _Finder:
    """A finder of tokens in a text, as the tokenizer `backend` finds them, in normalized text too."""

    def __init__(self, backend: Backend, tokens: Sequence[AddedToken]) -> None:
        self._backend = Backend(models.BPE())  # no vocabulary: text without a token is skipped
        self._is_empty = not tokens
        self._backend.add_tokens(
            [AddedToken(token.content, normalized=token.normalized) for token in tokens]
        )
        if backend.normalizer is not None and any(token.normalized for token in tokens):
            self._backend.normalizer = backend.normalizer

    def mark(self, value: Any, mark: str) -> Any:
        """Return `value` with all tokens in its strings marked, also in names and entries of
        objects and lists.
        """
        if self._is_empty:
            return value
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if isinstance(value, Mapping):
            return {self.mark(name, mark): self.mark(entry, mark) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(entry, mark) for entry in value]
        return value

    def _mark_text(self, text: str, mark: str) -> str:
        if not text:
            return text
        check_unicode(text)
        parts: list[str] = []
        at = 0
        for begin, end in self._backend.encode(text, add_special_tokens=False).offsets:
            parts += [text[at:begin], mark, _OPEN, text[begin:end], mark, _CLOSE]
            at = end
        return "".join([*parts, text[at:]])
