"""Quantizing a model layer by layer: each is rounded by what its inputs were behind the layers before
it, as these were rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from freight.checkpoint.headers import Shape
from freight.model.sources import WeightSource
from freight.quantizer.changed_source import ChangedSource
from freight.quantizer.gptq import by_activation, compensated, spread
from freight.quantizer.layer_inputs import ChannelStatistics, LayerInputs
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import LayerModules
from freight.quantizer.plan import ActOrder, Method
from freight.quantizer.rounding import RoundedMatrix, Rounding, stacked

FEW_TOKENS = 128  # with fewer, what GPTQ makes of an expert stands on little


@dataclass
class LayerRounder:
    """Rounds the matrices of one layer after the other.

    source         of the unquantized weights
    shapes         of all tensors, by name
    left_out       modules that stay in 16 bits
    few            of experts that fewer than `FEW_TOKENS` tokens reached, how many did
    """

    method: Method
    rounding: Rounding
    source: WeightSource
    shapes: Mapping[str, Shape]
    left_out: frozenset[str]
    store: LayerStore
    device: str
    few: dict[str, int] = field(default_factory=dict)

    def inputs_of(self, index: int, modules: LayerModules) -> LayerInputs | None:
        """Return what has to see the inputs of layer `index`; None if it is done already."""
        if self.store.has(index):
            return None
        return LayerInputs(modules, self.left_out, self.device)

    def round(self, index: int, inputs: LayerInputs) -> None:
        """Round layer `index` by what its inputs were."""
        matrices: dict[str, RoundedMatrix] = {}
        for group, statistics in inputs.by_group.items():
            matrices |= self.rounded(group, statistics)
        self.store.add(index, matrices)

    def changed(self) -> WeightSource:
        """Return the source in which layers that are done have the values of their rounded matrices."""
        return ChangedSource(self.source, self._values, self.device)

    def _values(self, name: str) -> Tensor | None:
        matrix = self.store.matrix(name.removesuffix(".weight"))
        if matrix is None:
            return None
        return self.rounding.grid(matrix).values(matrix.codes)

    def rounded(
        self, group: Sequence[str], statistics: ChannelStatistics
    ) -> dict[str, RoundedMatrix]:
        """Round the matrices of modules that share an input."""
        modules = [module for module in group if module not in self.left_out]
        weights = []
        for module in modules:
            name = f"{module}.weight"
            weights.append(self.source.exact(name, self.shapes[name]))
        if statistics.num_rows < FEW_TOKENS:
            self.few[statistics.name] = statistics.num_rows
        divisor = self.rounding.shared_divisor(weights)
        if not statistics.num_rows:
            return {
                module: self.rounding.nearest(weight, divisor=divisor)
                for module, weight in zip(modules, weights, strict=True)
            }
        hessian = statistics.hessian
        order = torch.arange(len(hessian), dtype=torch.int64, device=hessian.device)
        if self.method.act_order is not ActOrder.NONE:
            order = by_activation(hessian)
        grouped_by = order if self.method.act_order is ActOrder.GROUP else None
        nearest = [self.rounding.nearest(weight, grouped_by, divisor) for weight in weights]
        grids = [self.rounding.grid(matrix) for matrix in nearest]
        rows = [len(weight) for weight in weights]
        factor = spread(hessian, order, self.method.damping, statistics.name)
        adjusted = compensated(torch.cat(weights), stacked(grids, rows), factor).split(rows)
        matrices = {}
        for module, part, grid, matrix in zip(modules, adjusted, grids, nearest, strict=True):
            matrices[module] = replace(matrix, codes=grid.codes(part))
        return matrices
