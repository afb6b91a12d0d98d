"""The adapters of an engine, by name. Imports no torch.

A request keeps the adapter that it began with: one that is replaced or unloaded stays in its slot
until the last of its requests has ended. So an answer is of one version from its first token to its
last, and a slot is written only while nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from freight.errors import CapacityError, RequestError, choices, shown


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in a slot.

    asked    the path as it was given, which may be a hub id
    digest   of what decides its values (`checkpoint/lora.py`)
    """

    name: str
    asked: str
    digest: str
    slot: int


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a call of `LLM` or `AsyncLLM`, as vLLM's users write it.

    lora_name     the name that it is loaded under; another path under the name replaces it
    lora_int_id   not read: names and digests tell adapters apart
    lora_path     a folder or a hub id; '': the adapter is loaded already
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class OpenedAdapter(Protocol):
    """An adapter whose files were read and checked."""

    @property
    def digest(self) -> str: ...

    def load(self, slot: int) -> None:
        """Copy it into a slot that no request uses."""
        ...


class AdapterSlots(Protocol):
    """Where adapters are loaded: the banks of the model, on all ranks."""

    @property
    def num_slots(self) -> int: ...

    def is_here(self, path: str) -> bool:
        """Return whether `path` is a folder of this machine, which needs no `fetch`."""
        ...

    def fetch(self, path: str) -> str:
        """Return the folder of an adapter, whose files are fetched from the hub; any thread may call
        it. Raises CheckpointError.
        """
        ...

    def open(self, path: str) -> OpenedAdapter:
        """Read the files of an adapter and check them, values too. Raises CheckpointError and
        ConfigError.
        """
        ...


class Adapters:
    """What is loaded under which name.

    slots    None: the engine takes no adapters
    in_use   slots of requests that have not ended
    """

    def __init__(self, slots: AdapterSlots | None, in_use: Callable[[], Collection[int]]) -> None:
        self._slots = slots
        self._in_use = in_use
        self._named: dict[str, LoadedAdapter] = {}

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """What requests can name, in the order of loading."""
        return tuple(self._named.values())

    def named(self, name: str) -> LoadedAdapter:
        """Return an adapter. Raises RequestError for a name that nothing is loaded under."""
        adapter = self._named.get(name)
        if adapter is None:
            offered = "none is loaded"
            if self._named:
                offered = f"choose {choices(self._named)}"
            raise RequestError(f"no adapter is called {shown(name)}: {offered}")
        return adapter

    def requested(self, request: LoRARequest) -> LoadedAdapter:
        """Return the adapter of a request, loaded now unless it is already. Raises as `load` and
        `named`.
        """
        known = self._named.get(request.lora_name)
        if known is not None and request.lora_path in ("", known.asked):
            return known
        if not request.lora_path:
            return self.named(request.lora_name)
        return self.load(request.lora_name, request.lora_path)

    def is_here(self, path: str) -> bool:
        """Return whether a load of `path` asks no hub."""
        return self._slots is None or self._slots.is_here(path)

    def fetch(self, path: str) -> str:
        """Return the folder of an adapter (`AdapterSlots.fetch`)."""
        assert self._slots is not None
        return self._slots.fetch(path)

    def load(self, name: str, path: str, folder: str | None = None) -> LoadedAdapter:
        """Load an adapter under a name; one that has the name is replaced, for requests to come.
        folder: where its files are, if they were fetched.

        Nothing has changed where this raises: CheckpointError and ConfigError for its files,
        CapacityError where all slots are in use. Only where no other slot is free, and the files
        change after they were checked, or another rank cannot read them, the name is gone.
        """
        slots = self._slots
        if slots is None:
            raise RequestError("this engine takes no adapters: start it with --enable-lora")
        opened = slots.open(path if folder is None else folder)
        before = self._named.get(name)
        if before is not None and before.digest == opened.digest:
            self._named[name] = replace(before, asked=path)
            return self._named[name]
        slot = self._free_slot(slots.num_slots, before)
        if slot is None:
            raise CapacityError(
                f"adapter {shown(name)} has no slot: all {slots.num_slots} are in use; unload one, or start with a "
                "larger --max-loras"
            )
        try:
            opened.load(slot)
        except BaseException:
            # what its slot has is neither version now, and must not answer under the old digest
            if before is not None and before.slot == slot:
                del self._named[name]
            raise
        adapter = LoadedAdapter(name, path, opened.digest, slot)
        self._named[name] = adapter
        return adapter

    def unload(self, name: str) -> LoadedAdapter:
        """Take a name away; requests that use its adapter end with it. Raises RequestError for an
        unknown name.
        """
        adapter = self.named(name)
        del self._named[name]
        return adapter

    def _free_slot(self, num_slots: int, before: LoadedAdapter | None) -> int | None:
        """Return a slot that may be written: an empty one, else that of `before`, which is replaced,
        where no request uses it.
        """
        used = set(self._in_use())
        named = {adapter.slot for adapter in self._named.values()}
        for slot in range(num_slots):
            if slot not in used | named:
                return slot
        if before is not None and before.slot not in used:
            return before.slot
        return None
