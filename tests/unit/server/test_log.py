"""The log: one line a request, ids that cannot forge a line, summaries that are quiet when nothing
happens.
"""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from freight.outputs import EngineStats
from freight.serve.observe.log import (
    RequestLine,
    log_request,
    log_summary,
    logger,
    request_id_of,
    summary,
    trace_id_of,
)
from freight.serve.processes.log import (
    LogFormat,
    current_model,
    current_request,
    current_trace,
    formatter_of,
    set_up_logging,
)

ZERO = EngineStats(*[0] * 15)  # the counts
LINE = RequestLine("req-1", 200, 1.23456, 10, 20, 5, "stop", "alice")


@pytest.fixture
def lines() -> Iterator[logging.StreamHandler[io.StringIO]]:
    """A handler whose stream has what the server logs."""
    handler = logging.StreamHandler(io.StringIO())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_request_is_one_line_of_json(lines: logging.StreamHandler[io.StringIO]) -> None:
    lines.setFormatter(formatter_of(LogFormat.JSON))
    log_request(LINE)
    entry = json.loads(lines.stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert entry == {
        "level": "INFO",
        "message": "request",
        "request_id": "req-1",
        "status": 200,
        "seconds": 1.2346,
        "prompt_tokens": 10,
        "generated_tokens": 20,
        "cached_tokens": 5,
        "finish_reason": "stop",
        "key_name": "alice",
    }


def test_a_request_is_one_line_of_text(lines: logging.StreamHandler[io.StringIO]) -> None:
    lines.setFormatter(formatter_of(LogFormat.TEXT))
    log_request(replace(LINE, status=500, finish_reason=None, key_name='my "key"\nx'))
    (line,) = lines.stream.getvalue().splitlines()
    assert line.endswith(
        "WARNING request request_id=req-1 status=500 seconds=1.2346 prompt_tokens=10 generated_tokens=20 "
        r'cached_tokens=5 key_name="my \"key\"\nx"'
    )


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_every_line_of_a_request_has_its_id(
    lines: logging.StreamHandler[io.StringIO], log_format: LogFormat
) -> None:
    lines.setFormatter(formatter_of(log_format))
    token = current_request.set("req-7")
    logger.info("something\nwith a forged line")
    try:
        raise RuntimeError("a\nb")
    except RuntimeError:
        logger.exception("failed")
    current_request.reset(token)
    logger.info("later")
    logged = lines.stream.getvalue().splitlines()
    assert ["req-7" in line for line in logged] == [True, True, False]
    assert "RuntimeError: a" in logged[1]


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"  # of the examples in W3C Trace Context


def test_lines_of_a_request_have_its_trace(lines: logging.StreamHandler[io.StringIO]) -> None:
    lines.setFormatter(formatter_of(LogFormat.TEXT))
    token = current_trace.set(trace_id_of(f"00-{TRACE}-00f067aa0ba902b7-01"))
    log_request(LINE)
    current_trace.reset(token)
    log_request(LINE)
    assert [TRACE in line for line in lines.stream.getvalue().splitlines()] == [True, False]


@pytest.mark.parametrize("log_format", [LogFormat.TEXT, LogFormat.JSON])
def test_lines_say_which_of_several_models_they_are_about(
    log_format: LogFormat, lines: logging.StreamHandler[io.StringIO]
) -> None:
    lines.setFormatter(formatter_of(log_format))
    token = current_model.set("a b")
    log_request(LINE)
    current_model.reset(token)
    log_request(LINE)
    logged = lines.stream.getvalue().splitlines()
    assert ['"a b"' in line for line in logged] == [True, False]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_of_one_model_says_so_in_all_threads(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = logging.getLogger("freight")
    changed = (engine, logging.getLogger("uvicorn"))
    before = [(log.handlers, log.propagate, log.level) for log in changed]
    try:
        set_up_logging(log_format, model="a b")
        thread = threading.Thread(target=engine.info, args=("loaded",))
        thread.start()
        thread.join()
        log_request(LINE)
    finally:
        for log, (handlers, propagate, level) in zip(changed, before, strict=True):
            log.handlers = handlers
            log.propagate = propagate
            log.setLevel(level)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert all('"a b"' in line for line in said)
    assert "request_id" in said[1]


@pytest.mark.parametrize(
    "header", [f"00-{TRACE}-00f067aa0ba902b7-00", f"cc-{TRACE}-00f067aa0ba902b7-01-what-comes"]
)
def test_a_trace_id_is_read(header: str) -> None:
    assert trace_id_of(header) == TRACE


@pytest.mark.parametrize(
    "header",
    [
        *(
            None,
            "",
            TRACE,
            f"00-{TRACE}",
            f"00-{TRACE}-00f067aa0ba902b7",
            f"00-{TRACE}-00f067aa0ba902b7-01-more",
        ),
        *(
            f"ff-{TRACE}-00f067aa0ba902b7-01",
            f"00-{'0' * 32}-00f067aa0ba902b7-01",
            f"00-{TRACE}-{'0' * 16}-01",
        ),
        *(
            f"00-{TRACE.upper()}-00f067aa0ba902b7-01",
            f"00-{TRACE}-00f067aa0ba902b7-01\n",
            f"cc-{TRACE}-00f067aa0ba902b7-01x",
        ),
    ],
)
def test_an_invalid_trace_is_ignored(header: str | None) -> None:
    assert trace_id_of(header) is None


@pytest.mark.parametrize("header", ["a", "A-b.c_9", "x" * 128])
def test_a_plain_id_is_kept(header: str) -> None:
    assert request_id_of(header) == header


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x" * 129,
        "a b",
        "a\tb",
        "a\n",
        "http://x",
        "a/b",
        "a,b",
        "$(x)",
        "é",
        "١",
        "a\x00",
    ],
)
def test_any_other_id_is_replaced(header: str | None) -> None:
    replaced = request_id_of(header)
    assert replaced != header
    assert request_id_of(replaced) == replaced
    assert request_id_of(header) != replaced


@given(st.text(max_size=200))
def test_an_id_always_has_the_allowed_characters(header: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", request_id_of(header))


def test_the_summary_says_what_was_done_since_the_last(
    lines: logging.StreamHandler[io.StringIO],
) -> None:
    before = replace(ZERO, capacity_tokens=100, prompt=10, generated=5)
    now = replace(
        before, running=2, waiting=1, held_tokens=25, prompt=30, generated=45, prefix_queries=8
    )
    now = replace(now, prefix_hits=4, preemptions=3)
    level, said = summary(now, before, 10.0)
    assert level == logging.INFO
    assert said == {
        "running": 2,
        "waiting": 1,
        "cache_use": 0.25,
        "prefix_hit_rate": 0.5,
        "prompt_tokens_per_s": 2.0,
        "generated_tokens_per_s": 4.0,
        "preemptions": 3,
    }
    assert summary(before, before, 10.0)[0] == logging.DEBUG
    assert summary(replace(before, generated=6), before, 10.0)[0] == logging.INFO
    assert summary(replace(before, waiting=1), before, 10.0)[0] == logging.INFO
    lines.setFormatter(formatter_of(LogFormat.TEXT))
    log_summary(before, before, 10.0)
    log_summary(now, before, 10.0)
    assert lines.stream.getvalue().count("summary running=2 waiting=1 cache_use=0.25") == 1
    assert lines.stream.getvalue().count("\n") == 1
