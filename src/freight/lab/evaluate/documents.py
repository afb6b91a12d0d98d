"""What is scored: documents of a text file or of a JSONL file, as windows of tokens.

A `.jsonl` file has one document a line, an object whose `text` (or another field, if named) is
scored; any other file is one document. Every document is cut into windows separately. A document
that follows a prompt is one window instead, of which only the text's tokens are scored. Bad files
are refused with the line that is at fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from freight.base.fields import JsonObject
from freight.base.files import DATA_LIMIT, read_text, reading, unique_names
from freight.errors import ConfigError, RequestError, shown
from freight.lab.columns import plural
from freight.lab.evaluate.perplexity import Window, cut_windows
from freight.model.open import OpenModel
from freight.text.tokenizer import Tokenizer

Document = str | Sequence[int]
Prompt = str | Sequence[JsonObject]  # a raw text, or messages for the model's chat template


@dataclass(frozen=True)
class PromptedText:
    """A text that is scored as the answer to `prompt`; `where` names both in errors."""

    prompt: Prompt
    text: str
    where: str


@dataclass(frozen=True)
class Part:
    """A window, and the number of the document that it is from."""

    window: Window
    document: int


def read_documents(path: Path, field: str = "text") -> list[str]:
    """Return the documents of `path`. Raises ConfigError for what is no text, and for a line
    without `field`.
    """
    with reading(f"--data {path}"):
        text = read_text(path, "utf-8-sig", DATA_LIMIT)
    if path.suffix != ".jsonl":
        documents = [text]
    else:
        documents = [_text_of(where, entry, field) for where, entry in _entries(path, text)]
    if not any(documents):
        raise ConfigError(f"--data {path} is empty; give a text that the model was not trained on")
    return documents


def read_prompted(path: Path, field: str, prompt_field: str) -> list[PromptedText]:
    """Return the texts of a JSONL file with their prompts. Raises ConfigError for another file, and
    for a line without one of both fields.
    """
    if path.suffix != ".jsonl":
        raise ConfigError(
            f"--prompt-field {prompt_field}, but --data {path} is no .jsonl file, and only its lines have fields: "
            "give one with a prompt and a text a line"
        )
    with reading(f"--data {path}"):
        text = read_text(path, "utf-8-sig", DATA_LIMIT)
    documents = []
    for where, entry in _entries(path, text):
        answer = _text_of(where, entry, field)
        assert isinstance(entry, dict), "what has a text is an object"
        prompt = entry.get(prompt_field)
        if not isinstance(prompt, str | list):
            has = _names(entry)
            if prompt_field in entry:
                has = f"{prompt_field}: {type(prompt).__name__}"
            raise ConfigError(
                f"{where} has {has}; each line has a text or a list of chat messages as {prompt_field!r}; "
                "--prompt-field names another"
            )
        documents.append(PromptedText(prompt, answer, where))
    if not documents:
        raise ConfigError(f"--data {path} is empty; give prompts with a text for each")
    return documents


def _entries(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """Yield what each line of a JSONL file has, behind where it stands."""
    # splitlines() also splits inside of JSON strings: U+2028
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"--data {path}, line {number}"
        try:
            entry = json.loads(line, object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        yield where, entry


def _text_of(where: str, entry: object, field: str) -> str:
    text = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        has = f"has {_names(entry)}" if isinstance(entry, dict) else f"is {type(entry).__name__}"
        raise ConfigError(
            f"{where} {has}; each line is an object with a text as {field!r}; --field names another"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {field!r} is not Unicode: {error.reason} at character {error.start}"
        ) from None
    return text


def _names(entry: JsonObject) -> str:
    return shown(", ".join(sorted(entry)))


def cut_documents(
    opened: OpenModel, documents: Sequence[Document], length: int, max_tokens: int | None = None
) -> list[Part]:
    """Windows of at most `length` tokens, by document. Raises ConfigError for fewer than two tokens
    in all.

    Documents that are too short to be scored are left out; of all together the first `max_tokens`
    tokens count.
    """
    tokenizer = None
    bos = opened.model.bos_token_id
    if any(isinstance(document, str) for document in documents):
        tokenizer = _tokenizer(opened)
        bos = tokenizer.bos_token_id
        if tokenizer.encode("a")[:1] != [bos]:
            bos = None
    parts: list[Part] = []
    total = 0
    left = max_tokens
    for number, document in enumerate(documents):
        if isinstance(document, str):
            assert tokenizer is not None
            document = tokenizer.encode(document, add_special_tokens=False)
        total += len(document)
        ids = document[:left]
        if left is not None:
            left -= len(ids)
        if len(ids) > 1:
            parts += [Part(window, number) for window in cut_windows(ids, length, bos)]
    if not parts and total > 1 and len(documents) > 1:
        within = ""
        if max_tokens is not None:
            within = f" within the first {max_tokens} tokens of them all (--max-tokens)"
        raise ConfigError(
            f"none of the {len(documents):,} documents has 2 tokens{within}, and perplexity needs 2 of one document"
        )
    if not parts:
        raise ConfigError(f"the text has {plural(total, 'token')}; perplexity needs at least 2")
    return parts


def cut_prompted(
    opened: OpenModel,
    documents: Sequence[PromptedText],
    window: int | None,
    max_model_len: int,
    max_tokens: int | None = None,
) -> list[Part]:
    """Make one window of each document: prompt and text, of which the text is scored.

    Prompt and text are tokenized apart. A raw prompt gets the special tokens that a request's prompt
    gets; messages go through the chat template, with the prompt for an answer. Only the first
    `max_tokens` tokens of all texts together are scored. Raises ConfigError, with the line, for a
    prompt or a text without a token, for messages that the template refuses, and for more tokens
    than `window`, or the context where it is None.
    """
    tokenizer = _tokenizer(opened)
    limit = window_length(window or max_model_len, max_model_len)
    parts: list[Part] = []
    left = max_tokens
    for number, document in enumerate(documents):
        if left == 0:
            break
        prompt, text = _encode(tokenizer, document)
        if len(prompt) + len(text) > limit:
            most = f"--window {limit}"
            way_out = "raise it, or leave the line out"
            if window is None:
                most = f"the {limit:,} tokens of this model's context"
                way_out = "leave the line out"
            raise ConfigError(
                f"{document.where}: a prompt of {len(prompt):,} and a text of {len(text):,} tokens are more than "
                f"{most}; {way_out}"
            )
        scored = text[:left]
        if left is not None:
            left -= len(scored)
        ids = [*prompt, *scored]
        parts.append(Part(Window(ids[:-1], ids[1:], len(prompt) - 1), number))
    return parts


def _tokenizer(opened: OpenModel) -> Tokenizer:
    tokenizer = opened.load_tokenizer()
    if tokenizer is None:
        raise ConfigError("a text needs a tokenizer; with skip_tokenizer_init pass token ids")
    return tokenizer


def _encode(tokenizer: Tokenizer, document: PromptedText) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt and of the text, each at least one."""
    try:
        if isinstance(document.prompt, str):
            prompt = tokenizer.encode(document.prompt)
        elif tokenizer.has_chat_template:
            prompt = tokenizer.apply_chat_template(document.prompt)
        else:
            raise ConfigError(
                "the prompt is a list of chat messages, and this model has no chat template; give the prompt as a text"
            )
        text = tokenizer.encode(document.text, add_special_tokens=False)
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{document.where}: {error}") from error
    for name, ids in (("prompt", prompt), ("text", text)):
        if not ids:
            raise ConfigError(
                f"{document.where}: the {name} has no token; give it at least one character, or leave the line out"
            )
    return prompt, text


def window_length(window: int | None, max_model_len: int) -> int:
    """Return tokens scored together: `window`, or the context, at most 1024. Raises ConfigError for
    more than the context.
    """
    if window is not None and window > max_model_len:
        raise ConfigError(
            f"--window {window} is more than the {max_model_len} tokens of this model's context; use at most that"
        )
    return window or min(1024, max_model_len)
