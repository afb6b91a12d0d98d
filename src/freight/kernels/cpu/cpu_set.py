"""CpuKernels: one loaded build of csrc/ as a KernelSet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels.cpu import (
    adapters,
    attention,
    elementwise,
    experts,
    linear,
    ranks,
    rowwise,
    states,
    store,
    tuning,
)
from freight.kernels.cpu.experts import CpuExperts
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.linear import CpuWeight
from freight.kernels.interface import method_on
from freight.operands.experts import ExpertLayers
from freight.operands.packed import PackedWeight, Rows, as_tensor
from freight.operands.weight import Weight, Weights
from freight.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class CpuKernels:
    """The compiled kernels. They ignore a `consumer`: products quantize their activations.

    int8_activations: as in `select_kernels`
    """

    library: Library
    note: str = ""
    ranks: Ranks = ALONE
    int8_activations: bool = False

    packs_mxfp4 = packs_groups = True
    sparse = None
    lookup = method_on("library", rowwise.lookup)
    packed_rows = method_on("library", linear.packed_rows)
    linear = method_on("library", linear.linear)
    add_rms_norm = method_on("library", elementwise.add_rms_norm)
    add_layer_norm = method_on("library", rowwise.add_layer_norm)
    activated = method_on("library", rowwise.activated)
    gated = method_on("library", elementwise.gated)
    gate = method_on("library", rowwise.gate)
    add_adapters = method_on("library", adapters.add_adapters)
    join = method_on("library", rowwise.join)
    route = method_on("library", experts.route)
    by_head = method_on("library", experts.by_head)
    rotate_store = method_on("library", store.rotate_store)
    attention = method_on("library", attention.attention)
    convolve = method_on("library", states.convolve)
    decays = method_on("library", states.decays)
    recurrence = method_on("library", states.recurrence)
    gated_norm = method_on("library", states.gated_norm)

    @property
    def multiplies_blocks(self) -> bool:
        return self.int8_activations

    @property
    def name(self) -> str:
        """Return the name with the build, such as 'cpu-avx2'."""
        return f"cpu-{self.library.build}"

    def gather(self, x: Tensor, first: bool = False) -> Tensor:
        """Compute `KernelSet.gather` in C, so that it can be recorded."""
        transport = self.ranks.transport
        return x if transport is None else ranks.gather(self.library, transport, x, first)

    def shared_linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, whole: bool = False
    ) -> Tensor:
        """Compute `KernelSet.shared_linear`; of many rows without copies of what ranks share."""
        rows = as_tensor(x)
        transport = self.ranks.transport
        if transport is None or len(rows) <= ranks.FEW:
            return self.gather(self.linear(rows if whole else self.gather(rows), weight, bias))
        return ranks.shared_linear(self.library, transport, rows, weight, bias, whole)

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layers: ExpertLayers,
        base: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Compute `KernelSet.experts`, of several ranks with the columns of all."""
        transport = self.ranks.transport
        return self.gather(
            experts.experts(self.library, x, ids, weights, layers, base, adapters, transport)
        )

    def pack(self, weight: Weight) -> CpuWeight:
        """Pack `weight`; the first large one measures how to prefetch weights (tuning.py)."""
        if self.int8_activations:
            weight = weight.with_int8_inputs()
        packed = linear.pack(self.library, weight)
        if packed.num_bytes >= tuning.LARGE:
            tuning.tune(self.library)
        return packed

    def pack_experts(self, weights: Weights, bias: Tensor | None = None) -> CpuExperts:
        """Pack one matrix of each expert; measures prefetching as `pack` does."""
        packed = experts.pack(self.library, weights, bias, self.int8_activations)
        if packed.num_bytes >= tuning.LARGE:
            tuning.tune(self.library)
        return packed
