"""The cases of the GPU benchmark run, small: what they call exists and takes what it is given."""

from __future__ import annotations

import torch

from freight.kernels.select import select_kernels
from freight.lab.bench.cases import Heads
from freight.lab.bench.gpu import Sizes, cases

SMALL = Sizes(
    attention=((2, 1, 20), (1, 4, 4)),
    heads=Heads(2, 1, 16),
    store=4,
    product=(66, 32, 128),
    decode_products=((1, 32, 128),),
    latents=Heads(4, 1, 48, 32, True),
    latent_attention=((2, 1, 20),),
    by_head=((32, 16), (16, 32)),
    by_head_rows=(3,),
)


def test_every_case_runs(device):
    found = [make() for _, make in cases(select_kernels("triton"), SMALL, device)]
    assert {case.kernel for case in found} >= {
        "attention",
        "rotate_store",
        "linear",
        "torch.linear",
    }
    for case in found:
        (call,) = case.calls
        result = call()
        assert result is None or (isinstance(result, torch.Tensor) and result.isfinite().all()), (
            case
        )
        assert case.num_bytes > 0
    attention = {
        case.format: case.num_bytes for case in found if case.shape == (2, 1, 20, 2, 1, 16)
    }
    assert attention["fp8_e4m3fn, token"] == 2 * 20 * 2 * 1 * (16 + 2) + 2 * 2 * 2 * 2 * 16
    assert {"fp8_e4m3fn, tensor, FP8 products", "fp8_e4m3fn, token, FP8 products"} < set(attention)
    latents = next(case for case in found if case.shape == (2, 1, 20, 4, 1, 48))
    assert latents.num_bytes == 2 * 20 * 48 * 2 + 2 * 2 * 4 * (
        48 + 32
    )  # of each key, and of q and the result
    expected = [(3, 4, 32, 16), (3, 4, 16, 32)]
    assert [case.shape for case in found if case.kernel == "by_head"] == expected
    decode = next(case for case in found if case.kernel == "attention")
    assert decode.num_flops == 2 * 2 * 2 * 20 * 2 * 16


def test_one_kernel_can_be_asked_for(device):
    found = [make() for _, make in cases(select_kernels("triton"), SMALL, device, ["rotate_store"])]
    assert {case.kernel for case in found} == {"rotate_store"}
