"""Rank 0 of several: starts the others, tells them each step, and ends with them.

Scheduler, cache manager, sampler and texts exist on rank 0 alone. The others (`follower.py`) make
the same calls of the model on their shares of weights and pages. Between the two there are a
socket for messages, which also shows the end of a process, and the transport of gathers. Ranks of
other machines come by themselves (`node.py`).

A rank that ends takes the engine with it, with a RankError that names it, within a second. A step
that fails on one rank fails on all: each leaves it, and then all go on from the same gather. So
the engine may repeat it in parts, as with one rank.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from freight.base.descent import from_lasting_thread, with_parent
from freight.cache.arena import mapped
from freight.checkpoint.lora import LoraAdapter
from freight.engine.heads import OpenHead
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import Inputs
from freight.engine.sampler import Draw
from freight.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    FreightError,
    KernelError,
    RankError,
)
from freight.parallel import messages
from freight.parallel.join import Join, Meeting
from freight.parallel.messages import Kind, Start, integers
from freight.parallel.places import Place
from freight.parallel.ranks import Transport
from freight.parallel.shared import SharedFiles, SharedMemory, nameless_memory
from freight.parallel.steps import LaunchNumbers, SliceNumbers, StepWriter
from freight.settings.engine import EngineArgs
from freight.settings.nodes import with_own

START_TIMEOUT = 600.0  # seconds for a rank to open the model, or to read its weights
_PATIENCE = 5.0  # seconds until a rank that should leave is killed
_HASTE = 0.2  # the same where the engine cannot go on: clients wait for its end
_KILLED = 1.0  # seconds for a rank that was killed to be gone; a frozen one may never be
_FAREWELL = 1.0  # seconds for a rank of another machine to leave by itself
# hang-ups, and streams that the other end has closed, which Linux tells apart
HANG_UP = getattr(select, "POLLRDHUP", 0)
_CODES = {kind: code for code, kind in enumerate(Logits)}
_ERRORS: dict[str, type[FreightError]] = {
    kind.__name__: kind for kind in (CapacityError, CheckpointError, ConfigError, KernelError)
}

logger = logging.getLogger("freight")


def spawn(files: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which gets these descriptors: its socket, then
    `SharedFiles.of_rank`.

    Of several machines: its socket and, on another than rank 0's, a pipe that hangs up with the
    process that started it. It has a session of its own: Ctrl-C in a terminal is for rank 0 alone.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -O, -X dev
    command = [sys.executable, *flags, "-m", "freight.engine.follower", *map(str, files)]
    environ = with_parent(os.environ)
    return from_lasting_thread(
        lambda: subprocess.Popen(
            command, env=environ, pass_fds=files, stdin=subprocess.DEVNULL, start_new_session=True
        )
    )


@dataclass(eq=False)
class _Ranks:
    """What rank 0 holds of the other ranks: an object of its own, so that a finalizer of `Leader` can
    close it.
    """

    memory: Transport
    passed: list[int]  # descriptors that the others alone need, until they have them
    # of the memory of the others' pages, until it is mapped; none if nobody maps it
    pages: list[int]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    wake: tuple[int, int] = field(default_factory=os.pipe)
    meeting: Meeting | None = None
    remote: dict[int, socket.socket] = field(default_factory=dict)  # by rank, of other machines
    why: str = ""  # the engine ends; '' where that is wanted
    closing: bool = False
    ready: bool = False  # they have their weights and caches: from now on they answer in time
    watcher: threading.Thread | None = None
    unbind: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        _living.add(self)

    def pass_on(self) -> None:
        """Close the descriptors that the others have by now."""
        while self.passed:
            os.close(self.passed.pop())

    def close_pages(self) -> None:
        """Close the descriptors of pages, which are mapped, or never will be."""
        while self.pages:
            os.close(self.pages.pop())

    def close_in_child(self) -> None:
        """Close what a fork of this process has: it would keep rank 0 alive for the others."""
        if self.closing:
            return
        self.closing = True
        for connection in (*self.sockets, *self.remote.values()):
            connection.close()
        if self.meeting is not None:
            self.meeting.close()
        self.pass_on()
        self.close_pages()
        self.memory.close_in_child()

    def close(self) -> None:
        """End the other ranks: their sockets close, on which they leave."""
        if self.closing:
            return
        self.closing = True
        os.close(self.wake[1])
        self._take_leave()
        for connection in (*self.sockets, *self.remote.values()):
            connection.close()
        if self.meeting is not None:
            self.meeting.close()
        if self.watcher is not None and self.watcher is not threading.current_thread():
            self.watcher.join()
        os.close(self.wake[0])
        self._end_processes()
        self.pass_on()
        self.close_pages()
        self.memory.close()
        self.unbind()

    def _end_processes(self) -> None:
        """Wait until the ranks of this machine have left; kill those that do not."""
        until = time.monotonic() + _PATIENCE
        if self.why:
            until = time.monotonic() + _HASTE
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED)

    def _take_leave(self) -> None:
        """Tell ranks of other machines why, so that their command can say so; one that is busy sees
        its socket close.
        """
        until = time.monotonic() + _FAREWELL
        for connection in self.remote.values():
            with suppress(OSError):
                connection.settimeout(_FAREWELL)
                messages.send(connection, Kind.STOP, self.why.encode())
        for connection in self.remote.values():
            with suppress(OSError):
                connection.settimeout(max(0.01, until - time.monotonic()))
                while connection.recv(1 << 16):
                    pass


# of this process; a forked child (multiprocessing) must not keep second ends open
_living: weakref.WeakSet[_Ranks] = weakref.WeakSet()


def _close_in_child() -> None:
    for ranks in _living:
        ranks.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


class Leader:
    """The other ranks, from rank 0's side."""

    def __init__(
        self,
        size: int,
        timeout: float,
        maps_pages: bool = False,
        meeting: Meeting | None = None,
        nodes: int = 1,
        backend: str | None = None,
        slot_bytes: int = 0,
    ) -> None:
        """timeout: seconds after which a rank that does not answer counts as lost. maps_pages: the
        others allocate their caches in memory that `allocate` returns. meeting: where the ranks of
        the other `nodes` - 1 machines come. backend: of torch.distributed, over which they gather;
        None: over shared memory, or gloo between machines. slot_bytes: as in `Start`.
        """
        self._files: SharedFiles | None = None
        self._store: tuple[str, int] | None = None
        self._private: tuple[
            int, ...
        ] = ()  # the memory of a store that ranks of one machine meet by
        self.memory: Transport
        self._backend = backend or "gloo"
        self._slot_bytes = slot_bytes
        if meeting is None and backend is None:
            self._files = SharedFiles.create(size)
            self.memory = SharedMemory(self._files, 0, timeout)
        elif meeting is None:
            self._private = (nameless_memory(),)
            self.memory = _on_one_machine(
                self._private[0], size, timeout, self._backend, slot_bytes
            )
        else:
            self.memory, self._store = _distributed(
                meeting.host, size, timeout, self._backend, slot_bytes
            )
        self._nodes = nodes
        self._here = size // nodes  # ranks of this machine
        self.size = size
        self._timeout = timeout
        self.on_lost: Callable[[], None] = lambda: None  # called by another thread
        self._writer = StepWriter()
        self._torn = False  # the ranks have to leave a step
        self._restarts = 0
        self._why_anew = ""  # the last time
        pages = []
        if maps_pages:
            pages = [nameless_memory() for _ in range(1, size)]
        passed = []
        if self._files is not None:
            passed = self._files.of_others(0)
        self._ranks = _Ranks(self.memory, passed, pages, meeting=meeting)
        self._finalizer = weakref.finalize(self, self._ranks.close)

    def close(self, why: str = "") -> None:
        """End the other ranks and wait for them. Steps then raise RankError. why: the engine ends,
        where that was not wanted.
        """
        self._ranks.why = self._ranks.why or why
        self._finalizer()

    def take(self, place: Place) -> None:
        """Bind the calling thread to rank 0's processors until the ranks are ended."""
        self._ranks.unbind = place.take()

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks of this machine."""
        return [process.pid for process in self._ranks.processes]

    def start(
        self, args: EngineArgs, random_shape: str | None, places: Sequence[Place], identity: str
    ) -> None:
        """Start the other ranks, which open the model with `args`.

        identity: `opened_as` of rank 0. Raises RankError if one ends or opened anything else, and its
        own error if it refused.
        """
        ranks = self._ranks
        come = {}
        if ranks.meeting is not None:
            come = ranks.meeting.accept(random_shape)
            ranks.meeting.close()  # who comes later is not left waiting
        for rank, (connection, _) in come.items():
            ranks.remote[rank] = connection
        for rank in range(1, self.size):
            start = Start(
                args=args,
                random_shape=random_shape,
                rank=rank,
                size=self.size,
                processors=None,
                cores=1,
                timeout=self._timeout,
                log_level=logger.getEffectiveLevel(),
                store=self._store,
                shares_memory=self._files is not None,
                backend=self._backend,
                slot_bytes=self._slot_bytes,
            )
            if rank in come:
                connection, join = come[rank]
                connection.settimeout(START_TIMEOUT)
                ranks.sockets.append(connection)
                start = _start_of(start, join)
            else:
                ranks.sockets.append(self._spawn(rank))
                place = places[rank]
                start = replace(start, processors=place.listed, cores=place.cores)
            self._tell(rank, Kind.START, start.encode())
        ranks.pass_on()
        ends = [connection.fileno() for connection in ranks.sockets]
        timeout = None
        if self._files is not None:  # pipes hang up however a process ends, also in its kernel
            ends = [*self._files.reading[1:]]
            timeout = self._timeout
        ranks.watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), ends, ranks, timeout), daemon=True
        )
        ranks.watcher.start()
        for rank in range(1, self.size):
            theirs_is = self._answer(rank, Kind.OPENED)
            if theirs_is != identity:
                raise RankError(f"{self._named(rank)} {_difference(theirs_is, identity)}")

    def _spawn(self, rank: int) -> socket.socket:
        """Start a rank on this machine; return the socket to it."""
        ranks = self._ranks
        ours, theirs = socket.socketpair()
        ours.settimeout(START_TIMEOUT)
        with theirs:
            shared = self._private
            if self._files is not None:
                shared = self._files.of_rank(rank)
            pages = ranks.pages[rank - 1 : rank]
            ranks.processes.append(spawn((theirs.fileno(), *shared, *pages)))
        return ours

    def _named(self, rank: int) -> str:
        """Name a rank, and its machine where there are several."""
        if self._nodes == 1:
            return f"rank {rank}"
        return f"rank {rank} (node {rank // self._here})"

    def load(self, max_model_len: int, positions: int) -> None:
        """Have the others read their weights, as rank 0 does meanwhile."""
        self._send(Kind.LOAD, integers((max_model_len, positions)))

    def wait_loaded(self) -> int | None:
        """Wait until all have their weights. Return the fewest bytes that one of them has for a cache
        on a GPU of its own; None where all have the memory of rank 0. Raises as `start`.
        """
        answers = [self._answer(rank, Kind.LOADED) for rank in range(1, self.size)]
        return min((int(free) for free in answers if free), default=None)

    def allocate(
        self,
        max_model_len: int,
        num_blocks: Sequence[int],
        num_bytes: int,
        check: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...]:
        """Have the others allocate their caches, of `num_blocks` by group, which fit into
        `num_bytes`. Return their memory, from rank 1 on, if it is mapped.

        check: what they compute before anything else, as this rank does. Raises KernelError where
        that shows that a rank differs from one alone.
        """
        for number in self._ranks.pages:
            os.ftruncate(number, num_bytes)  # committed at the first write
        self._send(Kind.POOL, integers((max_model_len, *num_blocks)))
        for rank in range(1, self.size):
            self._answer(rank, Kind.READY)
        if check is not None:  # kernels are compiled, which takes them as long as weights
            self.memory.meet()
            self._check(check)
        for connection in self._ranks.sockets:
            connection.settimeout(self._timeout)
        if check is None:
            self.memory.meet()
        self._ranks.ready = True
        memories = tuple(mapped(number, num_bytes) for number in self._ranks.pages)
        self._ranks.close_pages()
        return memories

    def _check(self, check: Callable[[], None]) -> None:
        """Run the check that all ranks run. Raises the error of the first that failed."""
        try:
            check()
        except KernelError:
            failed = self.memory.failed()
            self.memory.fail()
            if failed:
                self._answer(failed, Kind.CHECKED)  # raises its words
            raise
        for rank in range(1, self.size):
            self._answer(rank, Kind.CHECKED)

    def running(self, slices: Sequence[SequenceSlice]) -> AbstractContextManager[None]:
        """Have the others run `slices`, as the body does. Raises as `step`."""
        return self.step(Kind.RUN, lambda: self.encode(slices))

    def drafting(
        self, slices: Sequence[SequenceSlice], features: Tensor | None
    ) -> AbstractContextManager[None]:
        """Have the others run a head over `slices`, as the body does, with the features that it takes:
        requests keep these on rank 0 alone. Raises as `step`.
        """

        def data() -> bytes:
            given = b""
            if features is not None:
                given = features.contiguous().view(torch.uint8).numpy().tobytes()
            return self._writer.encode_draft(_numbers(slices), given)

        return self.step(Kind.DRAFT, data)

    def taking_logits(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Have the others compute the logits of `rows` of the last run, as the body does. Raises as
        `step`.
        """
        return self.step(Kind.LOGITS, lambda: integers(rows), self.beginning)

    @property
    def beginning(self) -> int:
        """How often all ranks began anew: they then have no rows, tokens and block tables of before."""
        return self._restarts

    def launching(
        self,
        slices: Sequence[SequenceSlice],
        draws: Sequence[Draw],
        microbatch: int,
        inputs: Inputs | None,
    ) -> AbstractContextManager[None]:
        """Have the others run `slices` and draw, as the body does; `inputs`: of the last step of the
        microbatch that was launched. Raises as `step`.
        """
        rows = None
        needed = None
        if inputs is not None:
            rows = inputs.rows
            needed = inputs.drawn.beginning

        def data() -> bytes:
            launch = LaunchNumbers(microbatch, _numbers(slices), draws, rows)
            return self._writer.encode_launch(launch)

        return self.step(Kind.LAUNCH, data, needed)

    def settle(self, beginning: int, copied: torch.cuda.Event | None) -> None:
        """Wait for an event behind a step that was launched after this beginning. Raises KernelError
        where all began anew since: gathers of the step may have ended early.
        """
        self._require_since(beginning)
        try:
            if copied is None:
                self.memory.finish()
            else:
                self.memory.wait(copied)
        except KernelError:
            self._torn = True
            raise

    def _require_since(self, beginning: int) -> None:
        if beginning != self._restarts:
            raise KernelError(f"a rank has left the step, or one before it: {self._why_anew}")

    @contextmanager
    def step(
        self, kind: Kind, data: Callable[[], bytes], needed: int | None = None
    ) -> Iterator[None]:
        """Have the others compute what the body computes here. `data` is called once they all know
        the same: they may have to begin anew first, and then know no block tables. needed: the
        `beginning` of an earlier step that this one goes on from; None: of none.

        Whatever ends the body early makes them leave the step. Raises RankError once a rank is
        lost, KernelError, with that rank's words, where a rank has left the step, or the one that is
        needed.
        """
        self._require_all()
        if self._torn or self.memory.failed() is not None:
            self._restart()
            if kind is not Kind.LOGITS:  # whose rows are of a step that is repeated with a warning
                logger.warning("the ranks begin anew: %s", self._why_anew)
        if needed is not None:
            self._require_since(needed)
        self._torn = True
        try:
            self._send(kind, data())
            yield
            if kind is not Kind.LAUNCH:  # for which `settle` waits
                self.memory.finish()
        except RankError as error:
            raise self._lost(error) from error
        except KernelError as error:
            failed = self.memory.failed()
            self.memory.fail()
            words = self._restart()
            interrupt = self.memory.take_interrupt()
            if interrupt is not None:
                raise interrupt from None
            if failed:
                raise KernelError(f"rank {failed}: {words[failed - 1]}") from error
            raise
        except BaseException:
            self.memory.fail()
            self._restart()
            raise
        self._torn = False

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Have the others load an adapter that rank 0 has opened. Raises RankError once a rank is lost,
        and its own error where one cannot load it.
        """
        self._require_all()
        if self._torn or self.memory.failed() is not None:
            self._restart()
        self._send(Kind.ADAPTER, f"{slot} {adapter.digest} {adapter.path}".encode())
        failed: FreightError | None = None
        for rank in range(1, self.size):
            try:
                self._answer(rank, Kind.LOADED)
            except RankError:
                raise
            except FreightError as error:  # the answers of the others are read as well
                failed = error
        if failed is not None:
            raise failed

    def encode(self, slices: Sequence[SequenceSlice]) -> bytes:
        """Return a step's slices as the others read them."""
        return self._writer.encode(_numbers(slices))

    def _restart(self) -> list[str]:
        """Make every rank leave what it computes; return why each one did, by rank from 1 on."""
        self._torn = True
        self._writer.clear()
        self.memory.fail()
        self._restarts += 1
        self._send(Kind.RESTART, integers((self._restarts,)))
        words = [self._left(rank) for rank in range(1, self.size)]
        self.memory.restart(self._restarts)
        self._why_anew = "; ".join(filter(None, words))
        self._torn = False
        return words

    def _left(self, rank: int) -> str:
        """Wait until a rank has left what it computed; return why."""
        while True:  # an interrupt may have kept the answer to an earlier call from being read
            number, _, words = self._answer(rank, Kind.LEFT).partition(" ")
            if int(number) == self._restarts:
                return words

    def _send(self, kind: Kind, data: bytes) -> None:
        for rank in range(1, self.size):
            self._tell(rank, kind, data)

    def _tell(self, rank: int, kind: Kind, data: bytes) -> None:
        try:
            messages.send(self._ranks.sockets[rank - 1], kind, data)
        except OSError as error:
            raise self._gone(rank) from error

    def _answer(self, rank: int, expected: Kind) -> str:
        try:
            kind, data = messages.receive(self._ranks.sockets[rank - 1])
        except TimeoutError as error:
            self.memory.lose(rank, is_silent=True)
            self._ranks.why = f"{self._named(rank)} does not answer"
            raise RankError(f"{self._ranks.why}: the engine cannot go on") from error
        except (EOFError, OSError) as error:
            raise self._gone(rank) from error
        text = data.decode()
        if kind is Kind.FAILED:
            name, _, reason = text.partition("\n")
            raise _ERRORS.get(name, RankError)(f"{self._named(rank)}: {reason}")
        if kind is not expected:
            raise RankError(f"rank {rank} said {kind.name}, where {expected.name} was expected")
        return text

    def _require_all(self) -> None:
        if self._ranks.closing:
            raise RankError("the ranks of this engine were ended")
        if self.memory.lost():
            raise self._lost(None)

    def _gone(self, rank: int) -> RankError:
        """Return the error for a rank whose socket has closed."""
        self.memory.lose(rank)
        return self._lost(None)

    def _lost(self, error: RankError | None) -> RankError:
        """Return the error that names the lost rank, and how its process ended."""
        lost = self.memory.lost()
        if not lost:
            return error or RankError("another rank has ended")
        how = ""
        for rank, process in enumerate(self._ranks.processes, 1):
            if lost.startswith(f"rank {rank} "):
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(0.1)
                    how = f" with status {status}"
                    if status < 0:
                        how = f" with signal {-status}"
        for rank in self._ranks.remote:
            lost = lost.replace(f"rank {rank} ", f"{self._named(rank)} ")
        self._ranks.why = self._ranks.why or f"{lost}{how}"
        return RankError(f"{lost}{how}: the engine cannot go on")


def _numbers(slices: Sequence[SequenceSlice]) -> list[SliceNumbers]:
    return [
        SliceNumbers(
            part.token_ids,
            part.start,
            part.block_ids,
            _CODES[part.logits],
            part.adapter,
            part.second_text,
        )
        for part in slices
    ]


def opened_as(fingerprint: str, kernels: str, head: OpenHead | None) -> str:
    """Return what a rank says of what it opened: fingerprint, also of a head that drafts, version of torch,
    kernels.
    """
    of_head = "" if head is None else head.identity
    return f"{fingerprint}{of_head} {torch.__version__} {kernels}"


def _difference(theirs: str, ours: str) -> str:
    """Say in what a rank differs from rank 0."""
    fingerprint, version, kernels = theirs.split()
    of_zero = ours.split()
    if version != of_zero[1]:
        return f"has torch {version}, rank 0 {of_zero[1]}"
    if kernels != of_zero[2]:
        return (
            f"computes with {kernels}, rank 0 with {of_zero[2]}: ranks need processors of one kind"
        )
    return (
        "opened another model, or is another build of Freight: its fingerprint is "
        f"{fingerprint}, that of rank 0 {of_zero[0]}"
    )


def _on_one_machine(
    number: int, size: int, timeout: float, backend: str, slot_bytes: int
) -> Transport:
    """Return rank 0's transport over torch.distributed, to ranks that get the descriptor of the store's
    memory.
    """
    from freight.engine.transports import transport
    from freight.parallel.distributed import LOOPBACK, private_store

    return transport(private_store(number), 0, size, timeout, LOOPBACK, backend, slot_bytes)


def _distributed(
    host: str, size: int, timeout: float, backend: str, slot_bytes: int
) -> tuple[Transport, tuple[str, int]]:
    """Return rank 0's transport over torch.distributed, and where the others find its store."""
    from freight.engine.transports import transport
    from freight.parallel.distributed import host_store

    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = host_store(listener)
    return transport(store, 0, size, timeout, host, backend, slot_bytes), (host, port)


def _start_of(start: Start, join: Join) -> Start:
    """Return what a rank of another machine is started with."""
    args = with_own(start.args, join.options)
    processors = join.processors
    if start.backend == "nccl" and args.rank_cpus is None:
        processors = None  # which memory node is near a GPU is not known there
    return replace(start, args=args, processors=processors, cores=join.cores)


def pulse(timeout: float) -> float:
    """Return the seconds between two signs of life of a rank that is lost after `timeout` without."""
    return min(0.25, timeout / 8)


def _watch(
    leader: weakref.ref[Leader], alive: Sequence[int], ranks: _Ranks, timeout: float | None
) -> None:
    """Wait for the end of a rank, or its silence, also while nothing is computed, and say so.

    alive: what hangs up with each rank from 1 on. timeout: seconds without a sign of life
    (`SharedMemory.show_life`); None where `alive` are sockets, which have none.
    """
    if not _await_loss(alive, ranks, timeout):
        return
    living = leader()
    if living is not None:
        logger.error("%s", living._lost(None))
        living.on_lost()


def _await_loss(alive: Sequence[int], ranks: _Ranks, timeout: float | None) -> bool:
    """Return True once a rank is lost, which is marked; False once they are ended."""
    poll = select.poll()
    poll.register(ranks.wake[0], HANG_UP)
    for end in alive:
        poll.register(end, HANG_UP if timeout is None else HANG_UP | select.POLLIN)
    interval = None if timeout is None else pulse(timeout)
    quiet = dict.fromkeys(alive, 0.0)
    before = time.monotonic()
    while True:
        events = dict(poll.poll(None if interval is None else 1000 * interval))
        if ranks.closing:
            return False
        now = time.monotonic()
        # what passed while this process itself stood still says nothing about the others
        passed = now - before if interval is None else min(now - before, 2 * interval)
        before = now
        for rank, end in enumerate(alive, 1):
            event = events.get(end, 0)
            if event & ~select.POLLIN:
                ranks.memory.lose(rank)
            elif event:
                os.read(end, 1 << 12)
            quiet[end] = 0.0 if event or not ranks.ready else quiet[end] + passed
            # the last sign may be that much older than the silence
            if timeout is not None and interval is not None and quiet[end] > timeout + interval:
                ranks.memory.lose(rank, is_silent=True)
        if ranks.memory.lost():
            return True
