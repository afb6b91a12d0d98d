"""Selection of the kernel set: Triton on a GPU, the best compiled build (csrc/) on a CPU.

The reference runs where neither is available, and on request.
"""

from __future__ import annotations

from importlib.util import find_spec

from freight.kernels.interface import KernelSet
from freight.kernels.reference import Fp8Products
from freight.kernels.reference_set import ReferenceKernels
from freight.parallel.ranks import ALONE, Ranks
from freight.settings import cpu_builds


def select_kernels(
    name: str,
    device: str = "cpu",
    fp8_attention: bool = False,
    ranks: Ranks = ALONE,
    int8_activations: bool = False,
    exact_products: bool = False,
) -> KernelSet:
    """Return the kernel set `name`, a value of `--kernels`: 'auto', 'reference' or 'cpu-avx2', which
    is one build of the compiled kernels.

    For measurements and tests also 'triton', and 'cpu': 'auto' without the reference in its place.
    'auto' is the best set for `device` ('cpu' or 'cuda'), and the reference if no other can run.
    `fp8_attention`: attention multiplies FP8 by FP8 over E4M3 pages; a set that cannot falls back
    to products of decoded values. `ranks`: those over which the set gathers. `int8_activations`:
    products with weights in 4 bits round their inputs to INT8 (`Activations.GROUPS`), on a CPU.
    `exact_products`: on a GPU no product is torch's, whose bits depend on the number of ranks.
    Raises KernelError, with the reason, if the CPU set was requested by name and cannot run, and as
    `check_gpu`.
    """
    products = Fp8Products.BOTH if fp8_attention else Fp8Products.NONE
    if name == "reference":
        return ReferenceKernels(products, ranks=ranks, int8_activations=int8_activations)
    if name == "triton" or device != "cpu":
        if find_spec("triton") is None:
            note = "slow reference kernels: Triton is not installed (pip install triton)"
            return ReferenceKernels(note=note, ranks=ranks)
        from freight.kernels.triton.formats import check_gpu, current_target
        from freight.kernels.triton.triton_set import TritonKernels

        target = current_target()
        if device != "cpu":
            check_gpu(target)
        return TritonKernels(target, fp8_attention, ranks=ranks, exact_products=exact_products)
    from freight.kernels.cpu import library
    from freight.kernels.cpu.cpu_set import CpuKernels

    if name == "auto" and not cpu_builds.runnable() and not cpu_builds.named_build():
        note = f"slow reference kernels: {cpu_builds.describe()}"
        return ReferenceKernels(note=note, ranks=ranks, int8_activations=int8_activations)
    loaded = library.load(cpu_builds.build_in(name) or None)
    return CpuKernels(loaded, ranks=ranks, int8_activations=int8_activations)
