"""Contexts to retrieve from: records of a key and a value, made from a model's vocabulary.

A context is records "key = value" one after another, up to its end; keys and values are words drawn
at random, so nothing but the cache can tell the value of a key. A question is a key again, with "
=" after it: its answer is the value's tokens. Keys differ over all contexts of a task, so a key of
one context can also be asked after another context, where its value is not known: that is what a
model says of these tokens without the record.

The same seed, vocabulary and lengths give the same task. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from freight.errors import ConfigError
from freight.text.tokenizer import Tokenizer

KEY = 2  # words of each
VALUE = 2
FEWEST_WORDS = 64  # below this the vocabulary's other tokens are taken too
SHALLOWEST = 1024  # tokens; a shorter context is divided by 8


@dataclass(frozen=True)
class Vocabulary:
    """Token ids: `words` that keys and values are drawn from, and what stands before, between and
    behind them.
    """

    words: Sequence[int]
    begin: list[int]
    equals: list[int]
    end: list[int]


@dataclass(frozen=True)
class Question:
    """`depth`: tokens from the record to the end of the context, as asked for. `key` has the " ="
    behind it.
    """

    depth: int
    key: list[int]
    value: list[int]


@dataclass(frozen=True)
class RetrievalContext:
    token_ids: list[int]
    questions: list[Question]


def vocabulary(
    tokenizer: Tokenizer | None, vocab_size: int, bos_token_id: int | None
) -> Vocabulary:
    """Words of three or more letters where there is a tokenizer that has them, else every token but
    BOS.
    """
    begin = [] if bos_token_id is None else [bos_token_id]
    if tokenizer is None:
        return Vocabulary(
            [token for token in range(vocab_size) if token != bos_token_id], begin, [], []
        )
    ordinary = []
    words = []
    for token in range(min(vocab_size, tokenizer.vocab_size)):
        if token in tokenizer.special_token_ids:
            continue
        ordinary.append(token)
        text = tokenizer.token_text(token).strip()
        if len(text) >= 3 and text.isalpha() and text.isascii():
            words.append(token)
    equals = tokenizer.encode(" =", add_special_tokens=False)
    end = tokenizer.encode("\n", add_special_tokens=False)
    return Vocabulary(words if len(words) >= FEWEST_WORDS else ordinary, begin, equals, end)


def depths(context: int) -> list[int]:
    """1024, 2048, … and the context itself; of a context under 8192 tokens, its eighth, quarter,
    half and itself.
    """
    depth = min(SHALLOWEST, context // 8)
    levels = []
    while depth < context:
        levels.append(depth)
        depth *= 2
    return [*levels, context]


def make_contexts(
    words: Vocabulary, length: int, count: int, questions: int, seed: int = 0
) -> list[RetrievalContext]:
    """`count` contexts whose tokens, with one question and its answer, are at most `length`.

    Each has up to `questions` questions at each of `depths(length)`, about records nearest to that
    depth. Raises ConfigError for a length that has no room for one record at each depth.
    """
    draw = random.Random(seed)
    record = KEY + len(words.equals) + VALUE + len(words.end)
    num_records = (length - len(words.begin) - record) // record
    levels = depths(length)
    if num_records < len(levels) or len(words.words) < 2:
        raise ConfigError(
            f"a context of {length} tokens has no room to retrieve from; give at least {record * 8}"
        )
    size = KEY
    while len(words.words) ** size < 16 * count * num_records:  # else keys would hardly differ
        size += 1
        record += 1
        num_records = (length - len(words.begin) - record) // record
    used: set[tuple[int, ...]] = set()
    made = []
    for _ in range(count):
        keys = [_unused(draw, words.words, size, used) for _ in range(num_records)]
        records = [(key, draw.choices(words.words, k=VALUE)) for key in keys]
        token_ids = [*words.begin]
        for key, value in records:
            token_ids += [*key, *words.equals, *value, *words.end]
        asked = []
        for depth in levels:
            by_distance = sorted(
                range(num_records), key=lambda i: abs((num_records - i) * record - depth)
            )
            for i in sorted(by_distance[:questions]):
                key, value = records[i]
                asked.append(Question(depth, [*key, *words.equals], value))
        made.append(RetrievalContext(token_ids, asked))
    return made


def _unused(
    draw: random.Random, words: Sequence[int], size: int, used: set[tuple[int, ...]]
) -> tuple[int, ...]:
    while True:
        key = tuple(draw.choices(words, k=size))
        if key not in used:
            used.add(key)
            return key
