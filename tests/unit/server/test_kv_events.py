"""KV events on the wire: what a subscriber reads is vLLM's form, what it lacks is replayed, and one that
does not read costs the others nothing.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.refusals import refuses
from tests.router_index import RouterIndex
from tests.unit.cache.test_events import indexed, random_prompts
from tests.unit.engine.conftest import Rig

from freight.cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheChanged,
    CacheCleared,
    CacheEvents,
)
from freight.errors import ConfigError
from freight.serve.observe import kv_events
from freight.serve.observe.kv_events import KVEventPublisher, KVEventsConfig, event_of, is_bound
from freight.serve.processes import wire

SECONDS = 60.0  # until a message must have come


def said(**values: object) -> str:
    return json.dumps({"enable_kv_cache_events": True, **values})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://*:5557", ("--kv-events-config is not JSON", "endpoint")),
        ("[1]", ("--kv-events-config is", "must be a JSON object")),
        (said(end_point="x"), ("no key 'end_point'", "endpoint", "replay_endpoint")),
        (said(endpoint=5557), ("endpoint is 5557", "type str")),
        (said(hwm=True), ("hwm is True", "type int")),
        (said(hwm="9"), ("hwm is '9'", "type int")),
        (said(publisher="kafka"), ("publisher is 'kafka'", "zmq or null")),
        (said(buffer_steps=0), ("buffer_steps is 0", "1 or more")),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text: str, words: tuple[str, ...]) -> None:
    with refuses(ConfigError, *words):
        KVEventsConfig.read(text)


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "find_spec", lambda name: None)
    with refuses(ConfigError, "pyzmq, msgspec", "pip install '.[events]'"):
        KVEventsConfig.read(said())
    for text in ('{"enable_kv_cache_events": false}', said(publisher="null"), "{}"):
        assert not KVEventsConfig.read(text).is_on


def test_endpoints_are_bound_by_vllms_rule() -> None:
    bound = ["tcp://*:5557", "tcp://[::]:5557", "ipc:///tmp/x", "inproc://x"]
    assert list(map(is_bound, bound)) == [True] * 4
    assert not is_bound("tcp://router:5557")


def test_changes_pass_between_processes() -> None:
    changed = CacheChanged(
        [
            BlocksStored([2**64 - 1, 0], 5, [1, 2, 3, 4], "a\ud800", "b"),
            BlocksStored([7], None, [1]),
            BlocksRemoved([3]),
            CacheCleared(),
        ],
        dropped=4,
    )
    passed = json.loads(json.dumps(wire.changed_to_json(changed)))
    assert wire.changed_from_json(*passed) == changed


def test_extra_keys_are_the_adapter_of_every_block_and_the_salt_of_the_first() -> None:
    def extra(parent: int | None, salt: str | None, adapter: str | None) -> object:
        event = event_of(BlocksStored([1, 2], parent, [1, 2, 3, 4], salt, adapter))
        assert event["lora_name"] == adapter
        return event.get("extra_keys")

    assert extra(None, None, None) is None
    assert extra(None, "s", None) == [("s",), None]
    assert extra(9, "s", None) is None  # as in vLLM: the parent's name has it
    assert extra(None, "s", "a") == [("a", "s"), ("a",)]
    assert extra(9, None, "a") == [("a",), ("a",)]


# ---------------------------------------------------------------------------------------------------
# over sockets


class Subscriber:
    """A router's two sockets at a publisher."""

    def __init__(self, context: Any, publisher: KVEventPublisher, topic: bytes = b"") -> None:
        import zmq

        self.zmq = zmq
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, 1)
        self.sub.connect(publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        self.sub.subscribe(topic)
        self.ask = context.socket(zmq.DEALER)
        assert publisher._replay is not None
        self.ask.connect(publisher._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    def read(self) -> tuple[int, bytes]:
        assert self.sub.poll(SECONDS * 1000), "no message came"
        _topic, number, payload = self.sub.recv_multipart()
        return int.from_bytes(number, "big"), payload

    def replayed(self, number: int) -> list[tuple[int, bytes]]:
        self.ask.send_multipart([b"", number.to_bytes(8, "big")])
        found = []
        while True:
            assert self.ask.poll(SECONDS * 1000), "no replay came"
            empty, topic, name, payload = self.ask.recv_multipart()
            assert empty == b""
            if int.from_bytes(name, "big", signed=True) == -1:
                assert topic == payload == b""
                return found
            found.append((int.from_bytes(name, "big"), payload))

    def settle(self, publisher: KVEventPublisher) -> None:
        """Wait until the subscription has arrived: messages before are not sent to it."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            publisher.cleared()
            if self.sub.poll(50):
                return
        raise AssertionError("the subscription did not arrive")


Subscribe = Callable[..., Subscriber]
Publisher = Callable[..., KVEventPublisher]


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    made = []

    def new(publisher: KVEventPublisher, topic: bytes = b"") -> Subscriber:
        made.append(Subscriber(context, publisher, topic))
        return made[-1]

    yield new
    for subscriber in made:
        subscriber.sub.close(linger=0)
        subscriber.ask.close(linger=0)
    context.term()


@pytest.fixture
def new_publisher() -> Iterator[Publisher]:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    made = []

    def new(**values: object) -> KVEventPublisher:
        free = "tcp://127.0.0.1:*"
        config = KVEventsConfig.read(said(endpoint=free, replay_endpoint=free, **values))
        made.append(KVEventPublisher(config))
        return made[-1]

    yield new
    for publisher in made:
        publisher.close()
        assert not publisher._thread.is_alive()


def test_an_endpoint_in_use_is_refused(new_publisher: Publisher) -> None:
    import zmq

    taken = new_publisher()._pub.getsockopt_string(zmq.LAST_ENDPOINT).replace("127.0.0.1", "*")
    with refuses(ConfigError, "--kv-events-config", taken, "give free ports"):
        KVEventPublisher(KVEventsConfig.read(said(endpoint=taken)))


def test_what_is_read_is_what_was_published(subscribe: Subscribe, new_publisher: Publisher) -> None:
    from tests.vllm_events import BlockStored, decoded

    publisher = new_publisher(topic="kv@pod@m")
    reader = subscribe(publisher, b"kv@")
    reader.settle(publisher)
    before = time.time()
    publisher.publish(CacheChanged([BlocksStored([2**64 - 1, 3], 5, [1, 2, 3, 4], None, "a")]))
    while True:  # behind those of `settle`
        number, payload = reader.read()
        batch, events = decoded(payload)
        if isinstance(batch.events[0], BlockStored):
            break
    assert before <= batch.ts <= time.time()
    assert batch.data_parallel_rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1, 3],
            "parent_block_hash": 5,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": "a",
            "extra_keys": [("a",), ("a",)],
            **dict.fromkeys(
                ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
                None,
            ),
            **dict.fromkeys(("ownership", "session_id", "lookahead_token_ids"), None),
        }
    ]
    assert reader.replayed(number) == [(number, payload)]


def test_a_gap_is_seen_and_replayed(subscribe: Subscribe, new_publisher: Publisher) -> None:
    publisher = new_publisher(buffer_steps=10)
    for number in range(25):
        publisher.publish(CacheChanged([BlocksRemoved([number])]))
    reader = subscribe(publisher)
    assert [number for number, _ in reader.replayed(20)] == list(range(20, 25))
    assert [number for number, _ in reader.replayed(0)] == list(range(15, 25))  # what is held
    assert reader.replayed(25) == []
    reader.ask.send_multipart([b"", b"abc"])  # no number: no answer, and no end
    assert [number for number, _ in reader.replayed(24)] == [24]


def test_what_is_dropped_leaves_a_gap(
    subscribe: Subscribe, new_publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = new_publisher(max_queue_size=2)
    publisher.publish(CacheChanged([CacheCleared()], dropped=3))  # the engine had too many
    publisher.cleared()
    reader = subscribe(publisher)
    end = time.monotonic() + SECONDS
    while publisher.num_published < 2 and time.monotonic() < end:
        time.sleep(0.001)
    assert [number for number, _ in reader.replayed(0)] == [0, 2]
    assert publisher.counts() == (2, 1)
    with monkeypatch.context() as patch:  # its thread hangs
        patch.setattr(publisher, "_awaken", lambda: None)
        for _ in range(5):
            publisher.cleared()
    assert publisher.counts() == (2, 4)
    publisher._awaken()
    assert [number for number, _ in reader.replayed(0)][-2:] == [3, 4]
    publisher.cleared()
    while publisher.num_published < 5 and time.monotonic() < end:
        time.sleep(0.001)
    assert [number for number, _ in reader.replayed(3)] == [3, 4, 8]


def test_a_subscriber_that_does_not_read_holds_up_nobody(
    subscribe: Subscribe, new_publisher: Publisher
) -> None:
    """The other one gets everything, and what waits for it is bounded."""
    publisher = new_publisher(hwm=50, buffer_steps=10)
    hanging = subscribe(publisher)
    reader = subscribe(publisher)
    hanging.settle(publisher)
    reader.settle(publisher)
    changed = CacheChanged([BlocksStored([1], None, list(range(20_000)))])
    for _ in range(600):  # 36 MB: more than the buffers of the kernel hold
        publisher.publish(changed)
        last = publisher._sequence - 1
        while reader.read()[0] < last:  # those of `settle`
            pass
    assert publisher.num_dropped == 0
    numbers = []
    while hanging.sub.poll(200):
        numbers.append(hanging.read()[0])
    assert len(numbers) < last, "everything was held for it"


@pytest.mark.parametrize("least", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_an_index_that_came_over_sockets_is_the_engines(
    subscribe: Subscribe, new_publisher: Publisher, least: int
) -> None:
    """From the allocator over the message of the engine's process to a subscriber, with evictions. Where
    messages are lacking they are replayed.
    """
    from tests.vllm_events import decoded

    publisher = new_publisher(buffer_steps=10**6)
    reader = subscribe(publisher)
    rig = Rig(num_blocks=40, max_num_seqs=4, budget=64)
    events = CacheEvents()
    rig.cache.collect_events(events)
    index = RouterIndex()
    choose = random.Random(1)
    expected = 0
    prompts: list[list[int]] = []

    def follow() -> None:
        """Read all that was published until now."""
        nonlocal expected
        while expected < publisher._sequence:
            found = [reader.read()] if reader.sub.poll(20) else reader.replayed(expected)
            if found and found[0][0] > expected:
                found = reader.replayed(expected)
            for number, payload in found:
                if number == expected:  # and not one that was replayed before
                    index.apply(decoded(payload)[1])
                    expected += 1

    count = 0
    while index.num_changed < least:
        for _ in range(200):
            while rig.scheduler.num_waiting + rig.scheduler.num_running < 5:
                prompts = prompts or random_prompts(count, 100)
                rig.requests.clear()
                rig.add(str(count), prompts.pop(), max_tokens=choose.randrange(1, 9))
                count += 1
            step = rig.scheduler.schedule()
            rig.scheduler.apply(step, rig.model(step))
            if (changed := events.take()) is not None:
                passed = json.loads(json.dumps(wire.changed_to_json(changed)))
                publisher.publish(wire.changed_from_json(*passed))
        follow()
        assert set(index.blocks) == indexed(rig.allocator)
    assert publisher.num_dropped == 0
