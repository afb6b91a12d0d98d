"""The table of body fields: every row of every API, at values of every JSON type and at the ends of
its range.

What /openapi.json allows of a field is accepted and does what its row says; what it does not allow
is refused, with the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jsonschema_rs
import list_fields
import pytest
from tests.unit.server.openai_cases import CLASSIFIES, EMBEDS, HELLO, LIMITS, SCORES
from tests.unit.server.openai_cases import SERVED as PLAIN

from freight.sampling import SamplingParams
from freight.serve.anthropic.messages_request import (
    CountBody,
    MessagesBody,
    parse_count,
    parse_messages,
)
from freight.serve.bodies import Unread, sampling_names, schema_of
from freight.serve.openai.chat_request import ChatRequest, parse_chat
from freight.serve.openai.completion_request import CompletionRequest, parse_completion
from freight.serve.openai.responses_request import ResponsesBody, parse_responses
from freight.serve.pooling.classify_request import (
    ClassifyRequest,
    PoolingRequest,
    parse_classify,
    parse_pooling,
)
from freight.serve.pooling.embedding_request import (
    EmbeddingChatRequest,
    EmbeddingRequest,
    parse_embeddings,
)
from freight.serve.pooling.fields import PooledFields
from freight.serve.pooling.rerank_request import RerankRequest, parse_any_rerank, parse_rerank
from freight.serve.pooling.score_request import ScoreItemsRequest, ScoreRequest, parse_score
from freight.serve.pooling.tei_request import (
    EmbedBody,
    PredictBody,
    TeiFields,
    TeiRerankBody,
    parse_embed,
    parse_predict,
)
from freight.serve.tgi.request import GenerateBody, Parameters, parse_generate
from freight.serve.tokens import (
    DetokenizeBody,
    InputsBody,
    PromptBody,
    detokenize,
    parse_tokenize,
)
from freight.serve.tokens import MessagesBody as ChatTokensBody
from freight.serve.transport.errors import ApiError

# of a model whose thoughts can have a budget, with an engine of priorities
SERVED = replace(PLAIN, thinking_tags=("<think>", "</think>"), priorities=True)


@dataclass(frozen=True)
class Api:
    """One kind of body: its model, its parser, and the least that it needs."""

    model: Any
    parse: Callable[[Any, Any], Any]
    least: dict[str, Any]
    status: int = 400
    within: str = ""  # the object that the fields are in

    def call(self, fields: dict[str, Any], served: Any = SERVED) -> Any:
        body = {self.within: fields} if self.within else fields
        return self.parse({**self.least, **body}, served)

    def refusal(self, fields: dict[str, Any], served: Any = SERVED) -> ApiError | None:
        try:
            self.call(fields, served)
        except ApiError as error:
            return error
        return None


def pooled(model: Any, parse: Any, least: dict[str, Any], like: Any = EMBEDS) -> Api:
    """Of a model that pools as `like`."""

    def parsed(body: Any, served: Any) -> Any:
        pools = replace(served, pooling=like.pooling, generates=False, priorities=True)
        return parse(body, pools, LIMITS)

    return Api(model, parsed, least)


APIS = {
    "chat": Api(
        ChatRequest, lambda body, served: parse_chat(body, served, LIMITS), {"messages": HELLO}
    ),
    "completions": Api(
        CompletionRequest,
        lambda body, served: parse_completion(body, served, LIMITS),
        {"prompt": "x"},
    ),
    "responses": Api(
        ResponsesBody, lambda body, served: parse_responses(body, served, LIMITS), {"input": "x"}
    ),
    "messages": Api(
        MessagesBody,
        lambda body, served: parse_messages(body, served, LIMITS),
        {"messages": HELLO, "max_tokens": 9},
    ),
    "count": Api(
        CountBody, lambda body, served: parse_count(body, served, LIMITS), {"messages": HELLO}
    ),
    "tgi": Api(
        Parameters,
        lambda body, served: parse_generate(body, served, LIMITS.sampling, False),
        {"inputs": "x"},
        422,
        "parameters",
    ),
    "generate": Api(
        GenerateBody,
        lambda body, served: parse_generate(body, served, LIMITS.sampling, False),
        {"inputs": "x"},
        422,
    ),
    "tokenize": Api(
        PromptBody, lambda body, served: parse_tokenize(body, served, LIMITS), {"prompt": "x"}
    ),
    "tokenize-chat": Api(
        ChatTokensBody,
        lambda body, served: parse_tokenize(body, served, LIMITS),
        {"messages": HELLO},
    ),
    "tokenize-tgi": Api(
        InputsBody, lambda body, served: parse_tokenize(body, served, LIMITS), {"inputs": "x"}
    ),
    "detokenize": Api(DetokenizeBody, detokenize, {"tokens": [1]}),
    "embeddings": pooled(EmbeddingRequest, parse_embeddings, {"input": "x"}),
    "embeddings-chat": pooled(EmbeddingChatRequest, parse_embeddings, {"messages": HELLO}),
    "rerank": pooled(RerankRequest, parse_rerank, {"query": "x", "documents": ["y"]}, SCORES),
    "score": pooled(ScoreRequest, parse_score, {"text_1": "x", "text_2": "y"}, SCORES),
    "score-items": pooled(ScoreItemsRequest, parse_score, {"queries": "x", "items": "y"}, SCORES),
    "classify": pooled(ClassifyRequest, parse_classify, {"input": "x"}, CLASSIFIES),
    "pooling": pooled(PoolingRequest, parse_pooling, {"input": "x"}),
    "tei": pooled(EmbedBody, parse_embed, {"inputs": "x"}),
    "tei-rerank": pooled(TeiRerankBody, parse_any_rerank, {"query": "x", "texts": ["y"]}, SCORES),
    "tei-predict": pooled(PredictBody, parse_predict, {"inputs": "x"}, CLASSIFIES),
}
POOLED = [name for name, api in APIS.items() if issubclass(api.model, PooledFields | TeiFields)]
NEEDED = {  # what a field needs beside it
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
}
# Fields of which a schema cannot say what the model or the other fields allow.
DEPENDENT = {
    *("model", "adapter_id", "grammar", "truncate", "min_tokens"),
    *("logit_bias", "stop_token_ids", "allowed_token_ids", "max_tokens"),
    *("response_format", "structured_outputs", "text", "output_config"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("tools", "tool_choice", "chat_template_kwargs", "continue_final_message"),
    *("prompt_name", "task"),
}
POOL: list[Any] = [
    *(True, False, 0, 1, -1, -2, 5, 0.5, 1.5, -0.1, 1e308, 10**30, 2**64, 10**4000),
    *(float("nan"), float("inf"), "", "x", "5", "yes", "a b", "x" * 1025, "x" * 10**5),
    *([], [5], [5.5], [True], ["5"], ["x"], ["a", ""], [-1], [2**70], [SERVED.vocab_size]),
    *(["x"] * 17, ["x" * 257], [1] * 1025, [[]], ["text"]),
    *({}, {"1": 1}, {"abc": 1}, {"01": 1}, {"-1": 1}, {"1": 1e30}, {"1": "x"}, {"1": 10**4000}),
    *({"1000000": 1}, {str(i): 1 for i in range(2000)}, {"type": "xml"}),
    *({"include_usage": True}, {"include_usage": 1}, {"x": 1}, {"type": "json_object"}, "low"),
]
MORE = {  # values for single fields
    "logit_bias": [{"9" * 4000: 1}],
    "stop": [["x"] * 16, ["x"] * 15 + [5]],
    "cache_salt": ["\ud800"],
    "request_id": ["x" * 128, "x" * 129, "http://x/"],
    "length_penalty": [True],
}
MOST_SHOWN = 1000  # characters that an error has at most


def ends(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the ends of a field's ranges, and the values right outside."""
    for part in [schema, *schema.get("anyOf", [])]:
        step = 1 if {"type": "integer"} in schema.get("anyOf", []) else 0.25
        for name, outside in (("minimum", -step), ("maximum", step), ("exclusiveMinimum", step)):
            if name in part:
                yield from (part[name], part[name] + outside, part[name] - outside)
        if "maxLength" in part:
            yield from ("x" * part["maxLength"], "x" * (part["maxLength"] + 1))
        if "maxItems" in part:
            item = 1 if part.get("items", {}).get("type") == "integer" else "x"
            yield from ([item] * part["maxItems"], [item] * (part["maxItems"] + 1))
        yield from part.get("enum", [])


def allows(validator: Any, value: Any) -> bool:
    """Whether a schema allows a value; none allows what is no JSON, such as NaN."""
    try:
        return bool(validator.is_valid(value))
    except (ValueError, OverflowError, TypeError):
        return False


def same(left: object, right: object) -> bool:
    return left == right or (left != left and right != right)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_field_takes_what_its_row_says_and_nothing_else(api: Api) -> None:
    for name, schema in schema_of(api.model)["properties"].items():
        if name not in api.least or name == "max_tokens":
            check_field(api, name, schema)


def check_field(api: Api, name: str, schema: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(schema)
    sets = sampling_names(api.model).get(name)
    whole = {"type": "number"} not in schema.get("anyOf", [])
    for value in [*POOL, *ends(schema), *MORE.get(name, [])]:
        if isinstance(value, float) and value.is_integer() and whole:
            continue  # an integer to a schema, and not to the server
        error = api.refusal({**NEEDED.get(name, {}), name: value})
        if allows(validator, value):
            assert error is None or name in DEPENDENT, (name, f"{value!r:.80}", error)
            if error is None and sets is not None and value is not None:
                call = api.call({**NEEDED.get(name, {}), name: value})
                expected = SamplingParams(**{"max_tokens": None, sets: value})
                got = getattr(call.work[0].params, sets)
                assert same(got, getattr(expected, sets)), (name, f"{value!r:.80}")
        else:
            assert error is not None, (name, f"{value!r:.80}")
        if error is not None:
            path = (error.param or "").removeprefix(api.within).lstrip(".")
            at_fault = path.split(".")[0].split("[")[0]
            assert at_fault in (name, ""), (name, f"{value!r:.80}", error.param)
            assert path or (api.within and name in error.message), (name, f"{value!r:.80}")
            assert error.status == (404 if error.code == "model_not_found" else api.status)
            assert len(error.message) < MOST_SHOWN
            assert not path or name in error.message, error.message


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_field_sets_the_sampling_option_of_its_name(api: Api) -> None:
    options = {option.name for option in fields(SamplingParams)} - {"structured_outputs"}
    converted = {"logit_bias", "prediction", *(["logprobs"] if api.model is ChatRequest else [])}
    of_other_names = {
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "max_new_tokens": "max_tokens",
        "top_logprobs": "logprobs",
        "top_n_tokens": "logprobs",
        "truncate": "truncate_prompt_tokens",
        "reasoning_budget": "thinking_token_budget",
        "reasoning_budget_tokens": "thinking_token_budget",
    }
    expected = {name: name for name in options - converted} | of_other_names
    names = set(api.model.model_fields) - set(api.least)
    if issubclass(api.model, TeiFields):
        names.remove("truncate")  # here it says whether, and not to how many
    assert dict(sampling_names(api.model)) == {
        name: expected[name] for name in names if name in expected
    }


@pytest.mark.parametrize("api", [APIS["chat"], APIS["completions"]])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"1000000": 1}),
        ("stop_token_ids", [10**6]),
        ("allowed_token_ids", [SERVED.vocab_size]),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_what_the_vocabulary_or_another_field_does_not_allow(
    api: Api, name: str, value: object
) -> None:
    error = api.refusal({name: value})
    assert error is not None
    assert error.param == name


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_null_is_absent(api: Api) -> None:
    schema = schema_of(api.model)
    names = set(schema["properties"]) - set(api.least)
    nothing = dict.fromkeys(names)
    assert api.call(nothing) == api.call({})
    assert jsonschema_rs.is_valid(schema, {**nothing, **({} if api.within else api.least)})
    assert "$ref" not in json.dumps(schema)


@pytest.mark.parametrize("key", ["chat", "completions", "tgi", "generate", *POOLED])
def test_a_field_that_is_not_read_asks_for_nothing(key: str) -> None:
    api = APIS[key]
    for name, row in api.model.unread.items():
        if name not in api.model.model_fields or key == "tgi":
            check_unread(api, name, row)


def check_unread(api: Api, name: str, row: Unread) -> None:
    lenient = replace(SERVED, unknown_fields="ignore")
    plain = api.call({})
    for value in ("x",) if row.values is None else row.values:
        json.dumps(value)
        call = api.call({name: value})
        assert call.ignored == ((name,) if row.reported else ()), name
        assert replace(call, ignored=()) == plain, name
        if type(value) is int:
            assert api.call({name: float(value)}) == call, name
    if row.values is None:
        return
    assert row.instead, "there is a way out"
    possible = " or ".join(json.dumps(value) for value in row.values)
    for value in (*POOL, *MORE.get(name, [])):
        if row.accepts(value):
            continue
        for served in (SERVED, lenient):
            error = api.refusal({name: value}, served)
            assert error is not None, (name, f"{value!r:.80}")
            assert (error.status, (error.param or "").rpartition(".")[2]) == (api.status, name)
            if name == "watermark" and not isinstance(value, bool):
                continue  # its type is checked first
            assert row.instead in error.message
            if not api.within:
                assert possible in error.message
                assert error.code == (None if row.reported else "unsupported_parameter")


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_field_that_nobody_knows(api: Api) -> None:
    open_body = api.model in (ResponsesBody, MessagesBody, CountBody)
    schema = schema_of(api.model)
    error = api.refusal({"temprature": 1})
    if open_body:
        assert error is None
        assert api.call({"temprature": 1}).ignored == ("temprature",)
        return
    assert error is not None
    assert schema["additionalProperties"] == {"type": "null"}
    assert schema_of(api.model, "ignore")["additionalProperties"] is True
    path = ".".join(filter(None, (api.within, "temprature")))
    assert (error.status, error.param) == (api.status, path)
    if "temperature" in api.model.model_fields:
        assert "temperature" in error.message
    lenient = replace(SERVED, unknown_fields="ignore")
    call = api.call({"temprature": 1}, lenient)
    many = api.call({f"x{number}": 1 for number in range(500)}, lenient)
    if hasattr(call, "ignored"):
        assert call.ignored == (path,)
        assert len(many.ignored) == 33


def test_the_table_of_the_documents_is_current() -> None:
    assert list_fields.PAGE.read_text() == list_fields.page(), "run: python tools/list_fields.py"
