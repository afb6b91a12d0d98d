"""Calls with a tag for every argument, as in GLM, Qwen3-Coder, MiniMax and DeepSeek V3.2.

A form is a row of data, `Tagged`, which serves to parse calls and to force them. Values have no
types in this markup, or only the mark of a string: they take the types of the tool's schema.
Parsing is linear. A call that does not match its form raises ValueError; closing tags may be missing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property

from freight.base.fields import JsonObject, is_integer
from freight.engine.grammar import WHITESPACE
from freight.serve.answers.argument_types import (
    ANY,
    branches_of,
    constants_of,
    mapping_of,
    names_of,
    of_types,
    parameters_of,
    properties_of,
    resolved,
    shapes_of,
    types_of,
    value_text,
    within,
)
from freight.serve.answers.scanner import Scanner

# Literal: a text -> an expression of a grammar. TokenIn: a text -> the first marker in it that is
# one token, as (text before it, token id, text behind it).
Literal = Callable[[str], str]
TokenIn = Callable[[str], tuple[str, int, str] | None]
# Larger minLength and maxLength would make large grammars, and are not enforced.
_LONGEST_BOUND = 1000
# What may follow the name in an opening tag: whether the value is a string. Models invent others.
_REST = r"""(?:\s{1,16}\w{1,32}=["']?[^"'<>]{0,256}["']?){0,8}"""
_IS_STRING = re.compile(r"""\sstring=["']?(true|false)["']?(?:\s|$)""")
# The attributes of an opening tag: a name, quoted or not, and the rest.
_ATTRIBUTES = re.compile(
    rf"""(?P<q>["']?)(?P<name>(?!["'])(?:(?!["']\s{{1,16}}\w{{1,32}}=)[^<>]){{1,256}}?)(?P=q)(?P<rest>{_REST})"""
)
_CLOSED_ITSELF = re.compile(r"""(?<=["'])\s{0,16}/\Z""")
# Where a tag counts that no closing tag precedes: at the beginning of a line, or right behind a text
# that does not quote it.
_FREE = r"""(?:\n|(?<![\s"'`]))"""

# What only tags have in DeepSeek's markup.
_NAMESPACE = "｜DSML｜"
_ALIKE = 0.85  # of two tags, by difflib: one is a misspelling of the other


@dataclass(frozen=True)
class Tagged:
    """A form of calls with tagged arguments. Pairs are the texts before and after.

    head      around the name; with "" after it, the name ends where an argument or the tail begins
    tail      the end of a call
    key       around the name of an argument
    value     around its value
    pad       written on both sides of the value, inside `value`; one on each side is not part of it
    gap       written between key and value; on reading, any white space is allowed there
    line      written after an argument
    strings   whether the key has `string="true"` or `string="false"`
    outer     around head and tail, if that is another pair of tags
    section   around all calls of an answer, if that is another pair of tags

    Reading forgives closing tags that the model forgot, any number of them, as long as the end of
    the last value of an answer is marked by some tag.
    """

    head: tuple[str, str]
    tail: str
    key: tuple[str, str]
    value: tuple[str, str]
    pad: str = ""
    gap: str = ""
    line: str = "\n"
    strings: bool = False
    outer: tuple[str, str] = ("", "")
    section: tuple[str, str] = ("", "")

    @cached_property
    def _key(self) -> tuple[str, str]:
        """The texts around the name of an argument, without the quotes that models forget."""
        if self.strings:
            return self.key[0].rstrip('"'), ">"
        return self.key[0].rstrip('"'), self.key[1].lstrip('"')

    @cached_property
    def _head(self) -> tuple[str, str]:
        return self.head[0].rstrip('"'), self.head[1].lstrip('"')

    @cached_property
    def _openings(self) -> tuple[str, ...]:
        """What a further call may begin with."""
        return tuple(filter(None, (self.section[0], self.outer[0], self._head[0])))

    @cached_property
    def _closings(self) -> tuple[str, ...]:
        """What the end of a call may consist of, in this order."""
        return tuple(filter(None, (self.tail, self.outer[1], self.section[1])))

    @cached_property
    def _value_ends(self) -> re.Pattern[str]:
        """What may be the end of a value. An argument, or the end of the call, or another call must
        follow, so that a value may contain the closing tag.
        """
        after = _any_of((self._key[0], *self._closings, *self._openings))
        closing = re.escape(self.value[1])
        wrong = r"</[^<>\s]{1,80}>"
        if _NAMESPACE in self.value[1]:  # the right tag may follow a wrong one
            right = _any_of((self.value[1], *self._closings))
            wrong = rf"(?!{right})</｜?{_NAMESPACE}｜?[^<>\n]{{1,64}}>"
            closing = rf"(?:{wrong}\s{{0,16}})?{closing}"
        return re.compile(rf"(?:{closing}|(?P<wrong>{wrong}))(?=\s*(?:{after}|\Z))")

    def _ends_of_values(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the ends of values in `text`, those with a misspelt tag included."""
        for end in self._value_ends.finditer(text):
            if end["wrong"] is None or self._misspells(end["wrong"]):
                yield end

    def _misspells(self, tag: str) -> bool:
        """Return whether `tag` must be meant as the closing tag of a value, and is not that."""
        if tag in (self.value[1], *self._closings):
            return False
        if _NAMESPACE in self.value[1]:
            return True
        matcher = SequenceMatcher(None, tag, self.value[1])
        return matcher.real_quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE

    @cached_property
    def _any_key(self) -> re.Pattern[str]:
        """The key of any argument, as `_declared` recognizes that of a known one."""
        return re.compile(self._key_of(r"[^<>\s\"']{1,256}"))

    def _call_ends(self, tools: Sequence[JsonObject]) -> re.Pattern[str]:
        """The end of a call: one of its closing tags, or the opening of a call of one of `tools`."""
        closing = _any_of(self._closings)
        opening = _any_of(self._openings)
        ends = [rf"(?:{closing})(?=\s*(?:{closing}|{opening}|\Z))", *self._named(tools)]
        return re.compile("|".join(ends))

    def _named(self, tools: Sequence[JsonObject]) -> list[str]:
        """Return an expression of the opening of a call of one of `tools`; none without tools."""
        names = list(map(str, names_of(tools)))
        if not names:
            return []
        before = ""
        for tag in filter(None, (self.section[0], self.outer[0])):
            before += rf"(?:{re.escape(tag)}\s{{0,16}})?"
        head = rf"{re.escape(self._head[0])}[\"']?\s{{0,16}}(?:{_any_of(names)})[\"']?\s{{0,16}}"
        after = re.escape(self._head[1])
        if not self._head[1]:  # the name ends where something else begins
            after = rf"(?={_any_of((self._key[0], *self._closings, *self._openings))}|\Z)"
        return [rf"{_FREE}{before}{head}{after}"]

    def opening(self, text: str, at: int, tools: Sequence[JsonObject]) -> int | None:
        """Return where a call of one of `tools` begins in `text`, from `at` on."""
        for named in self._named(tools):
            match = re.compile(named).search(text, at)
            if match is not None:
                return match.start()
        return None

    def ends_within(self, text: str, is_open: bool) -> bool:
        """Return whether a call that goes on with `text` ends within a value; is_open: whether it
        does so before.
        """
        opened = text.rfind(self.value[0] or self._key[0])
        closed = max((end.start() for end in self._ends_of_values(text)), default=-1)
        return opened > closed or (is_open and closed < 0)

    def read(self, opening: str, body: str, tools: Sequence[JsonObject]) -> list[tuple[str, str]]:
        """Return (name, arguments as JSON) of the calls in a region. Raises ValueError.

        body  including the closing markup. A region with a missing tail goes on to the end of the
              next call, so it may have several calls.
        """
        scan = Scanner(opening + body)
        marks = _Marks(
            _Ahead(self._ends_of_values(scan.text)),
            _Ahead(self._call_ends(tools).finditer(scan.text)),
        )
        calls: list[tuple[str, str]] = []
        while not calls or not scan.is_at_end:
            if calls and not scan.text.startswith(self._openings, scan.at):
                raise ValueError("text between arguments, or after them")
            name = self._read_name(scan)
            root = parameters_of(tools, name)
            if name not in marks.keys:
                marks.keys[name] = self._declared(properties_of(root, root), scan.text)
            calls.append((name, self._read_arguments(scan, root, marks, marks.keys[name])))
            for mark in self._closings:
                scan.blanks()
                scan.accept(mark)
            scan.blanks()
        return calls

    def _read_arguments(
        self, scan: Scanner, root: JsonObject, marks: _Marks, keys: Mapping[str, Sequence[int]]
    ) -> str:
        """Read the arguments that come next; returns them as JSON."""
        properties = properties_of(root, root)
        arguments: dict[str, str] = {}
        scan.blanks()
        while scan.accept(self._key[0]):
            key, is_string = self._read_key(scan)
            types = _types(properties.get(key), root, is_string)
            value = self._read_value(scan, marks, _first_of(keys, scan.at, but={key, *arguments}))
            arguments[key] = value_text(self._unpadded(value), types)
            scan.blanks()
        pairs = []
        for key, value in arguments.items():
            pairs.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
        return f"{{{', '.join(pairs)}}}"

    def _read_value(self, scan: Scanner, marks: _Marks, following: int | None) -> str:
        """Read the value that comes next. following: where the next key of the tool is."""
        text = scan.text
        begin = scan.at
        closed = marks.value_ends.first(begin)
        call_end = marks.call_ends.first(begin)
        limit = min(map(re.Match.start, filter(None, (closed, call_end))), default=len(text))
        if following is not None and following < limit:
            scan.at = following
            return self._unclosed(text[begin:following])
        if closed is not None and closed.start() == limit:
            scan.at = closed.end()
            return self._closed(text[begin:limit])
        if call_end is not None and self._key[0] not in text[begin:limit]:
            scan.at = limit
            # every forgotten tag leaves the end of its line
            return self._unclosed(text[begin:limit]).rstrip("\n")
        raise ValueError("a value without an end")

    def _closed(self, value: str) -> str:
        """Return `value`, which ends before its closing tag. Raises ValueError if it is two values:
        its own closing tag, text that belongs to nothing, and another key.
        """
        end = value.find(self.value[1])
        if end >= 0 and self._key[0] not in value[:end] and self._any_key.search(value, end):
            raise ValueError("text between arguments")
        return value

    def _unclosed(self, value: str) -> str:
        """Return `value`, whose closing tag seems to be missing. Raises ValueError if it has that
        tag, with text behind it that belongs to nothing.
        """
        end = value.find(self.value[1])
        if end >= 0 and self._key[0] not in value[:end]:
            raise ValueError("text behind an argument")
        return value

    def _read_key(self, scan: Scanner) -> tuple[str, bool | None]:
        """Read the key that comes next, up to its value; returns the name of the argument, and
        whether the markup says that it is a string.
        """
        # also where the end of the key is forgotten
        ends = re.compile(_any_of(filter(None, (self._key[1], self.value[0]))))
        mark = ends.search(scan.text, scan.at)
        if mark is None:
            raise ValueError("a key without an end")
        attribute = self._attribute(scan.text[scan.at : mark.start()])
        scan.at = mark.end()
        if mark.group() == self.value[0]:
            scan.at = mark.start()
        if self.value[0]:
            scan.blanks()
        if not scan.accept(self.value[0]):
            raise ValueError("a key without a value")
        return attribute

    def _read_name(self, scan: Scanner) -> str:
        scan.until(self._head[0])
        if self._head[1]:
            # `<invoke name="f"/>`: a call without arguments
            written = _CLOSED_ITSELF.sub("", scan.until(self._head[1]))
            return self._attribute(written)[0]
        marks = _any_of((self._key[0], *self._closings, *self._openings))
        mark = re.compile(rf"{marks}|\Z").search(scan.text, scan.at)
        assert mark is not None
        name = scan.text[scan.at : mark.start()].strip()
        if not re.fullmatch(r"[^\s<>{}\"]{1,256}", name):
            raise ValueError("no name")
        scan.at = mark.start()
        return name

    def _declared(self, properties: JsonObject, text: str) -> dict[str, list[int]]:
        """Return where the keys of `properties` are, in order, by name: a value whose closing tag
        is missing ends before one.

        Two arguments merged into one would be a wrong call. Keys that look like HTML tags do not
        count after a blank or a quotation mark, where a text may name them.
        """
        if not properties:
            return {}
        positions: dict[str, list[int]] = {}
        for match in re.finditer(self._key_of(_any_of(properties)), text):
            positions.setdefault(match["name"], []).append(match.start())
        return positions

    def _key_of(self, names: str) -> str:
        """Return an expression of the key of an argument whose name the expression `names` matches."""
        before = re.escape(self._key[0])
        name = f"(?P<name>{names})"
        if self.value[0]:
            value = re.escape(self.value[0])
            return rf"\n?{before}\s*{name}\s*(?:{re.escape(self._key[1])}\s*)?{value}"
        return rf"""{_FREE}{before}["']?{name}["']?{_REST}{re.escape(self._key[1])}"""

    def rest(self, body: str) -> int:
        """Return the end of the calls in a region without closing markup."""
        marks = (self.value[1], *self._closings)
        ends = [body.rfind(mark) + len(mark) for mark in marks if mark in body]
        return max(ends, default=len(body))

    def _attribute(self, text: str) -> tuple[str, bool | None]:
        """Return the name in `text`, and whether the tag marks the value as a string; None if it
        has no such mark.
        """
        if self._key[1] != ">":
            if any(tag in text for tag in (*self.key, *self.value, *self._closings)):
                raise ValueError("a name with tags")
            return text.strip(), None
        attributes = _ATTRIBUTES.fullmatch(text.strip())
        if attributes is None:
            raise ValueError("no name")
        string = _IS_STRING.search(attributes["rest"])
        if string is None:
            return attributes["name"], None
        return attributes["name"], string[1] == "true"

    def _unpadded(self, text: str) -> str:
        return text.removeprefix(self.pad).removesuffix(self.pad)

    def part(self, function: JsonObject, literal: Literal, token_in: TokenIn) -> JsonObject:
        """Return keyword arguments of StructuredOutputs for the arguments of `function`.

        Arguments come in the order of the schema's properties. Strings are any text up to the
        closing tag, within minLength and maxLength; other values are JSON that satisfies the
        schema. Raises ValueError for a name that this markup cannot express.
        """
        root = mapping_of(function.get("parameters"))
        rules: list[str] = []
        shapes = []
        for properties, required in shapes_of(root, root):
            arguments = []
            for name, schema in properties.items():
                self._check_name(name)
                rule = f"argument_{len(rules)}"
                resolved_schema = resolved(schema, root)
                rules.append(
                    self._argument(len(rules), name, resolved_schema, root, literal, token_in)
                )
                if name not in required:
                    rule += "?"
                arguments.append(rule)
            shapes.append(" ".join(arguments) or '""')
        return {"grammar": "\n".join([f"start: {' | '.join(shapes)}", *rules])}

    def _argument(
        self,
        number: int,
        name: str,
        schema: JsonObject,
        root: JsonObject,
        literal: Literal,
        token_in: TokenIn,
    ) -> str:
        """Return the rule of one argument, and the rules that it needs, one per line."""
        choices = []
        rules = []
        end = literal(self.pad + self.value[1] + self.line)
        for index, branch in enumerate(branches_of(schema, root)):
            types = types_of(branch, root)
            if not types or "string" in types:
                text = f"{number}_{index}"
                choices.append(f"{self._before(name, 'true', literal)} text_{text}")
                rules += self._text(text, of_types(branch, {"string"}), literal, token_in)
            if types - {"string"}:
                alone = within(of_types(branch, types - {"string"}), root)
                alone["x-guidance"] = {"whitespace_pattern": WHITESPACE}
                choices.append(
                    f"{self._before(name, 'false', literal)} %json {json.dumps(alone)} {end}"
                )
        return "\n".join([f"argument_{number}: {' | '.join(choices)}", *rules])

    def _check_name(self, name: str) -> None:
        """Raise ValueError if the name of an argument would be read back differently."""
        with suppress(ValueError):
            if name and self._key[1] not in name and self._attribute(name)[0] == name:
                return
        raise ValueError(
            f"the argument {name!r:.80} cannot be written in the form of this model's calls"
        )

    def _before(self, name: str, string: str, literal: Literal) -> str:
        key = self.key[1]
        if self.strings:
            key += f' string="{string}">'
        return literal(self.key[0] + name + key + self.gap + self.value[0] + self.pad)

    def _text(
        self, number: str, schema: JsonObject, literal: Literal, token_in: TokenIn
    ) -> list[str]:
        """Return the rules of a string's text and of the end of its value."""
        name = f"text_{number}"
        end = self.pad + self.value[1]
        constants = constants_of(schema)
        if constants:
            choices = [literal(text + end + self.line) for text in constants]
            return [f"{name}: {' | '.join(choices)}"]
        return text_rules(name, end, self.line, bounds_of(schema), literal, token_in)


def text_rules(
    name: str,
    end: str,
    after: str,
    bounds: tuple[int, int | None],
    literal: Literal,
    token_in: TokenIn,
) -> list[str]:
    """Return rules for `name`: any text whose length is within `bounds`, then `end` and `after`.

    `end` may contain a special token, which no regular expression matches: the second alternative
    is for that. The first one also stops at an `end` spelled with ordinary tokens, because a parser
    reads that as the end.
    """
    least, most = bounds
    text = "(?s:.)*"
    if most is not None:
        text = f"(?s:.){{{least},{most}}}"
    elif least > 0:
        text = f"(?s:.){{{least},}}"
    rules = [f"{name}: {name}_a", f"{name}_a[suffix={json.dumps(end)}]: /{text}/"]
    split = token_in(end)
    if split is not None:
        before, token, tail = split
        rules[0] += f" | {name.upper()} <[{token}]> {literal(tail)}"
        rules.append(f"{name.upper()}: /{text}{''.join(map(_escaped, before))}/")
    rules[0] = f"{name}: ({rules[0].removeprefix(f'{name}: ')}) {literal(after)}"
    return rules


def _escaped(character: str) -> str:
    """Escape one character for a regular expression of the grammar."""
    if character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def bounds_of(schema: JsonObject) -> tuple[int, int | None]:
    """Return minLength and maxLength of a string."""
    return _bound(schema.get("minLength")) or 0, _bound(schema.get("maxLength"))


def _bound(value: object) -> int | None:
    if is_integer(value) and 0 <= value <= _LONGEST_BOUND:
        return value
    return None


def _types(schema: object, root: JsonObject, is_string: bool | None) -> frozenset[str]:
    """Return the types of a value. The markup counts as far as the schema allows: models mark
    numbers as strings.
    """
    types = types_of(schema, root)
    if is_string and (not types or "string" in types):
        return frozenset(("string",))
    if is_string is False and not types:
        return ANY
    return types


class _Ahead:
    """Matches in order, asked for by positions that only grow: all questions together are linear."""

    def __init__(self, matches: Iterator[re.Match[str]]) -> None:
        self._matches = matches
        self._next = next(matches, None)

    def first(self, at: int) -> re.Match[str] | None:
        """Return the first match that begins at `at` or behind it."""
        while self._next is not None and self._next.start() < at:
            self._next = next(self._matches, None)
        return self._next


@dataclass(frozen=True)
class _Marks:
    """What the values of a region may end at; `keys`: of `Tagged._declared`, by the tool's name."""

    value_ends: _Ahead
    call_ends: _Ahead
    keys: dict[str, dict[str, list[int]]] = field(default_factory=dict)


def _first_of(positions: Mapping[str, Sequence[int]], at: int, but: Collection[str]) -> int | None:
    """Return the first of `positions` from `at` on whose name is not in `but`."""
    following = []
    for name, places in positions.items():
        index = bisect_left(places, at)
        if name not in but and index < len(places):
            following.append(places[index])
    return min(following, default=None)


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression of any of `texts`, the longest that fits."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
