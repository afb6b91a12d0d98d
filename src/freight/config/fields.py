"""Values of a config.json, read with their types checked. Imports no torch.

Each raises a CheckpointError that names the key and its value. `default` is the value of an absent
key.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

from freight.errors import CheckpointError

JsonObject: TypeAlias = Mapping[str, Any]  # a JSON object, read-only

_LARGEST = 2**31 - 1  # larger than in any model, and still a valid length in Python and torch


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value of JSON is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of JSON is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def integer(config: JsonObject, key: str, default: int | None = None, least: int = 1) -> int:
    """Return an integer from `least` to 2**31 - 1. The key is required if `default` is None."""
    value = config.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json lacks {key}")
    if not is_integer(value) or not least <= value <= _LARGEST:
        raise CheckpointError(
            f"config.json: {key} = {value!r} must be an integer from {least} to {_LARGEST}"
        )
    return value


def number(
    config: JsonObject, key: str, default: float | None = None, least: float | None = None
) -> float:
    """Return a finite number > 0, or ≥ `least` if that is given."""
    value = default if config.get(key) is None else config[key]
    if is_number(value) and abs(value) <= sys.float_info.max:
        number = float(value)
        if number > 0 or (least is not None and number >= least):
            return number
    raise CheckpointError(
        f"config.json: {key} = {value!r} must be a finite number {'> 0' if least is None else f'≥ {least}'}"
    )


def flag(config: JsonObject, key: str, default: bool = False) -> bool:
    """Return true or false; an explicit null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} = {value!r} must be true or false")
    return value


def token_ids(config: JsonObject, key: str, default: int | None) -> tuple[int, ...]:
    """Return the ids of a value that is one id, a list of ids, or null."""
    value = config.get(key, default)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if not is_integer(token) or token < 0:
            raise CheckpointError(f"{key} = {value!r} must be a token id or a list of token ids")
    return tuple(ids)


def shortened(value: object, most: int = 40) -> str:
    """Return the repr of a value, cut to `most` characters, for a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
