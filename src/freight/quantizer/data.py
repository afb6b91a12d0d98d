"""Calibration data -> samples, each a list of token ids.

A file that ends in .jsonl has one sample per line: an object with `text`, with `messages` (through
the model's chat template), with `conversations` (the same, of objects with `from` and `value`, as in
ShareGPT), or with `input_ids`, which need no tokenizer. The rows of a .parquet
file and of a data set of the hub (`hub_data`) are such objects. Any other file is one text, cut
into samples of `max_seq_len` tokens. Files are UTF-8, with or without a byte order mark. Texts get
the model's special tokens (BOS), as at inference. For a model without a chat template, messages
become the text that they contain.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from freight.base.fields import is_integer
from freight.base.files import DATA_LIMIT, read_text, reading, unique_names
from freight.errors import ConfigError, RequestError
from freight.quantizer import hub_data
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")

FEW_TOKENS = 256  # with fewer, an amax is not representative

Samples = list[list[int]]
_KEYS = ("text", "messages", "conversations", "input_ids")
_ROLES = {"human": "user", "gpt": "assistant"}  # of `conversations`; others are roles already


def read_samples(
    data: object,
    num_samples: int,
    max_seq_len: int,
    vocab_size: int,
    load_tokenizer: Callable[[], Tokenizer],
) -> Samples:
    """Read at most `num_samples` samples of at most `max_seq_len` tokens.

    `data` is a path, a data set of the hub (`owner/name`), or a sequence of strings, of lists of
    token ids, or of dicts as the lines of a .jsonl file. `load_tokenizer` is called if there is
    text. Raises ConfigError for a file that cannot be read, a line that is no sample, a token id
    that the model does not have, and where there is no token at all. Fewer than FEW_TOKENS tokens
    are a warning.
    """
    tokenizer = _Lazy(load_tokenizer)
    if isinstance(data, str | Path):
        where = f"--calibration-data {data}"
        read = _from_name(where, str(data), tokenizer, max_seq_len)
    else:
        where = "calibration_data"
        read = _from_python(where, data, tokenizer)
    samples = [ids[:max_seq_len] for ids in islice(filter(None, read), num_samples)]
    for ids in samples:
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise ConfigError(
                f"{where}: token id {bad} is not in the model's vocabulary, [0, {vocab_size})"
            )
    total = sum(map(len, samples))
    if total == 0:
        raise ConfigError(f"{where} has no token to calibrate with; give text")
    if total < FEW_TOKENS:
        logger.warning(
            "%s gives %d tokens in %s, and scales of fewer than %d tokens may not fit other text; give more text, or "
            "raise --num-samples or --max-seq-len",
            where,
            total,
            "1 sample" if len(samples) == 1 else f"{len(samples)} samples",
            FEW_TOKENS,
        )
    return samples


class _Lazy:
    """A tokenizer that is loaded at its first use."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._tokenizer: Tokenizer | None = None
        self._has_warned = False

    def say_no_template(self, where: str) -> None:
        """Log once that conversations become plain text."""
        if not self._has_warned:
            logger.warning(
                "%s has `messages`, and the model has no chat template: their texts are used alone",
                where,
            )
        self._has_warned = True

    def __call__(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer


def _from_name(where: str, name: str, tokenizer: _Lazy, max_seq_len: int) -> Iterator[list[int]]:
    path = Path(name)
    if path.suffix == ".parquet" and path.is_file():
        return _rows(where, hub_data.parquet_rows(where, path), tokenizer)
    if hub_data.is_hub_id(name):
        return _rows(where, hub_data.hub_rows(where, name), tokenizer)
    return _from_file(where, path, tokenizer, max_seq_len)


def _rows(where: str, rows: Iterable[object], tokenizer: _Lazy) -> Iterator[list[int]]:
    for number, row in enumerate(rows, 1):
        yield _sample(f"{where}, row {number}", row, tokenizer)


def _from_file(where: str, path: Path, tokenizer: _Lazy, max_seq_len: int) -> Iterator[list[int]]:
    jsonl = path.suffix == ".jsonl"
    with reading(where):
        text = read_text(path, "utf-8-sig", DATA_LIMIT, newline="\n" if jsonl else None)
    if jsonl:
        return _lines(where, text, tokenizer)
    return _pieces(text, tokenizer(), max_seq_len)


def _pieces(text: str, tokenizer: Tokenizer, max_seq_len: int) -> Iterator[list[int]]:
    """Yield the text in samples of at most `max_seq_len` tokens, each with BOS if the model has it
    before a text.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    begin = []
    if bos is not None and tokenizer.encode("a")[:1] == [bos]:
        begin = [bos]
    step = max_seq_len - len(begin)
    for start in range(0, len(ids), step):
        yield [*begin, *ids[start : start + step]]


def _lines(where: str, text: str, tokenizer: _Lazy) -> Iterator[list[int]]:
    # splitlines() also splits inside of JSON strings: U+2028
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _line(f"{where}, line {number}", line, tokenizer)


def _line(where: str, line: str, tokenizer: _Lazy) -> list[int]:
    try:
        entry = json.loads(line, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    return _sample(where, entry, tokenizer)


def _sample(where: str, entry: object, tokenizer: _Lazy) -> list[int]:
    """Return the token ids of one line or row."""
    keys = [key for key in _KEYS if isinstance(entry, dict) and key in entry]
    if len(keys) != 1:
        has = f"has {sorted(entry)}" if isinstance(entry, dict) else f"is {type(entry).__name__}"
        raise ConfigError(
            f"{where} {has}; each sample is an object with one of `text`, `messages`, `conversations` "
            "or `input_ids`"
        )
    assert isinstance(entry, dict)
    value: Any = entry[keys[0]]
    if keys[0] == "input_ids":
        return _ids(where, value)
    if keys[0] == "text":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: `text` is {type(value).__name__}, not a string")
        return tokenizer().encode(value)
    if keys[0] == "conversations":
        value = _as_messages(where, value)
    if not tokenizer().has_chat_template:
        tokenizer.say_no_template(where)
        return tokenizer().encode(_contents(where, value))
    try:
        return tokenizer().apply_chat_template(value, add_generation_prompt=False)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error


def _as_messages(where: str, turns: object) -> list[dict[str, str]]:
    """Return the messages of a conversation whose turns have `from` and `value`."""
    messages = []
    for turn in turns if isinstance(turns, list) else [None]:
        sender = turn.get("from") if isinstance(turn, dict) else None
        value = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(sender, str) or not isinstance(value, str):
            raise ConfigError(
                f"{where}: `conversations` is not a list of objects with texts as `from` and `value`"
            )
        messages.append({"role": _ROLES.get(sender, sender), "content": value})
    return messages


def _contents(where: str, messages: object) -> str:
    """Return the texts of a conversation, a message a line, for a base model."""
    conversation = messages if isinstance(messages, list) else []
    contents = []
    for message in conversation:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            contents.append(content)
    if not contents or len(contents) < len(conversation):
        raise ConfigError(f"{where}: `messages` is not a list of objects with a text as `content`")
    return "\n".join(contents)


def _from_python(where: str, data: object, tokenizer: _Lazy) -> Iterator[list[int]]:
    if not isinstance(data, Sequence):
        raise ConfigError(
            f"{where} is {type(data).__name__}; give a path, strings, or lists of token ids"
        )
    for number, sample in enumerate(data):
        if isinstance(sample, dict):
            yield _sample(f"{where}[{number}]", sample, tokenizer)
        elif isinstance(sample, str):
            yield tokenizer().encode(sample)
        else:
            yield _ids(f"{where}[{number}]", sample)


def _ids(where: str, value: object) -> list[int]:
    if not isinstance(value, Sequence) or not all(map(is_integer, value)):
        raise ConfigError(f"{where}: token ids must be a list of integers, not {str(value)[:60]}")
    return list(value)
