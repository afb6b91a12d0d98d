"""The compiled matrix product: every path of every build that runs here against the reference, and
its bits.

Sums are float32 and products exact, so the bound is 1e-5 of the sum of magnitudes, beside the one
rounding of the result. Rounding of activations to FP8 is compared code by code.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.refusals import refuses
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.cast import encode
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows
from freight.kernels import reference
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.interface import open_library
from freight.operands.weight import Activations, Weight
from freight.settings.device import Threads

BUILDS = library.runnable()
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KINDS = ("rows", "blocks", *FLOATS)
STORED = (Activations.PLAIN, Activations.DYNAMIC, Activations.STATIC)
PATHS = [
    (kind, a) for kind in KINDS for a in STORED if kind not in FLOATS or a is Activations.PLAIN
]
SHAPES = [(1, 1), (48, 64), (7, 99), (130, 127), (33, 129), (260, 300)]  # out_features, in_features
ODD_SHAPES = [(15, 31), (17, 33), (1, 127), (130, 129), (33, 160)]
ROWS = 40
MANY_ROWS = 530  # more than is staged at once


def make(kind: str, activations: Activations, outputs: int, inputs: int) -> Weight:
    matrix = torch.randn(outputs, inputs) / inputs**0.5
    if kind in FLOATS:
        return Weight(matrix.to(FLOATS[kind]))
    stored = (quantize_rows if kind == "rows" else quantize_blocks)(matrix, Format.E4M3FN)
    return Weight(*stored, activations, 0.013 if activations is Activations.STATIC else None)


def magnitudes(weight: Weight) -> Weight:
    data = weight.data
    if data.itemsize > 1:
        return replace(weight, data=data.float().abs())
    return replace(weight, data=(data.view(torch.uint8) & 0x7F).view(data.dtype))


def product(build: str, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    loaded = library.load(build)
    return CpuKernels(loaded).linear(x, CpuKernels(loaded).pack(weight), bias)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=list(FLOATS))
@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("build", BUILDS)
def test_product_is_the_references(build, outputs, inputs, kind, activations, dtype):
    torch.manual_seed(inputs)
    weight = make(kind, activations, outputs, inputs)
    x, bias = torch.randn(ROWS, inputs).to(dtype), torch.randn(outputs).to(dtype)
    exact = weight if weight.data.itemsize == 1 else Weight(weight.data.float())
    expected = reference.linear(x.float(), exact, bias.float())
    bound = 1e-5 * reference.linear(x.float().abs(), magnitudes(weight), bias.float().abs())
    if dtype != torch.float32:
        bound += torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).smallest_normal
    out = product(build, x, weight, bias)
    assert out.dtype == dtype
    assert ((out.float() - expected).abs() <= bound).all()
    few = product(build, x[:3], weight, bias)
    assert ((few.float() - expected[:3]).abs() <= bound[:3]).all()


@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, *ODD_SHAPES])
@pytest.mark.parametrize("build", BUILDS)
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_at_any_place(
    build, outputs, inputs, kind, activations
):
    torch.manual_seed(inputs)
    loaded = library.load(build)
    packed, linear = (
        CpuKernels(loaded).pack(make(kind, activations, outputs, inputs)),
        CpuKernels(loaded).linear,
    )
    x, bias = torch.randn(100, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    whole = linear(x, packed, bias)
    for count in (1, 2, 3, 4, 5, 15, 16, 17, 33, 64):
        for first in (0, 13, 100 - count):
            assert torch.equal(
                linear(x[first : first + count], packed, bias), whole[first : first + count]
            )
    order = torch.randperm(100)
    assert torch.equal(linear(x[order], packed, bias), whole[order])


@pytest.mark.parametrize("outputs", [2032, 2048, 2050, 2081, 2100, 4096, 4112, 4170])
@pytest.mark.parametrize("kind", ["rows", "blocks", "bfloat16"])
@pytest.mark.parametrize("build", BUILDS)
def test_few_rows_over_several_streams_of_weights_have_the_bits_of_many(build, kind, outputs):
    torch.manual_seed(outputs)
    kernels = CpuKernels(library.load(build))
    packed = kernels.pack(make(kind, Activations.PLAIN, outputs, 20))
    x, bias = torch.randn(30, 20).bfloat16(), torch.randn(outputs).bfloat16()
    whole = kernels.linear(x, packed, bias)
    for count in (1, 2, 3, 4):
        assert torch.equal(kernels.linear(x[:count], packed, bias), whole[:count])


@pytest.mark.parametrize("length", [1, 39, 41])
def test_a_bias_has_as_many_values_as_the_weight_outputs(length):
    kernels = CpuKernels(library.load())
    with pytest.raises(AssertionError):
        kernels.linear(
            torch.zeros(2, 20), kernels.pack(Weight(torch.zeros(40, 20))), torch.zeros(length)
        )


def spread(shape: tuple[int, ...], low: int, high: int) -> Tensor:
    return (torch.randn(shape) * torch.exp2(torch.randint(low, high, shape).float())).bfloat16()


def any_bits(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    "draw",
    [
        lambda shape: spread(shape, -60, 60),
        lambda shape: spread(
            shape, -68, -58
        ),  # products and sums around the smallest normal number
        lambda shape: (
            spread(shape, -133, -110) if shape[0] == 20 else spread(shape, -3, 3)
        ),  # subnormal x
        lambda shape: spread(shape, 50, 66),  # products that overflow
        lambda shape: (
            any_bits(shape) if shape[0] == 20 else spread(shape, -3, 3)
        ),  # infinities and NaN in x
        any_bits,
    ],
    ids=["wide", "tiny", "subnormal", "overflow", "any x", "any bits"],
)
@pytest.mark.parametrize("build", BUILDS)
def test_few_rows_have_the_bits_of_many_whatever_their_values(build, draw):
    """Few rows may be summed by other instructions than many: the order of sums, rounding and
    flushing must agree.
    """
    loaded = library.load(build)
    pack, linear = CpuKernels(loaded).pack, CpuKernels(loaded).linear
    for seed in range(8):
        torch.manual_seed(seed)
        inputs = 30 + 61 * seed
        x, matrix = draw((20, inputs)), draw((70, inputs))
        codes = torch.randint(0, 256, (70, inputs), dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        blocks = torch.exp2(torch.randint(-40, 40, (1, -(-inputs // 128))).float())
        fp8 = Weight(codes.view(torch.float8_e4m3fn), blocks)
        for weight in (Weight(matrix), fp8, replace(fp8, scale=torch.ones(70))):
            packed = pack(weight)
            many = linear(x, packed, None)
            for count in (1, 2, 3, 4):
                few = linear(x[7 : 7 + count], packed, None)
                there = many[7 : 7 + count]
                assert torch.equal(few.isnan(), there.isnan())
                assert torch.equal(
                    few.nan_to_num(1.25).view(torch.int16), there.nan_to_num(1.25).view(torch.int16)
                )


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=list(FLOATS))
@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize("build", BUILDS)
def test_products_of_odd_shapes_are_the_references(build, kind, activations, dtype):
    for outputs, inputs in ODD_SHAPES:
        test_product_is_the_references(build, outputs, inputs, kind, activations, dtype)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=list(FLOATS))
@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize("build", BUILDS)
def test_a_float32_result_is_what_is_rounded_otherwise(build, kind, activations, dtype):
    torch.manual_seed(0)
    kernels, weight = CpuKernels(library.load(build)), make(kind, activations, 150, 200)
    packed = kernels.pack(weight)
    x, bias = torch.randn(MANY_ROWS, 200).to(dtype), torch.randn(150).to(dtype)
    exact = weight if weight.data.itemsize == 1 else Weight(weight.data.float())
    expected = reference.linear(x.float(), exact, bias.float())
    bound = 1e-5 * reference.linear(x.float().abs(), magnitudes(weight), bias.float().abs())
    whole = kernels.linear(x, packed, bias, float32=True)
    assert whole.dtype == torch.float32
    assert ((whole - expected).abs() <= bound).all()
    x[3] = torch.nan
    x[4] = 1e30 if dtype is not torch.float16 else 6e4  # sums beyond float16, within float32
    changed = slice(5, None)  # rows that keep their values
    for rows in (1, 5, 40, MANY_ROWS):
        for added in (None, bias):
            found = kernels.linear(x[:rows], packed, added, float32=True)
            rounded = kernels.linear(x[:rows], packed, added)
            assert torch.equal(found.to(dtype).nan_to_num(7), rounded.nan_to_num(7))
            assert torch.equal(found.isnan(), rounded.isnan())
        assert torch.equal(found[changed], whole[:rows][changed])
    assert dtype is torch.float32 or (found[changed] != rounded[changed].float()).any()
    assert found[4].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize("build", BUILDS)
def test_rows_do_not_see_each_other_nor_the_threads(build, kind, activations, dtype):
    torch.manual_seed(0)
    loaded = library.load(build)
    linear = CpuKernels(loaded).linear
    packed = CpuKernels(loaded).pack(make(kind, activations, 150, 200))
    x = torch.randn(MANY_ROWS, 200).to(dtype)
    x[17] = torch.nan  # neighbours that are not numbers change no bit either
    torch.set_num_threads(1)
    whole = linear(x, packed, None)
    assert whole[17].isnan().all()
    whole[17] = 0
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for first, end in [
            *((20, 20 + count) for count in range(1, 34)),
            (15, 20),
            (500, 529),
            (0, MANY_ROWS),
        ]:
            out = linear(x[first:end], packed, None)
            if first <= 17 < end:
                out[17 - first] = 0
            assert torch.equal(out, whole[first:end]), (threads, first, end)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=list(FLOATS))
@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.STATIC])
@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize("build", BUILDS)
def test_activations_become_the_references_codes(build, kind, activations, dtype):
    """Through an identity matrix: midpoints between codes and their neighbours, subnormals, what
    saturates.
    """
    torch.manual_seed(0)
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    infinity = torch.tensor(torch.inf)
    near = torch.cat(
        [codes, middles, torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity)]
    )
    ties = torch.zeros(1024)
    ties[: 2 * len(near)] = torch.cat([near, -near])
    ties[::128] = 448.0  # every group's largest: scales are 1
    random = torch.randn(20, 1024) * torch.logspace(-30, 30, 20)[:, None].to(dtype).float()
    odd = torch.stack([torch.zeros(1024), ties * 5, torch.full((1024,), 3e-38)])
    x = torch.cat([ties[None], random, odd]).to(dtype)
    x[1, 7] = torch.inf
    x[2, 7] = -torch.inf
    x[3] = torch.nan
    scale = torch.ones(8, 8) if kind == "blocks" else torch.ones(1024)
    identity = Weight(
        encode(torch.eye(1024), 1.0, Format.E4M3FN),
        scale,
        activations,
        1.0 if activations is Activations.STATIC else None,
    )
    expected = reference.linear(x, identity)
    assert torch.equal(product(build, x, identity).nan_to_num(1.25), expected.nan_to_num(1.25))


@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize("build", BUILDS)
def test_a_nan_code_makes_its_output_nan_and_no_other(build, kind):
    torch.manual_seed(0)
    weight = make(kind, Activations.PLAIN, 70, 150)
    x = torch.randn(9, 150).bfloat16()
    whole = product(build, x, weight)
    spoilt = weight.data.view(torch.uint8).clone()
    spoilt[3, 149], spoilt[69, 0] = 0x7F, 0xFF
    out = product(build, x, replace(weight, data=spoilt.view(torch.float8_e4m3fn)))
    bad = [3, 69]
    assert out[:, bad].isnan().all()
    out[:, bad] = whole[:, bad]
    assert torch.equal(out, whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", BUILDS)
def test_every_value_that_a_weight_can_hold(build, kind):
    """One output per value: decoding is exact, subnormals and signed zeros included."""
    if kind in FLOATS:
        values = torch.arange(-32768, 32768, 7, dtype=torch.int16).view(
            FLOATS[kind] if kind != "float32" else torch.float16
        )
        values = values[values.isfinite()].to(FLOATS[kind])
        values = values[
            (values == 0) | (values.abs() > 1e-30)
        ]  # bfloat16's own subnormals count as zero
    else:
        codes = torch.arange(256).to(torch.uint8)
        is_nan = codes.view(torch.float8_e4m3fn).float().isnan()
        values = codes[~is_nan].view(torch.float8_e4m3fn)
    weight = Weight(values[:, None].contiguous())
    if kind == "rows":
        weight = replace(weight, scale=torch.ones(len(values)))
    elif kind == "blocks":
        weight = replace(weight, scale=torch.ones(-(-len(values) // 128), 1))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([[1.0], [-0.5]], dtype=dtype)
        expected = (x.float() * values.float()[None]).to(dtype)
        assert torch.equal(product(build, x, weight), expected)


@pytest.mark.parametrize("build", BUILDS)
def test_threads_of_our_own_where_there_is_no_other_pool(build, tmp_path: Path):
    """A process whose torch has no GOMP: the library starts its own workers, and computes the same
    bits.
    """
    torch.manual_seed(0)
    weight, x = make("rows", Activations.DYNAMIC, 260, 300), torch.randn(ROWS, 300).bfloat16()
    functions = open_library(Path(shutil.copy(library.path_of(build), tmp_path)))
    functions.freight_init(None)
    alone = library.Library(build, functions)
    linear, packed = CpuKernels(alone).linear, CpuKernels(alone).pack(weight)
    expected = product(build, x, weight)
    for threads in (1, 3, 2, 3):
        torch.set_num_threads(threads)
        for _ in range(20):
            assert torch.equal(linear(x, packed, None), expected)


@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize("build", BUILDS)
def test_how_weights_are_prefetched_changes_no_bit(build, kind, activations):
    torch.manual_seed(0)
    loaded = library.load(build)
    packed, linear = (
        CpuKernels(loaded).pack(make(kind, activations, 150, 200)),
        CpuKernels(loaded).linear,
    )
    x = torch.randn(MANY_ROWS, 200).bfloat16()
    try:
        for rows in (1, 2, 5, MANY_ROWS):
            outs = []
            for non_temporal in (False, True):
                loaded.set_prefetch(non_temporal)
                outs.append(linear(x[:rows], packed, None))
            assert torch.equal(*outs)
    finally:
        loaded.set_prefetch(False)


@pytest.mark.parametrize("build", BUILDS)
def test_python_threads_with_thread_counts_of_their_own_get_the_same_bits(build):
    torch.manual_seed(0)
    loaded = library.load(build)
    packed, linear = (
        CpuKernels(loaded).pack(make("rows", Activations.DYNAMIC, 600, 1000)),
        CpuKernels(loaded).linear,
    )
    x = torch.randn(33, 1000).bfloat16()
    expected = linear(x, packed, None)
    start = threading.Barrier(4)

    def several(count: int) -> list[tuple[int, bool]]:
        with Threads(count):
            start.wait(300)
            return [
                (torch.get_num_threads(), torch.equal(linear(x, packed, None), expected))
                for _ in range(30)
            ]

    with ThreadPoolExecutor(4) as pool:
        for count, found in zip((1, 2, 3, 5), pool.map(several, (1, 2, 3, 5)), strict=True):
            assert found == [(count, True)] * 30


@pytest.mark.parametrize("build", BUILDS)
def test_views_of_x_and_no_rows(build):
    torch.manual_seed(0)
    weight = make("rows", Activations.PLAIN, 20, 30)
    x = torch.randn(30, 8).bfloat16()
    assert torch.equal(product(build, x.T, weight), product(build, x.T.contiguous(), weight))
    assert product(build, x.T[:0], weight).shape == (0, 20)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float64])
def test_other_weights_are_refused_by_name(build, dtype):
    with refuses(KernelError, f"{dtype}", "cpu", "--kernels reference"):
        CpuKernels(library.load(build)).pack(Weight(torch.empty(4, 4, dtype=dtype)))


@pytest.mark.parametrize("build", BUILDS)
def test_a_packed_weight_is_as_large_as_its_format_says(build):
    weight = make("rows", Activations.PLAIN, 256, 512)
    assert CpuKernels(library.load(build)).pack(weight).num_bytes == 256 * 512 + 256 * 4
