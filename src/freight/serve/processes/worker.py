"""The engine's process: `python -m freight.serve.processes.worker FD`, FD being a socket's end.

It owns the engine and all of torch. Its main thread loads the model and steps; a second thread only
reads commands and answers pings. It ends when the other end of the socket closes, and the kernel
ends it with its parent, also while it is stopped (`descent.py`). It ignores SIGINT, SIGTERM and
SIGHUP: the parent handles them, and lets requests finish first. While Python starts, they are
blocked.
"""

from __future__ import annotations

from freight.base.descent import ENDING, end_with_parent
from freight.base.fields import JsonDict

if __name__ == "__main__":
    end_with_parent()  # before imports that take long

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from freight.cache.events import CacheChanged
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
from freight.errors import FreightError, RankError
from freight.serve.processes import wire
from freight.serve.processes.frames import Decoder, FrameError, encode
from freight.serve.processes.log import set_up_logging
from freight.serve.processes.pulse import Progress

if TYPE_CHECKING:
    from freight.engine.loop import Loop

logger = logging.getLogger("freight")

_READ = 1 << 16  # bytes
_PATIENCE = 5.0  # seconds for the step under way once the parent is gone


def main() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    frames = Decoder(wire.CAP)
    name, args, options = _first(connection, frames)
    assert name == wire.START
    set_up_logging(options["log_format"], options["log_level"], options["log_model"])
    commands: SimpleQueue[Command] = SimpleQueue()
    channel = Channel(connection)
    threading.Thread(
        target=read, args=(channel, frames, commands), name="commands", daemon=True
    ).start()
    loop: Loop | None = None
    with contextlib.suppress(ConnectionError):  # the parent is gone
        try:
            loop = _build(channel, args, options, commands)
        except FreightError as error:
            channel.send([wire.FAILED, *wire.error_to_json(error)])
            sys.exit(wire.exit_status(error))
        gc.collect()
        # Exempt what is loaded: a full collection of it would stall every stream for 0.2 s.
        gc.freeze()
        try:
            loop.run()
        except RankError as error:  # the parent says that the engine has ended, and may restart it
            logger.error("%s", error)
            loop.lost = True
        if loop.lost:
            channel.hang_up()  # clients are told before the ranks are ended, and memory is freed
            sys.exit(1)
    if loop is not None:
        loop.close()


class Channel:
    """The connection to the parent. The stepping thread and the command thread both write to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.loop: Loop | None = None  # once the model is loaded
        self.progress = Progress()
        self._lock = threading.Lock()

    def send(self, message: list[Any]) -> None:
        """Send a message. Raises FrameError if it is too long, and ConnectionError once the parent
        is gone.
        """
        frame = encode(message, wire.CAP)
        with self._lock:
            self.connection.sendall(frame)

    def send_step(self, message: list[Any]) -> None:
        """Send the deltas of some steps. A delta that is too long fails its request only."""
        try:
            self.send(message)
        except FrameError as error:
            name, deltas, steps = message
            if len(deltas) == 1:
                self.send([wire.LOST, deltas[0][0], str(error)])
            else:
                for delta in deltas:
                    self.send_step([name, [delta], []])
            if deltas and steps:
                self.send([name, [], steps])

    def hang_up(self) -> None:
        """Close the connection: the parent sees that the engine has ended."""
        with contextlib.suppress(OSError):  # the parent is gone
            self.connection.shutdown(socket.SHUT_RDWR)

    def answer_ping(self) -> None:
        began = None if self.loop is None else self.loop.turn_began
        self.send([wire.PONG, self.progress.stuck(began, time.monotonic(), time.process_time())])


def _build(
    channel: Channel, args: JsonDict, options: JsonDict, commands: SimpleQueue[Command]
) -> Loop:
    """Load the model, reporting progress to the parent; returns the Loop."""
    from freight.engine.build import cache_facts, start_engine
    from freight.engine.fingerprint import is_reproducible
    from freight.engine.loop import Loop
    from freight.engine.renewal import Renewal
    from freight.model.config.parse import sampling_defaults
    from freight.model.open import open_model, open_random
    from freight.settings.engine import EngineArgs
    from freight.settings.resolve import for_serving

    shape = options["random_weights"]
    engine_args = EngineArgs(**args)
    opened = open_random(engine_args, shape) if shape else open_model(engine_args)
    opened = replace(opened, args=for_serving(engine_args, str(opened.device.kind)))
    config = opened.resolve(opened.args)
    generation = opened.checkpoint.generation_config if opened.checkpoint else None
    facts = wire.EngineFacts(
        tokenizer=opened.tokenizer_folder(),
        vocab_size=opened.model.vocab_size,
        max_model_len=config.max_model_len,
        stop_token_ids=tuple(sorted(opened.stop_token_ids())),
        defaults=sampling_defaults(generation),
        kv_cache={},
        pooling=opened.model.pooling,
        generates=opened.model.generates,
    )
    channel.send([wire.OPENED, wire.facts_to_json(facts)])
    engine, config = start_engine(opened, tells_cache=options["cache_events"])
    renewal = Renewal(engine, opened, config)
    kernels = opened.kernels(config)
    complete_facts = replace(
        facts,
        max_model_len=config.max_model_len,
        kv_cache=cache_facts(engine.runner.pool, config, engine.runner.num_ranks),
        kernels=kernels.name,
        fingerprint=renewal.fingerprint(),
        reproducible=is_reproducible(opened, kernels),
        ranks=engine.runner.num_ranks,
        drafts=engine.scheduler.most_drafts > 0,
        max_adapters=0 if config.lora is None else config.lora.num_slots,
        adapters=engine.adapters.loaded,
    )
    channel.send([wire.READY, wire.facts_to_json(complete_facts)])

    def emit(event: Event) -> None:
        for message in _messages(event):
            if message[0] == wire.STEPPED:
                channel.send_step(message)
            else:
                channel.send(message)

    channel.progress = Progress(on_gpu=config.device != "cpu")
    loop = Loop(
        engine,
        commands,
        emit,
        events_per_second=options["events_per_second"],
        renewal=renewal,
    )
    engine.on_lost(loop.lose)  # also while it waits for commands
    channel.loop = loop
    return loop


def _messages(event: Event) -> Iterator[list[Any]]:
    match event:
        case Stepped(deltas, steps):
            yield from wire.step_messages(deltas, steps)
        case Accepted(request_ids):
            yield [wire.ACCEPTED, request_ids]
        case Refused(request_id, error):
            yield [wire.REFUSED, request_id, *wire.error_to_json(error)]
        case AdaptersAre(loaded, command_id, error):
            failure = None if error is None else wire.error_to_json(error)
            yield [wire.ADAPTERS, wire.adapters_to_json(loaded), command_id, failure]
        case Changed(command_id, prints, level, error):
            failure = None if error is None else wire.error_to_json(error)
            yield [wire.CHANGED, command_id, prints, level, failure]
        case CacheChanged():
            yield [wire.CACHE, *wire.changed_to_json(event)]
        case stats:
            yield [wire.STATS, wire.stats_to_json(stats)]


def _first(connection: socket.socket, frames: Decoder) -> list[Any]:
    """Return the first message, which has the options of the model to load."""
    while True:
        data = connection.recv(_READ)
        if not data:
            sys.exit(0)
        for message in frames.feed(data):
            return list(message)


def read(channel: Channel, frames: Decoder, commands: SimpleQueue[Command]) -> None:
    """Queue commands until the parent is gone, and answer pings."""
    while data := _received(channel.connection):
        for name, *values in frames.feed(data):
            if name == wire.ADD:
                commands.put(_add(*values))
            elif name == wire.LOAD_ADAPTER:
                commands.put(LoadAdapter(*values))
            elif name == wire.UNLOAD_ADAPTER:
                commands.put(UnloadAdapter(*values))
            elif name == wire.CHANGE:
                command_id, action, value = values
                commands.put(Change(command_id, Action(action), value))
            elif name == wire.ABORT:
                commands.put(Abort(*values))
            elif name == wire.PING:
                with contextlib.suppress(OSError):  # the parent is gone: the next read shows it
                    channel.answer_ping()
    commands.put(Stop())
    time.sleep(_PATIENCE)
    os._exit(1)  # a step hangs, or the model is still loading


def _add(
    request_id: str,
    prompt: str | None,
    token_ids: Sequence[int],
    params: JsonDict,
    adapter: Sequence[str] | None,
) -> Add:
    return Add(
        request_id,
        prompt,
        tuple(token_ids),
        wire.params_from_json(params),
        wire.request_from_json(adapter),
    )


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_READ)
    except OSError:
        return b""


if __name__ == "__main__":
    main()
