"""KernelSet: the operations a model is built from. One is chosen once, at load, and handed down as an argument.

On a GPU that is the Triton set, on a CPU the compiled set (csrc/), in the best build that the processor runs; where
neither is there, and on request, the reference.
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
# q, pages, batch, softmax_scale, window, soft_cap -> as q
Attend = Callable[[Tensor, KVPages, ForwardBatch, float, int | None, float | None], Tensor]


@dataclass(frozen=True)
class KernelSet:
    """Functions on tensors; `kernels.reference` defines what each computes.

    `pack` arranges a weight for this set, once, at load; `linear` takes what it returned. A `consumer` is such a weight,
    the only one that the result goes to, or None: a set may then return it as its `linear` wants it for that weight,
    instead of a tensor. `note` is what start-up should say about the choice, or ''.
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
    """The kernel set for `--kernels`: auto, reference, triton, cpu, or one build of it, as in cpu-avx2.

    `auto` takes the best there is for `device` ('cpu' or 'cuda'), and the reference where there is nothing else. Raises
    KernelError when the CPU set was asked for by name and cannot run, with the reason.
    `fp8_attention`: attention multiplies FP8 by FP8 over E4M3 pages; a set that cannot computes as ever.
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
