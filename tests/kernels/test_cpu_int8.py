"""Products in INT8 have the same bits on every build and in the reference: those that numpy computes
with integers, of which a digest is below for the machines that run other builds.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.refusals import refuses
from torch import Tensor

from freight.errors import KernelError
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.interface import INT8_INPUTS
from freight.kernels.cpu.recording import Arena, record
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.activation import GatedActivation
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Activations, Weight

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]
SETS = (*library.runnable(), "reference")
DYNAMIC, STATIC = Activations.DYNAMIC, Activations.STATIC
# out_features, in_features: blocks, bands and words that are not full; inputs of several panels
SHAPES = [(1, 1), (16, 64), (7, 99), (33, 129), (70, 515), (130, 1030)]
ROWS = (*range(1, 41), 100)
MANY_ROWS = 530  # more than are computed at once
SCALE = np.float32(0.013)  # of static activations


def kernels_of(name: str) -> KernelSet:
    return REFERENCE if name == "reference" else CpuKernels(library.load(name))


def words(count: int, seed: int) -> NDArray[np.uint32]:
    """Numbers that are the same with every version of numpy: a multiplicative hash of the index."""
    index = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(2**32)
    mixed = index * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def floats(shape: tuple[int, ...], seed: int) -> Floats:
    """Values of -4 to 4 that are exact in bfloat16."""
    drawn = (words(int(np.prod(shape)), seed) >> np.uint32(16)).astype(np.float32)
    values = (drawn - np.float32(2**15)) * np.float32(2**-13)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).reshape(shape)


def codes_of(shape: tuple[int, ...], seed: int) -> Codes:
    return (
        (words(int(np.prod(shape)), seed) >> np.uint32(24))
        .astype(np.uint8)
        .view(np.int8)
        .reshape(shape)
    )


def by_numpy(
    x: Floats, codes: Codes, scale: Floats, bias: Floats | None, static: np.float32 | None
) -> Floats:
    """The definition with integers: codes of x, int32 sums, then float32, one operation at a time."""
    finite = np.where(np.isfinite(x), np.abs(x), np.float32(0))
    by_row = np.maximum(finite.max(1) / np.float32(127), np.float32(2.0**-126))
    if static is not None:
        by_row = np.full(len(x), static)
    rounded = np.rint(np.nan_to_num(x / by_row[:, None], posinf=np.inf, neginf=-np.inf))
    of_x = np.clip(rounded, -128, 127).astype(np.int64)
    sums = of_x @ codes.astype(np.int64).T
    assert np.abs(sums).max() < 2**31
    by_row = np.where(np.isnan(x).any(1), np.float32(np.nan), by_row)
    out: Floats = sums.astype(np.int32).astype(np.float32) * by_row[:, None] * scale
    return out if bias is None else out + bias


def weight_of(codes: Codes, scale: Floats, static: np.float32 | None = None) -> Weight:
    data = torch.from_numpy(codes), torch.from_numpy(scale)
    return Weight(*data, DYNAMIC) if static is None else Weight(*data, STATIC, float(static))


def case(outputs: int, inputs: int) -> tuple[Codes, Floats, Floats]:
    """Codes, positive scales and a bias."""
    codes, bias = codes_of((outputs, inputs), outputs), floats((outputs,), 7)
    return codes, np.abs(floats((outputs,), inputs)) * np.float32(0.01) + np.float32(1e-4), bias


def same(found: Tensor, expected: Floats | Tensor) -> bool:
    """Say whether all bits agree, where a NaN has any."""
    wanted = torch.from_numpy(expected) if isinstance(expected, np.ndarray) else expected
    return (
        found.dtype == wanted.dtype
        and torch.equal(found.isnan(), wanted.isnan())
        and torch.equal(found.nan_to_num(), wanted.nan_to_num())
    )


@pytest.mark.parametrize("static", [None, SCALE])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("name", SETS)
def test_products_have_the_bits_of_integers(
    name: str, outputs: int, inputs: int, static: np.float32 | None
):
    kernels = kernels_of(name)
    codes, scale, bias = case(outputs, inputs)
    packed = kernels.pack(weight_of(codes, scale, static))
    x = floats((max(ROWS), inputs), 3)
    x[5] = 0
    x[9] *= np.float32(2.0**-130)  # the smallest scale
    x[11] *= np.float32(2.0**100)
    expected = by_numpy(x, codes, scale, bias, static)
    unbiased = by_numpy(x, codes, scale, None, static)
    rows, added = torch.from_numpy(x), torch.from_numpy(bias)
    for count in ROWS:
        assert same(kernels.linear(rows[:count], packed, added), expected[:count])
        assert same(kernels.linear(rows[-count:], packed), unbiased[-count:])
    for dtype in (torch.bfloat16, torch.float16):
        narrow = rows.to(dtype)
        wanted = by_numpy(narrow.float().numpy(), codes, scale, None, static)
        for count in (1, 4, 5, 16, 40):
            found = kernels.linear(narrow[:count], packed)
            assert same(found, torch.from_numpy(wanted[:count]).to(dtype))
            whole = kernels.linear(narrow[:count], packed, float32=True)
            assert same(whole, wanted[:count])


@pytest.mark.parametrize("name", SETS)
def test_the_digest_of_all_bits(name: str):
    """Codes of x (a product with ones on the diagonal), int32 sums (with scales of 1 together), and finished
    products of a weight of three panels of tiles. The digest is that of `by_numpy` on x86-64.
    """
    outputs, inputs, rows = 70, 515, 37
    codes, scale, bias = case(outputs, inputs)
    x, one, exact = floats((rows, inputs), 11), np.ones(1, np.float32), np.float32(1 / 32)
    diagonal = np.eye(inputs, dtype=np.int8)
    expected = (
        by_numpy(x, diagonal, one.repeat(inputs), None, None),
        by_numpy(x, codes, 32 * one.repeat(outputs), None, exact),
        by_numpy(x, codes, scale, bias, None),
    )
    kernels, given = kernels_of(name), torch.from_numpy(x)
    found = (
        kernels.linear(given, kernels.pack(weight_of(diagonal, one.repeat(inputs)))),
        kernels.linear(given, kernels.pack(weight_of(codes, 32 * one.repeat(outputs), exact))),
        kernels.linear(given, kernels.pack(weight_of(codes, scale)), torch.from_numpy(bias)),
    )
    for ours, numpys in zip(found, expected, strict=True):
        assert same(ours, numpys)
    digest = hashlib.sha256(b"".join(one.numpy().astype("<f4").tobytes() for one in found))
    assert digest.hexdigest() == "c7d266d573050b17f83d3195ead6ba68422da6390d36865e0bbc5e0c4c397139"


@pytest.mark.parametrize("name", SETS)
def test_the_largest_sums(name: str):
    """Of both signs, with x above and below zero: with VNNI sums pass 2 ** 31 on their way."""
    kernels = kernels_of(name)
    codes = np.full((4, INT8_INPUTS), -128, np.int8)
    codes[1], codes[2], codes[3, ::2] = 127, 1, 127
    x = np.full((6, INT8_INPUTS), -128, np.float32)
    x[1], x[2], x[3, ::3], x[4, 1::2] = 127, 1, 127, 126
    weight = Weight(torch.from_numpy(codes), torch.ones(4), STATIC, 1.0)
    packed = kernels.pack(weight)
    sums = x.astype(np.int64) @ codes.astype(np.int64).T
    assert sums.max() == 131071 * 2**14
    assert sums.min() == -131071 * 128 * 127
    for count in (2, 6):
        found = kernels.linear(torch.from_numpy(x[:count]), packed)
        assert same(found, sums[:count].astype(np.float32))


@pytest.mark.parametrize("build", library.runnable())
def test_more_inputs_than_int32_holds_are_refused(build: str):
    wide = torch.zeros(1, INT8_INPUTS + 1, dtype=torch.int8)
    with refuses(KernelError, "INT8", "131,072 inputs", "131,071", "--quantization fp8"):
        kernels_of(build).pack(Weight(wide, torch.ones(1), DYNAMIC))


@pytest.mark.parametrize("static", [None, SCALE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_a_nan_makes_its_row_nan_and_infinities_are_clamped(
    name: str, dtype: torch.dtype, static: np.float32 | None
):
    kernels = kernels_of(name)
    codes, scale, bias = case(33, 99)
    packed = kernels.pack(weight_of(codes, scale, static))
    x = floats((40, 99), 5)
    x[1, 0], x[7, 98], x[8, 3], x[9, 4] = np.nan, -np.nan, np.inf, -np.inf
    x[10], x[11, 50], x[11, 51] = np.inf, np.inf, np.nan
    rows = torch.from_numpy(x).to(dtype)
    wanted = by_numpy(rows.float().numpy(), codes, scale, bias, static)
    for count in (1, 2, 3, 12, 40):
        found = kernels.linear(rows[:count], packed, torch.from_numpy(bias).to(dtype))
        if dtype is torch.float32:
            assert same(found, wanted[:count])
        there = found.isnan().all(1)
        assert there.tolist() == [row in (1, 7, 11) for row in range(count)]
        assert torch.equal(found.isnan().any(1), there)


@pytest.mark.parametrize("build", library.runnable())
def test_a_row_keeps_its_bits_beside_other_rows_and_on_other_threads(build: str):
    kernels = kernels_of(build)
    codes, scale, bias = case(260, 300)
    packed, added = kernels.pack(weight_of(codes, scale)), torch.from_numpy(bias).bfloat16()
    x = torch.from_numpy(floats((MANY_ROWS, 300), 2)).bfloat16()
    torch.set_num_threads(1)
    whole = kernels.linear(x, packed, added)
    torch.set_num_threads(4)
    assert torch.equal(kernels.linear(x, packed, added), whole)
    order = torch.randperm(MANY_ROWS)
    assert torch.equal(kernels.linear(x[order], packed, added), whole[order])
    for count in (1, 2, 3, 4, 5, 15, 16, 17, 33, 64):
        for first in (0, 13, MANY_ROWS - count):
            part = slice(first, first + count)
            assert torch.equal(kernels.linear(x[part], packed, added), whole[part])


@pytest.mark.parametrize("static", [None, SCALE])
@pytest.mark.parametrize("rows", [1, 3, 20, 70])
@pytest.mark.parametrize("build", library.runnable())
def test_experts_have_the_bits_of_their_products(build: str, rows: int, static: np.float32 | None):
    kernels, num, hidden, inner = kernels_of(build), 4, 70, 48
    sides = [
        [weight_of(codes_of(shape, seed), case(*shape)[1], static) for seed in range(num)]
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    x = torch.from_numpy(floats((rows, hidden), rows)).bfloat16()
    ids = torch.tensor([[row % num, (row + 1) % num] for row in range(rows)], dtype=torch.int32)
    ids = ids.sort(1).values
    shares = torch.full((rows, 2), 0.5)
    gate_up, down = (kernels.pack_experts(side) for side in sides)
    found = kernels.experts(x, ids, shares, ExpertLayers(gate_up, down, GatedActivation.SILU))
    packed = [[kernels.pack(weight) for weight in side] for side in sides]
    for row in range(rows):
        total = torch.zeros(1, hidden)
        for expert in ids[row].tolist():
            between = kernels.gated(
                kernels.linear(x[row : row + 1], packed[0][expert]), GatedActivation.SILU
            )
            total = total + 0.5 * kernels.linear(between, packed[1][expert]).float()
        assert torch.equal(found[row : row + 1], total.bfloat16())


def test_a_recording_repeats_the_product():
    loaded = library.load()
    codes, scale, _ = case(64, 64)
    packed = CpuKernels(loaded).pack(weight_of(codes, scale))
    for rows in (1, 6):
        x = torch.from_numpy(floats((rows, 64), 1)).bfloat16()
        with torch.inference_mode():
            found = record(loaded, Arena(rows), lambda one, x=x: CpuKernels(one).linear(x, packed))
        x.copy_(torch.from_numpy(floats((rows, 64), 2)))
        assert torch.equal(found.recording.replay(), CpuKernels(loaded).linear(x, packed))
