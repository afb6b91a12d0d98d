"""The transport over torch.distributed: gloo between CPUs, NCCL or RCCL between GPUs.

The group decides where bytes go; nothing here depends on its backend but how it is made, waited for
and left. Only bytes are gathered, so every format has the same bits with every backend. NCCL has not
been run: no machine with two GPUs was at hand.

A rank that leaves a step closes its connections. Those who wait for it see that at once, and close
theirs, so every rank leaves the step. Then all meet again, at the next gather, as a new group. A
process that ends closes its connections, too; which of the two it was shows on the sockets between
rank 0 and the others.

Ranks connect only once all have come, for a backend waits without a look at anything else. One word
in the store decides between the last one's coming and the first one's leaving, so all connect, or
none.
"""

from __future__ import annotations

import ctypes
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from freight.errors import KernelError, RankError
from freight.parallel.ranks import FREIGHT_OK, FREIGHT_RANK_FAILED, FREIGHT_RANK_LOST
from freight.parallel.shared import Exchange, FreightRanks

# Seconds for a message to the store of rank 0, which a thread of its process answers
_STORE_SECONDS = 60.0
_GLOO = "gloo"
NCCL = "nccl"  # RCCL's name in torch as well
# Seconds between two looks whether another rank has left, while a gather of GPUs is waited for
_LOOK = 0.005
# What the store says of a meeting, whichever is first
_ALL_CAME = "all came"
_ONE_LEFT = "one left"
LOOPBACK = "127.0.0.1"  # where ranks of one machine meet


def host_store(listener: socket.socket) -> Store:
    """Return the store that ranks meet by, of this process, behind a listening socket, which is the
    store's from now on.
    """
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_STORE_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(host: str, port: int, timeout: float = _STORE_SECONDS) -> Store:
    """Return the store of rank 0. Raises RankError if it cannot be reached within `timeout`."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise RankError(f"rank 0 cannot be reached at {host}:{port}: {_first(error)}") from error


def private_store(number: int) -> Store:
    """Return the store that ranks of one machine meet by, in the memory behind a descriptor: no other
    process can open it, while torch's server would answer anybody on the machine, without a password.

    The descriptor has to stay open until the process ends: torch opens it anew by its number, in the
    store's destructor as well, and would write into whatever file has that number then.
    """
    store = FileStore(f"/proc/self/fd/{number}", -1)
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    return store


class Distributed:
    """One rank of a group of processes. `described` is what the C functions take."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        address: str,
        backend: str = _GLOO,
    ) -> None:
        """store: that of all ranks. address: of this machine, to which gloo's connections are bound.
        timeout: seconds after which a rank that does not answer counts as lost.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout = timeout
        self._address = address
        self._backend = backend
        self._group: Any = None
        self._times = 0  # that all began anew
        self._left = False  # the step under way
        self._has_connected = False  # or has tried to, since all began anew
        self._lost = ""
        self._interrupt: BaseException | None = None
        self._exchange = Exchange(_weakly(self))
        self.described = FreightRanks(rank=rank, size=size, exchange=self._exchange)

    def meet(self) -> None:
        """Connect with all the others, which do so as well. Raises RankError if they do not within
        the timeout, and KernelError if one has left the step before it came.
        """
        try:
            word = self._await_all()
        except RuntimeError as error:
            raise self._not_met(_first(error)) from error
        if word != _ALL_CAME:
            raise KernelError("another rank has left the step")
        self._connect()

    def _await_all(self) -> str:
        """Return what the store says of this meeting, once it says anything. Raises RuntimeError, and
        RankError after the timeout.
        """
        end = time.monotonic() + self._timeout
        coming = [f"coming {self._times} {rank}" for rank in range(self.size)]
        self._store.set(coming[self.rank], "1")
        while not self._store.check([self._meeting]):
            if self._store.check(coming):
                return self._decide(_ALL_CAME)
            if self._lost:
                raise RankError(self._lost)
            if time.monotonic() > end:
                raise self._not_met(f"not all came within {self._timeout:g} seconds")
            time.sleep(_LOOK)
        return bytes(self._store.get(self._meeting)).decode()

    def _decide(self, word: str) -> str:
        """Return the first word that a rank has said of this meeting: `word` if it is this one's."""
        return bytes(self._store.compare_set(self._meeting, "", word)).decode()

    def _connect(self) -> None:
        """Connect with all the others, which have come. Raises RankError."""
        timeout = timedelta(seconds=self._timeout)
        self._has_connected = True
        try:
            store = PrefixStore(f"group {self._times}", self._store)
            store.set_timeout(timeout)
            self._group = _group(self._backend, store, self.rank, self.size, timeout, self._address)
        except (RuntimeError, ValueError) as error:
            raise self._not_met(_first(error)) from error

    def _not_met(self, why: str) -> RankError:
        return RankError(
            f"rank {self.rank} of {self.size}, at {self._address}, did not meet the others: {why}"
        )

    def gather(self, part: Tensor) -> Tensor:
        """Return `Transport.gather`. Raises KernelError as well: another rank has left the step,
        unless it has ended.
        """
        rows = len(part)
        part_bytes = part.contiguous().view(torch.uint8)
        parts = self._gather_bytes(part_bytes).view(self.size, rows, -1)
        return parts.transpose(0, 1).reshape(rows, -1).view(part.dtype)

    def _gather_bytes(self, part: Tensor) -> Tensor:
        """Return [size * rows, bytes]: a rank's rows, then the next one's."""
        if self._lost:
            raise RankError(self._lost)
        if self._left:
            raise KernelError("this rank has left the step")
        if self._group is None:
            try:
                self.meet()
            except RankError as error:
                # one that left the step closed connections while they were made
                if self.failed() is None:
                    raise
                raise KernelError("another rank has left the step") from error
        parts = part.new_empty((self.size * len(part), part.shape[1]))
        try:
            work = self._group._allgather_base(parts, part)
            work.wait()
            if self._backend != _GLOO:
                self._await(work)
        except RuntimeError as error:
            raise KernelError(
                f"another rank has left the step, has ended or does not answer: {_first(error)}"
            ) from error
        return parts

    def _await(self, work: Any) -> None:
        """Wait for a gather of GPUs, for which `wait` makes the stream wait and not the host. Raises
        RuntimeError where another rank has left the step, or does not come within the timeout.
        """
        begin = time.monotonic()
        looked = begin
        while not work.is_completed():
            now = time.monotonic()
            if now - begin > self._timeout:
                raise RuntimeError(f"no answer within {self._timeout:g} seconds")
            if now - looked > _LOOK:
                looked = now
                if self.failed() is not None:
                    raise RuntimeError("it has left the step")
            time.sleep(0)

    def finish(self) -> None:
        """Do nothing: a gather returns when it is done."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event: gathers before it are done."""
        event.synchronize()

    def exchange(self, part: int, out: int, rows: int, part_bytes: int) -> int:
        """Compute `FreightRanks.exchange`: gather between addresses; return a FreightStatus."""
        try:
            parts = self._gather_bytes(_at(part, rows * part_bytes).view(rows, part_bytes))
            columns = _at(out, rows * self.size * part_bytes).view(rows, self.size, part_bytes)
            columns.copy_(parts.view(self.size, rows, part_bytes).transpose(0, 1))
        except KernelError:
            return FREIGHT_RANK_FAILED
        except RankError:
            return FREIGHT_RANK_LOST
        except BaseException as error:  # C knows no exceptions: Ctrl-C
            self._interrupt = error
            return FREIGHT_RANK_FAILED
        return FREIGHT_OK

    def take_interrupt(self) -> BaseException | None:
        """Return what interrupted a gather that C called, once."""
        interrupt = self._interrupt
        self._interrupt = None
        return interrupt

    def lost(self) -> str:
        """Say which rank is lost, and how; '' if none is."""
        return self._lost

    def lose(self, rank: int, is_silent: bool = False) -> None:
        """Mark a rank as lost, unless one is lost already. is_silent: it may not have ended."""
        if self._lost:
            return
        self._lost = f"rank {rank} has ended"
        if is_silent:
            self._lost = f"rank {rank} does not answer"

    def failed(self) -> int | None:
        """Return the first rank that has left the step under way, or None."""
        with suppress(RuntimeError):  # rank 0 has ended
            if self._store.check([self._failure]):
                return int(self._store.get(self._failure))
        return None

    def fail(self) -> None:
        """Make the other ranks leave the step under way: this one has left it."""
        if not self._left:
            self._left = True
            with suppress(RuntimeError, RankError):
                self._store.compare_set(self._failure, "", str(self.rank))
                if self._decide(_ONE_LEFT) == _ALL_CAME and not self._has_connected:
                    self._connect()  # an interrupt came between: the others connect now
        self._leave_group()

    @property
    def _failure(self) -> str:
        return f"failed {self._times}"

    @property
    def _meeting(self) -> str:
        return f"meeting {self._times}"

    def restart(self, times: int) -> None:
        """Leave the group. All meet anew at the next gather, as group `times`."""
        self._leave_group()
        self._times = times
        self._left = False
        self._has_connected = False

    def close(self) -> None:
        """Leave the group for good."""
        self._leave_group()
        self._lost = self._lost or "this rank has left the others"

    def close_in_child(self) -> None:
        """Leave group and store to the process of which this one is a fork: their threads are not
        here, and their destructors, which would wait for them, must never run.
        """
        for inherited in (self._group, self._store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
        self._group = None
        self._lost = self._lost or "this process is a fork of a rank's"

    def _leave_group(self) -> None:
        group = self._group
        self._group = None  # gloo's connections close with it
        if group is not None and self._backend != _GLOO:
            with suppress(RuntimeError):
                group.abort()  # a gather under way would wait for ever


def _group(
    backend: str, store: Store, rank: int, size: int, timeout: timedelta, address: str
) -> Any:
    """Return a process group of this backend. Raises RuntimeError, ValueError."""
    if backend != _GLOO:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # of builds for GPUs alone

        of_gpus = ProcessGroupNCCL.Options()
        of_gpus._timeout = timeout
        group = ProcessGroupNCCL(store, rank, size, of_gpus)
        # now, as all are here: at its first gather, one that does not come would not be noticed
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return group
    # gloo binds to the address that the machine's name has, which is often 127.0.1.1, unless told
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _weakly(transport: Distributed) -> Callable[[int, int, int, int, int], None]:
    """Return its `exchange` without keeping it alive, which would keep connections open.

    A signal that came while C computed is handled here, before the first line: ctypes drops the
    exception, and C finds no status.
    """
    reference = weakref.ref(transport)

    def exchange(part: int, out: int, rows: int, part_bytes: int, status: int) -> None:
        alive = reference()
        code = FREIGHT_RANK_LOST
        if alive is not None:
            code = alive.exchange(part, out, rows, part_bytes)
        ctypes.c_int32.from_address(status).value = code

    return exchange


def _at(address: int, length: int) -> Tensor:
    """Return the bytes at an address, without a copy."""
    return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)


def _first(error: BaseException) -> str:
    """Return the first line of what torch says: others are of its own source."""
    return str(error).partition("\n")[0]
