"""TritonKernels: FP8 and 16-bit models on NVIDIA and AMD GPUs.

A kernel is compiled at its first launch, once for each combination of types, compile-time constants
and known divisors of its arguments. Arguments that change from step to step are therefore marked
`do_not_specialize`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels import reference_rows
from freight.kernels.interface import method_on
from freight.kernels.triton import (
    adapters,
    convolution,
    elementwise,
    experts,
    gates,
    linear,
    paged,
    recurrence,
    route,
    store,
)
from freight.kernels.triton.formats import Target
from freight.kernels.triton.rows import Quantized
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.experts import ExpertLayers
from freight.operands.kv_pages import KVPages
from freight.operands.packed import PackedWeight, Rows, as_tensor
from freight.operands.weight import Weight
from freight.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class TritonKernels:
    """The kernels for `target`; `fp8_attention` and `exact_products` as in `select_kernels`."""

    target: Target
    fp8_attention: bool = False
    note: str = ""
    ranks: Ranks = ALONE
    exact_products: bool = False

    name = "triton"
    packs_mxfp4 = packs_groups = multiplies_blocks = False
    sparse = None
    lookup = staticmethod(reference_rows.lookup)
    packed_rows = staticmethod(reference_rows.packed_rows)
    add_rms_norm = method_on("target", elementwise.add_rms_norm)
    add_layer_norm = method_on("target", elementwise.add_layer_norm)
    activated = method_on("target", elementwise.activated)
    gated = method_on("target", elementwise.gated)
    gate = staticmethod(gates.gate)
    add_adapters = staticmethod(adapters.add_adapters)
    join = staticmethod(gates.join)
    pack_experts = staticmethod(experts.pack)
    by_head = method_on("target", experts.by_head)
    route = staticmethod(route.route)
    rotate_store = method_on("target", store.rotate_store)
    convolve = staticmethod(convolution.convolve)
    decays = staticmethod(gates.decays)
    recurrence = method_on("target", recurrence.recurrence)
    gated_norm = method_on("target", gates.gated_norm)

    def gather(self, x: Tensor, first: bool = False) -> Tensor:
        return self.ranks.gather(x)

    def shared_linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, whole: bool = False
    ) -> Tensor:
        """Compute `KernelSet.shared_linear`."""
        return self.gather(self.linear(x if whole else self.gather(as_tensor(x)), weight, bias))

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
        return experts.experts(self.target, x, ids, weights, layers, base, adapters, self.ranks)

    def pack(self, weight: Weight) -> Weight:
        linear.check(weight)
        return weight

    def linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, float32: bool = False
    ) -> Tensor:
        assert isinstance(x, (Tensor, Quantized))
        assert isinstance(weight, Weight)
        return linear.linear(self.target, x, weight, bias, float32, self.exact_products)

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        sequences: Sequences,
        call: AttentionCall,
        consumer: PackedWeight | None = None,
    ) -> Tensor | Quantized:
        return paged.attention(self.target, q, pages, sequences, call, self.fp8_attention, consumer)
