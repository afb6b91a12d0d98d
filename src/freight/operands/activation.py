"""Activations of a feed-forward, with and without a gate, and functions of other gates. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class GatedFunction(StrEnum):
    """A function of g and u, the gate and up projections: for most, activation(g) * u (Shazeer
    2020, "GLU variants improve transformer").
    """

    SILU = "silu"  # SwiGLU: g / (1 + e^-g) * u
    # g' / (1 + e^(-1.702 g')) * (u' + 1), with g' = min(g, 7) and u' = u bounded to [-7, 7]
    # (gpt-oss, arXiv 2508.10925)
    CLAMPED_SWIGLU = "clamped_swiglu"
    # GeGLU: g/2 (1 + tanh(√(2/π) (g + 0.044715 g³))) * u (Hendrycks and Gimpel 2016)
    GELU_TANH = "gelu_tanh"
    # min(g / (1 + e^-g), limit) * u', with u' = u bounded to [-limit, limit] (Step-3.7)
    CLAMPED_SILU = "clamped_silu"
    GEGLU = "geglu"  # as GELU_TANH, exact: g/2 (1 + erf(g / √2)) * u (Hendrycks and Gimpel 2016)


@dataclass(frozen=True)
class GatedActivation:
    """A `GatedFunction` with its parameter.

    limit   bound of CLAMPED_SILU, > 0; 0.0 for the others
    """

    function: GatedFunction
    limit: float = 0.0

    # Those without a limit, assigned below the class.
    SILU: ClassVar[GatedActivation]
    CLAMPED_SWIGLU: ClassVar[GatedActivation]
    GELU_TANH: ClassVar[GatedActivation]
    GEGLU: ClassVar[GatedActivation]

    def __post_init__(self) -> None:
        assert (self.limit > 0) == (self.function is GatedFunction.CLAMPED_SILU), (
            "CLAMPED_SILU needs a limit > 0, and no other function has one"
        )

    def __str__(self) -> str:
        return str(self.function)


GatedActivation.SILU = GatedActivation(GatedFunction.SILU)
GatedActivation.CLAMPED_SWIGLU = GatedActivation(GatedFunction.CLAMPED_SWIGLU)
GatedActivation.GELU_TANH = GatedActivation(GatedFunction.GELU_TANH)
GatedActivation.GEGLU = GatedActivation(GatedFunction.GEGLU)


def clamped_silu(limit: float) -> GatedActivation:
    """Return `GatedFunction.CLAMPED_SILU` with this limit, > 0."""
    return GatedActivation(GatedFunction.CLAMPED_SILU, limit)


class Activation(StrEnum):
    """The activation of a feed-forward without a gate, a function of x, the up projection."""

    RELU = "relu"  # max(x, 0)
    RELU_SQUARED = "relu_squared"  # max(x, 0)² (So et al. 2021, "Primer")
    GELU = "gelu"  # x/2 (1 + erf(x / √2)) (Hendrycks and Gimpel 2016)


AnyActivation = GatedActivation | Activation


class GateFunction(StrEnum):
    """A function from x, the projection of a gate, to the factor that the gate multiplies by."""

    SOFTPLUS = "softplus"  # ln(1 + e^x)
    SIGMOID = "sigmoid"  # 1 / (1 + e^-x)
    IDENTITY = "identity"  # x
