"""Experts (csrc/experts.cpp, csrc/route.cpp) and products of heads (csrc/by_head.cpp).

Weights are packed at load. Results have the bits of `kernels/reference_experts.py` over this set's
products: a row's bits depend only on that row and its experts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.kernels.cpu.adapters import describe
from freight.kernels.cpu.arguments import address
from freight.kernels.cpu.interface import (
    FORMATS,
    GATED_ACTIVATIONS,
    SCORINGS,
    UNGATED_ACTIVATIONS,
    FreightByHead,
    FreightExperts,
    FreightRoute,
    FreightWeight,
)
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.linear import (
    LARGE,
    CpuWeight,
    aligned,
    check,
    format_of,
    give_back_freed_memory,
    pack_into,
    packed_bytes,
)
from freight.operands.activation import Activation
from freight.operands.experts import ExpertLayers, Router
from freight.operands.packed import PackedExperts
from freight.operands.weight import Weights
from freight.parallel.ranks import Transport


@dataclass(frozen=True, eq=False)
class CpuExperts(PackedExperts):
    """One matrix of each expert in the layout of one build, in one allocation.

    One mapping per expert would be thousands, close to the limit of Linux for a process. The other
    fields own the memory that `descriptors` point to.
    """

    out_features: int
    in_features: int
    data: Tensor  # uint8 [num_experts, bytes of one]
    scale: Tensor
    block_scale: Tensor | None
    orders: tuple[Tensor, ...]  # of the experts that have one
    bias: Tensor | None  # [num_experts, out_features], in the dtype of the rows
    descriptors: ctypes.Array[FreightWeight]
    address: int  # of the descriptors

    @property
    def num_experts(self) -> int:
        """Return the number of experts."""
        return len(self.descriptors)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed matrices and their scales."""
        return sum(
            t.numel() * t.element_size()
            for t in (self.data, self.scale, self.block_scale, *self.orders)
            if t is not None
        )


def pack(
    library: Library,
    weights: Weights,
    bias: Tensor | None = None,
    int8_activations: bool = False,
) -> CpuExperts:
    """Pack `weights`, one of each expert, of one shape and format.

    Each weight is released before the next one is read. bias: [num_experts, out_features] in the
    dtype of the rows; int8_activations: as in `select_kernels`. Raises KernelError for a weight
    that `linear.pack` refuses.
    """
    packed: list[CpuWeight] = []
    data: Tensor | None = None
    for stored in weights:
        weight = stored.with_int8_inputs() if int8_activations else stored
        check(weight)
        if data is None:
            out_features, in_features = weight.shape
            kind = (format_of(weight), weight.activations)
            num_bytes = packed_bytes(library, weight)
            data = aligned(len(weights) * num_bytes).view(len(weights), num_bytes)
        assert weight.shape == (out_features, in_features)
        assert (format_of(weight), weight.activations) == kind
        packed.append(pack_into(library, weight, data[len(packed)]))
        del weight, stored
    assert data is not None
    assert len(packed) == len(weights)
    if data.numel() >= LARGE:
        give_back_freed_memory()
    scale = torch.stack([weight.scale for weight in packed])
    blocks = [weight.block_scale for weight in packed if weight.block_scale is not None]
    assert len(blocks) in (0, len(packed))
    block_scale = torch.stack(blocks) if blocks else None
    orders = tuple(weight.order for weight in packed if weight.order is not None)
    descriptors = (FreightWeight * len(packed))(*(weight.descriptor for weight in packed))
    for expert, descriptor in enumerate(descriptors):
        descriptor.scale = scale[expert].data_ptr()
        descriptor.block_scale = None if block_scale is None else block_scale[expert].data_ptr()
    bias = None if bias is None else bias.contiguous()
    assert bias is None or bias.shape == (len(packed), out_features)
    at = ctypes.addressof(descriptors)
    return CpuExperts(
        out_features, in_features, data, scale, block_scale, orders, bias, descriptors, at
    )


def route(
    library: Library,
    x: Tensor,
    router: Router,
) -> tuple[Tensor, Tensor]:
    """Compute `KernelSet.route`.

    The logits have the bits of `linear` over x in float32; a NaN counts as the largest score.
    """
    matrix = router.matrix
    routing = router.routing
    assert isinstance(matrix, CpuWeight)
    rows, hidden_size = x.shape
    num_experts = matrix.out_features
    top_k = routing.top_k
    assert hidden_size == matrix.in_features
    assert num_experts == routing.num_experts >= top_k
    assert num_experts % routing.num_groups == 0
    assert routing.group_best in (1, 2)
    by_expert = (router.bias, router.choice_bias, router.expert_scale)
    for values in by_expert:
        assert values is None or (values.dtype == torch.float32 and values.shape == (num_experts,))
    x = x.contiguous()
    ids = library.empty((rows, top_k), torch.int32)
    weights = library.empty((rows, top_k), torch.float32)
    library.functions.freight_route(
        FreightRoute(
            matrix.address,
            x.data_ptr(),
            *map(address, by_expert),
            ids.data_ptr(),
            weights.data_ptr(),
            rows,
            FORMATS[x.dtype],
            top_k,
            SCORINGS[routing.scoring],
            routing.normed,
            routing.num_groups,
            routing.top_groups,
            routing.group_best,
            routing.factor,
            torch.get_num_threads(),
        )
    )
    return ids, weights


def experts(
    library: Library,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layers: ExpertLayers,
    base: Tensor | None = None,
    adapters: Tensor | None = None,
    transport: Transport | None = None,
) -> Tensor:
    """Compute `KernelSet.experts`. ids: int32, weights: float32, both [rows, top_k]; adapters: int32.

    With the `transport` of several ranks, the matrices have this rank's rows, and the result its
    columns.
    """
    gate_up = layers.gate_up
    down = layers.down
    activation = layers.activation
    assert isinstance(gate_up, CpuExperts)
    assert isinstance(down, CpuExperts)
    rows, hidden_size = x.shape
    if isinstance(activation, Activation):
        gated = 0
        code = UNGATED_ACTIVATIONS[activation]
        limit = 0.0
    else:
        gated = 1
        code = GATED_ACTIVATIONS[activation.function]
        limit = activation.limit
    size = 1 if transport is None else transport.size
    assert hidden_size == gate_up.in_features == down.out_features * size
    assert gate_up.out_features * size == (1 + gated) * down.in_features
    assert gate_up.num_experts == down.num_experts
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids.shape == weights.shape == (rows, ids.shape[1])
    assert base is None or (base.shape == x.shape and base.dtype == x.dtype)
    assert all(side.bias is None or side.bias.dtype == x.dtype for side in (gate_up, down))
    x = x.contiguous()
    base = None if base is None else base.contiguous()
    out = library.empty((rows, down.out_features), x.dtype)
    banks = None if adapters is None else layers.banks
    described = []
    if banks is not None:
        assert adapters is not None
        assert adapters.dtype == torch.int32
        assert adapters.shape == (rows,)
        assert banks.num_experts == gate_up.num_experts
        for bank, side in ((banks.gate_up, gate_up), (banks.down, down)):
            assert bank.ends[-1] == side.out_features
            assert bank.a.shape[3] == side.in_features
            described.append(describe(bank, x.dtype))
    library.functions.freight_experts(
        FreightExperts(
            gate_up.address,
            down.address,
            address(gate_up.bias),
            address(down.bias),
            x.data_ptr(),
            address(base),
            address(ids),
            address(weights),
            out.data_ptr(),
            None if transport is None else ctypes.addressof(transport.described),
            rows,
            gate_up.num_experts,
            ids.shape[1],
            FORMATS[x.dtype],
            gated,
            code,
            limit,
            torch.get_num_threads(),
            None if banks is None else address(adapters),
            *described,
        )
    )
    return out


def by_head(library: Library, x: Tensor, matrices: PackedExperts) -> Tensor:
    """Compute `KernelSet.by_head`."""
    assert isinstance(matrices, CpuExperts)
    rows, heads, in_features = x.shape
    assert (heads, in_features) == (matrices.num_experts, matrices.in_features)
    assert x.stride(2) == 1 or in_features == 1
    assert matrices.bias is None
    out = library.empty((rows, heads, matrices.out_features), x.dtype)
    library.functions.freight_by_head(
        FreightByHead(
            matrices.address,
            x.data_ptr(),
            out.data_ptr(),
            rows,
            x.stride(0),
            x.stride(1),
            heads,
            FORMATS[x.dtype],
            torch.get_num_threads(),
        )
    )
    return out
