"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer over HTTP, as pure functions.

`/tokenize` speaks two languages: vLLM's ({"prompt"} or {"messages"} -> an object) and TGI's
({"inputs"} -> a list with offsets). With /tokenizer_info, clients such as lm-eval need no tokenizer
of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freight.errors import RequestError, nearest
from freight.server.call import Conversation, Served
from freight.server.limits import ServingLimits, check_template_values
from freight.server.transport.errors import ApiError
from freight.text.chat_text import ChatText
from freight.text.tokenizer import Tokenizer

MOST_TOKENS = 1 << 20  # in one /detokenize
_ANY_MODEL = ("", "dummy", "tgi")  # names that clients send where there is one model
_PROMPT = ("model", "prompt", "add_special_tokens", "return_token_strs")
_MESSAGES = (
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "return_token_strs",
    "tools",
    "chat_template_kwargs",
)
_INPUTS = (
    "inputs",
    "add_special_tokens",
    "parameters",
    "stream",
)  # TGI takes /generate's body here
_DETOKENIZE = ("model", "tokens")


@dataclass(frozen=True)
class Tokenize:
    """A request for tokens, understood.

    prompt       to be tokenized; a Conversation is to be rendered first
    with_texts   the answer has the vocabulary's strings too
    with_offsets the answer is TGI's
    """

    prompt: str | Conversation
    add_special_tokens: bool
    with_texts: bool = False
    with_offsets: bool = False

    def answer(self, text: str | ChatText, served: Served) -> object:
        """The body of the answer. `text` is the prompt, or what the conversation was rendered to.
        Raises ApiError.
        """
        tokenizer = _tokenizer_of(served)
        try:
            if isinstance(text, ChatText):
                tokens = tokenizer.encode_chat(text, self.add_special_tokens)
            elif self.with_offsets:
                return [
                    {"id": token, "text": text[start:stop], "start": start, "stop": stop}
                    for token, start, stop in tokenizer.encode_with_offsets(
                        text, self.add_special_tokens
                    )
                ]
            else:
                tokens = tokenizer.encode(text, self.add_special_tokens)
        except RequestError as error:
            raise ApiError(400, str(error)) from None
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": served.max_model_len,
            "tokens": tokens,
        }
        answer["token_strs"] = (
            [tokenizer.token_string(token, False) or "" for token in tokens]
            if self.with_texts
            else None
        )
        return answer


def parse_tokenize(body: Mapping[str, Any], served: Served, limits: ServingLimits) -> Tokenize:
    """What a body of /tokenize asks for. Raises ApiError (400, 404) for what cannot be served."""
    _tokenizer_of(served)
    given = {name: value for name, value in body.items() if value is not None}
    kinds = [name for name in ("prompt", "messages", "inputs") if name in given]
    if len(kinds) != 1:
        raise _invalid("give one of prompt, messages and inputs", "prompt")
    (kind,) = kinds
    known = {"prompt": _PROMPT, "messages": _MESSAGES, "inputs": _INPUTS}[kind]
    _check(given, known, served)
    special = _flag(given, "add_special_tokens", kind != "messages")  # a template writes its own
    if kind == "messages":
        return Tokenize(
            _conversation(given, limits), special, _flag(given, "return_token_strs", False)
        )
    text = given[kind]
    if not isinstance(text, str):
        raise _invalid(f"{kind} must be a string", kind)
    return Tokenize(
        text, special, _flag(given, "return_token_strs", False), with_offsets=kind == "inputs"
    )


def _conversation(given: Mapping[str, Any], limits: ServingLimits) -> Conversation:
    messages, tools = given["messages"], given.get("tools")
    values = given.get("chat_template_kwargs", {})
    if not isinstance(messages, list):
        raise _invalid("messages must be a list", "messages")
    if tools is not None and not isinstance(tools, list):
        raise _invalid("tools must be a list", "tools")
    if not isinstance(values, Mapping):
        raise _invalid("chat_template_kwargs must be an object", "chat_template_kwargs")
    check_template_values(values, limits)
    continues = _flag(given, "continue_final_message", False)
    return Conversation(
        messages,
        add_generation_prompt=_flag(given, "add_generation_prompt", not continues),
        continue_final_message=continues,
        template_values={**values, **({"tools": tools} if tools else {})},
    )


def detokenize(body: Mapping[str, Any], served: Served) -> dict[str, str]:
    """The answer of /detokenize: the text of token ids, special tokens included. Raises ApiError
    (400, 404).
    """
    tokenizer = _tokenizer_of(served)
    given = {name: value for name, value in body.items() if value is not None}
    _check(given, _DETOKENIZE, served)
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or len(tokens) > MOST_TOKENS:
        raise _invalid(f"tokens must be a list of at most {MOST_TOKENS} token ids", "tokens")
    for position, token in enumerate(tokens):
        if (
            not isinstance(token, int)
            or isinstance(token, bool)
            or not 0 <= token < served.vocab_size
        ):
            raise _invalid(
                f"tokens[{position}] must be a token id, 0 to {served.vocab_size - 1}", "tokens"
            )
    return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}


def tokenizer_info(served: Served) -> dict[str, str | None]:
    """The answer of /tokenizer_info. Raises ApiError (400) without a tokenizer."""
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
        raise ApiError(400, "this server has no tokenizer: it was started with skip_tokenizer_init")
    return served.tokenizer


def _check(given: Mapping[str, Any], known: tuple[str, ...], served: Served) -> None:
    """Raises ApiError for a model that is not served, and for unknown fields unless the server
    ignores them.
    """
    model = given.get("model", "")
    if not isinstance(model, str) or model not in (*_ANY_MODEL, *served.names):
        raise ApiError(
            404,
            f"the model {model!r:.60} is not served here; this server has {served.names[0]}",
            param="model",
            code="model_not_found",
        )
    for name in given:
        if name not in known and served.unknown_fields != "ignore":
            raise _invalid(f"{name:.60} is not a field here{nearest(name[:60], known)}", name[:60])


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise _invalid(f"{name} must be true or false", name)
    return value


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param)
