"""--kv-cache-dtype-skip-layers: the layers whose KV cache stays unquantized while others
have 8 bits. Imports no torch.

A layer that reads another's keys and values stores none: it follows the layer that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

from freight.base.options import listed_names
from freight.errors import ConfigError, nearest, shown
from freight.fp8.formats import COMPUTE_FORMATS

FLAG = "--kv-cache-dtype-skip-layers"
SLIDING = "sliding_window"  # selects every layer with a window
_WAY_OUT = f"give layer numbers, as in 0,2, or {SLIDING} for the layers with a window"


class KVLayer(Protocol):
    """A layer as skipping reads it: its window, and the layer whose keys and values it reads
    instead of storing any.
    """

    @property
    def window(self) -> int | None: ...

    @property
    def kv_from(self) -> int | None: ...


@dataclass(frozen=True)
class StoredLayer:
    """A KVLayer without further properties."""

    window: int | None
    kv_from: int | None = None


def layer_names(value: object) -> tuple[str, ...]:
    """Return the names in a text, separated by commas or spaces, in a number, or in a list of
    these; each once. Raises ConfigError for anything else.
    """
    wrong = ConfigError(
        f"kv_cache_dtype_skip_layers is {shown(value)}; give [0, 2] or ['{SLIDING}']"
    )
    return listed_names(value, (str, Integral), wrong)


def check_skipped(skipped: Sequence[object], kv_cache_dtype: str) -> None:
    """Check the names without the model. Raises ConfigError for a name that is neither a number nor
    a known word, and for a cache in which no layer is quantized.
    """
    names = tuple(map(str, skipped))
    for name in names:
        if (name.isascii() and name.isdecimal()) or name == SLIDING:
            continue
        if name.startswith("-") and name[1:].isdecimal():
            raise ConfigError(
                f"{FLAG} {shown(name)}: layers count from 0, starting with the first; {_WAY_OUT}"
            )
        raise ConfigError(
            f"{FLAG} {shown(name)} is unknown{nearest(name[:80], [SLIDING])}: {_WAY_OUT}"
        )
    if names and kv_cache_dtype in map(str, COMPUTE_FORMATS):
        raise unquantized(names, f"--kv-cache-dtype {kv_cache_dtype}")


def unquantized(names: Sequence[object], cache: str) -> ConfigError:
    """Build the error for skipping layers of a cache that has no quantized one."""
    return ConfigError(
        f"{_given(names)} with {cache}: none of its layers is quantized; use --kv-cache-dtype fp8, or omit the layers"
    )


def skipped_layers(
    skipped: Sequence[object], layers: Mapping[int, KVLayer], num_layers: int
) -> frozenset[int]:
    """Return the indices of the layers that the names of `given` select, and of the layers that
    read theirs. `check_skipped` has accepted the names.

    `layers` are those of `num_layers` that read keys and values, by index. Raises ConfigError for a
    number beyond the layers, a layer that stores nothing unless the layer it reads is skipped as
    well, `sliding_window` where no layer has a window, and for all layers.
    """
    names = tuple(map(str, skipped))
    numbers = {name: _number(name, num_layers) for name in names if name != SLIDING}
    for name, index in numbers.items():
        if index not in layers:
            choices_text = ", ".join(map(str, list(layers)[:8])) or "none: omit it"
            if len(layers) > 8:
                choices_text += ", …"
            raise ConfigError(
                f"{FLAG} {name}: layer {index} has no attention, and stores no keys and values; choose "
                f"among {choices_text}"
            )
    stored = set(numbers.values())
    if SLIDING in names:
        windows = set()
        for index, layer in layers.items():
            if layer.window is not None and layer.kv_from is None:
                windows.add(index)
        if not windows:
            raise ConfigError(
                f"{FLAG} {SLIDING}: no layer of this model has a window; give layer numbers, or omit it"
            )
        stored |= windows
    indexes = _with_readers(stored, layers)
    for name, index in numbers.items():
        if index not in indexes:
            source = layers[index].kv_from
            raise ConfigError(
                f"{FLAG} {name}: layer {index} reads the keys and values of layer {source} and stores none; skip layer "
                f"{source}, which layer {index} follows"
            )
    if names and len(indexes) == len(layers):
        raise nothing_left(names)
    return frozenset(indexes)


def _with_readers(stored: Set[int], layers: Mapping[int, KVLayer]) -> set[int]:
    """Return the layers of `stored` that store keys and values, and those that read them."""
    indexes = set()
    for index, layer in layers.items():
        source = layer.kv_from
        if source is None:
            source = index
        if source in stored:
            indexes.add(index)
    return indexes


def nothing_left(names: Sequence[object]) -> ConfigError:
    """Build the error for skipping every layer that would be quantized."""
    return ConfigError(
        f"{_given(names)}: no layer with an 8-bit cache is left; use a 16-bit cache, --kv-cache-dtype bfloat16 or "
        "float16, or skip fewer layers"
    )


def _number(name: str, num_layers: int) -> int:
    digits = name.lstrip("0") or "0"
    if len(digits) > 9 or int(digits) >= num_layers:
        raise ConfigError(
            f"{FLAG} {shown(name)}: this model has {num_layers} layers, 0 to {num_layers - 1}"
        )
    return int(digits)


def _given(names: Sequence[object]) -> str:
    text = ",".join(map(str, names[:8]))
    if len(names) > 8:
        text += ",…"
    return f"{FLAG} {text}"
