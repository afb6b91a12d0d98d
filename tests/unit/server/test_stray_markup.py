"""Calls whose markup is nearly right: misspelt closing tags, text between arguments, tags in keys.

Either a call with exactly the values that the model wrote, or content: never a value that holds a
tag of the call, and never two arguments in one. Shapes as in ggml-org/llama.cpp#28612,
smg-project/smg#1815, exo-explore/exo#2187, vllm-project/vllm#54971, adolfousier/opencrabs#419
and Luce-Org/lucebox#742.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import pytest
from tests.clock import takes_less
from tests.unit.server.call_form_cases import FORMS, TOOLS, named_format
from tests.unit.server.joined_pieces import call, content, joined

from freight.serve.answers.pieces import Piece
from freight.serve.answers.tagged_calls import Tagged

TAGGED = sorted(name for name, form in FORMS.items() if isinstance(form.syntax, Tagged))
DSML = [name for name in TAGGED if name.startswith("DEEPSEEK")]
BOTH = call("get_weather", '{"city": "Bonn", "days": 2}')


@dataclass(frozen=True)
class Written:
    """The parts of a call of get_weather in a form, to be joined in another way."""

    before: str
    city: str
    days: str
    after: str
    closing: str

    @classmethod
    def of(cls, name: str) -> Written:
        form = FORMS[name]
        syntax = form.syntax
        assert isinstance(syntax, Tagged)
        arguments = []
        for key, value, is_string in (("city", "Bonn", "true"), ("days", "2", "false")):
            end = f'" string="{is_string}">' if syntax.strings else syntax.key[1]
            pair = f"{syntax.key[0]}{key}{end}{syntax.gap}{syntax.value[0]}"
            arguments.append(f"{pair}{syntax.pad}{value}{syntax.pad}{syntax.value[1]}{syntax.line}")
        before = f"{form.opening}{form.before_name}get_weather{form.before_arguments}"
        return cls(before, *arguments, form.after_arguments + form.closing, syntax.value[1])

    def misspelt(self, argument: str, tag: str) -> str:
        return argument.replace(self.closing, tag)


def read(name: str, text: str) -> list[Piece]:
    """What a form reads, which is the same for pieces of any size."""
    whole = joined(named_format(name).parser("", TOOLS), [text], True)
    for size in (1, 7):
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        assert joined(named_format(name).parser("", TOOLS), chunks, True) == whole
    return whole


def misspellings(tag: str) -> list[str]:
    """A letter left out, doubled, or exchanged with the next, from the middle of the name."""
    at = tag.index("a", 3)
    return [
        tag[:at] + tag[at + 1 :],
        tag[:at] + tag[at] + tag[at:],
        tag[:at] + tag[at + 1] + tag[at] + tag[at + 2 :],
        tag[:-1] + "s>",
    ]


@pytest.mark.parametrize("name", TAGGED)
def test_a_misspelt_closing_tag_ends_a_value(name: str) -> None:
    parts = Written.of(name)
    for tag in misspellings(parts.closing):
        first = parts.misspelt(parts.city, tag) + parts.days
        last = parts.city + parts.misspelt(parts.days, tag)
        for arguments in (first, last):
            assert read(name, parts.before + arguments + parts.after) == [BOTH], tag


@pytest.mark.parametrize("name", DSML)
@pytest.mark.parametrize(
    "tag",
    [
        "</｜DSML｜param>",
        "</｜DSML｜  parameter>",
        "</｜DSML｜value>",
        "</｜DSML｜/parameter>",
        "</｜｜DSML｜｜parameter>",
    ],
)
def test_any_closing_tag_of_deepseek_ends_a_value(name: str, tag: str) -> None:
    parts = Written.of(name)
    first = parts.misspelt(parts.city, tag) + parts.days
    both_tags = parts.misspelt(parts.city, f"{tag}\n{parts.closing}") + parts.days
    last = parts.city + parts.misspelt(parts.days, tag)
    for arguments in (first, both_tags, last):
        assert read(name, parts.before + arguments + parts.after) == [BOTH]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("tag", ["</div>", "</p>", "</para>", "</args>"])
def test_other_closing_tags_are_part_of_a_value(name: str, tag: str) -> None:
    parts = Written.of(name)
    city = parts.city.replace("Bonn", f"<b>Bonn{tag}")
    expected = call("get_weather", f'{{"city": "<b>Bonn{tag}", "days": 2}}')
    assert read(name, parts.before + city + parts.days + parts.after) == [expected]


@pytest.mark.parametrize("name", TAGGED)
def test_misspelt_tags_within_a_value_are_part_of_it(name: str) -> None:
    parts = Written.of(name)
    for tag in misspellings(parts.closing):
        city = parts.city.replace("Bonn", f"a{tag} b")
        expected = call("get_weather", f'{{"city": "a{tag} b", "days": 2}}')
        assert read(name, parts.before + city + parts.days + parts.after) == [expected]


@pytest.mark.parametrize("name", TAGGED)
def test_text_between_arguments_makes_the_call_content(name: str) -> None:
    parts = Written.of(name)
    stray = "Now the days:\n"
    for arguments in (
        stray + parts.city + parts.days,
        parts.city + stray + parts.days,
        parts.city + parts.days + stray,
    ):
        text = parts.before + arguments + parts.after
        assert read(name, text) == [content(text.strip())]
        unknown = text.replace("city", "x").replace("days", "y")  # no names that tools declare
        assert read(name, unknown) == [content(unknown.strip())]


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_may_quote_an_argument(name: str) -> None:
    parts = Written.of(name)
    quoted = parts.days.replace("days", "y").replace('"', "'").rstrip("\n").replace("\n", " ")
    city = parts.city.replace("Bonn", f"as in {quoted} here")
    expected = call("get_weather", f'{{"city": "as in {quoted} here", "days": 2}}')
    assert read(name, parts.before + city + parts.days + parts.after) == [expected]


@pytest.mark.parametrize("name", [name for name in TAGGED if name.startswith(("GLM", "HY3"))])
def test_a_key_with_tags_is_no_key(name: str) -> None:
    parts = Written.of(name)
    syntax = FORMS[name].syntax
    assert isinstance(syntax, Tagged)
    opening, closing = syntax.key
    for key in (
        f"{opening}city{opening}Bonn{closing}",
        f"{opening}{opening}city{closing}",
        f"{opening}city{closing}{closing}",
    ):
        city = parts.city.replace(f"{opening}city{closing}", key)
        text = parts.before + city + parts.days + parts.after
        assert read(name, text) == [content(text.strip())]


@pytest.mark.parametrize("name", [*DSML, "MINIMAX_M2"])
def test_attributes_that_models_invent_are_not_part_of_a_name(name: str) -> None:
    parts = Written.of(name)
    for attribute in ("string='invalid'", 'string="integer"', 'type="string"', 'type="x" of="y"'):
        days = re.sub(r'days"[^>]*>', f'days" {attribute}>', parts.days)
        assert read(name, parts.before + parts.city + days + parts.after) == [BOTH]


@pytest.mark.parametrize("name", [*DSML, "MINIMAX_M2"])
def test_a_call_that_closes_itself_has_no_arguments(name: str) -> None:
    form = FORMS[name]
    itself = f'{form.before_name}get_time"/>\n'
    expected = call("get_time", "{}")
    assert read(name, form.opening + itself + form.closing) == [expected]
    parts = Written.of(name)
    before = parts.before.removeprefix(form.opening)
    text = form.opening + itself + before + parts.city + parts.days + parts.after
    assert read(name, text) == [expected, BOTH]
    closed = parts.city.replace('">', '"/>')  # and a value behind it, of which nothing is known
    assert call("get_weather", '{"days": 2}') not in read(name, parts.before + closed + parts.after)


@pytest.mark.parametrize("name", TAGGED)
def test_floods_of_misspelt_tags_are_read_in_linear_time(name: str) -> None:
    parts = Written.of(name)
    tag = misspellings(parts.closing)[0]
    reader = named_format(name)
    for filler in (tag * 4000, (tag + " ") * 4000, (parts.closing + "x") * 4000):
        text = parts.before + parts.city.replace("Bonn", filler) + parts.after
        assert takes_less(5, partial(joined, reader.parser("", TOOLS), [text], True), 1)
