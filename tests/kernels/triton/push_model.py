"""All orders in which ranks that push their columns to each other can run, on memory that reorders.

`explore` runs the steps of `push_kernel`, STEPS, on every rank, and goes through all states that
they can come to. test_push_model.py compares STEPS with what the kernel does in Triton's interpreter.

Memory. What a rank stores waits in a buffer, and reaches each memory at any time and in any order,
except that two stores to one place keep theirs, and that a flag set with release semantics reaches a
memory after what its program stored there in that turn. (The hardware orders more: release holds back
a flag until the stores to all memories are done.) A flag that was read with acquire semantics comes
before loads that follow it; otherwise a load may be as early as the turn's beginning. An access whose
scope is one GPU orders nothing between two.

Ranks. A rank runs a turn's kernel to its end, then the next turn's: all programs have ended, but what
they stored may still wait. Program p of turn t has word (p + t // 2) % programs of each part, so what
one program reads is rewritten two turns later by another one. A rank stores the turn's number, so a
word that is not the number is not this turn's. Nothing that only one rank sees is a step of its own:
it is taken at once. Words of a program are loaded at any time from the end of its wait to its own
end, so all must be right in every state between.

A program of `leavers` may end its wait without the flags at any time; its rank begins no further turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

SLOT, FLAG = "slot", "flag"


@dataclass(frozen=True)
class Operation:
    """What the kernel does with the slots or flags: `kind` is 'store', 'load' or 'barrier'."""

    kind: str
    where: str = ""
    semantics: str = ""
    scope: str = ""


STEPS = (
    Operation("store", SLOT),  # own columns, into the slots of all
    Operation("barrier"),
    Operation("store", FLAG, "release", "sys"),  # own flag, in the buffers of all
    Operation(
        "load", FLAG, "acquire", "sys"
    ),  # flags of all, in the own buffer, until they are set
    Operation("barrier"),
    Operation("load", SLOT),  # columns of all, from the own slot
)
WAITS, READS, ENDED, LEFT = range(4)  # what a program does

# memory: turn last stored, by index; pending: (index, turn, index of what must have come before)
Program = tuple[int, int]  # its turn; what it does
Rank = tuple[Program, ...]
Entry = tuple[int, int, int]
State = tuple[tuple[Rank, ...], tuple[int, ...], frozenset[Entry]]


@dataclass(frozen=True)
class Protocol:
    """What `explore` runs."""

    ranks: int
    turns: int
    programs: int = 1
    slots: int = 2
    steps: tuple[Operation, ...] = STEPS
    leavers: tuple[int, ...] = ()
    goes_on: bool = False  # a rank that left begins further turns
    by_kernel: bool = True  # else each program begins its next turn by itself

    @property
    def releases(self) -> bool:
        """Whether a flag comes to a memory after the columns."""
        return self._follows(Operation("store", FLAG, "release", "sys"), "store")

    @property
    def acquires(self) -> bool:
        """Whether columns are loaded after the flags."""
        return self._follows(Operation("load", FLAG, "acquire", "sys"), "load", after=True)

    def _follows(self, fence: Operation, kind: str, after: bool = False) -> bool:
        if fence not in self.steps:
            return False
        places = self.steps.index(fence), self.steps.index(Operation(kind, SLOT))
        return (places[1] > places[0]) == after

    def word(self, reader: int, writer: int, turn: int, program: int) -> int:
        """The index of what `writer` stores for `reader`."""
        word = (program + turn // 2) % self.programs
        return self._pair(reader, writer) + turn % self.slots * self.programs + word

    def flag(self, reader: int, writer: int, program: int) -> int:
        return self._pair(reader, writer) + self.slots * self.programs + program

    def _pair(self, reader: int, writer: int) -> int:
        return (reader * self.ranks + writer) * (self.slots + 1) * self.programs

    @property
    def size(self) -> int:
        return self._pair(self.ranks, 0)

    def others(self, rank: int) -> Iterator[int]:
        return (other for other in range(self.ranks) if other != rank)


class StaleError(Exception):
    """A rank reads a word that is not of its turn."""


def explore(protocol: Protocol) -> int:
    """Return the number of states. Raises StaleError, and AssertionError if a rank waits for ever."""
    ranks = (((0, ENDED),) * protocol.programs,) * protocol.ranks
    begin = _settled(protocol, ranks, (0,) * protocol.size, frozenset())
    seen = {begin}
    open_states = deque([begin])
    while open_states:
        state = open_states.popleft()  # the shortest way to a fault is found first
        _check(protocol, state)
        following = list(_following(protocol, state))
        assert following or protocol.leavers or _all_ended(protocol, state), state
        for other in following:
            if other not in seen:
                seen.add(other)
                open_states.append(other)
    return len(seen)


def _all_ended(protocol: Protocol, state: State) -> bool:
    return all(set(programs) == {(protocol.turns, ENDED)} for programs in state[0])


def _check(protocol: Protocol, state: State) -> None:
    ranks, memory, _ = state
    for reader, programs in enumerate(ranks):
        for program, (turn, does) in enumerate(programs):
            if does == READS or (does == WAITS and not protocol.acquires):
                for writer in protocol.others(reader):
                    found = memory[protocol.word(reader, writer, turn, program)]
                    if found != turn:
                        raise StaleError(
                            f"in turn {turn} rank {reader} reads what rank {writer} stored in turn {found}"
                        )


def _following(protocol: Protocol, state: State) -> Iterator[State]:
    """The states that one step leads to: a store comes to a memory, or a program ends."""
    ranks, memory, pending = state
    before = {(entry[0], entry[1]) for entry in pending}
    for entry in pending:
        index, turn, needs = entry
        if (needs, turn) in before or any(i == index and t < turn for i, t in before):
            continue
        stored = (*memory[:index], turn, *memory[index + 1 :])
        yield _settled(protocol, ranks, stored, pending - {entry})
    for rank, programs in enumerate(ranks):
        ends = {READS: ENDED} | ({WAITS: LEFT} if rank in protocol.leavers else {})
        for program, (turn, does) in enumerate(programs):
            if does in ends:
                changed = (*programs[:program], (turn, ends[does]), *programs[program + 1 :])
                now = (*ranks[:rank], changed, *ranks[rank + 1 :])
                yield _settled(protocol, now, memory, pending)


def _settled(
    protocol: Protocol, ranks: tuple[Rank, ...], memory: tuple[int, ...], pending: frozenset[Entry]
) -> State:
    """The state after what nobody else sees: kernels begin, and waits end."""
    settled = []
    issued: list[Entry] = []
    for rank, programs in enumerate(ranks):
        begun = list(programs)
        for program, (turn, _) in enumerate(programs):
            if turn < protocol.turns and _may_begin(protocol, programs, program):
                begun[program] = (turn + 1, WAITS)
                issued += _issued(protocol, rank, turn + 1, program)
        for program, (turn, does) in enumerate(begun):
            if does == WAITS and _arrived(protocol, memory, rank, turn, program):
                begun[program] = (turn, READS)
        settled.append(tuple(begun))
    return tuple(settled), memory, pending.union(issued)


def _may_begin(protocol: Protocol, programs: Rank, program: int) -> bool:
    """Whether a program begins its next turn: all of its rank have ended this one."""
    if not protocol.by_kernel:
        programs = (programs[program],)
    ends = {ENDED, LEFT} if protocol.goes_on else {ENDED}
    return {does for _, does in programs} <= ends


def _issued(protocol: Protocol, rank: int, turn: int, program: int) -> Iterator[Entry]:
    for reader in protocol.others(rank):
        word = protocol.word(reader, rank, turn, program)
        yield word, turn, -1
        yield protocol.flag(reader, rank, program), turn, word if protocol.releases else -1


def _arrived(
    protocol: Protocol, memory: tuple[int, ...], rank: int, turn: int, program: int
) -> bool:
    return all(
        memory[protocol.flag(rank, other, program)] >= turn for other in protocol.others(rank)
    )
