"""What callers of LLM and AsyncLLM give: prompts, conversations and options, read and checked."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from freight.base.fields import JsonObject
from freight.base.other_engines.calls import CALLS
from freight.errors import ConfigError, GenerationError, RequestError, shown
from freight.outputs import RequestOutput
from freight.sampling import SamplingParams
from freight.text.tokenizer import Tokenizer, require_chat_template

Prompt = str | Sequence[int] | JsonObject
Message = JsonObject


@dataclass(frozen=True)
class Tokenization:
    """`tokenization_kwargs` of a call. None: not given."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    @classmethod
    def of(cls, options: JsonObject | None) -> Tokenization:
        """Raises ConfigError for other names, and for an `add_special_tokens` that is no bool."""
        known = ("add_special_tokens", "truncate_prompt_tokens")
        for name in options or ():
            if name not in known:
                raise ConfigError(
                    f"tokenization_kwargs has {shown(name)}; it may have {' and '.join(known)}"
                )
        made = cls(**(options or {}))
        if not isinstance(made.add_special_tokens, bool | None):
            raise ConfigError(
                f"add_special_tokens is {shown(made.add_special_tokens)}; it must be True or False"
            )
        return made

    def applied(self, params: SamplingParams) -> SamplingParams:
        most = self.truncate_prompt_tokens
        if most is None:
            return params
        return replace(params, truncate_prompt_tokens=most)


def text_or_ids(prompt: object) -> str | Sequence[int]:
    """Return the text or the token ids of a prompt in any form. Raises RequestError."""
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            return str(prompt["prompt"])
        if keys == {"prompt_token_ids"}:
            ids = _listed(prompt["prompt_token_ids"])
            if isinstance(ids, Sequence) and not isinstance(ids, str):
                return ids
            raise RequestError(f"prompt_token_ids is {shown(ids)}; it must be a list of token ids")
        raise RequestError(
            f'a prompt dict is {{"prompt": str}} or {{"prompt_token_ids": [int]}}; this has {sorted(map(str, keys))}'
        )
    prompt = _listed(prompt)
    if isinstance(prompt, Sequence):
        return prompt
    raise RequestError(
        f"a prompt is a string, a list of token ids or a dict, not {type(prompt).__name__}"
    )


def prompts_of(prompts: object) -> list[Any]:
    """Return a list of prompts for one or many. A list or array of integers is one prompt."""
    prompts = _listed(prompts)
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts are a string, token ids, a dict or a list of these, not {type(prompts).__name__}"
        )
    batch = list(prompts)
    if batch and all(isinstance(item, Integral) for item in batch):
        return [batch]
    return batch


def _listed(value: object) -> object:
    """An array or tensor as lists of Python numbers; anything else as it is."""
    to_list: Callable[[], object] = getattr(value, "tolist", lambda: value)
    return to_list()


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    for item in params if isinstance(params, list | tuple) else [params]:
        if not isinstance(item, SamplingParams):
            raise RequestError(
                f"sampling_params has a {type(item).__name__}; give a SamplingParams, or a list with one "
                "for each prompt"
            )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} SamplingParams for {count} prompts; give one, or one for each"
        )
    return list(params)


def chat_prompt(
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    add_special_tokens: bool,
    template_options: JsonObject,
) -> list[int]:
    """The token ids of a conversation. Raises ConfigError for an option that the model's chat
    template does not read, and for a model without one.
    """
    tokenizer = require_chat_template(tokenizer)
    read = {
        "continue_final_message",
        "add_generation_prompt",
        *re.findall(r"\w+", tokenizer.chat_template_source),
    }
    for name in template_options:
        if name not in read:
            raise unknown_option(name, "the model's chat template does not read it; omit it")
    return tokenizer.encode_chat(
        tokenizer.render_chat(messages, **template_options), add_special_tokens
    )


def unknown_option(option: str, otherwise: str) -> ConfigError:
    """Of an option that a call does not have: what to use instead if another engine has it, else
    `otherwise`.
    """
    return ConfigError(f"unknown option {option!r}: {CALLS.get(option, otherwise)}")


def check_on_error(on_error: str) -> None:
    """Raise ConfigError for another value than 'raise' and 'return'."""
    if on_error not in ("raise", "return"):
        raise ConfigError(f"on_error is {on_error!r}; it must be 'raise' or 'return'")


def raise_failed(outputs: Sequence[RequestOutput]) -> None:
    """Raise GenerationError if a completion of `outputs` failed."""
    failed: list[tuple[int, str]] = []
    for index, output in enumerate(outputs):
        for completion in output.outputs:
            if completion.error is not None:
                failed.append((index, completion.error))
    if not failed:
        return
    first, error = failed[0]
    which = "the prompt failed"
    if len(outputs) > 1:
        count = len({index for index, _ in failed})
        which = f"{count} of {len(outputs)} prompts failed; prompt {first}"
    raise GenerationError(f"{which}: {error}", outputs)


def pairs_of(
    first: str | Sequence[str], second: str | Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the texts of each pair: one first text is that of all. Raises RequestError."""
    firsts = [first] if isinstance(first, str) else list(first)
    seconds = [second] if isinstance(second, str) else list(second)
    for text in (*firsts, *seconds):
        if not isinstance(text, str):
            raise RequestError(f"{text!r:.60} is a {type(text).__name__}; a pair is of two texts")
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds) or not seconds:
        raise RequestError(
            f"there are {len(firsts)} first texts and {len(seconds)} second ones; give one first text for all, or one "
            "for each"
        )
    return firsts, seconds


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no length."""
    length = math.sqrt(_dot(first, first) * _dot(second, second))
    if length == 0:
        return 0.0
    return _dot(first, second) / length


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, first, second))


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Raise RequestError where there is none."""
    if tokenizer is None:
        raise RequestError(
            "texts need a tokenizer; without one (skip_tokenizer_init) pass token ids to classify"
        )
    return tokenizer
