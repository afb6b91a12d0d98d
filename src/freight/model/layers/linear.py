"""Linear: a projection over its weight, final at construction.

Every projection is called with the adapters of the rows (`ForwardBatch.adapters`); those without a
bank ignore them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.operands.adapters import AdapterBank
from freight.operands.packed import PackedWeight, Rows, as_tensor


@dataclass(frozen=True)
class Linear:
    """The projection x @ weight.T + bias, [rows, in_features] to [rows, out_features].

    weight        the result of `kernels.pack`
    input_limit   x is clipped to this magnitude first, which bounds dynamic scales (fbgemm's
                  upper bound)
    """

    weight: PackedWeight
    bias: Tensor | None
    kernels: KernelSet
    input_limit: float | None = None

    @property
    def consumer(self) -> PackedWeight | None:
        """Return the `consumer` (`KernelSet`) for an operation that only this layer follows."""
        return self.weight if self.input_limit is None else None

    def __call__(self, x: Rows, adapters: Tensor | None = None) -> Tensor:
        """Return [rows, out_features]. x: a tensor, or an operation's result for `consumer`."""
        if self.input_limit is not None:
            x = as_tensor(x).clamp(-self.input_limit, self.input_limit)
        return self.kernels.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class UnmergedLinear:
    """Projections of one input that cannot be merged: their quantization differs."""

    parts: tuple[Linear, ...]

    consumer: ClassVar[None] = None  # several weights use the input

    def __call__(self, x: Rows, adapters: Tensor | None = None) -> Tensor:
        """Return the results of all parts, concatenated, [rows, sum of out_features]."""
        return self.parts[0].kernels.join([(part(as_tensor(x)), None) for part in self.parts])


@dataclass(frozen=True)
class AdaptedLinear:
    """A projection to whose results the adapters of the rows are added."""

    linear: Linear | UnmergedLinear
    bank: AdapterBank
    kernels: KernelSet

    consumer: ClassVar[None] = None  # adapters use the input as it is

    def __call__(self, x: Rows, adapters: Tensor | None = None) -> Tensor:
        """Return [rows, out_features]. adapters: [rows] int32, or None: no row has one."""
        y = self.linear(x)
        if adapters is None:
            return y
        return self.kernels.add_adapters(y, as_tensor(x), self.bank, adapters)


OwnLinear = Linear | UnmergedLinear | AdaptedLinear  # whose outputs are this rank's


@dataclass(frozen=True)
class GatheredLinear:
    """A projection whose inputs are on all ranks, each with some columns, as its outputs are.

    `linear` has this rank's rows of the matrix, over all inputs. So one rank sums an output, in the
    order of one rank alone, and inputs are quantized from whole rows.

    inputs   whether inputs have to be gathered; False: every rank has all of them
    """

    linear: OwnLinear
    kernels: KernelSet
    inputs: bool = True

    @property
    def consumer(self) -> PackedWeight | None:
        """Return the `consumer` of the inputs; None where columns of other ranks come between."""
        return None if self.inputs else self.linear.consumer

    def __call__(self, x: Rows, adapters: Tensor | None = None) -> Tensor:
        """Return all outputs, [rows, out_features]. x: [rows, in_features / ranks], this rank's
        inputs, or with `inputs` False all of them.
        """
        linear = self.linear
        takes_all = not self.inputs
        if isinstance(linear, Linear) and linear.input_limit is None:
            return self.kernels.shared_linear(x, linear.weight, linear.bias, takes_all)
        if not takes_all:
            x = self.kernels.gather(as_tensor(x))
        return self.kernels.gather(linear(x, adapters))


Projection = OwnLinear | GatheredLinear
