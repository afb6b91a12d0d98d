"""The adapters of a server: `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form, and
which requests wait for them.

The engine resolves a name when it takes a request, and takes commands in the order in which they are
sent. Requests for a name wait here while it is being loaded or unloaded. So a request that is sent has
the version that is known here at that moment, which its answer's `system_fingerprint` states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from freight.base.fields import JsonObject
from freight.engine.adapters import LoadedAdapter
from freight.errors import ConfigError, FreightError, RequestError, shown
from freight.serve.bodies import Body, Unread, invalid, read_closed
from freight.serve.call import Served
from freight.serve.engine_errors import from_engine
from freight.serve.processes.client import EngineClient, NotReadyError
from freight.serve.transport.errors import ApiError
from freight.settings.lora import check_adapter_name

logger = logging.getLogger("freight")


class LoadBody(Body):
    """The body of /v1/load_lora_adapter. A name that is in use is always loaded anew."""

    unread = {  # noqa: RUF012, a ClassVar annotation is on the base class
        "load_inplace": Unread(None),
        "is_3d_lora_weight": Unread((False,), "the files say how experts are stored; leave it out"),
    }

    lora_name: str
    lora_path: str


class UnloadBody(Body):
    """The body of /v1/unload_lora_adapter."""

    unread = {"lora_int_id": Unread(None)}  # noqa: RUF012, as above

    lora_name: str


@dataclass(frozen=True)
class Load:
    """A parsed request to load an adapter. path: a folder of the server's machine, or a hub id."""

    name: str
    path: str


def parse_load(body: JsonObject, served: Served) -> Load:
    """Parse a body of /v1/load_lora_adapter. Raises ApiError (400)."""
    asked = read_closed(LoadBody, body, served.unknown_fields)
    name = asked.lora_name
    if not asked.lora_path.strip():
        raise invalid(
            "lora_path is empty; give a folder of the server's machine, or a hub id", "lora_path"
        )
    try:
        check_adapter_name(name)
    except ConfigError as error:
        raise invalid(str(error), "lora_name") from None
    if name in served.names:
        raise invalid(
            f"the LoRA adapter {shown(name)} has a name of the served model; choose another one",
            "lora_name",
        )
    return Load(name, asked.lora_path)


def parse_unload(body: JsonObject, served: Served) -> str:
    """Return the name of a body of /v1/unload_lora_adapter. Raises ApiError (400, 404)."""
    name = read_closed(UnloadBody, body, served.unknown_fields).lora_name
    if not served.has_adapter(name):
        raise ApiError(
            404,
            f"the LoRA adapter {shown(name)} cannot be found; {served.offered}",
            param="lora_name",
            code="adapter_not_found",
        )
    return name


class ServedAdapters:
    """What is being loaded and unloaded. It belongs to one event loop.

    on_change  called with the adapters that are loaded and the names that are being changed
    """

    def __init__(
        self, on_change: Callable[[tuple[LoadedAdapter, ...], frozenset[str]], None]
    ) -> None:
        self.loaded: tuple[LoadedAdapter, ...] = ()
        self._on_change = on_change
        self._changing: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def changing(self) -> frozenset[str]:
        return frozenset(self._changing)

    async def settle(self, name: str) -> None:
        """Wait until nothing is being done with a name."""
        while (change := self._changing.get(name)) is not None:
            await asyncio.wait((change,))

    async def load(self, client: EngineClient, name: str, path: str) -> None:
        """Load an adapter, or replace the one that has the name. Raises ApiError."""
        await self._change(client, name, lambda: client.load_adapter(name, path))
        logger.info("adapter %s: loaded from %s", shown(name), shown(path))

    async def unload(self, client: EngineClient, name: str) -> None:
        """Take an adapter's name away. Raises ApiError."""
        await self._change(client, name, lambda: client.unload_adapter(name))
        logger.info("adapter %s: unloaded", shown(name))

    async def begin(self, client: EngineClient) -> bool:
        """Take over what an engine that has started has loaded. One that takes the place of another
        loads what that had, as far as it can be read still. False: it has ended meanwhile.
        """
        before = self.loaded
        for adapter in before:
            try:
                await client.load_adapter(adapter.name, adapter.asked)
            except NotReadyError:
                return False
            except FreightError as error:
                logger.error("adapter %s is not loaded any more: %s", shown(adapter.name), error)
        for adapter in client.adapters:
            if any(adapter.name == old.name and adapter.digest != old.digest for old in before):
                logger.warning(
                    "adapter %s: the files have changed since it was loaded", shown(adapter.name)
                )
        self._set(client.adapters)
        return True

    async def _change(
        self, client: EngineClient, name: str, send: Callable[[], Awaitable[None]]
    ) -> None:
        """Send a command once nothing else is being done with the name. A client that leaves does not
        keep the answer from being taken.
        """
        task = asyncio.get_running_loop().create_task(self._changed(client, name, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _changed(
        self, client: EngineClient, name: str, send: Callable[[], Awaitable[None]]
    ) -> None:
        await self.settle(name)
        change = asyncio.get_running_loop().create_future()
        self._changing[name] = change
        self._set(self.loaded)
        try:
            await send()
            self.loaded = client.adapters
        except NotReadyError as error:  # another engine loads what was loaded
            raise _as_answer(error) from None
        except FreightError as error:
            self.loaded = client.adapters
            raise _as_answer(error) from None
        finally:
            del self._changing[name]
            change.set_result(None)
            self._set(self.loaded)

    def _set(self, loaded: tuple[LoadedAdapter, ...]) -> None:
        self.loaded = loaded
        self._on_change(loaded, self.changing)


def _as_answer(error: FreightError) -> ApiError:
    """The answer to a command about an adapter: its files, and the room for it, are the client's."""
    answer = from_engine(error)
    if answer.status == 500:
        return ApiError(400, str(error), param="lora_path")
    if answer.code == "cache_too_small":
        return ApiError(400, str(error), param="lora_name", code="no_slot")
    if isinstance(error, RequestError):  # another client has unloaded it meanwhile
        return ApiError(404, str(error), param="lora_name", code="adapter_not_found")
    return answer


def require_changeable(served: Served, has_keys: bool) -> None:
    """Raise ApiError where adapters cannot be loaded over HTTP: 404 for a server that takes none, 403
    for one without keys, which anybody may call.
    """
    if not served.max_adapters:
        raise ApiError(
            404,
            "this server takes no adapters: start it with --enable-lora",
            code="adapters_disabled",
        )
    if not has_keys:
        raise ApiError(
            403,
            "adapters are loaded and unloaded with a key, and this server has none: start it with --api-key or "
            "--api-key-file, or name the adapters in --lora-modules",
            code="keys_needed",
        )
