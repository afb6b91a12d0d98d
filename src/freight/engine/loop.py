"""The engine's loop for a server: commands in, events out. Knows no transport and no HTTP.

One thread runs `Loop.run` and with it every step; commands come through a queue from any other
thread. What happened is handed to `emit` as one event for all requests, at most so many times a
second: where a step takes a millisecond, to write an event for each costs more than the step. The
first token of a request and an end wait for nothing; they are told alone, and delay no other.
Everything that concerns one request comes back as an event of that request: a command that cannot
be followed is `Refused`, and never raised.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

from freight.engine.engine import Engine
from freight.engine.intake import AcceptedPrompt
from freight.engine.messages import (
    Abort,
    Accepted,
    Action,
    AdaptersAre,
    Add,
    Change,
    Changed,
    Command,
    Event,
    LoadAdapter,
    Refused,
    Stepped,
    Stop,
    UnloadAdapter,
)
from freight.engine.renewal import Renewal
from freight.errors import EngineError, FreightError, shown
from freight.outputs import EngineStats, RequestDelta

logger = logging.getLogger("freight")

STATS_EVERY = 0.5  # seconds


class Loop:
    """Runs `engine` for the commands of a queue. Events come from within `run`, in the order in
    which they happened.
    """

    def __init__(
        self,
        engine: Engine,
        commands: SimpleQueue[Command],
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        events_per_second: float = 0.0,
        renewal: Renewal | None = None,
    ) -> None:
        """clock: the engine's. events_per_second: how often tokens are reported at most; 0: after
        every step. renewal: the engine's weights, if they may change.
        """
        self._engine = engine
        self._renewal = renewal
        self._is_frozen = False
        self._interval = 1.0 / events_per_second if events_per_second else 0.0
        self._quiet_until = -math.inf
        self._steps: list[tuple[float, int]] = []
        self._accepted: list[str] = []  # since the last event that said so
        self._commands = commands
        self._emit = emit
        self._clock = clock
        self._next_stats = -1.0
        self._reported: EngineStats | None = None
        self._is_idle = False
        self._adapters = engine.adapters.loaded  # as they were told last
        self.lost = False  # a rank of the engine has ended
        # of `clock`; None while it waits for a command. Other threads may read it
        self.turn_began: float | None = None

    def lose(self) -> None:
        """Stop, because the engine cannot go on. Called by another thread."""
        self.lost = True
        self._commands.put(Stop())

    def run(self) -> None:
        """Step until a `Stop`. Between steps all commands that have come are followed."""
        while self._follow():
            if self._has_work:
                self._step()
            self._report()

    def close(self) -> None:
        """Close the engine. To be called after `run`."""
        self._engine.close()

    @property
    def _has_work(self) -> bool:
        return self._engine.has_unfinished and not self._is_frozen

    def _follow(self) -> bool:
        """Follow the commands that are there; waits for one while there is nothing to compute, or until
        the threads of a store did something to report. False: stop.
        """
        wait = not self._has_work and self._is_idle
        while True:
            self.turn_began = None if wait else self._clock()
            try:
                command = self._commands.get(wait, STATS_EVERY if self._engine.has_store else None)
            except Empty:
                if wait and self._engine.stats() == self._reported:
                    continue
                self._tell_accepted()
                return True
            self.turn_began = self._clock()
            wait = False
            match command:
                case Add():
                    self._add(command)
                case Abort(request_id):
                    self._engine.release(request_id)
                    self._next_stats = -1.0  # what it held is free: reported at once
                case LoadAdapter():
                    self._load(command)
                case UnloadAdapter(command_id, name):
                    adapters = self._engine.adapters
                    self._change(command_id, partial(adapters.unload, name))
                case Change():
                    self._change_engine(command)
                case Stop():
                    return False

    def _add(self, command: Add) -> None:
        engine = self._engine
        params = command.params
        if known := engine.report():  # its prompt may take a long step
            self._tell(known)
        try:
            # the parent has checked the same, all but the cache's size
            engine.accept(command.token_ids, params)
            adapter = None
            if command.adapter is not None:
                adapter = engine.adapters.requested(command.adapter)
                self._tell_adapters()
            prompt = AcceptedPrompt(command.prompt, command.token_ids)
            engine.add(command.request_id, prompt, params, adapter)
        except FreightError as error:
            self._emit(Refused(command.request_id, error))
        else:
            self._accepted.append(command.request_id)

    def _load(self, command: LoadAdapter) -> None:
        """Load an adapter now, or once its files were fetched: a hub may take minutes, and steps go on
        meanwhile.
        """
        adapters = self._engine.adapters
        fetched = command.fetched
        if fetched is None and not adapters.is_here(command.path):
            threading.Thread(target=self._fetch, args=(command,), daemon=True).start()
        elif isinstance(fetched, FreightError):
            self._emit(AdaptersAre(self._adapters, command.command_id, fetched))
        else:
            load = partial(adapters.load, command.name, command.path, fetched)
            self._change(command.command_id, load)

    def _fetch(self, command: LoadAdapter) -> None:
        fetched: str | FreightError
        try:
            fetched = self._engine.adapters.fetch(command.path)
        except FreightError as error:
            fetched = error
        self._commands.put(replace(command, fetched=fetched))

    def _change(self, command_id: str, change: Callable[[], object]) -> None:
        """Load or unload an adapter, between steps."""
        if known := self._engine.report():  # its files may take long to read
            self._tell(known)
        error = None
        try:
            change()
        except FreightError as raised:
            error = raised
        self._adapters = self._engine.adapters.loaded
        self._emit(AdaptersAre(self._adapters, command_id, error))

    def _change_engine(self, command: Change) -> None:
        self._tell_accepted()  # first: an action may end what was accepted
        self._tell(self._engine.report())  # weights may take long to read
        renewal = self._renewal
        assert renewal is not None, "nobody may change this engine"
        error: FreightError | None = None
        try:
            self._act(renewal, command)
        except FreightError as raised:
            error = raised
        except Exception as raised:  # a change that fails leaves what there was
            logger.exception("the engine could not be changed")
            error = EngineError(f"it failed: {type(raised).__name__}: {shown(str(raised))}")
        self._tell(self._engine.report())
        self._tell_adapters()
        self._next_stats = -1.0
        self._emit(Changed(command.command_id, renewal.fingerprint(), renewal.level, error))

    def _act(self, renewal: Renewal, command: Change) -> None:
        match command.action:
            case Action.UPDATE:
                renewal.update(str(command.value))
            case Action.SLEEP:
                renewal.sleep(int(command.value))
            case Action.WAKE_UP:
                renewal.wake_up(int(command.value))
            case Action.RESET_PREFIX_CACHE:
                renewal.reset_prefix_cache()
            case Action.END_ALL:
                self._engine.end_all()
            case Action.FREEZE:
                self._is_frozen = True
            case Action.THAW:
                self._is_frozen = False

    def _tell_adapters(self) -> None:
        """Tell what a request has loaded."""
        loaded = self._engine.adapters.loaded
        if loaded != self._adapters:
            self._adapters = loaded
            self._emit(AdaptersAre(loaded))

    def _tell_accepted(self) -> None:
        if self._accepted:
            self._emit(Accepted(self._accepted))
            self._accepted = []

    def _step(self) -> None:
        started = self._clock()
        computed = self._engine.num_computed_tokens
        deltas = self._engine.step(self._quiet_until)
        if num_tokens := self._engine.num_computed_tokens - computed:  # none: it waited for a store
            self._steps.append((self._clock() - started, num_tokens))
        # a long step counts although it gave no token
        if deltas or self._clock() >= self._quiet_until:
            self._tell(deltas)

    def _tell(self, deltas: list[RequestDelta]) -> None:
        self._tell_changed()
        self._emit(Stepped(deltas, self._steps))
        self._steps = []
        if not self._engine.has_unreported:  # the others are told when they would have been
            self._quiet_until = self._clock() + self._interval
        for delta in deltas:
            if delta.finished:
                self._engine.release(delta.request_id)

    def _tell_changed(self) -> None:
        """Tell what the cache gained and lost, where anybody asks."""
        events = self._engine.cache.events
        if events is not None and (changed := events.take()) is not None:
            self._emit(changed)

    def _report(self) -> None:
        """Stats twice a second, and once more when the engine becomes idle."""
        now = self._clock()
        idle = not self._has_work
        if now >= self._next_stats or (idle and not self._is_idle):
            self._tell_changed()
            self._reported = self._engine.stats()
            self._emit(self._reported)
            self._next_stats = now + STATS_EVERY
        self._is_idle = idle
