"""The tables of `freight evaluate long`: retrieval by depth and perplexity by position, a row a
cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from freight.lab.columns import scales_name
from freight.lab.evaluate.long import DepthScore, Estimate, LongScore, PositionScore
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


def retrieval_rows(scores: Sequence[LongScore]) -> list[list[str]]:
    """Return a row for each cache, the first with the headings; a column for each depth."""
    parts = [score.depths for score in scores]
    return _rows(scores, parts, "{0.depth:,} back", "{0.gain.mean:+.3f}, {0.found.mean:.1%}")


def position_rows(scores: Sequence[LongScore]) -> list[list[str]]:
    """Return the same of perplexity; the change is in nats a token."""
    parts = [score.positions for score in scores]
    return _rows(scores, parts, "{0.start:,} … {0.last:,}", "{0.perplexity:.3f}")


def _rows(
    scores: Sequence[LongScore],
    parts: Sequence[Sequence[DepthScore] | Sequence[PositionScore]],
    head: str,
    figure: str,
) -> list[list[str]]:
    """`parts` are those of each score; `head` and `figure` are formats of a part."""
    rows = [["KV cache", "scales", *map(head.format, parts[0])]]
    for index, score in enumerate(scores):
        dtype = score.kv_cache_dtype
        if score.state_dtype:
            dtype += f", states {score.state_dtype}"
        row = [dtype, scales_name(score.granularity, score.scale_source)]
        for part in parts[index]:
            cell = figure.format(part)
            if index:
                cell += f" ({_change(part.change)})"
            row.append(cell)
        rows.append(row)
    return rows


def _change(change: Estimate) -> str:
    ends = "—" if change.interval is None else "{:+.4f} to {:+.4f}".format(*change.interval)
    return f"{change.mean:+.4f}, {ends}, n = {change.num_units}"
