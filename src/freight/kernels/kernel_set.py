"""KernelSet: the operations a model is built from. One is chosen once, at load, and handed down as an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from freight.batch import ForwardBatch
from freight.fp8.values import KVPages, Weight
from freight.kernels import reference


@dataclass(frozen=True)
class KernelSet:
    """Functions on tensors; `kernels.reference` defines what each computes."""

    name: str
    linear: Callable[[Tensor, Weight, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, KVPages], None]
    attention: Callable[[Tensor, KVPages, ForwardBatch, float, int | None], Tensor]


REFERENCE = KernelSet(
    "reference",
    linear=reference.linear,
    rms_norm=reference.rms_norm,
    silu_mul=reference.silu_mul,
    rotate=reference.rotate,
    store_kv=reference.store_kv,
    attention=reference.attention,
)


def select_kernels(name: str) -> KernelSet:
    """The kernel set for `--kernels` auto or reference: both are the reference set until a faster one exists."""
    assert name in ("auto", "reference")
    return REFERENCE
