"""`freight bench latency --text NAME`: what drafts (--speculate) gain, beside the same engine without.

A model with random weights writes nothing that could be guessed, and a small one repeats itself. So
the answers are given: whatever the model computes, the token drawn is the next one of a text that
people wrote. Sampling and drafting run unchanged and are timed. What is measured is how often drafts
come true for such a text, and what they cost. Runs with and without drafts take turns.

`drafting_fraction` is the time of the drafts alone, for each token of the text, as a share of a
decode step without drafts.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from freight.bench.drive import counted, describe_run, greedy, start
from freight.bench.serving import HELD_OUT
from freight.bench.timing import Spread
from freight.config.fields import JsonObject
from freight.engine.drafts import Drafter
from freight.engine.engine import Engine
from freight.engine.prepare import SequenceSlice
from freight.engine.runner import ModelRunner, StepRows
from freight.errors import ConfigError
from freight.models.open import OpenModel
from freight.terminal import OnProgress, unseen
from freight.text.tokenizer import Tokenizer

TEXTS = ("edit", "code", "random")
_EDITED, _CHARACTERS = 3, 1400  # files that are edited, and how much of each
_PROMPT, _ANSWER = 384, 256  # tokens of code, and of random tokens


@dataclass(frozen=True)
class Text:
    """A prompt and the answer that is given, as token ids."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True)
class ForcedRows(StepRows):
    """Rows of which the token of `following` is by far the most likely."""

    following: Sequence[int] = ()

    def logits(self, rows: Sequence[int]) -> Tensor:
        logits = super().logits(rows)
        for index, row in enumerate(rows):
            logits[index, self.following[row]] = 1e30
        return logits


@dataclass(frozen=True)
class ForcedRunner(ModelRunner):
    """A runner of sequences that all have the same text: `known` by position."""

    known: list[int] = field(default_factory=list)

    def run(self, slices: Sequence[SequenceSlice], tokens: Tensor | None = None) -> StepRows:
        rows = super().run(slices, tokens)
        following = []
        for part in slices:
            end = part.start + len(part.token_ids)
            for position in range(end - part.num_logit_rows, end):
                following.append(self.known[min(position + 1, len(self.known) - 1)])
        return ForcedRows(**vars(rows), following=following)


def texts_of(name: str, vocab_size: int) -> list[Text]:
    """Return the texts of a name, in tokens of the model that ships.

    edit    a file in the prompt; the answer is the file with a name changed and a line replaced
    code    source code that is continued
    random  tokens by chance

    Raises ConfigError for a vocabulary that lacks some of these tokens.
    """
    numbers = random.Random(0)
    if name == "random":
        tokens = [numbers.randrange(vocab_size) for _ in range(_PROMPT + _ANSWER)]
        return [Text(tokens[:_PROMPT], tokens[_PROMPT:])]
    tokenizer = Tokenizer.load(HELD_OUT.parent)
    held_out = HELD_OUT.read_text()
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the texts have up to {tokenizer.vocab_size} token ids, and the model {vocab_size}; "
            "take a model with more"
        )
    if name == "code":
        tokens = tokenizer.encode(held_out[:8000], add_special_tokens=False)
        parts = [tokens[first:] for first in range(0, 2 * (_PROMPT + _ANSWER), _PROMPT + _ANSWER)]
        return [Text(one[:_PROMPT], one[_PROMPT : _PROMPT + _ANSWER]) for one in parts]
    found = []
    for begin in range(0, _EDITED * 6000, 6000):
        file = held_out[begin : begin + _CHARACTERS]
        both = [f"{file}\n# rewritten:\n", _edited(file, numbers)]
        prompt, answer = (tokenizer.encode(one, add_special_tokens=False) for one in both)
        found.append(Text(prompt, answer))
    return found


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
    on_progress: OnProgress = unseen,
) -> JsonObject:
    """Compare decoding with drafts and without, over `repeats` pairs of runs after one to warm up.
    Returns what --json prints.

    Raises what `start_engine` raises, and ConfigError for an engine without drafts.
    """
    texts = texts_of(text, opened.model.vocab_size)
    longest = max(len(one.prompt) + len(one.answer) for one in texts)
    engine, config = start(
        opened, max_num_seqs=batch_size, max_model_len=longest + 1, enable_prefix_caching=False
    )
    most = engine.scheduler.most_drafts
    if not most:
        raise ConfigError("--text compares with drafts: give --speculate, on a CPU")
    runs: dict[int, list[list[tuple[float, int]]]] = {0: [], most: []}  # by drafts, by pair
    before = engine.stats()
    for repeat in counted(repeats + 1, on_progress):
        for drafts in (0, most) if repeat % 2 else (most, 0):
            engine.scheduler.most_drafts = drafts
            found = [_run(engine, one, batch_size) for one in texts]
            if repeat:
                runs[drafts].append(found)
    stats = engine.stats()
    num_tokens = batch_size * sum(len(one.answer) - 1 for one in texts)
    seconds = {drafts: [sum(one for one, _ in run) for run in runs[drafts]] for drafts in runs}
    figures = {
        "plain_tokens_per_second": Spread.of([num_tokens / one for one in seconds[0]]),
        "drafted_tokens_per_second": Spread.of([num_tokens / one for one in seconds[most]]),
        "speedup": Spread.of([a / b for a, b in zip(seconds[0], seconds[most], strict=True)]),
    }
    steps = sum(count for _, count in runs[most][0])
    return describe_run(engine, config, name) | {
        "text": text,
        "batch_size": batch_size,
        "most_drafts": most,
        "repeats": repeats,
        "tokens": num_tokens,
        "tokens_per_step": num_tokens / steps,
        "accepted_fraction": (stats.accepted - before.accepted)
        / max(stats.drafted - before.drafted, 1),
        "drafting_fraction": _drafting_seconds(texts, most)
        / (median(seconds[0]) * batch_size / num_tokens),
        **{figure: spread.median for figure, spread in figures.items()},
        "spread": {figure: asdict(spread) for figure, spread in figures.items()},
    }


def _run(engine: Engine, text: Text, batch_size: int) -> tuple[float, int]:
    """Return the seconds from the first token of the last sequence to the end, and their steps."""
    params: Any = greedy(len(text.answer))
    runner = vars(engine.runner) | {"known": [*text.prompt, *text.answer]}
    engine.runner = ForcedRunner(**runner)
    for index in range(batch_size):
        engine.add(f"bench {index}", engine.intake.accept(text.prompt, params), params)
    decoding: list[float] = []
    while engine.has_unfinished:
        begin, waits = time.perf_counter(), engine.scheduler.num_decoding < batch_size
        engine.step()
        if not waits or decoding:
            decoding.append(time.perf_counter() - begin)
    for index in range(batch_size):
        tokens = engine.output(f"bench {index}").outputs[0].token_ids
        assert tokens == list(text.answer), "the answer is not the text"
        engine.release(f"bench {index}")
    return sum(decoding), len(decoding)


def _drafting_seconds(texts: Sequence[Text], most: int) -> float:
    """Return the seconds that drafting takes, by token of an answer."""
    began = time.perf_counter()
    for text in texts:
        drafter = Drafter(text.prompt)
        for end in range(1, len(text.answer)):
            drafter.propose(text.answer[:end], most)
    return (time.perf_counter() - began) / sum(len(text.answer) for text in texts)
