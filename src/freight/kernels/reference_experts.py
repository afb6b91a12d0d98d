"""Mixture of experts from a set's own products, one expert at a time: reference of the kernels.

It defines `KernelSet.experts`, `route` and `by_head`. A set without kernels for experts runs it; a
set with such kernels is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freight.kernels.interface import KernelSet
from freight.operands.activation import Activation, AnyActivation
from freight.operands.experts import ExpertLayers
from freight.operands.packed import PackedExperts, PackedWeight, Rows, as_tensor
from freight.operands.routing import Routing, Scoring
from freight.operands.weight import Weights


@dataclass(frozen=True)
class ExpertList(PackedExperts):
    """One packed matrix of each expert, by id.

    bias: [num_experts, out_features] in the dtype of the rows, or None
    """

    matrices: tuple[PackedWeight, ...]
    bias: Tensor | None = None

    def of(self, expert: int) -> tuple[PackedWeight, Tensor | None]:
        """Return the matrix and the bias of one expert."""
        return self.matrices[expert], None if self.bias is None else self.bias[expert]


def pack(products: KernelSet, weights: Weights, bias: Tensor | None = None) -> ExpertList:
    """Pack each expert's matrix with `products.pack` (`KernelSet.pack_experts`)."""
    return ExpertList(tuple(map(products.pack, weights)), bias)


def by_head(products: KernelSet, x: Tensor, matrices: PackedExperts) -> Tensor:
    """Compute `KernelSet.by_head`, one head at a time."""
    assert isinstance(matrices, ExpertList)
    assert matrices.bias is None
    heads = zip(x.unbind(1), matrices.matrices, strict=True)
    return torch.stack([products.linear(rows, matrix) for rows, matrix in heads], 1)


def choose(
    logits: Tensor,
    routing: Routing,
    choice_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by logits, float32 [rows, num_experts], as `KernelSet.route` does."""
    scores = logits
    if routing.scoring is Scoring.SOFTMAX:
        scores = torch.softmax(logits, -1)
    elif routing.scoring is Scoring.SIGMOID:
        # in float64: torch's float32 function has other last bits at the end of a tensor
        scores = torch.sigmoid(logits.double()).float()
    rated = scores if choice_bias is None else scores + choice_bias
    if routing.num_groups > 1:
        groups = rated.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(min(routing.group_best, groups.shape[2]), -1).values.sum(-1)
        order = torch.sort(best, dim=-1, descending=True, stable=True).indices
        left_out = order[:, routing.top_groups :, None].expand(-1, -1, groups.shape[2])
        rated = groups.scatter(1, left_out, -torch.inf).flatten(1)
    best_first = torch.sort(rated, dim=-1, descending=True, stable=True).indices
    ids = best_first[:, : routing.top_k].sort(-1).values
    weights = scores.gather(1, ids)
    if routing.scoring is Scoring.CHOSEN:
        weights = torch.softmax(weights, -1)
    if routing.normed:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # the sum of sigmoids may be 0
    weights = weights * routing.factor
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    return ids.to(torch.int32), weights


def experts(
    products: KernelSet,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layers: ExpertLayers,
    base: Tensor | None = None,
    adapters: Tensor | None = None,
) -> Tensor:
    """Compute `KernelSet.experts`, one expert at a time.

    The products are rounded as `products` rounds them, then weighted and summed by id in float32.
    """
    gate_up = layers.gate_up
    down = layers.down
    banks = None if adapters is None else layers.banks
    assert isinstance(gate_up, ExpertList)
    assert isinstance(down, ExpertList)
    total = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device) if base is None else base.float()
    )
    for expert in range(len(gate_up.matrices)):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            inner, inner_bias = gate_up.of(expert)
            outer, outer_bias = down.of(expert)
            inputs = x[rows]
            first = products.linear(inputs, inner, inner_bias)
            if banks is None:
                hidden = _activate(products, first, layers.activation, outer)
                out = products.linear(hidden, outer, outer_bias)
            else:
                assert adapters is not None
                entries = banks.entries(adapters[rows], expert)
                first = products.add_adapters(first, inputs, banks.gate_up, entries)
                # adapters use the activations as they are
                hidden = as_tensor(_activate(products, first, layers.activation, None))
                out = products.linear(hidden, outer, outer_bias)
                out = products.add_adapters(out, hidden, banks.down, entries)
            total[rows] += weights[rows, slots][:, None] * out.float()
    return total.to(x.dtype)


def _activate(
    products: KernelSet, x: Tensor, activation: AnyActivation, consumer: PackedWeight | None
) -> Rows:
    if isinstance(activation, Activation):
        return products.activated(x, activation, consumer)
    return products.gated(x, activation, consumer)
