"""A declared kv_cache_scheme of compressed-tensors, and what vLLM says to it before it reads a
tensor. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

_SOURCE = "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py, validate_kv_cache_scheme"
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")


@dataclass(frozen=True)
class KVScheme:
    """The scheme's values as they are declared; None where it has no such key."""

    type: object = None
    num_bits: object = None
    strategy: object = None
    symmetric: object = None


def vllm_refusal(scheme: KVScheme, per_head: bool) -> str:
    """Why vLLM stops with an error at this scheme; '' if it does not. `per_head`: whether it knows
    attn_head.
    """
    if scheme.type != "float" or scheme.num_bits != 8:
        return _error(
            "NotImplementedError",
            f"num_bits {scheme.num_bits!r}, type {scheme.type!r}; it has 8 and 'float'",
        )
    accepted = ("tensor", "attn_head") if per_head else ("tensor",)
    if scheme.strategy not in _STRATEGIES and per_head:
        return _error(
            "ValueError", f"strategy {scheme.strategy!r} is none of compressed-tensors' strategies"
        )
    if scheme.strategy not in accepted:
        return _error(
            "NotImplementedError", f"strategy {scheme.strategy!r}; it has {' and '.join(accepted)}"
        )
    if not scheme.symmetric:
        return _error(
            "NotImplementedError",
            f"symmetric {scheme.symmetric!r}; it has true alone, and absent is not true",
        )
    return ""


def _error(kind: str, what: str) -> str:
    return f"kv_cache_scheme: {kind} for {what} ({_SOURCE})"
