"""Parts of a model on another device: layers are built on the first, and moved to that of their stage."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Part = TypeVar("Part")


class Mover:
    """Moves parts to `device`. A tensor that several parts share is moved once."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        # by identity; the tensor that was moved keeps its identity from being reused
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, part: Part) -> Part:
        """Return `part`, at any depth of tuples and dataclasses, with its tensors on the device; the
        same object where they all are there.
        """
        if isinstance(part, Tensor):
            return self._tensor(part)  # type: ignore[return-value]
        if isinstance(part, tuple):
            return self._tuple(part)  # type: ignore[return-value]
        if not is_dataclass(part) or isinstance(part, type):
            return part
        changed = {}
        for field in fields(part):
            before = getattr(part, field.name)
            after = self(before)
            if after is not before:
                changed[field.name] = after
        if not changed:
            return part
        return replace(part, **changed)

    def _tuple(self, parts: tuple[object, ...]) -> tuple[object, ...]:
        moved = [self(part) for part in parts]
        if all(after is before for after, before in zip(moved, parts, strict=True)):
            return parts
        if type(parts) is tuple:
            return tuple(moved)
        return type(parts)(*moved)  # type: ignore[arg-type]  # a NamedTuple

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.device == self._device:
            return tensor
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = tensor, tensor.to(self._device)
        return self._moved[id(tensor)][1]
