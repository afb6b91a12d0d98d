"""GPTQ's loop against its definition: after each input is rounded, the others are what costs least."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freight.fp8.formats import Format
from freight.quantizer.gptq import by_activation, compensated, output_error, spread
from freight.quantizer.grid import Grid
from freight.quantizer.plan import QuantizeArgs, WeightObserver, plan
from freight.quantizer.rounding import Rounding, stacked

SCHEMES = [
    "int4",
    "int4-asymmetric",
    "int8",
    "mxfp4",
    "nvfp4",
    "fp8",
    "fp8-channel",
    "fp8-block",
]


def correlated(inputs: int, tokens: int, seed: int) -> Tensor:
    """Inputs [tokens, inputs] that depend on each other, some far larger than others."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.eye(inputs) + torch.randn(inputs, inputs, generator=draw) / inputs**0.5
    size = torch.randn(inputs, generator=draw).exp()
    return torch.randn(tokens, inputs, generator=draw) @ mix * size


def rounding_for(scheme: str) -> Rounding:
    options: dict[str, Any] = {"weights": scheme.removesuffix("-asymmetric")}
    if options["weights"] == "int4":
        options |= {"group_size": 32, "asymmetric": scheme != "int4"}
    return Rounding(plan(QuantizeArgs(**options)), Format.FLOAT32, torch.bfloat16)


def grid_for(scheme: str, weight: Tensor) -> Grid:
    rounding = rounding_for(scheme)
    return rounding.grid(rounding.nearest(weight))


def refitted(weight: Tensor, grid: Grid, hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """The matrix, float64, whose input `order[i]` is what costs least once those before it are rounded:
    with F fixed at Q_F, the others R are W_R + (W_F - Q_F) H_FR H_RR^-1.
    """
    damped = hessian.double()
    damped += damping * damped.diagonal().mean() * torch.eye(len(damped), dtype=torch.float64)
    wanted = weight.double()
    result = wanted.clone()
    rounded = wanted.clone()
    for place, index in enumerate(order.tolist()):
        fixed = order[:place]
        rest = order[place:]
        change = (wanted[:, fixed] - rounded[:, fixed]) @ damped[fixed][:, rest]
        column = wanted[:, index] + torch.linalg.solve(damped[rest][:, rest], change.T).T[:, 0]
        result[:, index] = column
        rounded[:, index] = grid.column(column.float(), index).double()
    return result


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ordered", [False, True])
def test_every_input_is_what_costs_least_when_its_turn_comes(scheme: str, ordered: bool):
    inputs = correlated(160, 600, seed=3)  # more inputs than a block of the loop
    hessian = inputs.T @ inputs
    weight = torch.randn(24, 160, generator=torch.Generator().manual_seed(4)) * 0.05
    grid = grid_for(scheme, weight)
    order = by_activation(hessian) if ordered else torch.arange(160)
    ours = compensated(weight, grid, spread(hessian, order, 0.01, "w"))
    exact = refitted(weight, grid, hessian, order, 0.01)
    # a number halfway between two codes may go either way, and all behind it in its row with it
    agree = ((ours - exact).abs() <= 1e-3 * exact.abs().max()).all(1)
    assert agree.float().mean() >= 0.8
    error = output_error(weight, grid.values(grid.codes(ours)), hessian)
    of_exact = output_error(weight, grid.values(grid.codes(exact.float())), hessian)
    assert error == pytest.approx(of_exact, rel=0.05)
    assert error < 0.8 * output_error(weight, grid.values(grid.codes(weight)), hessian)


@given(seed=st.integers(0, 2**32), scheme=st.sampled_from(SCHEMES))
@settings(max_examples=20)
def test_a_grid_rounds_as_its_format_does(seed: int, scheme: str):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(160, 128, generator=draw) * torch.rand(160, 1, generator=draw).exp2()
    weight[3] = 0
    rounding = replace(rounding_for(scheme), scale_format=Format.BFLOAT16)
    matrix = rounding.nearest(weight)
    grid = rounding.grid(matrix)
    assert torch.equal(grid.codes(weight).view(torch.uint8), matrix.codes.view(torch.uint8))
    values = grid.values(matrix.codes)
    for index in (0, 33, 127):
        assert torch.equal(grid.column(weight[:, index], index), values[:, index])
    # values of a grid are their own nearest
    assert torch.equal(grid.values(grid.codes(values)), values)


@pytest.mark.parametrize("scheme", ["int4", "int4-asymmetric", "mxfp4", "nvfp4"])
def test_a_searched_scale_costs_less_than_that_of_the_largest_value(scheme: str):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    searching = rounding_for(scheme)
    plain = replace(searching.plan, weight_observer=WeightObserver.MINMAX)
    errors = []
    for rounding in (searching, replace(searching, plan=plain)):
        matrix = rounding.nearest(weight)
        values = rounding.grid(matrix).values(matrix.codes)
        errors.append(float((values - weight).square().sum()))
    assert errors[0] < errors[1]


def test_matrices_of_one_input_are_rounded_as_each_alone():
    inputs = correlated(64, 300, seed=5)
    hessian = inputs.T @ inputs
    draw = torch.Generator().manual_seed(6)
    weights = [torch.randn(rows, 64, generator=draw) for rows in (8, 4, 4)]
    factor = spread(hessian, by_activation(hessian), 0.01, "w")
    for scheme in SCHEMES:
        grids = [grid_for(scheme, weight) for weight in weights]
        whole = compensated(torch.cat(weights), stacked(grids, [8, 4, 4]), factor).split([8, 4, 4])
        for weight, grid, part in zip(weights, grids, whole, strict=True):
            alone = compensated(weight, grid, factor)
            assert torch.equal(grid.codes(alone).float(), grid.codes(part).float())


def test_inputs_that_were_never_there_become_zero():
    inputs = correlated(64, 300, seed=7)
    inputs[:, [0, 9, 63]] = 0
    hessian = inputs.T @ inputs
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(8))
    grid = grid_for("int4", weight)
    order = by_activation(hessian)
    values = grid.values(grid.codes(compensated(weight, grid, spread(hessian, order, 0.01, "w"))))
    assert not values[:, [0, 9, 63]].any()
    assert values[:, 1].any()


def test_a_hessian_of_few_tokens_is_factored_nevertheless(caplog: pytest.LogCaptureFixture):
    inputs = correlated(96, 3, seed=9)
    hessian = inputs.T @ inputs
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(10))
    grid = grid_for("int8", weight)
    nearest = output_error(weight, grid.values(grid.codes(weight)), hessian)
    for damping in (0.01, 1e-12):
        factor = spread(hessian, torch.arange(96), damping, "model.layers.0.mlp.up_proj: input")
        adjusted = compensated(weight, grid, factor)
        assert adjusted.isfinite().all()
        assert output_error(weight, grid.values(grid.codes(adjusted)), hessian) < nearest
    # the matrix is not changed
    assert torch.equal(hessian, inputs.T @ inputs)
