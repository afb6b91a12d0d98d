"""Large answers in slices are the same bytes, and messages of a step the same deltas."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.processes.test_wire import DELTA, sent

from freight.outputs import RequestDelta, Scores
from freight.serve.inbox import merged
from freight.serve.processes import wire
from freight.serve.transport.slices import _slices, json_bytes, json_in_slices

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=30,
)


@given(VALUES)
def test_slices_are_the_same_bytes(value: Any) -> None:
    assert b"".join(json_in_slices(value)) == json_bytes(value)


def test_no_slice_of_a_large_answer_is_large() -> None:
    entry = {str(token): {"logprob": -1.5, "rank": 1, "decoded_token": "é"} for token in range(21)}
    body = {
        "choices": [
            {
                "index": 0,
                "prompt_logprobs": [None, *[entry] * 1000],
                "logprobs": {"top": [entry] * 999},
            }
        ]
    }
    assert b"".join(json_in_slices(body)) == json_bytes(body)
    assert max(map(len, _slices(body, 0))) < len(json_bytes(body)) / 20
    with pytest.raises(ValueError, match="JSON"):
        json_in_slices({"choices": [{"logprob": float("nan")}]})


@given(st.lists(DELTA, max_size=4), st.integers(1, 5))
def test_a_step_in_several_messages_says_the_same(deltas: list[RequestDelta], most: int) -> None:
    before, wire.MOST_ENTRIES = wire.MOST_ENTRIES, most
    try:
        messages = list(wire.step_messages(deltas, [(0.5, 3)]))
    finally:
        wire.MOST_ENTRIES = before
    assert [message[2] for message in messages] == [[]] * (len(messages) - 1) + [[(0.5, 3)]]
    told = [wire.delta_from_json(one) for message in messages for one in sent(message)[1]]
    for delta in deltas:
        parts = []
        while not parts or len(scores_of(parts)) < len(delta.scores or ()):
            parts.append(told.pop(0))
        assert all(not part.outputs and not part.finished for part in parts[:-1])
        assert scores_of(parts) == list(delta.scores or ())
        assert [part.scores is None for part in parts] == [delta.scores is None] * len(parts)
        assert (parts[-1].outputs, parts[-1].finished, parts[-1].times) == (
            delta.outputs,
            delta.finished,
            delta.times,
        )
    assert told == []


def scores_of(parts: list[RequestDelta]) -> list[Any]:
    return [entries for part in parts for entries in part.scores or ()]


def test_the_scores_of_a_long_prompt_come_in_short_messages() -> None:
    entries = 21 * 2000
    scores = Scores(
        21, array("i", range(entries)), array("f", [-1.25] * entries), array("i", [30] * 2000)
    )
    delta = RequestDelta("1", [], True, scores, 0, None)
    messages = list(wire.step_messages([delta], []))
    assert max(len(json.dumps(message)) for message in messages) < 250_000
    parts = [wire.delta_from_json(one) for message in messages for one in sent(message)[1]]
    ((_, whole),) = merged([(0, part) for part in parts])
    assert whole.scores == delta.scores
    assert whole.finished
