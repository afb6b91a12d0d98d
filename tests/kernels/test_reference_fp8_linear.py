"""The reference product over FP8 weights: against float64, against ml_dtypes, and its promise about
bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.covering import covered
from torch import Tensor

from freight.fp8.formats import Format
from freight.fp8.weights import expand_blocks, quantize_blocks, quantize_rows
from freight.kernels import reference
from freight.operands.weight import Activations, Weight

OF_FP8 = (Activations.PLAIN, Activations.DYNAMIC, Activations.STATIC)
FP8 = {
    Format.E4M3FN: (ml_dtypes.float8_e4m3fn, 448.0),
    Format.E4M3FNUZ: (ml_dtypes.float8_e4m3fnuz, 240.0),
    Format.E5M2: (ml_dtypes.float8_e5m2, 57344.0),
}
SHAPES = [(1, 64, 48), (33, 100, 7), (70, 300, 260)]  # rows, in_features, out_features
STATIC_SCALE = 0.013


def make(
    format: Format, blocks: bool, activations: Activations, columns: int, outputs: int
) -> Weight:
    quantize = quantize_blocks if blocks else quantize_rows
    weight = torch.randn(outputs, columns) / columns**0.5
    scale = STATIC_SCALE if activations is Activations.STATIC else None
    return Weight(*quantize(weight, format), activations, scale)


def as_numpy(stored: Tensor) -> np.ndarray:
    """float64 values of an FP8 tensor, decoded by ml_dtypes."""
    kind = next(
        kind
        for format, (kind, _) in FP8.items()
        if stored.dtype == getattr(torch, format.torch_name)
    )
    return stored.view(torch.uint8).numpy().view(kind).astype(np.float64)


def expected_activations(x: Tensor, weight: Weight, format: Format) -> np.ndarray:
    """What the product sees, in float64: scales in float32, rounding by ml_dtypes."""
    values = x.float().numpy()
    if weight.activations is Activations.PLAIN:
        return values.astype(np.float64)
    kind, largest = FP8[format if format.is_e4m3 else Format.E4M3FN]
    if weight.activations is Activations.STATIC:
        scale = np.full_like(values, STATIC_SCALE)
    elif weight.scale is not None and weight.scale.ndim == 2:
        parts = [values[:, i : i + 128] for i in range(0, values.shape[1], 128)]
        scale = np.concatenate(
            [
                np.broadcast_to(np.abs(p).max(1, keepdims=True) / np.float32(largest), p.shape)
                for p in parts
            ],
            1,
        )
    else:
        scale = np.broadcast_to(
            np.abs(values).max(1, keepdims=True) / np.float32(largest), values.shape
        )
    stored = np.clip(values / scale, -largest, largest).astype(kind)
    return stored.astype(np.float64) * scale.astype(np.float64)


@pytest.mark.parametrize(
    ("dtype", "activations", "blocks", "format", "shape"),
    covered([torch.float32, torch.bfloat16, torch.float16], OF_FP8, [False, True], FP8, SHAPES),
)
def test_product_of_what_is_stored(dtype, activations, blocks, format, shape):
    rows, columns, outputs = shape
    torch.manual_seed(rows)
    weight = make(format, blocks, activations, columns, outputs)
    x, bias = torch.randn(rows, columns).to(dtype), torch.randn(outputs).to(dtype)
    assert weight.scale is not None
    scale = expand_blocks(weight.scale, (outputs, columns)) if blocks else weight.scale[:, None]
    matrix = as_numpy(weight.data) * scale.double().numpy()
    inputs = expected_activations(x, weight, format)
    exact = inputs @ matrix.T + bias.double().numpy()
    magnitude = np.abs(inputs) @ np.abs(matrix).T + np.abs(bias.double().numpy())
    out = reference.linear(x, weight, bias)
    assert out.dtype == dtype
    bound = torch.finfo(dtype).eps * np.abs(exact) + 1e-6 * magnitude
    assert (np.abs(out.double().numpy() - exact) <= bound).all()
    whole = reference.linear(x, weight, bias, float32=True)
    assert (np.abs(whole.double().numpy() - exact) <= 1e-6 * magnitude).all()
    assert torch.equal(whole.to(dtype), out)


@pytest.mark.parametrize("activations", OF_FP8)
@pytest.mark.parametrize("blocks", [False, True])
def test_rows_do_not_see_each_other(activations, blocks):
    torch.manual_seed(0)
    x = torch.randn(70, 300).bfloat16()
    weight = make(Format.E4M3FN, blocks, activations, 300, 260)
    whole = reference.linear(x, weight)
    for start, stop in [(0, 1), (1, 2), (31, 33), (40, 70), (69, 70)]:
        assert torch.equal(reference.linear(x[start:stop], weight), whole[start:stop])


@pytest.mark.parametrize("blocks", [False, True])
def test_outputs_decoded_apart_are_the_same(blocks, monkeypatch):
    torch.manual_seed(0)
    x, bias = torch.randn(5, 256), torch.randn(640)
    weight = make(Format.E4M3FN, blocks, Activations.DYNAMIC, 256, 640)
    whole = reference.linear(x, weight, bias)
    monkeypatch.setattr(reference, "OUTPUT_TILE", 128)
    assert torch.allclose(reference.linear(x, weight, bias), whole, rtol=1e-6, atol=1e-6)


def test_activations_that_are_zero_or_not_finite():
    """An all-zero row gives the bias; infinities saturate at the scale of the rest; NaN stays in
    its own row.
    """
    weight = Weight(*quantize_rows(torch.eye(4), Format.E4M3FN), Activations.DYNAMIC)
    x = torch.tensor([[0.0, 0, 0, 0], [torch.inf, 448.0, 2.0, 0], [torch.nan, 1.0, 2.0, 3.0]])
    out = reference.linear(x, weight, torch.ones(4))
    assert out[0].tolist() == [1, 1, 1, 1]
    assert out[1].tolist() == pytest.approx([449.0, 449.0, 3.0, 1.0])
    assert out[2].isnan().all()
