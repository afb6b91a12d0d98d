"""Commands to an engine's loop, and the events that come from it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from freight.cache.events import CacheChanged
from freight.engine.adapters import LoadedAdapter, LoRARequest
from freight.errors import FreightError, RequestError, shown
from freight.outputs import EngineStats, RequestDelta
from freight.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request. Answered by `Accepted` or `Refused`.

    adapter  by its name, or to be loaded first. The request has the version of this moment, from its
             first token to its last. None: the model alone
    """

    request_id: str
    prompt: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request and forget it; nothing more comes of it. An unknown id is ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter under a name, or replace the one that has it. Answered by `AdaptersAre`.

    fetched  its folder on this machine, or why there is none; None: not looked for yet
    """

    command_id: str
    name: str
    path: str
    fetched: str | FreightError | None = None


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Take an adapter's name away. Answered by `AdaptersAre`."""

    command_id: str
    name: str


class Action(StrEnum):
    """What a `Change` does, with its value.

    UPDATE        load other weights of the same model: a folder or a hub id
    SLEEP         give memory back: a level of `renewal.Sleep`
    WAKE_UP       take it again, down to a level
    RESET_PREFIX_CACHE  find no block of the cache again
    END_ALL       end every request with finish reason ABORT
    FREEZE, THAW  take no steps, and take them again
    """

    UPDATE = "update"
    SLEEP = "sleep"
    WAKE_UP = "wake up"
    RESET_PREFIX_CACHE = "reset prefix cache"
    END_ALL = "end all"
    FREEZE = "freeze"
    THAW = "thaw"


def level_of_tags(tags: Sequence[str] | None) -> int:
    """Return the level of sleep that is left when vLLM's `tags` wake up: 1 without the cache's memory.
    Raises RequestError for another tag.
    """
    for tag in tags or ():
        if tag not in ("weights", "kv_cache"):
            raise RequestError(f"tags has {shown(tag)}; it may have 'weights' and 'kv_cache'")
    return int(tags is not None and "kv_cache" not in tags)


@dataclass(frozen=True, slots=True)
class Change:
    """Change the engine between two steps. Answered by `Changed`."""

    command_id: str
    action: Action
    value: str | int = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop after the step under way."""


Command = Add | Abort | LoadAdapter | UnloadAdapter | Change | Stop


@dataclass(frozen=True, slots=True)
class Accepted:
    """Requests that are queued: those that came together."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be served, and why."""

    request_id: str
    error: FreightError


@dataclass(frozen=True, slots=True)
class AdaptersAre:
    """The adapters that are loaded now: after a command, and where a request loaded its own.

    command_id  of the command that this answers; "": of none
    error       why the command changed nothing
    """

    loaded: tuple[LoadedAdapter, ...]
    command_id: str = ""
    error: FreightError | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """What a `Change` came to.

    fingerprint  of the weights of now
    sleep_level  how deep the engine sleeps now
    error        why nothing was changed
    """

    command_id: str
    fingerprint: str
    sleep_level: int
    error: FreightError | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """What is new of each request, and the steps since the last event: seconds, and tokens that
    were computed.
    """

    deltas: list[RequestDelta]
    steps: list[tuple[float, int]]


Event = Accepted | Refused | AdaptersAre | Changed | Stepped | CacheChanged | EngineStats
