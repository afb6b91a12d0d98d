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
from freight.quantizer.candidates import Candidate, fitting, named_in
from freight.quantizer.changed_source import ChangedSource
from freight.quantizer.gptq import Spread, by_activation, compensated, output_error, spread
from freight.quantizer.grid import Grid
from freight.quantizer.layer_inputs import ChannelStatistics, LayerInputs
from freight.quantizer.layer_record import GroupRecord, RoundingError
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import LayerModules
from freight.quantizer.plan import ActOrder, Method
from freight.quantizer.rounding import RoundedMatrix, Rounding, require_finite, stacked

FEW_TOKENS = 128  # with fewer, what GPTQ makes of an expert stands on little


def few_tokens(store: LayerStore, num_layers: int) -> dict[str, int]:
    """Return the inputs that fewer than `FEW_TOKENS` tokens reached, by name, with how many did."""
    few = {}
    for index in range(num_layers):
        for group in store.groups(index):
            if group.num_tokens < FEW_TOKENS:
                few[f"{group.modules[0]}: input"] = group.num_tokens
    return few


@dataclass
class LayerRounder:
    """Rounds the matrices of one layer after the other.

    source         of the unquantized weights
    shapes         of all tensors, by name
    left_out       modules that stay in 16 bits
    """

    method: Method
    rounding: Rounding
    source: WeightSource
    shapes: Mapping[str, Shape]
    left_out: frozenset[str]
    store: LayerStore
    device: str

    def inputs_of(self, index: int, modules: LayerModules) -> LayerInputs | None:
        """Return what has to see the inputs of layer `index`; None if it is done already."""
        if self.store.has(index):
            return None
        return LayerInputs(modules, self.left_out, self.device)

    def round(self, index: int, inputs: LayerInputs) -> None:
        """Round layer `index` by what its inputs were."""
        name = str(self.rounding.plan.weights)
        matrices: dict[str, RoundedMatrix] = {}
        groups = []
        for group, statistics in inputs.by_group.items():
            rounded, record = self.rounded(group, statistics, {name: self.rounding})
            matrices |= rounded[name]
            groups.append(record)
        self.store.add(index, matrices, groups)

    def changed(self) -> WeightSource:
        """Return the source in which layers that are done have the values of their rounded matrices."""
        return ChangedSource(self.source, self._values, self.device)

    def _values(self, name: str) -> Tensor | None:
        matrix = self.store.matrix(name.removesuffix(".weight"))
        if matrix is None:
            return None
        return self.rounding.grid(matrix).values(matrix.codes)

    def rounded(
        self,
        group: Sequence[str],
        statistics: ChannelStatistics,
        roundings: Mapping[str, Rounding],
    ) -> tuple[dict[str, dict[str, RoundedMatrix]], GroupRecord]:
        """Round the matrices of modules that share an input, by each of `roundings`. Return (those of
        each, by its name and module; what is known of the group). Raises CheckpointError for a matrix
        that has NaN or infinities.
        """
        modules = [module for module in group if module not in self.left_out]
        weights = []
        for module in modules:
            name = f"{module}.weight"
            weight = self.source.exact(name, self.shapes[name])
            require_finite(name, weight)
            weights.append(weight)
        matrices = {}
        errors = {}
        rounder = _GroupRounder(self.method, statistics, weights)
        for name, rounding in roundings.items():
            rounded, error = rounder.rounded(rounding)
            matrices[name] = dict(zip(modules, rounded, strict=True))
            if error is not None:
                errors[name] = error
        return matrices, GroupRecord(tuple(modules), statistics.num_rows, errors)


class _GroupRounder:
    """Rounds matrices that share an input. What that is like decides the order, and how errors are
    spread, for any numbers.
    """

    def __init__(
        self, method: Method, statistics: ChannelStatistics, weights: Sequence[Tensor]
    ) -> None:
        """weights: float32 [outputs, inputs] each."""
        self._weights = weights
        self._rows = [len(weight) for weight in weights]
        self._hessian = statistics.hessian
        self._seen = statistics.num_rows > 0
        self._grouped_by: Tensor | None = None
        self._spread: Spread | None = None
        if not self._seen or not method.gptq:
            return
        order = torch.arange(len(self._hessian), dtype=torch.int64, device=self._hessian.device)
        if method.act_order is not ActOrder.NONE:
            order = by_activation(self._hessian)
        if method.act_order is ActOrder.GROUP:
            self._grouped_by = order
        self._spread = spread(self._hessian, order, method.damping, statistics.name)

    def rounded(self, rounding: Rounding) -> tuple[list[RoundedMatrix], RoundingError | None]:
        """Return (each matrix rounded, what that takes of the outputs; None if no token was seen)."""
        weights = self._weights
        divisor = rounding.shared_divisor(weights)
        nearest = [rounding.nearest(weight, self._grouped_by, divisor) for weight in weights]
        if not self._seen:
            return nearest, None
        grids = [rounding.grid(matrix) for matrix in nearest]
        before = self._error(grids, nearest)
        if self._spread is None:
            return nearest, RoundingError(before, before)
        grid = stacked(grids, self._rows)
        adjusted = compensated(torch.cat(list(weights)), grid, self._spread).split(self._rows)
        matrices = []
        for part, own_grid, matrix in zip(adjusted, grids, nearest, strict=True):
            matrices.append(replace(matrix, codes=own_grid.codes(part)))
        return matrices, RoundingError(before, self._error(grids, matrices))

    def _error(self, grids: Sequence[Grid], matrices: Sequence[RoundedMatrix]) -> float:
        values = []
        for grid, matrix in zip(grids, matrices, strict=True):
            values.append(grid.values(matrix.codes))
        return output_error(torch.cat(list(self._weights)), torch.cat(values), self._hessian)


@dataclass
class CandidateRounder(LayerRounder):
    """Rounds each layer in every one of several numbers, from the same Hessians.

    The layers after it see it in 16 bits: what is measured of a candidate is the divergence of the
    model with it in this layer alone, whose inputs are those, and it does not depend on what is
    chosen for the layers before.
    """

    roundings: Mapping[str, Rounding] = field(default_factory=dict)

    def round(self, index: int, inputs: LayerInputs) -> None:
        modules = []
        for group in inputs.by_group:
            modules += [module for module in group if module not in self.left_out]
        offered = [Candidate(name, rounding.plan) for name, rounding in self.roundings.items()]
        roundings = {}
        for candidate in fitting(offered, self.shapes, modules):
            roundings[candidate.name] = self.roundings[candidate.name]
        matrices: dict[str, RoundedMatrix] = {}
        groups = []
        for group, statistics in inputs.by_group.items():
            rounded, record = self.rounded(group, statistics, roundings)
            for name, by_module in rounded.items():
                for module, matrix in by_module.items():
                    matrices[named_in(name, module)] = matrix
            groups.append(record)
        self.store.add(index, matrices, groups)

    def changed(self) -> WeightSource:
        return self.source
