"""What the page and the log show of an engine: rates, from two readings of its totals, and the
cache in tokens.

An engine that was started anew begins its totals at 0; a total that fell is therefore counted from
0, so no rate is ever negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from freight.outputs import EngineStats


@dataclass(frozen=True)
class CacheFacts:
    """The KV cache of the engine, which does not change while it runs.

    format                  'fp8_e4m3', 'bfloat16', …
    granularity             of its scales; None without scales
    scale_source            where the scales come from; None without scales
    num_blocks              blocks for whole sequences, of `block_size` tokens
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
    """Tokens between two readings. A prompt's tokens count whether they were computed or found in
    the cache.
    """

    prompt_tokens: int
    generated_tokens: int
    seconds: float

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


def rates(stats: EngineStats, previous: EngineStats | None, seconds: float) -> Rates:
    """What was done in the `seconds` since `previous`; nothing where there is no previous reading."""
    if previous is None:
        return Rates(0, 0, seconds)
    return Rates(
        _rise(stats.prompt, previous.prompt), _rise(stats.generated, previous.generated), seconds
    )


def cache_use(stats: EngineStats) -> float:
    """Share of the cache that requests hold, from 0 to 1. What is only kept for prefix hits is
    free.
    """
    return stats.held_tokens / stats.capacity_tokens if stats.capacity_tokens else 0.0


def prefix_hit_rate(stats: EngineStats) -> float:
    """Share of the looked-up prompt tokens that were found, since the start, from 0 to 1; 0 before
    the first.
    """
    return stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0


def engine_state(
    stats: EngineStats, previous: EngineStats | None, seconds: float, facts: CacheFacts
) -> dict[str, Any]:
    """The engine for the page's live view, for json.dumps.

    `previous` are the stats of `seconds` seconds ago. Rates are in tokens per second,
    `prefix_hit_rate` is from 0 to 1 and since the start, as are the counts of values and
    preemptions.
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
    return now - before if now >= before else now
