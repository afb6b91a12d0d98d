"""The order of memory operations of the gather between GPUs: right in every order that memory allows,
wrong without any one of its parts, and the same in the model and in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.triton.push_model import (
    FLAG,
    SLOT,
    STEPS,
    Operation,
    Protocol,
    StaleError,
    explore,
)
from tests.kernels.triton.test_push import buffers, send
from torch import Tensor
from triton import knobs

from freight.kernels.triton import push
from freight.parallel.peers import FLAGS, PROGRAMS, WORD

PROTOCOLS = {
    "2 ranks": Protocol(ranks=2, turns=6),
    "3 ranks": Protocol(ranks=3, turns=3),
    "2 ranks, 2 programs": Protocol(ranks=2, turns=5, programs=2),
    "2 ranks, a rank leaves": Protocol(ranks=2, turns=6, leavers=(0, 1)),
    "2 ranks, 2 programs, a rank leaves": Protocol(ranks=2, turns=3, programs=2, leavers=(0,)),
    "3 ranks, a rank leaves": Protocol(ranks=3, turns=2, leavers=(0,)),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_rank_reads_the_columns_of_its_turn(name: str) -> None:
    assert explore(PROTOCOLS[name]) > 100


def without(operation: Operation, **changed: str) -> tuple[Operation, ...]:
    """STEPS with one operation changed."""
    assert operation in STEPS
    return tuple(replace(step, **changed) if step == operation else step for step in STEPS)


RELEASE, ACQUIRE = STEPS[2], STEPS[3]
WRONG: dict[str, dict[str, Any]] = {
    "one slot": {"slots": 1},
    "no release": {"steps": without(RELEASE, semantics="relaxed")},
    "a release for one GPU": {"steps": without(RELEASE, scope="gpu")},
    "no acquire": {"steps": without(ACQUIRE, semantics="relaxed")},
    "an acquire for one GPU": {"steps": without(ACQUIRE, scope="gpu")},
    "flags before columns": {"steps": (*STEPS[2:3], *STEPS[:2], *STEPS[3:])},
    "columns read before flags": {"steps": (*STEPS[:3], STEPS[5], *STEPS[3:5])},
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WRONG)
def test_no_part_can_be_left_out(name: str, ranks: int) -> None:
    with pytest.raises(StaleError):
        explore(replace(Protocol(ranks, turns=4), **WRONG[name]))


def test_a_program_waits_for_all_of_its_rank_between_turns() -> None:
    """The next turn may be divided among programs in another way."""
    with pytest.raises(StaleError):
        explore(replace(PROTOCOLS["2 ranks, 2 programs"], by_kernel=False))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_left_stores_nothing_more(ranks: int) -> None:
    with pytest.raises(StaleError):
        explore(Protocol(ranks, turns=3, leavers=(0,), goes_on=True))


class Trace:
    """The operations on slots and flags of one rank's launch in Triton's interpreter."""

    def __init__(self, own: Tensor, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import interpreter_builder

        self.done: list[Operation] = []
        begin = own.data_ptr()
        self._flags = range(begin + WORD * FLAGS, begin + slots)
        self._slots = range(begin + slots, begin + len(own))
        for name, note in (
            ("create_masked_load", self._loads),
            ("create_masked_store", self._stores),
            ("create_load", self._loads),
            ("create_store", self._stores),
            ("create_atomic_rmw", self._changes),
            ("create_barrier", self._meets),
        ):
            call = getattr(interpreter_builder, name)
            monkeypatch.setattr(interpreter_builder, name, self._noting(note, call))

    @staticmethod
    def _noting(note: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            note(*args)
            return call(*args)

        return noted

    def _note(self, operation: Operation) -> None:
        if self.done[-1:] != [operation]:
            self.done.append(operation)

    def _where(self, pointers: Any) -> str:
        places = [int(place) for place in pointers.data.flat]
        if any(place in self._slots for place in places):
            return SLOT
        return FLAG if any(place in self._flags for place in places) else ""

    def _loads(self, pointers: Any, *rest: Any) -> None:
        if where := self._where(pointers):
            self._note(Operation("load", where))

    def _stores(self, pointers: Any, *rest: Any) -> None:
        if where := self._where(pointers):
            self._note(Operation("store", where))

    def _changes(
        self, kind: Any, pointers: Any, values: Any, mask: Any, sem: Any, scope: Any
    ) -> None:
        if where := self._where(pointers):
            kind = {"XCHG": "store", "ADD": "load"}[kind.name]
            names = {"SYSTEM": "sys", "GPU": "gpu"}
            self._note(Operation(kind, where, sem.name.lower(), names[scope.name]))

    def _meets(self, *rest: Any) -> None:
        self._note(Operation("barrier"))


@pytest.mark.skipif(not knobs.runtime.interpret, reason="the interpreter alone is observed")
@pytest.mark.parametrize("observed", [0, 1])
def test_the_kernel_takes_the_steps_of_the_model(observed: int, monkeypatch) -> None:
    """Rank 0's launch, as it changes its own buffer, and as it changes rank 1's, which it only
    stores into. The last barrier is that of the count of programs.
    """
    layout, ranks = buffers(2, "cpu")
    parts = [torch.arange(24, dtype=torch.float32).view(3, 8) + rank for rank in (0, 1)]
    send(parts[1], ranks, layout, 1)
    trace = Trace(ranks[observed].own, layout.slots, monkeypatch)
    out = push.push(parts[0], ranks[0], layout, 0)
    assert torch.equal(out, torch.cat(parts, dim=1))
    assert trace.done == [*STEPS[: 3 if observed else None], Operation("barrier")]


def test_flags_of_programs_do_not_reach_the_slots() -> None:
    for size in (2, 3, 8, 64):
        layout, _ = buffers(size, "cpu", slot_bytes=1)
        assert WORD * (FLAGS + PROGRAMS * size) <= layout.slots < layout.total
