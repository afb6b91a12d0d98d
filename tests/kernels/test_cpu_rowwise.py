"""Rows of an embedding and the compiled row-wise operations of some families: every build that runs
here, and its bits.

Against float64, results are within one unit in the last place of the dtype, as they are rounded
once; of float32 within 1e-5. Norms of columns have the bits of `add_rms_norm`, activations without
a gate and rows those of the reference.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.test_cpu_elementwise import BUILDS, DTYPES, agrees
from tests.refusals import refuses
from torch import Tensor

from freight.errors import KernelError
from freight.kernels import reference_rows
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.reference_set import REFERENCE
from freight.operands.activation import Activation, GateFunction

SIZES = [1, 31, 64, 2050]
FUNCTIONS = {
    GateFunction.SIGMOID: torch.sigmoid,
    GateFunction.SOFTPLUS: lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    GateFunction.IDENTITY: lambda x: x,
}


@pytest.fixture(params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(library.load(request.param))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
def test_add_layer_norm(kernels, size, dtype):
    """Values far from 0: a variance by mean(x²) - mean(x)² would lose its digits."""
    torch.manual_seed(size)
    x, delta = (torch.randn(2, 5, size) * 4 + 30).to(dtype)
    weight, bias = torch.randn(2, size).to(dtype)
    total, normed = kernels.add_layer_norm(x, delta, weight, bias, 1e-5)
    assert torch.equal(total, x + delta)
    exact = F.layer_norm(total.double(), (size,), weight.double(), bias.double(), 1e-5)
    bound = torch.finfo(dtype).eps * (exact.abs() + 4) + 2e-6  # the product and the bias may cancel
    assert ((normed.double() - exact).abs() <= bound).all()
    same, without = kernels.add_layer_norm(total, None, weight, bias, 1e-5)
    assert same is total
    assert torch.equal(without, normed)
    delta[3, 0] = torch.nan
    nan = kernels.add_layer_norm(x, delta, weight, bias, 1e-5)[1].isnan()
    assert nan.any(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.RELU_SQUARED])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
def test_activations_without_a_gate_have_the_bits_of_the_reference(
    kernels, size, dtype, activation
):
    torch.manual_seed(size)
    x = (torch.randn(5, size) * 4).to(dtype)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = torch.inf, -torch.inf, torch.nan, 0.0
    out, want = kernels.activated(x, activation), reference_rows.activated(x, activation)
    assert out.dtype == dtype
    assert torch.equal(out.nan_to_num(-1), want.nan_to_num(-1))
    assert out[:4, 0].isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize(("groups", "group"), [(1, 2050), (3, 20), (8, 64), (300, 1)])
def test_gate(kernels, groups, group, dtype, function):
    torch.manual_seed(groups)
    x, logits = (
        (torch.randn(5, groups * group) * 3).to(dtype),
        (torch.randn(5, groups) * 8).to(dtype),
    )
    logits[0, 0], logits[1, 0], logits[2, 0], logits[3, 0] = 200.0, -80.0, torch.nan, 0.0
    factors = FUNCTIONS[function](logits.double())
    exact = (x.double() * factors.repeat_interleave(group, 1)).to(dtype)
    for one in (kernels, REFERENCE):
        assert agrees(one.gate(x, logits, function), exact, 1)
    same = kernels.gate(x, logits[4:], function)  # one row of logits for all rows
    assert torch.equal(same[4], kernels.gate(x, logits, function)[4])
    assert torch.equal(same[:1], kernels.gate(x[:1], logits[4:], function))


@pytest.mark.parametrize("function", [GateFunction.SIGMOID, GateFunction.SOFTPLUS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_factor_of_every_logit(kernels, dtype, function):
    """What is below 1e-36 counts as zero."""
    logits = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    logits = logits[~logits.isinf()][:, None]
    factor = kernels.gate(torch.ones(len(logits), 1, dtype=dtype), logits, function)
    assert agrees(factor, FUNCTIONS[function](logits.double()).to(dtype), 1)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_joined_columns_are_those_of_the_parts(kernels, dtype, wide):
    torch.manual_seed(0)
    x, other = torch.randn(5, 200).to(dtype), torch.randn(5, 4, 33).to(dtype)
    whole, of_heads = (torch.randn(size).to(torch.float32 if wide else dtype) for size in (70, 20))
    parts = ((x[:, 3:73], whole), (x[:, 100:160], of_heads), (other[:, 2], None), (x, None))
    out = kernels.join(parts, 1e-5)
    norms = (
        kernels.add_rms_norm(a.reshape(-1, len(w)), None, w, 1e-5)[1].view(5, -1)
        for a, w in parts[:2]
    )
    assert torch.equal(out, torch.cat((*norms, other[:, 2], x), 1))
    assert agrees(out, reference_rows.join(parts, 1e-5), 2)
    assert torch.equal(
        kernels.join([(part[1:2], weight) for part, weight in parts], 1e-5), out[1:2]
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_joined_columns_of_heads_are_those_of_each_head(kernels, dtype):
    torch.manual_seed(0)
    x, other, weight = (torch.randn(shape).to(dtype) for shape in ((5, 3, 40), (5, 3, 16), (10,)))
    parts = ((x[:, :, 24:], None), (other, None), (x[:, :, :20], weight))
    out = kernels.join(parts, 1e-5)
    assert out.shape == (5, 3, 52)
    assert torch.equal(
        out.flatten(0, 1), kernels.join([(part.flatten(0, 1), w) for part, w in parts], 1e-5)
    )
    assert agrees(out, reference_rows.join(parts, 1e-5), 2)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
def test_lookup_gives_the_rows_of_an_embedding(kernels, size, dtype):
    torch.manual_seed(size)
    table, ids = (
        (torch.randn(9, size + 3) * 30).to(dtype)[::2, 1 : size + 1],
        torch.tensor([4, 0, 2, 2, 1, 3, 0]),
    )
    table[0, 0], table[1, 0], table[2, 0] = torch.inf, torch.nan, -0.0
    rows = F.embedding(ids, table)
    for one in (kernels, REFERENCE):
        for multiplier in (1.0, 0.5, 45.254834):  # the last is no number of 16 bits
            out = one.lookup(table, ids, multiplier)
            assert out.dtype == dtype
            assert same_bits(out, (rows.float() * multiplier).to(dtype))
        assert one.lookup(table, ids[:0]).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("stored", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("size", SIZES)
def test_lookup_adds_rows_to_a_base_and_rounds_at_each_step(kernels, size, stored, dtype):
    torch.manual_seed(size)
    table, base, ids = (
        torch.randn(5, size).to(stored),
        torch.randn(7, size).to(dtype),
        torch.arange(7) % 5,
    )
    rows = F.embedding(ids, table).to(dtype)
    for one in (kernels, REFERENCE):
        for multiplier, factor in ((1.0, 1.0), (16.0, 0.5**0.5)):
            product = (rows.float() * multiplier).to(dtype)
            summed = (base.float() + product.float()).to(dtype)
            out = one.lookup(table, ids, multiplier, base, factor)
            assert out.dtype == dtype
            assert same_bits(out, (summed.float() * factor).to(dtype))


@pytest.mark.parametrize("outside", [-1, 5, 2**40])
def test_an_id_beyond_the_table_is_refused(kernels, outside):
    table, ids = torch.randn(5, 64), torch.tensor([0, 1, 2])
    ids[2] = outside
    with refuses(KernelError, "freight_lookup", "token id or position"):
        kernels.lookup(table, ids)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN equals NaN, and 0 is not -0."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        bits(one.nan_to_num(7)), bits(other.nan_to_num(7))
    )


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.itemsize == 4 else torch.int16)


def test_rows_do_not_see_each_other_nor_the_threads(kernels):
    torch.manual_seed(0)
    x, delta, weight, bias = (torch.randn(n, 4096).bfloat16() for n in (40, 40, 1, 1))
    ids = torch.arange(40) * 7 % 40

    def every(rows: slice) -> list[Tensor]:
        logits = delta[rows]
        gates = [
            kernels.gate(x[rows], logits[:, :n], function)
            for function in GateFunction
            for n in (1, 32, 4096)
        ]
        return [
            *kernels.add_layer_norm(x[rows], logits, weight[0], bias[0], 1e-5),
            *(kernels.activated(x[rows], activation) for activation in Activation),
            *gates,
            kernels.join([(x[rows, :4000], weight[0, :50]), (logits, None)], 1e-5),
            kernels.lookup(x, ids[rows], 3.0, logits, 0.7),
        ]

    torch.set_num_threads(1)
    whole = every(slice(0, 40))
    for count in (1, 3):
        torch.set_num_threads(count)
        for rows in (slice(0, 1), slice(3, 4), slice(5, 40), slice(0, 40)):
            for out, expected in zip(every(rows), whole, strict=True):
                assert torch.equal(out, expected[rows])
