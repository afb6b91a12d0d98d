"""The router and the experts of a layer, as `KernelSet.route` and `KernelSet.experts` take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freight.operands.activation import AnyActivation
from freight.operands.adapters import ExpertBanks
from freight.operands.packed import PackedExperts, PackedWeight
from freight.operands.routing import Routing


@dataclass(frozen=True)
class Router:
    """The matrix of a router, its rule of choice, and what it has for each expert.

    matrix         result of `KernelSet.pack` for [num_experts, hidden_size] in float32
    bias           [num_experts] float32, added to the logits, or None
    choice_bias    [num_experts] float32, added to the scores for the choice, not to the weights, or
                   None
    expert_scale   [num_experts] float32, which multiplies the final weights, or None
    """

    matrix: PackedWeight
    routing: Routing
    bias: Tensor | None = None
    choice_bias: Tensor | None = None
    expert_scale: Tensor | None = None


@dataclass(frozen=True)
class ExpertLayers:
    """Both matrices of all experts, and the activation between them.

    gate_up   result of `KernelSet.pack_experts` for [2 * intermediate_size, hidden_size], gate
              first; with an `Activation`, which has no gate, for [intermediate_size, hidden_size]
    down      the same for [hidden_size, intermediate_size]
    banks     what adapters add to both products; None: experts take no adapters
    """

    gate_up: PackedExperts
    down: PackedExperts
    activation: AnyActivation
    banks: ExpertBanks | None = None
