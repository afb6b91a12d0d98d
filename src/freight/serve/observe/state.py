"""The engine's state as the page and the log show it: rates between two readings, and cache use.

A new engine starts its totals at 0. A total that fell is therefore counted from 0, so no rate is
ever negative.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.base.fields import JsonDict
from freight.outputs import EngineStats


@dataclass(frozen=True)
class CacheFacts:
    """Constants of the engine's KV cache.

    format                  'fp8_e4m3', 'bfloat16', …
    granularity             of its scales; None without scales
    scale_source            the origin of the scales; None without scales
    num_blocks              blocks for full-length sequences, of `block_size` tokens
    equivalent_16bit_tokens tokens that the same memory would hold at 16 bits a value
    """

    format: str
    granularity: str | None
    scale_source: str | None
    block_size: int
    num_blocks: int
    capacity_tokens: int
    equivalent_16bit_tokens: int


@dataclass(frozen=True)
class Rates:
    """Tokens between two readings. Prompt tokens count whether they were computed or found in the
    cache.
    """

    prompt_tokens: int
    generated_tokens: int
    seconds: float

    @property
    def prompt_tokens_per_s(self) -> float:
        return ratio(self.prompt_tokens, self.seconds)

    @property
    def generated_tokens_per_s(self) -> float:
        return ratio(self.generated_tokens, self.seconds)


def ratio(part: float, total: float) -> float:
    """Return part / total; 0 if the total is not positive."""
    if total <= 0:
        return 0.0
    return part / total


def rates(stats: EngineStats, previous: EngineStats | None, seconds: float) -> Rates:
    """Return the tokens of the `seconds` since `previous`; 0 without a previous reading."""
    if previous is None:
        return Rates(0, 0, seconds)
    return Rates(
        _rise(stats.prompt, previous.prompt), _rise(stats.generated, previous.generated), seconds
    )


def cache_use(stats: EngineStats) -> float:
    """Return the share of the cache that requests hold, 0 to 1. Blocks kept only for prefix hits
    count as free.
    """
    return ratio(stats.held_tokens, stats.capacity_tokens)


def prefix_hit_rate(stats: EngineStats) -> float:
    """Return the share of looked-up prompt tokens that were found since the start, 0 to 1; 0 before
    the first lookup.
    """
    return ratio(stats.prefix_hits, stats.prefix_queries)


def engine_state(
    stats: EngineStats, previous: EngineStats | None, seconds: float, facts: CacheFacts
) -> JsonDict:
    """Return the engine's state for the page's live view, for json.dumps.

    `previous`: the stats of `seconds` seconds ago. Rates are in tokens per second.
    `prefix_hit_rate` (0 to 1) and the counts of values and preemptions are since the start.
    """
    done = rates(stats, previous, seconds)
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "cache": {
            "format": facts.format,
            "capacity_tokens": stats.capacity_tokens,
            "held_tokens": stats.held_tokens,
            "reusable_tokens": stats.reusable_tokens,
            "equivalent_16bit_tokens": facts.equivalent_16bit_tokens,
        },
        "prefix_hit_rate": round(prefix_hit_rate(stats), 4),
        "prompt_tokens_per_s": round(done.prompt_tokens_per_s, 1),
        "generated_tokens_per_s": round(done.generated_tokens_per_s, 1),
        "saturated_values": stats.clipped,
        "nan_values": stats.nans,
        "preemptions": stats.preemptions,
    }


def _rise(now: int, before: int) -> int:
    if now < before:  # of a new engine
        return now
    return now - before
