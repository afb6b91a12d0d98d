"""Inputs of a model that pools: a text behind a prompt of the model's, and two texts as one input.

A pair is put as the model was trained to see it: in the chat template, where that has a place for
the roles `query` and `document` (as sentence-transformers' CrossEncoder and vLLM do); in
Qwen3-Reranker's published question, where the model is declared to answer it; else joined by the
tokenizer, which for BERT and its kind puts [SEP] between them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from freight.base.fields import JsonDict
from freight.errors import RequestError, listed, nearest, shown
from freight.text.messages import check_unicode
from freight.text.tokenizer import Tokenizer

# The prompt of Qwen3-Reranker's model card, as a chat template. What stands for a system message is
# the instruction.
_QUESTION = (
    "{%- set told = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list -%}"
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {{ told[0] if told else "
    "'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages | selectattr('role', 'equalto', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'equalto', 'document') | map(attribute='content') | first }}"
    # an expression, because Jinja leaves out a line end that a template ends with
    r"<|im_end|>{{ '\n<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)
_TURN = "<|im_start|>"
# Pairs that differ in one text each; they differ in their first character and in their length
_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))


class PoolingInputs(Protocol):
    """What a model declares about its inputs: `model.config.pooling.PoolingConfig`, which has the
    meaning of each.
    """

    @property
    def prompts(self) -> Mapping[str, str]: ...
    @property
    def default_prompt(self) -> str | None: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def yes_or_no(self) -> bool: ...
    @property
    def template_values(self) -> Mapping[str, Any]: ...
    @property
    def token_types(self) -> int: ...
    @property
    def source(self) -> str: ...


class PairTokens(NamedTuple):
    """The tokens of a pair.

    first_segment  how many of them are of the first text, as `PoolingParams.first_segment`; None:
                   the model does not tell them apart
    """

    token_ids: list[int]
    first_segment: int | None = None


def named_prompt(config: PoolingInputs, text: str, prompt_name: str | None = None) -> str:
    """Return `text` behind the model's prompt of this name; None: behind its default prompt, if it
    has one.

    Raises RequestError for a name that the model does not have.
    """
    return _prompt(config, prompt_name) + text


def _prompt(config: PoolingInputs, name: str | None) -> str:
    if name is None:
        name = config.default_prompt
        if name is None:
            return ""
    if name not in config.prompts:
        way_out = "this model has none; leave prompt_name out, and write the prompt before the text"
        if config.prompts:
            way_out = (
                f"this model has {listed(sorted(config.prompts))}{nearest(name, config.prompts)}"
            )
        raise RequestError(f"there is no prompt {shown(name)}: {way_out}")
    return config.prompts[name]


def pair_tokens(
    tokenizer: Tokenizer,
    config: PoolingInputs,
    query: str,
    document: str,
    instruction: str | None = None,
    most: int | None = None,
) -> PairTokens:
    """Return the tokens of a pair, put as the model was trained to see it.

    instruction  what makes a document a good one: the system message of the chat template, the
                 Instruct of Qwen3-Reranker's question, else a text before the query; None: the
                 model's default prompt
    most         tokens at most: the end of the document is left out where there are more; the rest
                 stays whole. None: any number

    Raises RequestError for a text that is not Unicode, a model whose chat template has no place for
    a pair, or whose pairs have token types, and a query that leaves no token to the document.
    """
    if instruction is None:
        instruction = _prompt(config, None)
    pair = _pair(tokenizer, config, query, document, instruction)
    if most is None or len(pair.token_ids) <= most:
        return pair
    ends = [end for _, _, end in tokenizer.encode_with_offsets(document, False)]
    count = len(ends)
    while len(pair.token_ids) > most and count > 0:
        # a text may have other tokens at its end once it is cut, so that more have to go
        count -= max(1, min(count, len(pair.token_ids) - most))
        pair = _pair(
            tokenizer, config, query, document[: ends[count - 1] if count else 0], instruction
        )
    if len(pair.token_ids) > most:
        raise RequestError(
            f"the query has {len(pair.token_ids):,} tokens with what is around it, and {most:,} are left for the pair; "
            "shorten the query, or raise max_model_len"
        )
    return pair


def _pair(
    tokenizer: Tokenizer, config: PoolingInputs, query: str, document: str, instruction: str
) -> PairTokens:
    values = json.dumps(config.template_values, sort_keys=True)
    if tokenizer.has_chat_template:
        as_parts = _content_form(tokenizer, values)
        if as_parts is not None:
            ids = _rendered(tokenizer, (query, document), instruction, values, as_parts)
            return PairTokens(ids)
    if config.yes_or_no:
        asked = _with_question(tokenizer)
        return PairTokens(_rendered(asked, (query, document), instruction, "{}", False))
    if config.token_ids and tokenizer.has_chat_template:
        raise RequestError(
            f"the score of this model is a logit after a prompt ({config.source}), and its chat template has no place "
            "for a query and a document; give a template that renders messages of the roles query and document "
            "(--chat-template FILE), or pass token ids"
        )
    return _joined(tokenizer, config, instruction + query, document)


def _joined(tokenizer: Tokenizer, config: PoolingInputs, first: str, second: str) -> PairTokens:
    """Join two texts as the tokenizer does. Raises RequestError for token types that are not those of
    BERT.
    """
    ids, types = tokenizer.encode_pair(first, second)
    if config.token_types < 2 or not any(types):
        return PairTokens(ids)
    begin = types.index(1) if 1 in types else 0
    if types != [0] * begin + [1] * (len(types) - begin) or begin == 0:
        raise RequestError(
            "tokenizer.json gives the texts of a pair other token types than 0 for the first and 1 for the second, "
            "which is not implemented; pass token ids"
        )
    return PairTokens(ids, begin)


def _rendered(
    tokenizer: Tokenizer, pair: tuple[str, str], instruction: str, values: str, as_parts: bool
) -> list[int]:
    """Render a pair with the chat template, and encode it.

    values    of the template, as JSON
    as_parts  whether contents are lists of text parts

    Raises RequestError for a pair that the template refuses.
    """
    contents = dict(zip(("query", "document"), pair, strict=True))
    if instruction:
        contents = {"system": instruction, **contents}
    messages: list[JsonDict] = []
    for role, text in contents.items():
        check_unicode(text)
        content = [{"type": "text", "text": text}] if as_parts else text
        messages.append({"role": role, "content": content})
    return tokenizer.encode_chat(tokenizer.render_as_given(messages, **json.loads(values)))


@lru_cache(maxsize=8)
def _content_form(tokenizer: Tokenizer, values: str) -> bool | None:
    """Return whether the chat template reads the two texts of a pair as parts; None where it leaves
    one out in either form, as a template does that knows the roles of a conversation alone.
    """
    for as_parts in (False, True):
        try:
            base, *others = (_rendered(tokenizer, pair, "", values, as_parts) for pair in _PROBES)
        except RequestError:
            continue
        if base not in others:
            return as_parts
    return None


@lru_cache(maxsize=8)
def _with_question(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with Qwen3-Reranker's question as its chat template. Raises RequestError
    for a tokenizer of another model.
    """
    if tokenizer.backend.token_to_id(_TURN) is None:
        raise RequestError(
            f"is_original_qwen3_reranker asks for a prompt with {_TURN}, which this tokenizer does not have; take it "
            "out of config.json, and give a chat template that renders the roles query and document"
        )
    return tokenizer.with_chat_template(_QUESTION)
