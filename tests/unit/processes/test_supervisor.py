"""Supervisor: which engines are started again. The processes are stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from freight.errors import CheckpointError, FreightError, RankError
from freight.serve.processes import supervisor as supervisor_module
from freight.serve.processes import wire
from freight.serve.processes.supervisor import Supervisor

LOST = RankError("rank 1 has ended: the engine cannot go on")
DAMAGED = CheckpointError("a weight is damaged")


class StandIn:
    """An engine's process that is never started."""

    def __init__(self, *callbacks: Any) -> None:
        self.on_end = callbacks[3]
        self.failure: FreightError | None = None

    async def stop(self) -> None:
        pass


class Owner:
    """Counts the engines that took another's place, and has the reason why none will."""

    def __init__(self) -> None:
        self.replacements, self.reasons = 0, list[str]()

    set_stats = observe_step = None

    def replaced(self, client: Any) -> None:
        self.replacements += 1

    def failed(self, status: int, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize(
    ("ends", "replacements", "reason"),
    [
        ([LOST], 0, str(LOST)),  # while the first engine loads: it may never come
        ([None, LOST, None], 3, ""),
        ([None, DAMAGED], 1, str(DAMAGED)),
        ([None, LOST, LOST, LOST], 3, "the engine's process ended with signal 9"),
    ],
)
def test_a_rank_that_is_lost_while_a_later_engine_loads_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
    ends: list[FreightError | None],
    replacements: int,
    reason: str,
) -> None:
    monkeypatch.setattr(supervisor_module, "EngineClient", StandIn)
    monkeypatch.setattr(Supervisor, "load", lambda _: asyncio.sleep(0))
    owner: Any = Owner()

    async def run() -> None:
        supervisor: Any = Supervisor(SimpleNamespace(), owner, restarts=True)  # type: ignore[arg-type]
        for failure in ends:
            if failure is not None:  # as it comes from the process
                failure = wire.error_from_json(*wire.error_to_json(failure))
            supervisor.client.failure = failure
            supervisor.client.ended = asyncio.get_running_loop().create_future()
            supervisor.client.ended.set_result(-9)
            supervisor.client.on_end()

    asyncio.run(run())
    assert owner.replacements == replacements
    assert owner.reasons == ([reason] if reason else [])


def test_an_engine_that_was_stopped_tells_its_end_after_the_next_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "EngineClient", StandIn)
    owner: Any = Owner()

    async def run() -> None:
        supervisor: Any = Supervisor(SimpleNamespace(), owner)  # type: ignore[arg-type]
        first = supervisor.client
        await supervisor.stop()
        supervisor.begin_again()
        first.on_end()
        assert owner.reasons == []
        supervisor.client.ended = asyncio.get_running_loop().create_future()
        supervisor.client.ended.set_result(-9)
        supervisor.client.on_end()

    asyncio.run(run())
    assert owner.reasons == ["the engine's process ended with signal 9"]
