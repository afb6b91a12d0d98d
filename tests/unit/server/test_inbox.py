"""Deltas that wait for their reader, merged."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from freight.outputs import (
    CompletionDelta,
    FinishReason,
    Logprob,
    RequestDelta,
    RequestTimes,
    Scores,
    TokenLogprobs,
)
from freight.serve.inbox import merged

ENDINGS = st.sampled_from(
    [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.TIMEOUT]
)


def delta(
    text: str, reason: FinishReason | None = None, index: int = 0, finished: bool = False
) -> RequestDelta:
    output = CompletionDelta(
        index, [len(text)], text, [{len(text): Logprob(-1.0, 1)}], reason, None, None
    )
    times = RequestTimes(0.0, 0.0, 0.0) if finished else None
    return RequestDelta("r", [output], finished, None, 3, times)


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[int, RequestDelta]]:
    """Deltas of two requests with two completions each, interleaved; some of them end."""
    found = []
    open_ones = [(request, index) for request in range(2) for index in range(2)]
    for _ in range(draw(st.integers(1, 12))):
        if not open_ones:
            break
        request, index = one = draw(st.sampled_from(open_ones))
        reason = draw(st.none() | ENDINGS)
        if reason is not None:
            open_ones.remove(one)
        last = reason is not None and not any(other == request for other, _ in open_ones)
        found.append((request, delta(draw(st.text("abc", max_size=3)), reason, index, last)))
    return found


@dataclass
class Said:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def said(given: Sequence[tuple[int, RequestDelta]]) -> dict[tuple[int, int], Said]:
    """What deltas say of each completion."""
    result: dict[tuple[int, int], Said] = {}
    for request, one in given:
        for output in one.outputs:
            completion = result.setdefault((request, output.index), Said())
            completion.text += output.text
            completion.token_ids += output.token_ids
            completion.logprobs += output.logprobs or []
            completion.finish_reason = output.finish_reason
    return result


@given(streams())
def test_merged_deltas_say_what_the_single_ones_said(
    deltas: list[tuple[int, RequestDelta]],
) -> None:
    once = merged(deltas)
    assert said(once) == said(deltas)
    assert [request for request, one in once if one.finished] == sorted(
        (request for request, one in deltas if one.finished),
        key=[request for request, _ in once].index,
    )
    for _, one in once:
        assert one.finished == (one.times is not None)
        if any(
            output.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT)
            for output in one.outputs
        ):
            assert len(one.outputs[0].token_ids) == 1  # the text before it has a delta of its own
    failures = sum(
        one.outputs[0].finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT)
        for _, one in deltas
    )
    assert len(once) <= len({request for request, _ in deltas}) + failures


def test_scores_of_a_prompt_are_joined() -> None:
    one, two = (Scores(1, array("i", [n]), array("f", [-n]), array("i", [n])) for n in (1, 2))
    [(_, whole)] = merged([(0, RequestDelta("r", [], False, part)) for part in (None, one, two)])
    assert whole.scores == Scores(
        1, array("i", [1, 2]), array("f", [-1.0, -2.0]), array("i", [1, 2])
    )
