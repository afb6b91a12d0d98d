"""How weights are prefetched on this processor: measured once, and remembered for its model.

Some processors gain 3 % when weights are prefetched past the caches, others lose half of their
speed, and no feature says which. So a product is timed both ways, over a weight that is evicted
from the caches before each run: a tenth of a second, when the first large weight is packed. The
decision lies in `$XDG_CACHE_HOME/freight/prefetch.json` (default: `~/.cache`) by processor model,
build and number of threads. It changes no bit of a result.
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

from freight.device import cpu_name
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.linear import linear, pack
from freight.operands.weight import Weight

LARGE = (
    2**22
)  # bytes of a packed weight from which reading it from memory takes longer than all else
PAIRS = 11
GAIN = 0.98  # the share of the time that makes prefetching past the caches worth it


@cache
def tune(library: Library) -> None:
    """Set how `library` prefetches, once: as remembered for this processor, else as measured now.

    Nothing is measured for the amx build: its products with FP8 and bfloat16 weights prefetch in
    their own way.
    """
    if library.build == "amx":
        return
    path, key = decisions(), f"{cpu_name()}, {library.build}, {torch.get_num_threads()} threads"
    wanted = remembered(path).get(key) if path else None
    if not isinstance(wanted, bool):
        wanted = past_the_caches(measure(library))
        if path:
            remember(path, key, wanted)
    library.set_prefetch(wanted)


def measure(library: Library) -> list[tuple[float, float]]:
    """Pairs of seconds of a product of one row, prefetched into the caches and past them, in turns.

    [] where the caches cannot be emptied.
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
    """Whether prefetching past the caches pays: by the median of the ratios, and in four of five
    pairs.
    """
    ratios = [past / into for into, past in pairs]
    return (
        bool(ratios)
        and statistics.median(ratios) < GAIN
        and sum(r < 1 for r in ratios) >= 0.8 * len(ratios)
    )


def decisions() -> Path | None:
    """The file of decisions; None where nothing is remembered, for a user without a home directory."""
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "freight" / "prefetch.json"
    except (
        RuntimeError
    ):  # no $HOME, and no entry for this user id: a container under an arbitrary one
        return None


def remembered(path: Path) -> dict[str, object]:
    """The decisions in the file; a file that cannot be read is as good as none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def remember(path: Path, key: str, wanted: bool) -> None:
    """Add a decision to the file. Where nothing can be written it is measured again next time."""
    scratch = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(
            json.dumps(remembered(path) | {key: wanted}, indent=1) + "\n", encoding="utf-8"
        )
        scratch.replace(path)
