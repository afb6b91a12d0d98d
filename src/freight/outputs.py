"""Outputs of a request. Names and shapes are those that vLLM's users know.

Outputs and deltas are made several times a second for each request, and belong to the caller. They
are not frozen: to make a frozen dataclass takes four to eight times as long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar


class FinishReason(StrEnum):
    """The reason why a completion ended."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the caller went away
    TIMEOUT = "timeout"  # timeout_s passed
    ERROR = "error"  # it could not be computed further; `error` says why


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of one token under the model, before temperature, penalties and
    truncation.

    `rank` counts from 1 for the most likely token; `decoded_token` is None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # the most likely tokens asked for and, always, the token itself
# Token id, log-probability, rank from 1 (of equal logits, the lower id first)
LogprobEntry = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of consecutive tokens, as columns: a prompt may have millions of them.

    width     entries of each token: the most likely tokens by rank, then, always, the token itself
    ids       int32 [tokens * width]
    logprobs  float32 [tokens * width]
    ranks     int32 [tokens], of each token itself; below `width` it is also among the most likely
    """

    width: int
    ids: array[int]
    logprobs: array[float]
    ranks: array[int]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ranks)

    def __iter__(self) -> Iterator[tuple[LogprobEntry, ...]]:
        """Yield the entries of each token, without repetition."""
        width = self.width
        leading = tuple(range(1, self.width))
        for begin, rank in zip(range(0, len(self.ids), width), self.ranks, strict=True):
            if rank < width:  # the token itself is among the most likely
                end = begin + width - 1
                ranks = leading
            else:
                end = begin + width
                ranks = (*leading, rank)
            yield tuple(zip(self.ids[begin:end], self.logprobs[begin:end], ranks, strict=True))

    def part(self, begin: int, end: int) -> Scores:
        """Return the scores of the tokens from `begin` up to `end`."""
        first = begin * self.width
        last = end * self.width
        return Scores(
            self.width, self.ids[first:last], self.logprobs[first:last], self.ranks[begin:end]
        )

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Join parts of the same width."""
        joined = cls(parts[0].width if parts else 1, array("i"), array("f"), array("i"))
        for part in parts:
            assert part.width == joined.width
            joined.ids.extend(part.ids)
            joined.logprobs.extend(part.logprobs)
            joined.ranks.extend(part.ranks)
        return joined


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a model that pools makes of a prompt: an embedding, or a number for each class.

    values  float32 [size]
    """

    values: array[float]


@dataclass
class CompletionOutput:
    """One completion. `stop_reason` is the stop string, or the id of the request's stop_token_ids,
    that ended it; None where the model ended it by itself or a limit did.

    `error` says why a completion with finish reason ERROR has no more tokens; it is None for all
    others.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the generated tokens, or None when log-probabilities were not asked for."""
        if self.logprobs is None:
            return None
        return sum(
            entry[token].logprob for entry, token in zip(self.logprobs, self.token_ids, strict=True)
        )


@dataclass
class RequestOutput:
    """Everything known about a request so far. `prompt` is None when token ids were given.

    `prompt_logprobs[0]` is None: nothing precedes the first token. `num_cached_tokens` prompt
    tokens came from the prefix cache. `pooled` is what pooling was asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    pooled: Pooled | None = None


@dataclass
class EmbeddingOutput:
    """A vector of the prompt, float32."""

    embedding: list[float]


@dataclass
class ClassificationOutput:
    """A number for each class: probabilities, unless logits were asked for."""

    probs: list[float]


@dataclass
class ScoringOutput:
    """How well two texts fit together: what the model gives the pair, or the cosine of their
    embeddings.
    """

    score: float


PooledOutput = TypeVar("PooledOutput")


@dataclass
class PoolingRequestOutput(Generic[PooledOutput]):
    """What came of one prompt of `LLM.embed`, `classify` or `score`. `num_cached_tokens` prompt tokens
    came from the prefix cache; of a score by two embeddings, `prompt_token_ids` are those of both.
    """

    request_id: str
    outputs: PooledOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class CompletionDelta:
    """The news of one completion since its last delta: tokens, complete characters of text,
    log-probabilities.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds that a request spent, by the engine's clock: waiting for its first step, until its
    first token, and after it.

    Their sum is the time from `add` to its end. A phase that a request never reached is 0: one that
    ends before its first step has only `queued`, one that ends without a token no `decode`.
    `preemptions` counts how often its completions lost their blocks, `drafted` and `accepted` the
    tokens that were drafted for them and those of them that were drawn.
    """

    queued: float
    prefill: float
    decode: float
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RequestDelta:
    """The news of a request: the completions that advanced, and scores of its prompt.

    `scores` begin with the prompt's second token: nothing precedes the first. None: they are not
    asked for, or the delta has none. `times` and `pooled` come with the last delta.
    """

    request_id: str
    outputs: list[CompletionDelta]
    finished: bool
    scores: Scores | None = None
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    pooled: Pooled | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store below the cache counts, in blocks unless named otherwise.

    memory_hits, disk_hits      blocks that were brought in, by the tier that had them
    misses                      blocks that were to be brought in, and could not be read
    tokens                      prompt tokens that were found in the store, and not in the pool
    stored                      blocks that were written
    dropped                     blocks that were to be written and were not: evicted before, or no
                                room
    corrupt                     blocks that were damaged
    errors                      failures of the disk
    memory_bytes, disk_bytes    bytes that the tiers hold now; the disk's are those of all engines
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    tokens: int = 0
    stored: int = 0
    dropped: int = 0
    corrupt: int = 0
    errors: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of an engine now and totals since its start; counts of tokens unless named otherwise.

    running, waiting          sequences now
    capacity_tokens           that the cache has room for
    held_tokens               of the cache's capacity, in blocks that requests hold now
    reusable_tokens           in blocks that no request holds, kept for prefix hits
    prefix_queries, _hits     prompt tokens looked up in the prefix cache, and found there, at a
                              sequence's first step
    prompt, generated         tokens of prompts that were computed or found, and tokens drawn
    preemptions               how often a sequence lost its blocks
    failed                    completions that ended with finish reason ERROR
    nans, clipped             values stored in the cache that were NaN, or beyond the range of their
                              scale
    drafted, accepted         tokens drafted, and those of them that were drawn (`--speculate`)
    drafted_by, accepted_by   the same by what drafted them: 'text', 'grammar', or the method of a head
                              ('draft_model', 'mtp', 'eagle3'); what drafts here alone has an entry
    store                     what the store below the cache counts; None without one
    running_adapters          names of the adapters that running sequences have, in order
    waiting_adapters          and those of waiting ones

    A prompt with n completions counts for each of them. Tokens that are computed again after a
    preemption do not count again. Where groups of layers have blocks of their own, held and
    reusable tokens are those of the group that is fullest, as its share of `capacity_tokens`; so
    their sum is never more than that. `nans` and `clipped` may be up to a second old.
    """

    running: int
    waiting: int
    capacity_tokens: int
    held_tokens: int
    reusable_tokens: int
    prefix_queries: int
    prefix_hits: int
    prompt: int
    generated: int
    preemptions: int
    failed: int
    nans: int
    clipped: int
    drafted: int = 0
    accepted: int = 0
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    accepted_by: Mapping[str, int] = field(default_factory=dict)
    store: StoreStats | None = None
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
