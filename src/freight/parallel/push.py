"""The transport between GPUs of one host that write into each other's memory: one kernel a gather
(`kernels/triton/push.py`), beside a group of torch.distributed.

The group (`Distributed`) says who is lost or has left a step, and gathers what a slot does not hold.
Whether GPUs push is agreed on once, when they meet: all can open the buffers of all, and small
gathers had the right bits on every rank. Otherwise the group gathers everything.

A gather returns before it is done, as every launch does. A kernel whose wait was ended says so in
the host's page: `check`, once the step's results are there.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from freight.errors import KernelError, RankError
from freight.parallel.distributed import Distributed
from freight.parallel.peers import FAILED, FLAGS, STATUS, TURN, WORD, Layout, Peers

_LOOK_SECONDS = 0.02  # between looks whether a rank has left the step
_ASK_SECONDS = 0.005  # between looks whether all have said something, at start
_ENDED = 1  # what the host's page says: waits are to end
# Turns of the n-th beginning are counted from n times this: greater than all flags of earlier ones
_TURNS = 1 << 40
# Rows and columns of bytes of the gathers that are tried: more turns than slots, an odd one, many programs
_TRIED = ((1, 256), (3, 7), (64, 512), (1, 256))


class Push(Protocol):
    """The kernel's launch: `kernels.triton.push.push`."""

    def __call__(self, part: Tensor, ranks: Peers, layout: Layout, rank: int) -> Tensor:
        """Return the parts of all ranks side by side, once the launch has ended."""
        ...


# `device_memory.open_peers`
Opener = Callable[[int, Layout, torch.device, Callable[[bytes], list[bytes]]], Peers]


class Pushed:
    """One rank of several on GPUs of one host. Its methods are those of `Transport`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        slot_bytes: int,
        timeout: float,
        *,
        group: Distributed,
        push: Push,
        open_peers: Opener,
    ) -> None:
        """store: that of all ranks. slot_bytes: of the largest matrix that is pushed, with the
        columns of all ranks; the buffer has two slots. timeout: seconds after which a rank that does
        not answer counts as lost. group: how the same ranks gather otherwise. open_peers: raises
        RankError where a buffer cannot be made or opened; `parallel/device_memory.py` has the one of
        GPUs.
        """
        self.rank = rank
        self.size = size
        self.described = group.described
        self._store = PrefixStore("push", store)
        self._device = device
        least = size * max(rows * columns for rows, columns in _TRIED)
        self._layout = Layout(size, max(slot_bytes, least))
        self._timeout = timeout
        self._group = group
        self._push = push
        self._open = open_peers
        self._peers: Peers | None = None
        self._changing = threading.Lock()  # the host's page
        self._ended = threading.Event()
        self.refused = ""  # why the group gathers everything; '' if it does not
        self.grouped = 0  # gathers that the group made
        self.times = 0  # that all began anew

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of the largest matrix that is pushed, with the columns of all ranks."""
        return self._layout.slot_bytes

    @property
    def pushes(self) -> bool:
        """Return whether ranks push what a slot holds: all have met, and agreed to."""
        return self._peers is not None and not self.refused

    def meet(self) -> None:
        """Connect with all the others, open their buffers, and try small gathers. Raises as
        `Distributed.meet`.
        """
        self._group.meet()
        if self._peers is not None or self.refused:
            return
        reason = ""
        try:
            self._peers = self._open(
                self.rank, self._layout, self._device, lambda own: self._exchange("open", own)
            )
        except RankError as error:
            reason = str(error)
        self.refused = self._agreed("opened", reason)
        if not self.refused:
            self._start_watch()
            self.refused = self._agreed("tried", self._tried())
        if self.refused:
            self._close_peers()

    def _exchange(self, name: str, own: bytes) -> list[bytes]:
        """Return what all ranks say under this name, in UTF-8. Raises RankError if a rank does not."""
        names = [f"{name} {rank}" for rank in range(self.size)]
        end = time.monotonic() + 3 * self._timeout  # another may wait for gathers before
        try:
            self._store.set(names[self.rank], f"={own.decode()}")  # stores want no empty value
            while not self._store.check(names):
                if self.lost() or time.monotonic() > end:
                    raise RankError(self.lost() or "a rank did not come to push columns")
                time.sleep(_ASK_SECONDS)
            return [bytes(self._store.get(each))[1:] for each in names]
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise RankError(f"a rank did not come to push columns: {first}") from error

    def _agreed(self, name: str, reason: str) -> str:
        """Return the first reason that any rank has against pushing, the same on all; '' if none."""
        for rank, said in enumerate(self._exchange(name, reason.encode())):
            if said:
                return f"rank {rank}: {said.decode()}"
        return ""

    def _tried(self) -> str:
        """Return why small gathers went wrong; '' if they went right."""
        for turn, (rows, columns) in enumerate(_TRIED):
            parts = [_tried_part(turn, rank, rows, columns) for rank in range(self.size)]
            try:
                found = self._launch(parts[self.rank].to(self._device))
                self.finish()
            except (RankError, KernelError) as error:
                self._synchronize()  # the buffers are given back after this
                return str(error)
            if not torch.equal(found.cpu(), torch.cat(parts, dim=1)):
                return f"a gather of {rows} rows of {columns} bytes had wrong bytes"
        return ""

    def _launch(self, part: Tensor) -> Tensor:
        assert self._peers is not None
        return self._push(part, self._peers, self._layout, self.rank)

    def gather(self, part: Tensor) -> Tensor:
        """Return `Transport.gather`, once the launch has ended. Raises KernelError as well: this
        rank or another has left the step.
        """
        if self._peers is None or self.size * part.nbytes > self._layout.slot_bytes:
            self.grouped += 1
            return self._group.gather(part)
        self.check()
        return self._launch(part)

    def check(self) -> None:
        """Raise RankError if a launch that has ended did not wait for a rank that is lost, and
        KernelError if that rank has left the step.
        """
        if self.lost():
            raise RankError(self.lost())
        if self._peers is not None and self._peers.page[STATUS]:
            raise KernelError("another rank has left the step: columns are missing")

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event that follows gathers, as long as a rank may take to answer. Raises as
        `check`; KernelError if it does not come.
        """
        self._until(event.query)
        self.check()

    def finish(self) -> None:
        """Wait until the gathers so far are done, all in the current stream. Raises as `wait`."""
        if self._peers is None:
            return  # the group's are done when they return
        if self._device.type != "cpu":
            event = torch.cuda.Event()
            event.record()
            self._until(event.query)
        self.check()

    def _until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout
        while not is_done():
            if time.monotonic() > deadline:
                self._end_waits()
                raise KernelError(
                    f"rank {self.rank} waited {self._timeout:g} seconds for others to gather"
                )
            time.sleep(0)

    def _start_watch(self) -> None:
        arguments = (weakref.ref(self), self._ended)
        thread = threading.Thread(target=_watch, args=arguments, name="push", daemon=True)
        thread.start()
        weakref.finalize(self, _stop_watch, thread, self._ended)

    def look(self) -> None:
        """End this rank's waits if another one has left the step, or is lost."""
        with self._changing:
            if self._group.lost() or self._group.failed() is not None:
                self._set(_ENDED)

    def _set(self, word: int) -> None:
        if self._peers is not None:
            self._peers.page[FAILED] = word

    def _end_waits(self) -> None:
        with self._changing:
            self._set(_ENDED)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def lost(self) -> str:
        """Say which rank is lost, and how; '' if none is."""
        return self._group.lost()

    def lose(self, rank: int, is_silent: bool = False) -> None:
        """Mark a rank as lost, unless one is lost already. is_silent: it may not have ended."""
        self._group.lose(rank, is_silent)
        self._end_waits()

    def failed(self) -> int | None:
        """Return the first rank that has left the step under way, or None."""
        return self._group.failed()

    def fail(self) -> None:
        """Make the other ranks leave the step under way: this one has left it. Its launches have
        ended then.
        """
        self._end_waits()
        self._synchronize()
        self._group.fail()

    def restart(self, times: int) -> None:
        """Begin anew for the `times`-th time, after a step that every rank has left."""
        self._synchronize()
        self.times = times
        with self._changing:  # not between the watch's question and its answer
            self._group.restart(times)
            if self._peers is not None:
                self._begin(self._peers, times * _TURNS)
                self._peers.page.zero_()

    def _begin(self, peers: Peers, turn: int) -> None:
        """Let the next turn follow `turn`: all words before the flags are written anew."""
        words = torch.zeros(FLAGS, dtype=torch.int64, device="cpu")
        words[TURN] = turn
        peers.own[: WORD * FLAGS] = words.view(torch.uint8).to(self._device)
        self._synchronize()

    def take_interrupt(self) -> BaseException | None:
        """Return None: C calls nothing here."""
        return self._group.take_interrupt()

    def close(self) -> None:
        """Leave the others for good."""
        self._end_waits()
        self._synchronize()
        self._close_peers()
        self._group.close()

    def close_in_child(self) -> None:
        """Leave the group to the process of which this one is a fork. CUDA's memory is not there."""
        self._ended.set()
        self._peers = None
        self._group.close_in_child()

    def _close_peers(self) -> None:
        self._ended.set()
        with self._changing:
            peers = self._peers
            self._peers = None
        if peers is not None:
            peers.close()


def _watch(reference: weakref.ref[Pushed], ended: threading.Event) -> None:
    """Look after other ranks until the transport is closed, or nobody has it any more."""
    while not ended.wait(_LOOK_SECONDS):
        pushed = reference()
        if pushed is None:
            return
        pushed.look()
        del pushed


def _stop_watch(thread: threading.Thread, ended: threading.Event) -> None:
    """End the watch before the interpreter does: a thread must not end inside torch."""
    ended.set()
    if thread is not threading.current_thread():
        thread.join(1)


def _tried_part(turn: int, rank: int, rows: int, columns: int) -> Tensor:
    """Return bytes that differ between turns, ranks and places."""
    places = torch.arange(rows * columns, dtype=torch.int64, device="cpu").view(rows, columns)
    return ((places * 7 + rank * 61 + turn * 113) % 251).to(torch.uint8)
