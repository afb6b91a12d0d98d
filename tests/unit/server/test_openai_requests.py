"""Bodies of chat and completions: what is acted on, accepted or refused, and with which field's
path.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.server.openai_cases import HELLO, LIMITS, SERVED, TOOL, WITH_PARSER

from freight.serve.bodies import schema_of
from freight.serve.openai.chat_request import ChatRequest, parse_chat
from freight.serve.openai.completion_request import parse_completion
from freight.serve.transport.errors import ApiError

CHAT_SCHEMA = schema_of(ChatRequest)


def chat(served=SERVED, **body):
    return parse_chat({"messages": HELLO, **body}, served, LIMITS)


def completion(served=SERVED, **body):
    return parse_completion({"prompt": "Hello", **body}, served, LIMITS)


def refused(parse, status=400, served=SERVED, **body):
    with pytest.raises(ApiError) as error:
        parse(served, **body)
    assert error.value.status == status, error.value.message
    assert len(error.value.message) < 1000
    return error.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": HELLO * 5000}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        (
            {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]},
            "messages[0].audio",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"x" * 10**6: 1}}, "stream_options." + "x" * 60),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"return_dict": True}}, "chat_template_kwargs.return_dict"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"bad_words": ["x", ""]}, "bad_words[1]"),
        ({"user": json.loads("[" * 200 + "]" * 200)}, "user"),
        ({"metadata": {"x": ["\ud800"]}}, "metadata"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_bad_chat_is_refused_by_field(body, param):
    assert refused(chat, **body).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["x", 5]}, "prompt[1]"),
        ({"prompt": [[5], "x"]}, "prompt[1]"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x"] * 100_000}, "prompt"),
        ({"prompt": [1, 2, 3, -1]}, "prompt[3]"),
        ({"prompt": [1, 2**31]}, "prompt[1]"),
        ({"prompt": [SERVED.vocab_size]}, "prompt[0]"),
        ({"prompt": [1, 1.0]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"messages": HELLO}, "messages"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_bad_completion_is_refused_by_field(body, param):
    assert refused(completion, **body).param == param


# What sglang-router 0.3.2 and vllm-router 0.1.17 write into every request, as a worker behind them
# receives it.
OF_COMPLETIONS = {
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
OF_CHAT = {
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
}


# The defaults of vLLM's and SGLang's own request classes.
DEFAULTS = {
    "use_beam_search": False,
    "best_of": 1,
    "suffix": "",
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "truncation_side": "left",
    "stream_interval": 1,
    "stop_regex": [],
    "include_stop_str_in_output": False,
    "bad_words": [],
    "min_tokens": 0,
    "logprob_start_len": -1,
    "thinking_token_budget": -1,
    "documents": [],
    "vllm_xargs": {},
    "stop_token_ids": [],
    "return_tokens_as_token_ids": False,
}


def test_what_routers_add_asks_for_nothing():
    assert completion(**OF_COMPLETIONS, **DEFAULTS) == completion()
    assert chat(**OF_CHAT, **DEFAULTS) == chat()
    assert chat(**OF_CHAT, include_reasoning=True).ignored == ("include_reasoning",)


def test_fields_of_messages_that_are_left_out_are_named():
    message = {"role": "assistant", "content": "x", "annotations": [], "refusal": None, "a\r\nb": 1}
    assert chat(messages=[message, message]).ignored == ("messages[].annotations", "?")


@pytest.mark.parametrize(
    "content", ["def f():", [{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}]]
)
def test_a_prediction_reaches_the_engine_that_drafts(content):
    prediction = {"type": "content", "content": content}
    call = chat(replace(SERVED, drafts=True), prediction=prediction)
    assert (call.work[0].params.prediction, call.ignored) == ("def f():", ())
    call = chat(prediction=prediction)
    assert (call.work[0].params.prediction, call.ignored) == (None, ("prediction",))


@pytest.mark.parametrize("prediction", ["x", {"type": "content"}, {"type": "text", "content": "x"}])
def test_a_prediction_of_another_form_is_refused(prediction):
    error = refused(chat, 400, prediction=prediction)
    assert (error.param or "").startswith("prediction")


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_no_object_is_refused(body):
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError, match="object") as error:
            parse(body, SERVED, LIMITS)
        assert error.value.status == 400


@pytest.mark.parametrize("parse", [chat, completion])
def test_the_models_that_are_served_have_names(parse):
    for given, shown in (
        (None, "demo"),
        ("", "demo"),
        ("dummy", "demo"),
        ("tgi", "demo"),
        ("other", "other"),
    ):
        assert parse(model=given).model == shown
    error = refused(parse, 404, model="gpt")
    assert (error.param, error.code) == ("model", "model_not_found")
    assert "demo, other" in error.message


def test_defaults_are_the_models():
    served = replace(SERVED, defaults={"temperature": 0.6, "top_k": 20})
    params = chat(served, top_k=5).work[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 1.0)
    assert (chat().work[0].params.max_tokens, completion().work[0].params.max_tokens) == (None, 16)
    assert chat(max_tokens=5, max_completion_tokens=7).work[0].params.max_tokens == 7


def test_fields_reach_the_sampler():
    params = chat(logit_bias={"5": 1}, logprobs=True).work[0].params
    assert (params.logit_bias, params.logprobs) == ({5: 1.0}, 0)
    assert chat(temperature=1e-320).work[0].params.greedy


def test_a_parser_gets_special_tokens():
    assert chat().work[0].params.skip_special_tokens
    assert not chat(WITH_PARSER).work[0].params.skip_special_tokens
    assert not chat(WITH_PARSER, skip_special_tokens=True).work[0].params.skip_special_tokens
    assert completion(WITH_PARSER).work[0].params.skip_special_tokens


def test_prompts_are_one_or_several():
    for prompt, prompts in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        assert [work.prompt for work in completion(prompt=prompt).work] == prompts


def test_tools_are_offered_unless_declined():
    assert chat(tools=[TOOL]).work[0].prompt.template_values == {"tools": [TOOL]}
    assert chat(tools=[TOOL], tool_choice="none").work[0].prompt.template_values == {}
    assert chat(tools=[]).work[0].prompt.template_values == {}
