"""A message that is too long for a frame fails its request alone, on both ways between the
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from tests.refusals import refuses

from freight.engine.intake import AcceptedPrompt
from freight.errors import EngineError
from freight.outputs import CompletionDelta, FinishReason, RequestDelta
from freight.sampling import SamplingParams
from freight.serve.inbox import Inbox
from freight.serve.processes import wire
from freight.serve.processes.client import EngineClient, EngineState, TooLongError, WorkerOptions
from freight.serve.processes.frames import Decoder, FrameError
from freight.serve.processes.worker import Channel

SHORT = 2000  # bytes


def delta(name: str, text: str) -> RequestDelta:
    return RequestDelta(
        name, [CompletionDelta(0, [1], text, None, FinishReason.STOP, None, None)], True
    )


def client_for(sent: list[bytes]) -> EngineClient:
    """A client whose engine is ready, without a process; what it sends is in `sent`."""

    class Transport(asyncio.Transport):
        def write(self, data: Any) -> None:
            sent.append(bytes(data))

    client = EngineClient(WorkerOptions({}), lambda _: None, lambda *_: None, lambda: None)
    client.connection_made(Transport())
    client.state = EngineState.READY
    return client


def test_a_delta_that_is_too_long_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CAP", SHORT)
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        deltas = [delta("1", "first"), delta("2", "x" * 5000), delta("3", "third")]
        for message in wire.step_messages(deltas, [(0.5, 3)]):
            Channel(theirs).send_step(message)
        data = ours.recv(1 << 16)
    named = [message[0] for message in Decoder(SHORT).feed(data)]
    assert named == [wire.STEPPED, wire.LOST, wire.STEPPED, wire.STEPPED]

    async def take() -> None:
        sent: list[bytes] = []
        client = client_for(sent)
        inboxes = {name: Inbox() for name in "123"}
        for name, inbox in inboxes.items():
            client.submit(name, 0, AcceptedPrompt("x", (1,)), SamplingParams(), inbox)
        sent.clear()
        client.get_buffer(-1)[: len(data)] = data
        client.buffer_updated(len(data))
        assert client.num_running == 0
        assert Decoder().feed(b"".join(sent)) == [
            [wire.ABORT, "2"]
        ]  # the engine need not go on with it
        for name, text in (("1", "first"), ("3", "third")):
            [(_, told)] = await inboxes[name].next()
            assert told.outputs[0].text == text
        with refuses(EngineError, "frame", "2000"):
            await inboxes["2"].next()

    asyncio.run(take())


def test_a_request_that_is_too_long_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CAP", SHORT)

    async def submit() -> None:
        sent: list[bytes] = []
        client = client_for(sent)
        with refuses(TooLongError, "frame", "2000"):
            client.submit("1", 0, AcceptedPrompt("x" * 5000, (1,)), SamplingParams(), Inbox())
        assert (client.num_running, sent) == (0, [])
        client.submit("2", 0, AcceptedPrompt("x", (1,)), SamplingParams(), Inbox())
        assert client.num_running == 1

    asyncio.run(submit())


def test_only_steps_can_be_lost() -> None:
    ours, theirs = socket.socketpair()
    with (
        contextlib.closing(ours),
        contextlib.closing(theirs),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(wire, "CAP", 10)
        with pytest.raises(FrameError, match="at most 10"):
            Channel(theirs).send([wire.STATS, [1] * 20])
