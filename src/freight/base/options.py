"""Checks shared by all options: a known name, a known value. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from freight.errors import ConfigError, choices, nearest


def require_known(names: Iterable[str], known: Sequence[str], synonyms: dict[str, str]) -> None:
    """Raise ConfigError for the first of `names` that is not known; `synonyms` maps other tools'
    names to ours.
    """
    for name in names:
        if name not in known:
            hint = nearest(name, known, synonyms)
            raise ConfigError(f"unknown option {name!r}{hint}; known are {', '.join(known)}")


def listed_names(value: object, kinds: tuple[type, ...], wrong: ConfigError) -> tuple[str, ...]:
    """Return the names in a text, separated by commas or spaces, or in a list of items of `kinds`;
    each once.

    Raises `wrong` for anything else.
    """
    items = [value] if isinstance(value, kinds) else value
    if not isinstance(items, Iterable) or isinstance(items, bytes):
        raise wrong
    entries = list(items)
    if not all(isinstance(item, kinds) and not isinstance(item, bool) for item in entries):
        raise wrong
    return tuple(
        dict.fromkeys(name for item in entries for name in str(item).replace(",", " ").split())
    )


def choose(flag: str, value: object, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of `known`. Raises ConfigError, which names the flag and the
    nearest known value.
    """
    if value not in known:
        raise ConfigError(
            f"{flag} {value!r} is unknown{nearest(str(value), known)}: choose {choices(known)}"
        )
    return str(value)
