"""The emulation of AMX's tile instructions that `make test-tiles` compiles the AMX build with
(tiles/emulated_tiles.h).

Its numbers against TDPBF16PS in exact fractions, each result rounded once; its faults one by one.
Where the machine has AMX, the instructions themselves are held to the same.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freight.settings import cpu_builds
from freight.settings.device import cpu_features

SOURCES = Path(__file__).parent / "tiles"
EMULATED = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-include", str(SOURCES / "emulated_tiles.h"))
REAL = ("-mavx512f", "-mamx-tile", "-mamx-bf16")
LACKS = {*cpu_builds.X86_BUILDS["avx512"]} - {*cpu_features()}
DEFAULT, FLUSHING, TO_ZERO = (
    0x1F80,
    0x9FC0,
    0x7F80,
)  # MXCSR: nearest; subnormals are zeros; rounded to zero

pytestmark = pytest.mark.skipif(
    bool(LACKS), reason=f"this processor lacks {', '.join(sorted(LACKS))}"
)


def compiled(flags: tuple[str, ...], folder: Path) -> Path:
    path = folder / "probe.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [
        *compiler,
        "-std=c++17",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-maybe-uninitialized",
    ]
    command += ["-ffp-contract=off", "-fPIC", "-shared"]
    try:
        subprocess.run([*command, *flags, str(SOURCES / "probe.cpp"), "-o", str(path)], check=True)
    except FileNotFoundError:
        pytest.skip(f"there is no compiler {compiler[0]}")
    return path


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(EMULATED, tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module", params=["emulated", "real"])
def tiles(
    request: pytest.FixtureRequest, emulated: Path, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    if request.param == "emulated":
        return ctypes.CDLL(str(emulated))
    if not {"amx_tile", "amx_bf16"} <= {*cpu_features()} or cpu_builds.tile_obstacle():
        pytest.skip("this processor or system has no matrix tiles")
    return ctypes.CDLL(str(compiled(REAL, tmp_path_factory.mktemp("real"))))


def flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def rounded_sum(first: float, second: float) -> float:
    """Of two float64 numbers, to float32: nearest even; what is subnormal after rounding becomes
    zero.
    """
    if (
        not (math.isfinite(first) and math.isfinite(second))
        or Fraction(first) + Fraction(second) == 0
    ):
        return first + second
    exact = Fraction(first) + Fraction(second)
    exponent = abs(exact).numerator.bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    value = round(exact / unit) * unit
    if abs(value) >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return flushed(float(value))


def by_definition(a: Tensor, b: Tensor, c: Tensor) -> list[list[float]]:
    """TDPBF16PS. a: [rows, pairs, 2], b: [pairs, columns, 2], bfloat16; c: [rows, columns],
    float32.
    """
    out = []
    for row, sums in zip(a.tolist(), c.tolist(), strict=True):
        even_odd = [[0.0, 0.0] for _ in sums]
        for of_a, line in zip(row, b.tolist(), strict=True):
            for total, of_b in zip(even_odd, line, strict=True):
                for i in range(2):  # products of bfloat16 are exact in float64
                    total[i] = rounded_sum(flushed(of_a[i]) * flushed(of_b[i]), total[i])
        out.append(
            [
                rounded_sum(flushed(one), rounded_sum(*total))
                for one, total in zip(sums, even_odd, strict=True)
            ]
        )
    return out


def product(tiles: ctypes.CDLL, a: Tensor, b: Tensor, c: Tensor, mxcsr: int = DEFAULT) -> Tensor:
    """c + a @ b by one instruction; what lies around c in memory stays."""
    rows, columns, pairs = len(a), b.shape[1], len(b)
    memory_a, memory_b = torch.full((2, 16, 32), 7.0, dtype=torch.bfloat16)
    memory_c = torch.full((16, 16), 7.0)
    memory_a[:rows, : 2 * pairs], memory_b[:pairs, : 2 * columns] = (
        a.reshape(rows, -1),
        b.reshape(pairs, -1),
    )
    memory_c[:rows, :columns] = c
    at = [ctypes.c_void_p(one.data_ptr()) for one in (memory_a, memory_b, memory_c)]
    assert tiles.product(*at, rows, pairs, columns, mxcsr) == mxcsr
    assert bool((memory_c[rows:] == 7).all())
    assert bool((memory_c[:, columns:] == 7).all())
    return memory_c[:rows, :columns]


def same(got: Tensor, wanted: list[list[float]]) -> bool:
    """The same numbers and signs of zeros, NaN in the same places."""
    expected = torch.tensor(wanted, dtype=torch.float32)
    nan = expected.isnan()
    bits = torch.equal(got[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    return torch.equal(got.isnan(), nan) and bits


def scaled(shape: tuple[int, ...], exponent: int, spread: int) -> Tensor:
    """Numbers of either sign about 2 ** exponent."""
    return torch.ldexp(
        torch.randn(shape, dtype=torch.float64),
        torch.randint(exponent - spread, exponent + spread, shape),
    )


def any_bits(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("mxcsr", [DEFAULT, FLUSHING, TO_ZERO])
@pytest.mark.parametrize(
    ("exponents", "of_sums"),
    [
        ((0, 0), 2),
        ((-63, -63), -126),
        ((-126, 3), -126),
        ((-70, -55), -128),
        ((64, 60), 127),
        ((-20, 10), 0),
    ],
    ids=["ordinary", "small products", "subnormal inputs", "subnormal sums", "overflow", "mixed"],
)
def test_products_are_those_of_the_definition(tiles, exponents, of_sums, mxcsr) -> None:
    torch.manual_seed(0)
    a, b = (
        scaled((16, 16, 2), exponents[0], 4).bfloat16(),
        scaled((16, 16, 2), exponents[1], 4).bfloat16(),
    )
    c = scaled((16, 16), of_sums, 3).float()
    assert same(product(tiles, a, b, c, mxcsr), by_definition(a, b, c))


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("columns", [1, 7, 16])
@pytest.mark.parametrize("pairs", [1, 5, 16])
def test_a_tile_has_the_rows_and_columns_that_were_configured(tiles, rows, columns, pairs) -> None:
    torch.manual_seed(1)
    a, b, c = (
        torch.randn(rows, pairs, 2).bfloat16(),
        torch.randn(pairs, columns, 2).bfloat16(),
        torch.randn(rows, columns),
    )
    assert same(product(tiles, a, b, c), by_definition(a, b, c))


def test_infinities_and_nan_come_out_where_they_should(tiles) -> None:
    torch.manual_seed(2)
    a, b, c = any_bits((16, 2, 2)), any_bits((2, 16, 2)), any_bits((16, 16)).float()
    a[0, 0, 0], a[1, 1, 1], c[2, 3] = math.inf, math.nan, -math.inf
    wanted = by_definition(a, b, c)
    assert any(math.isnan(one) for one in wanted[0]) or any(math.isinf(one) for one in wanted[0])
    assert all(math.isnan(one) for one in wanted[1])
    assert same(product(tiles, a, b, c), wanted)


@pytest.mark.parametrize(("exponent", "expected"), [(-75, 0.0), (-76, 2.0**-126)])
def test_a_sum_is_subnormal_or_not_after_it_is_rounded(tiles, exponent, expected) -> None:
    """2**-126 - 2**-150 has 24 bits and is flushed; 2**-126 less half of that rounds to the
    smallest normal number.
    """
    a = torch.tensor([[[2.0**-63, 0.0], [2.0**-75, 0.0]]]).bfloat16()
    b = torch.tensor([[[2.0**-63, 0.0]], [[-(2.0**exponent), 0.0]]]).bfloat16()
    assert product(tiles, a, b, torch.zeros(1, 1)).item() == expected
    assert by_definition(a, b, torch.zeros(1, 1)) == [[expected]]


def test_even_and_odd_inputs_are_summed_apart_before_they_meet_the_sum(tiles) -> None:
    """2**-24 twice is lost in 1 one by one, and not where the two meet first."""
    small = torch.full((1, 1, 2), 2.0**-12).bfloat16()
    assert product(tiles, small, small, torch.ones(1, 1)).item() == 1 + 2.0**-23
    one = torch.tensor([[[1.0, 0.0]]]).bfloat16()
    pairs = torch.cat((one, small), 1)
    assert product(tiles, pairs, pairs.transpose(0, 1), torch.zeros(1, 1)).item() == 1


@pytest.mark.parametrize("zeroed", [False, True])
def test_loads_and_stores_go_by_their_stride(tiles, zeroed) -> None:
    memory, out = (
        torch.arange(1, 49, dtype=torch.int32),
        torch.full((16, 16), -1, dtype=torch.int32),
    )
    tiles.moved(
        ctypes.c_void_p(memory.data_ptr()), 12 * 4, ctypes.c_void_p(out.data_ptr()), int(zeroed)
    )
    wanted = torch.full((16, 16), -1, dtype=torch.int32)
    wanted[:3, :2] = 0 if zeroed else torch.tensor([[1, 2], [13, 14], [25, 26]])
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("load_without_configuration", "TILELOADD: this thread has configured no tiles (0)"),
        ("zero_after_release", "TILEZERO: this thread has configured no tiles (0)"),
        ("load_of_another_tile", "TILELOADD: the tile is not configured (1)"),
        ("store_of_another_tile", "TILESTORED: the tile is not configured (5)"),
        ("too_many_rows", "LDTILECFG: no tile has so many rows (17)"),
        ("too_many_bytes", "LDTILECFG: no row has so many bytes (68)"),
        (
            "rows_without_bytes",
            "LDTILECFG: a tile has rows without bytes, or bytes without rows (3)",
        ),
        ("unknown_palette", "LDTILECFG: there is no such palette (2)"),
        ("ninth_tile", "LDTILECFG: a reserved byte is not 0 (32)"),
        ("same_operands", "TDPBF16PS: operands are the same tile (0)"),
        ("rows_that_differ", "TDPBF16PS: the first operand has other rows than the sums (15)"),
        (
            "columns_that_differ",
            "TDPBF16PS: the second operand has other columns than the sums (32)",
        ),
        (
            "pairs_that_differ",
            "TDPBF16PS: the second operand has other rows than the first has pairs (8)",
        ),
    ],
)
def test_wrong_use_ends_the_process_and_is_named(emulated: Path, use: str, said: str) -> None:
    code = f"import ctypes; ctypes.CDLL({str(emulated)!r}).{use}()"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert ran.returncode == -6, (ran.returncode, ran.stderr)
    assert ran.stderr.strip() == said
