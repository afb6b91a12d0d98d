"""KernelSet: the operations a model is built from. `select_kernels` returns one, which is passed down as an argument.

On a GPU it is the Triton set, on a CPU the best build of the compiled set (csrc/) that the processor runs; where
neither is available, and on request, the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from freight.batch import ForwardBatch
from freight.fp8.values import KVPages, Weight
from freight.kernels import reference
from freight.kernels.rotary import Rotary

# x, delta or None, weight, eps, consumer -> x + delta, and its norm
AddNorm = Callable[[Tensor, Tensor | None, Tensor, float, Any], tuple[Tensor, Any]]
# gate_up, consumer -> silu(gate) * up
SiluMul = Callable[[Tensor, Any], Any]
# qkv, rotary, positions, slots, pages -> q
RotateStore = Callable[[Tensor, Rotary, Tensor, Tensor, KVPages], Tensor]
# q, pages, batch, softmax_scale, window, soft_cap -> a tensor of q's shape and dtype
Attend = Callable[[Tensor, KVPages, ForwardBatch, float, int | None, float | None], Tensor]


@dataclass(frozen=True)
class KernelSet:
    """Functions on tensors; `kernels.reference` defines what each computes.

    `pack` arranges a weight for this set, once, at load; `linear` takes what it returned. A `consumer` is the packed
    weight that alone consumes an operation's output, or None. With a consumer, a set may return the output in the form
    that its `linear` takes for that weight (quantized), instead of a tensor. `note` explains the choice in the log at
    start-up; it may be ''.
    """

    name: str
    pack: Callable[[Weight], Any]
    linear: Callable[[Any, Any, Tensor | None], Tensor]
    add_rms_norm: AddNorm
    silu_mul: SiluMul
    rotate_store: RotateStore
    attention: Attend
    note: str = ""


REFERENCE = KernelSet(
    "reference",
    pack=lambda weight: weight,
    linear=reference.linear,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    rotate_store=reference.rotate_store,
    attention=reference.attention,
)


_REFERENCE_FP8 = replace(REFERENCE, attention=partial(reference.attention, products=reference.Fp8Products.BOTH))


def select_kernels(name: str, device: str = "cpu", fp8_attention: bool = False) -> KernelSet:
    """The kernel set `name`: 'auto' or 'reference', the values of `--kernels`, or for measurements and tests
    'triton', 'cpu', or one build of the latter such as 'cpu-avx2'.

    'auto' is the best set for `device` ('cpu' or 'cuda'), and the reference if no other can run. Raises KernelError,
    with the reason, if the CPU set was requested by name and cannot run.
    `fp8_attention`: attention multiplies FP8 by FP8 over E4M3 pages; a set that cannot falls back to products of
    decoded values.
    """
    if name == "reference":
        return _REFERENCE_FP8 if fp8_attention else REFERENCE
    if name == "triton" or device != "cpu":
        if find_spec("triton") is None:
            return replace(REFERENCE, note="slow reference kernels: Triton is not installed (pip install triton)")
        from freight.kernels.triton.kernels import triton_kernels

        return triton_kernels(fp8_attention=fp8_attention)
    from freight.kernels.cpu import kernels, library

    if name == "auto" and not library.runnable():
        return replace(REFERENCE, note=f"slow reference kernels: {library.describe()}")
    _, _, build = name.partition("-")
    return kernels.cpu_kernels(library.load(build or None))
