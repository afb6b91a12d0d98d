"""The options of the store below the cache: --kv-store, a folder, and its limits. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freight.errors import ConfigError

if TYPE_CHECKING:
    from freight.settings.engine import EngineArgs

SIZE = 20 << 30  # bytes, unless given
MEMORY = 2 << 30
_LEAST = 1 << 20


@dataclass(frozen=True)
class StoreConfig:
    """A store of prefixes in `folder`: at most `size` bytes there, and `memory` bytes of them in
    memory. `salted`: prefixes of requests with a `cache_salt` as well.
    """

    folder: Path
    size: int
    memory: int
    salted: bool


def store_config(
    args: EngineArgs, parse: Callable[[int | str | None, str, str], int | None]
) -> StoreConfig | None:
    """Return the store that `args` ask for; None for none. `parse` is `resolve.parse_memory`.

    Raises ConfigError for options that contradict each other.
    """
    if args.kv_store is None:
        for flag, value in (
            ("--kv-store-size", args.kv_store_size),
            ("--kv-store-memory", args.kv_store_memory),
            ("--kv-store-salted", args.kv_store_salted or None),
        ):
            if value is not None:
                raise ConfigError(
                    f"{flag} {value} is for a store; name its folder by --kv-store DIR"
                )
        return None
    if not isinstance(args.kv_store, str) or not args.kv_store.strip():
        raise ConfigError(f"--kv-store {args.kv_store!r} must be the name of a folder")
    if not isinstance(args.kv_store_salted, bool):
        raise ConfigError(f"kv_store_salted is {args.kv_store_salted!r}; it must be True or False")
    if not args.enable_prefix_caching:
        raise ConfigError(
            "--kv-store keeps prefixes, and --no-enable-prefix-caching finds none again; omit one of "
            "them"
        )
    size = parse(args.kv_store_size, "--kv-store-size", f"; omit it for {SIZE >> 30}GiB") or SIZE
    if size < _LEAST:
        raise ConfigError(
            f"--kv-store-size {args.kv_store_size} is less than a MiB; give 1MiB or more"
        )
    memory = 0
    if str(args.kv_store_memory) != "0":
        limit = parse(args.kv_store_memory, "--kv-store-memory", "; or give 0 for none")
        memory = limit or MEMORY
    return StoreConfig(Path(args.kv_store).expanduser(), size, memory, args.kv_store_salted)
