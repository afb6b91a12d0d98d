"""One step's chunks through the model and the sampler: what each came to. Changes no request.

Whatever goes wrong stays with its chunk. A row without a usable result says so in its own; when the step fails as a
whole, it is computed once more in halves, and the chunks of a half that fails again get the error. A row has the same
bits whatever others are computed beside it, so a repeated half gives what the whole would have given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner, StepRows
from freight.engine.sampler import LogprobEntry, Sampled, SamplingRow, prompt_logprobs, sample
from freight.engine.scheduler import ScheduledChunk

SCORED_AT_ONCE = 256  # rows of logits that log-probabilities of a prompt hold at once; 8,192 x 152k would be 5 GB

logger = logging.getLogger("freight")


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """A chunk to compute. `row` is what its token is drawn with.

    `num_scored` counts the log-probabilities of prompt tokens that are there already, the first token's None included;
    None when they are not wanted.
    """

    chunk: ScheduledChunk
    row: SamplingRow
    num_scored: int | None

    @property
    def scores(self) -> bool:
        return self.num_scored is not None and self.chunk.start < self.chunk.request.num_prompt_tokens

    def to_slice(self) -> SequenceSlice:
        chunk = self.chunk
        tokens = chunk.request.tokens(chunk.start, chunk.start + chunk.num_tokens)
        logits = Logits.ALL if self.scores else Logits.LAST if chunk.samples else Logits.NONE
        return SequenceSlice(tokens, chunk.start, chunk.block_ids, logits)


@dataclass(slots=True)
class ChunkResult:
    """`sampled` is None for a chunk that does not sample; `scored` are the further log-probabilities of its prompt.

    With `error` the request cannot go on, and the rest means nothing.
    """

    sampled: Sampled | None = None
    scored: Sequence[tuple[LogprobEntry, ...]] = ()
    error: str | None = None


def compute(runner: ModelRunner, work: Sequence[ChunkWork]) -> list[ChunkResult]:
    """A result for each chunk. Raises no Exception of the model, the sampler or the kernels."""
    try:
        return _compute(runner, work) if work else []
    except Exception as error:
        if len(work) == 1:
            return _failed(work, error)
        logger.warning("a step of %d sequences failed and is tried again in halves: %s", len(work), _describe(error))
    results: list[ChunkResult] = []
    for half in (work[: len(work) // 2], work[len(work) // 2 :]):
        try:
            results += _compute(runner, half)
        except Exception as error:
            results += _failed(half, error)
    return results


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(work: Sequence[ChunkWork], error: Exception) -> list[ChunkResult]:
    logger.warning("a step failed: %s", _describe(error), exc_info=error)
    return [ChunkResult(error=f"its step failed: {_describe(error)}") for _ in work]


@torch.inference_mode()
def _compute(runner: ModelRunner, work: Sequence[ChunkWork]) -> list[ChunkResult]:
    rows = runner.run([one.to_slice() for one in work])
    ends = list(accumulate(rows.num_rows))
    results = [
        _score(one, rows, end - count) if one.scores else ChunkResult()
        for one, end, count in zip(work, ends, rows.num_rows, strict=True)
    ]
    sampling = [index for index, one in enumerate(work) if one.chunk.samples]
    if sampling:
        logits = rows.logits([ends[index] - 1 for index in sampling])
        for index, sampled in zip(sampling, sample(logits, [work[index].row for index in sampling]), strict=True):
            results[index].sampled = sampled
            results[index].error = results[index].error or sampled.error
    return results


def _score(work: ChunkWork, rows: StepRows, first_row: int) -> ChunkResult:
    """Log-probabilities of the prompt tokens that follow the chunk's own; `first_row` of `rows` is its first."""
    chunk, params = work.chunk, work.chunk.request.params
    assert work.num_scored is not None
    # Entries that are there already are skipped: the prompt is computed again after a preemption.
    target = max(work.num_scored, chunk.start + 1)
    end = min(chunk.start + chunk.num_tokens + 1, chunk.request.num_prompt_tokens)
    scored: list[tuple[LogprobEntry, ...]] = []
    for position in range(target, end, SCORED_AT_ONCE):
        targets = chunk.request.prompt_token_ids[position : min(position + SCORED_AT_ONCE, end)]
        begin = first_row + position - 1 - chunk.start  # the row before a token judges it
        logits = rows.logits(range(begin, begin + len(targets)))
        ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        for entries in prompt_logprobs(logits, ids, params.prompt_logprobs or 0):
            if entries is None:
                return ChunkResult(error="the model gave NaN or infinite logits for its prompt")
            scored.append(entries)
    return ChunkResult(scored=scored)
