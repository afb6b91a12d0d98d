"""A collector beside `freight serve`: what spans it gets, whether it answers or not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.asking import ONE_BY_ONE, Server
from tests.changed_demos import changed_demo
from tests.otlp_collector import Collector, Span
from tests.refusals import assert_names
from tests.serving import ServeProcess

KEY = "secret-of-tests"
OPTIONS = ["--kv-cache-memory", "16MiB", "--threads", "1", "--restart-engine"]
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "def main(unmistakable"
SERVER_KIND = 2
ERROR = 2
LATENCIES = (
    "time_to_first_token",
    "e2e",
    "time_in_queue",
    "time_in_model_prefill",
    "time_in_model_decode",
    "time_in_model_inference",
)


@pytest.fixture(autouse=True, scope="module")
def _packages() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def process(collector: Collector) -> Iterator[ServeProcess]:
    options = [
        *OPTIONS,
        *ONE_BY_ONE,
        "--otlp-traces-endpoint",
        collector.url,
        "--api-key",
        f"a:{KEY}",
    ]
    with ServeProcess("demo", options, environ={**os.environ, **FAST}) as made:
        made.wait_until_healthy()
        yield made
        assert made.stop() == 0, made.said[-2000:]
        assert "Traceback" not in made.said


@pytest.fixture
def server(process: ServeProcess) -> Server:
    return Server(process.url, {"Authorization": f"Bearer {KEY}"})


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


def named(request_id: str, **headers: str) -> dict[str, str]:
    return {"x-request-id": request_id, **headers}


def check_answer(span: Span, tokens: int = 4) -> None:
    """An answer that has ended well."""
    values = span.attributes
    assert (span.name, span.kind, span.status) == ("llm_request", SERVER_KIND, 0)
    seconds = {name: values[f"gen_ai.latency.{name}"] for name in LATENCIES}
    assert all(value >= 0 for value in seconds.values())
    assert seconds["time_to_first_token"] <= seconds["e2e"]
    in_model = seconds["time_in_model_prefill"] + seconds["time_in_model_decode"]
    if tokens == 4:  # of several prompts each time is the longest
        assert seconds["time_in_model_inference"] == pytest.approx(in_model)
    assert 0 < seconds["time_in_model_inference"] <= in_model + 1e-6
    assert (span.end - span.begin) / 1e9 == pytest.approx(seconds["e2e"], abs=1e-5)
    assert abs(span.end / 1e9 - time.time()) < 300
    assert values["gen_ai.usage.completion_tokens"] == tokens
    assert values["gen_ai.usage.prompt_tokens"] > 0
    assert values["gen_ai.response.model"] == "demo"
    assert values["gen_ai.response.finish_reasons"] == ["length"]
    assert values["http.response.status_code"] == 200
    assert span.resource["service.name"] == "freight"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_a_span_below_its_parent(
    server: Server, collector: Collector, stream: bool
) -> None:
    name = f"answer-{stream}"
    headers = named(name, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=a,other=b")
    answer = server.ask("/v1/completions", body(stream=stream, top_p=0.5, temperature=0.7), headers)
    assert answer.status == 200
    span = collector.of(name)
    check_answer(span)
    assert (span.trace_id, span.parent, span.state) == (TRACE, PARENT, "vendor=a,other=b")
    values = span.attributes
    assert values["gen_ai.request.n"] == 1
    assert values["gen_ai.request.max_tokens"] == 4
    assert values["gen_ai.request.temperature"] == pytest.approx(0.7)
    assert values["gen_ai.request.top_p"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "given",
    [
        None,
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
    ],
)
def test_without_a_valid_parent_a_span_is_a_root(
    server: Server, collector: Collector, given: str | None
) -> None:
    name = f"root-{hash(given)}"
    headers = named(name) if given is None else named(name, traceparent=given, tracestate="a=b")
    assert server.ask("/v1/completions", body(), headers).status == 200
    span = collector.of(name)
    check_answer(span)
    assert (span.parent, span.state) == ("", "")
    assert span.trace_id not in (TRACE, "0" * 32)


def test_a_parent_that_is_not_sampled_has_no_span_below_it(
    server: Server, collector: Collector
) -> None:
    headers = named("unsampled", traceparent=f"00-{TRACE}-{PARENT}-00")
    assert server.ask("/v1/completions", body(), headers).status == 200
    assert server.ask("/v1/completions", body(), named("after")).status == 200
    collector.of("after")
    assert "unsampled" not in {span.id for span in collector.spans}


def test_several_prompts_are_one_span(server: Server, collector: Collector) -> None:
    asked = body(prompt=[PROMPT, PROMPT], n=2)
    assert server.ask("/v1/completions", asked, named("several")).status == 200
    span = collector.of("several")
    check_answer(span, tokens=16)
    assert span.attributes["gen_ai.request.n"] == 2


def test_a_refused_request_is_a_span_with_its_error(server: Server, collector: Collector) -> None:
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    asked = body(model="unmistakable-model")
    assert server.ask("/v1/completions", asked, named("refused", **parent)).status == 404
    span = collector.of("refused")
    assert (span.name, span.kind, span.status) == ("llm_request", SERVER_KIND, ERROR)
    assert (span.trace_id, span.parent, span.message) == (TRACE, PARENT, "model_not_found")
    assert set(span.attributes) == {
        "gen_ai.request.id",
        "gen_ai.latency.e2e",
        "http.route",
        "http.response.status_code",
        "error.type",
    }
    assert span.attributes["http.route"] == "/v1/completions"
    assert server.ask("/generate", {"inputs": 7}, named("of-tgi")).status == 422
    assert collector.of("of-tgi").attributes["http.response.status_code"] == 422


def test_what_has_no_answer_of_the_model_has_no_span(server: Server, collector: Collector) -> None:
    assert server.ask("/tokenize", {"prompt": PROMPT}, named("tokenized")).status == 200
    assert server.ask("/tokenize", {"prompt": 7}, named("not-tokenized")).status == 400
    refused = {"Authorization": "Bearer wrong"}
    assert (
        Server(server.url, refused).ask("/v1/completions", body(), named("keyless")).status == 401
    )
    assert server.ask("/v1/completions", body(), named("next")).status == 200
    collector.of("next")
    found = {span.id for span in collector.spans}
    assert not found & {"tokenized", "not-tokenized", "keyless"}


def test_a_client_that_leaves_is_a_span(server: Server, collector: Collector) -> None:
    opened = server.open("/v1/completions", body(max_tokens=900, n=16, stream=True), named("left"))
    opened.first_event()
    opened.leave()
    span = collector.of("left")
    assert span.status == 0
    assert span.attributes["http.response.status_code"] == 499
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert span.attributes["gen_ai.latency.time_to_first_token"] > 0
    assert span.attributes["gen_ai.usage.completion_tokens"] > 0
    assert "gen_ai.latency.time_in_queue" not in span.attributes
    server.wait_for(0)


def test_an_answer_whose_engine_ends_is_a_span(
    server: Server, collector: Collector, process: ServeProcess
) -> None:
    asked = body(max_tokens=900, n=16, stream=True)
    opened = server.open("/v1/completions", asked, named("cut"))
    opened.first_event()
    os.kill(process.children()["worker"], signal.SIGKILL)
    opened.whole()
    opened.leave()
    span = collector.of("cut")
    assert span.status == ERROR
    assert span.attributes["http.response.status_code"] >= 500
    assert span.attributes["gen_ai.response.finish_reasons"] == ["error"]
    process.wait_until_healthy()
    assert server.ask("/v1/completions", body(), named("restarted")).status == 200
    check_answer(collector.of("restarted"))


def test_no_span_has_a_text_or_a_key(server: Server, collector: Collector) -> None:
    asked = body(cache_salt="unmistakable-salt", user="unmistakable-user")
    answer = server.ask("/v1/completions", asked, named("quiet"))
    assert answer.status == 200
    collector.of("quiet")
    raw = b"".join(sent for _, _, sent in collector.requests)
    assert b"quiet" in raw
    for text in (b"unmistakable", KEY.encode(), answer.body["choices"][0]["text"].encode()):
        assert text not in raw
    for path, headers, _ in collector.requests:
        assert path == "/v1/traces"
        assert KEY not in str(headers)


@pytest.mark.clock
@pytest.mark.parametrize("kind", ["refuses", "hangs", "unavailable"])
def test_a_collector_that_takes_nothing_holds_up_nobody(kind: str) -> None:
    with Collector(hangs=kind == "hangs", status=503) as collector:
        url = collector.url if kind != "refuses" else "http://127.0.0.1:9"
        options = [*OPTIONS, "--otlp-traces-endpoint", url]
        small = {"OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
        environ = {**os.environ, **FAST, **small}
        with ServeProcess("demo", options, environ=environ) as process:
            server = Server(process.wait_until_healthy())
            for _ in range(30):
                began = time.monotonic()
                assert server.ask("/v1/completions", body()).status == 200
                assert time.monotonic() - began < 5
            began = time.monotonic()
            assert process.stop() == 0
            assert time.monotonic() - began < 8
            lines = [line for line in process.said.splitlines() if "spans" in line]
            assert len(lines) <= 3, lines  # where they go, why not, and that the last were lost
            assert re.search(rf"WARNING.*spans may not reach {url}/v1/traces", process.said) or (
                kind == "hangs"
            )
            assert "Traceback" not in process.said


def test_what_waits_is_sent_at_the_end() -> None:
    with Collector() as collector:
        options = [*OPTIONS, "--otlp-traces-endpoint", collector.url + "/v1/traces"]
        environ = {
            **os.environ,
            "OTEL_BSP_SCHEDULE_DELAY": "600000",
            "OTEL_SERVICE_NAME": "a-name",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-of-tests=yes",
        }
        with ServeProcess("demo", options, environ=environ) as process:
            server = Server(process.wait_until_healthy())
            assert server.ask("/v1/completions", body(), named("one")).status == 200
            child = Path(f"/proc/{process.children()['worker']}/environ").read_bytes()
            assert b"x-of-tests" not in child
            assert collector.spans == []
            assert process.stop() == 0
        span = collector.of("one", seconds=0)
        assert span.resource["service.name"] == "a-name"
        assert collector.requests[0][1]["x-of-tests"] == "yes"


def test_several_models_share_a_collector(tmp_path: Path, collector: Collector) -> None:
    for seed, name in enumerate(("first", "second")):
        changed_demo(tmp_path / name, seed)
    options = ["--models", str(tmp_path), "--models-max", "1", "--models-turn", "0.1"]
    options += ["--kv-cache-memory", "16MiB", "--threads", "1"]
    options += ["--otlp-traces-endpoint", collector.url]
    with ServeProcess(None, options, environ={**os.environ, **FAST}) as process:
        server = Server(process.url)
        for turn, name in enumerate(("first", "second", "first")):  # each takes the other's place
            answer = server.ask("/v1/completions", body(model=name), named(f"turn-{turn}"))
            assert answer.status == 200
            assert collector.of(f"turn-{turn}").attributes["gen_ai.response.model"] == name
        asked = body(model="third")
        assert server.ask("/v1/completions", asked, named("no-model")).status == 404
        assert collector.of("no-model").attributes["error.type"] == "model_not_found"
        asked = body(model="first", max_tokens=-7)
        assert server.ask("/v1/completions", asked, named("no-number")).status == 400
        assert collector.of("no-number").attributes["http.response.status_code"] == 400
        for name in ("no-model", "no-number"):
            assert process.said.count(f"request_id={name} ") == 1
        assert process.stop() == 0


def test_an_address_of_grpc_is_refused_at_once() -> None:
    options = ["--otlp-traces-endpoint", "http://localhost:4317"]
    with ServeProcess("demo", options) as process:
        assert process.wait() == 2
        assert_names(process.said, *options, "gRPC", "http://localhost:4318/v1/traces")
