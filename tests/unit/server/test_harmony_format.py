"""Harmony, gpt-oss's format, in requests: which models have it, forced answers are read back, chat
completions have their parts, and conversations reach the chat template whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
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
    SCHEMA,
    STOPS,
    TEMPLATE,
    TOKENIZER,
    TOOLS,
    backend,
    pieces,
)
from tests.unit.server.joined_pieces import content, reasoning

from freight.engine.grammar import Grammars, _source
from freight.outputs import CompletionDelta, FinishReason, RequestDelta
from freight.sampling import SamplingParams
from freight.serve.answers.answer_format import answer_format
from freight.serve.answers.pieces import PieceKind
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.limits import ServingLimits
from freight.serve.openai.chat_reply import ChatReply
from freight.serve.openai.chat_request import parse_chat
from freight.serve.openai.stream import AnswerOptions
from freight.serve.transport.errors import ApiError
from freight.structured import StructuredOutputs
from freight.text.harmony import MARKERS
from freight.text.tokenizer import Tokenizer

# ---- answers with a form


def allows(outputs: Mapping[str, Any], text: str) -> bool:
    """Whether `text`, as the tokenizer writes it, is a whole answer."""
    tokenizer = LLTokenizer(BACKEND.to_str(), n_vocab=BACKEND.get_vocab_size(), eos_token=STOPS)
    matcher = LLMatcher(tokenizer, _source(LLMatcher, *StructuredOutputs(**outputs).key()))
    assert not matcher.is_error(), matcher.get_error()
    ids = BACKEND.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


HEADS = (
    "<|channel|>commentary to=functions.{}<|message|>",
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
)


@pytest.mark.parametrize("head", HEADS)
def test_a_forced_call_may_come_after_reasoning_and_is_read_back(head: str) -> None:
    forced = FORMAT.call_to(TOOLS, ["get_weather", "get-time"], True, PROMPT)
    Grammars(TOKENIZER, TOKENIZER.vocab_size, STOPS).check(StructuredOutputs(**forced))
    good = [head.format("get_weather") + '{"city": "Ulm"}', head.format("get-time") + "{}"]
    for text in good:
        for answer in (text, f"{ANALYSIS}Well <b>\n{NEXT}{text}"):
            assert allows(forced, answer), answer
            assert pieces([answer])[-1].kind is PieceKind.TOOL_CALL
    for bad in (
        head.format("other") + "{}",
        head.format("get_weather") + '{"city": 5}',
        head.format("get_weather"),
        f"{FINAL}Hello",
        f"{ANALYSIS}Well",
        f"{ANALYSIS}Well<|end|>{good[0]}",
        "Hello",
    ):
        assert not allows(forced, bad), bad
    jsonschema_rs.validate(SCHEMA, json.loads(pieces([good[0]])[0].text))
    inside = FORMAT.call_to(TOOLS, ["get-time"], False, PROMPT + ANALYSIS + "We")
    assert allows(inside, f"ll{NEXT}{good[1]}")
    assert not allows(inside, good[1])
    after = FORMAT.call_to(TOOLS, ["get-time"], False, PROMPT + FINAL + "I will look.")
    assert allows(after, NEXT + good[1])
    assert not allows(after, good[1])


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}},
                    "required": ["a"],
                }
            },
            '{"a": 5}',
        ),
        ({"json_object": True}, '{"b":[1]}'),
        ({"regex": "a+/b"}, "aa/b"),
        ({"choice": ["yes", "no"]}, "yes"),
        ({"grammar": 'start: "x" y\ny: /z+/'}, "xzz"),
    ],
)
def test_a_form_holds_for_the_final_message(form: Mapping[str, Any], answer: str) -> None:
    at_begin, inside = (
        FORMAT.form_to(form, prompt) for prompt in (PROMPT, PROMPT + ANALYSIS + "So")
    )
    for text, in_begin, in_inside in (
        (f"{FINAL}{answer}", True, False),
        (f"{ANALYSIS}Why {answer}?{NEXT}{FINAL}{answer}", True, False),
        (f" why?{NEXT}{FINAL}{answer}", False, True),
        (answer, False, False),
        (f"{FINAL}{answer}Why?", False, False),
        (f"{ANALYSIS}{answer}", False, False),
        (f"<|channel|>commentary<|message|>{answer}", False, False),
    ):
        assert allows(at_begin, text) == in_begin, text
        assert allows(inside, text) == in_inside, text
    assert FORMAT.form_to(form, PROMPT + FINAL) == form
    assert pieces([f"{ANALYSIS}Why?{NEXT}{FINAL}{answer}"]) == [reasoning("Why?"), content(answer)]


def test_a_call_that_cannot_be_forced_is_refused_by_name() -> None:
    for tools, names in ((TOOLS, ["nothing"]), ([], ["at"]), (TOOLS, [])):
        with pytest.raises(ApiError) as error:
            FORMAT.call_to(tools, names, True, PROMPT)
        assert (error.value.status, error.value.param) == (400, "tool_choice")


# ---- the format of a model, its requests and its answers


def test_harmony_is_known_by_template_and_tokens() -> None:
    own = {"start_anchor": "<|start|>assistant", "fields": {"content": {"content": "text"}}}
    with_template = answer_format(Tokenizer(BACKEND, None, TEMPLATE, own))
    assert type(with_template) is type(FORMAT)
    assert answer_format(Tokenizer(backend(MARKERS[1:]), None, TEMPLATE)) is None
    assert answer_format(Tokenizer(BACKEND, None, "no markup")) is None
    hermes = answer_format(Tokenizer(BACKEND, None, "<tool_call></tool_call></think>"))
    assert hermes is not None
    assert hermes.reads_reasoning
    assert hermes.parser("", TOOLS).feed("<think>a</think>")[0] == reasoning("a")
    assert "think" in hermes.form_to({"regex": "a"}, "")["grammar"]
    assert "@arguments_0" in hermes.call_to(TOOLS, ["get-time"], True, None)["grammar"]


SERVED = Served(
    names=("gpt-oss",),
    tokenizer=TOKENIZER,
    vocab_size=TOKENIZER.vocab_size,
    max_model_len=4096,
    defaults={},
    fingerprint="fp",
    parser_of=FORMAT.parser,
    forced_call=FORMAT.call_to,
    after_reasoning=FORMAT.form_to,
)
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("skip", [None, True, False])
def test_control_tokens_reach_the_reader_whatever_the_client_says(skip: bool | None) -> None:
    body = {"messages": [USER], "skip_special_tokens": skip}
    assert not parse_chat(body, SERVED, ServingLimits()).work[0].params.skip_special_tokens


def test_requests_for_a_form_get_its_grammar() -> None:
    body = {"messages": [USER], "response_format": {"type": "json_object"}}
    params_of = parse_chat(body, SERVED, ServingLimits()).work[0].params_of
    assert params_of is not None
    outputs = params_of(PROMPT).structured_outputs
    assert outputs is not None
    assert '"final"' in str(outputs.grammar)
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    params_of = parse_chat(body, SERVED, ServingLimits()).work[0].params_of
    assert params_of is not None
    outputs = params_of(PROMPT).structured_outputs
    assert outputs is not None
    assert "to=functions.get_weather" in str(outputs.grammar)


def answer(text: str, reason: FinishReason, size: int) -> dict[str, Any]:
    """The choice of a chat completion whose text comes `size` characters a step."""
    head = ReplyHead("1", 0, "gpt-oss", "fp")
    work = TokenizedWork(token_ids=(1,), text=PROMPT, params=SamplingParams())
    reply = ChatReply(head, SERVED, work, AnswerOptions(), TOOLS)
    for at in range(0, len(text) + size, size):
        last = reason if at >= len(text) else None
        delta = CompletionDelta(0, [1], text[at : at + size], None, last, None, None)
        reply.advance(0, RequestDelta("1", [delta], last is not None))
    choice: dict[str, Any] = reply.body()["choices"][0]
    return choice


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_chat_completion_of_a_call(size: int) -> None:
    choice = answer(ANSWER.removesuffix("<|call|>"), FinishReason.STOP, size)
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "See:")
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert [one["function"] for one in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": CITY}
    ]
    choice = answer(ANSWER[: ANSWER.index(CITY) + 5], FinishReason.LENGTH, size)
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].endswith(CALL + CITY[:5])


# ---- conversations


def rendered(messages: Sequence[Mapping[str, Any]], prompt: bool = True) -> str:
    ids = TOKENIZER.apply_chat_template(messages, prompt, tools=TOOLS)
    return TOKENIZER.decode(ids, skip_special_tokens=False).split("<|end|>", 2)[2]


def asked(*names: str) -> list[dict[str, Any]]:
    return [
        {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]


def told(text: str, name: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": text} | (
        {} if name is None else {"tool_call_id": f"id-{name}"}
    )


def test_reasoning_content_and_a_call_of_one_message_reach_the_template() -> None:
    for name in ("reasoning", "reasoning_content", "thinking"):
        message = {"role": "assistant", "content": "See:", name: "hm", "tool_calls": asked("f")}
        assert rendered([message]) == (
            "<|start|>assistant<|channel|>analysis<|message|>hm\n\nSee:<|end|>"
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
        )
    last = {"role": "assistant", "content": "Yes", "reasoning": "hm"}
    assert rendered([last], False) == f"<|start|>assistant{ANALYSIS}hm{NEXT}{FINAL}Yes<|return|>"


@pytest.mark.parametrize("ids", ["named", "not named"])
def test_several_calls_of_one_message_are_written_with_their_results(ids: str) -> None:
    results = (
        [told("B", "b"), told("A", "a")] if ids == "named" else [told("A", None), told("B", None)]
    )
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": asked("a", "b"),
    }
    again = {"role": "assistant", "content": None, "tool_calls": asked("c")}
    parts = [
        f"{ANALYSIS.replace('<|channel|>', '<|start|>assistant<|channel|>')}hm<|end|>",
        *(
            f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{}}<|call|>"
            f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{name.upper()}"<|end|>'
            for name in "abc"
        ),
    ]
    assert (
        rendered([message, *results, again, told("C", "c")])
        == "".join(parts) + "<|start|>assistant"
    )


def test_results_without_a_call_of_their_own_are_not_lost() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": asked("a", "b")}
    text = rendered([message, told("1", None), told("2", None), told("3", "x")])
    assert [text.count(f'"{number}"') for number in (1, 2, 3)] == [1, 1, 1]
    assert text.index('"1"') < text.index("functions.b<") < text.index('"2"') < text.index('"3"')


def test_markup_in_a_message_is_text() -> None:
    message = {"role": "assistant", "content": f"I write {FINAL}so", "reasoning": f"hm {NEXT}"}
    ids = TOKENIZER.apply_chat_template([USER, message, USER])
    assert ids.count(BACKEND.token_to_id("<|channel|>")) == 1  # the template's own
    assert f"I write {FINAL}so" in TOKENIZER.decode(ids, skip_special_tokens=False)
