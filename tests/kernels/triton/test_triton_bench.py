"""The cases of the GPU benchmark run, small: what they call exists and takes what it is given."""

from __future__ import annotations

import torch

from freight.bench.gpu import Sizes, cases
from freight.kernels.select import select_kernels

SMALL = Sizes(
    attention=((2, 1, 40), (1, 20, 20)),
    heads=4,
    kv_heads=2,
    head_dim=32,
    store=16,
    product=(80, 64, 128),
    decode_products=((1, 32, 128),),
)


def test_every_case_runs(device):
    found = [make() for make in cases(select_kernels("triton"), SMALL, device)]
    assert {case.kernel for case in found} >= {"attention", "rotate_store", "linear", "torch.linear"}
    for case in found:
        result = case.call()
        assert result is None or (isinstance(result, torch.Tensor) and result.isfinite().all()), case
        assert case.num_bytes > 0
    attention = {case.format: case.num_bytes for case in found if case.shape == (2, 1, 40, 4, 2, 32)}
    assert attention["fp8_e4m3fn, token"] == 2 * 40 * 2 * 2 * (32 + 2) + 2 * 2 * 2 * 4 * 32
    assert {"fp8_e4m3fn, static, FP8 products", "fp8_e4m3fn, token, FP8 products"} < set(attention)
    decode = next(case for case in found if case.kernel == "attention")
    assert decode.num_flops == 2 * 2 * 2 * 40 * 4 * 32


def test_one_kernel_can_be_asked_for(device):
    found = [make() for make in cases(select_kernels("triton"), SMALL, device, ["rotate_store"])]
    assert {case.kernel for case in found} == {"rotate_store"}
