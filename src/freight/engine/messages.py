"""Commands to an engine's loop, and the events that come from it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from freight.outputs import EngineStats, RequestDelta
from freight.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request. Answered by `Accepted` or `Refused`."""

    request_id: str
    prompt: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request and forget it; nothing more comes of it. An unknown id is ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop after the step under way."""


Command = Add | Abort | Stop


@dataclass(frozen=True, slots=True)
class Accepted:
    """Requests that are queued: those that came together."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be served, and why."""

    request_id: str
    error: str
    capacity: bool = False  # it would be served with a larger cache


@dataclass(frozen=True, slots=True)
class Stepped:
    """What is new of each request, and the steps since the last event: seconds, and tokens that
    were computed.
    """

    deltas: list[RequestDelta]
    steps: list[tuple[float, int]]


Event = Accepted | Refused | Stepped | EngineStats
