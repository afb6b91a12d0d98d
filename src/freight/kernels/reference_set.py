"""ReferenceKernels: the reference functions (`reference*.py`) as a KernelSet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.kernels import (
    reference,
    reference_experts,
    reference_rows,
    reference_sparse,
    reference_states,
)
from freight.kernels.reference import Fp8Products
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.experts import Router
from freight.operands.kv_pages import KVPages
from freight.operands.packed import PackedWeight, Rows, as_tensor
from freight.operands.weight import Weight
from freight.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class ReferenceSparse:
    """`SparseKernels` in plain torch. `products`: as in `ReferenceKernels`."""

    products: Fp8Products = Fp8Products.NONE

    store_index = staticmethod(reference_sparse.store_index)
    choose = staticmethod(reference_sparse.choose)

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        sequences: Sequences,
        call: AttentionCall,
        chosen: Tensor,
    ) -> Tensor:
        return reference_sparse.attention(q, pages, sequences, call, chosen, self.products)


@dataclass(frozen=True)
class ReferenceKernels:
    """Plain torch on any device. `products`: the products of attention that multiply FP8 by FP8;
    `int8_activations`: as in `select_kernels`.
    """

    products: Fp8Products = Fp8Products.NONE
    note: str = ""
    name: str = "reference"
    ranks: Ranks = ALONE
    int8_activations: bool = False

    packs_mxfp4 = False
    packs_groups = True
    lookup = staticmethod(reference_rows.lookup)
    packed_rows = staticmethod(reference_rows.packed_rows)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    add_layer_norm = staticmethod(reference_rows.add_layer_norm)
    activated = staticmethod(reference_rows.activated)
    gated = staticmethod(reference.gated)
    gate = staticmethod(reference_rows.gate)
    add_adapters = staticmethod(reference_rows.add_adapters)
    join = staticmethod(reference_rows.join)
    pack_experts = reference_experts.pack
    experts = reference_experts.experts
    by_head = reference_experts.by_head
    rotate_store = staticmethod(reference.rotate_store)
    convolve = staticmethod(reference_states.convolve)
    decays = staticmethod(reference_states.decays)
    recurrence = staticmethod(reference_states.recurrence)
    gated_norm = staticmethod(reference_states.gated_norm)

    def gather(self, x: Tensor, first: bool = False) -> Tensor:
        return self.ranks.gather(x)

    def shared_linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, whole: bool = False
    ) -> Tensor:
        """Compute `KernelSet.shared_linear`."""
        return self.gather(self.linear(x if whole else self.gather(as_tensor(x)), weight, bias))

    def pack(self, weight: Weight) -> Weight:
        if self.int8_activations:
            return weight.with_int8_inputs()
        return weight

    def linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, float32: bool = False
    ) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(weight, Weight)
        return reference.linear(x, weight, bias, float32)

    @property
    def sparse(self) -> ReferenceSparse:
        return ReferenceSparse(self.products)

    @property
    def multiplies_blocks(self) -> bool:
        return self.int8_activations

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        logits = self.linear(x.float(), router.matrix, router.bias)
        return reference_experts.choose(
            logits, router.routing, router.choice_bias, router.expert_scale
        )

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        sequences: Sequences,
        call: AttentionCall,
        consumer: PackedWeight | None = None,
    ) -> Tensor:
        return reference.attention(q, pages, sequences, call, self.products)


REFERENCE = ReferenceKernels()
