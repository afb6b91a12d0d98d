"""Where weights come from: a checkpoint rounded to FP8 as it loads, and random ones made in the
format they stay in.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.fp8.formats import Format
from freight.fp8.weights import fit_rows
from freight.kernels.reference_set import REFERENCE
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.model.decoder import Decoder
from freight.model.loader import load_model, tensor_shapes
from freight.model.open import open_model, open_random
from freight.model.random_weights import random_model
from freight.operands.weight import Activations, Weight
from freight.settings.engine import EngineArgs

SMALL = {
    **PRESETS["llama-1b"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 50,
}
FP8 = [Format.E4M3FN, Format.E4M3FNUZ, Format.E5M2]


def linears(model: Decoder) -> list[Weight]:
    parts = [(m.mixer.qkv, m.mixer.o, m.mlp.gate_up, m.mlp.down) for m in model.layers]
    return [linear.weight for four in parts for linear in four]


@pytest.mark.parametrize("format", [Format.E4M3FN, Format.E4M3FNUZ])
def test_a_checkpoint_is_rounded_row_by_row_and_merged_exactly(format):
    folder = resolve_model("demo")
    config = parse_model_config(Checkpoint(folder).config)
    model = load_model(Checkpoint(folder), config, REFERENCE, Format.BFLOAT16, format, 64, "cpu")
    assert model.head.weight.data.dtype == model.embedding.weight.dtype == torch.bfloat16
    assert len(linears(model)) == 4 * config.num_layers
    for weight in linears(model):
        assert weight.data.dtype == getattr(torch, format.torch_name)
        assert weight.activations is Activations.DYNAMIC
    tensors = Checkpoint(folder)
    name = "model.layers.3.self_attn.{}_proj.weight"
    parts = [tensors.take(name.format(p), tensors.shape_of(name.format(p))) for p in "qkv"]
    stored, scale = fit_rows(torch.cat(parts), format)
    qkv = model.layers[3].mixer.qkv.weight
    assert qkv.scale is not None
    assert torch.equal(qkv.scale, scale)
    assert torch.equal(qkv.data.view(torch.uint8), stored.view(torch.uint8))


def test_the_start_says_what_the_weights_are(caplog):
    caplog.set_level(logging.INFO, "freight")
    for quantization, says in (
        (None, "weights: bfloat16"),
        ("fp8", "weights: fp8_e4m3fn, rounded as they load"),
    ):
        opened = open_model(EngineArgs(quantization=quantization, max_model_len=64))
        opened.load(opened.resolve(opened.args))
        assert says in caplog.text


@pytest.mark.parametrize("format", [*FP8, Format.BFLOAT16, Format.FLOAT16])
def test_random_weights_are_finite_and_of_sensible_size(format):
    compute = Format.BFLOAT16 if format.is_fp8 else format
    model = random_model(parse_model_config(SMALL), REFERENCE, compute, format, 32, "cpu", seed=3)
    again = random_model(parse_model_config(SMALL), REFERENCE, compute, format, 32, "cpu", seed=3)
    for weight, same in zip(linears(model), linears(again), strict=True):
        assert torch.equal(weight.data.float(), same.data.float())
        assert weight.data.dtype == getattr(torch, format.torch_name)
        values = weight.data.float() * (1.0 if weight.scale is None else weight.scale[:, None])
        assert values.isfinite().all()
        assert 0.5 < (values.square().mean() * weight.data.shape[1]).item() < 2
        assert -0.2 < (values.mean() * weight.data.shape[1] ** 0.5).item() < 0.2
    assert model.norm.weight.tolist() == [1.0] * 64


GEMMA = {**SMALL, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


def norms(model: Decoder) -> list[torch.Tensor]:
    each = [
        (m.mixer_norm.weight, m.mixer_post, m.mlp_norm.weight, m.mlp_post) for m in model.layers
    ]
    return [weight for four in each for weight in four if weight is not None] + [model.norm.weight]


def test_norm_weights_that_are_stored_as_their_difference_from_1(tmp_path):
    """1 + w has more digits than w in 16 bits, so it is kept in float32."""
    config = parse_model_config(GEMMA)
    model = random_model(config, REFERENCE, Format.BFLOAT16, Format.BFLOAT16, 32, "cpu")
    assert len(norms(model)) == 9
    assert all(weight.tolist() == [1.0] * 64 for weight in norms(model))
    shapes = tensor_shapes(config)
    save_file(
        {n: torch.full(s, 0.001, dtype=torch.bfloat16) for n, s in shapes.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    model = load_model(
        Checkpoint(tmp_path), config, REFERENCE, Format.BFLOAT16, Format.BFLOAT16, 32, "cpu"
    )
    expected = [1 + float(torch.tensor(0.001).bfloat16())] * 64
    assert all(torch.equal(weight, torch.tensor(expected)) for weight in norms(model))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_shape_that_runs(name):
    width = "ffn_dim" if PRESETS[name]["model_type"] == "opt" else "intermediate_size"
    small = {"hidden_size": 96, width: 128, "num_hidden_layers": 2, "vocab_size": 50}
    config = parse_model_config({**PRESETS[name], **small})
    model = random_model(config, REFERENCE, Format.BFLOAT16, Format.E4M3FN, 32, "cpu")
    assert len(model.layers) == 2


def test_a_random_model_has_the_shape_that_was_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    opened = open_random(
        EngineArgs(quantization="fp8", kernels="reference"), str(tmp_path / "config.json")
    )
    config = opened.resolve(opened.args)
    assert config.weight_format is Format.E4M3FN
    assert config.compute_format is Format.BFLOAT16
    model = opened.load(config)
    assert model.head.weight.data.shape == (50, 64)
    assert model.layers[1].mlp.down.weight.data.shape == (64, 96)
    assert opened.load_tokenizer() is None
    assert opened.stop_token_ids() == frozenset()


PEAK = """
import resource, sys
from freight.settings.engine import EngineArgs
from freight.model.open import open_model
from freight.fp8.formats import Format
from freight.fp8.weights import fit_rows
import torch
fit_rows(torch.ones(2048, 2048), Format.E4M3FN)  # what the libraries themselves take at first use
def peak():  # bytes; macOS counts in bytes, Linux in KiB
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
opened = open_model(EngineArgs(sys.argv[1], quantization="fp8", threads=1))
before = peak()
model = opened.load(opened.resolve(opened.args))
print(peak() - before)
"""


def test_memory_peaks_near_the_fp8_size(tmp_path):
    """A checkpoint of 170 MB in 16 bits, 90 MB in FP8, in a process of its own."""
    large = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
    }
    config = PRESETS["llama-1b"] | large | {"vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        n: torch.full(s, 0.01, dtype=torch.bfloat16)
        for n, s in tensor_shapes(parse_model_config(config)).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    sixteen = (tmp_path / "model.safetensors").stat().st_size
    assert sixteen > 150e6
    run = [sys.executable, "-c", PEAK, str(tmp_path)]
    peak = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300).stdout
    assert int(peak) < 0.75 * sixteen  # 0.53 is the model; the rest are copies of one layer
