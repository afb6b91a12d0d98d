"""Activations of a feed-forward, with a gate and without. Imports no torch."""

from __future__ import annotations

from enum import StrEnum


class GatedActivation(StrEnum):
    """activation(gate) * up (Shazeer 2020, "GLU variants improve transformer")."""

    SILU = "silu"  # g / (1 + e^-g): SwiGLU
    GELU_TANH = "gelu_tanh"  # g/2 (1 + tanh(√(2/π) (g + 0.044715 g³))) (Hendrycks and Gimpel 2016): GeGLU


class Activation(StrEnum):
    """activation(x), in a feed-forward without a gate."""

    RELU = "relu"  # max(x, 0)
