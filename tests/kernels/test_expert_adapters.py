"""What adapters add to the products of experts: every build has the bits of the loop over its own
products and `add_adapters`, and the reference the values of weights that have the adapters in them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.test_cpu_experts import FLOATS, PATHS, SILU, Mixture, chosen
from torch import Tensor

from freight.kernels import reference_experts as loop
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.recording import Arena, record
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.activation import Activation
from freight.operands.adapters import NO_ADAPTER, AdapterBank, ExpertBanks
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Activations, Weight

BUILDS = library.runnable()
SLOTS = 3
MAX_RANK = 6
EXPERTS = 5


def bank_of(inputs: int, ends: tuple[int, ...], dtype: torch.dtype) -> AdapterBank:
    """Entries of different ranks, 0 among them. What no rank uses is NaN."""
    entries = SLOTS * EXPERTS
    ranks = torch.randint(0, MAX_RANK + 1, (entries, len(ends)), dtype=torch.int32)
    a = torch.randn(entries, len(ends), MAX_RANK, inputs).to(dtype) / inputs**0.5
    b = torch.randn(entries, MAX_RANK, ends[-1]).to(dtype)
    bank = AdapterBank(a, b, ranks, torch.rand(entries, len(ends)) + 0.1, ends)
    for entry in range(entries):
        for part, (begin, end) in enumerate(bank.outputs):
            a[entry, part, ranks[entry, part] :] = torch.nan
            b[entry, ranks[entry, part] :, begin:end] = torch.nan
    return bank


def banks_of(mixture: Mixture, dtype: torch.dtype) -> ExpertBanks:
    (outputs, hidden), (_, inner) = mixture.shapes
    ends = (inner, outputs) if outputs > inner else (inner,)
    return ExpertBanks(bank_of(hidden, ends, dtype), bank_of(inner, (hidden,), dtype), EXPERTS)


def packed(kernels: KernelSet, mixture: Mixture, banks: ExpertBanks | None) -> ExpertLayers:
    sides = zip(mixture.sides, mixture.biases, strict=True)
    return ExpertLayers(*(kernels.pack_experts(*side) for side in sides), mixture.activation, banks)


def looped(kernels: KernelSet, mixture: Mixture, banks: ExpertBanks) -> ExpertLayers:
    sides = zip(mixture.sides, mixture.biases, strict=True)
    return ExpertLayers(*(loop.pack(kernels, *side) for side in sides), mixture.activation, banks)


def some_slots(rows: int) -> Tensor:
    """Every slot, and none."""
    return (torch.arange(rows, dtype=torch.int32) + 1) % (SLOTS + 1) - 1


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize("dtype", FLOATS.values())
@pytest.mark.parametrize("function", [SILU, Activation.RELU_SQUARED])
def test_every_path_has_the_bits_of_the_loop(build, kind, activations, dtype, function):
    torch.manual_seed(0)
    kernels = CpuKernels(library.load(build))
    mixture = Mixture(kind, activations, EXPERTS, 160, 144, dtype, function)
    banks = banks_of(mixture, dtype)
    for rows, top_k, used in ((1, 3, 5), (17, 1, 1), (41, 2, 3)):
        x = torch.randn(rows, 160).to(dtype)
        base = torch.randn(rows, 160).to(dtype)
        ids, weights = chosen(rows, top_k, torch.randperm(EXPERTS)[:used])
        adapters = some_slots(rows) if rows > 1 else torch.tensor([1], dtype=torch.int32)
        step = (x, ids, weights)
        fused = kernels.experts(*step, packed(kernels, mixture, banks), base, adapters)
        without = kernels.experts(*step, packed(kernels, mixture, None), base)
        # the loop adds to a base in float32 in place
        expected = loop.experts(kernels, *step, looped(kernels, mixture, banks), base, adapters)
        assert torch.equal(fused, expected), (rows, top_k)
        none = adapters == NO_ADAPTER
        assert torch.equal(fused[none], without[none])
        assert not torch.equal(fused, without)


@pytest.mark.parametrize("name", ["reference", *BUILDS])
def test_a_row_does_not_depend_on_the_others_or_on_threads(name):
    torch.manual_seed(2)
    kernels = REFERENCE if name == "reference" else CpuKernels(library.load(name))
    mixture = Mixture("blocks", Activations.DYNAMIC, EXPERTS, 256, 128)
    layers = packed(kernels, mixture, banks_of(mixture, torch.bfloat16))
    x = torch.randn(30, 256).bfloat16()
    ids, weights = chosen(30, 3, torch.arange(EXPERTS))
    adapters = some_slots(30)
    alone = []
    torch.set_num_threads(1)
    for row in range(30):
        only = slice(row, row + 1)
        slots = None if adapters[row] == NO_ADAPTER else adapters[only]
        alone.append(kernels.experts(x[only], ids[only], weights[only], layers, None, slots))
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        together = kernels.experts(x, ids, weights, layers, None, adapters)
        assert torch.equal(together, torch.cat(alone))


def test_the_reference_has_the_values_of_weights_with_the_adapters():
    torch.manual_seed(3)
    mixture = Mixture("float32", Activations.PLAIN, EXPERTS, 40, 24)
    banks = banks_of(mixture, torch.float32)
    x = torch.randn(12, 40)
    ids, weights = chosen(12, 2, torch.arange(EXPERTS))
    layers = packed(REFERENCE, mixture, banks)
    for slot in range(SLOTS):
        merged = []
        for side, bank in zip(mixture.sides, (banks.gate_up, banks.down), strict=True):
            matrices = []
            for expert, weight in enumerate(side):
                entry = slot * EXPERTS + expert
                data = weight.data.clone()
                for part, (begin, end) in enumerate(bank.outputs):
                    rank = int(bank.ranks[entry, part])
                    added = bank.b[entry, :rank, begin:end].t() @ bank.a[entry, part, :rank]
                    data[begin:end] += bank.scalings[entry, part] * added
                matrices.append(Weight(data))
            merged.append(REFERENCE.pack_experts(matrices))
        expected = REFERENCE.experts(x, ids, weights, ExpertLayers(*merged, SILU))
        adapters = torch.full((12,), slot, dtype=torch.int32)
        result = REFERENCE.experts(x, ids, weights, layers, None, adapters)
        assert (result - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("build", BUILDS)
def test_more_rows_than_are_computed_at_once(build):
    torch.manual_seed(4)
    kernels = CpuKernels(library.load(build))
    mixture = Mixture("rows", Activations.DYNAMIC, EXPERTS, 33, 17)
    rows = 8192 + 700
    ids, weights = chosen(rows, 2, torch.arange(EXPERTS))
    banks = banks_of(mixture, torch.bfloat16)
    step = (torch.randn(rows, 33).bfloat16(), ids, weights)
    adapters = some_slots(rows)
    fused = kernels.experts(*step, packed(kernels, mixture, banks), None, adapters)
    expected = loop.experts(kernels, *step, looped(kernels, mixture, banks), None, adapters)
    assert torch.equal(fused, expected)


def test_slots_and_experts_outside_of_the_banks_are_none():
    torch.manual_seed(5)
    kernels = CpuKernels(library.load())
    mixture = Mixture("float32", Activations.PLAIN, EXPERTS, 32, 16)
    layers = packed(kernels, mixture, banks_of(mixture, torch.float32))
    x = torch.randn(4, 32)
    ids, weights = chosen(4, 2, torch.arange(EXPERTS))
    ids[3, 1] = EXPERTS
    adapters = torch.tensor([-1, -7, SLOTS, NO_ADAPTER], dtype=torch.int32)
    expected = kernels.experts(x, ids, weights, layers)
    assert torch.equal(kernels.experts(x, ids, weights, layers, None, adapters), expected)
    entries = layers.banks.entries(torch.tensor([[2], [-1]]), torch.tensor([[1, -1], [1, EXPERTS]]))
    assert entries.tolist() == [[2 * EXPERTS + 1, NO_ADAPTER], [NO_ADAPTER, NO_ADAPTER]]


def test_a_recording_reads_slots_and_banks_anew():
    torch.manual_seed(6)
    loaded = library.load()
    plain = CpuKernels(loaded)
    mixture = Mixture("rows", Activations.DYNAMIC, EXPERTS, 64, 48)
    banks = banks_of(mixture, torch.bfloat16)
    layers = packed(plain, mixture, banks)
    x = torch.randn(4, 64).bfloat16()
    ids, weights = chosen(4, 2, torch.arange(EXPERTS))
    adapters = torch.tensor([0, -1, 2, 1], dtype=torch.int32)

    def run(kernels: CpuKernels) -> Tensor:
        return kernels.experts(x, ids, weights, layers, None, adapters)

    recorded = record(loaded, Arena(4), lambda of: run(CpuKernels(of)))
    assert recorded.recording is not None, recorded.obstacle
    assert torch.equal(recorded.output, run(plain))
    adapters.copy_(torch.tensor([2, 2, -1, 0]))
    assert torch.equal(recorded.recording.replay(), run(plain))
    banks.down.scalings.mul_(2)
    assert torch.equal(recorded.recording.replay(), run(plain))
    adapters.fill_(NO_ADAPTER)
    without = plain.experts(x, ids, weights, replace(layers, banks=None))
    assert torch.equal(recorded.recording.replay(), without)
