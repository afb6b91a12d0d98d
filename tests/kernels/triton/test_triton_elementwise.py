"""Row-wise operations in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from freight.kernels import reference, reference_rows
from freight.kernels.triton import elementwise, gates
from freight.kernels.triton.formats import current_target
from freight.kernels.triton.rows import quantize
from freight.operands.activation import Activation, GatedActivation, GateFunction, clamped_silu
from freight.operands.weight import Activations, Weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding of the result, and exp and rsqrt in float32."""
    assert got.dtype == expected.dtype
    bound = torch.finfo(got.dtype).eps * expected.float().abs() * 2 + 1e-6
    assert ((got.float() - expected.float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype, device):
    torch.manual_seed(0)
    x, delta = (torch.randn(2, 5, 200) * 4).to(dtype).to(device)
    weight = torch.rand(200).to(dtype).to(device)
    total, normed = elementwise.add_rms_norm(current_target(), x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert_close(normed, reference.add_rms_norm(x, delta, weight, 1e-5)[1])
    same, without = elementwise.add_rms_norm(
        current_target(), total, None, weight, 1e-5
    )  # fused is the composition of its parts
    assert same is total
    assert torch.equal(without, normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm(dtype, device):
    """Values far from 0: a variance by mean(x²) - mean(x)² would lose its digits."""
    torch.manual_seed(0)
    x, delta = (torch.randn(2, 5, 200) * 4 + 30).to(dtype).to(device)
    weight, bias = torch.randn(2, 200).to(dtype).to(device)
    total, normed = elementwise.add_layer_norm(current_target(), x, delta, weight, bias, 1e-5)
    expected = reference_rows.add_layer_norm(x, delta, weight, bias, 1e-5)
    assert torch.equal(total, expected[0])
    bound = (
        torch.finfo(dtype).eps * (expected[1].float().abs() + 4) + 2e-6
    )  # the product and the bias may cancel
    assert ((normed.float() - expected[1].float()).abs() <= bound).all()
    same, without = elementwise.add_layer_norm(current_target(), total, None, weight, bias, 1e-5)
    assert same is total
    assert torch.equal(without, normed)


@pytest.mark.parametrize("scale", ["row", "block", "static"])
def test_norms_and_activations_are_quantized_for_their_consumer(scale, device):
    """As `quantize` does it afterwards."""
    torch.manual_seed(0)
    x = torch.randn(3, 200).bfloat16().to(device)
    weight, bias = torch.randn(2, 200).bfloat16().to(device)
    codes = torch.zeros(8, 200, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones((1, 2) if scale == "block" else (8,), device=device)
    static = (Activations.STATIC, 0.01) if scale == "static" else (Activations.DYNAMIC, None)
    consumer, target = Weight(codes, scales, *static), current_target()
    for operation in (
        lambda to: elementwise.add_layer_norm(target, x, None, weight, bias, 1e-5, to)[1],
        lambda to: elementwise.activated(target, x, Activation.RELU, to),
        lambda to: elementwise.activated(target, x, Activation.RELU_SQUARED, to),
    ):
        plain, quantized = operation(None), operation(consumer)
        expected = quantize(target, plain, consumer)
        assert torch.equal(quantized.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(quantized.scale, expected.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_norms_of_the_addend_and_float32_weights(dtype, weight_dtype, device):
    """Weights like 1 + w of Gemma, of which 16 bits would round w away, multiply before the one
    rounding.
    """
    torch.manual_seed(0)
    x, delta = (torch.randn(2, 5, 200) * 4).to(dtype).to(device)
    weight, delta_weight = (1 + torch.randn(2, 200) * 0.2).to(weight_dtype or dtype).to(device)
    total, normed = elementwise.add_rms_norm(
        current_target(), x, delta, weight, 1e-5, None, delta_weight
    )
    expected = reference.add_rms_norm(x, delta, weight, 1e-5, None, delta_weight)
    # rsqrt may differ in its last bit, so where a value is halfway between two numbers it may round
    # to the other
    assert (total == expected[0]).float().mean() > 0.99
    assert_close(total, expected[0])
    assert (normed == reference.rms_norm(total, weight, 1e-5)).float().mean() > 0.99
    plain = elementwise.add_rms_norm(current_target(), x, delta, weight, 1e-5)[0]
    assert torch.equal(plain, x + delta)
    assert not torch.equal(plain, total)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # the divisor of a gate far below 0 is infinite
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "size"),
    [
        (GatedActivation.SILU, 72),
        (GatedActivation.CLAMPED_SWIGLU, 72),
        (GatedActivation.GELU_TANH, 72),
        (GatedActivation.GEGLU, 72),
        (clamped_silu(0.5), 72),
        (GatedActivation.SILU, 1100),
        (clamped_silu(7.0), 1100),
    ],
)
def test_gated(activation, dtype, size, device):
    torch.manual_seed(0)
    x = (torch.randn(3, 2 * size) * 5).to(dtype).to(device)
    assert_close(elementwise.gated(current_target(), x, activation), reference.gated(x, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [72, 1100])
def test_gelu(dtype, size, device):
    torch.manual_seed(0)
    x = (torch.randn(3, size) * 5).to(dtype).to(device)
    found = elementwise.activated(current_target(), x, Activation.GELU)
    assert_close(found, reference_rows.activated(x, Activation.GELU))


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.RELU_SQUARED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [72, 1100])
def test_activated(activation, dtype, size, device):
    """The bits of the reference, NaN and infinities included."""
    torch.manual_seed(0)
    x = (torch.randn(3, size) * 5).to(dtype).to(device)
    x[0, :3] = torch.tensor([torch.nan, -torch.inf, 200.0])
    found = elementwise.activated(current_target(), x, activation)
    assert torch.equal(found.nan_to_num(-1), reference_rows.activated(x, activation).nan_to_num(-1))
    assert found[0, :3].isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("function", GateFunction)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "group"), [(1, 1100), (3, 20), (72, 1)])
def test_gate(groups, group, dtype, function, device):
    torch.manual_seed(0)
    x = torch.randn(3, groups * group).to(dtype).to(device)
    logits = (torch.randn(3, 2 * groups) * 8).to(dtype).to(device)[:, :groups]
    assert_close(gates.gate(x, logits, function), reference_rows.gate(x, logits, function))
    same = gates.gate(x, logits[:1], function)  # one row of logits for all rows
    assert_close(same, reference_rows.gate(x, logits[:1], function))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_join(wide, dtype, device):
    torch.manual_seed(0)
    x, other = torch.randn(3, 200).to(dtype).to(device), torch.randn(3, 2, 33).to(dtype).to(device)
    whole, of_heads = (
        torch.rand(size).to(torch.float32 if wide else dtype).to(device) for size in (70, 20)
    )
    parts = ((x[:, 3:73], whole), (x[:, 100:160], of_heads), (other[:, 1], None))
    out = gates.join(parts, 1e-5)
    assert_close(out, reference_rows.join(parts, 1e-5))
    assert torch.equal(out[:, -33:], other[:, 1])
    heads = x.view(3, 2, 100)  # columns of each head
    of_each = ((heads[:, :, 60:], None), (other, None), (heads[:, :, :20], of_heads))
    assert_close(gates.join(of_each, 1e-5), reference_rows.join(of_each, 1e-5))
