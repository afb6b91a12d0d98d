"""What the cache counts while it is written, NaN and clipped values, reported after a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from freight.engine.engine import Engine

logger = logging.getLogger("freight")

# of the keys and values of a run; what calibrated scales clip on other text stays well below
CLIPPED_SHARE = 1e-3


@contextmanager
def cache_watched(engine: Engine) -> Iterator[None]:
    """Warn after a run, however it ends, if NaNs were stored in the cache or its scales clipped too
    many values.
    """
    pool = engine.runner.pool
    nans_before, clipped_before = pool.counters()
    tokens_before = engine.num_computed_tokens  # as in the pool's counters, without rejected drafts
    try:
        yield
    finally:
        nans_after, clipped_after = pool.counters()
        nans = nans_after - nans_before
        clipped = clipped_after - clipped_before
        stored = (engine.num_computed_tokens - tokens_before) * pool.values_per_token
        if nans:
            logger.warning(
                "%d NaN were stored in the KV cache: the model computes NaN, its output means nothing",
                nans,
            )
        if clipped > CLIPPED_SHARE * stored:
            logger.warning(
                "%.1f %% of the keys and values lay beyond the range of their scales and were clipped: these "
                "scales do not fit this model and text; --kv-scales dynamic measures them per token",
                100 * clipped / stored,
            )
