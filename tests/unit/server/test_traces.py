"""Spans of requests: which addresses are taken, what a span has, and how the log speaks of a collector
that takes none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import pytest
from tests.otlp_collector import Collector
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.outputs import RequestTimes
from freight.pooling import PoolingParams
from freight.sampling import SamplingParams
from freight.serve.observe import traces
from freight.serve.observe.traces import (
    TracedRequest,
    Traces,
    _SaidNowAndThen,
    attributes_of,
    read_endpoint,
    trace_headers,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_is_installed", lambda module: True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("https://h/", "https://h/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("http://h:4318/own?a=b", "http://h:4318/own?a=b"),
        ("http://h:4317/v1/traces", "http://h:4317/v1/traces"),
    ],
)
def test_an_address(given: str, read: str) -> None:
    assert read_endpoint(given, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}) == read


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "environ", "named"),
    [
        ("http://h:4317", {}, ["http://h:4317", "gRPC", "http://h:4318/v1/traces"]),
        ("grpc://h", {}, ["gRPC", "http://h:4318/v1/traces"]),
        ("grpc://[::1]:4317", {}, ["gRPC", "http://[::1]:4318/v1/traces"]),
        ("localhost:4318", {}, ["'localhost:4318'", "http://HOST:4318/v1/traces"]),
        ("http://h:99999", {}, ["99999", "http://HOST:4318/v1/traces"]),
        ("", {}, ["''", "http://HOST:4318/v1/traces"]),
        ("http://h", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["'grpc'", "http/protobuf"]),
        (
            "http://h",
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
            },
            ["'http/json'", "http/protobuf"],
        ),
    ],
)
def test_what_is_no_address(given: str, environ: Mapping[str, str], named: list[str]) -> None:
    with refuses(ConfigError, "--otlp-traces-endpoint", *named):
        read_endpoint(given, environ)


def test_a_password_is_not_repeated() -> None:
    for given in ("http://me:hidden@h", "http://me:hidden@h:99999"):
        with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_HEADERS") as refused:
            read_endpoint(given, {})
        assert "hidden" not in str(refused.value)


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "find_spec", lambda name: None)
    with refuses(
        ConfigError,
        "opentelemetry-sdk, opentelemetry-exporter-otlp-proto-http",
        "pip install '.[traces]'",
    ):
        read_endpoint("http://h", {})

    def no_parent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(traces, "find_spec", no_parent)
    with refuses(ConfigError, "pip install '.[traces]'"):
        read_endpoint("http://h", {})


def test_of_several_prompts_the_longest_time_counts() -> None:
    found = attributes_of(
        TracedRequest(
            "id",
            200,
            9.0,
            model="m",
            params=SamplingParams(max_tokens=5),
            times=[RequestTimes(1.0, 2.0, 4.0), RequestTimes(3.0, 1.0, 6.0)],
        )
    )
    assert {
        name.rpartition(".")[2]: value for name, value in found.items() if "time_in" in name
    } == {
        "time_in_queue": 3.0,
        "time_in_model_prefill": 2.0,
        "time_in_model_decode": 6.0,
        "time_in_model_inference": 7.0,
    }
    assert "error.type" not in found


def test_what_is_not_known_is_left_out() -> None:
    found = attributes_of(TracedRequest("id", 503, 0.0))
    assert found == {
        "gen_ai.request.id": "id",
        "gen_ai.latency.e2e": 0.0,
        "http.response.status_code": 503,
        "error.type": "503",
    }
    pooled = SamplingParams(max_tokens=0, pooling=PoolingParams())
    assert not any(
        "request.t" in name for name in attributes_of(TracedRequest("", 200, 0, params=pooled))
    )


def test_the_log_says_it_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    handler = _SaidNowAndThen("http://h/v1/traces", lambda: now[0])
    record = logging.LogRecord("opentelemetry.x", logging.WARNING, "", 0, "no %s", ("way",), None)
    with caplog.at_level(logging.WARNING, "freight"):
        for now[0] in range(130):
            handler.emit(record)
    assert caplog.messages == ["spans may not reach http://h/v1/traces: no way"] * 3


def test_a_span_that_cannot_be_made_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector() as collector:
        made = Traces(collector.url)
        broken: Any = TracedRequest("id", 200, float("nan"))
        with caplog.at_level(logging.WARNING, "freight"):
            made.record(broken)
            made.record(broken)
        made.record(TracedRequest("whole", 200, 1.0))
        made.close()
        made.close()
        assert [span.id for span in collector.spans] == ["whole"]
    assert len(caplog.messages) == 1


@pytest.mark.clock
def test_what_nobody_takes_is_dropped_at_once() -> None:
    """A full queue and an end beside a collector that hangs."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector(hangs=True) as collector:
        made = Traces(collector.url)
        began = time.monotonic()
        for number in range(5000):
            made.record(TracedRequest(str(number), 200, 1.0))
        assert time.monotonic() - began < 20
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < 4


def test_the_parent_is_that_of_the_context() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector() as collector:
        made = Traces(collector.url)
        for state in ("a=b", "=,=;;", "a=b,a=c", None):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            token = trace_headers.set(headers | ({} if state is None else {"tracestate": state}))
            made.record(TracedRequest("id", 200, 1.0))
            trace_headers.reset(token)
        made.record(TracedRequest("id", 200, 1.0))
        made.close()
        spans = collector.spans
    assert [span.parent for span in spans] == [PARENT] * 4 + [""]
    assert spans[0].state == "a=b"
    assert spans[1].state == ""


def test_a_variable_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with refuses(ConfigError, "--otlp-traces-endpoint", "OTEL_", "max_queue_size"):
        Traces("http://h:4318")
