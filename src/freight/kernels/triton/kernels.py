"""The Triton kernel set: FP8 and 16-bit models on NVIDIA and AMD GPUs.

A kernel is compiled when it is first launched, once for each combination of types, compile-time constants and known
divisors of its arguments. Arguments that change from step to step are therefore marked `do_not_specialize`.
"""

from __future__ import annotations

from functools import cache, partial

from freight.kernels.kernel_set import KernelSet
from freight.kernels.triton import elementwise, linear, paged, store
from freight.kernels.triton.formats import Target, current_target


@cache
def triton_kernels(target: Target | None = None, fp8_attention: bool = False) -> KernelSet:
    """The set for `target`, the GPU that torch uses now if that is None; `fp8_attention` as in `select_kernels`."""
    target = target or current_target()
    return KernelSet(
        "triton",
        pack=lambda weight: weight,
        linear=partial(linear.linear, target),
        add_rms_norm=partial(elementwise.add_rms_norm, target),
        silu_mul=partial(elementwise.silu_mul, target),
        rotate_store=partial(store.rotate_store, target),
        attention=partial(paged.attention, target, fp8=fp8_attention),
    )
