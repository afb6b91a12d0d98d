"""Fields that all bodies for models that pool have, and the parameters that come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from pydantic import ConfigDict

from freight.errors import RequestError
from freight.model.config.pooling import PoolingConfig
from freight.pooling import PoolingParams
from freight.sampling import SamplingParams, check_limits
from freight.serve.bodies import MOST, Closed, field_row, option, sampled
from freight.serve.call import Served, Work
from freight.serve.limits import ServingLimits, check_input
from freight.serve.openai.fields import from_request_error, part, read_fields, refuse, served_name
from freight.serve.openai.prompts import PromptRules, TextOrIds
from freight.serve.openai.sampling_fields import KeptTokens, check_routing
from freight.serve.pooling.unread import UNREAD
from freight.text.pooling_inputs import named_prompt


class PooledFields(Closed):
    """The fields that every body has."""

    model_config = ConfigDict(extra="forbid")
    unread = UNREAD

    model: str | None = None
    truncate_prompt_tokens: KeptTokens | None = option("truncate_prompt_tokens")
    cache_salt: str | None = option(
        "cache_salt", checked=True, minLength=1, maxLength=MOST.sampling.cache_salt
    )
    request_id: str | None = field_row(pattern=f"^[A-Za-z0-9._-]{{1,{MOST.request_id}}}$")
    priority: int | None = sampled(
        "priority", note="(0 only, unless the server has `--scheduling-policy priority`)"
    )


B = TypeVar("B", bound=PooledFields)


@dataclass(frozen=True)
class Asked(Generic[B]):
    """A body that was read.

    model    the name for the answer
    ignored  names of fields without effect
    """

    body: B
    model: str
    ignored: tuple[str, ...]


def read_asked(body: object, kind: type[B], served: Served, limits: ServingLimits) -> Asked[B]:
    """Read `body`, decoded JSON, as `kind`. Raises ApiError: 400 with `param` for the first field at
    fault, 404 for a model that is not served.
    """
    fields = read_fields(body, kind, served, limits)
    read = part(kind, "", fields.values)
    model = served_name(read.model, served)
    check_routing(read.priority, read.request_id, served, limits)
    return Asked(read, model, fields.ignored)


def params_of(
    body: PooledFields,
    pooling: PoolingParams,
    limits: ServingLimits,
    kept_tokens: int | None = None,
) -> SamplingParams:
    """Return the parameters of an input. Raises ApiError, 400.

    kept_tokens  instead of the body's `truncate_prompt_tokens`
    """
    try:
        params = SamplingParams(
            max_tokens=0,
            pooling=pooling,
            truncate_prompt_tokens=kept_tokens or body.truncate_prompt_tokens,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        )
        check_limits(params, limits.sampling)
    except RequestError as error:
        raise from_request_error(error) from None
    return params


def activation_of(normalize: bool | None, use_activation: bool | None) -> bool | None:
    """Return whether embeddings are normalized: vLLM has a new name for it. Raises ApiError, 400, for
    two values.
    """
    if normalize is None:
        return use_activation
    if use_activation not in (None, normalize):
        raise refuse(
            "use_activation",
            "use_activation and normalize are one choice for embeddings; give one of them",
        )
    return normalize


def input_rules(
    name: str, served: Served, most: int, specials: bool, kept_tokens: int | None
) -> PromptRules:
    """Return the rules of a field with inputs. kept_tokens: `truncate_prompt_tokens`"""
    check_length = None
    if kept_tokens is None:
        check_length = partial(check_input, max_model_len=served.max_model_len)
    return PromptRules(name, "inputs", most, specials, check_length)


def prompted(
    inputs: Sequence[TextOrIds], pooling: PoolingConfig, prompt_name: str | None
) -> list[TextOrIds]:
    """Return the inputs, each text behind the prompt of a name, or behind the model's default one.
    Raises ApiError, 400, for an unknown name, and for a name with token ids.
    """
    if prompt_name is not None and not all(isinstance(one, str) for one in inputs):
        raise refuse(
            "prompt_name", "prompt_name is given with token ids, which no text can come before"
        )
    try:
        return [
            named_prompt(pooling, one, prompt_name) if isinstance(one, str) else one
            for one in inputs
        ]
    except RequestError as error:
        raise refuse("prompt_name", f"prompt_name: {error}") from None


def works_of(
    inputs: Sequence[TextOrIds], name: str, params: SamplingParams, specials: bool | None = None
) -> tuple[Work, ...]:
    """Return the work for each of the inputs of a field. specials: as Work's `add_special_tokens`"""
    return tuple(
        Work(one, params, specials, prompt_from=f"{name}[{index}]" if len(inputs) > 1 else name)
        for index, one in enumerate(inputs)
    )
