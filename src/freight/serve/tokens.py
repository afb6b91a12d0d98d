"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer over HTTP, as pure functions.

`/tokenize` takes two request formats: vLLM's ({"prompt"} or {"messages"} -> an object) and TGI's
({"inputs"} -> a list with offsets). With /tokenizer_info, clients such as lm-eval need no local
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import Field

from freight.base.fields import JsonDict, JsonObject
from freight.errors import RequestError
from freight.serve.bodies import Body, Unread, invalid, present, read_closed, says
from freight.serve.call import Conversation, Served
from freight.serve.limits import ServingLimits, are_token_ids, check_template_values
from freight.serve.transport.errors import ApiError
from freight.serve.transport.slices import json_bytes, json_in_slices
from freight.text.chat_text import ChatText
from freight.text.tokenizer import Tokenizer

B = TypeVar("B", bound=Body)
MOST_TOKENS = 1 << 20  # in one request to /detokenize
_ROWS = 1 << 10  # of an answer in TGI's format, in one part
_ANY_MODEL = ("", "dummy", "tgi")  # placeholders from clients that assume a single model


class PromptBody(Body):
    """The body of /tokenize in vLLM's format, with a text."""

    model: str | None = None
    add_special_tokens: bool | None = None
    prompt: str
    return_token_strs: bool | None = None


class MessagesBody(Body):
    """The body of /tokenize in vLLM's format, with a conversation. A template writes its own
    special tokens.
    """

    model: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[
        list[Any], Field(json_schema_extra={"items": {"type": "object"}, "minItems": 1})
    ]
    tools: list[Any] | None = None
    chat_template_kwargs: JsonDict | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class InputsBody(Body):
    """The body of /tokenize in TGI's format, which is the body of /generate."""

    unread = dict.fromkeys(("parameters", "stream"), Unread(None))

    add_special_tokens: bool | None = None
    inputs: str


TokenizeBody = PromptBody | MessagesBody | InputsBody
_KINDS: Mapping[str, type[TokenizeBody]] = {
    "prompt": PromptBody,
    "messages": MessagesBody,
    "inputs": InputsBody,
}


class DetokenizeBody(Body):
    """The body of /detokenize. `detokenize` checks the ids."""

    model: str | None = None
    tokens: Annotated[
        list[Any],
        Field(
            max_length=MOST_TOKENS, json_schema_extra={"items": {"type": "integer", "minimum": 0}}
        ),
        says(f"must be a list of at most {MOST_TOKENS} token ids"),
    ]


@dataclass(frozen=True)
class Tokenize:
    """A parsed request of /tokenize.

    prompt       the text, or the Conversation to render first
    with_texts   the answer also has the vocabulary's strings
    with_offsets the answer has TGI's format
    """

    prompt: str | Conversation
    add_special_tokens: bool
    with_texts: bool = False
    with_offsets: bool = False

    def answer(self, text: str | ChatText, served: Served) -> object:
        """Return the body of the answer. `text` is the prompt, or the rendered conversation. Raises
        ApiError.
        """
        tokenizer = _tokenizer_of(served)
        try:
            if self.with_offsets and isinstance(text, str):
                return list(self._rows(text, tokenizer))
            return self._counted(text, tokenizer, served.max_model_len)
        except RequestError as error:
            raise ApiError(400, str(error)) from None

    def parts(
        self, text: str | ChatText, tokenizer: Tokenizer, max_model_len: int
    ) -> Iterator[bytes]:
        """Yield `answer` as JSON, in parts, without making its rows first. Raises RequestError."""
        if not self.with_offsets or isinstance(text, ChatText):
            yield from json_in_slices(self._counted(text, tokenizer, max_model_len))
            return
        rows = self._rows(text, tokenizer)
        between = b"["
        while some := list(islice(rows, _ROWS)):
            yield between + json_bytes(some)[1:-1]
            between = b","
        yield b"]" if between == b"," else b"[]"

    def _rows(self, text: str, tokenizer: Tokenizer) -> Iterator[JsonDict]:
        tokens = tokenizer.encode_with_offsets(text, self.add_special_tokens)
        for token, start, stop in tokens:
            yield {"id": token, "text": text[start:stop], "start": start, "stop": stop}

    def _counted(self, text: str | ChatText, tokenizer: Tokenizer, max_model_len: int) -> JsonDict:
        tokens = tokenizer.encode(text, self.add_special_tokens)
        texts = None
        if self.with_texts:
            texts = [tokenizer.token_string(token, False) or "" for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }


def parse_tokenize(body: JsonObject, served: Served, limits: ServingLimits) -> Tokenize:
    """Parse a body of /tokenize. Raises ApiError (400, 404)."""
    _tokenizer_of(served)
    fields = present(body)
    kinds = [name for name in _KINDS if name in fields]
    if len(kinds) != 1:
        raise invalid("give one of prompt, messages and inputs", "prompt")
    messages = fields.get("messages")
    if isinstance(messages, list) and len(messages) > limits.messages:
        raise invalid(
            f"messages has {len(messages)} entries; at most {limits.messages} are allowed",
            "messages",
        )
    asked = _read(_KINDS[kinds[0]], fields, served)
    special = asked.add_special_tokens is not False
    if isinstance(asked, InputsBody):
        return Tokenize(asked.inputs, special, with_offsets=True)
    with_texts = bool(asked.return_token_strs)
    if isinstance(asked, PromptBody):
        return Tokenize(asked.prompt, special, with_texts)
    return Tokenize(_conversation(asked, limits), bool(asked.add_special_tokens), with_texts)


def _conversation(asked: MessagesBody, limits: ServingLimits) -> Conversation:
    values = asked.chat_template_kwargs or {}
    check_template_values(values, limits)
    if asked.tools:
        values = {**values, "tools": asked.tools}
    continues = bool(asked.continue_final_message)
    prompted = asked.add_generation_prompt
    if prompted is None:
        prompted = not continues
    return Conversation(
        asked.messages,
        add_generation_prompt=prompted,
        continue_final_message=continues,
        template_values=values,
    )


def detokenize(body: JsonObject, served: Served) -> dict[str, str]:
    """Return the answer of /detokenize: the text of token ids, special tokens included. Raises
    ApiError (400, 404).
    """
    tokenizer = _tokenizer_of(served)
    tokens = _read(DetokenizeBody, body, served).tokens
    is_known = are_token_ids(tokens, served.vocab_size)
    for position, token in enumerate(() if is_known else tokens):
        if (
            not isinstance(token, int)
            or isinstance(token, bool)
            or not 0 <= token < served.vocab_size
        ):
            raise invalid(
                f"tokens[{position}] must be a token id, 0 to {served.vocab_size - 1}", "tokens"
            )
    return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}


def tokenizer_info(served: Served) -> dict[str, str | None]:
    """Return the answer of /tokenizer_info. Raises ApiError (400) without a tokenizer."""
    tokenizer = _tokenizer_of(served)
    named = tokenizer.special_tokens
    return {
        "tokenizer_class": "freight",
        "bos_token": named.get("bos_token"),
        "eos_token": named.get("eos_token"),
        "pad_token": named.get("pad_token"),
        "chat_template": tokenizer.chat_template,
    }


def _tokenizer_of(served: Served) -> Tokenizer:
    if served.tokenizer is None:
        raise ApiError(
            400, "this server has no tokenizer: it was started with --skip-tokenizer-init"
        )
    return served.tokenizer


def _read(model: type[B], body: JsonObject, served: Served) -> B:
    """Validate `body` as `model`. Raises ApiError for a model that is not served, and for unknown
    fields unless the server ignores them.
    """
    fields = present(body)
    name = fields.get("model", "")
    is_served = isinstance(name, str) and (
        name in (*_ANY_MODEL, *served.names) or served.has_adapter(name)
    )
    if not is_served:
        raise ApiError(
            404,
            f"the model {name!r:.60} is not served here; {served.offered}",
            param="model",
            code="model_not_found",
        )
    return read_closed(model, body, served.unknown_fields)
