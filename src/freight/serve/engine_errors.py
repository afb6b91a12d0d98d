"""What the engine's process could not do, as answers of the server."""

from __future__ import annotations

from freight.errors import CapacityError, FreightError, RequestError
from freight.serve.processes.client import EngineState, NotReadyError, TooLongError
from freight.serve.transport.errors import ApiError

_CODES = {EngineState.ENDED: "engine_ended", EngineState.STALLED: "engine_stalled"}


def not_ready(state: EngineState) -> ApiError:
    """The answer while no request can be served: an engine may be ready before the rest of the
    server.
    """
    passes = state is not EngineState.ENDED  # what loads or is stalled may come
    return ApiError(
        503,
        str(NotReadyError(state)),
        code=_CODES.get(state, "loading"),
        headers={"Retry-After": "5"} if passes else None,
    )


def from_engine(error: FreightError) -> ApiError:
    """The answer to a request that `EngineClient` failed with `error`."""
    match error:
        case NotReadyError():
            return not_ready(error.state)
        case TooLongError():
            return ApiError(413, str(error), code="request_too_large")
        case CapacityError():
            return ApiError(400, str(error), code="cache_too_small")
        case RequestError():
            return ApiError(400, str(error))
    return ApiError(500, str(error))
