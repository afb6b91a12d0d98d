"""A rank for tests: `freight.engine.follower` over pages and states of zeros, which it writes to a
file at its end, with what it drew in launched steps to another.

So a test sees every byte that the rank has stored. `FREIGHT_TEST_PAGES` is the file's path.
`FREIGHT_TEST_FAULT` makes it fail: 'step 3' leaves that step before its first gather, 'late 3'
behind its last one, 'draft 3' and 'drafted 3' do so with that pass of a head that drafts, 'ahead 3'
the third step that is launched on top of another before its first gather, 'drawn 3' behind its
draw, 'fingerprint' says to have opened something else, 'load' refuses to read its weights, 'slow'
reads them for a minute, 'byte' gathers a byte that is wrong, 'memory' has none for its weights,
'cache' none for its cache, 'memory 3' none for that step, 'capture' captures its first step in
vain, 'adapter' cannot read the file of an adapter. With `FREIGHT_TEST_INTERPRETER` Triton's
interpreter has the numbers of a GPU (`interpreter.py`), and with `FREIGHT_TEST_PUSH`, 'launches' or
'graphs', ranks push (`pushed_memory.py`).
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freight.cache.pool import KVPool, PagedKV, PagedState
from freight.engine import follower, runner
from freight.errors import CapacityError, CheckpointError
from freight.parallel.distributed import Distributed


def pages_of(pool: KVPool) -> list[dict[str, Tensor]]:
    """The bytes of each layer: of K, V and measured scales [blocks, block_size, heads, …], and of
    states [blocks, …]. Bytes of a value are the last dimension.
    """
    return [
        {
            name: part.contiguous()[..., None].view(torch.uint8).clone()
            for name, part in parts_of(layer).items()
        }
        for layer in pool.layers
    ]


def parts_of(layer: PagedKV | PagedState | None) -> dict[str, Tensor]:
    """What a layer keeps, by name."""
    if layer is None:
        return {}
    if isinstance(layer, PagedState):
        return dict(layer.states.parts)
    pages = layer.pages
    parts = {"k": pages.k}
    if not pages.v_in_k:
        parts["v"] = pages.v
    for name, scale in (("k_scale", pages.k_scale), ("v_scale", pages.v_scale)):
        if scale is not None and scale.ndim > 2:  # measured; static ones are numbers by channel
            parts[name] = scale if scale.ndim == 4 else scale[..., None]
    return parts if pages.rotated is None else parts | {"rotated": pages.rotated}


def clear(pool: KVPool) -> None:
    """Fill pages and states with zero bytes: those that are never written are otherwise anything."""
    for layer in pool.layers:
        for part in parts_of(layer).values():
            part.zero_()


def corrupt() -> None:
    """From now on this process gathers a byte that is wrong."""
    gather = Distributed.gather

    def gather_wrong(transport: Distributed, part: Tensor) -> Tensor:
        gathered = gather(transport, part)
        gathered.view(torch.uint8)[1, -1] ^= 1
        return gathered

    Distributed.gather = gather_wrong


def note_draws() -> list[Any]:
    """Return what launched steps of this process draw from now on: the microbatch, whether the step
    follows one under way, and the tokens, None where it fails.
    """
    noted: list[Any] = []
    launch = runner.ModelRunner.launch

    def launch_and_note(
        of: Any, slices: Any, draws: Any, microbatch: int = 0, inputs: Any = None
    ) -> Any:
        noted.append((microbatch, inputs is not None, None))
        drawn = launch(of, slices, draws, microbatch, inputs)
        noted[-1] = (*noted[-1][:2], drawn.tokens.tolist())
        return drawn

    runner.ModelRunner.launch = launch_and_note
    return noted


def draws_of(path: Path) -> list[Any]:
    """What the rank whose pages are in this file noted."""
    noted: list[Any] = torch.load(path.with_suffix(".draws"))
    return noted


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
            part = path.with_suffix(f".{os.getpid()}")  # there may be several other ranks
            torch.save(draws, path.with_suffix(".draws"))
            torch.save(pages_of(made[-1]), part)
            part.rename(path)
        os._exit(status)

    follower.leave = leave
    _break(os.environ.get("FREIGHT_TEST_FAULT", ""))
    draws = note_draws()
    if "FREIGHT_TEST_INTERPRETER" not in os.environ:
        follower.main()
        return
    from tests.interpreter import numbers_as_on_a_gpu, quick_interpreter

    pushing = os.environ.get("FREIGHT_TEST_PUSH", "")
    if pushing:
        from tests.pushed_memory import pushing_here

        pushing_here(pushing == "graphs")
    with numbers_as_on_a_gpu(), quick_interpreter():
        follower.main()


def refuse_access(path: str, *_: object) -> None:
    raise PermissionError(13, "Permission denied", path)


def exhaust(*_: object, **named: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore of it")


_REPLACED: dict[str, tuple[Any, str, Any]] = {
    "memory": (follower.OpenModel, "load", exhaust),
    "cache": (follower, "allocate_pool", exhaust),
    "adapter": (follower.LoraAdapter, "open", refuse_access),
}


def _break(fault: str) -> None:
    kind, _, number = fault.partition(" ")
    if kind == "fingerprint":
        follower.fingerprint = lambda *_: "fp_of_another"
    elif kind == "load":

        def refuse(*_: object) -> None:
            raise CheckpointError("a weight of this rank is damaged")

        follower.OpenModel.load = refuse
    elif kind == "byte":
        corrupt()
    elif fault in _REPLACED:
        setattr(*_REPLACED[fault])
    elif kind == "slow":
        follower.OpenModel.load = lambda *_: time.sleep(60)
    elif kind in ("ahead", "drawn"):
        launch, launches = runner.ModelRunner.launch, iter(range(1, 1 << 30))

        def launch_or_fail(*given: Any) -> Any:
            faulty = given[-1] is not None and next(launches) == int(number)
            drawn = launch(*given) if kind == "drawn" or not faulty else None
            if faulty:
                raise CapacityError("no memory on this rank")
            return drawn

        runner.ModelRunner.launch = launch_or_fail
    elif kind in ("step", "late", "memory"):
        _break_run(follower.ModelRunner, kind, int(number))
    elif kind in ("draft", "drafted"):
        _break_run(follower.HeadRunner, {"drafted": "late"}.get(kind, kind), int(number))


def _break_run(of: Any, kind: str, number: int) -> None:
    run, calls = of.run, iter(range(1, 1 << 30))

    def run_or_fail(*given: Any) -> Any:
        faulty = next(calls) == number
        rows = run(*given) if kind == "late" or not faulty else None
        if faulty and kind == "memory":
            exhaust()
        if faulty:
            raise CapacityError("no memory on this rank")
        return rows

    of.run = run_or_fail


if __name__ == "__main__":
    main()
