"""Adapters of a server: what bodies say, which requests wait, and what an engine that ends leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.server.openai_cases import SERVED

from freight.engine.adapters import LoadedAdapter
from freight.errors import CapacityError, CheckpointError, FreightError, RequestError
from freight.serve.adapters import (
    Load,
    ServedAdapters,
    parse_load,
    parse_unload,
    require_changeable,
)
from freight.serve.processes.client import EngineState, NotReadyError
from freight.serve.transport.errors import ApiError

SQL = LoadedAdapter("sql", "./sql", "ab" * 32, 0)
WITH_SQL = replace(SERVED, max_adapters=2, adapters=(SQL,))


class FakeClient:
    """An engine whose answers the test gives: `answer` in the order of the commands."""

    def __init__(self) -> None:
        self.adapters: tuple[LoadedAdapter, ...] = ()
        self.commands: list[tuple[str, ...]] = []
        self._futures: list[asyncio.Future[None]] = []

    def load_adapter(self, name: str, path: str) -> asyncio.Future[None]:
        return self._command("load", name, path)

    def unload_adapter(self, name: str) -> asyncio.Future[None]:
        return self._command("unload", name)

    def _command(self, *command: str) -> asyncio.Future[None]:
        self.commands.append(command)
        self._futures.append(asyncio.get_running_loop().create_future())
        return self._futures[-1]

    def answer(self, index: int, digest: str = "", error: FreightError | None = None) -> None:
        kind, name, *path = self.commands[index]
        if error is not None:
            self._futures[index].set_exception(error)
            return
        others = tuple(adapter for adapter in self.adapters if adapter.name != name)
        self.adapters = others
        if kind == "load":
            self.adapters += (LoadedAdapter(name, path[0], digest, 0),)
        self._futures[index].set_result(None)


def run(scenario: Callable[[ServedAdapters, Any], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await scenario(ServedAdapters(lambda loaded, changing: None), FakeClient())

    asyncio.run(asyncio.wait_for(whole(), 60))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": 1, "lora_path": "a"}, "lora_name"),
        ({"lora_name": " ", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a\n", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": " "}, "lora_path"),
        ({"lora_name": SERVED.names[0], "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "a", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_name": "a", "lora_path": "a", "rank": 1}, "rank"),
    ],
)
def test_a_body_that_is_none_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_load(body, WITH_SQL)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_bodies_of_vllms_clients_are_taken() -> None:
    body = {"lora_name": "a", "lora_path": "b", "load_inplace": True, "is_3d_lora_weight": False}
    assert parse_load(body, SERVED) == Load("a", "b")
    assert parse_unload({"lora_name": "sql", "lora_int_id": 3}, WITH_SQL) == "sql"
    with pytest.raises(ApiError, match=r"'other'.*sql") as unknown:
        parse_unload({"lora_name": "other"}, WITH_SQL)
    assert unknown.value.status == 404


def test_they_need_adapters_and_keys() -> None:
    require_changeable(WITH_SQL, True)
    for served, has_keys, status in ((WITH_SQL, False, 403), (SERVED, True, 404)):
        with pytest.raises(ApiError) as refused:
            require_changeable(served, has_keys)
        assert refused.value.status == status


def test_fingerprints_name_the_digest() -> None:
    assert WITH_SQL.fingerprint_of(None) == SERVED.fingerprint
    assert WITH_SQL.fingerprint_of(SQL) == f"{SERVED.fingerprint}-abababab"


def test_requests_wait_for_what_is_being_done_with_their_name() -> None:
    async def scenario(adapters: ServedAdapters, client: FakeClient) -> None:
        first = asyncio.create_task(adapters.load(client, "a", "one"))
        await turns()
        second = asyncio.create_task(adapters.load(client, "a", "two"))
        waiting = asyncio.create_task(adapters.settle("a"))
        await turns()
        assert client.commands == [("load", "a", "one")]
        assert adapters.changing == {"a"}
        await adapters.settle("b")
        client.answer(0, "1")
        await first
        await turns()
        assert client.commands[1:] == [("load", "a", "two")]
        client.answer(1, "2")
        await second
        await waiting
        assert [adapter.digest for adapter in adapters.loaded] == ["2"]
        assert not adapters.changing

    run(scenario)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CheckpointError("no folder"), 400, None),
        (CapacityError("no slot"), 400, "no_slot"),
        (NotReadyError(EngineState.ENDED), 503, "engine_ended"),
    ],
)
def test_a_load_that_fails_leaves_what_there_was(
    error: FreightError, status: int, code: str | None
) -> None:
    async def scenario(adapters: ServedAdapters, client: FakeClient) -> None:
        client.adapters = (SQL,)
        assert await adapters.begin(client)
        loading = asyncio.create_task(adapters.load(client, "sql", "worse"))
        await turns()
        client.answer(0, error=error)
        with pytest.raises(ApiError) as refused:
            await loading
        assert (refused.value.status, refused.value.code) == (status, code)
        assert adapters.loaded == (SQL,)
        assert not adapters.changing

    run(scenario)


def test_what_a_load_that_fails_has_taken_away_is_known() -> None:
    async def scenario(adapters: ServedAdapters, client: FakeClient) -> None:
        client.adapters = (SQL,)
        assert await adapters.begin(client)
        loading = asyncio.create_task(adapters.load(client, "sql", "two"))
        await turns()
        client.adapters = ()
        client.answer(0, error=CheckpointError("the file was changed"))
        with pytest.raises(ApiError, match="the file was changed") as refused:
            await loading
        assert refused.value.status == 400
        assert not adapters.loaded

    run(scenario)


def test_a_name_that_another_client_has_unloaded_is_404() -> None:
    async def scenario(adapters: ServedAdapters, client: FakeClient) -> None:
        client.adapters = (SQL,)
        assert await adapters.begin(client)
        first = asyncio.create_task(adapters.unload(client, "sql"))
        second = asyncio.create_task(adapters.unload(client, "sql"))
        await turns()
        client.answer(0)
        await first
        await turns()
        client.answer(1, error=RequestError("no adapter is called sql"))
        with pytest.raises(ApiError, match="no adapter") as refused:
            await second
        assert (refused.value.status, refused.value.code) == (404, "adapter_not_found")

    run(scenario)


def test_a_client_that_leaves_does_not_keep_its_adapter_from_being_known() -> None:
    async def scenario(adapters: ServedAdapters, client: FakeClient) -> None:
        loading = asyncio.create_task(adapters.load(client, "a", "one"))
        await turns()
        loading.cancel()
        await turns()
        assert adapters.changing == {"a"}
        client.answer(0, "1")
        await adapters.settle("a")
        assert [adapter.name for adapter in adapters.loaded] == ["a"]

    run(scenario)


def test_an_engine_that_ends_while_it_loads_them_again_loses_none() -> None:
    async def scenario(adapters: ServedAdapters, client: FakeClient) -> None:
        client.adapters = (SQL, LoadedAdapter("chat", "./chat", "cd", 1))
        assert await adapters.begin(client)
        second = FakeClient()
        beginning = asyncio.create_task(adapters.begin(second))  # type: ignore[arg-type]
        await turns()
        second.answer(0, error=NotReadyError(EngineState.ENDED))
        assert not await beginning
        third = FakeClient()
        beginning = asyncio.create_task(adapters.begin(third))  # type: ignore[arg-type]
        await turns()
        third.answer(0, SQL.digest)
        await turns()
        third.answer(1, error=CheckpointError("its files are gone"))
        assert await beginning
        assert third.commands == [("load", "sql", "./sql"), ("load", "chat", "./chat")]
        assert [adapter.name for adapter in adapters.loaded] == ["sql"]

    run(scenario)
