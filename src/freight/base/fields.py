"""Values of a config.json, read with their types checked. Imports no torch.

Each raises a CheckpointError that names the key and its value. `default` is the value of an absent
key.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

from freight.errors import CheckpointError, shown

JsonObject: TypeAlias = Mapping[str, Any]  # a JSON object, read-only
JsonDict: TypeAlias = dict[str, Any]  # a JSON object, as it is read or built

_LARGEST = 2**31 - 1  # larger than in any model, and still a valid length in Python and torch
# A damaged or hostile number would take all memory, one layer, expert or key after the other
MOST_PARTS = 10_000  # layers, experts, labels
MOST_KEYS = 10_000  # of config.json, or of an object in it that describes a part of the model
MOST_IDS = 1_000  # tokens that end a completion
_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_labels",
)


def check_counts(config: JsonObject) -> None:
    """Raise CheckpointError for a config.json with more keys than MOST_KEYS, or for a count above
    MOST_PARTS: whatever reads it makes an entry for each.
    """
    _check_part("", config)
    for key, part in config.items():
        if isinstance(part, Mapping) and key.endswith("_config") and key != "quantization_config":
            _check_part(f"{key}: ", part)


def _check_part(where: str, part: JsonObject) -> None:
    if len(part) > MOST_KEYS:
        raise CheckpointError(
            f"config.json: {where}{len(part):,} keys; at most {MOST_KEYS:,} are read"
        )
    for key in _COUNTS:
        count = part.get(key)
        if is_number(count) and count > MOST_PARTS:
            raise CheckpointError(
                f"config.json: {where}{key} = {shown(count)} must be at most {MOST_PARTS}"
            )


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
            f"config.json: {key} = {shortened(value, 80)} must be an integer from {least} to {_LARGEST}"
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
        f"config.json: {key} = {shortened(value, 80)} must be a finite number "
        f"{'> 0' if least is None else f'≥ {least}'}"
    )


def flag(config: JsonObject, key: str, default: bool = False) -> bool:
    """Return true or false; an explicit null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} = {shortened(value, 80)} must be true or false")
    return value


def token_ids(config: JsonObject, key: str, default: int | None) -> tuple[int, ...]:
    """Return the ids of a value that is one id, a list of ids, or null."""
    value = config.get(key, default)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MOST_IDS:
        raise CheckpointError(f"{key} has {len(ids):,} token ids; at most {MOST_IDS:,} are read")
    for token in ids:
        if not is_integer(token) or token < 0:
            raise CheckpointError(
                f"{key} = {shortened(value, 80)} must be a token id or a list of token ids"
            )
    return tuple(ids)


def shortened(value: object, most: int = 40) -> str:
    """Return the repr of a value, cut to `most` characters, for a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
