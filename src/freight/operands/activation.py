"""Activations of a feed-forward, with a gate and without, and functions of gates. Imports no torch."""

from __future__ import annotations

from enum import StrEnum


class GatedActivation(StrEnum):
    """activation(gate) * up (Shazeer 2020, "GLU variants improve transformer")."""

    SILU = "silu"  # g / (1 + e^-g): SwiGLU
    # g / (1 + e^(-1.702 g)) * (u + 1), with g = min(gate, 7) and u = up bounded to [-7, 7] (gpt-oss, arXiv 2508.10925)
    CLAMPED_SWIGLU = "clamped_swiglu"
    GELU_TANH = "gelu_tanh"  # g/2 (1 + tanh(√(2/π) (g + 0.044715 g³))) (Hendrycks and Gimpel 2016): GeGLU


class Activation(StrEnum):
    """activation(x), in a feed-forward without a gate."""

    RELU = "relu"  # max(x, 0)
    RELU_SQUARED = "relu_squared"  # max(x, 0)² (So et al. 2021, "Primer")


class GateFunction(StrEnum):
    """What makes a factor of the number that a gate projects to."""

    SOFTPLUS = "softplus"  # ln(1 + e^x)
    SIGMOID = "sigmoid"  # 1 / (1 + e^-x)
    IDENTITY = "identity"  # x
