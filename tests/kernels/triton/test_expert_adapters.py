"""What adapters add to the products of experts in Triton: near the reference, whatever runs beside a
row, and nothing to rows without an adapter.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_expert_adapters import SLOTS, bank_of
from tests.kernels.triton.test_experts import (
    HIDDEN,
    INTERMEDIATE,
    KERNELS,
    NUM_EXPERTS,
    both,
    packed,
    some,
    width,
)

from freight.kernels import reference_experts as definition
from freight.kernels.reference_set import REFERENCE
from freight.operands.activation import Activation, GatedActivation
from freight.operands.adapters import AdapterBank, ExpertBanks
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Activations


def on(bank: AdapterBank, device: str) -> AdapterBank:
    tensors = [tensor.to(device) for tensor in (bank.a, bank.b, bank.ranks, bank.scalings)]
    return AdapterBank(*tensors, bank.ends)


@pytest.mark.parametrize(
    ("blocks", "activations"),
    [(None, Activations.PLAIN), (False, Activations.DYNAMIC), (True, Activations.DYNAMIC)],
)
@pytest.mark.parametrize("function", [GatedActivation.SILU, Activation.RELU_SQUARED], ids=str)
def test_experts_with_adapters(blocks, activations, function, device):
    torch.manual_seed(0)
    dtype = torch.float32 if blocks is None else torch.bfloat16
    weights = both(blocks, activations, device, function)
    ends = (INTERMEDIATE, width(function))[: width(function) // INTERMEDIATE]
    banks = ExpertBanks(
        on(bank_of(HIDDEN, ends, dtype), device),
        on(bank_of(INTERMEDIATE, (HIDDEN,), dtype), device),
        NUM_EXPERTS,
    )
    x, ids, row_weights = some(6, device, dtype)
    adapters = torch.tensor([0, -1, 2, 1, 0, SLOTS - 1], dtype=torch.int32, device=device)
    layers = ExpertLayers(*packed(weights), function, banks)
    result = KERNELS.experts(x, ids, row_weights, layers, None, adapters)
    lists = [definition.pack(REFERENCE, side) for side in weights]
    expected = REFERENCE.experts(
        x, ids, row_weights, ExpertLayers(*lists, function, banks), None, adapters
    )
    near = 1e-4 if blocks is None else 0.03
    assert (result - expected).abs().max() < near * expected.abs().max()
    without = KERNELS.experts(x, ids, row_weights, layers)
    assert torch.equal(result[1], without[1])
    for row in range(6):
        only = slice(row, row + 1)
        alone = KERNELS.experts(x[only], ids[only], row_weights[only], layers, None, adapters[only])
        assert torch.equal(alone, result[only])
        assert torch.equal(alone, without[only]) == (row == 1)
