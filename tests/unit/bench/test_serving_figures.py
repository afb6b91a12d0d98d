"""The arithmetic of a load: tokens from usage, gaps shared by the tokens of an event, percentiles,
ratios by round.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from freight.lab.bench.answers import Answer, AnswerStream
from freight.lab.bench.http_stream import StreamError
from freight.lab.bench.load import Level
from freight.lab.bench.serving_figures import Run, Samples, figures, interval, percentiles, ratios


def event(text: str | None, num_tokens: int | None, **more: Any) -> bytes:
    found: dict[str, Any] = {"choices": [] if text is None else [{"index": 0, "text": text}]} | more
    if num_tokens is not None:
        found["usage"] = {"prompt_tokens": 7, "completion_tokens": num_tokens}
    return b"data: " + json.dumps(found).encode() + b"\n\n"


def read(*events: tuple[float, bytes]) -> Answer:
    stream = AnswerStream()
    for now, data in events:
        stream.feed(data, now)
    return stream.answer(start=10.0, sent=10.0, num_asked=6)


DONE = b"data: [DONE]\n\n"


def test_an_event_of_three_tokens_is_three_gaps():
    answer = read(
        (11.0, event("a", 1)),
        (11.6, event("bcd", 4)),
        (11.7, event("", 5)),
        (11.7, event(None, 5) + DONE),
    )
    assert answer.counts == (1, 3, 1)
    assert (answer.num_tokens, answer.num_prompt) == (5, 7)
    samples = Samples.of([answer])
    assert samples.itl == pytest.approx([200, 200, 200, 100])
    assert samples.ttft == pytest.approx([1000])
    assert samples.tpot == pytest.approx([700 / 4])
    assert samples.e2e == pytest.approx([1700])
    assert samples.unit == "token"


def test_without_usage_in_every_event_gaps_are_between_events():
    answer = read(
        (11.0, event("a", None)), (11.5, event("bcd", None)), (12.0, event(None, 4)), (12.0, DONE)
    )
    assert (answer.counts, answer.num_tokens) == (None, 4)
    samples = Samples.of([answer])
    assert (samples.itl, samples.unit) == (pytest.approx([500]), "event")
    assert samples.tpot == pytest.approx([500 / 3])


def test_a_role_is_no_token_and_reasoning_is():
    def delta(**fields: Any) -> bytes:
        return (
            b"data: " + json.dumps({"choices": [{"index": 0, "delta": fields}]}).encode() + b"\n\n"
        )

    role, thought = (
        delta(role="assistant", content=""),
        delta(reasoning="hm", reasoning_content="hm"),
    )
    answer = read(
        (10.5, role),
        (11.0, thought),
        (12.0, delta(content="a")),
        (12.0, event(None, 2)),
        (12.5, DONE),
    )
    assert answer.times == (11.0, 12.0)
    assert answer.end == 12.5


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([event("a", 1), event(None, 1)], "no_done"),
        ([event("a", None), DONE], "no_usage"),
        ([event(None, 0), DONE], "empty"),
        ([b'data: {"error": {"message": "the engine ended"}}\n\n', DONE], "error_event"),
        ([b"data: {nonsense\n\n", DONE], "malformed"),
        ([b"data: []\n\n", DONE], "malformed"),
        (
            [b'data: {"choices": [], "usage": {}, "x": 1}\n\n', b'data: {"choices": 3}\n\n', DONE],
            "malformed",
        ),
        ([event("a", 1), DONE, event("b", 2)], "malformed"),
    ],
)
def test_a_stream_that_is_not_in_order_is_an_error_of_its_kind(events: list[bytes], kind: str):
    with pytest.raises(StreamError) as error:
        read(*((11.0, one) for one in events))
    assert error.value.kind == kind


def answered(
    start: float, first: float, end: float, num_tokens: int = 2, error: str = ""
) -> Answer:
    times = () if error else (start + first, end)
    return Answer(
        start,
        start,
        end,
        times,
        None if error else (1, num_tokens - 1),
        num_tokens,
        7,
        None,
        2,
        error,
        error,
    )


def test_errors_are_counted_and_are_in_no_time_and_no_rate():
    good = [answered(0.0, 0.5, 1.0), answered(0.0, 0.5, 2.0, num_tokens=10)]
    row = figures([Run("a", Level(1), 0, [*good, answered(0.0, 0.0, 4.0, error="http_429")])])
    assert row["errors"] == {"http_429": 1}
    assert (row["requests"], row["seconds"]) == (3, 4.0)
    assert row["output_tokens_per_second"] == pytest.approx(12 / 4)
    assert row["requests_per_second"] == pytest.approx(2 / 4)
    assert row["ttft_ms"]["median"] == pytest.approx(500)
    assert row["e2e_ms"] == {
        "median": 1500.0,
        "p90": pytest.approx(1900),
        "p99": pytest.approx(1990),
    }
    assert row["short_answers"] == 0


def test_percentiles_of_nothing_are_none_and_of_a_hundred_known():
    assert percentiles([]) == {"median": None, "p90": None, "p99": None}
    assert percentiles([float(i) for i in range(101)]) == {"median": 50.0, "p90": 90.0, "p99": 99.0}


def test_ratios_are_taken_within_rounds():
    """The machine is ten times slower in the second round: the ratio of pooled medians would say
    nothing.
    """
    runs = []
    for number, speed in enumerate((1.0, 10.0, 1.0)):
        runs.append(Run("a", Level(4), number, [answered(0.0, 0.1 * speed, 1.0 * speed)]))
        runs.append(Run("b", Level(4), number, [answered(0.0, 0.2 * speed, 1.0 * speed)]))
    (ttft,) = (row for row in ratios(runs) if row["figure"] == "ttft_ms_median")
    assert [ttft[name] for name in ("ratio", "low", "high")] == pytest.approx([0.5, 0.5, 0.5])
    assert (ttft["of"], ttft["to"], ttft["level"], ttft["rounds"]) == ("a", "b", "4 at a time", 3)
    (rate,) = (row for row in ratios(runs) if row["figure"] == "output_tokens_per_second")
    assert rate["ratio"] == pytest.approx(1.0)
    assert ratios([run for run in runs if run.url == "a"]) == []


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (20, 6)])
def test_the_interval_has_the_ranks_of_the_tables(n: int, k: int):
    low, high, coverage = interval([float(i) for i in range(n, 0, -1)])
    assert (low, high) == (k, n + 1 - k)
    assert coverage == pytest.approx(1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)
    assert coverage >= 0.95 or n < 6


def test_the_interval_holds_the_median_as_often_as_it_says():
    numbers = random.Random(0)
    held = 0
    for _ in range(2000):
        low, high, coverage = interval([numbers.lognormvariate(0.0, 1.0) for _ in range(10)])
        held += low <= 1.0 <= high
    assert held / 2000 == pytest.approx(coverage, abs=0.02)
