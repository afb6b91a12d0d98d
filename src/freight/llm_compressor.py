"""llm-compressor's interface under its public name; the code is in `adapters/llm_compressor.py`."""

from __future__ import annotations

from typing import Any

from freight.adapters.llm_compressor import (
    AWQModifier,
    GPTQModifier,
    OneshotModel,
    QuantizationArgs,
    QuantizationModifier,
    SmoothQuantModifier,
    SpinQuantModifier,
    oneshot,
)
from freight.quantizer.recipe import OTHER_MODIFIERS

__all__ = [
    "AWQModifier",
    "GPTQModifier",
    "OneshotModel",
    "QuantizationArgs",
    "QuantizationModifier",
    "SmoothQuantModifier",
    "SpinQuantModifier",
    "oneshot",
]


def __getattr__(name: str) -> Any:
    if name in OTHER_MODIFIERS:
        raise ImportError(f"freight.llm_compressor has no {name}; {OTHER_MODIFIERS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
