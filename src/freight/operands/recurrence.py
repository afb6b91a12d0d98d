"""The parameters of a layer's operations with a state, made once, when the layer is built.

`KernelSet` defines the operations: `convolve`, `decays`, `recurrence` and `gated_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from torch import Tensor


@dataclass(frozen=True)
class Convolution:
    """A causal convolution of each channel.

    weight   [channels, width] in the dtype of the rows, width 2 to 8
    bias     [channels] in the dtype of the rows, or None
    silu     whether SiLU is applied to the result
    """

    weight: Tensor
    bias: Tensor | None
    silu: bool


@dataclass(frozen=True)
class DecayParameters:
    """What turns the projections of a row into its decays.

    a_log     [heads] float32: logarithm of each head's rate
    dt_bias   [heads] float32, added to the projection; with a decay of each key channel [heads *
              k_dim]
    limits    lower and upper bound of dt
    bound     lower bound of log decays, a negative number; None: unbounded
    """

    a_log: Tensor
    dt_bias: Tensor
    limits: tuple[float, float] = (0.0, inf)
    bound: float | None = None


@dataclass(frozen=True)
class RecurrenceRule:
    """How the state of a head takes a row in, and what is read from it.

    delta   whether the update replaces the value stored for the key (the delta rule)
    norm    whether each head of q and k is divided by its Euclidean length
    skip    [heads] float32: multiplies v, which is added to the result; None: v is not added
    """

    delta: bool
    norm: bool
    skip: Tensor | None = None


@dataclass(frozen=True)
class GatedNorm:
    """RMSNorm of groups of columns, and a factor from a gate.

    weight       [columns], or [group] for all groups, in the dtype of the rows or float32
    group        columns that are normed together
    norm_first   whether the norm comes before the factor
    """

    weight: Tensor
    eps: float
    group: int
    norm_first: bool
