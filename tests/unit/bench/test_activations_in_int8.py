"""benchmarks/activations_in_int8.py: its inputs in INT8 are those of the kernels, and its NVFP4 is
the nearest.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from activations_in_int8 import RoundingKernels, round_to_nvfp4

from freight.fp8 import mxfp4
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.model.sources import round_to_int4
from freight.operands.weight import Activations, Weight


def matrix() -> torch.Tensor:
    return torch.randn(96, 320, generator=torch.Generator().manual_seed(3))


@pytest.mark.skipif(not library.runnable(), reason="no build of the CPU kernels")
@pytest.mark.parametrize("group", [32, 64])
def test_inputs_rounded_beforehand_give_the_products_of_the_kernels(group: int) -> None:
    weight = round_to_int4(matrix(), torch.float32, group)
    x = 5 * torch.randn(7, 320, generator=torch.Generator().manual_seed(4))
    kernels = CpuKernels(library.load())
    whole = kernels.linear(x, kernels.pack(replace(weight, activations=Activations.GROUPS)))
    rounding = RoundingKernels(library.load())
    packed = rounding.pack(weight)
    assert not torch.allclose(rounding.linear(x, packed), whole, rtol=0, atol=0.1)
    object.__setattr__(rounding, "group", group)
    torch.testing.assert_close(rounding.linear(x, packed), whole, rtol=0, atol=1e-3)
    head = Weight(matrix())
    torch.testing.assert_close(
        rounding.linear(x, rounding.pack(head)), kernels.linear(x, kernels.pack(head))
    )


def test_nvfp4_takes_the_nearest_value_of_its_scales() -> None:
    stored = matrix()
    stored[3, 16:32] = 0
    weight = round_to_nvfp4(stored)
    groups = weight.groups
    assert groups is not None
    assert weight.scale is not None
    values = weight.dequantized()
    assert (values[3, 16:32] == 0).all()
    assert float((values - stored).norm() / stored.norm()) < 0.11
    largest = stored.abs().argmax()  # scales are made for it
    torch.testing.assert_close(values.flatten()[largest], stored.flatten()[largest])
    step = (groups.scales.float() * weight.scale[:, None]).repeat_interleave(16, 1)
    table = torch.tensor(mxfp4.SIGNED) * step[..., None]
    nearest = (table - stored[..., None]).abs().amin(-1)
    torch.testing.assert_close((values - stored).abs(), nearest, rtol=0, atol=1e-6)
