"""Long contexts: every FP8 cache beside the 16-bit one, by how far back the wanted tokens lie.

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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.config.engine import EngineArgs, EngineConfig, KVCacheConfig
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.errors import ConfigError
from freight.evaluate.perplexity import Window, cut_windows, target_logprobs
from freight.evaluate.report import cache_run, load_for, resolve_caches
from freight.evaluate.retrieval import Question, RetrievalContext, depths, make_contexts, vocabulary
from freight.evaluate.safety import Interval
from freight.evaluate.statistics import mean_interval
from freight.models.open import open_model
from freight.terminal import OnProgress, unseen

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


@dataclass(frozen=True)
class LongScore:
    """One cache. `positions` is empty without a text, or where the text has no whole window.

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
    """The 16-bit cache, and every one of `caches` that differs from it, each (kv_cache_dtype,
    kv_scales) or resolved.

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
    if tokenizer is not None and tokenizer.encode("a")[:1] != [
        bos
    ]:  # the model wants none before a text
        bos = None
    words = vocabulary(tokenizer, opened.model.vocab_size, bos)
    contexts = make_contexts(words, length, num_contexts, num_questions, args.seed)
    windows: list[Window] = []
    if text is not None and tokenizer is not None:
        cut = cut_windows(tokenizer.encode(text, add_special_tokens=False), length, bos)
        windows = [window for window in cut if len(window.targets) >= length - 1][:num_contexts]
    total = len(contexts) + len(windows)
    with opened.threads(configs[0]):
        decoder = load_for(opened, configs, length)
        runners = [cache_run(opened, decoder, config, length).runner for config in configs]
        asked: list[list[list[Answer]]] = [[] for _ in runners]
        for done, (own, other) in enumerate(
            zip(contexts, [*contexts[1:], contexts[0]], strict=True)
        ):
            on_progress(done, total)
            for index, runner in enumerate(runners):
                asked[index].append(_ask(runner, own, other, configs[0].max_num_batched_tokens))
        nats: list[list[list[float]]] = [[] for _ in runners]
        for done, window in enumerate(windows):
            on_progress(len(contexts) + done, total)
            for index, runner in enumerate(runners):
                nats[index].append(_nll(runner, window, configs[0].max_num_batched_tokens))
        on_progress(total, total)
    return [
        _score(config, length, contexts, (asked[index], asked[0]), (nats[index], nats[0]))
        for index, config in enumerate(configs)
    ]


@dataclass(frozen=True)
class Answer:
    """To one question, in nats per value token: with the record in the context, and in another
    context without it.
    """

    found: bool
    logprob: float


def _ask(
    runner: ModelRunner, own: RetrievalContext, other: RetrievalContext, chunk: int
) -> list[Answer]:
    """Answers to `own`'s questions after `own`, then to `other`'s, which `own` does not know."""
    ids = own.token_ids
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        runner.run([SequenceSlice(part, start, runner.pool.whole, Logits.NONE)])
    answers, copies = [], _states_behind(runner.pool, len(ids))
    for question in (*own.questions, *other.questions):
        for state, copy in copies:
            state.copy_(copy)
        answers.append(_answer(runner, question, len(ids)))
    return answers


def _states_behind(pool: KVPool, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """The states behind so many tokens of a sequence that is alone in the pool, and copies: a
    question changes them.
    """
    blocks = [(kept.states, (num_tokens - 1) // kept.states.every) for kept in pool.states.values()]
    return [
        (part[block], part[block].clone())
        for states, block in blocks
        for part in states.parts.values()
    ]


def _answer(runner: ModelRunner, question: Question, start: int) -> Answer:
    """The question goes behind the `start` tokens that are stored, over the last question's."""
    ids = [*question.key, *question.value[:-1]]
    logits = runner.logits(ids, start, runner.pool.whole)[-len(question.value) :]
    value = torch.tensor(question.value, dtype=torch.int64, device=logits.device)
    logprobs = target_logprobs(torch.log_softmax(logits, -1), value)
    return Answer(bool((logits.argmax(-1) == value).all()), float(logprobs.double().mean()))


def _nll(runner: ModelRunner, window: Window, chunk: int) -> list[float]:
    """Negative log-likelihood in nats of each token of the window."""
    found: list[float] = []
    for start in range(0, len(window.token_ids), chunk):
        stop = min(start + chunk, len(window.token_ids))
        logits = runner.logits(window.token_ids[start:stop], start, runner.pool.whole)
        targets = torch.tensor(window.targets[start:stop], dtype=torch.int64, device=logits.device)
        found += (-target_logprobs(torch.log_softmax(logits, -1), targets)).tolist()
    return found


def _score(
    config: EngineConfig,
    length: int,
    contexts: Sequence[RetrievalContext],
    asked: tuple[list[list[Answer]], list[list[Answer]]],
    nats: tuple[list[list[float]], list[list[float]]],
) -> LongScore:
    """`asked` and `nats` are this cache's and the 16-bit one's, by context and window."""
    names = config.kv.names()
    positions = []
    edges = [0, *depths(length)]
    for start, stop in itertools.pairwise(edges):
        own, plain = (
            [statistics.fmean(window[start:stop]) for window in windows] for windows in nats
        )
        if own:
            tokens = [value for window in nats[0] for value in window[start:stop]]
            change = estimate([after - before for after, before in zip(own, plain, strict=True)])
            perplexity = math.exp(statistics.fmean(tokens))
            positions.append(PositionScore(start, stop, len(tokens), perplexity, change))
    return LongScore(
        str(names["dtype"]),
        names["granularity"],
        names["scale_source"],
        None if config.kv.state is None else str(config.kv.state),
        [_depth(depth, contexts, *asked) for depth in depths(length)],
        positions,
    )


def _depth(
    depth: int,
    contexts: Sequence[RetrievalContext],
    own: list[list[Answer]],
    plain: list[list[Answer]],
) -> DepthScore:
    """Means by context first: the questions of one context share its cache."""
    columns: dict[str, list[list[float]]] = {"found": [], "logprob": [], "gain": []}
    count = 0
    for run in (own, plain):
        found, logprob, gain = [], [], []
        for index, context in enumerate(contexts):
            at = [i for i, question in enumerate(context.questions) if question.depth == depth]
            with_it = [run[index][i] for i in at]
            without = [run[index - 1][len(contexts[index - 1].questions) + i] for i in at]
            found.append(statistics.fmean(answer.found for answer in with_it))
            logprob.append(statistics.fmean(answer.logprob for answer in with_it))
            gain.append(logprob[-1] - statistics.fmean(answer.logprob for answer in without))
            count += len(at)
        for name, values in (("found", found), ("logprob", logprob), ("gain", gain)):
            columns[name].append(values)
    change = {
        name: [after - before for after, before in zip(*columns[name], strict=True)]
        for name in ("found", "gain")
    }
    return DepthScore(
        depth,
        count // 2,
        estimate(columns["found"][0]),
        estimate(columns["logprob"][0]),
        estimate(columns["gain"][0]),
        estimate(change["found"]),
        estimate(change["gain"]),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of `values`, one for each context or window, with its interval."""
    ends = mean_interval(np.array(values, dtype=np.float64), np.ones(len(values)))
    interval = None if ends is None else (float(ends[0]), float(ends[1]))
    return Estimate(statistics.fmean(values), interval, len(values))
