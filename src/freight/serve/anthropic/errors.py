"""Errors in the shape of Anthropic's API, whose clients derive exceptions from status and type."""

from __future__ import annotations

from freight.serve.transport.errors import ApiError

PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> dict[str, object]:
    """Return the error envelope of Anthropic's API. It has no field for the parameter at fault;
    messages begin with it.
    """
    kind = _TYPES.get(error.status) or (
        "invalid_request_error" if error.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": error.message}}
