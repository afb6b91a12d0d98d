"""What counts as silence of the engine's process, and what does not: with clocks that the tests
turn.
"""

from __future__ import annotations

import socket
import time
from typing import Any, cast

from freight.serve.processes import wire
from freight.serve.processes.frames import Decoder
from freight.serve.processes.pulse import Progress, Silence
from freight.serve.processes.worker import Channel


def test_a_turn_that_uses_no_processor_is_stuck() -> None:
    progress = Progress()
    assert progress.stuck(10.0, 10.5, 3.0) == 0
    for second in range(1, 40):
        assert (
            progress.stuck(10.0, 10.5 + second, 3.0 + 0.0001 * second) == second
        )  # what the answers themselves take
    assert progress.stuck(10.0, 60.0, 4.0) == 0  # it has computed
    assert progress.stuck(61.0, 62.0, 4.0) == 0  # another turn
    assert progress.stuck(61.0, 63.0, 4.0) == 1


def test_a_long_turn_that_computes_is_not_stuck_and_no_turn_never_is() -> None:
    progress = Progress()
    assert all(progress.stuck(0.0, second, 0.5 * second) == 0 for second in range(1, 4000))
    assert all(progress.stuck(None, second, 2000.0) == 0 for second in range(4000, 4100))
    assert progress.stuck(4100.0, 4100.0, 2000.0) == 0


def test_a_gpu_that_is_waited_for_without_end_is_stuck() -> None:
    progress = Progress(on_gpu=True)
    assert all(progress.stuck(0.0, second, second) == 0 for second in range(601))  # the host spins
    assert progress.stuck(0.0, 601.0, 601.0) == 601


def test_time_in_which_all_processes_stood_still_is_not_the_engine_s() -> None:
    """As after `docker pause`, or where the server itself was stopped: its next ping comes in the
    same turn.
    """
    for on_gpu in (False, True):
        progress = Progress(on_gpu)
        assert progress.stuck(10.0, 10.5, 3.0) == 0
        assert progress.stuck(10.0, 1000.0, 3.4) <= 2
        assert progress.stuck(10.0, 1001.0, 3.9) == 0


def test_silence_grows_until_something_is_heard() -> None:
    silence = Silence(1.0)
    assert [silence.tick(at) for at in (5.0, 6.0, 7.0)] == [0.0, 1.0, 2.0]
    silence.heard()
    assert silence.tick(8.0) == 1.0
    silence.heard()
    silence.pong(30.0)
    assert silence.tick(9.0) == 30.0
    silence.pong(0.0)
    assert silence.tick(10.0) == 2.0


def test_time_in_which_the_server_stood_still_is_no_silence_of_the_engine() -> None:
    silence = Silence(1.0)
    silence.tick(0.0)
    assert silence.tick(100.0) == 2.0


def test_an_answer_to_a_ping_tells_of_the_turn_under_way() -> None:
    class Hung:
        turn_began: float | None = None

    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, frames = Channel(theirs), Decoder(wire.CAP)

        def asked() -> float:
            channel.answer_ping()
            ((name, stuck),) = frames.feed(ours.recv(1 << 16))
            assert name == wire.PONG
            return float(stuck)

        assert asked() == 0  # the model loads
        channel.loop = hung = cast(Any, Hung())
        hung.turn_began = time.monotonic()
        asked()
        while asked() == 0:  # this test waits: nothing computes
            time.sleep(0.2)
        hung.turn_began = None
        assert asked() == 0
