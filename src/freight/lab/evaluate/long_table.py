"""The tables of `freight evaluate long`: retrieval by depth and perplexity by position, a row a
cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from freight.lab.evaluate.long import Estimate, LongScore
from freight.lab.evaluate.safety import MIN_UNITS

RETRIEVAL = (
    "Retrieval: log-probability of a value's tokens after its key, in nats a token, gained from having the record that "
    "many tokens back; and the share of values found."
)
POSITIONS = "Perplexity by position in the text; changes in nats a token."
CHANGES = (
    "In brackets: the change against the first row, with its 95 % interval and n, the number of contexts or windows; "
    f"— where n is below {MIN_UNITS}, which is too few for an interval."
)

HEADS = ("KV cache", "scales")


def retrieval_rows(scores: Sequence[LongScore]) -> list[Sequence[str]]:
    """Return a row for each cache, the first with the headings; a column for each depth."""
    rows: list[Sequence[str]] = [(*HEADS, *(f"{part.depth:,} back" for part in scores[0].depths))]
    for index, score in enumerate(scores):
        cells = []
        for part in score.depths:
            plain = f"{part.gain.mean:+.3f}, {part.found.mean:.1%}"
            cells.append(plain if index == 0 else f"{plain} ({_change(part.gain_change)})")
        rows.append((*_cache(score), *cells))
    return rows


def position_rows(scores: Sequence[LongScore]) -> list[Sequence[str]]:
    """Return the same of perplexity; the change is in nats a token."""
    heads = (f"{part.start:,} … {part.stop - 1:,}" for part in scores[0].positions)
    rows: list[Sequence[str]] = [(*HEADS, *heads)]
    for index, score in enumerate(scores):
        cells = []
        for part in score.positions:
            plain = f"{part.perplexity:.3f}"
            cells.append(plain if index == 0 else f"{plain} ({_change(part.nll_change)})")
        rows.append((*_cache(score), *cells))
    return rows


def _cache(score: LongScore) -> tuple[str, str]:
    states = f", states {score.state_dtype}" if score.state_dtype else ""
    scales = f"{score.granularity}, {score.scale_source}" if score.granularity else "none"
    return score.kv_cache_dtype + states, scales


def _change(change: Estimate) -> str:
    ends = "—" if change.interval is None else "{:+.4f} to {:+.4f}".format(*change.interval)
    return f"{change.mean:+.4f}, {ends}, n = {change.num_units}"
