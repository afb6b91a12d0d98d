"""The tensors within a value, for the size of packed weights and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from torch import Tensor


def held_tensors(value: object) -> dict[int, int]:
    """Return {address: bytes} of the tensors in `value`, at any depth of tuples and dataclasses."""
    if isinstance(value, Tensor):
        return {value.data_ptr(): value.nbytes}
    parts: Sequence[object] = ()
    if isinstance(value, tuple):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in fields(value)]
    return {at: size for part in parts for at, size in held_tensors(part).items()}
