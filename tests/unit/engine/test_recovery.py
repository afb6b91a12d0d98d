"""Recovery: which request of a lost step is computed alone, and until when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from freight.engine.recovery import Recovery


def lost(*requests: Any) -> Recovery:
    """A step of 4 tokens of each request, which was lost."""
    recovery = Recovery()
    recovery.begin(
        [
            SimpleNamespace(request=request, start=request.num_computed_tokens, num_tokens=4)
            for request in requests
        ]
    )
    return recovery


def request(name: str, arrival: int, computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, order=(0, arrival), num_computed_tokens=computed)


def test_the_latest_that_is_not_past_the_step_is_suspected() -> None:
    late, early, middle = request("late", 3), request("early", 1), request("middle", 2)
    recovery = lost(late, early, middle)
    unfinished = {one.request_id: one for one in (early, middle, late)}
    assert recovery.suspect(unfinished) is late
    late.num_computed_tokens = 3
    assert recovery.suspect(unfinished) is late
    late.num_computed_tokens = 4
    assert recovery.suspect(unfinished) is middle
    del unfinished["middle"]
    assert recovery.suspect(unfinished) is early
    early.num_computed_tokens = 9
    assert recovery.suspect(unfinished) is None


def test_after_a_reset_nobody_is_suspected() -> None:
    only = request("only", 1)
    recovery = lost(only)
    recovery.reset()
    assert recovery.suspect({"only": only}) is None
