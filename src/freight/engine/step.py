"""A step as the Scheduler gives it: chunks of requests, and the blocks that they are stored into;
and the modes in which an engine computes steps. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from freight.engine.request import Request


class Mode(StrEnum):
    """What an engine may do with a step. A pass can be repeated where layers keep keys and values
    alone, whose slots are written again: only there is a step launched early.
    """

    ONCE = "once"  # layers keep states: a pass that fails loses its step
    REPEATABLE = "repeatable"  # a pass that fails is repeated in parts
    OVERLAPPED = "overlapped"  # and a step is launched before the tokens of the last are known

    @property
    def repeats(self) -> bool:
        """Whether a forward pass can be computed again."""
        return self is not Mode.ONCE


# made for every row of every step: a frozen dataclass takes three times as long
class ScheduledChunk(NamedTuple):
    """Compute the known tokens start … start + num_tokens - 1 of `request`, storing into
    `block_ids`.

    `block_ids` are the block tables of the sequence, by cache group, up to the end of the chunk.
    With `samples`, the last row's logits give the request's next token.

    drafts           guesses of the tokens behind, stored and computed as if they were known.
                     `block_ids` have room for them. Only a chunk of one token that samples has any
    most_drafts      drafts that a head may make for it, for which `block_ids` have room; 0 where
                     there are drafts already
    drafted_by       what guessed `drafts`: `Drafts.source`, or the head's method; '' without any
    num_preemptions  of the request, when the chunk was scheduled
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    samples: bool
    drafts: tuple[int, ...] = ()
    most_drafts: int = 0
    drafted_by: str = ""
    num_preemptions: int = 0

    @property
    def is_wanted(self) -> bool:
        """Whether the request still goes on from this chunk: it has not ended since, nor lost its
        blocks.
        """
        request = self.request
        return not request.is_finished and request.num_preemptions == self.num_preemptions

    @classmethod
    def of(cls, request: Request, start: int, num_tokens: int) -> ScheduledChunk:
        """Of a request that holds the blocks for it."""
        samples = start + num_tokens == request.num_tokens < request.token_limit
        blocks = request.held.block_ids
        return cls(
            request, start, num_tokens, blocks, samples, num_preemptions=request.num_preemptions
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. `preempted` lost their blocks while it was scheduled, and are not part of
    it.

    admitted    the requests whose first step it is
    alone       it has one chunk, of a request whose step was lost before (`Scheduler.lose`)
    microbatch  whose step it is (`Scheduler.schedule`)
    """

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[Request, ...]
    admitted: tuple[Request, ...] = ()
    alone: bool = False
    microbatch: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens that it computes; drafts do not count."""
        return sum(chunk.num_tokens for chunk in self.chunks)
