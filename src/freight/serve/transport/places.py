"""Places for connections: their number, eviction when they run out, and socket options.

/health is answered even when all places are taken: a few spare ones are kept for it. A connection
gives way to a new one only while no answer is computed for it: the one that is idle longest, else
the one whose body comes slowest. So neither idle clients nor endless bodies lock others out.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

from freight.serve.transport.http_limits import HttpLimits

try:
    import resource
except ImportError:  # not on Windows, which has no such limit either
    resource = None  # type: ignore[assignment]

SPARE = 16  # places beyond the limit, for `asks_for_health` alone
_OTHER_FILES = 64  # descriptors that the process needs besides connections
# Bytes credited to a body when it begins, so that a new one is not the slowest.
_BEGUN = 16 << 10
_HEALTH = re.compile(rb"(?:GET|HEAD) /(?:health|ping|metrics)(?:\?[^ ]*)? HTTP/1\.[01]\r\n")

_log = logging.getLogger(__name__)


class Holder(Protocol):
    """A connection that holds a place. Times are of the event loop.

    is_idle     no answer is computed for it, and no body is expected
    idle_since  when the last answer ended, or the connection began
    body        (start time, bytes received) of an incomplete body; None: there is none
    """

    @property
    def is_idle(self) -> bool: ...
    @property
    def idle_since(self) -> float: ...
    @property
    def body(self) -> tuple[float, int] | None: ...


H = TypeVar("H", bound=Holder)


def gives_way(holders: Iterable[H], now: float) -> H | None:
    """Return the connection whose place may be reused, or None if answers are computed for all."""
    holders = list(holders)
    idle = [holder for holder in holders if holder.is_idle]
    if idle:
        return min(idle, key=lambda holder: holder.idle_since)

    def speed(holder: H) -> float:
        assert holder.body is not None
        begun, received = holder.body
        return (_BEGUN + received) / max(now - begun, 1e-3)

    return min((holder for holder in holders if holder.body is not None), key=speed, default=None)


def asks_for_health(head: bytes, has_body: bool) -> bool:
    """Return whether a request's head asks for a path that operators need of a full server."""
    return not has_body and _HEALTH.match(head) is not None


def fitted(limits: HttpLimits) -> HttpLimits:
    """Reduce `max_connections` to the open files that this process may have (RLIMIT_NOFILE), with a
    warning.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else -1
    room = sys.maxsize if files < 0 else max(files - _OTHER_FILES - SPARE, 1)  # -1: RLIM_INFINITY
    if limits.max_connections <= room:
        return limits
    _log.warning(
        "%d connections at most, not the %d of --max-connections: this process may have %d open files (ulimit -n)",
        *(room, limits.max_connections, files),
    )
    return replace(limits, max_connections=room)


def set_options(transport: asyncio.Transport, limits: HttpLimits) -> None:
    """Set the options of a TCP connection: no delay, and detection of clients that are gone."""
    options = transport.get_extra_info("socket")
    if options is None or options.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # uvloop does not set this on a socket that it is given. Without it the body of an answer waits
    # until the client has acknowledged the head, which it delays by 40 ms.
    options.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Probes also while nothing is written: a machine that is gone sends nothing.
    options.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(round(limits.write_seconds), 1)
    values = {
        "TCP_KEEPIDLE": seconds,
        "TCP_KEEPINTVL": 10,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * seconds,
    }
    for name, value in values.items():
        if hasattr(socket, name):
            options.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
