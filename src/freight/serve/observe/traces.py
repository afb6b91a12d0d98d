"""Traces: a span for each request, sent to a collector by OTLP over HTTP, with the name and the
attributes of vLLM 0.33 (`do_tracing` of its `v1/engine/output_processor.py`).

A span is made where an answer has ended, of times that are kept anyway. A thread of OpenTelemetry sends
spans in batches. Nobody waits for it: of the spans that wait, as many as OTEL_BSP_MAX_QUEUE_SIZE says
are held (2048), and beyond them the oldest are dropped. No span has text of a prompt or an answer, a
key, a salt, or the message of an error, which may quote a request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit, urlunsplit

from freight import __version__
from freight.errors import ConfigError, install, shown
from freight.outputs import RequestTimes
from freight.sampling import SamplingParams

logger = logging.getLogger("freight")

# The valid `traceparent` header of the request that is being handled, and its `tracestate`, by name.
trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)

NAME = "llm_request"
Attributes = dict[str, str | int | float | Sequence[str]]

_PACKAGES = {  # as they are installed -> as imported
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}
_PATH = "/v1/traces"
_GRPC_PORT = 4317
_CLOSE_SECONDS = 2.0
_QUIET_SECONDS = 60.0  # between lines of the log about a collector that takes nothing
_CLIENT_LEFT = 499


@dataclass(frozen=True)
class TracedRequest:
    """What a span says of a request that has ended.

    status        of the HTTP answer; 499: its client left
    seconds       from its arrival to its end
    route         of a refused request; `code` is that of its error, or of the error of an answer
    model         the name of the model or adapter, `params` the parameters of the first prompt
    first_token   seconds until it, of the prompt that had one first
    times         of the prompts that the engine has finished
    """

    request_id: str
    status: int
    seconds: float
    route: str | None = None
    code: str | None = None
    model: str | None = None
    params: SamplingParams | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    first_token: float | None = None
    times: Sequence[RequestTimes] = ()
    finish_reason: str | None = None


def read_endpoint(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the URL that spans are sent to: an address without a path gets OTLP's own. Raises ConfigError
    for what is no URL of OTLP over HTTP, and where the packages of the extra are missing.
    """
    if "@" in text:
        raise ConfigError(
            "--otlp-traces-endpoint has a name or a password in it: put it into OTEL_EXPORTER_OTLP_TRACES_HEADERS"
        )
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise ConfigError(f"--otlp-traces-endpoint is {shown(text)}; {_example('HOST')}") from None
    protocol = _protocol(environ)
    has_path = url.path not in ("", "/")
    if url.scheme in ("grpc", "grpcs") or (port == _GRPC_PORT and not has_path and host):
        raise ConfigError(
            f"--otlp-traces-endpoint is {shown(text)}, an address of gRPC; spans are sent over HTTP: {_example(host)}"
        )
    if url.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--otlp-traces-endpoint is {shown(text)}; {_example('HOST')}")
    if protocol not in (None, "http/protobuf"):
        raise ConfigError(
            f"--otlp-traces-endpoint: OTEL_EXPORTER_OTLP_PROTOCOL, or _TRACES_PROTOCOL, is {shown(protocol)}; spans "
            f"are sent as http/protobuf: set that, and {_example(host)}"
        )
    missing = [name for name, module in _PACKAGES.items() if not _is_installed(module)]
    if missing:
        raise ConfigError(f"--otlp-traces-endpoint needs {', '.join(missing)}: {install('traces')}")
    return urlunsplit(url if has_path else url._replace(path=_PATH))


def _example(host: str | None) -> str:
    host = host or "HOST"
    address = f"[{host}]" if ":" in host else host
    return f"give a URL as http://{address}:4318{_PATH}"


def _protocol(environ: Mapping[str, str]) -> str | None:
    return (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or None
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what it is a part of
        return False


class Traces:
    """Sends a span for each request that has ended. `record` may be called from any thread."""

    def __init__(self, endpoint: str) -> None:
        """Start the thread that sends. Raises ConfigError for variables OTEL_… that cannot be used."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = read_endpoint(endpoint)
        self._was_logged = False
        self._is_closed = False
        self._said = _SaidNowAndThen(url)
        log = logging.getLogger("opentelemetry")
        log.addHandler(self._said)
        log.propagate = False
        named = Resource.create({"service.name": "freight", "service.version": __version__})
        try:
            self._exporter = OTLPSpanExporter(endpoint=url)
            # the sampler is that of OTEL_TRACES_SAMPLER; without it the parent's flag decides
            self._provider = TracerProvider(
                resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
            )
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except (OSError, ValueError) as error:
            log.removeHandler(self._said)
            raise ConfigError(
                f"--otlp-traces-endpoint: a variable OTEL_… cannot be used: {error}; unset or correct it"
            ) from None
        self._tracer = self._provider.get_tracer("freight", __version__)
        logger.info("spans of requests are sent to %s", url)

    def record(self, request: TracedRequest) -> None:
        """Make the span of a request that ends now, below the one that its headers name. Raises nothing."""
        try:
            self._record(request)
        except Exception:
            if not self._was_logged:
                logger.exception("a span was not made; further ones are not logged")
            self._was_logged = True

    def _record(self, request: TracedRequest) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = Context()
        headers = trace_headers.get()
        if headers is not None:
            parent = TraceContextTextMapPropagator().extract(headers, parent)
        end = time.time_ns()
        span = self._tracer.start_span(
            NAME,
            parent,
            SpanKind.SERVER,
            attributes_of(request),
            start_time=end - int(request.seconds * 1e9),
        )
        if request.status >= 400 and request.status != _CLIENT_LEFT:
            span.set_status(StatusCode.ERROR, _cause(request))
        span.end(end)

    def close(self) -> None:
        """Send what waits, within 2 seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_SECONDS)
        log = logging.getLogger("opentelemetry")
        log.removeHandler(self._said)
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        if ending.is_alive():
            logger.warning("the last spans were not sent: their collector does not take them")
            self._exporter.shutdown()  # it tries no more


def attributes_of(request: TracedRequest) -> Attributes:
    """Return the attributes of a span. Of times that are not known there is none. Of the prompts of one
    request, which run side by side, the longest time counts.
    """
    values: dict[str, str | int | float | Sequence[str] | None] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": request.model,
        "gen_ai.latency.e2e": request.seconds,
        "gen_ai.latency.time_to_first_token": request.first_token,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": request.generated_tokens,
        "http.route": request.route,
        "http.response.status_code": request.status,
    }
    if request.finish_reason is not None:
        values["gen_ai.response.finish_reasons"] = (request.finish_reason,)
    if request.status >= 400:
        values["error.type"] = _cause(request)
    params = request.params
    if params is not None and params.pooling is None:
        values["gen_ai.request.n"] = params.n
        values["gen_ai.request.max_tokens"] = params.max_tokens
        values["gen_ai.request.temperature"] = params.temperature
        values["gen_ai.request.top_p"] = params.top_p
    times = request.times
    if times:
        of_model = [of.prefill + of.decode for of in times]
        values["gen_ai.latency.time_in_queue"] = max(of.queued for of in times)
        values["gen_ai.latency.time_in_model_prefill"] = max(of.prefill for of in times)
        values["gen_ai.latency.time_in_model_decode"] = max(of.decode for of in times)
        values["gen_ai.latency.time_in_model_inference"] = max(of_model)
    return {name: value for name, value in values.items() if value is not None}


def _cause(request: TracedRequest) -> str:
    return request.code or request.finish_reason or str(request.status)


class _SaidNowAndThen(logging.Handler):
    """Passes on what OpenTelemetry says, at most a line a minute: it says something for each batch."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._url = url
        self._clock = clock
        self._next = clock()

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _QUIET_SECONDS
        logger.warning("spans may not reach %s: %s", self._url, record.getMessage())
