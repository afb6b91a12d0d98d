"""GPTQ against llm-compressor's: the same rows, Hessian and scales give the same codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from freight.quantizer.gptq import by_activation, compensated, spread
from freight.quantizer.grid import Element, Grid

FILE = Path(__file__).parents[2] / "fixtures" / "llm_compressor" / "gptq.safetensors"

# its recipe -> the numbers, inputs of a group, whether the Hessian's diagonal orders the inputs
RECIPES = {
    "gptq": (Element.INT4, 128, False),
    "gptq_static": (Element.INT4, 128, True),
    "gptq_asym": (Element.INT4, 128, False),
    "gptq_asym_static": (Element.INT4, 128, True),
    "gptq_mse": (Element.INT4, 128, True),
    "gptq_w8a8": (Element.INT8, 256, True),
    "gptq_fp8": (Element.E4M3, 256, True),
    "gptq_nvfp4": (Element.E2M1, 16, True),
    "gptq_mxfp4": (Element.E2M1, 32, True),
}


def grid_of(stored: dict[str, Tensor], recipe: str) -> Grid:
    element, size, _ = RECIPES[recipe]
    scales = stored[f"{recipe}.scale"]
    if recipe == "gptq_nvfp4":
        scales = scales / stored["gptq_nvfp4.global_scale"]
    zeros = None
    if element is Element.INT4:
        zeros = stored[f"{recipe}.zero_point"].float() + 8
    return Grid(element, scales, torch.arange(256) // size, zeros)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_codes_are_those_of_llm_compressor(recipe: str):
    stored = load_file(FILE)
    hessian = stored["hessian"]
    order = by_activation(hessian) if RECIPES[recipe][2] else torch.arange(256)
    grid = grid_of(stored, recipe)
    adjusted = compensated(stored["weight"], grid, spread(hessian, order, 0.01, recipe))
    values = grid.values(grid.codes(adjusted))
    expected = stored[f"{recipe}.value"]
    equal = torch.isclose(values, expected, rtol=1e-5, atol=1e-7)
    if recipe == "gptq_w8a8":  # its scale is the largest magnitude / 127.5; -128 is not a code here
        equal = equal[(expected / grid.scales > -127.5).all(1)]
        assert len(equal) > 16
    assert equal.float().mean() > 0.999
    nearest = grid.values(grid.codes(stored["weight"]))
    assert not torch.equal(values, nearest)
