"""Inputs of `/v1/embeddings`, `/classify` and `/pooling`: texts, token ids, or a conversation."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field, SkipValidation

from freight.base.fields import JsonDict, JsonObject
from freight.pooling import PoolingParams
from freight.serve.bodies import MOST, Row, TokenId, field_row
from freight.serve.call import Conversation, Served, Work
from freight.serve.limits import ServingLimits, check_template_values
from freight.serve.openai.chat_request import (
    Message,
    chat_messages,
    check_continued,
    check_messages,
)
from freight.serve.openai.fields import named
from freight.serve.openai.prompts import read_prompts
from freight.serve.pooling.call import PooledCall, Shape
from freight.serve.pooling.fields import (
    PooledFields,
    input_rules,
    params_of,
    prompted,
    read_asked,
    works_of,
)

_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MOST.inputs)]
_Lists = Annotated[list[_Ids], Field(min_length=1, max_length=MOST.inputs)]
_INPUT = Row(note="(text, token ids, or a list of either)")
Inputs = SkipValidation[Annotated[str | _Ids | _Texts | _Lists, _INPUT]]


class RequestFields(PooledFields):
    """Fields of a request that say what is asked of each input."""

    add_special_tokens: bool | None = None

    def pooling(self) -> PoolingParams:
        """Return what is asked of each input. Raises ApiError, 400."""
        raise NotImplementedError

    def shape(self, served: Served) -> Shape:
        """Return the shape of the answer."""
        raise NotImplementedError


class InputFields(RequestFields):
    """A body with inputs."""

    input: Inputs
    prompt_name: str | None = field_row(
        note="(a prompt of sentence-transformers, before each text)"
    )


class ConversationFields(RequestFields):
    """A body with a conversation that is one input, as vLLM has it. Without `add_generation_prompt`
    it ends with its last message.
    """

    messages: Annotated[list[Message], FailFast()] = Field(
        json_schema_extra={"minItems": 1, "maxItems": MOST.messages}
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonDict | None = None


def parse_inputs(
    body: JsonObject,
    with_inputs: type[InputFields],
    with_messages: type[ConversationFields],
    served: Served,
    limits: ServingLimits,
) -> PooledCall:
    """Build the call of a body of either kind. Raises ApiError, 400 or 404."""
    if body.get("messages") is not None:
        return _of_messages(body, with_messages, served, limits)
    asked = read_asked(body, with_inputs, served, limits)
    request = asked.body
    params = params_of(request, request.pooling(), limits)
    specials = request.add_special_tokens is not False
    rules = input_rules("input", served, limits.inputs, specials, params.truncate_prompt_tokens)
    inputs = read_prompts(request.input, rules, served)
    assert served.pooling is not None
    return PooledCall(
        asked.model,
        works_of(prompted(inputs, served.pooling, request.prompt_name), "input", params, specials),
        asked.ignored,
        request.shape(served),
        request_id=request.request_id,
    )


def _of_messages(
    body: JsonObject,
    with_messages: type[ConversationFields],
    served: Served,
    limits: ServingLimits,
) -> PooledCall:
    check_messages(body["messages"], limits)
    asked = read_asked(body, with_messages, served, limits)
    request = asked.body
    params = params_of(request, request.pooling(), limits)
    conversation, ignored = _conversation(request, body, limits)
    return PooledCall(
        asked.model,
        (Work(conversation, params, request.add_special_tokens, prompt_from="messages"),),
        (*asked.ignored, *ignored),
        request.shape(served),
        request_id=request.request_id,
    )


def _conversation(
    request: ConversationFields, body: JsonObject, limits: ServingLimits
) -> tuple[Conversation, tuple[str, ...]]:
    """Return the conversation, and the names of fields that are left out."""
    messages, ignored = chat_messages(body["messages"])
    values = request.chat_template_kwargs or {}
    check_template_values(values, limits)
    begins = bool(request.add_generation_prompt)
    continues = bool(request.continue_final_message)
    check_continued(continues, begins, messages)
    return Conversation(messages, begins, continues, values), named(ignored)
