"""Which of several models are loaded, and who waits: `Models`, over servings that load nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from freight.serve.processes.client import EngineState
from freight.serve.serving import Serving
from freight.serve.several import sizes
from freight.serve.several.declared import DeclaredModel, ModelLimits
from freight.serve.several.front import named_outside
from freight.serve.several.models import Model, Models, ModelState
from freight.serve.several.sizes import Size
from freight.serve.transport.errors import ApiError
from freight.settings.engine import EngineArgs

TURN = 0.1


class StandIn:
    """A serving that is loaded when `loads` is set, or fails with `failure`."""

    def __init__(self) -> None:
        client = SimpleNamespace(state=EngineState.READY)
        self.service = SimpleNamespace(
            client=client, max_sequences=3, adapters=SimpleNamespace(loaded=()), served=None
        )
        self.keys = SimpleNamespace(names=())
        self.is_loading = True
        self.failure: str | None = None
        self.reason: str | None = None
        self.loads = asyncio.Event()
        self.loads.set()
        self.num_closed = 0

    def begin(self) -> asyncio.Task[None]:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_loading = True
        return asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        await self.loads.wait()
        if self.failure is not None:
            self.reason = self.failure
            self.ended.set_result(1)
        else:
            self.is_loading = False

    def crash(self) -> None:
        self.reason = "the engine's process ended with signal 9"
        self.ended.set_result(1)

    async def flush(self, error: object = None) -> None:
        pass

    async def close(self) -> None:
        self.is_loading = True
        self.num_closed += 1

    def end_answers(self) -> None:
        pass


class House:
    """Models a, b, c, … of 10 bytes each, of which `most` fit."""

    def __init__(self, names: Sequence[str] = "abc", most: int = 1, memory: int = 1000) -> None:
        self.servings = {name: StandIn() for name in names}
        made = [
            Model(
                DeclaredModel(name, EngineArgs(model=f"/models/{name}")),
                Size(weights=6, cache=4),
                cast(Serving, self.servings[name]),
            )
            for name in names
        ]
        self.models = Models(made, ModelLimits(memory, most, TURN))

    def __getitem__(self, name: str) -> Model:
        return self.models.find(name)

    @property
    def loaded(self) -> str:
        return "".join(m.name for m in self.models.models if m.state is ModelState.LOADED)

    async def ask(self, name: str) -> None:
        """Enter, and stay."""
        await asyncio.wait_for(self.models.enter(self[name], None), 5)

    async def once(self, name: str) -> None:
        await self.ask(name)
        self.models.leave(self[name])


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast(Any, test()))


async def until(condition: Callable[[], bool]) -> None:
    async def watch() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(watch(), 5)


def test_the_idle_model_that_was_used_least_recently_gives_way() -> None:
    async def test() -> None:
        house = House(most=2)
        for name in "abac":
            await house.once(name)
        assert house.loaded == "ac"
        await house.once("b")
        assert house.loaded == "bc"

    run(test)


def test_memory_is_a_limit_as_well() -> None:
    async def test() -> None:
        house = House(most=9, memory=25)
        for name in "abc":
            await house.once(name)
        assert house.loaded == "bc"
        house["a"].size = Size(weights=26)
        with pytest.raises(ApiError, match="cannot be loaded"):
            house.models.enter(house["a"], None)

    run(test)


def test_a_busy_model_keeps_its_turn_and_then_ends_what_it_began() -> None:
    async def test() -> None:
        house = House()
        await house.ask("a")
        place = house.models.enter(house["b"], None)
        await asyncio.sleep(TURN / 2)
        assert house["a"].state is ModelState.LOADED
        await until(lambda: house["a"].state is ModelState.UNLOADING)
        again = house.models.enter(house["a"], None)  # new requests of the model wait
        await asyncio.sleep(TURN)
        assert not place.done()
        assert not again.done()
        house.models.leave(house["a"])
        await asyncio.wait_for(place, 5)
        assert not again.done()
        house.models.leave(house["b"])
        await asyncio.wait_for(again, 5)
        assert house.loaded == "a"

    run(test)


def test_none_starves_where_all_models_are_busy_for_ever() -> None:
    async def test() -> None:
        house = House("abcd", most=1)
        waits: dict[str, list[float]] = {name: [] for name in "abcd"}
        loop = asyncio.get_running_loop()
        end = loop.time() + 14 * TURN

        async def busy(name: str) -> None:
            while loop.time() < end:
                begin = loop.time()
                await house.ask(name)
                waits[name].append(loop.time() - begin)
                await asyncio.sleep(TURN / 4)
                house.models.leave(house[name])

        await asyncio.gather(*(busy(name) for name in "abcd" for _ in range(2)))
        for name in "abcd":
            assert len(waits[name]) > 4
            assert max(waits[name]) < 4 * (TURN + TURN / 4 + 0.1)

    run(test)


def test_a_failure_is_told_and_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        house = House()
        house.servings["a"].failure = "/models/a/config.json is not JSON"
        places = [house.models.enter(house["a"], None) for _ in range(2)]
        for place in places:
            with pytest.raises(ApiError) as raised:
                await place
            assert raised.value.status == 503
            assert raised.value.message == (
                "the model 'a' cannot be loaded: a/config.json is not JSON"
            )
        assert house["a"].rows()[0]["status"]["value"] == "failed"
        with pytest.raises(ApiError):
            house.models.enter(house["a"], None)
        await house.once("b")  # others are served
        house.servings["a"].failure = None
        monkeypatch.setattr("freight.serve.several.models._PAUSE", 0.0)
        await house.once("a")
        assert house["a"].num_loads == 2

    run(test)


def test_an_engine_that_ends_is_loaded_again_on_demand() -> None:
    async def test() -> None:
        house = House(most=2)
        await house.ask("a")
        await house.once("b")
        house.servings["a"].crash()
        await until(lambda: house["a"].state is ModelState.UNLOADED)
        assert house.loaded == "b"
        house.models.leave(house["a"])  # its request has failed
        await house.once("a")
        assert house.loaded == "ab"
        assert house["a"].num_loads == 2

    run(test)


def test_a_client_that_leaves_frees_its_place() -> None:
    async def test() -> None:
        house = House()
        house.servings["a"].loads.clear()
        places = [house.models.enter(house["a"], None) for _ in range(3)]
        with pytest.raises(ApiError, match="3 requests wait") as raised:
            house.models.enter(house["a"], None)
        assert raised.value.status == 429
        house.models.withdraw(house["a"], places[1])
        places.append(house.models.enter(house["a"], None))
        house.servings["a"].loads.set()
        await asyncio.wait_for(places[3], 5)
        assert places[0].done()
        assert places[1].cancelled()
        house.models.withdraw(house["a"], places[0])  # as it left just then
        assert house["a"].num_active == 2

    run(test)


def test_a_model_that_nobody_waits_for_any_more_is_not_loaded() -> None:
    async def test() -> None:
        house = House()
        await house.ask("a")
        place = house.models.enter(house["b"], None)
        house.models.withdraw(house["b"], place)
        house.models.leave(house["a"])
        await asyncio.sleep(0.05)
        assert house.loaded == "a"
        assert house["b"].num_loads == 0

    run(test)


def test_a_person_unloads_a_model_that_loads_and_one_that_answers() -> None:
    async def test() -> None:
        house = House()
        house.servings["a"].loads.clear()
        place = house.models.enter(house["a"], None)
        await until(lambda: house["a"].state is ModelState.LOADING)
        house.models.unload(house["a"], 0.05)
        with pytest.raises(ApiError, match="is being unloaded"):
            await place
        await until(lambda: house["a"].state is ModelState.UNLOADED)
        house.servings["a"].loads.set()
        await house.ask("a")
        house.models.unload(house["a"], 0.05)
        await until(lambda: house["a"].state is ModelState.UNLOADED)  # its request was ended
        house.models.leave(house["a"])
        house.models.load(house["a"])
        await until(lambda: house.loaded == "a")

    run(test)


def test_the_end_of_the_server_fails_those_who_wait() -> None:
    async def test() -> None:
        house = House()
        await house.ask("a")
        waiting = house.models.enter(house["b"], None)
        ending = asyncio.ensure_future(house.models.drain(5.0))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        with pytest.raises(ApiError, match="shutting down"):
            house.models.enter(house["a"], None)
        assert not ending.done()
        house.models.leave(house["a"])
        await asyncio.wait_for(ending, 5)
        assert house.servings["a"].num_closed == 1

    run(test)


def test_a_name_in_the_query_or_the_header_is_read_whatever_its_bytes() -> None:
    def named(query: bytes, *headers: tuple[bytes, bytes]) -> str | None:
        return named_outside({"query_string": query, "headers": list(headers)})

    assert named(b"") is None
    assert named(b"other=1&model=") is None
    assert named(b"model=org/%C3%A9+a") == "org/\u00e9 a"
    assert named("model=\u00e9".encode()) == "\u00e9"  # without percent signs
    assert named(b"model=\xff") == "\ufffd"
    assert named(b"", (b"x-freight-model", "\u00e9".encode())) == "\u00e9"
    assert named(b"model=a", (b"x-freight-model", b"b")) == "a"


def test_a_placeholder_may_be_the_name_of_a_model() -> None:
    async def test() -> None:
        models = House(["tgi", "b"]).models
        assert models.has("tgi")
        assert not models.has("dummy")

    run(test)


def test_a_fault_in_one_model_fails_that_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: EngineArgs) -> Size:
        raise OSError(36, "too long", args.model)

    monkeypatch.setattr(sizes, "size_of", fail)
    measured = sizes._measured(EngineArgs(model="a"))
    assert measured["failure"] == "OSError: [Errno 36] too long: 'a'"


def test_the_default_is_the_declared_one_or_the_only_one() -> None:
    async def test() -> None:
        assert House("a").models.default().name == "a"
        house = House("ab")
        with pytest.raises(ApiError, match="names no model") as raised:
            house.models.default()
        assert raised.value.status == 400
        with pytest.raises(ApiError, match="'c' is not served here; served are 'a', 'b'") as raised:
            house.models.find("c")
        assert raised.value.status == 404

    run(test)
