"""ServingLimits: the most that one request may ask of the server, in any API. Values and checks.

Each number bounds time or memory that a single request could otherwise take from all others.
`SamplingLimits` bounds what a request asks of the sampler; the validator of `freight.sampling`
checks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freight.errors import RequestError
from freight.sampling import SamplingLimits
from freight.serve.call import TokenizedWork
from freight.serve.transport.errors import ApiError
from freight.text.messages import check_unicode

TEMPLATE_VALUES = frozenset(  # what published chat templates read besides messages and tools
    {
        "add_vision_id",
        "builtin_tools",
        "clear_thinking",
        "controls",
        "custom_instructions",
        "date_string",
        "documents",
        "enable_thinking",
        "force_reasoning",
        "model_identity",
        "preserve_thinking",
        "reasoning_effort",
        "system_message",
        "thinking",
        "thinking_budget",
        "thinking_mode",
        "today_date",
        "tools_in_user_message",
    }
)


_SAMPLING = SamplingLimits(n=16, temperature=2.0, allowed_token_ids=2**16)

_PIECE = 1 << 12  # values that are looked at in one call
_WITH_CONTENT = frozenset({str, list, dict})  # the JSON types that a check can refuse


@dataclass(frozen=True)
class ServingLimits:
    """The most that one request may ask for.

    sampling         limits on the sampling parameters, for `check_limits`
    prompts          prompts of one completions request
    inputs           inputs of one request for embeddings or classes; documents of a ranking
    scores           log-probabilities of its prompts: tokens x (prompt_logprobs + 1)
    messages         messages of one conversation
    tools            tools that a conversation may offer
    nesting          nesting depth of JSON objects and arrays
    request_id       characters of a request id from a client
    template_values  names allowed in `chat_template_kwargs`
    """

    sampling: SamplingLimits = _SAMPLING
    prompts: int = 64
    inputs: int = 2048  # OpenAI's
    scores: int = 2_000_000
    messages: int = 4096
    tools: int = 128
    nesting: int = 96
    request_id: int = 128
    template_values: frozenset[str] = TEMPLATE_VALUES


def check_body(body: object, limits: ServingLimits) -> Mapping[str, object]:
    """Return `body` if it is an object of valid Unicode that is not nested too deeply.

    Raises ApiError, 400. Walks without recursion, so that no depth can exhaust the stack.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {_kind(body)}; it must be an object")
    # The lengths are checked first: walking long lists takes time.
    for name, most in (("messages", limits.messages), ("tools", limits.tools)):
        if isinstance(body.get(name), list) and len(body[name]) > most:
            raise ApiError(
                400, f"{name} has {len(body[name])} entries; at most {most} are allowed", param=name
            )
    for name, value in body.items():
        _check_value(name, value, limits.nesting)
    return body


def check_template_values(values: Mapping[str, object], limits: ServingLimits) -> None:
    """Raise ApiError, 400, for a name in `chat_template_kwargs` that a request may not set."""
    for name in values:
        if name not in limits.template_values:
            path = f"chat_template_kwargs.{name[:60]}"
            allowed = ", ".join(sorted(limits.template_values))
            raise ApiError(400, f"{path} is not allowed; a request may set {allowed}", param=path)


def _check_value(name: str, value: object, deepest: int) -> None:
    param = name if name.isascii() else None
    level: list[object] = [name, value]
    depth = 0  # objects and arrays around what is in `level`
    while level:
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii():
                    _check_text(item, param)
                continue
            if depth == deepest and isinstance(item, dict | list):
                raise ApiError(
                    400, f"{name:.60} is nested more than {deepest} levels deep", param=param
                )
            if isinstance(item, dict):
                below += item
            if isinstance(item, dict | list):
                values = list(item.values()) if isinstance(item, dict) else item
                below += _with_content(values)
        level = below
        depth += 1


def _with_content(values: list[object]) -> Iterator[object]:
    """Yield the values that a check can refuse. In pieces: a prompt may be a million numbers, and one
    call over all of them would hold up every other thread.
    """
    for begin in range(0, len(values), _PIECE):
        piece = values[begin : begin + _PIECE]
        if not _WITH_CONTENT.isdisjoint(map(type, piece)):
            yield from (value for value in piece if type(value) in _WITH_CONTENT)


def are_token_ids(values: list[Any], vocab_size: int) -> bool:
    """Return whether all values are integers from 0 to vocab_size - 1. In pieces, likewise."""
    for begin in range(0, len(values), _PIECE):
        piece = values[begin : begin + _PIECE]
        if set(map(type, piece)) != {int} or min(piece) < 0 or max(piece) >= vocab_size:
            return False
    return True


def _check_text(text: str, param: str | None) -> None:
    try:
        check_unicode(text)
    except RequestError as error:
        raise ApiError(400, f"{param or 'the name of a field'}: {error}", param=param) from error


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), type(value).__name__)


def num_scores(work: TokenizedWork) -> int:
    """Return the number of prompt log-probabilities in the answer to `work`."""
    asked = work.params.prompt_logprobs
    return 0 if asked is None else len(work.token_ids) * (asked + 1)


def num_pooled(work: Sequence[TokenizedWork], size: int) -> int:
    """Return the number of values in the vectors that are asked for. size: of a whole one"""
    asked = (item.params.pooling for item in work)
    return sum(pooling.dimensions or size for pooling in asked if pooling is not None)


def check_scores(work: Sequence[TokenizedWork], limits: ServingLimits) -> None:
    """Raise ApiError, 400, if the prompts ask for more log-probabilities than one answer has."""
    total = sum(map(num_scores, work))
    if total <= limits.scores:
        return
    scored = [item for item in work if item.params.prompt_logprobs is not None]
    tokens = sum(len(item.token_ids) for item in scored)
    asked = scored[0].params.prompt_logprobs
    raise ApiError(
        400,
        f"{len(scored)} prompts with {tokens} tokens together and {asked} log-probabilities for each are {total} "
        f"values; one answer has at most {limits.scores}. Send fewer prompts at once, or ask for fewer of them",
        param="prompt",
        code="too_many_logprobs",
    )


# OpenAI's wording, by which clients such as litellm recognize this error
CONTEXT_IS = "this model's maximum context length is"


def check_context(
    num_prompt: int, max_tokens: int | None, max_model_len: int, param: str | None = None
) -> None:
    """Raise ApiError (400, context_length_exceeded) if prompt and answer do not fit the context.

    max_tokens: the client's value; None if it sent none, and then one token has to fit.
    """
    if num_prompt + (1 if max_tokens is None else max_tokens) <= max_model_len:
        return
    # The message does not name max_tokens: the APIs have different names for it.
    asked = (
        "and leaves no room for an answer"
        if max_tokens is None
        else f"and {max_tokens} are asked for"
    )
    raise ApiError(
        400,
        f"{CONTEXT_IS} {max_model_len} tokens, for prompt and answer together; the prompt has {num_prompt} tokens "
        f"{asked}. Shorten the prompt or ask for fewer tokens",
        param=param,
        code="context_length_exceeded",
    )


def check_input(count: int, param: str, max_model_len: int) -> None:
    """Raise ApiError (400, context_length_exceeded) if an input that is pooled is too long."""
    if count > max_model_len:
        raise ApiError(
            400,
            f"{CONTEXT_IS} {max_model_len} tokens, and {param} has {count}. Shorten it, or set "
            "truncate_prompt_tokens to -1, which leaves its beginning",
            param=param,
            code="context_length_exceeded",
        )
