"""The fields that chat and completions share, and their conversion to SamplingParams.

pydantic checks the types, and /openapi.json shows them. Ranges are shown there, and checked by the
sampler's own validator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from reprlib import repr as show
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from freight.base.fields import JsonDict, JsonObject
from freight.base.other_engines.fields import BODIES, SAMPLING
from freight.errors import RequestError
from freight.sampling import LARGEST, LARGEST_WHOLE, SamplingParams, check_limits
from freight.serve.bodies import (
    MOST,
    Closed,
    Part,
    Stop,
    Stops,
    TokenId,
    checked_later,
    field_row,
    option,
    sampled,
    sampling_names,
)
from freight.serve.call import Served
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import from_request_error, refuse
from freight.serve.openai.stream import AnswerOptions
from freight.serve.openai.structure import Form
from freight.serve.openai.unread import UNREAD

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_Allowed = Annotated[list[TokenId], Field(min_length=1, max_length=MOST.sampling.allowed_token_ids)]
_Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-LARGEST, le=LARGEST)]],
    Field(
        max_length=MOST.sampling.logit_bias,
        json_schema_extra={"propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"}},
    ),
]
_StopIds = Annotated[list[TokenId], Field(max_length=MOST.sampling.stop_token_ids)]
_BadWords = Annotated[list[Stop], Field(max_length=MOST.sampling.bad_words)]
KeptTokens = Literal[-1] | Annotated[int, Field(ge=1, le=LARGEST_WHOLE)]


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
    stop_token_ids: _StopIds | None = option("stop_token_ids")
    include_stop_str_in_output: bool | None = option("include_stop_str_in_output", checked=True)
    ignore_eos: bool | None = option("ignore_eos", checked=True)
    presence_penalty: float | None = sampled("presence_penalty")
    frequency_penalty: float | None = sampled("frequency_penalty")
    repetition_penalty: float | None = sampled("repetition_penalty")
    logit_bias: _Biases | None = checked_later()
    allowed_token_ids: _Allowed | None = option("allowed_token_ids")
    bad_words: Stop | _BadWords | None = option("bad_words")
    truncate_prompt_tokens: KeptTokens | None = option("truncate_prompt_tokens")
    timeout_s: float | None = sampled("timeout_s")
    reasoning_budget: int | None = sampled("thinking_token_budget")
    reasoning_budget_tokens: int | None = sampled("thinking_token_budget")
    thinking_token_budget: int | None = sampled(
        "thinking_token_budget", note="(wins over `reasoning_budget` and `reasoning_budget_tokens`)"
    )
    add_special_tokens: bool | None = None
    cache_salt: str | None = option(
        "cache_salt", checked=True, minLength=1, maxLength=MOST.sampling.cache_salt
    )
    request_id: str | None = field_row(pattern=f"^[A-Za-z0-9._-]{{1,{MOST.request_id}}}$")
    structured_outputs: JsonDict | None = checked_later()


class SharedFields(CommonFields, Closed):
    """Fields of both chat and completions."""

    model_config = ConfigDict(extra="forbid")
    unread = UNREAD
    others: ClassVar[Mapping[str, str]] = {**SAMPLING, **BODIES}

    stream_options: StreamOptions | None = field_row(
        note="(`include_usage`, `continuous_usage_stats`)"
    )
    n: int | None = sampled("n")
    stop: Stop | Stops | None = option("stop")
    prompt_logprobs: int | None = sampled("prompt_logprobs")
    skip_special_tokens: bool | None = option("skip_special_tokens", checked=True)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = sampled(
        "priority", note="(0 only, unless the server has `--scheduling-policy priority`)"
    )
    response_format: JsonDict | None = checked_later()
    guided_json: JsonDict | str | bool | None = checked_later()
    guided_regex: str | None = checked_later()
    guided_choice: list[str] | None = checked_later()
    guided_grammar: str | None = checked_later()

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


def check_shared(request: SharedFields, served: Served, limits: ServingLimits) -> None:
    """Raise ApiError for shared fields that need others, or allow a single value."""
    if request.stream_options is not None and not request.stream:
        raise refuse("stream_options", "stream_options needs stream: true")
    if request.prompt_logprobs is not None and request.stream:
        raise refuse(
            "prompt_logprobs", "prompt_logprobs come with a complete answer only; leave stream out"
        )
    check_routing(request.priority, request.request_id, served, limits)


def check_routing(
    priority: int | None, request_id: str | None, served: Served, limits: ServingLimits
) -> None:
    """Raise ApiError for a priority where requests have none, and for an id that is not safe in a log."""
    if priority and not served.priorities:
        raise refuse(
            "priority",
            f"priority is {show(priority)}; all requests have priority 0 here: leave it out, or start the server with "
            "--scheduling-policy priority",
        )
    most = limits.request_id
    if request_id is not None and not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{most}}}", request_id):
        raise refuse(
            "request_id",
            f"request_id is {show(request_id)}; it must be 1 to {most} letters, digits, . _ or -",
        )


def sampling_from(
    request: SharedFields,
    served: Served,
    limits: ServingLimits,
    api_values: Mapping[str, object],
    form: Form,
    forced: JsonObject | None = None,
    around: Callable[[JsonObject], JsonObject] | None = None,
) -> SamplingParams:
    """Build the SamplingParams: from the request, else the model's defaults, else the class's.

    api_values  values that the API computes, by SamplingParams' names; None: the request's
    form        the form that the request asks for
    forced      keyword arguments of StructuredOutputs that replace `form`: a forced tool call
    around      wraps the requested form to that of the full answer, reasoning included

    Raises ApiError, 400, with the field at fault.
    """
    values: JsonDict = {}
    fields: dict[str, str] = {}  # SamplingParams' name -> the field of this API
    for field, name in sampling_names(type(request)).items():
        value = getattr(request, field)
        if value is not None:
            values[name] = value
            fields[name] = field
    values |= {name: value for name, value in api_values.items() if value is not None}
    if request.logit_bias is not None:
        values["logit_bias"] = _biases(request.logit_bias)
    structured = form.values
    source = form.field
    if forced is not None:
        structured = dict(forced)
        source = "tool_choice"
    elif structured is not None and around is not None:
        structured = dict(around(structured))
    if structured is not None:
        values["structured_outputs"] = structured
    if values.get("thinking_token_budget") is not None:
        values["thinking_tags"] = _thinking_tags(values, fields, served)
    try:
        params = SamplingParams(**{"max_tokens": None, **served.defaults, **values})
        check_limits(params, limits.sampling)
        params.check_vocabulary(served.vocab_size)
    except RequestError as error:
        raise from_request_error(error, {**fields, "structured_outputs": source}) from error
    return params


def _thinking_tags(
    values: Mapping[str, object], fields: Mapping[str, str], served: Served
) -> tuple[str, str] | None:
    """Return the tags of the model's thoughts, for a budget of them. Raises ApiError, 400, where they
    are not known.
    """
    budget = values["thinking_token_budget"]
    if served.thinking_tags is None and budget != -1:
        field = fields.get("thinking_token_budget", "thinking_token_budget")
        raise refuse(
            field,
            f"{field} is {show(budget)}, and the tags of this model's thoughts are not known, so that none can be "
            "ended; leave it out, or start the server with --reasoning-parser",
        )
    return served.thinking_tags


def _biases(biases: object) -> object:
    """Convert the keys of biases to integers: JSON's keys are strings. The sampler's check refuses
    a value that is not an object.
    """
    if not isinstance(biases, dict):
        return biases
    if len(biases) > MOST.sampling.logit_bias:
        raise refuse(
            "logit_bias",
            f"logit_bias has {len(biases)} entries; at most {MOST.sampling.logit_bias} are allowed",
        )
    for key in biases:
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise refuse(
                "logit_bias", f"logit_bias has the key {show(key)}; keys are token ids such as '42'"
            )
    return {int(key): bias for key, bias in biases.items()}
