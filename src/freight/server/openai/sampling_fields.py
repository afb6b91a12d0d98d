"""The fields that chat and completions share, and the one place where SamplingParams is made of
them.

The types here are what `pydantic` checks and what the OpenAPI page shows. Ranges stand here for
that page alone: the sampler's own validator holds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from reprlib import repr as show
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from freight.errors import RequestError
from freight.sampling import LARGEST, LARGEST_WHOLE, SamplingParams, check_limits
from freight.server.call import Served
from freight.server.limits import ServingLimits
from freight.server.openai.fields import from_request_error, refuse
from freight.server.openai.structure import Form

_MOST = ServingLimits()
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_SAME_NAME = (  # fields that SamplingParams has under the same name
    *(
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "prompt_logprobs",
        "skip_special_tokens",
    ),
    *("cache_salt", "max_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words"),
    "truncate_prompt_tokens",
)


def within(low: float, high: float | None = None) -> Any:
    """A field, absent by default, whose range the schema shows."""
    bounds: dict[str, Any] = {"minimum": low} | ({} if high is None else {"maximum": high})
    return Field(default=None, json_schema_extra=bounds)


def shape(*kinds: dict[str, Any]) -> WithJsonSchema:
    """One of `kinds`, or null, for a value that is checked elsewhere."""
    return WithJsonSchema({"anyOf": [*kinds, {"type": "null"}], "default": None})


_STRING = {"type": "string", "minLength": 1, "maxLength": _MOST.sampling.stop_length}
_STOPS = {"type": "array", "items": _STRING, "maxItems": _MOST.sampling.stop}
_ID = {"type": "integer", "minimum": 0, "maximum": LARGEST_WHOLE}
_IDS = {"type": "array", "items": _ID, "maxItems": _MOST.sampling.stop_token_ids}
_ALLOWED = {
    "type": "array",
    "items": _ID,
    "minItems": 1,
    "maxItems": _MOST.sampling.allowed_token_ids,
}
_WORDS = {"type": "array", "items": _STRING, "maxItems": _MOST.sampling.bad_words}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
    "additionalProperties": {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
    "maxProperties": _MOST.sampling.logit_bias,
}
_OBJECT = {"type": "object"}


class StreamOptions(BaseModel):
    """`stream_options`. `include_obfuscation` is accepted: what it asks for is padding against
    eavesdroppers.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SharedFields(BaseModel):
    """Fields of chat and completions alike, null or absent unless given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = within(1, _MOST.sampling.n)
    temperature: float | None = within(0, _MOST.sampling.temperature)
    top_p: float | None = Field(
        default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1}
    )
    top_k: int | None = within(-1, LARGEST_WHOLE)
    min_p: float | None = within(0, 1)
    seed: int | None = within(-(2**63), 2**64 - 1)
    min_tokens: int | None = within(0, LARGEST_WHOLE)
    stop: Annotated[Any, shape(_STRING, _STOPS)] = None
    stop_token_ids: Annotated[Any, shape(_IDS)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = within(-2, 2)
    frequency_penalty: float | None = within(-2, 2)
    repetition_penalty: float | None = within(0.01, 100)
    logit_bias: Annotated[Any, shape(_BIASES)] = None
    allowed_token_ids: Annotated[Any, shape(_ALLOWED)] = None
    bad_words: Annotated[Any, shape(_STRING, _WORDS)] = None
    prompt_logprobs: int | None = within(0, _MOST.sampling.prompt_logprobs)
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Any, shape({"const": -1}, _ID | {"minimum": 1})] = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(
        default=None, json_schema_extra={"minLength": 1, "maxLength": _MOST.sampling.cache_salt}
    )
    request_id: str | None = Field(
        default=None, json_schema_extra={"pattern": f"^[A-Za-z0-9._-]{{1,{_MOST.request_id}}}$"}
    )
    priority: int | None = within(0, 0)
    response_format: Annotated[Any, shape(_OBJECT)] = None
    structured_outputs: Annotated[Any, shape(_OBJECT)] = None
    guided_json: Annotated[Any, shape(_OBJECT, {"type": "string"}, {"type": "boolean"})] = None
    guided_regex: Annotated[Any, shape({"type": "string"})] = None
    guided_choice: Annotated[Any, shape({"type": "array", "items": {"type": "string"}})] = None
    guided_grammar: Annotated[Any, shape({"type": "string"})] = None
    # Accepted without effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    verbosity: Any = None
    modalities: Annotated[Any, shape({"const": ["text"]})] = None
    prediction: Any = None
    include_reasoning: Any = None
    session_id: Any = None


def check_shared(request: SharedFields, limits: ServingLimits) -> None:
    """Raises ApiError for shared fields that only make sense together with others, or with one
    value.
    """
    if request.stream_options is not None and not request.stream:
        raise refuse("stream_options", "stream_options needs stream: true")
    if request.prompt_logprobs is not None and request.stream:
        raise refuse(
            "prompt_logprobs", "prompt_logprobs come with a whole answer only; leave stream out"
        )
    if request.priority:
        raise refuse(
            "priority", f"priority is {show(request.priority)}; all requests have priority 0 here"
        )
    most = limits.request_id
    if request.request_id is not None and not re.fullmatch(
        rf"[A-Za-z0-9._-]{{1,{most}}}", request.request_id
    ):
        raise refuse(
            "request_id",
            f"request_id is {show(request.request_id)}; it must be 1 to {most} letters, digits, . _ or -",
        )


def sampling_from(
    request: SharedFields,
    served: Served,
    limits: ServingLimits,
    own: Mapping[str, Any],
    renamed: Mapping[str, str],
    form: Form,
    forced: Mapping[str, Any] | None = None,
    around: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> SamplingParams:
    """SamplingParams of a request: what it gives, else the model's defaults, else SamplingParams'
    own.

    own      values that the API decides itself, by SamplingParams' names; None: the default
    renamed  SamplingParams' name -> the field of this API that it came from
    form     that the request gives its answer
    forced   keyword arguments of StructuredOutputs that hold in place of `form`: a forced tool call
    around   makes the form of the whole answer out of the one that the request gives

    Raises ApiError, 400, with the field that is at fault.
    """
    given = {
        name: value for name in _SAME_NAME if (value := getattr(request, name, None)) is not None
    }
    given |= {name: value for name, value in own.items() if value is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = _biases(request.logit_bias)
    structured, source = form.values, form.field
    if forced is not None:
        structured, source = dict(forced), "tool_choice"
    elif structured is not None and around is not None:
        structured = dict(around(structured))
    if structured is not None:
        given["structured_outputs"] = structured
    try:
        params = SamplingParams(**{"max_tokens": None, **served.defaults, **given})
        check_limits(params, limits.sampling)
        params.check_vocabulary(served.vocab_size)
    except RequestError as error:
        raise from_request_error(error, {**renamed, "structured_outputs": source}) from error
    return params


def _biases(given: object) -> object:
    """Biases with their keys as integers. JSON's keys are strings; what is no object is left to the
    sampler's check.
    """
    if not isinstance(given, dict):
        return given
    if len(given) > _MOST.sampling.logit_bias:
        raise refuse(
            "logit_bias",
            f"logit_bias has {len(given)} entries; at most {_MOST.sampling.logit_bias} are allowed",
        )
    for key in given:
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise refuse(
                "logit_bias", f"logit_bias has the key {show(key)}; keys are token ids such as '42'"
            )
    return {int(key): bias for key, bias in given.items()}
