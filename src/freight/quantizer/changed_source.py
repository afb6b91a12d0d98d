"""A source of a model's tensors in which some have other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.model.sources import WeightSource, in_halves
from freight.operands.weight import Weight

Change = Callable[[str], Tensor | None]  # a tensor's name -> its new values; None: it has its own


@dataclass(frozen=True)
class ChangedSource:
    """`WeightSource` of `inner`, with what `change` gives in the place of its tensors, on `device`."""

    inner: WeightSource
    change: Change
    device: str

    @property
    def compute_format(self) -> Format:
        return self.inner.compute_format

    def tensor(self, name: str, shape: Shape) -> Tensor:
        changed = self._changed(name)
        return self.inner.tensor(name, shape) if changed is None else changed

    def embedding(self, name: str, shape: Shape) -> Tensor | Weight:
        changed = self._changed(name)
        return self.inner.embedding(name, shape) if changed is None else changed

    def table(self, name: str, shape: Shape, format: Format) -> Tensor | Weight:
        return self.inner.table(name, shape, format)

    def exact(self, name: str, shape: Shape) -> Tensor:
        changed = self.change(name)
        if changed is None:
            return self.inner.exact(name, shape)
        return changed.to(device=self.device, dtype=torch.float32)

    def weight(self, name: str, shape: Shape) -> Weight:
        changed = self._changed(name)
        return self.inner.weight(name, shape) if changed is None else Weight(changed)

    def input_scale(self, name: str) -> float | None:
        return self.inner.input_scale(name)

    def experts(self, name: str, shape: Shape, pairs: bool) -> Iterator[Weight]:
        changed = self._changed(name)
        if changed is None:
            yield from self.inner.experts(name, shape, pairs)
            return
        for stored in changed:
            matrix = in_halves(stored.t(), 0) if pairs else stored.t()
            yield Weight(matrix.contiguous())

    def head(self, name: str, shape: Shape) -> Weight:
        changed = self._changed(name)
        return self.inner.head(name, shape) if changed is None else Weight(changed)

    def _changed(self, name: str) -> Tensor | None:
        """Return the new values in the compute dtype, on the device."""
        changed = self.change(name)
        if changed is None:
            return None
        dtype = torch_dtype(self.compute_format)
        return changed.to(device=self.device, dtype=dtype).contiguous()
