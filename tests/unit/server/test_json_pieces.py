"""JSON in pieces: the values and the errors of `json.loads`, and other threads run in between."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.serve.transport import json_pieces
from freight.serve.transport.body import parse_object
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits
from freight.serve.transport.json_pieces import loads_in_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=60,
)
SIZE = (4 << 20) - 100


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "clock" not in request.keywords:
        monkeypatch.setattr(json_pieces, "_WINDOW", 16)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_the_values_are_those_of_the_library(value: Any, indent: int | None, escaped: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    assert loads_in_pieces(text, json.JSONDecoder()) == json.loads(text)


@given(VALUES, st.integers(0, 200), st.sampled_from(["", ",", "]", "}", '"', "1", "x", "[", " "]))
def test_the_errors_are_those_of_the_library(value: Any, at: int, other: str) -> None:
    text = json.dumps(value)
    at %= len(text)
    broken = text[:at] + other + text[at + 1 :]
    assert outcome(loads_in_pieces, broken) == outcome(
        lambda text, decoder: decoder.decode(text), broken
    )


def outcome(read: Callable[[str, json.JSONDecoder], Any], text: str) -> object:
    try:
        return read(text, json.JSONDecoder())
    except json.JSONDecodeError as error:
        return error.pos, error.msg


def test_hooks_see_every_number_and_every_object() -> None:
    text = json.dumps({"a": [1.5] * 20, "b": {"c": 1, "d": {"e": "x" * 40}}})
    decoder = json.JSONDecoder(parse_float=str, object_pairs_hook=list)
    assert loads_in_pieces(text, decoder) == decoder.decode(text)


def test_a_large_body_has_the_errors_of_a_small_one() -> None:
    long = "x" * (1 << 18)
    for body, reason in (
        (f'{{"a": "{long}", "b": "\\ud800"}}', "surrogate"),
        (f'{{"a": "{long}", "b": NaN}}', "NaN"),
        (f'{{"a": "{long}", "b": 1e999}}', "too large"),
        (f'{{"a": "{long}", "b": {"[" * 65}{"]" * 65}}}', "deep"),
        (f'{{"a": "{long}", "b": {"1" * 101}}}', "digits"),
        (f'{{"a": "{long}", "b": 1', "not valid JSON"),
        (f'[{{"a": "{long}"}}]', "array"),
    ):
        with pytest.raises(ApiError, match=reason) as error:
            parse_object(body.encode(), HttpLimits())
        assert error.value.status == 400


def longest_hold(of: Callable[[], object]) -> float:
    """Return the longest time that no other thread of the process could run, in seconds of the CPU
    time of the calling thread: time that another process has taken is none of it.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())
    holds = []
    is_over = threading.Event()

    def run() -> None:
        last = time.clock_gettime(clock)
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.clock_gettime(clock)
            holds.append(now - last)
            last = now

    thread = threading.Thread(target=run)
    thread.start()
    try:
        of()
    finally:
        is_over.set()
        thread.join()
    return max(holds)


def many(entry: str) -> str:
    number = min(SIZE // (len(entry) + 1), 99_000 if entry[0] == "{" else SIZE)
    return f"[{','.join([entry] * number)}]"


LARGE = {
    **{f"of {entry}": many(entry) for entry in ('""', "1", '"ab"', "1.5", "{}", '{"a":"b"}')},
    "of pairs of surrogates": many('"\\ud83d\\ude00"'),
    "a string": json.dumps("x" * SIZE),
    "a string of escapes": json.dumps("\n" * (SIZE // 2)),
    "a string of surrogates": json.dumps("\U0001f600" * (SIZE // 12)),
    "one object": json.dumps({f"{name:x}": 1 for name in range(SIZE // 12)}),
    "the same name": "{" + ",".join(['"a":1'] * (SIZE // 6)) + "}",
}


@pytest.mark.clock
@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of a thread")
@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_other_threads_run_while_a_body_is_parsed(value: str) -> None:
    """Each of these holds `json.loads`, or what looks at the bytes before it, for much longer."""
    body = f'{{"a":{value}}}'.encode()

    def parse() -> None:
        with contextlib.suppress(ApiError):
            parse_object(body, HttpLimits())

    # The thread that looks may itself have to wait for a processor: the least of several times is
    # what the interpreter was held for.
    holds = []
    while len(holds) < 8 and min(holds, default=1.0) >= 0.05:
        holds.append(longest_hold(parse))
    assert min(holds) < 0.05, holds
