"""A model of a server that has several, as its options declare it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from freight.serve.settings import ServerSettings
from freight.settings.engine import EngineArgs
from freight.settings.lora import listed_adapters, named_adapters


@dataclass(frozen=True)
class DeclaredModel:
    """A model, its engine's options, and those of the server that are a model's own.

    name        what clients call it; `also` are further names
    is_default  it answers requests that name no model
    """

    name: str
    args: EngineArgs
    also: tuple[str, ...] = ()
    is_default: bool = False
    chat_template: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names, and those of the adapters of --lora-modules."""
        adapters = named_adapters(listed_adapters(self.args.lora_modules))
        return (*self.names, *(adapter.name for adapter in adapters))

    def settings(self, server: ServerSettings) -> ServerSettings:
        """Return the settings of its `Serving`, where `server` are those of all.

        An engine that ends is started by the next request, and not by `Supervisor`.
        """
        return replace(
            server,
            names=self.names,
            restart_engine=False,
            chat_template=self.chat_template,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
        )


@dataclass(frozen=True)
class ModelLimits:
    """What all loaded models may have together.

    memory  bytes of weights and caches; None: a share of what is free at start
    most    models that are loaded at once
    turn    seconds that a busy model keeps its place while another waits for it
    """

    memory: int | None = None
    most: int = 4
    turn: float = 30.0
