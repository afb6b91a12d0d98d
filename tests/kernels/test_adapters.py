"""What adapters add to rows: the reference and every build against float64, and what a row's bits
may not depend on.

Sums in float32 have the reference's values in another order: before the one rounding a result is
within 2 ** -18 of the magnitudes that are summed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.recording import Arena, record
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.adapters import NO_ADAPTER, AdapterBank
from freight.operands.weight import Weight

BUILDS = library.runnable()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# inputs, and where the outputs of each part end
SHAPES = {
    "one output": (1, (1,)),
    "odd": (31, (7, 40, 45)),
    "merged": (300, (256, 320, 384)),
    "an odd tail": (2050, (1000, 1301)),
    "wide": (8192, (48,)),
}
SLOTS, MAX_RANK = 5, 19


def kernels_of(name: str) -> KernelSet:
    return REFERENCE if name == "reference" else CpuKernels(library.load(name))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def bank_of(
    in_features: int, ends: tuple[int, ...], dtype: torch.dtype, max_rank: int = MAX_RANK
) -> AdapterBank:
    """Parts of different ranks, 0 and max_rank among them. What no rank uses is NaN."""
    parts = len(ends)
    choices = torch.tensor([max_rank, 0, 1, min(max_rank, 8), min(max_rank, 6)])
    ranks = choices[torch.arange(SLOTS * parts) % len(choices)].view(SLOTS, parts).int()
    ranks[0] = max_rank
    a = normal(SLOTS, parts, max_rank, in_features, dtype=dtype)
    b = normal(SLOTS, max_rank, ends[-1], dtype=dtype)
    bank = AdapterBank(a, b, ranks, torch.rand(SLOTS, parts) * 2 + 0.1, ends)
    for slot in range(SLOTS):
        for part, (begin, end) in enumerate(bank.outputs):
            a[slot, part, ranks[slot, part] :] = torch.nan
            b[slot, ranks[slot, part] :, begin:end] = torch.nan
    return bank


def exact(y: Tensor, x: Tensor, bank: AdapterBank, adapters: Tensor) -> tuple[Tensor, Tensor]:
    """The results in float64 before they are rounded, and the magnitudes of what is summed."""
    results = y.double()
    magnitudes = results.abs()
    for row, slot in enumerate(adapters.tolist()):
        if slot == NO_ADAPTER:
            continue
        for part, (begin, end) in enumerate(bank.outputs):
            rank = int(bank.ranks[slot, part])
            a = bank.a[slot, part, :rank].double()
            b = bank.b[slot, :rank, begin:end].double()
            scaling = bank.scalings[slot, part].double()
            results[row, begin:end] += scaling * (x[row].double() @ a.T @ b)
            magnitudes[row, begin:end] += scaling * (x[row].double().abs() @ a.abs().T @ b.abs())
    return results, magnitudes


def assert_near(out: Tensor, y: Tensor, x: Tensor, bank: AdapterBank, adapters: Tensor) -> None:
    results, magnitudes = exact(y, x, bank, adapters)
    rounding = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    bound = magnitudes * 2**-18 + results.abs() * rounding * 1.01 + 1e-7
    assert ((out.double() - results).abs() <= bound).all()


def assert_untouched(out: Tensor, y: Tensor, bank: AdapterBank, adapters: Tensor) -> None:
    """Rows without an adapter and parts of rank 0 keep their bits."""
    for row, slot in enumerate(adapters.tolist()):
        for part, (begin, end) in enumerate(bank.outputs):
            if slot == NO_ADAPTER or not bank.ranks[slot, part]:
                same = torch.equal(
                    out[row, begin:end].view(torch.int8), y[row, begin:end].view(torch.int8)
                )
                assert same


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("build", ["reference", *BUILDS])
def test_every_row_gets_what_its_adapter_adds(build, shape, dtype):
    torch.manual_seed(0)
    in_features, ends = shape
    bank = bank_of(in_features, ends, dtype)
    adapters = torch.tensor([3, -1, 0, 0, 1, 0, 4, 0, 0, 2, -1, 0, 3], dtype=torch.int32)
    x = normal(len(adapters), in_features, dtype=dtype) / in_features**0.5
    y = normal(len(adapters), ends[-1], dtype=dtype)
    y[1, 0] = -0.0
    out = y.clone()
    assert kernels_of(build).add_adapters(out, x, bank, adapters) is out
    assert_near(out, y, x, bank, adapters)
    assert_untouched(out, y, bank, adapters)


@pytest.mark.parametrize("build", ["reference", *BUILDS])
def test_rows_of_a_larger_tensor(build):
    torch.manual_seed(0)
    bank = bank_of(100, (60, 90), torch.bfloat16)
    adapters = torch.tensor([0, 3, -1, 0, 4, 0, 0], dtype=torch.int32)
    wide = normal(7, 150, dtype=torch.bfloat16)
    x = wide[:, 20:120]
    y = normal(7, 90, dtype=torch.bfloat16)
    kernels = kernels_of(build)
    out = kernels.add_adapters(y.clone(), x, bank, adapters)
    expected = kernels.add_adapters(y.clone(), x.contiguous(), bank, adapters)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("build", ["reference", *BUILDS])
def test_no_rows_and_no_adapters(build):
    bank = bank_of(40, (30,), torch.bfloat16)
    none = torch.full((3,), NO_ADAPTER, dtype=torch.int32)
    kernels = kernels_of(build)
    y = normal(3, 30, dtype=torch.bfloat16)
    out = kernels.add_adapters(y.clone(), torch.full((3, 40), torch.nan).bfloat16(), bank, none)
    assert torch.equal(out, y)
    empty = kernels.add_adapters(y[:0].clone(), normal(0, 40).bfloat16(), bank, none[:0])
    assert empty.shape == (0, 30)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("build", ["reference", *BUILDS])
def test_nan_and_infinity_stay_in_their_rows_and_outputs(build, dtype):
    torch.manual_seed(0)
    bank = bank_of(50, (20, 41), dtype)
    adapters = torch.zeros(6, dtype=torch.int32)
    x = normal(6, 50, dtype=dtype)
    x[1, 49] = torch.nan
    x[2, 0] = torch.inf
    y = normal(6, 41, dtype=dtype)
    y[4, 40] = torch.inf
    bank.b[0, 3, 7] = torch.nan
    out = kernels_of(build).add_adapters(y.clone(), x, bank, adapters)
    results, _ = exact(y, x, bank, adapters)
    assert torch.equal(out.isnan(), results.isnan())
    assert torch.equal(out == torch.inf, results == torch.inf)
    assert torch.equal(out == -torch.inf, results == -torch.inf)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("build", BUILDS)
def test_rows_do_not_see_each_other_nor_the_threads(build, rows):
    """Among rows of other adapters, of the same one, and alone; in chunks of the working memory."""
    torch.manual_seed(rows)
    bank = bank_of(2050, (700, 1101), torch.bfloat16)
    kernels = CpuKernels(library.load(build))
    x = normal(rows, 2050, dtype=torch.bfloat16)
    y = normal(rows, 1101, dtype=torch.bfloat16)

    def added(chosen: Tensor, adapters: Tensor, threads: int) -> Tensor:
        torch.set_num_threads(threads)
        return kernels.add_adapters(y[chosen].clone(), x[chosen], bank, adapters)

    mixed = (torch.arange(rows) % (SLOTS + 1) - 1).int()
    everything = torch.arange(rows)
    whole = added(everything, mixed, 1)
    assert torch.equal(added(everything, mixed, 2), whole)
    assert torch.equal(added(everything.flip(0), mixed.flip(0), 3), whole.flip(0))
    uniform = added(everything, torch.zeros_like(mixed), 2)
    for row in range(0, rows, 7):
        single = everything[row : row + 1]
        assert torch.equal(added(single, mixed[row : row + 1], 2), whole[row : row + 1])
        of_first = added(single, torch.zeros(1, dtype=torch.int32), 1)
        assert torch.equal(of_first, uniform[row : row + 1])


@pytest.mark.parametrize("build", BUILDS)
def test_more_rows_than_the_working_memory_takes_at_once(build):
    """2 ** 20 sums at a time: 1024 rows of four parts of rank 256."""
    torch.manual_seed(0)
    bank = bank_of(16, (4, 8, 12, 16), torch.float32, max_rank=256)
    kernels = CpuKernels(library.load(build))
    x = normal(2100, 16)
    y = normal(2100, 16)
    adapters = (torch.arange(2100) % (SLOTS + 1) - 1).int()
    out = kernels.add_adapters(y.clone(), x, bank, adapters)
    for row in (0, 1, 1023, 1024, 1025, 2047, 2048, 2099):
        this = slice(row, row + 1)
        expected = kernels.add_adapters(y[this].clone(), x[this], bank, adapters[this])
        assert torch.equal(out[this], expected)


def test_a_recording_reads_adapters_and_bank_anew():
    """Slots change between steps, and adapters are loaded into them, while addresses stay."""
    torch.manual_seed(0)
    loaded = library.load()
    plain = CpuKernels(loaded)
    weight = plain.pack(Weight(normal(90, 64, dtype=torch.bfloat16)))
    bank = bank_of(64, (60, 90), torch.bfloat16)
    x = normal(4, 64, dtype=torch.bfloat16)
    adapters = torch.tensor([0, -1, 3, 0], dtype=torch.int32)

    def projection(kernels: CpuKernels) -> Tensor:
        return kernels.add_adapters(kernels.linear(x, weight), x, bank, adapters)

    with torch.inference_mode():
        recorded = record(loaded, Arena(4), lambda of: projection(CpuKernels(of)))
        assert recorded.recording is not None, recorded.obstacle
        assert torch.equal(recorded.output, projection(plain))
        adapters.copy_(torch.tensor([2, 4, -1, 1]))
        assert torch.equal(recorded.recording.replay(), projection(plain))
        other = bank_of(64, (60, 90), torch.bfloat16, max_rank=7)
        bank.a[4, :, :7] = other.a[0]
        bank.b[4, :7] = other.b[0]
        bank.ranks[4] = 7
        bank.scalings[4] = 3.0
        x.copy_(normal(4, 64))
        assert torch.equal(recorded.recording.replay(), projection(plain))
        adapters.fill_(NO_ADAPTER)
        assert torch.equal(recorded.recording.replay(), plain.linear(x, weight))
