"""Long contexts: every FP8 cache and the 16-bit one, by how far back the tokens lie that count.

Two measurements, at the full context of the model:

- retrieval (`retrieval.py`): after a context of records, the value of a key that is asked again,
  teacher-forced. `found` is the share of questions whose value tokens are all the most likely ones;
  `logprob` is nats per value token; `gain` is that minus the log-probability of the same tokens,
  after the same question, behind a context without the record. A model that was not trained for
  this finds little, but the gain shows what it reads from the cache.
- perplexity by position: of a text in windows of the context's length.

Both also as changes against the 16-bit cache, on the same questions or tokens. Intervals of 95 %
are over contexts or windows, which are what is independent (`statistics.mean_interval`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from freight.base.terminal import OnProgress, unseen
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.errors import ConfigError
from freight.lab.evaluate.perplexity import Window, cut_windows, of_targets
from freight.lab.evaluate.report import cache_run, load_for, resolve_caches
from freight.lab.evaluate.retrieval import (
    Question,
    RetrievalContext,
    depths,
    make_contexts,
    vocabulary,
)
from freight.lab.evaluate.safety import Interval
from freight.lab.evaluate.statistics import interval
from freight.model.open import open_model
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig

Cache = tuple[str, str] | KVCacheConfig


@dataclass(frozen=True)
class Estimate:
    """A mean over `num_units` contexts or windows, and its 95 % interval, None below
    `safety.MIN_UNITS`.
    """

    mean: float
    interval: Interval | None
    num_units: int


@dataclass(frozen=True)
class DepthScore:
    """Retrieval from `depth` tokens back. `*_change` is against the 16-bit cache, on the same
    questions.
    """

    depth: int
    num_questions: int
    found: Estimate
    logprob: Estimate
    gain: Estimate
    found_change: Estimate
    gain_change: Estimate

    @property
    def change(self) -> Estimate:
        """The change that is printed."""
        return self.gain_change


@dataclass(frozen=True)
class PositionScore:
    """Tokens at positions `start` … `stop` - 1 of the windows. `nll_change` in nats per token,
    against 16 bits.
    """

    start: int
    stop: int
    num_tokens: int
    perplexity: float
    nll_change: Estimate

    @property
    def last(self) -> int:
        return self.stop - 1

    @property
    def change(self) -> Estimate:
        """The change that is printed."""
        return self.nll_change


@dataclass(frozen=True)
class LongScore:
    """One cache. `positions` is empty without a text, or where the text is shorter than a window.

    state_dtype   how recurrent states are stored; None: no layer keeps one
    """

    kv_cache_dtype: str
    granularity: str | None
    scale_source: str | None
    state_dtype: str | None
    depths: list[DepthScore]
    positions: list[PositionScore]


def compare_long(
    args: EngineArgs,
    caches: Sequence[Cache],
    text: str | None,
    context: int | None = None,
    num_contexts: int = 16,
    num_questions: int = 4,
    on_progress: OnProgress = unseen,
) -> list[LongScore]:
    """Measure the 16-bit cache, and every one of `caches` that differs from it, each
    (kv_cache_dtype, kv_scales) or resolved.

    context: tokens, default the model's. num_contexts: contexts to retrieve from, and at most as
    many windows of `text`. num_questions: at each depth of each context. `args.seed` chooses the
    task. `on_progress(done, total)` counts contexts and windows. Raises ConfigError for a context
    that is longer than the model's or too short, for fewer than two contexts, and what `resolve`
    raises, before weights are read.
    """
    opened = open_model(args)
    configs = resolve_caches(opened, caches)
    length = context or configs[0].max_model_len
    if length > configs[0].max_model_len:
        raise ConfigError(
            f"--window is {length}, and the context {configs[0].max_model_len} tokens"
        )
    if num_contexts < 2:
        raise ConfigError(
            f"--contexts is {num_contexts}; an interval, and a context without the record, need 2"
        )
    tokenizer = opened.load_tokenizer()
    bos = opened.model.bos_token_id
    # the model wants none before a text
    if tokenizer is not None and tokenizer.encode("a")[:1] != [bos]:
        bos = None
    words = vocabulary(tokenizer, opened.model.vocab_size, bos)
    contexts = make_contexts(words, length, num_contexts, num_questions, args.seed)
    windows: list[Window] = []
    if text is not None and tokenizer is not None:
        cut = cut_windows(tokenizer.encode(text, add_special_tokens=False), length, bos)
        windows = [window for window in cut if len(window.targets) >= length - 1][:num_contexts]
    total = len(contexts) + len(windows)
    chunk = configs[0].max_num_batched_tokens
    with opened.threads(configs[0]):
        decoder = load_for(opened, configs, length)
        runs = [
            _Run(config, cache_run(opened, decoder, config, length).runner) for config in configs
        ]
        for index, record in enumerate(contexts):
            on_progress(index, total)
            other = (index + 1) % len(contexts)
            for run in runs:
                questions = (record.questions, contexts[other].questions)
                run.known[index], run.unknown[other] = _ask(run.runner, record, questions, chunk)
        for done, window in enumerate(windows, len(contexts)):
            on_progress(done, total)
            for run in runs:
                run.nats.append(_nll(run.runner, window, chunk))
        on_progress(total, total)
    return [_score(run, runs[0], length, contexts) for run in runs]


@dataclass(frozen=True)
class Answer:
    """`logprob` is that of the value's tokens, in nats a token; `found`: all are most likely."""

    found: bool
    logprob: float


@dataclass(frozen=True)
class _Run:
    """One cache, and what has been measured of it so far.

    known, unknown   answers to the questions of each context, behind it and behind another one
    nats             negative log-likelihood of each token, by window
    """

    config: EngineConfig
    runner: ModelRunner
    known: dict[int, list[Answer]] = field(default_factory=dict)
    unknown: dict[int, list[Answer]] = field(default_factory=dict)
    nats: list[list[float]] = field(default_factory=list)


def _ask(
    runner: ModelRunner,
    context: RetrievalContext,
    questions: Sequence[Sequence[Question]],
    chunk: int,
) -> list[list[Answer]]:
    """Answer each list of `questions` behind `context`."""
    ids = context.token_ids
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        runner.run([SequenceSlice(part, start, runner.pool.whole, Logits.NONE)])
    states = []  # behind the context, and their copies: a question changes them
    for layer in runner.pool.states.values():
        block = (len(ids) - 1) // layer.states.every
        for tensor in layer.states.parts.values():
            states.append((tensor[block], tensor[block].clone()))

    def answer(question: Question) -> Answer:
        for state, copy in states:
            state.copy_(copy)
        return _answer(runner, question, len(ids))

    return [[answer(question) for question in several] for several in questions]


def _answer(runner: ModelRunner, question: Question, start: int) -> Answer:
    """Ask the question behind the `start` tokens that are stored, over the last question's."""
    ids = [*question.key, *question.value[:-1]]
    logits = runner.logits(ids, start, runner.pool.whole)[-len(question.value) :]
    all_top = logits.argmax(-1).tolist() == question.value
    return Answer(all_top, float(_logprobs(logits, question.value).double().mean()))


def _logprobs(logits: Tensor, targets: Sequence[int]) -> Tensor:
    """Return the log-probability of each of `targets`, which follow the rows: [rows]."""
    tokens = torch.tensor(targets, dtype=torch.int64, device=logits.device)
    return of_targets(torch.log_softmax(logits, -1), tokens)


def _nll(runner: ModelRunner, window: Window, chunk: int) -> list[float]:
    """Negative log-likelihood in nats of each token of the window."""
    nats: list[float] = []
    for start in range(0, len(window.token_ids), chunk):
        stop = start + chunk
        logits = runner.logits(window.token_ids[start:stop], start, runner.pool.whole)
        nats += (-_logprobs(logits, window.targets[start:stop])).tolist()
    return nats


def _score(run: _Run, first: _Run, length: int, contexts: Sequence[RetrievalContext]) -> LongScore:
    """Return the figures of `run`, against those of `first`, the 16-bit one."""
    names = run.config.kv.names()
    state = run.config.kv.state
    levels = depths(length)
    spans = itertools.pairwise([0, *levels]) if run.nats else ()
    return LongScore(
        kv_cache_dtype=str(names["dtype"]),
        granularity=names["granularity"],
        scale_source=names["scale_source"],
        state_dtype=None if state is None else str(state),
        depths=[_depth(depth, contexts, run, first) for depth in levels],
        positions=[_position(start, stop, run, first) for start, stop in spans],
    )


def _position(start: int, stop: int, run: _Run, first: _Run) -> PositionScore:
    tokens = [value for window in run.nats for value in window[start:stop]]
    means = [statistics.fmean(window[start:stop]) for window in run.nats]
    plain = [statistics.fmean(window[start:stop]) for window in first.nats]
    perplexity = math.exp(statistics.fmean(tokens))
    return PositionScore(start, stop, len(tokens), perplexity, _change(means, plain))


def _depth(depth: int, contexts: Sequence[RetrievalContext], run: _Run, first: _Run) -> DepthScore:
    of_depth: list[list[int]] = []  # of each context, the numbers of the questions
    for context in contexts:
        questions = enumerate(context.questions)
        of_depth.append([number for number, question in questions if question.depth == depth])
    hits, logprob, gain = _means(of_depth, run)
    plain_hits, _, plain_gain = _means(of_depth, first)
    return DepthScore(
        depth=depth,
        num_questions=sum(map(len, of_depth)),
        found=estimate(hits),
        logprob=estimate(logprob),
        gain=estimate(gain),
        found_change=_change(hits, plain_hits),
        gain_change=_change(gain, plain_gain),
    )


def _means(of_depth: Sequence[Sequence[int]], run: _Run) -> tuple[list[float], ...]:
    """Return means of `found`, `logprob` and `gain` by context, whose questions share its cache."""
    hits = []
    logprob = []
    gain = []
    for index, numbers in enumerate(of_depth):
        known = [run.known[index][number] for number in numbers]
        unknown = [run.unknown[index][number] for number in numbers]
        hits.append(statistics.fmean(answer.found for answer in known))
        logprob.append(statistics.fmean(answer.logprob for answer in known))
        gain.append(logprob[-1] - statistics.fmean(answer.logprob for answer in unknown))
    return hits, logprob, gain


def _change(values: Sequence[float], plain: Sequence[float]) -> Estimate:
    return estimate([after - before for after, before in zip(values, plain, strict=True)])


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, one for each context or window, with its interval."""
    ends = interval(np.array(values, dtype=np.float64), np.ones(len(values)))
    return Estimate(statistics.fmean(values), ends, len(values))
