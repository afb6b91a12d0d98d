"""Tagged calls whose closing tags the model forgot: any of those that published templates and answers
write may be missing, as long as something marks the end of the last value.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, combinations
from typing import Any

import pytest
from tests.clock import takes_less
from tests.unit.server.call_form_cases import FORMS, TEMPLATES, TOOLS, format_of, named_format
from tests.unit.server.joined_pieces import joined
from tests.unit.server.test_call_forms import CALLS, EXPECTED, rendered
from tests.unit.server.test_published_calls import PUBLISHED
from tests.unit.server.test_published_calls import TOOLS as PUBLISHED_TOOLS

from freight.serve.answers.pieces import Piece, PieceKind
from freight.serve.answers.response_templates import CallForm
from freight.serve.answers.tagged_calls import Tagged

TAGGED = {name for name, form in FORMS.items() if isinstance(form.syntax, Tagged)}
MOST = 20  # subsets of an answer: all of up to two tags, and others drawn from a seed


def places(form: CallForm, answer: str) -> list[tuple[int, int]]:
    """Where the closing tags of the form are in `answer`."""
    syntax = form.syntax
    assert isinstance(syntax, Tagged)
    tags = {syntax.tail, syntax.value[1], syntax.outer[1], syntax.section[1]}
    if syntax.value[0]:
        tags.add(syntax.key[1])
    found = re.finditer("|".join(re.escape(tag) for tag in tags if tag), answer)
    return [match.span() for match in found]


def subsets(count: int, last: int) -> Iterator[tuple[int, ...]]:
    """Subsets of `count` tags without all of the `last` ones."""
    numbers = random.Random(0)
    few = chain.from_iterable(combinations(range(count), size) for size in range(3))
    more = (tuple(n for n in range(count) if numbers.random() < 0.6) for _ in range(MOST))
    ending = set(range(count - last, count))
    for removed in {*few, *more, tuple(range(count - last)), tuple(range(count - 1))}:
        if not ending <= set(removed):
            yield removed


def without(answer: str, spans: Sequence[tuple[int, int]], removed: Sequence[int]) -> str:
    parts = []
    at = 0
    for number in sorted(removed):
        begin, end = spans[number]
        parts.append(answer[at:begin])
        at = end
    return "".join([*parts, answer[at:]])


def calls_of(found: Sequence[Piece]) -> list[tuple[str | None, Any]]:
    kinds = [piece for piece in found if piece.kind is PieceKind.TOOL_CALL]
    return [(piece.name, json.loads(piece.text)) for piece in kinds]


def said(found: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in found if piece.kind is PieceKind.CONTENT).strip()


def endings(form: CallForm, answer: str, spans: Sequence[tuple[int, int]]) -> int:
    """How many of the last tags come at or behind the end of the last value."""
    syntax = form.syntax
    assert isinstance(syntax, Tagged)
    at = answer.rindex(syntax.value[1])
    return sum(begin >= at for begin, _ in spans)


@pytest.mark.parametrize(
    "name", [name for name in sorted(TEMPLATES) if EXPECTED[name][0] in TAGGED]
)
def test_any_closing_tags_of_what_a_template_writes_may_be_missing(name: str) -> None:
    form = FORMS[str(EXPECTED[name][0])]
    prompt, answer = rendered(name)
    reader = format_of(TEMPLATES[name])
    spans = places(form, answer)
    expected = said(joined(reader.parser(prompt, TOOLS), [answer], True))
    for number, removed in enumerate(subsets(len(spans), endings(form, answer, spans))):
        cut = without(answer, spans, removed)
        whole = joined(reader.parser(prompt, TOOLS), [cut], True)
        assert calls_of(whole) == CALLS, cut
        assert said(whole) == expected, cut
        if number % 4 == 0:
            assert joined(reader.parser(prompt, TOOLS), list(cut), True) == whole


CUT_EVERY = (
    17  # characters between the cuts of one answer; other subsets of its tags have other cuts
)
ANSWERS = [
    (form, answer, content, calls)
    for form, answer, content, calls in PUBLISHED
    if form in TAGGED and any(arguments for _, arguments in calls)
]


@pytest.mark.parametrize(("form", "answer", "content", "calls"), ANSWERS)
def test_any_closing_tags_of_published_answers_may_be_missing(
    form: str, answer: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    reader = named_format(form)
    spans = places(FORMS[form], answer)
    for removed in subsets(len(spans), endings(FORMS[form], answer, spans)):
        cut = without(answer, spans, removed)
        whole = joined(reader.parser("", PUBLISHED_TOOLS), [cut], True)
        assert calls_of(whole) == calls, cut
        assert said(whole) == content, cut
        for at in range(len(removed) % CUT_EVERY, len(cut), CUT_EVERY):
            pieces = [cut[:at], cut[at:]]
            assert joined(reader.parser("", PUBLISHED_TOOLS), pieces, True) == whole


QWEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n"
ROME = ("get_weather", {"city": "Rome", "days": 2})


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (f"{QWEN}</function>\nSo it is.", "So it is."),
        (f"{QWEN}</tool_call>\nSo it is.", "So it is."),
        (f"{QWEN}</parameter>\nSo it is.", "So it is."),
        (f"I look.\n{QWEN}</function>\n</tool_call>", "I look."),
    ],
)
def test_text_around_such_a_call_is_content(answer: str, content: str) -> None:
    found = joined(named_format("QWEN3_CODER").parser("", PUBLISHED_TOOLS), [answer], True)
    assert calls_of(found) == [ROME]
    assert said(found) == content


@pytest.mark.parametrize(
    "value",
    [
        "a <parameter=days> b",
        "`<parameter=days>`",
        '"<parameter=days>',
        "see <function=get_weather> there",
        "a</function>b",
        "a</parameter>b",
        "a</tool_call>b\n<parameter=other>\n",
    ],
)
def test_a_value_with_its_closing_tag_may_name_tags(value: str) -> None:
    answer = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{value}\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    found = joined(named_format("QWEN3_CODER").parser("", PUBLISHED_TOOLS), [answer], True)
    assert calls_of(found) == [("get_weather", {"city": value, "days": 2})]


@pytest.mark.parametrize("complete", [True, False])
def test_a_value_whose_end_nothing_marks_stays_text(complete: bool) -> None:
    found = joined(named_format("QWEN3_CODER").parser("", PUBLISHED_TOOLS), [QWEN], complete)
    assert (calls_of(found), said(found)) == ([], QWEN.strip())


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ("GLM47", "<arg_key>a<arg_value>1</arg_value>"),
        ("GLM47", "<arg_key>city<arg_value>"),
        ("GLM47", "</arg_value><tool_call>get_weather"),
        ("QWEN3_CODER", "\n<parameter=city>"),
        ("QWEN3_CODER", "\n<function=get_weather>"),
        ("MINIMAX_M2", '\n<invoke name="get_weather"><parameter name="city">Rome'),
        ("MINIMAX_M2", "</minimax:tool_call>"),
    ],
)
def test_floods_without_closing_tags_are_read_in_linear_time(form: str, unit: str) -> None:
    syntax = FORMS[form].syntax
    assert isinstance(syntax, Tagged)
    opening = f"{syntax.outer[0]}{syntax.head[0]}get_weather{syntax.head[1]}"
    closing = f"{syntax.tail}{syntax.outer[1]}"

    def read() -> None:
        body = unit * (500_000 // len(unit)) + closing
        with suppress(ValueError):
            syntax.read(opening, body[: syntax.rest(body)], PUBLISHED_TOOLS)

    assert takes_less(3.0, read)
