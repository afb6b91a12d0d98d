"""Places for connections are shared by keys: none locks out the others, whatever it asks for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from freight.serve.transport.auth import Keys
from freight.serve.transport.errors import ApiError
from freight.serve.transport.shares import BodyShares, Shares

TWO = Keys((("a", "value-a"), ("b", "value-b"), ("c", "value-c")))
ONE = Keys((("a", "value-a"),))


class Endless:
    """An app whose answers end when `over` is set."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.over.wait()


async def asked(shares: Shares, key: str | None) -> asyncio.Task[None]:
    task = asyncio.create_task(shares({"state": {"key_name": key}}, None, None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return task


async def begin_all(shares: Shares, key: str | None, most: int) -> int:
    """Begin requests until one is refused; returns how many go on."""
    for count in range(most):
        task = await asked(shares, key)
        error = task.exception() if task.done() else None
        if error is not None:
            assert isinstance(error, ApiError)
            assert error.status == 429
            assert "Retry-After" in error.headers
            return count
    return most


def test_a_key_leaves_places_to_each_that_comes_later() -> None:
    async def run() -> list[int]:
        app = Endless()
        shares = Shares(app, TWO, 240)
        counts = [await begin_all(shares, key, 300) for key in "abc"]
        app.over.set()
        await asyncio.sleep(0.01)
        assert await begin_all(shares, "a", 100) == 100  # what has ended is not counted
        return counts

    assert asyncio.run(run()) == [120, 60, 30]


@pytest.mark.parametrize(("keys", "key"), [(ONE, "a"), (TWO, None), (Keys(()), None)])
def test_nothing_is_shared_where_nobody_else_has_a_key(keys: Keys, key: str | None) -> None:
    async def run() -> int:
        return await begin_all(Shares(Endless(), keys, 8), key, 20)

    assert asyncio.run(run()) == 20


def test_a_key_that_has_nothing_is_let_in() -> None:
    async def run() -> int:
        shares = Shares(Endless(), TWO, 1)
        return sum([await begin_all(shares, key, 2) for key in "abc"])

    assert asyncio.run(run()) == 3


def bodies_held(bodies: BodyShares, key: str, places: contextlib.ExitStack) -> int:
    """Bodies of 1 MiB that are let in."""
    count = 0
    error: ApiError | None = None
    while error is None:
        hold = places.enter_context(bodies.place(key))
        try:
            for size in (1 << 16, 1 << 19, (1 << 20) + (1 << 16)):  # 64 KiB of each are not counted
                hold(size)
            count += 1
        except ApiError as refusal:
            error = refusal
    assert (error.status, error.code) == (429, "key_has_its_share")
    assert error.headers["Retry-After"] == "1"
    hold(1 << 16)  # a short body is let in
    return count


@pytest.mark.parametrize(("keys", "key"), [(ONE, "a"), (TWO, None), (Keys(()), None)])
def test_bytes_of_bodies_are_bounded(keys: Keys, key: str | None) -> None:
    bodies = BodyShares(keys, 64 << 20)
    for _ in range(2):  # what was held is free again
        with contextlib.ExitStack() as places:
            hold = places.enter_context(bodies.place(key))
            for size in range(1, 65):
                hold((size << 20) + (1 << 16))
            with pytest.raises(ApiError) as full:
                hold((64 << 20) + (1 << 16) + 1)
            assert full.value.status == 503


def test_a_key_leaves_bytes_to_each_that_comes_later() -> None:
    bodies = BodyShares(TWO, 64 << 20)
    for _ in range(2):
        with contextlib.ExitStack() as places:
            counts = [bodies_held(bodies, key, places) for key in "abc"]
        assert counts == [32, 16, 8]
