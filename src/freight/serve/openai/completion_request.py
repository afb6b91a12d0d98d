"""`POST /v1/completions`: a body becomes a CompletionCall.

A prompt is text or token ids, or a list of either. The choices of prompt p have the indices p × n
to p × n + n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, SkipValidation

from freight.serve.bodies import MOST, Row, TokenId, field_row, sampled
from freight.serve.call import Reply, ReplyHead, Served, TokenizedWork, Work
from freight.serve.limits import ServingLimits, check_context
from freight.serve.openai.completion_reply import CompletionReply
from freight.serve.openai.fields import (
    named,
    part,
    read_fields,
    refuse,
    served_name,
)
from freight.serve.openai.prompts import PromptRules, read_prompts
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
    check_shared(request, served, limits)
    prompts = read_prompts(request.prompt, _rules(request, served, limits.prompts), served)
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


def _rules(request: CompletionRequest, served: Served, most: int) -> PromptRules:
    def check_length(count: int, where: str) -> None:
        if count > served.max_model_len:
            check_context(count, request.max_tokens, served.max_model_len, where)

    is_cut = request.truncate_prompt_tokens is not None
    return PromptRules(
        "prompt",
        "prompts",
        most,
        specials=request.add_special_tokens is not False,
        check_length=None if is_cut else check_length,
    )
