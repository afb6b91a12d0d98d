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
    tokens_before = _num_stored(engine)
    try:
        yield
    finally:
        nans_after, clipped_after = pool.counters()
        nans, clipped = nans_after - nans_before, clipped_after - clipped_before
        stored = (_num_stored(engine) - tokens_before) * pool.values_per_token
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


def _num_stored(engine: Engine) -> int:
    """Return the tokens whose keys and values were stored, drafts that were not drawn included."""
    totals = engine.scheduler.totals
    return engine.num_computed_tokens + totals.drafted - totals.accepted
