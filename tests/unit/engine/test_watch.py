"""What is said after a run of what the cache counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from freight.engine.accounts import Totals
from freight.engine.watch import cache_watched


@pytest.mark.parametrize(
    ("clipped", "said"), [(0, None), (10, None), (11, "0.1 %"), (500, "5.0 %")]
)
def test_a_share_of_clipped_values_is_said_above_one_in_a_thousand(
    caplog: pytest.LogCaptureFixture, clipped: int, said: str | None
) -> None:
    """Drafts that were not drawn are in neither count."""
    counts = [
        (3, 7),
        (3, 7 + clipped),
    ]  # NaN and clipped values, before and after 10 tokens of 1,000 values
    pool = SimpleNamespace(counters=lambda: counts.pop(0), values_per_token=1000)
    totals = Totals(drafted=4, accepted=1)
    engine: Any = SimpleNamespace(
        runner=SimpleNamespace(pool=pool),
        num_computed_tokens=5,
        scheduler=SimpleNamespace(totals=totals),
    )
    with cache_watched(engine):
        engine.num_computed_tokens += 10
        totals.drafted += 8
        totals.accepted += 2
    if said is None:
        assert not caplog.records
    else:
        assert f"{said} of the keys and values" in caplog.text
