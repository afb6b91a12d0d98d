"""Recovery from a lost step: its requests compute their tokens again, each in steps of its own, until
they are past it. One that fails again has failed alone. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freight.engine.request import Request
from freight.engine.step import ScheduledChunk


class Recovery:
    """The requests of a step that was lost, while they are not past it."""

    def __init__(self) -> None:
        # request id -> tokens that the lost step would have computed, by order
        self._ends: dict[str, int] = {}

    def begin(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Take in the chunks of a step that was lost."""
        assert not self._ends, (
            "a step of one request, computed alone, is not lost: the request fails"
        )
        for chunk in sorted(chunks, key=lambda chunk: chunk.request.order):
            self._ends[chunk.request.request_id] = chunk.start + chunk.num_tokens

    def reset(self) -> None:
        self._ends = {}

    def suspect(self, requests: Mapping[str, Request]) -> Request | None:
        """Return the request to compute alone, if there is one: the last in order that is not past
        the step. requests: the unfinished ones, by id.
        """
        while self._ends:
            name, end = next(reversed(self._ends.items()))
            request = requests.get(name)
            if request is not None and request.num_computed_tokens < end:
                return request
            del self._ends[name]
        return None
