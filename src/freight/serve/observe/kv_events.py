"""KV events: what the cache gains and loses, published over ZeroMQ for routers, in the form of vLLM's
`vllm/distributed/kv_events.py` as of 0.33.

A message has three parts: the topic, a sequence number of 8 bytes (big-endian), and a batch in
msgpack, [seconds since 1970, events, 0]. An event is a map whose `type` is BlockStored, BlockRemoved or
AllBlocksCleared. Sequence numbers count up from 0. One that is missing was dropped, or did not reach
a subscriber that reads too slowly. At `replay_endpoint` a subscriber asks for what it lacks, by a
sequence number, and gets the batches from there on that are still held, then -1.

A thread has the sockets. Nobody waits for it, and it waits for no subscriber: ZeroMQ holds `hwm`
messages for each, and then drops.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

from freight.cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheChange,
    CacheChanged,
    CacheCleared,
)
from freight.errors import ConfigError, install, listed, shown

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger("freight")

_PACKAGES = {"pyzmq": "zmq", "msgspec": "msgspec"}  # as they are installed -> as imported
_END = (-1).to_bytes(8, "big", signed=True)
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class KVEventsConfig:
    """`--kv-events-config`. Names are vLLM's; raises ConfigError for a value out of its range.

    endpoint         with a `*`, ipc or inproc it is bound, else connected to
    replay_endpoint  where a ROUTER socket is bound; None: nothing is replayed
    buffer_steps     batches that are held for it
    hwm              messages that are held for a subscriber that does not read
    max_queue_size   batches that wait for the thread that sends them
    topic            the first part of every message; subscribers choose by how it begins
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_queue_size: int = 10_000
    topic: str = ""

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a JSON object. Raises ConfigError, also where the packages of the extra are missing."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--kv-events-config is not JSON: {error}; {_EXAMPLE}") from None
        if not isinstance(given, dict):
            raise ConfigError(
                f"--kv-events-config is {shown(given)}; it must be a JSON object: {_EXAMPLE}"
            )
        names = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in names:
                raise ConfigError(
                    f"--kv-events-config has no key {shown(name)}; it has {listed(names)}"
                )
            _check_type(name, value)
        config = cls(**given)
        if config.is_on:
            missing = [name for name, module in _PACKAGES.items() if find_spec(module) is None]
            if missing:
                raise ConfigError(
                    f"--kv-events-config needs {', '.join(missing)}: {install('events')}"
                )
        return config

    def __post_init__(self) -> None:
        if self.publisher not in (None, "null", "zmq"):
            raise ConfigError(
                f"--kv-events-config: publisher is {shown(self.publisher)}; it must be zmq or null"
            )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--kv-events-config: {name} is {getattr(self, name)}; it must be 1 or more"
                )

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


_EXAMPLE = """write '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'"""
_TYPES: dict[str, tuple[type, ...]] = {
    "enable_kv_cache_events": (bool,),
    "publisher": (str, type(None)),
    "endpoint": (str,),
    "replay_endpoint": (str, type(None)),
    "topic": (str,),
}


def _check_type(name: str, value: object) -> None:
    kinds = _TYPES.get(name, (int,))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = [kind.__name__ for kind in kinds if kind is not type(None)]
        raise ConfigError(
            f"--kv-events-config: {name} is {shown(value)}; it must be of type {words[0]}"
        )


class KVEventPublisher:
    """Publishes what the cache of one server gains and loses. All methods are for one thread.

    num_published, num_dropped  batches that were given to ZeroMQ, and those that were not: the queue
                                was full, or the engine had too many at once
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Bind the sockets. Raises ConfigError if that fails."""
        import zmq

        self.num_published = 0
        self.num_dropped = 0
        self._config = config
        self._sequence = 0  # of the next batch
        self._queue: deque[tuple[int, float, Sequence[CacheChange]]] = deque()
        self._held: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._is_closed = False
        self._was_logged = False
        self._context = zmq.Context(io_threads=1)
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._socket(zmq.PUB, config.hwm)
            if is_bound(config.endpoint):
                self._pub.bind(config.endpoint)
            else:
                self._pub.connect(config.endpoint)
            self._replay = None
            if config.replay_endpoint is not None:
                # a whole replay, and its end
                self._replay = self._socket(zmq.ROUTER, 2 * (config.buffer_steps + 1))
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            where = " and ".join(filter(None, (config.endpoint, config.replay_endpoint)))
            raise ConfigError(
                f"--kv-events-config: {where} cannot be used: {error}; give free ports"
            ) from None
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        logger.info(
            "KV events at %s: whoever reaches it reads prompts, as token ids", config.endpoint
        )

    def publish(self, changed: CacheChanged) -> None:
        """Publish a batch, soon. If too many wait it is dropped, and its sequence number with it."""
        if changed.changes:
            if len(self._queue) < self._config.max_queue_size:
                self._queue.append((self._sequence, time.time(), changed.changes))
                self._awaken()
            else:
                self.num_dropped += 1
            self._sequence += 1
        if changed.dropped:
            self.num_dropped += 1
            self._sequence += 1

    def cleared(self) -> None:
        """Publish that nothing is cached: the engine has ended."""
        self.publish(CacheChanged([CacheCleared()]))

    def counts(self) -> tuple[int, int]:
        """Return `num_published` and `num_dropped`."""
        return self.num_published, self.num_dropped

    def close(self) -> None:
        """Send what waits, within 2 seconds, and close the sockets."""
        self._is_closed = True
        self._awaken()
        self._thread.join(_CLOSE_SECONDS)
        for end in (self._wake, self._awake):
            end.close()

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        import zmq

        made = self._context.socket(kind)
        self._sockets.append(made)
        made.setsockopt(zmq.SNDHWM, hwm)
        made.setsockopt(zmq.LINGER, 0)
        return made

    def _awaken(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            return  # it has been awakened more often than it has looked

    def _run(self) -> None:
        import msgspec
        import zmq

        encoder = msgspec.msgpack.Encoder()
        poller = zmq.Poller()
        poller.register(self._awake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            is_last = self._is_closed  # before the queue is looked at
            if self._awake.fileno() in ready:
                self._awake.recv(1 << 12)
            while self._queue:
                sequence, at, changes = self._queue.popleft()
                self._guarded(self._send, encoder, sequence, at, changes)
            if self._replay in ready:
                self._guarded(self._answer)
            if is_last:
                break
        for made in self._sockets:
            made.close(linger=0)
        self._context.term()

    def _guarded(self, action: Callable[..., None], *values: Any) -> None:
        """A batch or a subscriber that cannot be served leaves the others alone."""
        try:
            action(*values)
        except Exception:
            if not self._was_logged:
                logger.exception("a KV event was not sent; further ones are not logged")
            self._was_logged = True

    def _send(self, encoder: Any, sequence: int, at: float, changes: Sequence[CacheChange]) -> None:
        import zmq

        number = sequence.to_bytes(8, "big")
        batch = encoder.encode([at, list(map(event_of, changes)), 0])
        topic = self._config.topic.encode()
        self._held.append((number, batch))
        self._pub.send_multipart((topic, number, batch), zmq.DONTWAIT)
        self.num_published += 1

    def _answer(self) -> None:
        import zmq

        assert self._replay is not None
        client, *frames = self._replay.recv_multipart(zmq.DONTWAIT)
        if len(frames) != 2 or len(frames[1]) != 8:
            raise ValueError("a replay is asked for by an empty frame and a number of 8 bytes")
        topic = self._config.topic.encode()
        for number, batch in self._held:
            if number >= frames[1]:  # big-endian: as bytes they have the order of numbers
                self._replay.send_multipart((client, b"", topic, number, batch), zmq.DONTWAIT)
        self._replay.send_multipart((client, b"", b"", _END, b""), zmq.DONTWAIT)


def is_bound(endpoint: str) -> bool:
    """Return whether an endpoint is bound, and not connected to: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def event_of(change: CacheChange) -> dict[str, Any]:
    """Return a change as an event of vLLM, a map. Fields at their default are left out, as there."""
    match change:
        case BlocksStored():
            return _stored(change)
        case BlocksRemoved(hashes):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
    return {"type": "AllBlocksCleared"}


def _stored(change: BlocksStored) -> dict[str, Any]:
    """The medium is GPU on a CPU as well: it says that steps read the blocks where they are.

    Of extra keys each block has its adapter's name, and the first of a sequence the salt.
    """
    adapter = None if change.adapter is None else _encodable(change.adapter)
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": change.hashes,
        "parent_block_hash": change.parent,
        "token_ids": change.token_ids,
        "block_size": len(change.token_ids) // len(change.hashes),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": adapter,
    }
    each = () if adapter is None else (adapter,)
    first = each
    if change.salt is not None and change.parent is None:
        first = (*each, _encodable(change.salt))
    if first:
        others = [each or None] * (len(change.hashes) - 1)
        event["extra_keys"] = [first, *others]
    return event


def _encodable(text: str) -> str:
    """Replace what UTF-8 cannot have, halves of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()
