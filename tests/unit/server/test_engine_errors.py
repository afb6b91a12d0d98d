"""What the engine's process could not do is an answer with a status and a code."""

from __future__ import annotations

import pytest

from freight.errors import CapacityError, EngineError, FreightError, RequestError
from freight.serve.engine_errors import from_engine, not_ready
from freight.serve.processes.client import EngineState, NotReadyError, TooLongError


@pytest.mark.parametrize(
    ("state", "code", "retry"),
    [
        (EngineState.LOADING, "loading", "5"),
        (EngineState.READY, "loading", "5"),  # the process for chat templates is still started
        (EngineState.STALLED, "engine_stalled", "5"),
        (EngineState.ENDED, "engine_ended", None),
    ],
)
def test_an_engine_has_ended_only_where_it_has(
    state: EngineState, code: str, retry: str | None
) -> None:
    error = not_ready(state)
    assert (error.status, error.code, error.headers.get("Retry-After")) == (503, code, retry)
    assert from_engine(NotReadyError(state)).code == code


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no"), 400, None),
        (CapacityError("the cache holds 16 tokens"), 400, "cache_too_small"),
        (TooLongError("a frame of 5000 bytes"), 413, "request_too_large"),
        (EngineError("the answer is too long"), 500, None),
    ],
)
def test_each_error_has_its_status(error: FreightError, status: int, code: str | None) -> None:
    made = from_engine(error)
    assert (made.status, made.code, made.message) == (status, code, str(error))
