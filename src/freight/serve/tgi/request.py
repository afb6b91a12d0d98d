"""The API of Hugging Face's text-generation-inference (TGI): a body -> `GenerateCall`, and `info`.

As in TGI, a request is greedy unless it says otherwise, takes no sampling defaults from
generation_config.json, and generates 100 tokens by default. Features of TGI that are not
implemented are refused, not ignored.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from freight.base.fields import JsonDict, JsonObject
from freight.base.files import unique_names
from freight.errors import RequestError, nearest
from freight.sampling import SamplingLimits, SamplingParams, check_limits
from freight.serve.bodies import (
    Body,
    Part,
    Stop,
    Stops,
    Unread,
    checked_later,
    field_row,
    option,
    present,
    read,
    sampled,
    sampling_names,
)
from freight.serve.call import ReplyHead, Served, TokenizedWork, Work
from freight.serve.limits import check_context
from freight.serve.openai.fields import named
from freight.serve.openai.structure import as_object, enforced
from freight.serve.tgi.reply import GenerateReply, ReplyOptions, error_body
from freight.serve.transport.errors import ApiError

DEFAULT_NEW_TOKENS = 100  # as in TGI
_SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "stop_sequences": "stop",
    "n": "best_of",
}
_KINDS = "json, json_schema or regex"


class Grammar(Part):
    """The grammar of the answer. `value`: a JSON schema, as an object or as text, or a regular
    expression.
    """

    type: Literal["json", "json_schema", "regex"]
    value: JsonDict | str


class Parameters(Body):
    """The generation parameters."""

    unread = {  # noqa: RUF012, a ClassVar annotation is on the base class
        "best_of": Unread((1,), "only 1 is possible; send several requests with a seed each"),
        "typical_p": Unread((1,), "typical sampling is not implemented; use top_p"),
        "watermark": Unread((False,), "watermarks are not implemented; leave it out"),
    }

    adapter_id: str | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = sampled("frequency_penalty", checked=False)
    grammar: Grammar | None = checked_later()
    max_new_tokens: int | None = sampled("max_tokens", checked=False, minimum=1)
    repetition_penalty: float | None = sampled("repetition_penalty", checked=False)
    return_full_text: bool | None = None
    seed: int | None = sampled("seed", checked=False)
    stop: Stops | Stop | None = option("stop")
    temperature: float | None = sampled("temperature", checked=False)
    top_k: int | None = sampled("top_k", checked=False)
    top_n_tokens: int | None = sampled("logprobs", checked=False)
    top_p: float | None = sampled("top_p", checked=False)
    truncate: int | None = sampled("truncate_prompt_tokens", checked=False, minimum=1)
    watermark: bool | None = field_row(enum=[False, None])


class GenerateBody(Body):
    """The body of /generate. Clients for Hugging Face's hosted API send `options` and `model`."""

    unread = dict.fromkeys(("options", "model"), Unread(None, reported=True))

    inputs: str
    stream: bool | None = None
    parameters: Parameters | None = None


@dataclass(frozen=True)
class GenerateCall:
    """A parsed request to generate."""

    stream: bool
    model: str
    work: Sequence[Work]
    ignored: Sequence[str]
    options: ReplyOptions
    max_new_tokens: int | None  # as the request has it
    request_id: str | None = None

    def reply(
        self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]
    ) -> GenerateReply:
        if served.tokenizer is None:
            raise _no_tokenizer()
        if self.max_new_tokens is not None:
            check_context(
                len(work[0].token_ids), self.max_new_tokens, served.max_model_len, "inputs"
            )
        return GenerateReply(self.options, work[0], served.tokenizer, served.stop_token_ids)

    def failure_body(self, error: ApiError) -> object:
        return error_body(error)


def parse_generate(
    body: JsonObject, served: Served, limits: SamplingLimits, stream: bool | None
) -> GenerateCall:
    """Parse a body. Raises ApiError (422).

    stream  set by the path; None, for `POST /`: the body decides
    """
    if served.tokenizer is None:
        raise _no_tokenizer()
    ignored = [name for name in GenerateBody.unread if body.get(name) is not None]
    ignored += _unknown("", body, GenerateBody, served)

    def refused(path: str, words: str, _: object) -> ApiError:
        return _invalid(f"{path.split('.')[-1]} {words}", path)

    asked = read(GenerateBody, body, refused)
    if not asked.inputs:
        try:
            served.tokenizer.check_empty()
        except RequestError as error:
            raise _invalid(f"inputs is '': {error}", "inputs") from None
    raw = body.get("parameters") or {}
    ignored += _unknown("parameters.", raw, Parameters, served)
    parameters = present(raw)
    streams = bool(asked.stream) if stream is None else stream
    _check_parameters(parameters, streams)
    form = None
    if "grammar" in parameters:
        form, unenforced = _grammar(parameters["grammar"], served.strict_schemas)
        ignored += unenforced
    params = _sampling(parameters, limits, served.max_model_len, form)
    return GenerateCall(
        stream=streams,
        model=_model(parameters.get("adapter_id"), served),
        work=(Work(asked.inputs, params, form_from="parameters.grammar"),),
        ignored=named(ignored),
        options=ReplyOptions(
            stream=streams,
            details=parameters.get("details", False),
            top_n_tokens=params.logprobs or 0,
            prefix=asked.inputs if parameters.get("return_full_text") else "",
            as_list=stream is None,
        ),
        max_new_tokens=parameters.get("max_new_tokens"),
    )


def _model(adapter_id: str | None, served: Served) -> str:
    """Return the name of the adapter, or that of the model. Raises ApiError for one that is not
    loaded.
    """
    if not adapter_id:
        return served.names[0]
    if not served.has_adapter(adapter_id):
        raise _invalid(
            f"adapter_id: no adapter is called {adapter_id[:100]!r}; {served.offered}",
            "parameters.adapter_id",
        )
    return adapter_id


def _unknown(prefix: str, fields: JsonObject, model: type[Body], served: Served) -> list[str]:
    """Return the names of unknown fields. Raises ApiError unless the server ignores them."""
    known = (*model.model_fields, *model.unread)
    unknown = [name for name, value in fields.items() if name not in known and value is not None]
    if unknown and served.unknown_fields != "ignore":
        hint = nearest(unknown[0][:60], known, _SYNONYMS)
        raise _invalid(
            f"{prefix}{unknown[0]:.60} is not a field of this API{hint}",
            f"{prefix}{unknown[0]:.60}",
        )
    return [f"{prefix}{name}" for name in unknown]


def _check_parameters(parameters: JsonObject, streams: bool) -> None:
    """Raise ApiError for features that are not implemented, and for contradictions."""
    for name, row in Parameters.unread.items():
        if name in parameters and not row.accepts(parameters[name]):
            raise _invalid(f"{name}: {row.instead}", f"parameters.{name}")
    if streams and parameters.get("decoder_input_details"):
        raise _invalid(
            "decoder_input_details: a stream does not have the prompt's tokens; use /generate",
            "parameters.decoder_input_details",
        )


def _sampling(
    parameters: JsonObject,
    limits: SamplingLimits,
    max_model_len: int,
    form: JsonDict | None,
) -> SamplingParams:
    """Build the SamplingParams. Raises ApiError for a value outside its range."""
    samples = parameters.get("do_sample", False) or any(
        name in parameters for name in ("temperature", "top_k", "top_p")
    )
    names = sampling_names(Parameters)
    fields = {names[name]: value for name, value in parameters.items() if name in names}
    fields["max_tokens"] = _count(parameters, "max_new_tokens", 1) or DEFAULT_NEW_TOKENS
    fields["logprobs"] = _count(parameters, "top_n_tokens", 0) or 0
    fields["truncate_prompt_tokens"] = _count(parameters, "truncate", 1, max_model_len)
    if not samples:
        fields["temperature"] = 0.0
    if parameters.get("decoder_input_details"):
        fields["prompt_logprobs"] = 0
    if form is not None:
        fields["structured_outputs"] = form
    try:
        params = SamplingParams(**fields)
        check_limits(params, limits)
    except RequestError as error:
        raise _invalid(_in_tgis_names(str(error)), "parameters") from None
    if parameters.get("do_sample") and params.greedy:
        raise _invalid(
            "temperature is 0, which is greedy, and do_sample is true", "parameters.temperature"
        )
    if samples and not params.greedy and params.seed is None:
        # TGI reports the seed that it drew. Up to 2**53 every JSON reader keeps all digits.
        params = replace(params, seed=secrets.randbits(53))
    return params


def _in_tgis_names(message: str) -> str:
    for theirs, ours in sampling_names(Parameters).items():
        if message.startswith(f"{ours} "):
            return theirs + message[len(ours) :]
    return message


def _grammar(grammar: object, strict_schemas: bool) -> tuple[JsonDict, tuple[str, ...]]:
    """Return `grammar` as SamplingParams.structured_outputs, and the parts of its schema that are
    not enforced.
    """
    if not isinstance(grammar, Mapping) or "value" not in grammar:
        raise _invalid(
            f"grammar must be an object with type ({_KINDS}) and value", "parameters.grammar"
        )
    kind = grammar.get("type")
    value = grammar["value"]
    if kind == "regex":
        if not isinstance(value, str):
            raise _invalid(
                "the value of a grammar of type regex must be a string", "parameters.grammar.value"
            )
        return {"regex": value}, ()
    if kind not in ("json", "json_schema"):
        raise _invalid(f"grammar.type must be {_KINDS}", "parameters.grammar.type")
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            raise _invalid(
                f"the value of a grammar must be a JSON schema: {error}", "parameters.grammar.value"
            ) from None
    if kind == "json_schema" and isinstance(value, Mapping):
        value = value.get("schema")  # next to a name
    if not isinstance(value, Mapping):
        raise _invalid(
            "the value of a grammar must be a JSON schema, an object", "parameters.grammar.value"
        )
    where = "parameters.grammar.value"
    try:
        return enforced(as_object(value), where, where, strict_schemas)
    except ApiError as error:
        raise as_tgi_error(error) from None


def _count(parameters: JsonObject, name: str, low: int, high: int | None = None) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        within = f"{low} or more" if high is None else f"{low} to {high}"
        raise _invalid(f"{name} must be a whole number, {within}", f"parameters.{name}")
    return value


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(422, message, param=param)


def _no_tokenizer() -> ApiError:
    return ApiError(422, "this server has no tokenizer; use /v1/completions with token ids")


def as_tgi_error(error: ApiError) -> ApiError:
    """Return `error` with TGI's status: 422 for an invalid request, 424 for a failure."""
    if error.status in (400, 413):
        status = 422
    elif error.status in (500, 502, 504):
        status = 424
    else:
        status = error.status
    return ApiError(
        status, error.message, param=error.param, code=error.code, headers=error.headers
    )


@dataclass(frozen=True)
class ServerFacts:
    """Facts for `/info` besides those of the model.

    max_concurrent_requests  requests that run or wait; more are refused
    max_prompts              prompts in one request of /v1/completions
    kv_cache                 format, capacity, ... of the cache
    kernels                  name of the kernels in use
    """

    version: str
    max_concurrent_requests: int
    max_prompts: int
    kv_cache: JsonObject
    kernels: str
    model_sha: str | None = None


def info(served: Served, limits: SamplingLimits, facts: ServerFacts) -> JsonDict:
    """Return the answer of `/info`: TGI's keys, then Freight's."""
    tokenizer = served.tokenizer
    return {
        "model_id": served.names[0],
        "model_sha": facts.model_sha,
        "vocab_size": served.vocab_size,
        "max_concurrent_requests": facts.max_concurrent_requests,
        "max_best_of": 1,
        "max_stop_sequences": limits.stop,
        "max_input_tokens": served.max_model_len - 1,
        "max_total_tokens": served.max_model_len,
        "max_client_batch_size": facts.max_prompts,
        "router": "freight",
        "version": facts.version,
        "chat": tokenizer is not None and tokenizer.has_chat_template,
        "defaults": dict(served.defaults),
        "kv_cache": dict(facts.kv_cache),
        "kernels": facts.kernels,
        "fingerprint": served.fingerprint,
    }
