"""What is written of KV scales in each form, whichever side is larger."""

from __future__ import annotations

import pytest

from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import LayerScales
from freight.quantizer.declare import kv_tensors
from freight.quantizer.plan import QuantizeArgs, plan


@pytest.mark.parametrize(("k", "v"), [(0.5, 0.25), (0.25, 0.5)])
@pytest.mark.parametrize("format", ["compressed-tensors", "fp8", "tgi"])
def test_no_side_saturates(format: str, k: float, v: float):
    """A form with one scale for both has the larger."""
    weights = None if format == "tgi" else "fp8"
    decided = plan(QuantizeArgs(weights=weights, kv_cache="fp8", format=format))
    written = kv_tensors(
        decided, "attn", LayerScales((k,), (v,), Granularity.TENSOR), Format.FLOAT32
    )
    expected = {"attn.kv_scale": 0.5} if format == "tgi" else {"attn.k_scale": k, "attn.v_scale": v}
    assert {name: tensor.item() for name, tensor in written.items()} == expected
