"""The tensors within a value, for the size of packed weights and layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

from torch import Tensor
from torch.nn import Module


def held_tensors(value: object) -> dict[int, int]:
    """Return {address: bytes} of the tensors in `value`, at any depth of tuples and dataclasses. One
    that is a part of another is not listed.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors_in(value):
        at = tensor.data_ptr()
        sizes[at] = max(tensor.nbytes, sizes.get(at, 0))
    whole: dict[int, int] = {}
    end = 0
    for at in sorted(sizes):
        if at + sizes[at] > end or not sizes[at]:
            whole[at] = sizes[at]
            end = max(end, at + sizes[at])
    return whole


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in `value`, at any depth of tuples, dataclasses and modules."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Module):
        yield from value.parameters()
        yield from value.buffers()
        return
    parts: Sequence[object] = ()
    if isinstance(value, tuple):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in fields(value)]
    for part in parts:
        yield from tensors_in(part)
