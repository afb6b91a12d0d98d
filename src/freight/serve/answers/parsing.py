"""Parser of answers by a response template in transformers' format, with more guarantees.

- Nothing raises. A call that cannot be read, or is incomplete, is content, exactly as the model
  wrote it.
- Nothing is lost but parsed markup, with the white space next to it, and special tokens.
- Chunks of any size give the same pieces once these are joined.
- The end tag of a call does not end it within a value, and a tag that only quotes markup does not
  hide the call behind it.
- The cost is linear.

`finder.py` finds the regions. The text of a call is parsed once it is complete, by the template itself
or by the syntax of its form.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freight.base.fields import JsonDict, JsonObject
from freight.base.patterns import AnswerPattern
from freight.errors import CheckpointError
from freight.serve.answers.argument_types import names_of
from freight.serve.answers.finder import Finder, Mark, Regions, region_after, regions_of
from freight.serve.answers.out import Pieces, SpecialTokens, Splitter
from freight.serve.answers.pieces import MessageParser, Piece, PieceKind
from freight.serve.answers.response_templates import CallForm
from freight.serve.answers.tagged_calls import Tagged
from freight.serve.answers.verbatim import arguments_texts, within_string
from freight.text.thinking import REASONING_FIELDS
from freight.text.tokenizer import Tokenizer, load_response_template, parse_response

if TYPE_CHECKING:
    from freight.text.tokenizer import ResponseTemplate

logger = logging.getLogger("freight")

_CALLS = "tool_calls"
_OUTSIDE = (None, "")  # of all regions: the region, and the text right before the answer
_OTHER = "text outside of all fields"  # the name of an added field
_LONGEST_CALL = 1 << 20  # characters; longer ones are content
_MOST_ENDS = 256  # end tags within the values of one call
_PRIVATE = range(0xE000, 0x10FFFE)  # characters, most of which no text has
_MOST_AGAIN = 32  # times that text of one answer is read again: more would take quadratic time


@dataclass(frozen=True)
class Markup:
    """A prepared response template.

    with_calls     the regions, calls included; None: there are no calls
    without_calls  the other regions; None: there are none
    openings       what opens each region
    calls          the template that parses the text of one region of calls
    form           the form that parses it instead of `calls`, if it has its own syntax
    typed          whether `calls` needs the tools' schemas, because its markup has no types
    json_calls     whether `calls` has JSON
    reasoning      the name of the field of reasoning
    keeps_rest     whether text outside of markup is content; False if the template has markup for
                   content
    special        strips special tokens
    anchor         finds the beginning of an answer in a prompt
    """

    with_calls: Regions | None
    without_calls: Regions | None
    openings: Mapping[str, AnswerPattern]
    calls: ResponseTemplate | None
    form: CallForm | None
    typed: bool
    json_calls: bool
    reasoning: str | None
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

    def entry(self, prompt_text: str, regions: Regions | None) -> tuple[str | None, str]:
        """Return the region in which an answer to this prompt begins, and the text right before the
        answer: none, with a line of the log, where the template cannot tell.
        """
        if regions is None:
            return _OUTSIDE
        try:
            return self._entry(prompt_text, regions)
        except CheckpointError as error:
            logger.warning(
                "where an answer begins is not known from its prompt: %s",
                error,
            )
            return _OUTSIDE

    def _entry(self, prompt_text: str, regions: Regions) -> tuple[str | None, str]:
        anchor = _last(self.anchor.finditer(prompt_text))
        begun = ""
        if anchor is not None:
            begun = prompt_text[anchor.end() :]
        if self.reasoning is not None:
            tag = _last(self.openings[self.reasoning].finditer(begun or prompt_text[-256:]))
            if tag is not None:
                opening: str = tag.group()
                if anchor is None:  # only a tag at the very end counts
                    inside = prompt_text.rstrip().endswith(opening.strip())
                else:
                    inside = region_after(regions, begun) == self.reasoning
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
    fields = {name: _searchable(field) for name, field in template["fields"].items()}
    loaded = load_response_template({**template, "fields": fields})
    explicit = {name: field for name, field in loaded.fields.items() if field.open_re}
    calls = fields.get(_CALLS, {}) if _CALLS in explicit else {}
    with_calls = None
    loaded_calls = None
    if calls:
        with_calls = regions_of(explicit.values())
        loaded_calls = load_response_template(
            {
                "start_anchor_pattern": "(?!)",
                "fields": {_CALLS: {**calls, "repeats": True}, _OTHER: {"content": "text"}},
            }
        )
    without_calls = None
    other_fields = [field for name, field in explicit.items() if name != _CALLS]
    if other_fields:
        without_calls = regions_of(other_fields)
    written = _strings_in([fields[name] for name in explicit])
    if form is not None:
        written += form.markers
    markup_text = "".join(written).replace("\\", "")
    in_markup = {text for text in tokenizer.special_texts if text in markup_text}
    content = calls.get("content")
    return Markup(
        with_calls=with_calls,
        without_calls=without_calls,
        openings={name: field.open_re for name, field in explicit.items()},
        calls=loaded_calls,
        form=form,
        typed=content in ("xml-inline", "kv-lines"),
        json_calls=content == "json",
        reasoning=next(filter(explicit.__contains__, REASONING_FIELDS), None),
        keeps_rest=loaded.implicit == "content"
        or (loaded.implicit is None and "content" not in explicit),
        special=SpecialTokens(tokenizer.special_texts - in_markup),
        anchor=anchor,
    )


def _searchable(field: JsonObject) -> JsonDict:
    """Return `field` with patterns that begin without white space.

    To match it would take quadratic time, and `Pieces` drops it anyway.
    """
    searchable = dict(field)
    for key in ("open_pattern", "close_pattern"):
        if key in searchable:
            searchable[key] = searchable[key].removeprefix(r"\s*") or searchable[key]
    return searchable


def _strings_in(value: object) -> list[str]:
    """Return all strings in a template."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    strings: list[str] = []
    if isinstance(value, list):
        for part in value:
            strings += _strings_in(part)
    return strings


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
        regions = markup.without_calls
        if tools and markup.with_calls:
            regions = markup.with_calls
        self._tools = tools
        self._names = set(names_of(tools))
        self._syntax = None if markup.form is None else markup.form.syntax
        self._special = Splitter(markup.special)
        self._out = Pieces()
        self._region: str | None = None  # None: outside of markup
        self._opening = ""  # the text that opened the region
        self._has_opened = False  # in the answer, and no text followed yet
        self._call: list[str] = []  # the text of a call so far, after its opening
        self._call_size = 0
        self._given_up = False  # the call is too long, and becomes content
        self._within = _Within()  # of that call
        self._again = _MOST_AGAIN
        self._section_end = "" if markup.form is None else markup.form.section_end
        # Text after a call that may become the end of the section; None: not after a call.
        self._behind: str | None = None
        self._finder: Finder | None = None  # None: all further text is content
        if regions is not None:
            self._region, self._opening = markup.entry(prompt_text, regions)
            self._finder = Finder(regions, self._opening)
            if self._region is not None:
                self._out.mark()

    def feed(self, text: str) -> list[Piece]:
        """Take more text, special tokens included; returns the pieces that are certain by now."""
        self._read_more(self._special.strip(text))
        return self._out.take()

    def finish(self, complete: bool) -> list[Piece]:
        """End the text; returns the last pieces. complete: the model ended by itself. An incomplete
        call is content.
        """
        self._read_more(self._special.finish())
        if self._finder is not None:
            try:
                self._finalize(self._finder, complete)
            except Exception:
                self._give_up(self._finder)
        self._give_behind()
        self._out.finish()
        return self._out.take()

    def _read_more(self, text: str) -> None:
        finder = self._finder
        if finder is None:
            self._out.verbatim(text)
            return
        try:
            finder.feed(text)
            self._scan(finder)
        except Exception:
            self._give_up(finder)

    def _finalize(self, finder: Finder, complete: bool) -> None:
        while True:
            self._take_marks(finder, True)
            if self._region == _CALLS:
                self._close_call(finder, "", complete)
            if not finder.has_more:
                return
            self._scan(finder)

    def _give_up(self, finder: Finder) -> None:
        """Treat the rest as content: a faulty template in a checkpoint must not end a request."""
        logger.exception(
            "parsing an answer by its response template failed; the rest of it is sent as content"
        )
        self._give_behind()
        if self._region == _CALLS:
            self._out.verbatim("".join(self._raw_call()))
        elif self._has_opened:  # no text is of that region
            self._out.verbatim(self._opening)
        self._out.verbatim(finder.rest())
        self._finder = None
        self._region = None

    def _scan(self, finder: Finder) -> None:
        while finder.load():
            self._take_marks(finder, False)

    def _take_marks(self, finder: Finder, is_last: bool) -> None:
        """Take the text that is certain, with the marks in it. is_last: the text ends here."""
        while True:
            text, mark = finder.next(self._region, is_last)
            if text:
                self._text(text)
            if mark is None:
                return
            if self._region is None:
                self._open(mark)
            elif self._region == _CALLS:
                self._end_call(finder, mark.text)
            else:
                self._out.mark()
                self._region = None
                self._has_opened = False

    def _open(self, mark: Mark) -> None:
        self._give_behind()
        self._region = mark.name
        self._opening = mark.text
        self._has_opened = True
        if mark.name == _CALLS:
            self._call = []
            self._call_size = 0
            self._given_up = False
            self._within = _Within()
        else:
            self._out.mark()

    def _text(self, text: str) -> None:
        self._has_opened = False
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

    def _end_call(self, finder: Finder, closing: str) -> None:
        """Close a call at its closing markup, unless this is text within a value."""
        text = closing or finder.following  # markup that only precedes what follows
        if text and self._goes_on(text):
            finder.skip(len(text) - len(closing))
        else:
            self._close_call(finder, closing, True)

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

    def _close_call(self, finder: Finder, closing: str, is_complete: bool) -> None:
        """Output a call, or its text if it cannot be read, a part of which may be read again."""
        body = "".join(self._call)
        raw = "".join([*self._raw_call(), closing])
        self._region = None
        within = self._within
        self._within = _Within()
        if self._given_up:
            self._out.verbatim(raw)
            return
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
            return
        if within.ends:  # the first one was the end: that of its value is missing
            self._again -= not self._opens_call(body[end:])
            raw_end = opening + end
            if not self._output_calls(raw[:raw_end], body[:begin], body[begin:end]):
                self._out.verbatim(raw[:raw_end])
            finder.feed_again(raw[raw_end:])
            return
        later = None
        if is_complete:
            later = self._later_opening(raw, opening)
        if later is None:
            self._out.verbatim(raw)
            return
        self._out.add(PieceKind.CONTENT, raw[:later])
        finder.feed_again(raw[later:])

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
        match = self._markup.openings[_CALLS].search(raw, at)
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
            calls = [piece._replace(text=piece.text.replace(*hidden)) for piece in calls]
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
