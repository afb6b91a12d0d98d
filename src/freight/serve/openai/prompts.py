"""Prompts of a body: text, token ids, or a list of either, each checked before it is tokenized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any

from freight.errors import RequestError
from freight.serve.call import Served
from freight.serve.limits import are_token_ids
from freight.serve.openai.fields import refuse

TextOrIds = str | list[int]


@dataclass(frozen=True)
class PromptRules:
    """What is allowed of the prompts of a field.

    name    of the field
    each    what errors call one of them
    most    prompts at most
    specials  whether the tokenizer adds special tokens, which an empty text needs
    check_length  raises ApiError for a number of token ids, at a path, that is too long; None: they
            are cut
    """

    name: str
    each: str
    most: int
    specials: bool
    check_length: Callable[[int, str], None] | None = None


def read_prompts(value: object, rules: PromptRules, served: Served) -> list[TextOrIds]:
    """Return the prompts of a field, each with at least one token: a text may be empty where the
    tokenizer adds BOS. Raises ApiError, 400, with the path of the first at fault.
    """
    name = rules.name
    if isinstance(value, str):
        return [check_text(name, value, rules.specials, served)]
    if not isinstance(value, list):
        raise refuse(
            name, f"{name} is {show(value)}; it must be a string, token ids, or a list of either"
        )
    if not value:
        raise refuse(name, f"{name} is []: it has no tokens")
    first = value[0]
    if not isinstance(first, str | list):
        return [_check_ids(name, value, rules, served)]
    check_count(rules, len(value))
    prompts: list[TextOrIds] = []
    for index, prompt in enumerate(value):
        where = f"{name}[{index}]"
        if isinstance(prompt, str) and isinstance(first, str):
            prompts.append(check_text(where, prompt, rules.specials, served))
        elif isinstance(prompt, list) and isinstance(first, list):
            prompts.append(_check_ids(where, prompt, rules, served))
        else:
            raise refuse(
                where,
                f"{where} is {show(prompt)}; all {rules.each} must be strings, or all lists of token ids",
            )
    return prompts


def check_count(rules: PromptRules, count: int) -> None:
    """Raise ApiError, 400, for more prompts than a field may have."""
    if count > rules.most:
        raise refuse(
            rules.name,
            f"{rules.name} has {count} {rules.each}; at most {rules.most} are allowed",
        )


def check_text(where: str, text: str, specials: bool, served: Served) -> str:
    """Return a text. Raises ApiError, 400, for an empty one that has no token."""
    if not text and served.tokenizer is not None:
        try:
            served.tokenizer.check_empty(specials)
        except RequestError as error:
            raise refuse(where, f"{where} is '': {error}") from None
    return text


def _check_ids(where: str, ids: list[Any], rules: PromptRules, served: Served) -> list[int]:
    vocab_size = served.vocab_size
    if not ids:
        raise refuse(where, f"{where} is []: it has no tokens")
    if rules.check_length is not None:
        # Checked first: validating a million ids takes time.
        rules.check_length(len(ids), where)
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
