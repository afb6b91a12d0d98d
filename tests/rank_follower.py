"""A rank for tests: `freight.engine.follower` over pages of zeros, which it writes to a file at its
end.

So a test sees every byte that the rank has stored. `FREIGHT_TEST_PAGES` is the file's path.
`FREIGHT_TEST_FAULT` makes it fail: 'step 3' leaves that step before its first gather, 'late 3'
behind its last one, 'fingerprint' says to have opened something else, 'load' refuses to read its
weights, 'slow' reads them for a minute.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine import follower
from freight.errors import CapacityError, CheckpointError


def pages_of(pool: KVPool) -> list[dict[str, Tensor]]:
    """K, V and measured scales of each layer, as bytes [blocks, block_size, heads, …]."""
    found = []
    for layer in pool.layers:
        pages: Any = None if layer is None else layer.pages  # type: ignore[union-attr]
        parts = {"k": pages.k, "v": pages.v}
        if pages.k_scale is not None and pages.k_scale.ndim == 3:
            parts |= {"k_scale": pages.k_scale[..., None], "v_scale": pages.v_scale[..., None]}
        found.append(
            {name: part.contiguous().view(torch.uint8).clone() for name, part in parts.items()}
        )
    return found


def clear(pool: KVPool) -> None:
    """Fill the pages with zero bytes: those that are never written are otherwise anything."""
    for layer in pool.layers:
        pages: Any = layer.pages  # type: ignore[union-attr]
        for part in (pages.k, pages.v, pages.k_scale, pages.v_scale):
            if part is not None and (part.ndim == 4 or part.ndim == 3):
                part.zero_()


def main() -> None:
    made, allocate = [], follower.allocate_pool

    def cleared(*given: Any, **named: Any) -> KVPool:
        made.append(allocate(*given, **named))
        clear(made[-1])
        return made[-1]

    follower.allocate_pool = cleared

    leaving = threading.Lock()

    def leave(status: int) -> None:
        leaving.acquire()  # two threads see rank 0's end
        if made:
            path = Path(os.environ["FREIGHT_TEST_PAGES"])
            torch.save(pages_of(made[-1]), path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        os._exit(status)

    follower.leave = leave
    _break(os.environ.get("FREIGHT_TEST_FAULT", ""))
    follower.main()


def _break(fault: str) -> None:
    kind, _, number = fault.partition(" ")
    if kind == "fingerprint":
        follower.fingerprint = lambda *_: "fp_of_another"
    elif kind == "load":

        def refuse(*_: object) -> None:
            raise CheckpointError("a weight of this rank is damaged")

        follower.OpenModel.load = refuse
    elif kind == "slow":
        follower.OpenModel.load = lambda *_: time.sleep(60)
    elif kind in ("step", "late"):
        run, calls = follower.ModelRunner.run, iter(range(1, 1 << 30))

        def run_or_fail(*given: Any) -> Any:
            faulty = next(calls) == int(number)
            rows = run(*given) if kind == "late" or not faulty else None
            if faulty:
                raise CapacityError("no memory on this rank")
            return rows

        follower.ModelRunner.run = run_or_fail


if __name__ == "__main__":
    main()
