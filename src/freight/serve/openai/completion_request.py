"""`POST /v1/completions`: a body becomes a CompletionCall.

A prompt is text or token ids, or a list of either. The choices of prompt p have the indices p × n
to p × n + n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from freight.errors import RequestError
from freight.serve.bodies import MOST, Row, TokenId, field_row, sampled
from freight.serve.call import Reply, ReplyHead, Served, TokenizedWork, Work
from freight.serve.limits import ServingLimits, are_token_ids, check_context
from freight.serve.openai.completion_reply import CompletionReply
from freight.serve.openai.fields import (
    named,
    part,
    read_fields,
    refuse,
    served_name,
)
from freight.serve.openai.sampling_fields import SharedFields, check_shared, sampling_from
from freight.serve.openai.stream import AnswerOptions
from freight.serve.openai.structure import form_of
from freight.serve.transport.errors import ApiError

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MOST.prompts)]
_PROMPT = Row(note="(text, token ids, or a list of either)")
_Lists = Annotated[list[_Ids], Field(min_length=1, max_length=MOST.prompts)]


class CompletionRequest(SharedFields):
    """The body of a completion."""

    prompt: SkipValidation[Annotated[str | _Ids | _Texts | _Lists, _PROMPT]]
    max_tokens: int | None = sampled("max_tokens")
    logprobs: int | None = sampled("logprobs")
    echo: bool | None = field_row(description="The text begins with the prompt.")


@dataclass(frozen=True)
class CompletionCall:
    """A parsed completion. `request_id`: the client's, if it sent one."""

    stream: bool
    model: str
    work: tuple[Work, ...]
    ignored: tuple[str, ...]
    options: AnswerOptions
    echo: bool
    max_tokens: int | None
    request_id: str | None = None

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Reply:
        """Return the empty reply. Raises ApiError if a prompt and max_tokens exceed the context."""
        for item in work:
            check_context(len(item.token_ids), self.max_tokens, served.max_model_len, "prompt")
        return CompletionReply(head, served, work, self.options, self.echo)

    def failure_body(self, error: ApiError) -> object:
        return error.openai_body()


def parse_completion(body: object, served: Served, limits: ServingLimits) -> CompletionCall:
    """Build the call from `body`, decoded JSON.

    Raises ApiError: 400 with `param` for the first field at fault, 404 for a model that is not
    served.
    """
    fields = read_fields(body, CompletionRequest, served, limits)
    request = part(CompletionRequest, "", fields.values)
    model = served_name(request.model, served)
    check_shared(request, limits)
    prompts = _prompts(request, served, limits.prompts)
    echo = bool(request.echo)
    if request.max_tokens == 0 and not echo:
        raise refuse(
            "max_tokens", "max_tokens is 0, which needs echo: true; else ask for 1 or more"
        )
    scored = request.logprobs if echo else None
    if request.max_tokens == 0 and scored is None:
        scored = 0  # the engine accepts max_tokens 0 only for a request that scores its prompt
    api_values: dict[str, object] = {}
    if scored is not None:
        api_values["prompt_logprobs"] = max(scored, request.prompt_logprobs or 0)
    if request.max_tokens is None and "max_tokens" not in served.defaults:
        api_values["max_tokens"] = DEFAULT_MAX_TOKENS
    form = form_of(request, served.strict_schemas)
    params = sampling_from(request, served, limits, api_values, form)
    return CompletionCall(
        stream=bool(request.stream),
        model=model,
        work=tuple(
            Work(prompt, params, request.add_special_tokens, form_from=form.field)
            for prompt in prompts
        ),
        ignored=(*fields.ignored, *named(form.ignored)),
        options=request.answer_options(),
        echo=echo,
        max_tokens=request.max_tokens,
        request_id=request.request_id,
    )


def _prompts(request: CompletionRequest, served: Served, most: int) -> list[str | list[int]]:
    """Return the prompts of `request`, each with at least one token: a text may be empty where the
    tokenizer adds BOS.
    """
    value = request.prompt
    if isinstance(value, str):
        return [_text("prompt", value, served, request)]
    if not isinstance(value, list):
        raise refuse(
            "prompt",
            f"prompt is {show(value)}; it must be a string, token ids, or a list of either",
        )
    if not value:
        raise refuse("prompt", "prompt is []: it has no tokens")
    first = value[0]
    if not isinstance(first, str | list):
        return [_ids("prompt", value, served, request)]
    if len(value) > most:
        raise refuse("prompt", f"prompt has {len(value)} prompts; at most {most} are allowed")
    prompts: list[str | list[int]] = []
    for index, prompt in enumerate(value):
        where = f"prompt[{index}]"
        if isinstance(prompt, str) and isinstance(first, str):
            prompts.append(_text(where, prompt, served, request))
        elif isinstance(prompt, list) and isinstance(first, list):
            prompts.append(_ids(where, prompt, served, request))
        else:
            raise refuse(
                where,
                f"{where} is {show(prompt)}; all prompts must be strings, or all lists of token ids",
            )
    return prompts


def _text(where: str, text: str, served: Served, request: CompletionRequest) -> str:
    if not text and served.tokenizer is not None:
        try:
            served.tokenizer.check_empty(request.add_special_tokens is not False)
        except RequestError as error:
            raise refuse(where, f"{where} is '': {error}") from None
    return text


def _ids(where: str, ids: list[Any], served: Served, request: CompletionRequest) -> list[int]:
    vocab_size = served.vocab_size
    if not ids:
        raise refuse(where, f"{where} is []: it has no tokens")
    if len(ids) > served.max_model_len and request.truncate_prompt_tokens is None:
        # Checked first: validating a million ids takes time.
        check_context(len(ids), request.max_tokens, served.max_model_len, where)
    if are_token_ids(ids, vocab_size):
        return ids
    for position, token in enumerate(ids):  # slower: finds the bad one
        if type(token) is not int or not 0 <= token < vocab_size:
            path = f"{where}[{position}]"
            raise refuse(
                path,
                f"{path} is {show(token)}; token ids are whole numbers from 0 to {vocab_size - 1}",
            )
    return ids
