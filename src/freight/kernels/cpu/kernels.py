"""The CPU kernel set: compiled functions, and the reference's where there are none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from freight.kernels.cpu.attention import make_attention
from freight.kernels.cpu.elementwise import make_add_rms_norm, make_silu_mul
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.linear import make_linear, make_pack
from freight.kernels.cpu.store import make_rotate_store
from freight.kernels.kernel_set import REFERENCE, KernelSet


@cache
def cpu_kernels(library: Library) -> KernelSet:
    """The set of one loaded build, which its name contains: 'cpu-avx2'."""
    return replace(
        REFERENCE,
        name=f"cpu-{library.build}",
        pack=make_pack(library),
        linear=make_linear(library),
        add_rms_norm=make_add_rms_norm(library),
        silu_mul=make_silu_mul(library),
        rotate_store=make_rotate_store(library),
        attention=make_attention(library),
    )
