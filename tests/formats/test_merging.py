"""Mixed layers: parts of q, k, v or gate, up that differ stay apart, and what can be merged is.
FNUZ bytes on disk.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.formats.forms import FORMS
from tests.formats.writers import Written, spread, write
from tests.refusals import refuses

from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.fp8.weights import regroup
from freight.kernels.reference_set import REFERENCE
from freight.model.decoder import Decoder
from freight.model.layers.linear import Linear, UnmergedLinear
from freight.model.loader import load_model
from freight.model.open import open_model
from freight.settings.engine import EngineArgs


def load(made: Written, folder: Path, format: Format = Format.E4M3FN) -> Decoder:
    opened = open_model(
        EngineArgs(made.save(folder), skip_tokenizer_init=True, kernels="reference")
    )
    assert opened.checkpoint is not None
    return load_model(
        opened.checkpoint,
        opened.model,
        REFERENCE,
        Format.BFLOAT16,
        format,
        64,
        "cpu",
        opened.scheme,
    )


def parts(projection: Linear | UnmergedLinear) -> list[int]:
    """Output features of each matrix."""
    linears = projection.parts if isinstance(projection, UnmergedLinear) else (projection,)
    return [len(linear.weight.data) for linear in linears]


@pytest.mark.parametrize(
    ("name", "qkv", "gate_up"),
    [
        ("autofp8 static", [384], [640]),
        ("ct channel token", [384], [640]),
        (
            "deepseek",
            [192, 96, 96],
            [320, 320],
        ),  # no part but the last may end within a block of 128 rows
        ("transformers", [384], [640]),  # blocks as wide as the matrix are scales of rows
        ("quark channel token", [192, 96, 96], [640]),  # v is left out in layer 1
    ],
)
def test_what_agrees_is_merged(name: str, qkv: list[int], gate_up: list[int], tmp_path: Path):
    layer = load(write(FORMS[name]), tmp_path).layers[1]
    assert (parts(layer.mixer.qkv), parts(layer.mlp.gate_up)) == (qkv, gate_up)


def test_static_scales_that_differ_keep_parts_apart(tmp_path: Path):
    made = write(FORMS["autofp8 static"])
    together = load(made, tmp_path).layers[0].mixer.qkv
    made.tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 2
    apart = load(made, tmp_path).layers[0].mixer.qkv
    assert (parts(together), parts(apart)) == ([384], [192, 96, 96])
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    same = (together(x) == apart(x)).all(0)
    assert same[:192].all()
    assert same[288:].all()
    assert not same[192:288].all()


def test_biases_follow_their_parts(tmp_path: Path):
    """A Qwen2 of which v is left out has a bias on every part."""
    made = write(FORMS["quark channel token"])
    made.config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    for layer in range(2):
        for i, (name, rows) in enumerate((("q", 192), ("k", 96), ("v", 96))):
            made.tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.full(
                (rows,), 1.0 + i
            ).bfloat16()
    model = load(made, tmp_path)
    zero = torch.zeros(2, 192, dtype=torch.bfloat16)
    for layer in model.layers:
        assert layer.mixer.qkv(zero)[1].tolist() == [1.0] * 192 + [2.0] * 96 + [3.0] * 96


@pytest.mark.parametrize(
    ("block", "shape", "grid"),
    [
        ((256, 128), (300, 200), (3, 2)),
        ((128, 384), (130, 400), (2, 4)),
        ((64, 512), (100, 512), None),
        ((1, 9), (7, 9), None),
    ],
)
def test_other_block_sizes_are_regrouped_exactly(
    block: tuple[int, int], shape: tuple[int, int], grid
):
    stored = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    scale = torch.rand(stored, generator=torch.Generator().manual_seed(1))
    regrouped = regroup(scale, block, shape)
    assert regrouped is not None
    expected = spread(scale, block, shape)
    if grid is None:
        assert torch.equal(regrouped[:, None].expand(shape), expected)
    else:
        assert regrouped.shape == grid
        assert torch.equal(spread(regrouped, (128, 128), shape), expected)
    assert regroup(torch.ones(4, 4), (64, 64), (256, 256)) is None
    assert regroup(torch.ones(256, 2), (1, 128), (256, 256)) is None


def as_fnuz(made: Written) -> Written:
    """The same values as an FNUZ device would store them: half of what the bytes mean in FN, twice
    the scales.
    """
    for name, tensor in list(made.tensors.items()):
        if tensor.dtype is torch.float8_e4m3fn:
            code = tensor.view(torch.uint8)
            made.tensors[name] = code.masked_fill(code == 0x80, 0).view(torch.float8_e4m3fnuz)
        elif re.search("(weight|input)_scale", name):
            made.tensors[name] = tensor * 2
    return made


@pytest.mark.parametrize("name", ["autofp8 static", "ct channel token", "modelopt blocks"])
@pytest.mark.parametrize("format", [Format.E4M3FN, Format.E4M3FNUZ])
def test_fnuz_bytes_are_reinterpreted_once(name: str, format: Format, tmp_path: Path):
    made = write(FORMS[name])
    down = load(made, tmp_path, format).layers[1].mlp.down
    again = load(as_fnuz(made), tmp_path, format).layers[1].mlp.down
    assert isinstance(down, Linear)
    assert isinstance(again, Linear)
    assert again.weight.data.dtype is down.weight.data.dtype is getattr(torch, format.torch_name)
    assert torch.equal(again.weight.dequantized(), down.weight.dequantized())
    assert again.weight.input_scale == down.weight.input_scale
    assert torch.equal(again.weight.scale, down.weight.scale)


def test_an_fnuz_value_without_counterpart_is_named(tmp_path: Path):
    made = as_fnuz(write(FORMS["ct channel token"]))
    name = "model.layers.1.mlp.down_proj.weight"
    made.tensors[name].view(torch.uint8)[3, 5] = 0xFF  # -240
    with refuses(CheckpointError, name, "240", "fp8_e4m3fnuz"):
        load(made, tmp_path)
    load(made, tmp_path, Format.E4M3FNUZ)
