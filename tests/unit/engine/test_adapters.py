"""Which slot an adapter is loaded into, what a load that fails leaves, and that a hub is waited for
while steps go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from freight.engine.adapters import Adapters, LoRARequest
from freight.engine.loop import Loop
from freight.engine.messages import AdaptersAre, Command, Event, LoadAdapter, Stop
from freight.errors import CapacityError, CheckpointError, RequestError


@dataclass
class FakeSlots:
    """Slots for adapters of any path, whose digest is the path. `broken`: why none can be copied into
    a slot; `away`: paths on the hub.
    """

    num_slots: int = 2
    broken: str = ""
    away: set[str] = field(default_factory=set)
    asked: threading.Event = field(default_factory=threading.Event)
    answers: threading.Event = field(default_factory=threading.Event)
    written: list[int] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)

    def is_here(self, path: str) -> bool:
        return path not in self.away

    def fetch(self, path: str) -> str:
        self.asked.set()
        assert self.answers.wait(60)
        if self.broken:
            raise CheckpointError(self.broken)
        return f"/cache/{path}"

    def open(self, path: str) -> FakeOpened:
        self.opened.append(path)
        return FakeOpened(self, path)


@dataclass(frozen=True)
class FakeOpened:
    slots: FakeSlots
    digest: str

    def load(self, slot: int) -> None:
        self.slots.written.append(slot)
        if self.slots.broken:
            raise CheckpointError(self.slots.broken)


def names(adapters: Adapters) -> dict[str, tuple[str, int]]:
    return {adapter.name: (adapter.digest, adapter.slot) for adapter in adapters.loaded}


def test_a_slot_is_written_only_while_nobody_reads_it() -> None:
    slots = FakeSlots()
    in_use: set[int] = set()
    adapters = Adapters(slots, lambda: in_use)
    adapters.load("a", "1")
    in_use.add(0)
    adapters.load("a", "2")
    assert names(adapters) == {"a": ("2", 1)}
    with pytest.raises(CapacityError, match="all 2 are in use"):
        adapters.load("b", "3")
    in_use.add(1)
    with pytest.raises(CapacityError):
        adapters.load("a", "3")
    assert names(adapters) == {"a": ("2", 1)}
    in_use.clear()
    adapters.load("b", "3")
    assert names(adapters) == {"a": ("2", 1), "b": ("3", 0)}
    adapters.load("b", "4")  # in place: no other slot is free
    assert slots.written == [0, 1, 0, 0]


def test_the_same_files_are_not_loaded_again() -> None:
    slots = FakeSlots()
    adapters = Adapters(slots, set)
    adapters.load("a", "1")
    assert adapters.load("a", "1").slot == 0
    slots.opened.clear()
    assert adapters.requested(LoRARequest("a", 1, "1")).slot == 0
    assert adapters.requested(LoRARequest("a")).slot == 0
    assert not slots.opened  # nor read again for each request
    assert slots.written == [0]
    assert adapters.requested(LoRARequest("a", 1, "2")).slot == 1
    # another path with the same files is the path that requests are compared with from then on
    adapters.load("a", "other", folder="2")
    assert names(adapters) == {"a": ("2", 1)}
    assert adapters.loaded[0].asked == "other"


def test_a_load_that_fails_in_another_slot_changes_nothing() -> None:
    slots = FakeSlots()
    adapters = Adapters(slots, set)
    adapters.load("a", "1")
    slots.broken = "the file was changed"
    with pytest.raises(CheckpointError, match="was changed"):
        adapters.load("a", "2")
    assert slots.written == [0, 1]
    assert names(adapters) == {"a": ("1", 0)}


def test_a_load_that_fails_in_its_own_slot_takes_the_name_away() -> None:
    """What is left in the slot is neither version, and must not answer under the digest of one."""
    slots = FakeSlots(num_slots=1)
    adapters = Adapters(slots, set)
    adapters.load("a", "1")
    slots.broken = "the file was changed"
    with pytest.raises(CheckpointError, match="was changed"):
        adapters.load("a", "2")
    assert slots.written == [0, 0]
    with pytest.raises(RequestError, match="none is loaded"):
        adapters.named("a")
    slots.broken = ""
    adapters.load("a", "1")
    assert names(adapters) == {"a": ("1", 0)}


class Idle:
    """An engine that has nothing to compute."""

    has_unfinished = False
    has_store = False
    cache = SimpleNamespace(events=None)

    def __init__(self, slots: FakeSlots) -> None:
        self.adapters = Adapters(slots, set)

    def stats(self) -> str:
        return "idle"

    def report(self) -> None:
        return None


def run(slots: FakeSlots, commands: SimpleQueue[Command], emit: Callable[[Event], None]) -> None:
    Loop(Idle(slots), commands, emit).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["", "the hub does not answer"])
def test_commands_are_followed_while_files_are_fetched(broken: str) -> None:
    slots = FakeSlots(away={"owner/far"}, broken="")
    commands: SimpleQueue[Command] = SimpleQueue()
    answers: list[AdaptersAre] = []

    def emit(event: Event) -> None:
        if not isinstance(event, AdaptersAre):
            return
        answers.append(event)
        if event.command_id == "near":
            slots.broken = broken
            slots.answers.set()
        else:
            commands.put(Stop())

    commands.put(LoadAdapter("far", "far", "owner/far"))
    commands.put(LoadAdapter("near", "near", "near"))
    run(slots, commands, emit)
    assert slots.asked.is_set()
    assert [answer.command_id for answer in answers] == ["near", "far"]
    near, far = answers
    assert [adapter.name for adapter in near.loaded] == ["near"]
    if broken:
        assert str(far.error) == broken
        assert far.loaded == near.loaded
        return
    assert far.error is None
    assert far.loaded[1].asked == "owner/far"
    assert far.loaded[1].digest == "/cache/owner/far"
