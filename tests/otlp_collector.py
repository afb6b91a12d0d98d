"""A collector of OTLP over HTTP for tests: it reads what is sent with the protocol's own messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Span:
    """`status` is 0 (unset) or 2 (error); times are nanoseconds since 1970."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent: str
    state: str
    begin: int
    end: int
    status: int
    message: str
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Of the request."""
        return str(self.attributes["gen_ai.request.id"])


class Collector:
    """Takes spans at `url`. hangs: it reads them and does not answer; status: what it answers."""

    def __init__(self, hangs: bool = False, status: int = 200) -> None:
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        self._ending = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                collector.requests.append((self.path, headers, body))
                if hangs:
                    collector._ending.wait(300)
                with suppress(OSError):
                    self.send_response(status)
                    self.send_header("content-length", "0")
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def spans(self) -> list[Span]:
        return [span for _, headers, body in list(self.requests) for span in _spans(headers, body)]

    def wait_for(self, count: int, seconds: float = 60.0) -> list[Span]:
        """The spans, once there are so many, and no more."""
        end = time.monotonic() + seconds
        while len(self.spans) < count:
            assert time.monotonic() < end, self.spans
            time.sleep(0.02)
        assert len(self.spans) == count
        return self.spans

    def of(self, request_id: str, seconds: float = 60.0) -> Span:
        """The one span of a request."""
        end = time.monotonic() + seconds
        while not (found := [span for span in self.spans if span.id == request_id]):
            assert time.monotonic() < end, [span.id for span in self.spans]
            time.sleep(0.02)
        (span,) = found
        return span


def _spans(headers: Mapping[str, str], body: bytes) -> list[Span]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    assert headers["content-type"] == "application/x-protobuf"
    if headers.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Span(
            name=span.name,
            kind=span.kind,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            state=span.trace_state,
            begin=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            status=span.status.code,
            message=span.status.message,
            attributes=_values(span.attributes),
            resource=_values(group.resource.attributes),
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
