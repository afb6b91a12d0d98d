"""The compiled mixture of experts has the bits of its definition, the loop over the set's products,
in every build.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shares import examples
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows
from freight.kernels import reference_experts as loop
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.activation import Activation, AnyActivation, GatedActivation, clamped_silu
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Activations, Weight

BUILDS = library.runnable()
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KINDS = ("rows", "blocks", *FLOATS)
STORED = (Activations.PLAIN, Activations.DYNAMIC, Activations.STATIC)
PATHS = [
    (kind, a) for kind in KINDS for a in STORED if kind not in FLOATS or a is Activations.PLAIN
]
SILU = GatedActivation.SILU
EVERY = (
    SILU,
    GatedActivation.GELU_TANH,
    GatedActivation.CLAMPED_SWIGLU,
    clamped_silu(0.5),
    *Activation,
)


def make(kind: str, activations: Activations, outputs: int, inputs: int, expert: int) -> Weight:
    matrix = torch.randn(outputs, inputs) / inputs**0.5
    if kind in FLOATS:
        return Weight(matrix.to(FLOATS[kind]))
    stored = (quantize_rows if kind == "rows" else quantize_blocks)(matrix, Format.E4M3FN)
    return Weight(
        *stored, activations, 0.01 + 0.001 * expert if activations is Activations.STATIC else None
    )


class Mixture:
    """The matrices of some experts, with a bias or none, for both ways to compute."""

    def __init__(
        self,
        kind: str,
        activations: Activations,
        count: int,
        hidden: int,
        inner: int,
        biased: torch.dtype | None = None,
        activation: AnyActivation = SILU,
    ) -> None:
        self.activation = activation
        self.shapes = (
            ((1 if isinstance(activation, Activation) else 2) * inner, hidden),
            (hidden, inner),
        )
        self.sides = [
            [make(kind, activations, *shape, e) for e in range(count)] for shape in self.shapes
        ]
        self.biases = [
            None if biased is None else torch.randn(count, shape[0]).to(biased)
            for shape in self.shapes
        ]

    def both(
        self,
        kernels: CpuKernels,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        base: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        sides = list(zip(self.sides, self.biases, strict=True))
        fused = kernels.experts(
            x,
            ids,
            weights,
            ExpertLayers(*(kernels.pack_experts(*side) for side in sides), self.activation),
            base,
        )
        looped = loop.experts(
            kernels,
            x,
            ids,
            weights,
            ExpertLayers(*(loop.pack(kernels, *side) for side in sides), self.activation),
            base,
        )
        return fused, looped


def chosen(rows: int, top_k: int, among: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending ids out of `among`, and weights."""
    ids = (
        torch.stack([among[torch.randperm(len(among))[:top_k]] for _ in range(rows)])
        .sort(-1)
        .values
    )
    return ids.to(torch.int32), torch.rand(rows, top_k)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("kind", "activations"), PATHS)
@pytest.mark.parametrize("dtype", FLOATS.values())
@pytest.mark.parametrize("function", [SILU, Activation.RELU_SQUARED])
def test_every_path_has_the_bits_of_the_loop(build, kind, activations, dtype, function):
    torch.manual_seed(0)
    kernels = CpuKernels(library.load(build))
    mixture = Mixture(kind, activations, 5, 160, 144, dtype, function)
    for rows, top_k, used in (
        (1, 3, 5),
        (3, 2, 5),
        (17, 1, 1),
        (40, 2, 3),
    ):  # up to 40 rows of one expert; experts of none
        x = torch.randn(rows, 160).to(dtype)
        ids, weights = chosen(rows, top_k, torch.randperm(5)[:used])
        fused, looped = mixture.both(
            kernels, x, ids, weights, base=torch.randn(rows, 160).to(dtype)
        )
        assert torch.equal(fused, looped), (rows, top_k)


@settings(max_examples=examples(40))
@given(st.data())
def test_every_shape_has_the_bits_of_the_loop(data):
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    kernels = CpuKernels(library.load(data.draw(st.sampled_from(BUILDS))))
    kind, activations = data.draw(st.sampled_from(PATHS))
    dtype = data.draw(st.sampled_from(list(FLOATS.values())))
    count, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 30))
    hidden, inner = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 140))
    top_k = data.draw(st.integers(1, count))
    among = torch.randperm(count)[: data.draw(st.integers(top_k, count))]
    biased, function = data.draw(st.sampled_from([None, dtype])), data.draw(st.sampled_from(EVERY))
    mixture = Mixture(kind, activations, count, hidden, inner, biased, function)
    ids, weights = (
        chosen(rows, top_k, among)
        if rows
        else (torch.empty(0, top_k, dtype=torch.int32), torch.empty(0, top_k))
    )
    x = torch.randn(rows, hidden).to(dtype) * data.draw(st.sampled_from([1.0, 1e-3, 30.0]))
    base = torch.randn(rows, hidden).to(dtype) if data.draw(st.booleans()) else None
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    fused, looped = mixture.both(kernels, x, ids, weights, base)
    assert torch.equal(fused, looped)


@pytest.mark.parametrize("build", BUILDS)
def test_more_rows_than_are_computed_at_once(build):
    """Of one expert, and of all."""
    torch.manual_seed(1)
    kernels, mixture = (
        CpuKernels(library.load(build)),
        Mixture("rows", Activations.DYNAMIC, 3, 33, 17),
    )
    rows = 8192 + 700
    ids, weights = chosen(rows, 1, torch.arange(3))
    ids[600:8000] = 1
    ids, weights = torch.cat([ids, torch.full_like(ids, 2)], -1), weights.expand(-1, 2).contiguous()
    ids[ids[:, 0] == 2, 0] = 0
    fused, looped = mixture.both(kernels, torch.randn(rows, 33).bfloat16(), ids, weights)
    assert torch.equal(fused, looped)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("function", [SILU, Activation.RELU_SQUARED])
def test_a_row_does_not_depend_on_the_others_or_on_threads(build, function):
    torch.manual_seed(2)
    kernels = CpuKernels(library.load(build))
    mixture = Mixture("blocks", Activations.DYNAMIC, 6, 256, 128, activation=function)
    gate_up, down = (kernels.pack_experts(side) for side in mixture.sides)
    x = torch.randn(30, 256).bfloat16()
    ids, weights = chosen(30, 3, torch.arange(6))
    torch.set_num_threads(1)
    rows = [slice(i, i + 1) for i in range(30)]
    alone = [
        kernels.experts(x[row], ids[row], weights[row], ExpertLayers(gate_up, down, function))
        for row in rows
    ]
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        assert torch.equal(
            kernels.experts(x, ids, weights, ExpertLayers(gate_up, down, function)),
            torch.cat(alone),
        )


@pytest.mark.parametrize("function", [SILU, Activation.RELU_SQUARED])
def test_matrices_of_the_other_kind_of_activation_are_not_taken(function):
    kernels, other = CpuKernels(library.load()), Activation.RELU if function is SILU else SILU
    packed = [
        kernels.pack_experts(side)
        for side in Mixture("float32", Activations.PLAIN, 2, 32, 16).sides
    ]
    if function is not SILU:
        mixture = Mixture("float32", Activations.PLAIN, 2, 32, 16, activation=function)
        packed = [kernels.pack_experts(side) for side in mixture.sides]
    with pytest.raises(AssertionError):
        kernels.experts(
            torch.ones(1, 32),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, 1),
            ExpertLayers(*packed, other),
        )


def test_every_scale_and_bias_counts():
    """Of every expert: what is changed in one reaches its rows, and no others."""
    torch.manual_seed(3)
    kernels, dtype = CpuKernels(library.load()), torch.bfloat16
    x, ids, weights = (
        torch.randn(4, 64).to(dtype),
        torch.arange(4, dtype=torch.int32)[:, None],
        torch.ones(4, 1),
    )
    mixture = Mixture("rows", Activations.STATIC, 4, 64, 48, dtype)

    def result() -> Tensor:
        packed = [
            kernels.pack_experts(*side) for side in zip(mixture.sides, mixture.biases, strict=True)
        ]
        return kernels.experts(x, ids, weights, ExpertLayers(*packed, SILU))

    before = result()
    for side in range(2):
        for expert in range(4):
            weight, bias = mixture.sides[side][expert], mixture.biases[side]
            changed = (
                replace(weight, scale=weight.scale * 2),
                replace(weight, input_scale=weight.input_scale * 3),
            )
            for other in changed:
                mixture.sides[side][expert] = other
                assert (result() != before).any(-1).tolist() == [row == expert for row in range(4)]
            mixture.sides[side][expert] = weight
            bias[expert] += 1
            assert (result() != before).any(-1).tolist() == [row == expert for row in range(4)]
            bias[expert] -= 1
            before = result()


@pytest.mark.parametrize("build", BUILDS)
def test_an_id_of_no_expert_counts_for_nothing(build):
    torch.manual_seed(4)
    kernels, mixture = (
        CpuKernels(library.load(build)),
        Mixture("bfloat16", Activations.PLAIN, 2, 32, 32),
    )
    ids = torch.tensor([[0, 1], [-1, 1], [0, 2], [-1, 7]], dtype=torch.int32)
    x, weights = torch.randn(4, 32).bfloat16(), torch.rand(4, 2)
    fused, looped = mixture.both(kernels, x, ids, weights, base=x)
    assert torch.equal(fused, looped)
    assert torch.equal(fused[3], x[3])


def test_a_weight_that_no_build_computes_with_is_refused():
    with pytest.raises(KernelError, match="float8_e5m2"):
        CpuKernels(library.load()).pack_experts(
            [Weight(torch.zeros(4, 4).to(torch.float8_e5m2), torch.ones(4))]
        )


def test_all_experts_lie_in_one_piece_of_memory():
    """Linux allows a process 65530 mappings: fewer than a large model has experts, times layers."""
    kernels = CpuKernels(library.load())
    packed = kernels.pack_experts([Weight(torch.zeros(1536, 1024, dtype=torch.bfloat16))] * 8)
    first, end = packed.data.data_ptr(), packed.data.data_ptr() + packed.data.numel()
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(part, 16) for part in re.match(r"(\w+)-(\w+)", line).groups()] for line in lines]
    assert sum(low < end and high > first for low, high in ranges) <= 2


def test_packing_walks_the_heap_once_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long beside packing one expert, of which a layer may have hundreds."""
    from freight.kernels.cpu import experts

    calls: list[int] = []
    monkeypatch.setattr(experts, "give_back_freed_memory", lambda: calls.append(1))
    experts.pack(library.load(library.runnable()[0]), [Weight(torch.ones(512, 1024))] * 4)
    assert calls == [1]
    experts.pack(library.load(library.runnable()[0]), [Weight(torch.ones(16, 32))] * 4)
    assert calls == [1]


@pytest.mark.parametrize("shape", [(3, 40), (4, 39), (40,)])
def test_a_bias_is_one_row_of_every_expert(shape):
    with pytest.raises(AssertionError):
        CpuKernels(library.load()).pack_experts(
            [Weight(torch.zeros(40, 20))] * 4, torch.zeros(shape)
        )
