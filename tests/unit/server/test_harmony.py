"""Answers in harmony, gpt-oss's format: every form of its headers becomes pieces, what is cut or
broken anywhere is text, and how a text is divided into chunks changes nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.clock import takes_less
from tests.unit.server.harmony_cases import (
    ANALYSIS,
    ANSWER,
    BACKEND,
    CALL,
    CITY,
    FINAL,
    FORMAT,
    NEXT,
    PROMPT,
    TOOLS,
    pieces,
)
from tests.unit.server.joined_pieces import call, content, reasoning

from freight.serve.answers.pieces import Piece, PieceKind
from freight.text.harmony import MARKERS


@pytest.mark.parametrize("end", ["<|return|>", "<|end|>", "<|return|><|endoftext|>", ""])
def test_channels_are_reasoning_and_content(end: str) -> None:
    text = f"{ANALYSIS} Let me\nthink. {NEXT}{FINAL} 4 < 5\n{end}"
    for chunks in ([text], list(text)):
        assert pieces(chunks) == [reasoning(" Let me\nthink. "), content(" 4 < 5\n")]
        assert pieces(chunks, prompt=None) == pieces(chunks, complete=False) == pieces(chunks)


@pytest.mark.parametrize("end", ["<|call|>", ""])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
        "<|channel|>commentary to=get_weather <|constrain|>json<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
def test_a_call_is_read_wherever_its_recipient_stands(header: str, end: str) -> None:
    assert pieces([header + CITY + end]) == [call("get_weather", CITY)]
    text = f"{ANALYSIS}hm{NEXT}{header}{CITY}{end}"
    assert pieces([text]) == pieces(list(text)) == [reasoning("hm"), call("get_weather", CITY)]


def test_several_messages_come_in_order_and_apart() -> None:
    first = (
        "<|start|>assistant<|channel|>commentary to=functions.get_weather json<|message|>"
        + CITY
        + "<|call|>"
    )
    second = "<|start|>assistant<|channel|>commentary to=functions.get-time<|message|><|call|>"
    preamble = "<|channel|>commentary<|message|>I will look."
    text = f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{preamble}<|end|>{first}{second}<|start|>assistant{FINAL}So."
    expected = [
        reasoning("a\n\nb"),
        content("I will look."),
        call("get_weather", CITY),
        call("get-time", "{}"),
        content("\n\nSo."),
    ]
    assert pieces([text]) == pieces(list(text)) == expected


@pytest.mark.parametrize("missing", ["<|end|><|start|>assistant", "<|start|>assistant", "<|end|>"])
def test_a_message_that_the_model_did_not_end_is_ended_by_the_next(missing: str) -> None:
    text = f"{ANALYSIS}hm{NEXT}{FINAL}Yes".replace(NEXT, NEXT.replace(missing, ""))
    assert pieces([text]) == [reasoning("hm"), content("Yes")]
    text = f"<|channel|>commentary to=functions.get-time<|message|>{{}}{NEXT.replace(missing, '')}{FINAL}Yes"
    assert pieces([text]) == [call("get-time", "{}"), content("Yes")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello <b> & to=x\n", [content("Hello <b> & to=x\n")]),  # no header at all
        (" to", [content(" to")]),
        ("<|message|>Hello", [content("Hello")]),
        ("<|channel|>comment<|message|>Hello", [content("Hello")]),  # names that are no channel
        ("<|channel|>commentary?<|message|>Hello", [content("Hello")]),
        ("<|channel|>??<|message|>Hello", [content("Hello")]),
        ("<|channel|>final <|constrain|>json<|message|>{}", [content("{}")]),
        (
            "<|channel|>analysis to=python code<|message|>1+1<|call|>",
            [reasoning("1+1")],
        ),  # a tool that nobody offered
        ("<|channel|>final Hello<|return|>", [content("<|channel|>final Hello<|return|>")]),
        (f"<|end|> \n<|start|>assistant{FINAL}Hello", [content("Hello")]),
        (f"{FINAL}Hello<|end|> \nmore", [content("Hello\n\n \nmore")]),
        ("<|channel|>" + "x" * 600, [content("<|channel|>" + "x" * 600)]),
        (" " * 600, [content(" " * 600)]),
        (f"{FINAL}a<|constrain|>b<|message|>c<|endoftext|>", [content("abc")]),
        ("", []),
    ],
)
def test_what_is_not_as_the_format_has_it_is_text(text: str, expected: list[Piece]) -> None:
    assert pieces([text]) == pieces(list(text)) == expected


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[1]",
        '"x"',
        '{"a": NaN}',
        "get_weather()",
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        '{"a": ' + "9" * 5_000 + "}",
        '{"a": "' + "a" * (1 << 20) + '"}',
    ],
    ids=lambda body: body[:20],
)
def test_a_call_that_cannot_be_read_is_content_and_the_next_one_is_read(body: str) -> None:
    raw = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + body
    after = "<|start|>assistant<|channel|>commentary to=functions.get-time<|message|>{}<|call|>"
    found = pieces([f"{raw}<|call|>{after}"])
    assert found == [
        content(raw + ("" if len(body) > 1 << 20 else "<|call|>")),
        call("get-time", "{}"),
    ]


def test_without_tools_a_call_is_content_as_written() -> None:
    text = "<|channel|>commentary to=functions.get-time json<|message|>{}<|call|>"
    assert pieces([ANALYSIS, "hm", NEXT, text], tools=[]) == [reasoning("hm"), content(text)]


def test_an_answer_that_is_cut_anywhere_is_text() -> None:
    header = ANSWER.rindex("<|channel|>")
    begin = ANSWER.index(CITY)
    for cut in range(len(ANSWER) - len("<|call|>") + 1):
        part = ANSWER[:cut]
        found = pieces([part], complete=False)
        assert found == pieces(list(part), complete=False)
        assert all(piece.kind is not PieceKind.TOOL_CALL for piece in found)
        text = "".join(piece.text for piece in found if piece.kind is PieceKind.CONTENT)
        if cut >= begin:
            assert text == "See:\n\n" + ANSWER[header:cut]
        ids = BACKEND.encode(part, add_special_tokens=False).ids
        whole = BACKEND.encode(ANSWER, add_special_tokens=False).ids
        if cut < begin and ids == whole[: len(ids)]:  # between tokens: no part of a header is shown
            assert text == "See:"[: max(0, cut - ANSWER.index("See:"))]
    assert [piece.kind for piece in pieces([ANSWER], complete=False)] == [
        "reasoning",
        "content",
        "tool_call",
    ]


@settings(max_examples=80)
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(
                [
                    *MARKERS,
                    "<|endoftext|>",
                    "assistant",
                    "analysis",
                    "final",
                    "commentary",
                    " ",
                    "\n",
                ]
            ),
            st.sampled_from(
                [
                    " to=functions.get-time",
                    "{}",
                    CITY,
                    "json",
                    "<|",
                    "<|end",
                    "to=",
                    ANSWER,
                    FINAL,
                    NEXT,
                ]
            ),
            st.text(max_size=4),
        ),
        max_size=12,
    ),
    seed=st.integers(0, 1 << 30),
    complete=st.booleans(),
    prompt=st.sampled_from(
        [None, PROMPT, PROMPT + FINAL + "So", PROMPT + ANALYSIS, PROMPT + "<|channel|>final"]
    ),
)
@example(words=[ANSWER, NEXT, FINAL, "x"], seed=1, complete=False, prompt=PROMPT)
def test_chunks_change_nothing(
    words: list[str], seed: int, complete: bool, prompt: str | None
) -> None:
    text, draw = "".join(words), random.Random(seed)
    cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 9)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = pieces([text], complete, prompt)
    assert pieces(chunks, complete, prompt) == whole
    assert pieces(list(text), complete, prompt) == whole
    if (
        "<" not in text
        and "to=" not in text
        and prompt in (None, PROMPT)
        and text.strip() not in ("", "t", "to")
    ):
        assert whole == [content(text)]


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("", [content("x")]),
        (FINAL, [content("x")]),
        (FINAL + "Well,", [content("x")]),
        (FINAL + "3 <", [content("x")]),  # which could begin a control token
        (ANALYSIS, [reasoning("x")]),
        (ANALYSIS + "Well", [reasoning("x")]),
        (f"{ANALYSIS}Well{NEXT}{FINAL}", [content("x")]),
        ("<|channel|>analysis", [content("<|channel|>analysisx")]),  # no message ever begins
    ],
)
def test_the_end_of_the_prompt_says_where_an_answer_begins(
    begun: str, expected: list[Piece]
) -> None:
    assert pieces(["x"], prompt=PROMPT + begun) == expected


@pytest.mark.parametrize(
    "text",
    [
        ANALYSIS + "a <" * 99_999,
        "<|channel|>commentary" + CALL + "{<|" * 99_999,
        "<|start|>" * 33_333,
        " " * 300_000,
    ],
    ids=["text", "call", "headers", "blanks"],
)
def test_the_cost_is_linear(text: str) -> None:
    def parse() -> None:
        parser = FORMAT.parser(PROMPT, TOOLS)
        for at in range(0, len(text), 8):
            parser.feed(text[at : at + 8])
        parser.finish(False)

    assert takes_less(4, parse)  # quadratic: half a minute and more
