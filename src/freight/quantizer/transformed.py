"""A model's weights after a transform that leaves its results as they were: each tensor is made when
it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from freight.quantizer.folding import Folding, fold_tensor
from freight.quantizer.rotation import Rotation

Read = Callable[[str], Tensor]  # a tensor of the checkpoint by its name, in float32
PlacedScale = tuple[Folding, Tensor]  # a place, and float32 [inputs]


class Transformed(Protocol):
    """What the tensors of a model become."""

    def tensor(self, name: str, read: Read) -> Tensor | None:
        """Return the tensor `name` in float32; None if it stays as it is."""
        ...


@dataclass(frozen=True)
class Folded:
    """A model with scales moved between its tensors, by the name of each that changes."""

    scales: Mapping[str, Sequence[PlacedScale]]

    @staticmethod
    def of(places: Sequence[PlacedScale]) -> Folded:
        """Return the model with these scales."""
        scales: dict[str, list[PlacedScale]] = {}
        for folding, scale in places:
            for name in folding.tensors:
                scales.setdefault(name, []).append((folding, scale))
        return Folded(scales)

    def tensor(self, name: str, read: Read) -> Tensor | None:
        if name not in self.scales:
            return None
        values = read(name)
        for folding, scale in self.scales[name]:
            values = fold_tensor(folding, scale, name, values)
        return values


@dataclass(frozen=True)
class Rotated:
    """A model whose channels are rotated."""

    rotation: Rotation

    def tensor(self, name: str, read: Read) -> Tensor | None:
        change = self.rotation.changes.get(name)
        if change is None:
            return None
        norm = None if change.norm is None else read(change.norm.weight)
        return self.rotation.tensor(name, read(change.reads), norm)
