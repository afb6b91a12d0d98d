"""The options of adapters: --enable-lora and its like, under vLLM's names. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freight.errors import ConfigError, shown

if TYPE_CHECKING:
    from freight.settings.engine import EngineArgs

DEFAULT_RANK = 16
MOST_SLOTS = 1024
MOST_RANK = 512  # as in vLLM
_LONGEST_NAME = 256  # characters


@dataclass(frozen=True)
class LoraConfig:
    """Memory for adapters: `num_slots` of them at a time, each of a rank up to `max_rank`."""

    num_slots: int
    max_rank: int


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that is loaded when an engine starts. path: a folder or a hub id."""

    name: str
    path: str


def lora_config(args: EngineArgs) -> LoraConfig | None:
    """Return the memory that `args` ask for; None: the engine takes no adapters.

    Raises ConfigError for options that contradict each other.
    """
    if not isinstance(args.enable_lora, bool):
        raise ConfigError(f"enable_lora is {args.enable_lora!r}; it must be True or False")
    modules = named_adapters(args.lora_modules)
    if not args.enable_lora:
        for flag, value in (
            ("--max-loras", args.max_loras),
            ("--lora-modules", " ".join(args.lora_modules) or None),
            ("--max-lora-rank", args.max_lora_rank),
        ):
            if value is not None:
                raise ConfigError(f"{flag} {value} is for adapters; add --enable-lora")
        return None
    slots = args.max_loras
    if slots is None:
        slots = max(1, len(modules))
    lora = _memory(slots, args.max_lora_rank)
    if len(modules) > slots:
        raise ConfigError(
            f"--lora-modules names {len(modules)} adapters, and --max-loras {slots} has room for {slots}: raise it"
        )
    return lora


def planned_lora(slots: int | None, rank: int | None) -> LoraConfig | None:
    """Return the memory that `freight plan` counts; None: no adapters. Raises ConfigError."""
    if slots is None and rank is None:
        return None
    return _memory(1 if slots is None else slots, rank)


def _memory(slots: int, rank: int | None) -> LoraConfig:
    if rank is None:
        rank = DEFAULT_RANK
    for flag, number, most in (
        ("--max-loras", slots, MOST_SLOTS),
        ("--max-lora-rank", rank, MOST_RANK),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
            raise ConfigError(f"{flag} {number!r} must be an integer from 1 to {most}")
    return LoraConfig(slots, rank)


def listed_adapters(value: object) -> tuple[str, ...]:
    """Return the texts of --lora-modules: one, or a list. Raises ConfigError for anything else."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"lora_modules is {value!r}; give texts, as in ['sql=./sql-adapter']")
    return tuple(texts)


def named_adapters(modules: Sequence[str]) -> list[NamedAdapter]:
    """Return the adapters of --lora-modules, each 'name=path' or vLLM's JSON. Raises ConfigError."""
    adapters: list[NamedAdapter] = []
    for text in modules:
        adapter = _named(text)
        check_adapter_name(adapter.name)
        if any(adapter.name == other.name for other in adapters):
            raise ConfigError(f"--lora-modules has two adapters called {shown(adapter.name)}")
        adapters.append(adapter)
    return adapters


def check_adapter_name(name: str) -> None:
    """Raise ConfigError for a name that logs and metrics cannot show."""
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise ConfigError(
            f"an adapter is called {shown(name)}; a name has 1 to {_LONGEST_NAME} characters, which can be printed"
        )


def _named(text: str) -> NamedAdapter:
    wrong = ConfigError(
        f'--lora-modules {shown(text)}: give name=path, or {{"name": "NAME", "path": "PATH"}}'
    )
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if not (equals and name.strip() and path.strip()):
            raise wrong
        return NamedAdapter(name.strip(), path.strip())
    try:
        read = json.loads(text)
    except ValueError:
        raise wrong from None
    name = read.get("name")
    path = read.get("path")
    unknown = read.keys() - {"name", "path", "base_model_name"}
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path or unknown:
        raise wrong
    return NamedAdapter(name, path)
