"""One step's chunks through the model and the sampler: what each came to. Changes no request.

Whatever goes wrong stays with its chunk. A row without a usable result says so in its own result. A
forward pass that raises is repeated in halves, and each half that raises again in halves of its
own, until a chunk fails alone: that one gets the error. A row has the same bits whatever other rows
the pass has, so the others get what the full step would have given. A step of n chunks, k of which
fail, takes at most 1 + 2k log2(n) passes (rounded up), and at most 2n. Where layers keep states, a
pass is not repeated: a state that a failed one has changed would have its tokens twice. The step is
lost, and `Scheduler.lose` has its requests compute their tokens again, from sound blocks, one at a
time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freight.engine.pooled import PooledPart, PooledPrompt
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner, StepRows
from freight.engine.sampler import Sampled, SamplingRow, prompt_logprobs, sample
from freight.engine.stated import DrawnAgain, StatedAnswer
from freight.engine.step import ScheduledChunk
from freight.errors import RankError
from freight.outputs import Scores

# rows of logits that log-probabilities of a prompt hold at once; 8,192 x 152k would be 5 GB
SCORED_AT_ONCE = 256

logger = logging.getLogger("freight")


class ChunkWork(NamedTuple):
    """A chunk to compute. `row` is what its token is drawn with.

    `num_scored` counts the log-probabilities of prompt tokens that are there already, the first
    token's None included; None when they are not wanted. The tokens of `stated` are drawn again,
    as far as the chunk has rows for them. `pooled`: the prompt is pooled, and nothing drawn.
    """

    chunk: ScheduledChunk
    row: SamplingRow
    num_scored: int | None
    stated: StatedAnswer | None = None
    pooled: PooledPrompt | None = None

    @property
    def scores(self) -> bool:
        return (
            self.num_scored is not None and self.chunk.start < self.chunk.request.num_prompt_tokens
        )

    @property
    def redraws(self) -> bool:
        """Whether the chunk has rows for tokens of the answer that are not drawn yet."""
        return self.stated is not None and bool(self.stated.to_draw(self.chunk))

    @property
    def num_drawn(self) -> int:
        """Rows of which a token may be drawn: the last known token's and those of its drafts."""
        if not self.chunk.samples:
            return 0
        return 1 + len(self.chunk.drafts)

    def without_drafts(self) -> ChunkWork:
        if not self.chunk.drafts:
            return self
        return self._replace(chunk=self.chunk._replace(drafts=()))

    def to_slice(self) -> SequenceSlice:
        chunk = self.chunk
        tokens = chunk.request.tokens(chunk.start, chunk.start + chunk.num_tokens)
        if chunk.drafts:
            assert chunk.num_tokens == 1, "drafts are behind a request that decodes"
            tokens = (*tokens, *chunk.drafts)
        slot = chunk.request.adapter_slot
        if chunk.drafts:
            return SequenceSlice(tokens, chunk.start, chunk.block_ids, Logits.ALL, slot)
        logits = Logits.NONE
        second_text = None
        if self.pooled is not None:
            logits = self.pooled.rows_of(chunk)
            second_text = self.pooled.params.first_segment
        elif self.scores or self.redraws:
            logits = Logits.ALL
        elif chunk.samples:
            logits = Logits.LAST
        return SequenceSlice(tokens, chunk.start, chunk.block_ids, logits, slot, second_text)


@dataclass(slots=True)
class ChunkResult:
    """`sampled` are the tokens drawn: none for a chunk that does not sample, and one more for each
    draft that came true. `scored` are the further scores of its prompt. `redrawn` is what
    was drawn of a stated answer. `pooled` is what is known of a pooled prompt. `features` are those of
    the chunk's rows, drafts included, for a head that drafts.

    With `error` the request cannot go on, and the rest means nothing.
    """

    sampled: Sequence[Sampled] = ()
    scored: Scores | None = None
    redrawn: DrawnAgain | None = None
    pooled: PooledPart | None = None
    features: Tensor | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """A result for each chunk of a step, in order. `repeated`: a forward pass raised, so the step
    took several.

    lost   a forward pass raised that cannot be repeated: there are no results, and states may be
           changed
    """

    chunks: Sequence[ChunkResult]
    repeated: bool = False
    lost: bool = False


def compute(runner: ModelRunner, work: Sequence[ChunkWork], repeatable: bool = True) -> StepResult:
    """Compute `work`. Raises no Exception of the model, the sampler or the kernels but RankError;
    others, as Ctrl-C, pass through.

    A chunk has an `error` only if it failed twice, the second time alone: what passes when it is
    repeated ends nobody. If a pass is not `repeatable`, a step in which one fails is lost.
    """
    if not work:
        return StepResult([])
    try:
        return StepResult(_compute(runner, work))
    except RankError:
        raise
    except Exception as error:
        if not repeatable:
            logger.warning(
                "a step of %d sequences failed, and each computes its tokens again alone: %s",
                len(work),
                _describe(error),
            )
            return StepResult([], repeated=True, lost=True)
        logger.warning(
            "a step of %d sequences failed and is repeated in parts: %s",
            len(work),
            _describe(error),
        )
    # Outside of `except`: the traceback holds the failed pass's tensors, and memory may be what it
    # lacked.
    logged: set[str] = set()
    work = [item.without_drafts() for item in work]
    if len(work) == 1:
        return StepResult(_isolate(runner, work, logged), repeated=True)
    return StepResult(_isolate_halves(runner, work, logged), repeated=True)


def compute_alone(runner: ModelRunner, work: ChunkWork, logged: set[str]) -> StepResult:
    """Compute one chunk of a request whose step was lost before; it has an `error` if it fails
    again.

    `logged`: the errors of such chunks that are in the log already.
    """
    return StepResult(_isolate(runner, [work], logged))


def _isolate(runner: ModelRunner, work: Sequence[ChunkWork], logged: set[str]) -> list[ChunkResult]:
    """Return a result for each chunk; those that fail alone have an error. `logged`: the errors of
    the step so far.
    """
    try:
        return _compute(runner, work)
    except RankError:
        raise
    except Exception as error:
        if len(work) == 1:
            reason = f"its step failed: {_describe(error)}"
            if reason not in logged:  # once: a fault of the model fails every sequence
                logger.warning(
                    "a sequence failed alone, and ends: %s", _describe(error), exc_info=error
                )
            logged.add(reason)
            return [ChunkResult(error=reason)]
    return _isolate_halves(runner, work, logged)


def _isolate_halves(
    runner: ModelRunner, work: Sequence[ChunkWork], logged: set[str]
) -> list[ChunkResult]:
    middle = len(work) // 2
    results = _isolate(runner, work[:middle], logged)
    return results + _isolate(runner, work[middle:], logged)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@torch.inference_mode()
def _compute(runner: ModelRunner, work: Sequence[ChunkWork]) -> list[ChunkResult]:
    rows = runner.run([item.to_slice() for item in work])
    results = []
    drawn: list[int] = []  # rows
    sampling = []
    end = 0
    last_token = 0
    for item, count in zip(work, rows.num_rows, strict=True):
        first_row = end
        end += count
        result = ChunkResult()
        first_token = last_token
        last_token += item.chunk.num_tokens + len(item.chunk.drafts)
        if item.scores:
            result = _score(item, rows, first_row)
        if rows.features is not None:
            result.features = _own_features(rows, first_token, last_token)
        if item.stated is not None and item.redraws:
            result.redrawn = item.stated.draw(item.chunk, rows, first_row)
        if item.pooled is not None:
            result.pooled = item.pooled.pool(item.chunk, rows, first_row)
            result.error = result.pooled.error
        results.append(result)
        if item.chunk.samples:
            drawn += range(end - item.num_drawn, end)
            sampling.append((item, result))
    if drawn:
        tokens = _draw(rows.logits(drawn), [item for item, _ in sampling])
        for (_, result), sampled in zip(sampling, tokens, strict=True):
            result.sampled = sampled
            result.error = result.error or sampled[0].error
    return results


def _draw(logits: Tensor, work: Sequence[ChunkWork]) -> list[list[Sampled]]:
    """Draw the next token of each chunk, and while that is its draft, the one behind.

    logits: float32 [rows, vocab_size], `num_drawn` rows of each chunk. A row is drawn as in a step
    of its own: from its position, its seed, and parameters that see the tokens before it. One
    behind a draft that has no token is left to that step, which says so.
    """
    firsts = []
    end = 0
    rows = []
    tokens: list[list[Sampled]] = []
    for item in work:
        firsts.append(end)
        end += item.num_drawn
        rows.append(item.row)
        tokens.append([])
    outputs: dict[int, list[int]] = {}  # of those with a draft that came true
    going = list(range(len(work)))
    depth = 0
    while going:
        chosen = logits
        if len(going) < len(logits):
            chosen = logits[[firsts[i] + depth for i in going]]
        following = []
        for i, sampled in zip(going, sample(chosen, [rows[i] for i in going]), strict=True):
            drafts = work[i].chunk.drafts
            if sampled.error is None or depth == 0:
                tokens[i].append(sampled)
            if sampled.error is not None or drafts[depth : depth + 1] != (sampled.token_id,):
                continue
            if depth == 0:
                outputs[i] = [*rows[i].output_token_ids]
                rows[i] = rows[i].fork(outputs[i])
            outputs[i].append(sampled.token_id)
            following.append(i)
        going = following
        depth = depth + 1
    return tokens


def _own_features(rows: StepRows, first: int, last: int) -> Tensor:
    """Return the features of these rows of a step, which keep no others alive and are not overwritten
    by the next step, as those of a captured one are.
    """
    assert rows.features is not None
    features = rows.features[first:last]
    if len(features) < len(rows.features) or rows.captured is not None:
        return features.clone()
    return features


def _score(work: ChunkWork, rows: StepRows, first_row: int) -> ChunkResult:
    """Log-probabilities of the prompt tokens that follow the chunk's own; `first_row` of `rows` is
    its first.
    """
    chunk = work.chunk
    params = work.chunk.request.params
    assert work.num_scored is not None
    # Entries that are there already are skipped: the prompt is computed again after a preemption.
    target = max(work.num_scored, chunk.start + 1)
    end = min(chunk.start + chunk.num_tokens + 1, chunk.request.num_prompt_tokens)
    scored: list[Scores] = []
    for position in range(target, end, SCORED_AT_ONCE):
        targets = chunk.request.prompt_token_ids[position : min(position + SCORED_AT_ONCE, end)]
        begin = first_row + position - 1 - chunk.start  # the row before a token judges it
        logits = rows.logits(range(begin, begin + len(targets)))
        ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        scores = prompt_logprobs(logits, ids, params.prompt_logprobs or 0)
        if scores is None:
            return ChunkResult(error="the model gave NaN or infinite logits for its prompt")
        scored.append(scores)
    if not scored:
        return ChunkResult()
    return ChunkResult(scored=Scores.joined(scored))
