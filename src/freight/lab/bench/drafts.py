"""`freight bench latency --text NAME`: what drafts (--speculate) gain, beside the same engine without.

A model with random weights writes nothing that could be guessed, and a small one repeats itself. So
the answers are given: whatever the model computes, the token drawn is the next one of a text that
people wrote. Sampling and drafting run unchanged and are timed. What is measured is how often drafts
come true for such a text, and what they cost. Runs with and without drafts take turns, and so do the
texts of a name: a pair of runs is one text, with drafts and without.

All sequences of a batch have the same text. Their prompt is computed once and then found in the cache,
which is not timed.

`drafting_fraction` is the time of the drafts alone, for each token of the text, as a share of a
decode step without drafts.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import truediv

from freight.base.fields import JsonObject
from freight.base.terminal import OnProgress, unseen
from freight.engine.drafts import Drafter
from freight.engine.engine import Engine
from freight.errors import ConfigError
from freight.lab.bench.drive import (
    StepRecord,
    counted,
    describe_run,
    drive,
    full_steps,
    greedy,
    random_prompt,
    start,
    token_rate,
)
from freight.lab.bench.serving import HELD_OUT
from freight.lab.bench.timing import Spread, medians
from freight.model.open import OpenModel
from freight.text.tokenizer import Tokenizer

_EDITED = 3  # files that are edited, and how much of each
_CHARACTERS = 1400
_PROMPT = 384  # tokens of code, and of random tokens
_ANSWER = 256


@dataclass(frozen=True)
class Text:
    """A prompt and the answer that is given, as token ids."""

    prompt: Sequence[int]
    answer: Sequence[int]


def texts_of(name: str, vocab_size: int) -> list[Text]:
    """Return the texts of a name, in tokens of the model that ships.

    edit    a file in the prompt; the answer is the file with a name changed and a line replaced
    code    source code that is continued
    random  tokens by chance

    Raises ConfigError for a vocabulary that lacks some of these tokens.
    """
    numbers = random.Random(0)
    if name == "random":
        return _cut(random_prompt(_PROMPT + _ANSWER, vocab_size, numbers))
    tokenizer = Tokenizer.load(HELD_OUT.parent)
    held_out = HELD_OUT.read_text()
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the texts have up to {tokenizer.vocab_size} token ids, and the model {vocab_size}; "
            "take a model with more"
        )
    if name == "code":
        tokens = tokenizer.encode(held_out[:8000], add_special_tokens=False)
        return _cut(tokens[: 2 * (_PROMPT + _ANSWER)])
    texts = []
    for begin in range(0, _EDITED * 6000, 6000):
        file = held_out[begin : begin + _CHARACTERS]
        prompt = tokenizer.encode(f"{file}\n# rewritten:\n", add_special_tokens=False)
        answer = tokenizer.encode(_edited(file, numbers), add_special_tokens=False)
        texts.append(Text(prompt, answer))
    return texts


def _cut(tokens: Sequence[int]) -> list[Text]:
    texts = []
    for begin in range(0, len(tokens), _PROMPT + _ANSWER):
        answer = begin + _PROMPT
        texts.append(Text(tokens[begin:answer], tokens[answer : answer + _ANSWER]))
    return texts


def _edited(file: str, numbers: random.Random) -> str:
    names = re.findall(r"[a-z_]{5,}", file)
    name = max(sorted(set(names)), key=names.count)
    lines = file.replace(name, f"{name}_new").split("\n")
    line = numbers.randrange(len(lines) - 3)
    return "\n".join([*lines[:line], "    # changed here", *lines[line + 2 :]])


def measure_drafts(
    opened: OpenModel,
    name: str,
    text: str,
    batch_size: int,
    repeats: int,
    output_len: int | None = None,
    on_progress: OnProgress = unseen,
) -> JsonObject:
    """Compare decoding with drafts and without, over `repeats` pairs of runs after one to warm up.
    Returns what --json prints.

    output_len: most tokens of an answer; None: all. Raises what `start_engine` raises, and
    ConfigError for an engine without drafts, or answers too short to be timed.
    """
    texts = texts_of(text, opened.model.vocab_size)
    texts = [Text(part.prompt, part.answer[:output_len]) for part in texts]
    longest = max(len(part.prompt) + len(part.answer) for part in texts)
    engine, config = start(
        opened, max_num_seqs=batch_size, max_model_len=longest + 1, enable_prefix_caching=True
    )
    most = engine.scheduler.most_drafts
    if not most:
        raise ConfigError("--text compares with drafts: give --speculate, on a CPU")
    has_drafts = engine.scheduler.drafts_beside(batch_size) > 0
    runs: dict[int, list[list[StepRecord]]] = {0: [], most: []}
    before = engine.stats()
    for pair in counted(repeats + 1, on_progress):
        for drafts in (0, most) if pair % 2 else (most, 0):
            engine.scheduler.most_drafts = drafts
            steps = _run(engine, texts[pair % len(texts)], batch_size)
            if pair:  # the first warms up
                runs[drafts].append(steps)
    engine.scheduler.most_drafts = most  # of the drafted runs, whichever came last
    stats = engine.stats()
    plain = list(map(token_rate, runs[0]))
    drafted = list(map(token_rate, runs[most]))
    figures = {
        "plain_tokens_per_second": Spread.of(plain),
        "drafted_tokens_per_second": Spread.of(drafted),
        "speedup": Spread.of(list(map(truediv, drafted, plain))),
    }
    drafting = 0.0
    if has_drafts:
        drafting = _drafting_seconds(texts, most) * batch_size
    num_drafted = stats.drafted - before.drafted
    plain_steps = list(chain(*runs[0]))
    drafted_steps = list(chain(*runs[most]))
    num_tokens = sum(step.num_tokens for step in drafted_steps)
    seconds = sum(step.seconds for step in plain_steps)
    return describe_run(opened, engine, config, name) | {
        "text": text,
        "batch_size": batch_size,
        "repeats": repeats,
        "output_len": max(len(part.answer) for part in texts),
        "tokens": num_tokens,
        "tokens_per_step": num_tokens / len(drafted_steps) / batch_size,
        "drafted_by": dict(Counter(stats.drafted_by) - Counter(before.drafted_by)),
        "accepted_by": dict(Counter(stats.accepted_by) - Counter(before.accepted_by)),
        "accepted_fraction": (stats.accepted - before.accepted) / max(num_drafted, 1),
        "drafting_fraction": drafting * len(plain_steps) / seconds,
        **medians(figures),
    }


def _run(engine: Engine, text: Text, batch_size: int) -> list[StepRecord]:
    """Answer with `text` in every sequence; returns the steps behind the one since which all decode."""
    params = greedy(len(text.answer))
    known = [*text.prompt, *text.answer]
    records = drive(engine, [text.prompt] * batch_size, [params] * batch_size, known)
    full = full_steps(records, batch_size)
    if len(full) < 2:
        raise ConfigError(
            f"the first of {batch_size} sequences ends before all decode: raise --output-len, or --kv-cache-memory if "
            "it is given, or lower --batch-size"
        )
    return records[full[0] + 1 :]


def _drafting_seconds(texts: Sequence[Text], most: int) -> float:
    """Return the seconds that drafting takes, by token of an answer."""
    began = time.perf_counter()
    for text in texts:
        drafter = Drafter(text.prompt)
        for end in range(1, len(text.answer)):
            drafter.propose(text.answer[:end], most)
    return (time.perf_counter() - began) / sum(len(text.answer) for text in texts)
