"""Weights of a server that change: which requests wait, and until when."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from freight.engine.messages import Action
from freight.serve.transport.errors import ApiError
from freight.serve.weights import PauseMode, ServedWeights


def new_weights() -> ServedWeights:
    """Those of a server whose engine has no requests, and does at once what it is told."""

    def change(action: Action, value: str | int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    client = SimpleNamespace(sleep_level=0, num_running=0, change=change)
    server: Any = SimpleNamespace(
        client=client,
        draining=False,
        max_sequences=2,
        cut_answers=lambda error: None,
        weights_changed=lambda: None,
    )
    return ServedWeights(server)


class Brief(asyncio.Event):
    """Is clear again one turn of the event loop after somebody saw it set."""

    def is_set(self) -> bool:
        is_set = super().is_set()
        if is_set:
            asyncio.get_running_loop().call_soon(self.clear)
        return is_set


def test_a_request_is_sent_only_while_no_change_has_begun():
    async def scenario() -> None:
        weights = new_weights()
        is_open = Brief()
        weights._is_open = is_open
        waiting = []

        async def submit() -> None:
            await weights.settle(60.0)
            assert asyncio.Event.is_set(is_open)  # as it is sent, with the version that it states

        for _ in range(3):
            waiting.append(asyncio.create_task(submit()))
            await asyncio.sleep(0.01)
            is_open.set()
        while not all(task.done() for task in waiting):
            is_open.set()
            await asyncio.sleep(0.001)
        await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_requests_wait_no_longer_than_they_may_and_no_more_of_them():
    async def scenario() -> None:
        weights = new_weights()
        await weights.pause(PauseMode.WAIT, clear_cache=True)
        begin = time.monotonic()
        waiting = [asyncio.create_task(weights.settle(0.1)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await weights.settle(0.1)
        assert refused.value.status == 429
        for late in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(late, ApiError)
            assert late.status == 504
        assert time.monotonic() - begin >= 0.1
        await weights.resume()
        await weights.settle(0.1)

    asyncio.run(scenario())
