"""Messages in the forms that clients send, in the form that chat templates read."""

from __future__ import annotations

import copy
import json

import pytest

from freight.errors import RequestError
from freight.text.template_forms import to_template_messages


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    messages = [{"role": "user", "content": parts, "name": "x"}]
    before = copy.deepcopy(messages)
    assert to_template_messages(messages) == [
        {"role": "user", "content": "Hello world", "name": "x"}
    ]
    assert messages == before


def test_developer_is_system():
    assert to_template_messages([{"role": "developer", "content": "x"}]) == [
        {"role": "system", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ({}, {}),
    ],
    ids=["object", "parsed", "empty", "blank", "null", "none", "no entries"],
)
def test_arguments_of_tool_calls_become_objects(arguments, given):
    [message] = to_template_messages(
        [{"role": "assistant", "content": None, "tool_calls": [call(arguments)]}]
    )
    assert message == {"role": "assistant", "tool_calls": [call(given)]}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": ',
        '{"a": NaN}',
        '{"a": [-Infinity]}',
        '"Bonn"',
        "Bonn",
        "5",
        5,
        "[]",
        [],
        False,
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=lambda arguments: repr(arguments)[:8],
)
def test_arguments_that_are_no_object_are_refused_by_path(arguments):
    calls = [call("{}"), call(arguments)]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    path = r"^messages\[1\]\.tool_calls\[1\]\.function\.arguments is "
    with pytest.raises(RequestError, match=path) as error:
        to_template_messages(messages)
    assert len(str(error.value)) < 400


def test_a_call_without_a_wrapper_gets_one():
    flat = {"id": "1", "name": "f", "arguments": ""}
    [message] = to_template_messages([{"role": "assistant", "content": "", "tool_calls": [flat]}])
    assert message["tool_calls"] == [call({})]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"refusal": "no"}, "no"),
        ({"content": "Well, ", "refusal": "no"}, "Well, no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        (
            {
                "content": [
                    {"type": "text", "text": "Well, "},
                    {"type": "refusal", "refusal": "no"},
                ]
            },
            "Well, no",
        ),
        ({"content": None, "reasoning": "hm"}, ""),
        ({"reasoning_content": "hm"}, ""),
    ],
    ids=json.dumps,
)
def test_an_answer_may_have_a_refusal_or_reasoning_alone(message, content):
    [result] = to_template_messages([{"role": "assistant", **message}])
    assert result["content"] == content
    assert "refusal" not in result
    assert to_template_messages([result]) == [result]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"content\[0\] is of type 'image_url'",
        ),
        (
            {"content": [{"type": "text", "text": "x"}, {"type": "text"}]},
            r"content\[1\].text is None",
        ),
        ({"content": [{"type": "refusal"}]}, r"content\[0\].refusal is None"),
        ({"content": None, "refusal": 5}, r"\.refusal is 5"),
        ({"content": None}, "content is None"),
        ({"content": None, "tool_calls": []}, "content is None"),
        ({"tool_calls": {}, "content": ""}, r"tool_calls is \{\}"),
        ({"tool_calls": ["f"]}, r"tool_calls\[0\] is 'f'"),
        ({"tool_calls": [{"function": "f"}]}, r"tool_calls\[0\].function is 'f'"),
        ({"content": [{"type": "text", "text": "\ud800"}]}, "not Unicode"),
    ],
    ids=json.dumps,
)
def test_malformed_messages_are_refused_by_position(message, words):
    with pytest.raises(RequestError, match=words):
        to_template_messages([{"role": "user", "content": "x"}, {"role": "assistant", **message}])


def test_what_is_deeply_nested_is_refused():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for message in ({"role": nested}, {"content": nested}, {"tool_calls": [{"function": nested}]}):
        with pytest.raises(RequestError, match=r"\[\[\[\[\[\[\.\.\."):
            to_template_messages([{"role": "user", "content": "x", **message}])


def test_both_names_of_reasoning_are_given():
    both = {"reasoning": "hm", "reasoning_content": "hm"}
    for given in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, both):
        [message] = to_template_messages([{"role": "assistant", "content": "x", **given}])
        assert message == {"role": "assistant", "content": "x", **both}
    with pytest.raises(RequestError, match=r"messages\[0\].reasoning is 5"):
        to_template_messages([{"role": "assistant", "content": "x", "reasoning": 5}])
    with pytest.raises(RequestError, match="not Unicode"):
        to_template_messages([{"role": "assistant", "content": "x", "reasoning": "\ud800"}])


def test_fields_that_are_none_are_left_out():
    message = {"role": "assistant", "content": "x", "tool_calls": None, "name": None}
    for given in (message, {**message, "tool_calls": []}):
        assert to_template_messages([given]) == [{"role": "assistant", "content": "x"}]
