"""The compiled product of each head has the bits of its definition, the loop over the set's
products.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_cpu_experts import BUILDS, FLOATS, PATHS, make
from tests.shares import examples
from torch import Tensor

from freight.kernels import reference_experts as loop
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.recording import Arena, record
from freight.operands.weight import Activations, Weight
from freight.quantizer.expert_inputs import one_by_one


def columns(rows: int, heads: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """[rows, heads, inputs] out of a larger tensor: neither rows nor heads follow one another."""
    return torch.randn(rows, heads, inputs + 5).to(dtype)[..., 3 : 3 + inputs]


def matrices(
    kind: str, activations: Activations, heads: int, outputs: int, inputs: int
) -> list[Weight]:
    return [make(kind, activations, outputs, inputs, head) for head in range(heads)]


def both(kernels: CpuKernels, x: Tensor, weights: list[Weight]) -> tuple[Tensor, Tensor]:
    looped = loop.by_head(kernels, x, loop.pack(kernels, weights, None))
    return kernels.by_head(x, kernels.pack_experts(weights)), looped


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    ("rows", "heads", "outputs", "inputs"),
    [
        *(
            (1, 20, 512, 192),
            (2, 3, 40, 96),
            (7, 1, 1, 16),
            (33, 3, 128, 512),
            (65, 3, 40, 128),
            (2, 20, 1, 1),
        ),
        *((65, 1, 512, 192), (33, 20, 40, 16), (1, 128, 40, 128)),
    ],
)
def test_every_head_has_the_bits_of_linear(build, kind, rows, heads, outputs, inputs):
    torch.manual_seed(0)
    kernels = CpuKernels(library.load(build))
    weights = matrices(kind, Activations.PLAIN, heads, outputs, inputs)
    for dtype in {torch.bfloat16, FLOATS[kind]}:
        found, looped = both(kernels, columns(rows, heads, inputs, dtype), weights)
        assert found.shape == (rows, heads, outputs)
        assert found.dtype == dtype
        assert torch.equal(found, looped)


@settings(max_examples=examples(40))
@given(st.data())
def test_every_shape_has_the_bits_of_the_loop(data):
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    kernels = CpuKernels(library.load(data.draw(st.sampled_from(BUILDS))))
    kind, activations = data.draw(st.sampled_from(PATHS))
    dtype = data.draw(st.sampled_from(list(FLOATS.values())))
    heads, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 40))
    outputs, inputs = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 150))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    found, looped = both(
        kernels,
        columns(rows, heads, inputs, dtype),
        matrices(kind, activations, heads, outputs, inputs),
    )
    assert torch.equal(found, looped)


@pytest.mark.parametrize("build", BUILDS)
def test_more_rows_than_are_computed_at_once(build):
    torch.manual_seed(1)
    kernels = CpuKernels(library.load(build))
    weights = matrices("bfloat16", Activations.PLAIN, 3, 17, 33)
    found, looped = both(kernels, columns(1030, 3, 33, torch.bfloat16), weights)
    assert torch.equal(found, looped)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", FLOATS)
def test_a_row_does_not_depend_on_the_others_or_on_threads(build, kind):
    """A NaN, too, stays in its row and head."""
    torch.manual_seed(2)
    kernels = CpuKernels(library.load(build))
    packed = kernels.pack_experts(matrices(kind, Activations.PLAIN, 3, 40, 96))
    x = columns(33, 3, 96, torch.bfloat16)
    torch.set_num_threads(1)
    alone = torch.cat([kernels.by_head(x[row : row + 1], packed) for row in range(33)])
    x[7, 1, 5] = torch.nan
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = kernels.by_head(x, packed)
        assert found[7, 1].isnan().all()
        found[7, 1] = alone[7, 1]
        assert torch.equal(found, alone)


def test_a_recording_repeats_it():
    kernels = library.load()
    torch.manual_seed(3)
    wide = torch.randn(2, 3 * 40).bfloat16()
    packed = CpuKernels(kernels).pack_experts(matrices("bfloat16", Activations.PLAIN, 3, 48, 32))

    def run(own: library.Library) -> Tensor:
        return CpuKernels(own).by_head(wide.view(2, 3, 40)[..., :32], packed).flatten(1)

    with torch.inference_mode():
        found = record(kernels, Arena(4), run)
    assert found.recording is not None, found.obstacle
    wide.copy_(torch.randn(2, 3 * 40))
    assert torch.equal(found.recording.replay(), run(kernels))


def test_calibration_packs_every_head_alone():
    torch.manual_seed(4)
    kernels, weights = (
        CpuKernels(library.load()),
        matrices("bfloat16", Activations.PLAIN, 3, 48, 32),
    )
    x, apart = columns(2, 3, 32, torch.bfloat16), one_by_one(kernels)
    expected = kernels.by_head(x, kernels.pack_experts(weights))
    assert torch.equal(apart.by_head(x, apart.pack_experts(weights)), expected)


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 3, 32), torch.zeros(2, 4, 31), torch.zeros(2, 32, 4).transpose(1, 2)]
)
def test_inputs_of_another_shape_are_refused(x):
    kernels = CpuKernels(library.load())
    with pytest.raises(AssertionError):
        kernels.by_head(x, kernels.pack_experts(matrices("float32", Activations.PLAIN, 4, 16, 32)))
