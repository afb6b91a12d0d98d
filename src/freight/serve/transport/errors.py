"""ApiError: a failure with an HTTP status, before each API gives it a shape."""

from __future__ import annotations

from collections.abc import Mapping

_TYPES = {  # status -> OpenAI's type of error
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_TRANSIENT = (408, 429, 503)  # statuses of failures for which a retry may succeed


class ApiError(Exception):
    """One request's failure, with its HTTP status.

    message  for a person: names the thing, the value and the way out; no path, address or traceback
    param    the field of the request that is at fault, such as "messages[2].role"
    code     for a program, such as "context_length_exceeded"
    headers  further headers of the answer, such as Retry-After
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = _TYPES.get(status, "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status >= 500 and status not in _TRANSIENT:
            # OpenAI's clients retry every request that fails with 500 or more. These would fail
            # again.
            self.headers.setdefault("x-should-retry", "false")

    def openai_body(self) -> dict[str, object]:
        """Return the error envelope of OpenAI's API."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def took_too_long() -> ApiError:
    """Return the error of an answer whose time limit has passed: `timeout_s` or `--request-timeout`."""
    return ApiError(
        504,
        "the answer took longer than timeout_s or this server allows; ask for fewer tokens",
        code="timeout",
    )
