"""Files that NVIDIA ModelOpt and AMD Quark wrote themselves: bytes times scales, as they lie there,
and a run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.formats.test_forms import load, logprobs
from torch import Tensor

from freight.fp8.formats import Format
from freight.fp8.scheme import Activations
from freight.model.layers.linear import Projection, UnmergedLinear
from freight.model.open import open_model
from freight.operands.weight import Weight
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures"
LAYER = "model.layers.0."


def weights(projection: Projection) -> list[Weight]:
    return [
        part.weight
        for part in (projection.parts if isinstance(projection, UnmergedLinear) else (projection,))
    ]


@pytest.mark.parametrize(
    ("name", "plain", "activations"),
    [
        ("modelopt_blocks", "", Activations.PLAIN),
        ("quark_kv_outputs", "k_proj v_proj", Activations.STATIC),
    ],
)
def test_weights_are_bytes_times_scales(name: str, plain: str, activations: Activations):
    stored = load_file(FIXTURES / name / "model.safetensors")
    (layer,) = load(str(FIXTURES / name), Format.E4M3FN).layers
    for modules, projection in (
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.mixer.qkv),
        (("self_attn.o_proj",), layer.mixer.o),
        (("mlp.gate_proj", "mlp.up_proj"), layer.mlp.gate_up),
        (("mlp.down_proj",), layer.mlp.down),
    ):
        rows = torch.cat([weight.dequantized() for weight in weights(projection)])
        assert torch.equal(
            rows, torch.cat([expected(stored, LAYER + module) for module in modules])
        )
        for weight in weights(projection):
            assert weight.activations is (
                activations if weight.scale is not None else Activations.PLAIN
            )
    kept = [weight for weight in weights(layer.mixer.qkv) if weight.scale is None]
    assert len(kept) == len(plain.split())


def expected(stored: dict[str, Tensor], module: str) -> Tensor:
    """Here every matrix has one scale."""
    scale = stored.get(f"{module}.weight_scale", torch.ones(()))
    assert scale.numel() == 1
    return stored[f"{module}.weight"].float() * scale.float().reshape(())


@pytest.mark.parametrize("name", ["modelopt_blocks", "quark_kv_outputs"])
def test_they_run(name: str):
    assert logprobs(str(FIXTURES / name)).isfinite().all()


def test_quark_s_scales_of_outputs_are_the_cache_s():
    folder = FIXTURES / "quark_kv_outputs"
    stored = load_file(folder / "model.safetensors")
    opened = open_model(EngineArgs(str(folder), skip_tokenizer_init=True))
    (layer,) = opened.kv_scales.layers
    assert layer is not None
    assert (layer.k, layer.v) == tuple(
        (float(stored[f"{LAYER}self_attn.{side}_proj.output_scale"]),) for side in "kv"
    )
