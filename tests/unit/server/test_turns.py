"""Turns: one at a time, keys in turn, and always a place for a key that has none."""

from __future__ import annotations

import asyncio

import pytest

from freight.serve.rendering.turns import NoTurnError, Turns


def test_keys_have_turns_one_after_the_other() -> None:
    order: list[str] = []

    async def ask(turns: Turns, key: str, number: int) -> None:
        await turns.acquire(key)
        order.append(f"{key}{number}")
        await asyncio.sleep(0)
        turns.release()

    async def run() -> None:
        turns = Turns(64)
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(ask(turns, "a", number))
            await asyncio.sleep(0)
            group.create_task(ask(turns, "b", 0))
            group.create_task(ask(turns, "c", 0))

    asyncio.run(run())
    assert sorted(order) == ["a0", "a1", "a2", "a3", "a4", "b0", "c0"]
    assert order.index("b0") < order.index("a3")
    assert order.index("c0") < order.index("a4")


def test_a_key_leaves_places_to_the_others() -> None:
    async def run() -> tuple[int, int]:
        turns = Turns(8)
        await turns.acquire("a")
        waiting = []
        counts = []
        for key in ("a", "b"):
            refused = False
            count = 0
            while not refused:
                task = asyncio.create_task(turns.acquire(key))
                await asyncio.sleep(0)
                refused = task.done() and isinstance(task.exception(), NoTurnError)
                waiting.append(task)
                count += not refused
            counts.append(count)
        for task in waiting:
            task.cancel()
        return counts[0], counts[1]

    assert asyncio.run(run()) == (4, 2)


def test_without_keys_all_places_are_taken() -> None:
    async def run() -> None:
        turns = Turns(2)
        await turns.acquire()
        waiting = [asyncio.create_task(turns.acquire()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(NoTurnError):
            await turns.acquire()
        for task in waiting:
            task.cancel()

    asyncio.run(run())


def test_who_leaves_gives_up_its_place_and_its_turn() -> None:
    async def run() -> None:
        turns = Turns(2)
        await turns.acquire("a")
        leaving = asyncio.create_task(turns.acquire("a"))
        staying = asyncio.create_task(turns.acquire("b"))
        await asyncio.sleep(0)
        turns.release()  # the turn is that of `leaving`, which never takes it
        leaving.cancel()
        await asyncio.wait_for(staying, 30)
        turns.release()
        await asyncio.wait_for(turns.acquire("c"), 30)

    asyncio.run(run())
