"""Choice of how weights are prefetched, measured once per processor model and remembered.

Some processors gain 3 % when weights are prefetched past the caches, others lose half of their
speed, and no processor feature tells them apart. So a product is timed both ways, over a weight
that is evicted from the caches before each run. This takes a tenth of a second, when the first
large weight is packed. The decision is stored in `$XDG_CACHE_HOME/freight/prefetch.json` (default:
`~/.cache`) by processor model, build and number of threads. It changes no bit of a result.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from freight.base.files import write_whole
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.linear import linear, pack
from freight.operands.weight import Weight
from freight.settings.device import cpu_name

# Bytes of a packed weight from which a product spends most of its time reading the weight.
LARGE = 2**22
PAIRS = 11  # pairs of timings that count, after one that warms up
GAIN = 0.98  # largest ratio of the times, past the caches to into them, that counts as a gain


@cache
def tune(library: Library) -> bool | None:
    """Set how `library` prefetches, once: as remembered for this processor, else as measured now.

    Returns whether it is past the caches; None for the amx build, for which nothing is measured:
    its products with FP8 and bfloat16 weights prefetch in a fixed way, which this setting does not
    change.
    """
    if library.build == "amx":
        return None
    path = decisions()
    key = f"{cpu_name()}, {library.build}, {torch.get_num_threads()} threads"
    prefetches = remembered(path).get(key) if path else None
    if not isinstance(prefetches, bool):
        prefetches = past_the_caches(measure(library))
        if path:
            remember(path, key, prefetches)
    library.set_prefetch(prefetches)
    return prefetches


def measure(library: Library) -> list[tuple[float, float]]:
    """Time a product of one row with weights prefetched into the caches and past them, alternating.

    Returns pairs of seconds (into, past), or [] where the caches cannot be emptied.
    """
    codes = torch.full((1024, 4096), 0x38, dtype=torch.uint8, device="cpu")  # 1.0
    weight = pack(library, Weight(codes.view(torch_dtype(Format.E4M3FN))))
    x = torch.ones(1, 4096, dtype=torch.bfloat16, device="cpu")
    pairs = []
    for _ in range(PAIRS + 1):
        seconds = []
        for non_temporal in (False, True):
            library.set_prefetch(non_temporal)
            if not library.functions.freight_evict(weight.data.data_ptr(), weight.data.nbytes):
                return []
            begin = time.perf_counter()
            linear(library, x, weight)
            seconds.append(time.perf_counter() - begin)
        pairs.append((seconds[0], seconds[1]))
    return pairs[1:]  # the first one warms up


def past_the_caches(pairs: Sequence[tuple[float, float]]) -> bool:
    """Say whether prefetching past the caches is faster, given pairs of seconds (into, past).

    The median of the ratios must be below `GAIN`, and at least four of five pairs must be faster.
    """
    ratios = [past / into for into, past in pairs]
    return (
        bool(ratios)
        and statistics.median(ratios) < GAIN
        and sum(r < 1 for r in ratios) >= 0.8 * len(ratios)
    )


def decisions() -> Path | None:
    """Return the path of the file of decisions, or None for a user without a home directory."""
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "freight" / "prefetch.json"
    except RuntimeError:
        # No $HOME, and no passwd entry: a container that runs under an arbitrary user id.
        return None


def remembered(path: Path) -> dict[str, object]:
    """Read the decisions in the file; a file that is missing or damaged has none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def remember(path: Path, key: str, prefetches: bool) -> None:
    """Add a decision to the file. If it cannot be written, the next process measures again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(remembered(path) | {key: prefetches}, indent=1) + "\n")
