"""Parser of answers by a response template: transformers' ResponseParser, with more guarantees.

- Nothing raises. A call that cannot be read, or is incomplete, is content, exactly as the model
  wrote it.
- Nothing is lost but parsed markup, with the white space next to it, and special tokens.
- Chunks of any size give the same pieces once these are joined.
- The end tag of a call does not end it within a value, and a tag that only quotes markup does not
  hide the call behind it.
- The cost is linear. transformers' parser keeps all its text and searches in it, so a new one
  replaces it after some thousand characters.

transformers' parser only finds regions here: it runs on a copy of the template in which every field
is plain text. The text of a call is parsed once it is complete, by the template itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from freight.base.fields import JsonDict, JsonObject
from freight.base.patterns import AnswerPattern
from freight.errors import CheckpointError
from freight.serve.answers.argument_types import names_of
from freight.serve.answers.finder import (
    Finder,
    as_text,
    finder_of,
    load_fields,
    searchable,
    strings_in,
)
from freight.serve.answers.out import Pieces, SpecialTokens
from freight.serve.answers.pieces import MessageParser, Piece, PieceKind
from freight.serve.answers.response_templates import CallForm
from freight.serve.answers.tagged_calls import Tagged
from freight.serve.answers.verbatim import arguments_texts, within_string
from freight.text.tokenizer import (
    Tokenizer,
    load_response_template,
    parse_response,
    response_parser,
)

if TYPE_CHECKING:
    from freight.text.tokenizer import ResponseParser, ResponseTemplate

logger = logging.getLogger("freight")

_CALLS = "tool_calls"
_OUTSIDE = (None, "")  # of all regions: the region, and the prefix that leads there
_REASONING = ("reasoning_content", "reasoning", "thinking")
_OTHER = "text outside of all fields"  # the name of an added field
_SLICE = 4096  # characters that transformers' parser gets at once
_SLICE_AGAIN = 128  # of text that it may have to get once more
_LIFE = 16384  # characters that one of transformers' parsers gets before it is replaced
_LONGEST_CALL = 1 << 20  # characters; longer ones are content
_AHEAD = 32  # characters that the opening of a call may depend on
_MOST_ENDS = 256  # end tags within the values of one call
_PRIVATE = range(0xE000, 0x10FFFE)  # characters, most of which no text has
_MOST_AGAIN = 32  # times that text of one answer is read again: more would take quadratic time


@dataclass(frozen=True)
class Markup:
    """A prepared response template.

    with_calls     finds regions, calls included; None: there are no calls
    without_calls  finds the other regions; None: there are none
    calls          the template that parses the text of one region of calls
    form           the form that parses it instead of `calls`, if it has its own syntax
    typed          whether `calls` needs the tools' schemas, because its markup has no types
    json_calls     whether `calls` has JSON
    reasoning      the name of the field of reasoning
    implicit       the name of the field of text outside of markup
    keeps_rest     whether that text is content; False if the template has markup for content
    special        strips special tokens
    anchor         finds the beginning of an answer in a prompt
    """

    with_calls: Finder | None
    without_calls: Finder | None
    calls: ResponseTemplate | None
    form: CallForm | None
    typed: bool
    json_calls: bool
    reasoning: str | None
    implicit: str
    keeps_rest: bool
    special: SpecialTokens
    anchor: AnswerPattern

    def parser(self, prompt_text: str | None, tools: Sequence[JsonObject]) -> MessageParser:
        """Return the parser of an answer to `prompt_text` (None: unknown). Without tools, markup of
        calls is content.
        """
        return _Reader(self, prompt_text or "", tools)

    def begins_in_reasoning(self, prompt_text: str) -> bool:
        """Return whether an answer to this prompt begins within reasoning."""
        return (
            self.reasoning is not None
            and self.entry(prompt_text, self.without_calls)[0] == self.reasoning
        )

    def entry(self, prompt_text: str, finder: Finder | None) -> tuple[str | None, str]:
        """Return the region in which an answer to this prompt begins, and a prefix that leads a new
        parser there: none, with a line of the log, where the template cannot tell.
        """
        if finder is None:
            return _OUTSIDE
        try:
            return self._entry(prompt_text, finder)
        except (CheckpointError, ValueError) as error:
            logger.warning(
                "where an answer begins is not known from its prompt: %s",
                error,
            )
            return _OUTSIDE

    def _entry(self, prompt_text: str, finder: Finder) -> tuple[str | None, str]:
        template = finder.template
        anchor = _last(self.anchor.finditer(prompt_text))
        begun = ""
        if anchor is not None:
            begun = prompt_text[anchor.end() :]
        if self.reasoning is not None:
            open_re = template.fields[self.reasoning].open_re
            tag = _last(open_re.finditer(begun or prompt_text[-256:]))
            if tag is not None:
                opening: str = tag.group()
                if anchor is None:  # only a tag at the very end counts
                    inside = prompt_text.rstrip().endswith(opening.strip())
                else:
                    inside = _region(response_parser(template, begun)) == self.reasoning
                if inside:
                    return self.reasoning, opening
        if begun.strip():
            return None, "."
        return _OUTSIDE


def markup_of(tokenizer: Tokenizer, template: JsonObject, form: CallForm | None = None) -> Markup:
    """Prepare `template` for the model with this tokenizer.

    form  the form that `template` was built from

    Raises ValueError if transformers cannot read the template.
    """
    anchor = load_response_template(template).start_anchor_re
    fields = {name: searchable(dict(field)) for name, field in template["fields"].items()}
    explicit: JsonDict = {}
    without_markup = []
    for name, region in fields.items():
        if "open" in region or "open_pattern" in region:
            explicit[name] = region
        else:
            without_markup.append(name)
    implicit = next(iter(without_markup), _OTHER)
    skeleton = {name: as_text(field) for name, field in explicit.items()}
    calls = explicit.get(_CALLS)
    content = None
    with_calls = None
    loaded_calls = None
    if calls:
        content = calls.get("content")
        with_calls = finder_of(skeleton, implicit)
        loaded_calls = load_fields({_CALLS: {**calls, "repeats": True}}, _OTHER)
    skeleton.pop(_CALLS, None)
    without_calls = None
    if skeleton:
        without_calls = finder_of(skeleton, implicit)
    written = strings_in(explicit)
    if form is not None:
        written += form.markers
    markup_text = "".join(written).replace("\\", "")
    in_markup = {text for text in tokenizer.special_texts if text in markup_text}
    return Markup(
        with_calls=with_calls,
        without_calls=without_calls,
        calls=loaded_calls,
        form=form,
        typed=content in ("xml-inline", "kv-lines"),
        json_calls=content == "json",
        reasoning=next(filter(explicit.__contains__, _REASONING), None),
        implicit=implicit,
        keeps_rest=implicit == "content" or (implicit == _OTHER and "content" not in explicit),
        special=SpecialTokens(tokenizer.special_texts - in_markup),
        anchor=anchor,
    )


def _region(parser: ResponseParser) -> str | None:
    """Return the explicit region that a new parser is in after its prefix."""
    event = _last(parser.initial_events)
    if event is None or event["type"] == "region_close":
        return None
    return str(event["field"])


def _last(items: Iterable[Any]) -> Any:
    """Return the last item; None without any."""
    return next(iter(deque(items, maxlen=1)), None)


@dataclass(slots=True)
class _Within:
    """End tags within the values of a call.

    ends     where they are (begin, end) in the text of the call
    parts    how many parts of that text were searched for values, of `size` characters
    is_open  whether these parts end within a value
    """

    ends: list[tuple[int, int]] = field(default_factory=list)
    parts: int = 0
    size: int = 0
    is_open: bool = False


class _Reader:
    """A `MessageParser`."""

    def __init__(self, markup: Markup, prompt_text: str, tools: Sequence[JsonObject]) -> None:
        self._markup = markup
        finder = markup.without_calls
        if tools and markup.with_calls:
            finder = markup.with_calls
        self._tools = tools
        self._names = set(names_of(tools))
        self._syntax = None if markup.form is None else markup.form.syntax
        self._special = markup.special.stripper()
        self._out = Pieces()
        self._held = ""  # text that transformers' parser has, and has reported no event for
        self._fed = 0
        self._region: str | None = None  # None: outside of markup
        self._opening = ""  # the text that opened the region
        self._call: list[str] = []  # the text of a call so far, after its opening
        self._call_size = 0
        self._given_up = False  # the call is too long, and becomes content
        self._within = _Within()  # of that call
        self._again = _MOST_AGAIN
        self._section_end = "" if markup.form is None else markup.form.section_end
        # Text after a call that may become the end of the section; None: not after a call.
        self._behind: str | None = None
        self._finished = False
        self._parser: ResponseParser | None = None
        if finder is not None:
            self._template = finder.template
            self._first_of = finder.first_of
            self._region, self._opening = markup.entry(prompt_text, finder)
            try:
                self._parser = response_parser(self._template, self._opening)
            except Exception:
                self._give_up()
            if self._region is not None:
                self._out.mark()

    def feed(self, text: str) -> list[Piece]:
        """Take more text, special tokens included; returns the pieces that are certain by now."""
        if self._finished:
            return []
        text = self._special.feed(text)
        self._guarded(text)
        return self._out.take()

    def finish(self, complete: bool) -> list[Piece]:
        """End the text; returns the last pieces. complete: the model ended by itself. An incomplete
        call is content.
        """
        if self._finished:
            return []
        self._guarded(self._special.finish())
        self._finished = True
        if self._parser is not None:
            try:
                self._finalize(complete)
            except Exception:
                self._give_up()
        self._give_behind()
        self._out.finish()
        return self._out.take()

    def _finalize(self, complete: bool) -> None:
        assert self._parser is not None
        _, events = self._parser.finalize()
        again = self._walk(events, complete)
        if again is None and self._region == _CALLS:
            again = self._close_call("", complete)
        if again is not None:
            self._begin_again()
            self._scan_all(again)
            self._finalize(complete)

    def _guarded(self, text: str) -> None:
        if self._parser is None:
            self._out.verbatim(text)
            return
        try:
            self._scan_all(text)
        except Exception:
            self._give_up()

    def _scan_all(self, text: str) -> None:
        slices = deque(_sliced(text, _SLICE))
        while slices:
            again = self._scan(slices.popleft())
            if again:
                slices.extendleft(reversed(_sliced(again, _SLICE_AGAIN)))

    def _give_up(self) -> None:
        """Treat the rest as content: a faulty template in a checkpoint must not end a request."""
        logger.exception(
            "parsing an answer by its response template failed; the rest of it is sent as content"
        )
        self._give_behind()
        if self._region == _CALLS:
            self._out.verbatim("".join(self._raw_call()))
        self._out.verbatim(self._held)
        self._parser = None
        self._region = None
        self._held = ""

    def _scan(self, text: str) -> str | None:
        """Take more text; returns text that is to be taken again, by a parser that was begun for
        it.
        """
        if self._region == _CALLS and self._template.fields[_CALLS].close_re is None:
            self._add_to_call(text)  # only the end of the answer ends this region
            return None
        if not self._held:
            first = self._first_of.get(self._region)
            if first is not None and first.isdisjoint(text):
                self._text(text)  # the same as with transformers' parser, at a tenth of the cost
                return None
        assert self._parser is not None
        self._held += text
        again = self._walk(self._parser.feed(text), False)
        if again is not None:
            self._begin_again()
            return again
        self._fed += len(text)
        if self._fed > _LIFE or len(self._held) > _SLICE:
            return self._renew()
        return None

    def _begin_again(self) -> None:
        """Begin a new parser in the same region, without the earlier text."""
        self._parser = response_parser(self._template, self._prefix())
        self._fed = 0
        self._held = ""

    def _prefix(self) -> str:
        """Return a text that leads a new parser into the region."""
        if self._region is None:
            return "."
        if self._region != _CALLS:
            return self._opening
        # An opening may be one only before certain characters
        begin = "".join(self._call[:_AHEAD])[:_AHEAD]
        if self._within.ends:
            begin = begin[: self._within.ends[0][0]]
        # The point keeps the parser from waiting for more of what `begin` may end in
        if begin:
            begin += "."
        return self._opening + begin

    def _renew(self) -> str | None:
        """Continue with a new parser in the same region, without the earlier text."""
        if self._region == _CALLS and self._template.fields[_CALLS].close_re is None:
            return None
        parser = response_parser(self._template, self._prefix())
        self._fed = 0
        region = _region(parser)
        if region == self._markup.implicit:
            region = None
        if region != self._region:
            return None
        self._parser = parser
        if len(self._held) > _SLICE:  # a pattern that matches without end
            self._text(self._held)
            self._held = ""
        again = self._walk(parser.feed(self._held), False)
        if again is not None:
            self._begin_again()
        return again

    def _walk(self, events: Sequence[JsonObject], complete: bool) -> str | None:
        """Match transformers' events with the held text: they do not report the text of the markup
        itself. Returns text that a new parser is to read, in place of the events that remain.
        """
        buffered = self._held
        at = 0
        for event in events:
            kind = event["type"]
            name = event["field"]
            if kind == "region_chunk":
                at += len(event["text"])
                self._text(event["text"])
            elif name == self._markup.implicit:
                continue
            elif kind == "region_open":
                opening = _matched(self._template.fields[name].open_re, buffered, at) or ""
                at += len(opening)
                self._open(name, opening)
            else:
                closing = _matched(self._template.fields[name].close_re, buffered, at)
                at += len(closing or "")
                if name == _CALLS and closing is not None:
                    text = closing or buffered[at : at + 1]  # a mark that only follows the call
                    if self._goes_on(text):
                        return buffered[at + len(text) - len(closing) :]
                again = self._close(closing, complete)
                if again is not None:
                    return again + buffered[at:]
        self._held = buffered[at:]
        return None

    def _open(self, name: str, opening: str) -> None:
        self._give_behind()
        self._region = name
        self._opening = opening
        if name == _CALLS:
            self._call = []
            self._call_size = 0
            self._given_up = False
            self._within = _Within()
        else:
            self._out.mark()

    def _text(self, text: str) -> None:
        if self._region == _CALLS:
            self._add_to_call(text)
        elif self._region is None:
            if self._behind is not None:
                text = self._after_call(self._behind + text)
            if self._markup.keeps_rest:
                self._out.add(PieceKind.CONTENT, text)
        elif self._region == self._markup.reasoning:
            self._out.add(PieceKind.REASONING, text)
        else:
            self._out.add(PieceKind.CONTENT, text)

    def _after_call(self, text: str) -> str:
        """Return the content in `text`, which follows a call; the end of the section is dropped."""
        text = text.lstrip(" \t\r\n")  # white space next to markup
        if text.startswith(self._section_end):
            self._behind = None
            return text.removeprefix(self._section_end)
        if self._section_end.startswith(text):
            self._behind = text
            return ""
        self._behind = None
        return text

    def _give_behind(self) -> None:
        """Output the text held back after a call: it is not the end of a section."""
        text = self._behind or ""
        self._behind = None
        self._out.add(PieceKind.CONTENT, text)

    def _add_to_call(self, text: str) -> None:
        self._call_size += len(text)
        if self._call_size <= _LONGEST_CALL:
            self._call.append(text)
        else:  # too long for a call: content, even if it ends later
            self._out.verbatim("".join([*self._raw_call(), text]))
            self._given_up = True

    def _raw_call(self) -> list[str]:
        """Return the text of the unfinished call that was not yet sent, and forget it."""
        raw = [self._opening, *self._call]
        self._call = []
        if self._given_up:
            return []
        return raw

    def _close(self, closing: str | None, complete: bool) -> str | None:
        """Close the region. closing: its markup; None: the answer ended within the region. Returns
        text that is to be read again.
        """
        if self._region == _CALLS:
            return self._close_call(closing or "", complete or closing is not None)
        if closing is not None:
            self._out.mark()
        self._region = None
        return None

    def _goes_on(self, closing: str) -> bool:
        """Return whether `closing` is text within a value of the call so far, and then add it."""
        within = self._within
        if self._given_up or not self._again or len(within.ends) >= _MOST_ENDS:
            return False
        text = "".join(self._call[within.parts :])
        if within.ends and self._opens_call(text):
            return False
        within.is_open = self._ends_within(text, within.is_open)
        if not within.is_open:
            return False
        begin = within.size + len(text)
        within.size = begin + len(closing)
        within.ends.append((begin, within.size))
        self._add_to_call(closing)
        within.parts = len(self._call)
        return True

    def _ends_within(self, text: str, is_open: bool) -> bool:
        if self._syntax is not None:
            return self._syntax.ends_within(text, is_open)
        return self._markup.json_calls and within_string(text, is_open)

    def _close_call(self, closing: str, is_complete: bool) -> str | None:
        """Output a call, or its text if it cannot be read. Returns text to be read again."""
        body = "".join(self._call)
        raw = "".join([*self._raw_call(), closing])
        self._region = None
        within = self._within
        self._within = _Within()
        if self._given_up:
            self._out.verbatim(raw)
            return None
        opening = len(self._opening)
        if not within.ends:
            is_read = is_complete and self._output_calls(raw, body, closing)
        else:
            begin, end = within.ends[0]
            # else its value never ends
            may_be_text = bool(closing) or not isinstance(self._syntax, Tagged)
            is_read = (may_be_text and not self._opens_call(body[end:])) and self._output_hiding(
                body, closing, within
            )
        if is_read:
            return None
        if within.ends:  # the first one was the end: that of its value is missing
            self._again -= not self._opens_call(body[end:])
            raw_end = opening + end
            if not self._output_calls(raw[:raw_end], body[:begin], body[begin:end]):
                self._out.verbatim(raw[:raw_end])
            return raw[raw_end:]
        later = None
        if is_complete:
            later = self._later_opening(raw, opening)
        if later is None:
            self._out.verbatim(raw)
            return None
        self._out.add(PieceKind.CONTENT, raw[:later])
        return raw[later:]

    def _output_hiding(self, body: str, closing: str, within: _Within) -> bool:
        """Output the calls in a region with the end tags in its values hidden from their parser;
        returns False if they cannot be read.
        """
        first = body[within.ends[0][0]]
        mark = next(letter for letter in map(chr, _PRIVATE) if letter not in body)
        parts = []
        at = 0
        for begin, end in within.ends:
            parts += [body[at:begin], body[begin:end].replace(first, mark)]
            at = end
        hidden = "".join([*parts, body[at:]])
        raw = f"{self._opening}{hidden}{closing}"
        return self._output_calls(raw, hidden, closing, (mark, first))

    def _opens_call(self, text: str) -> bool:
        """Return whether another call of a tool begins in `text`."""
        syntax = self._syntax
        return isinstance(syntax, Tagged) and syntax.opening(text, 0, self._tools) is not None

    def _later_opening(self, raw: str, at: int) -> int | None:
        """Return where another call may begin in the text of a call that cannot be read."""
        if not self._again:
            return None
        self._again -= 1
        if isinstance(self._syntax, Tagged):
            return self._syntax.opening(raw, at, self._tools)
        match = self._template.fields[_CALLS].open_re.search(raw, at)
        if match is None:
            return None
        return int(match.start())

    def _output_calls(
        self, raw: str, body: str, closing: str, hidden: tuple[str, str] = ("", "")
    ) -> bool:
        """Output the calls in a region; returns False if they cannot be read. hidden: a character
        of `body` and the one that it stands for.
        """
        end = len(body)
        if isinstance(self._syntax, Tagged):
            body += closing
            end = len(body)
            if not closing:
                end = self._syntax.rest(body)
        calls = self._calls(raw, body[:end])
        if not calls:
            return False
        tail = body[end:]
        if hidden[0]:
            calls = [replace(piece, text=piece.text.replace(*hidden)) for piece in calls]
            tail = tail.replace(*hidden)
        self._out.calls(calls)
        self._behind = None
        if self._section_end:
            self._behind = ""
        self._out.add(PieceKind.CONTENT, tail)
        return True

    def _calls(self, raw: str, body: str) -> list[Piece] | None:
        """Return the calls in a region, or None if they cannot be read."""
        try:
            calls = self._read(raw, body)
            for name, text in calls:
                f"{name}{text}".encode()  # raises for a lone surrogate
        except Exception:
            return None
        pieces: list[Piece] = []
        for name, text in calls:
            if not isinstance(name, str) or not name:
                return None
            if not self._opening.strip() and name not in self._names:
                return None  # JSON without any markup is a call only if it names a tool
            pieces.append(Piece(PieceKind.TOOL_CALL, text, name))
        return pieces or None

    def _read(self, raw: str, body: str) -> list[tuple[str, str]]:
        """Return (name, arguments as JSON) of the calls in a region. Raises for unreadable ones."""
        if self._syntax is not None:
            return self._syntax.read(self._opening, body, self._tools)
        tools: Sequence[JsonObject] = ()
        if self._markup.typed:
            tools = self._tools
        assert self._markup.calls is not None
        message = parse_response(raw, self._markup.calls, tools)
        names: list[str] = []
        arguments: list[object] = []
        for entry in message[_CALLS]:  # a region has one call, or a list
            for call in entry if isinstance(entry, list) else [entry]:
                names.append(call["function"]["name"])
                arguments.append(call["function"].get("arguments"))
        texts = arguments_texts(body, arguments)
        if texts is None:
            raise ValueError("arguments are not an object")
        return list(zip(names, texts, strict=True))


def _matched(pattern: AnswerPattern | None, text: str, at: int) -> str | None:
    """Return what `pattern` matches at `at`; None if it does not, or there is no pattern."""
    if pattern is None:
        return None
    match = pattern.match(text, at)
    if match is None:
        return None
    return str(match.group())


def _sliced(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]
