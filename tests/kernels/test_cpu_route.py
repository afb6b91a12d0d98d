"""The compiled router chooses the experts that its definition chooses, in every build; a NaN harms
nothing.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shares import examples
from torch import Tensor

from freight.kernels import reference_experts as definition
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.operands.experts import Router
from freight.operands.routing import Routing, Scoring
from freight.operands.weight import Weight

BUILDS = library.runnable()
SOME_ULP = 5e-7  # exponentials and sums of two libraries


def identity(kernels: CpuKernels, size: int) -> object:
    """A router whose logits are its input."""
    return kernels.pack(Weight(torch.eye(size)))


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    return Routing(
        groups * size,
        draw(st.integers(1, groups * size)),
        draw(st.sampled_from(Scoring)),
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5])),
        groups,
        draw(st.integers(1, groups)),
        draw(st.sampled_from([1, 2])),
    )


@settings(max_examples=examples(25))
@given(routings(), st.sampled_from(BUILDS), st.booleans(), st.integers(0, 2**16))
def test_experts_and_weights_are_those_of_the_definition(routing, build, biased, seed):
    """Logits on a coarse grid: many are equal, the others well apart."""
    torch.manual_seed(seed)
    kernels = CpuKernels(library.load(build))
    logits = torch.randint(-12, 13, (9, routing.num_experts)) / 4
    choice_bias = torch.randint(-8, 9, (routing.num_experts,)) / 3.7 if biased else None
    ids, weights = kernels.route(
        logits, Router(identity(kernels, routing.num_experts), routing, None, choice_bias)
    )
    expected_ids, expected = definition.choose(logits, routing, choice_bias)
    scale = torch.rand(routing.num_experts)
    matrix = identity(kernels, routing.num_experts)
    scaled = kernels.route(logits, Router(matrix, routing, None, choice_bias, scale))
    assert torch.equal(scaled[1], weights * scale[ids])
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=SOME_ULP, atol=1e-30)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [64, 99])
def test_logits_are_those_of_the_product_in_float32(build, dtype, hidden_size):
    torch.manual_seed(0)
    kernels, routing = CpuKernels(library.load(build)), Routing(24, 5, Scoring.CHOSEN, normed=False)
    router, bias = kernels.pack(Weight(torch.randn(24, hidden_size))), torch.randn(24)
    x = torch.randn(1100, hidden_size).to(dtype)  # more than are computed at once
    ids, weights = kernels.route(x, Router(router, routing, bias))
    expected_ids, expected = definition.choose(kernels.linear(x.float(), router, bias), routing)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=SOME_ULP, atol=1e-30)
    for row in (0, 700, 1099):
        alone = kernels.route(x[row : row + 1], Router(router, routing, bias))
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0], weights[row])


def special(rows: int, size: int) -> Tensor:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    return values[torch.randint(6, (rows, size), generator=torch.Generator().manual_seed(rows))]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("scoring", Scoring)
@pytest.mark.parametrize(("groups", "best"), [(1, 2), (4, 2), (4, 1)])
def test_what_is_not_finite_gives_valid_ids(build, scoring, groups, best):
    """`bias` has them, because an identity makes NaN of infinities."""
    kernels = CpuKernels(library.load(build))
    routing = Routing(16, 4, scoring, num_groups=groups, top_groups=2, group_best=best)
    router = kernels.pack(Weight(torch.zeros(16, 8)))
    for bias in (*special(40, 16), torch.full((16,), torch.nan), torch.full((16,), -torch.inf)):
        ids, weights = kernels.route(torch.zeros(2, 8), Router(router, routing, bias))
        expected_ids, expected = definition.choose(bias.expand(2, -1) + 0.0, routing)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=SOME_ULP, atol=1e-30, equal_nan=True)
        assert ids.min() >= 0
        assert ids.max() < 16
        assert (ids.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("best", [1, 2])
def test_groups_of_one_expert(build, best):
    """Such a group has no second score, and its first is its sum."""
    kernels = CpuKernels(library.load(build))
    routing = Routing(6, 2, Scoring.SIGMOID, num_groups=6, top_groups=2, group_best=best)
    logits = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    ids, weights = kernels.route(logits, Router(identity(kernels, 6), routing))
    assert torch.equal(ids, logits.topk(2, -1).indices.sort(-1).values.int())
    torch.testing.assert_close(
        weights, definition.choose(logits, routing)[1], rtol=SOME_ULP, atol=1e-30
    )


@pytest.mark.parametrize("build", BUILDS)
def test_no_rows(build):
    kernels = CpuKernels(library.load(build))
    ids, weights = kernels.route(torch.zeros(0, 8), Router(identity(kernels, 8), Routing(8, 2)))
    assert ids.shape == weights.shape == (0, 2)
