"""What is scored: documents of a text file or of a JSONL file, as windows of tokens.

A `.jsonl` file has one document a line, an object whose `text` (or another field, if named) is
scored; any other file is one document. Every document is cut into windows separately. Bad files are
refused with the line that is at fault.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freight.base.files import DATA_LIMIT, read_text, reading, unique_names
from freight.errors import ConfigError
from freight.lab.columns import plural
from freight.lab.evaluate.perplexity import Window, cut_windows
from freight.model.open import OpenModel

Document = str | Sequence[int]


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
        # splitlines() also splits inside of JSON strings: U+2028
        lines = enumerate(text.split("\n"), 1)
        documents = [_line(path, number, line, field) for number, line in lines if line.strip()]
    if not any(documents):
        raise ConfigError(f"--data {path} is empty; give a text that the model was not trained on")
    return documents


def _line(path: Path, number: int, line: str, field: str) -> str:
    where = f"--data {path}, line {number}"
    try:
        entry = json.loads(line, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    text = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        has = f"has {sorted(entry)}" if isinstance(entry, dict) else f"is {type(entry).__name__}"
        raise ConfigError(
            f"{where} {has}; each line is an object with a text as {field!r}; --field names another"
        )
    return text


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
        tokenizer = opened.load_tokenizer()
        if tokenizer is None:
            raise ConfigError("a text needs a tokenizer; with skip_tokenizer_init pass token ids")
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


def window_length(window: int | None, max_model_len: int) -> int:
    """Return tokens scored together: `window`, or the context, at most 1024. Raises ConfigError for
    more than the context.
    """
    if window is not None and window > max_model_len:
        raise ConfigError(
            f"--window {window} is more than the {max_model_len} tokens of this model's context; use at most that"
        )
    return window or min(1024, max_model_len)
