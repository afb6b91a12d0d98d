"""Weights in 4 bits that Freight makes: while a checkpoint loads, and in compressed-tensors' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.formats import writers
from tests.formats.four_bits import E2M1, FORMS, write
from tests.formats.test_four_bits import IDS, loaded, opened
from tests.parity.random_models import freight_logits
from tests.refusals import refuses
from tests.unit.models.test_sizes import require_equal
from torch import Tensor

from freight import quantize
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format
from freight.fp8.four_bits import round_int4, round_mxfp4
from freight.kernels.reference_set import REFERENCE
from freight.model.config.parse import parse_model_config
from freight.model.open import open_model, open_random
from freight.model.random_weights import random_model
from freight.model.sizes import int4_online
from freight.settings.engine import EngineArgs

PLAIN = write(FORMS["gptq"])


def save_plain(folder: Path, **more: Any) -> Path:
    """The tiny model in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in PLAIN.plain.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in PLAIN.config.items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"} | more))
    return folder


def unpacked(stored: Tensor, count: int) -> Tensor:
    """Codes of int32 or bytes, the lowest bits first."""
    per, bits = (8, 32) if stored.dtype is torch.int32 else (2, 8)
    whole = stored.long() % 2**bits
    return torch.stack([whole >> 4 * place & 15 for place in range(per)], -1).flatten(1)[:, :count]


@given(
    st.integers(0, 2**32),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_integers_cost_no_more_than_with_the_scale_of_the_largest_value(seed, size, dtype):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(5, 256, generator=draw) * torch.rand(5, 1, generator=draw).exp2()
    w[1] = 0
    data, scales = round_int4(w, size, dtype)
    assert data.dtype is torch.uint8
    assert scales.dtype is dtype
    groups = w.unflatten(1, (-1, size))
    values = (unpacked(data, 256) - 8).unflatten(1, (-1, size)) * scales.float()[..., None]
    assert torch.equal(values[1], torch.zeros_like(values[1]))
    simple = (groups.abs().amax(-1, keepdim=True) / 7).to(dtype).float().clamp(min=1e-30)
    nearest = (groups / simple).round().clamp(-8, 7) * simple
    ours, theirs = ((one - groups).square().sum(-1) for one in (values, nearest))
    assert (ours <= theirs * 1.0001).all()
    # to nearest: no other code of the group's scale is closer
    every = torch.arange(-8, 8) * scales.float()[..., None, None]
    best = (every - groups[..., None]).abs().amin(-1)
    assert torch.allclose((values - groups).abs(), best, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_values_are_rounded_as_well_as_others(dtype: torch.dtype):
    """Their scales are below the least normal number of float16."""
    w = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)) * 4e-5
    data, scales = round_int4(w, 32, dtype)
    values = (unpacked(data, 128) - 8).unflatten(1, (-1, 32)) * scales.float()[..., None]
    assert (values.flatten(1) - w).square().mean() < 0.02 * w.square().mean()


@given(st.integers(0, 2**32))
def test_mxfp4_costs_no_more_than_by_the_rule_of_the_standard(seed):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(4, 128, generator=draw) * torch.randn(4, 1, generator=draw).exp2()
    w[2, 32:64] = 0
    data, scales = round_mxfp4(w)
    groups = w.double().unflatten(1, (-1, 32))
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
    scale = torch.exp2(scales.double() - 127)[..., None]
    values = table[unpacked(data, 128)].unflatten(1, (-1, 32)) * scale
    assert (values[2, 1] == 0).all()
    best = (table * scale[..., None] - groups[..., None]).abs().amin(-1)
    assert torch.allclose((values - groups).abs(), best, rtol=1e-6, atol=0)
    # OCP MX 1.0, section 6.3: floor(log2(largest)) - 2
    rule = torch.exp2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2)
    plain = (table * rule[..., None] - groups[..., None]).square().amin(-1).sum(-1)
    assert ((values - groups).square().sum(-1) <= plain * (1 + 1e-9)).all()


def test_ties_of_mxfp4_go_to_the_even_code():
    w = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0] + [0.0] * 22])
    data, scales = round_mxfp4(w)
    assert scales.tolist() == [[127]]
    assert unpacked(data, 32)[0, :10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0, 14]


@pytest.mark.parametrize(
    ("options", "size"),
    [({"weights": "int4"}, 128), ({"weights": "int4", "group_size": 32}, 32), ({"weights": "mxfp4"}, 32)],
)  # fmt: skip
def test_what_is_written_is_compressed_tensors_form_and_loads(
    options: dict[str, Any], size: int, tmp_path: Path
):
    """Read by the form's description; then by Freight, with the same values."""
    out = tmp_path / "out"
    result = quantize(str(save_plain(tmp_path / "plain")), out, **options)
    assert result.bytes_after < 0.45 * result.bytes_before
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = said["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (4, size, "group")
    mxfp4 = options["weights"] == "mxfp4"
    assert said["format"] == ("mxfp4-pack-quantized" if mxfp4 else "pack-quantized")
    assert said["config_groups"]["group_0"]["input_activations"] is None
    stored, values = load_file(out / "model.safetensors"), {}
    for name in PLAIN.quantized:
        original = PLAIN.plain[f"{name}.weight"]
        codes = unpacked(stored[f"{name}.weight_packed"], original.shape[1])
        scale = stored[f"{name}.weight_scale"]
        if mxfp4:
            table = torch.tensor([*E2M1, *(-x for x in E2M1)])
            wide = torch.exp2(scale.float() - 127)
            matrix = table[codes].unflatten(1, (-1, 32)) * wide[..., None]
        else:
            assert stored[f"{name}.weight_shape"].tolist() == list(original.shape)
            matrix = (codes - 8).unflatten(1, (-1, size)) * scale.float()[..., None]
        values[f"{name}.weight"] = matrix.flatten(1)
        error = (matrix.flatten(1) - original).square().mean() / original.square().mean()
        assert error < 0.03
    decoder = loaded(out)
    for index, layer in enumerate(decoder.layers):
        own = values[f"model.layers.{index}.mlp.down_proj.weight"]
        assert torch.equal(layer.mlp.down.weight.dequantized(), own)
    plain = load_file(tmp_path / "plain/model.safetensors")
    plain = {name: tensor.float() for name, tensor in plain.items()} | values
    save_file(plain, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "plain/config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    expected = freight_logits(tmp_path / "plain", IDS, "float32", "reference")
    found = freight_logits(out, IDS, "float32", "reference")
    assert (found - expected).abs().max() < 1e-4


def test_while_it_loads_the_values_are_those_that_are_written(tmp_path: Path):
    folder = save_plain(tmp_path / "plain")
    quantize(str(folder), tmp_path / "out", weights="int4", group_size=128)
    online, written = loaded(folder, quantization="int4"), loaded(tmp_path / "out")
    for one, other in zip(online.layers, written.layers, strict=True):
        for mine, its in ((one.mixer.qkv, other.mixer.qkv), (one.mlp.down, other.mlp.down)):
            assert torch.equal(mine.weight.data, its.weight.data)
            assert torch.equal(mine.weight.groups.scales, its.weight.groups.scales)
    model = opened(folder, quantization="int4")
    assert model.resolve(model.args).int4
    require_equal(model, "reference", int4_online)


def test_inputs_that_128_does_not_divide_get_smaller_groups_or_none(tmp_path: Path):
    """Of 96, 80 and 64 inputs: groups of 32, 16 bits, groups of 64."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 80,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    args = EngineArgs(quantization="int4", kernels="reference", device="cpu")
    model = open_random(args, str(file))
    layer = model.load(model.resolve(args)).layers[0]  # type: ignore[attr-defined]
    assert layer.mixer.qkv.weight.groups.size == 32
    assert layer.mlp.down.weight.groups is None
    assert layer.mixer.o.weight.groups.size == 64
    require_equal(model, "reference", int4_online)


def test_random_weights_have_the_size_of_others(tmp_path: Path):
    config = parse_model_config(
        {k: v for k, v in PLAIN.config.items() if k != "quantization_config"}
    )
    built = random_model(
        config, REFERENCE, Format.BFLOAT16, Format.E4M3FN, 32, "cpu", seed=3, int4=True
    )
    values = built.layers[0].mlp.down.weight.dequantized()
    assert 0.5 < (values.square().mean() * values.shape[1]).item() < 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"weights": "gptq"}, "--weights gptq: what moves the error .*llm-compressor"),
    ({"weights": "awq"}, "--weights awq: what moves the error .*llm-compressor"),
    ({"weights": "int4", "group_size": 48}, "--group-size 48: choose 128, 64 or 32 inputs"),
    ({"weights": "fp8", "group_size": 32}, "--group-size 32 with --weights fp8: it is for int4"),
    ({"weights": "mxfp4", "group_size": 32}, "--group-size 32 with --weights mxfp4"),
    ({"weights": "int4", "activations": "dynamic"}, "--activations dynamic with --weights int4"),
    ({"weights": "int4", "format": "fp8"}, "--weights int4 with --format fp8"),
    ({"weights": "mxfp4", "format": "tgi"}, "--weights mxfp4 with --format tgi"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        quantize("demo", tmp_path / "out", **options)


def test_inputs_that_no_groups_divide_are_refused_with_the_way_out(tmp_path: Path):
    folder = writers.write(writers.Form(None)).save(tmp_path)
    with refuses(ConfigError, "192 inputs", "128", "--group-size 64"):
        quantize(folder, tmp_path / "out", weights="int4")


@pytest.mark.parametrize("name", ["gptq", "modelopt nvfp4", "ct mxfp4"])
def test_what_is_in_4_bits_is_not_quantized_again(name: str, tmp_path: Path):
    """Not even its cache: scales are calibrated on a model in 16 bits."""
    written = write(FORMS[name])
    for layer in range(2):
        for side in "kv":
            module = f"model.layers.{layer}.self_attn.{side}"
            written.tensors[f"{module}_scale"] = torch.tensor(0.1)
    folder = written.save(tmp_path / "model")
    for options in ({"weights": "fp8"}, {"weights": "none", "kv_cache": "fp8"}):
        with pytest.raises(CheckpointError, match="is quantized already"):
            quantize(str(folder), tmp_path / "out", **options)


def test_what_is_quantized_already_is_not_rounded_again(tmp_path: Path):
    folder = write(FORMS["awq"]).save(tmp_path / "awq")
    model = opened(folder, quantization="int4")
    assert not model.resolve(model.args).int4
    fp8 = tmp_path / "fp8"
    quantize(str(save_plain(tmp_path / "plain")), fp8, weights="fp8")
    model = open_model(EngineArgs(str(fp8), quantization="int4", skip_tokenizer_init=True))
    with refuses(ConfigError, "--quantization int4", "already"):
        model.resolve(model.args)
