"""Linear over FP8 weights in Triton against the reference: every format, scale and treatment of
activations.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.fp8.cast import decode
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows
from freight.kernels import reference
from freight.kernels.triton import elementwise, linear
from freight.kernels.triton.formats import Target, current_target
from freight.kernels.triton.rows import WIDE, Quantized, quantize
from freight.operands.activation import GatedActivation
from freight.operands.weight import Activations, Weight

OF_FP8 = (Activations.PLAIN, Activations.DYNAMIC, Activations.STATIC)
GELU = GatedActivation.GELU_TANH

FP8 = [format for format in Format if format.is_fp8]


def make(
    format: Format, blocks: bool, activations: Activations, columns: int, outputs: int, device: str
) -> Weight:
    weight = torch.randn(outputs, columns) / columns**0.5
    data, scale = (quantize_blocks if blocks else quantize_rows)(weight, format)
    static = 0.013 if activations is Activations.STATIC else None
    return Weight(data.to(device), scale.to(device), activations, static)


def assert_close(got: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """Against the reference of the same input in float32, whose activations are rounded alike.

    Matrix units that multiply FP8 keep fewer bits of their sums.
    """
    expected = reference.linear(x.float(), weight, None if bias is None else bias.float())
    assert got.dtype == x.dtype
    bound = (
        torch.finfo(x.dtype).eps * expected.abs()
        + (1e-3 if x.is_cuda else 2e-5) * expected.abs().max()
    )
    assert ((got.float() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("format", "dtype"),
    [*((format, torch.bfloat16) for format in FP8), (Format.E4M3FN, torch.float32)],
)
@pytest.mark.parametrize("activations", OF_FP8)
@pytest.mark.parametrize("blocks", [False, True])
def test_products(dtype, activations, blocks, format, device):
    torch.manual_seed(0)
    weight = make(format, blocks, activations, 300, 130, device)
    x, bias = (torch.randn(9, 300) * 3).to(dtype).to(device), torch.randn(130).to(dtype).to(device)
    assert_close(linear.linear(current_target(), x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.PLAIN])
@pytest.mark.parametrize("blocks", [False, True])
def test_other_numbers_of_rows(rows, activations, blocks, device):
    torch.manual_seed(1)
    weight = make(Format.E4M3FN, blocks, activations, 256, 64, device)
    x = torch.randn(rows, 256).half().to(device)
    assert_close(linear.linear(current_target(), x, weight), x, weight, None)


def assert_float32(x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """A result in float32 is the sum that is otherwise rounded, and not a value of x's dtype."""
    product = partial(linear.linear, current_target(), x, weight, bias)
    found = product(float32=True)
    assert found.dtype == torch.float32
    expected = reference.linear(x, weight, bias, float32=True)
    bound = (1e-3 if x.is_cuda and weight.scale is not None else 2e-5) * expected.abs().max()
    assert ((found - expected).abs() <= bound).all()
    assert (found.to(x.dtype).float() != found).any()
    rounds = torch.finfo(x.dtype).eps * found.abs() + bound
    assert ((product().float() - found).abs() <= rounds).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", OF_FP8)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_float32_results(rows, blocks, activations, dtype, device):
    torch.manual_seed(3)
    weight = make(Format.E4M3FN, blocks, activations, 256, 64, device)
    x, bias = torch.randn(rows, 256).to(dtype).to(device), torch.randn(64).to(dtype).to(device)
    assert_float32(x, weight, bias)
    assert_float32(x, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_float32_results_of_sixteen_bit_weights(rows, dtype, device):
    torch.manual_seed(3)
    weight = Weight((torch.randn(130, 300) / 300**0.5).to(dtype).to(device))
    x, bias = torch.randn(rows, 300).to(dtype).to(device), torch.randn(130).to(dtype).to(device)
    assert_float32(x, weight, bias)
    assert_float32(x, weight, None)


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_torch_makes_float32_of_sixteen_bits_on_nvidia_alone(backend, monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch,
        "mm",
        lambda x, matrix, **options: calls.append(options) or x.float() @ matrix.float(),
    )
    monkeypatch.setattr(linear, "matmul", lambda *_: torch.zeros(3, 5))
    x, weight = torch.randn(3, 8).bfloat16(), Weight(torch.randn(5, 8).bfloat16())
    target = Target(backend, 90 if backend == "cuda" else "gfx942", 132)
    assert linear.linear(target, x, weight, float32=True).shape == (3, 5)
    assert calls == ([{"out_dtype": torch.float32}] if backend == "cuda" else [])


def assert_quantized_as_the_reference(x: Tensor, weight: Weight) -> None:
    rows, inputs = quantize(current_target(), x, weight), x.shape[1]
    widened = rows.scale.repeat_interleave(128 if weight.scale.ndim == 2 else inputs, 1)[:, :inputs]
    values, factor = reference._activations(x, weight)
    expected = values if factor is None else values * factor
    assert torch.equal((decode(rows.codes) * widened).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.STATIC])
def test_activations_are_quantized_to_the_same_bytes(format, blocks, activations, device):
    torch.manual_seed(2)
    x = torch.randn(5, 300).to(device)
    x[0], x[1, 0], x[2, 1] = 0.0, torch.inf, torch.nan
    assert_quantized_as_the_reference(x, make(format, blocks, activations, 300, 16, device))


@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.STATIC])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("largest", [0, -1])
def test_a_row_that_no_program_holds_at_once_is_quantized_to_the_same_bytes(
    largest, blocks, activations, device
):
    """A part of a group, and of a chunk of groups, at its end; its largest value in its first chunk
    or in its last.
    """
    torch.manual_seed(2)
    size = 53300
    assert size > WIDE
    x = torch.randn(2, size).bfloat16().to(device)[:, :-1]  # rows with a stride of their own
    x[0, largest], x[1, 1] = -40.0, torch.inf
    assert_quantized_as_the_reference(
        x, make(Format.E4M3FN, blocks, activations, size - 1, 16, device)
    )


def test_sixteen_bit_weights_are_torch_s(device):
    x, weight, bias = (
        torch.randn(3, 8).bfloat16(),
        torch.randn(5, 8).bfloat16(),
        torch.randn(5).bfloat16(),
    )
    got = linear.linear(current_target(), x.to(device), Weight(weight.to(device)), bias.to(device))
    assert torch.equal(
        got, torch.nn.functional.linear(x.to(device), weight.to(device), bias.to(device))
    )


@pytest.mark.parametrize("activations", OF_FP8)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_quantized_where_it_is_made_is_what_linear_quantizes(
    dtype, blocks, activations, monkeypatch, device
):
    torch.manual_seed(2)
    target, weight = current_target(), make(Format.E4M3FN, blocks, activations, 300, 16, device)
    x, delta, gate_up = (
        (torch.randn(3, size) * 3).to(dtype).to(device) for size in (300, 300, 600)
    )
    norm = torch.rand(300).to(dtype).to(device)
    total, plain = elementwise.add_rms_norm(target, x, delta, norm, 1e-5)
    same, made = elementwise.add_rms_norm(target, x, delta, norm, 1e-5, weight)
    assert torch.equal(same, total)
    pairs = [
        (made, plain),
        (
            elementwise.gated(target, gate_up, GELU, weight),
            elementwise.gated(target, gate_up, GELU),
        ),
    ]
    monkeypatch.setattr(elementwise, "WIDE", 0)
    pairs.append((elementwise.gated(target, gate_up, GELU, weight), pairs[1][1]))
    for one, other in pairs:
        assert isinstance(one, Quantized) == (activations is not Activations.PLAIN)
        assert torch.equal(linear.linear(target, one, weight), linear.linear(target, other, weight))


@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.PLAIN])
@pytest.mark.parametrize(
    ("columns", "blocks"),
    [(300, False), (640, True), *(pytest.param(*case, marks=pytest.mark.slow)
     for case in ((96, False), (96, True), (300, True), (512, False), (512, True), (640, False)))],
)  # fmt: skip
def test_rows_beside_it_change_no_bit_of_a_row(columns, blocks, activations, device):
    """Within 1 to 16 rows, and within 17 to 64; sums whose chains have equal numbers of inputs, or
    none, or a part.
    """
    torch.manual_seed(4)
    weight = make(Format.E4M3FN, blocks, activations, columns, 70, device)
    x = torch.randn(40, columns).bfloat16().to(device)
    product = partial(linear.linear, current_target(), weight=weight)
    few, more = product(x[:16]), product(x)
    assert_close(few, x[:16], weight, None)
    for first, rows in ((0, 1), (7, 2), (3, 13)):
        assert torch.equal(product(x[first : first + rows]), few[first : first + rows])
    assert torch.equal(product(x[5:25]), more[5:25])


@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.PLAIN])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("parts", "swapped"), [(1, True), (3, True), (2, False)])
def test_inputs_in_parts_and_the_weight_first(
    parts, swapped, blocks, activations, monkeypatch, device
):
    """As Hopper's tiles of few rows do. The last part is shorter than the others."""
    torch.manual_seed(5)
    weight = make(Format.E4M3FN, blocks, activations, 1100, 130, device)
    x, bias = torch.randn(5, 1100).bfloat16().to(device), torch.randn(130).bfloat16().to(device)
    tile = linear.Tile(16, 64, 128, 4, 2, swapped=swapped)
    monkeypatch.setattr(linear, "matmul_tile", lambda *_: tile)
    part = triton.cdiv(triton.cdiv(1100, tile.inputs), parts) * tile.inputs
    monkeypatch.setattr(linear, "part_of", lambda *_: min(1100, part))
    product = partial(linear.linear, current_target(), weight=weight, bias=bias)
    found = product(x)
    assert_close(found, x, weight, bias)
    assert not linear.arrivals(x.device).any()
    assert torch.equal(product(x), found)
    assert torch.equal(product(x[3:4]), found[3:4])


def test_products_of_few_rows_fill_the_gpu():
    """The shapes of an 8B model on 132 units: enough programs, and no part without inputs."""
    hopper = Target("cuda", 90, 132)
    for rows in (1, 16, 17, 64):
        for outputs, size in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            tile = linear.matmul_tile(hopper, rows, outputs, False, tl.float8e4nv)
            part = linear.part_of(hopper, tile, outputs, size, tl.float8e4nv)
            parts = triton.cdiv(size, part)
            wanted = 1.8 if rows <= 16 else 1.0
            assert triton.cdiv(outputs, tile.outputs) * parts >= wanted * hopper.units
            tiles = triton.cdiv(size, tile.inputs)
            assert (parts - 1) * triton.cdiv(tiles, parts) < tiles
    alone = linear.matmul_tile(hopper, 1, 2**17, False, tl.float8e4nv)
    assert linear.part_of(hopper, alone, 2**17, 4096, tl.float8e4nv) == 4096
    assert linear.part_of(Target("cuda", 80, 108), alone, 4096, 4096, tl.float8e4nv) == 4096


@pytest.mark.parametrize("dot", [tl.float32, tl.bfloat16, tl.float8e4nv])
@pytest.mark.parametrize("blocks", [False, True])
def test_every_tile_of_a_product_with_parts_has_an_arrival(blocks, dot):
    """For any number of rows; and the parts are those that `matmul_kernel` adds up."""
    for target in (Target("cuda", 90, 132), Target("cuda", 100, 148)):
        for rows in (1, 16, 17, 64, 65, 8192):
            for outputs, size in ((64, 768), (1000, 4096), (4096, 14336), (28672, 5000)):
                tile = linear.matmul_tile(target, rows, outputs, blocks, dot)
                parts = triton.cdiv(size, linear.part_of(target, tile, outputs, size, dot))
                tiles = triton.cdiv(outputs, tile.outputs) * triton.cdiv(rows, tile.rows)
                assert parts == 1 or tiles <= linear.MOST_TILES
                tiles = triton.cdiv(size, tile.inputs)
                assert triton.cdiv(tiles, triton.cdiv(tiles, parts)) == parts


@pytest.mark.parametrize("fast", [False, True])
def test_one_constant_chooses_the_sums_of_torch_s_product(fast, monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *operands, **options: calls.append(options) or operands[0]
    )
    assert linear.FAST_SUMS is False
    monkeypatch.setattr(linear, "FAST_SUMS", fast)
    weight = make(Format.E4M3FN, False, Activations.DYNAMIC, 32, 16, "cpu")
    x = Quantized(weight.data.repeat(5, 1), torch.ones(80, 1), torch.bfloat16)
    linear.linear(Target("cuda", 90, 132), x, weight)
    assert calls == [{"out_dtype": torch.bfloat16, "use_fast_accum": fast}]


def test_torch_s_product_of_fp8_rounds_so_a_float32_result_is_not_its(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", None)
    monkeypatch.setattr(linear, "matmul", lambda *operands: operands[-1])
    weight = make(Format.E4M3FN, False, Activations.DYNAMIC, 32, 16, "cpu")
    x = Quantized(weight.data.repeat(5, 1), torch.ones(80, 1), torch.bfloat16)
    assert linear.linear(Target("cuda", 90, 132), x, weight, float32=True) is torch.float32
