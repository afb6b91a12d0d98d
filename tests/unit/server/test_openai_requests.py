"""Bodies of chat and completions: what is acted on, accepted or refused, and with which field's
path.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from tests.unit.server.openai_cases import HELLO, LIMITS, SERVED, TOOL, WITH_PARSER

from freight.serve.bodies import schema_of
from freight.serve.openai.chat_request import ChatRequest, parse_chat
from freight.serve.openai.completion_request import CompletionRequest, parse_completion
from freight.serve.openai.fields import ACCEPTED
from freight.serve.openai.neutral import NEUTRAL
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


MANY = {str(token): 1 for token in range(2000)}
SAMPLING = {  # field -> values that neither API takes
    "n": [10**4000, 0, -1, 10**6, 17, True, "1", 1.5],
    "temperature": [10**4000, math.nan, math.inf, -1, 1e308, 2.1, "1", True],
    "top_p": [0, 1.5, math.nan, True],
    "top_k": [-5, 2**63, 1.5],
    "min_p": [2, -0.1],
    "presence_penalty": [1e9, math.nan],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0, 1e9],
    "seed": [10**4000, 2**64, -(2**63) - 1, 1.5, "1"],
    "max_tokens": [-1, 2**63, "12", True, 1.5],
    "min_tokens": [-1, 2**63],
    "stop": [["x"] * 10_000, "", ["a", ""], "x" * 1_000_000, "\ud800", 5, [5]],
    "stop_token_ids": [[-1], [10**4000], [10**6], [True], 5, [1] * 1025],
    "logit_bias": [
        {"abc": 1},
        {"01": 1},
        {"-1": 1},
        {"1000000": 1},
        {"1": 1e30},
        {"1": 10**4000},
        {"9" * 4000: 1},
        {"1": "x"},
        5,
        {str(i): 1 for i in range(2000)},
    ],
    "prompt_logprobs": [21, -1, 10**9, True],
    "cache_salt": ["", 5, "x" * 1025, "\ud800"],
    "request_id": ["a b", "", "x" * 129, "http://x/"],
    "priority": [1, -1],
    "stream": [1, "true"],
    "ignore_eos": [0],
    "stream_options": [{"include_usage": True}, 5],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": ["no", 1],
    "allowed_token_ids": [
        [],
        [-1],
        ["5"],
        [5.5],
        5,
        [SERVED.vocab_size],
        [2**70],
        list(range(2**16 + 1)),
    ],
    "bad_words": [[""], [5], ["x" * 257], {}, ["x"] * 1025],
    "truncate_prompt_tokens": [0, -2, 1.5, "5", True],
    "add_special_tokens": [0],
    "return_tokens_as_token_ids": [1],
}


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize("field", SAMPLING)
def test_values_outside_their_range_are_refused_by_field(parse, field):
    for value in SAMPLING[field]:
        assert refused(parse, **{field: value}).param.split(".")[0].split("[")[0] == field, value


@pytest.mark.parametrize("parse", [chat, completion])
def test_null_is_absent(parse):
    everything = dict.fromkeys(
        [*SAMPLING, *NEUTRAL, *ACCEPTED, "model", "tools", "response_format"]
    )
    if parse is completion:
        del everything["tools"]
    assert parse(**everything) == parse()


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
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 2**63}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"return_dict": True}}, "chat_template_kwargs.return_dict"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
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
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": HELLO}, "messages"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_bad_completion_is_refused_by_field(body, param):
    assert refused(completion, **body).param == param


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize("field", [*(name for name in NEUTRAL if name != "echo"), "temprature"])
def test_what_is_not_supported_is_refused_by_name(parse, field):
    assert refused(parse, **{field: "x"}).param == field
    lenient = replace(SERVED, unknown_fields="ignore")
    if field in NEUTRAL:
        assert refused(parse, served=lenient, **{field: "x"}).param == field
    else:
        assert parse(lenient, **{field: "x"}).ignored == (field,)
        assert "temperature" in refused(parse, **{field: "x"}).message


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
    "ignore_eos": False,
    "logprob_start_len": -1,
    "thinking_token_budget": -1,
    "documents": [],
    "vllm_xargs": {},
    "stop_token_ids": [],
    "return_tokens_as_token_ids": False,
}


@pytest.mark.parametrize(
    "body", [*({name: value} for name, value in (DEFAULTS | OF_COMPLETIONS).items()), DEFAULTS]
)
def test_values_that_ask_for_nothing_are_no_fault(body):
    assert completion(**body) == completion()
    assert chat(**body) == chat()


def test_what_routers_add_asks_for_nothing():
    assert completion(**OF_COMPLETIONS) == completion()
    assert chat(**OF_CHAT) == chat()
    assert chat(**OF_CHAT, include_reasoning=True).ignored == ("include_reasoning",)


def test_another_value_is_refused_with_the_one_that_is_possible():
    for name, value, words in (
        ("no_stop_trim", True, "only false is possible: use include_stop_str_in_output"),
        ("return_hidden_states", True, "only false is possible"),
        ("separate_reasoning", False, "only true is possible"),
        ("length_penalty", 0.5, "only 1.0 is possible"),
        ("length_penalty", True, "only 1.0 is possible"),
        ("best_of", 1.5, "only 1 is possible"),
        ("best_of", True, "only 1 is possible"),
        ("stop_regex", "a+", "only [] is possible"),
        ("sampling_seed", 5, "sampling_seed is not supported: use seed"),
        ("lora_path", "x", "lora_path is not supported: LoRA adapters"),
    ):
        for parse in (chat, completion):
            error = refused(parse, **{name: value})
            assert (error.param, error.code) == (name, "unsupported_parameter")
            assert words in error.message
    assert completion(best_of=1.0) == completion()
    assert "use /v1/completions" in refused(chat, echo=True).message


def test_the_table_says_a_way_out_of_every_field():
    for name, known in NEUTRAL.items():
        assert known.instead, name
        assert all(known.asks_nothing(value) for value in known.values)
        json.dumps(known.values)


def test_what_changes_nothing_is_named():
    body = dict.fromkeys(ACCEPTED, "x") | {"modalities": ["text"]}
    assert set(chat(**body).ignored) == set(completion(**body).ignored) == set(ACCEPTED)
    message = {"role": "assistant", "content": "x", "annotations": [], "refusal": None, "a\r\nb": 1}
    assert chat(messages=[message, message]).ignored == ("messages[].annotations", "?")
    assert (
        len(
            chat(
                replace(SERVED, unknown_fields="ignore"), **{f"x{i}": 1 for i in range(500)}
            ).ignored
        )
        == 33
    )


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
    assert refused(parse, model=5).param == "model"


def test_defaults_are_the_models():
    served = replace(SERVED, defaults={"temperature": 0.6, "top_k": 20})
    params = chat(served, top_k=5).work[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 1.0)
    assert (chat().work[0].params.max_tokens, completion().work[0].params.max_tokens) == (None, 16)
    assert chat(max_tokens=5, max_completion_tokens=7).work[0].params.max_tokens == 7


def test_fields_reach_the_sampler():
    params = (
        chat(
            n=2,
            temperature=1,
            top_p=0.5,
            min_p=0.1,
            seed=-5,
            stop="x",
            logit_bias={"5": 1},
            logprobs=True,
            ignore_eos=True,
        )
        .work[0]
        .params
    )
    assert (params.n, params.temperature, params.top_p, params.min_p, params.seed) == (
        2,
        1.0,
        0.5,
        0.1,
        -5,
    )
    assert (params.stop, params.logit_bias, params.logprobs, params.ignore_eos) == (
        ("x",),
        {5: 1.0},
        0,
        True,
    )
    assert chat(logprobs=True, top_logprobs=20).work[0].params.logprobs == 20
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


def test_schemas_stand_alone_and_name_every_field():
    for schema in (CHAT_SCHEMA, schema_of(CompletionRequest)):
        assert "$ref" not in json.dumps(schema)
        assert set(SAMPLING) | set(ACCEPTED) <= set(schema["properties"])
        assert schema["additionalProperties"] == {"type": "null"}


@pytest.mark.parametrize(
    "name", [name for name, field in CHAT_SCHEMA["properties"].items() if "minimum" in field]
)
def test_ranges_of_the_schema_are_the_validators(name):
    field = CHAT_SCHEMA["properties"][name]
    others = {"logprobs": True} if name == "top_logprobs" else {}
    chat(**others, **{name: field["minimum"]})
    if name == "seed" or field.get("maximum", 0) < 2**62:
        chat(**others, **{name: field["maximum"]})
    assert refused(chat, **others, **{name: field["minimum"] - 1}).param == name
    assert refused(chat, **others, **{name: field["maximum"] + 1}).param == name


def test_tools_are_offered_unless_declined():
    assert chat(tools=[TOOL]).work[0].prompt.template_values == {"tools": [TOOL]}
    assert chat(tools=[TOOL], tool_choice="none").work[0].prompt.template_values == {}
    assert chat(tools=[]).work[0].prompt.template_values == {}
