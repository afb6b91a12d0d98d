"""HttpLimits: every limit of the HTTP layer in one place, so that tests can use short times and
small sizes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """Limits on the sizes and the times of one client. Sizes in bytes, times in seconds.

    max_connections  open at once; above it an idle one gives way (`places.py`), or the new one gets
                     503
    head_bytes       request line and headers together; more is 431
    head_seconds     from the first byte of a request to the end of its headers; longer is 408
    body_bytes       more is 413
    body_seconds     without any byte of the body; longer is 408
    body_total       from the end of the headers to the end of the body; longer is 408
    idle_seconds     between requests; then the connection is closed
    write_seconds    without the client reading data that waits for it; then the connection is
                     dropped
    linger_seconds   without a byte, between an answer that ends a connection early and the close,
                     so that the client can read the answer
    held_bytes       of all bodies that are read or parsed at a time; more is 503
    json_depth       nesting of arrays and objects in a JSON body
    json_containers  arrays and objects in a JSON body
    json_names       names of one object in a JSON body
    number_digits    digits in a row outside strings in a JSON body
    """

    max_connections: int = 1024
    head_bytes: int = 16 << 10
    max_headers: int = 100
    head_seconds: float = 10.0
    body_bytes: int = 4 << 20
    held_bytes: int = 256 << 20
    body_seconds: float = 30.0
    body_total: float = 300.0
    idle_seconds: float = 60.0
    write_seconds: float = 60.0
    linger_seconds: float = 1.0
    json_depth: int = 64
    json_containers: int = 100_000
    json_names: int = 16_384  # making an object of 400,000 holds the interpreter for 0.15 s
    number_digits: int = 100  # at most 200, so that no number without an exponent is infinite
