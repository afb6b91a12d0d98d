"""The fields that chat and completions share, and their conversion to SamplingParams.

pydantic checks the types, and /openapi.json shows them. Ranges are shown there, and checked by the
sampler's own validator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from reprlib import repr as show
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation

from freight.errors import RequestError
from freight.sampling import LARGEST, LARGEST_WHOLE, SamplingParams, check_limits
from freight.serve.bodies import MOST, Closed, Part, Stop, Stops, TokenId, sampled
from freight.serve.call import Served
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import ACCEPTED, from_request_error, refuse
from freight.serve.openai.neutral import NEUTRAL
from freight.serve.openai.stream import AnswerOptions
from freight.serve.openai.structure import Form

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_SAME_NAME = {one.name for one in fields(SamplingParams)} - {  # converted separately
    "logit_bias",
    "logprobs",
    "structured_outputs",
    "prediction",
}
_Allowed = Annotated[list[TokenId], Field(min_length=1, max_length=MOST.sampling.allowed_token_ids)]
_Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-LARGEST, le=LARGEST)]],
    Field(
        max_length=MOST.sampling.logit_bias,
        json_schema_extra={"propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"}},
    ),
]


class StreamOptions(Part):
    """`stream_options`. `include_obfuscation` is accepted without effect: it asks for padding
    against eavesdroppers.
    """

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonFields(Part):
    """Fields with the same meaning in every API that is read as a chat."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = sampled("temperature")
    top_p: float | None = sampled("top_p")
    top_k: int | None = sampled("top_k")
    min_p: float | None = sampled("min_p")
    seed: int | None = sampled("seed")
    min_tokens: int | None = sampled("min_tokens")
    stop_token_ids: SkipValidation[
        Annotated[list[TokenId], Field(max_length=MOST.sampling.stop_token_ids)] | None
    ] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = sampled("presence_penalty")
    frequency_penalty: float | None = sampled("frequency_penalty")
    repetition_penalty: float | None = sampled("repetition_penalty")
    logit_bias: SkipValidation[_Biases | None] = None
    allowed_token_ids: SkipValidation[_Allowed | None] = None
    bad_words: SkipValidation[
        Stop | Annotated[list[Stop], Field(max_length=MOST.sampling.bad_words)] | None
    ] = None
    truncate_prompt_tokens: SkipValidation[
        Literal[-1] | Annotated[int, Field(ge=1, le=LARGEST_WHOLE)] | None
    ] = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(
        default=None, json_schema_extra={"minLength": 1, "maxLength": MOST.sampling.cache_salt}
    )
    request_id: str | None = Field(
        default=None, json_schema_extra={"pattern": f"^[A-Za-z0-9._-]{{1,{MOST.request_id}}}$"}
    )
    structured_outputs: SkipValidation[dict[str, Any] | None] = None


class SharedFields(CommonFields, Closed):
    """Fields of both chat and completions."""

    model_config = ConfigDict(extra="forbid")
    neutral = NEUTRAL
    accepted = ACCEPTED

    stream_options: StreamOptions | None = None
    n: int | None = sampled("n")
    stop: SkipValidation[Stop | Stops | None] = None
    prompt_logprobs: int | None = sampled("prompt_logprobs")
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = Field(default=None, json_schema_extra={"enum": [0, None]})
    response_format: SkipValidation[dict[str, Any] | None] = None
    guided_json: SkipValidation[dict[str, Any] | str | bool | None] = None
    guided_regex: SkipValidation[str | None] = None
    guided_choice: SkipValidation[list[str] | None] = None
    guided_grammar: SkipValidation[str | None] = None
    modalities: Any = Field(default=None, json_schema_extra={"enum": [["text"], None]})

    def answer_options(self) -> AnswerOptions:
        """Return the options for the contents of the answer."""
        stream = self.stream_options or StreamOptions()
        return AnswerOptions(
            include_usage=bool(stream.include_usage),
            continuous_usage=bool(stream.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            prompt_logprobs=self.prompt_logprobs is not None,
        )


def check_shared(request: SharedFields, limits: ServingLimits) -> None:
    """Raise ApiError for shared fields that need others, or allow a single value."""
    if request.stream_options is not None and not request.stream:
        raise refuse("stream_options", "stream_options needs stream: true")
    if request.prompt_logprobs is not None and request.stream:
        raise refuse(
            "prompt_logprobs", "prompt_logprobs come with a complete answer only; leave stream out"
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
    """Build the SamplingParams: from the request, else the model's defaults, else the class's.

    own      values that the API sets itself, by SamplingParams' names; None: the default
    renamed  SamplingParams' name -> the field of this API
    form     the form that the request asks for
    forced   keyword arguments of StructuredOutputs that replace `form`: a forced tool call
    around   wraps the requested form to that of the full answer, reasoning included

    Raises ApiError, 400, with the field at fault.
    """
    given = {
        name: value for name in _SAME_NAME if (value := getattr(request, name, None)) is not None
    }
    given |= {name: value for name, value in own.items() if value is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = _biases(request.logit_bias)
    structured = form.values
    source = form.field
    if forced is not None:
        structured = dict(forced)
        source = "tool_choice"
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
    """Convert the keys of biases to integers: JSON's keys are strings. The sampler's check refuses
    a value that is not an object.
    """
    if not isinstance(given, dict):
        return given
    if len(given) > MOST.sampling.logit_bias:
        raise refuse(
            "logit_bias",
            f"logit_bias has {len(given)} entries; at most {MOST.sampling.logit_bias} are allowed",
        )
    for key in given:
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise refuse(
                "logit_bias", f"logit_bias has the key {show(key)}; keys are token ids such as '42'"
            )
    return {int(key): bias for key, bias in given.items()}
