"""Weights in 4 bits that Freight makes: while a checkpoint loads, and in compressed-tensors' files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.formats import writers
from tests.formats.four_bits import E2M1, FORMS, Coded, awq, gptq, integers, packed, write
from tests.formats.test_four_bits import IDS, loaded, opened
from tests.parity.random_models import freight_logits
from tests.refusals import refuses
from tests.unit.models.test_sizes import require_equal
from torch import Tensor

from freight import quantize
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format
from freight.fp8.four_bits import (
    IntGroups,
    round_int4,
    round_int_groups,
    round_mxfp4,
    round_nvfp4,
)
from freight.kernels.reference_set import REFERENCE
from freight.model.config.parse import parse_model_config
from freight.model.open import open_model, open_random
from freight.model.random_weights import random_model
from freight.model.shapes import tensor_shapes
from freight.model.sizes import int4_online
from freight.quantizer.declare import declare
from freight.quantizer.modules import linear_modules
from freight.quantizer.packing import pack_awq, pack_gptq, pack_quantized
from freight.quantizer.plan import ActOrder, Method, QuantizeArgs, plan
from freight.quantizer.quantize import Unquantized, require_integers
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


@given(
    st.integers(0, 2**32),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_zero_points_cost_no_more_than_symmetric_groups(seed, size, dtype):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 256, generator=draw) + torch.randn(6, 1, generator=draw)
    w[1] = 0
    w[2] = w[2].abs() + 3
    rounded = round_int_groups(w, size, dtype, asymmetric=True)
    assert rounded.codes.max() <= 15
    assert rounded.zeros is not None
    assert rounded.zeros.dtype is torch.uint8
    assert rounded.scales.dtype is dtype
    assert (rounded.values()[1] == 0).all()
    symmetric = round_int_groups(w, size, dtype)
    by_extremes = round_int_groups(w, size, dtype, asymmetric=True, searches=False)
    error, of_symmetric, of_extremes = (
        (matrix.values() - w).square().unflatten(1, (-1, size)).sum(-1)
        for matrix in (rounded, symmetric, by_extremes)
    )
    assert (error <= of_symmetric * 1.0001).all()
    assert (error <= of_extremes * 1.0001).all()


def test_scales_and_zero_points_by_the_least_and_the_largest_value():
    """compressed-tensors' `calculate_qparams`: span / 15, and the integer nearest to -least / scale;
    without zero points the largest magnitude / 7.5. 0 is always among the values.
    """
    w = torch.zeros(4, 32)
    w[0, :2] = torch.tensor([-3.0, 12.0])
    w[1, :2] = torch.tensor([-15.0, -7.0])
    w[2, :2] = torch.tensor([7.5, 15.0])
    rounded = round_int_groups(w, 32, torch.bfloat16, asymmetric=True, searches=False)
    assert rounded.zeros is not None
    assert rounded.zeros[:3, 0].tolist() == [3, 15, 0]
    assert rounded.scales[:3, 0].tolist() == [1, 1, 1]
    assert torch.equal(rounded.values()[:2], w[:2])
    assert rounded.codes[2, :2].tolist() == [8, 15]  # a tie goes to the even code
    symmetric = round_int_groups(w, 32, torch.bfloat16, searches=False)
    assert symmetric.scales[1, 0].item() == 2
    assert symmetric.codes[1, :2].tolist() == [0, 4]  # -7.5 to -8, -3.5 to -4, plus 8


def as_groups(coded: Coded, *, zeros: bool = False, order: bool = False) -> IntGroups:
    return IntGroups(
        coded.codes.to(torch.uint8),
        coded.scales,
        coded.zeros.to(torch.uint8) if zeros else None,
        coded.group_of.int() if order else None,
    )


def made_by_hand(zeros: bool, order: bool, rows: int = 24) -> Coded:
    draw = torch.Generator().manual_seed(5)
    return integers(torch.randn(rows, 128, generator=draw), 32, not zeros, draw, order)


def require_same(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert ours.keys() == others.keys()
    for name, tensor in others.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
        assert ours[name].is_contiguous(), name


@pytest.mark.parametrize("rows", [24, 21, 1])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_integers_are_packed_as_the_description_says(zeros: bool, order: bool, rows: int):
    coded = made_by_hand(zeros, order, rows)
    matrix = as_groups(coded, zeros=zeros, order=order)
    assert torch.equal(matrix.values(), coded.values)
    require_same(pack_quantized(matrix), packed(coded, zeros=zeros, order=order))


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_integers_are_packed_as_in_autogptq(zeros: bool, order: bool):
    """With zero points in gptq_v2's form: a 0 has a code of its own there."""
    coded = made_by_hand(zeros, order)
    ours = pack_gptq(as_groups(coded, zeros=zeros, order=order))
    others = gptq(coded, 0 if zeros else 1)
    others.pop("bias")
    require_same(ours, others)


@pytest.mark.parametrize("zeros", [False, True])
def test_integers_are_packed_as_in_autoawq(zeros: bool):
    coded = made_by_hand(zeros, order=False)
    require_same(pack_awq(as_groups(coded, zeros=zeros)), awq(coded))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_other_tools_forms_have_the_values_of_compressed_tensors(
    format: str, asymmetric: bool, tmp_path: Path
):
    """With scales in float16, as a model in float16 has them in every form."""
    folder = save_plain(tmp_path / "plain", dtype="float16")
    tensors = {name: tensor.half().contiguous() for name, tensor in PLAIN.plain.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = {
        "weights": "int4",
        "group_size": 32,
        "asymmetric": asymmetric,
        "ignore": ["model.layers.0.mlp.down_proj"],
    }
    result = quantize(str(folder), tmp_path / "ct", **options)
    other = quantize(str(folder), tmp_path / format, format=format, **options)
    assert other.form == format
    assert other.bytes_after < 1.1 * result.bytes_after
    said = json.loads((tmp_path / format / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["bits"], said["group_size"]) == (format, 4, 32)
    if format == "gptq":
        assert said["sym"] is not asymmetric
        assert said["checkpoint_format"] == ("gptq_v2" if asymmetric else "gptq")
        assert said["dynamic"] == {r"-:model\.layers\.0\.mlp\.down_proj$": {}}
    expected = loaded(tmp_path / "ct").layers
    for index, layer in enumerate(loaded(tmp_path / format).layers):
        own = expected[index]
        assert torch.equal(layer.mixer.qkv.weight.dequantized(), own.mixer.qkv.weight.dequantized())
        assert torch.equal(layer.mlp.down.weight.dequantized(), own.mlp.down.weight.dequantized())
        assert (layer.mlp.down.weight.groups is None) == (index == 0)
    written = freight_logits(tmp_path / format, IDS, "float32", "reference")
    same = freight_logits(tmp_path / "ct", IDS, "float32", "reference")
    assert torch.equal(written, same)


def test_a_model_with_kv_scales_has_no_form_in_autogptqs_layout(tmp_path: Path):
    folder = save_plain(tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for side in "kv":
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor(0.1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with refuses(ConfigError, "--format gptq", "KV scales", "--format compressed-tensors"):
        quantize(str(folder), tmp_path / "out", format="gptq")
    assert quantize(str(folder), tmp_path / "out", weights="int4").plan.kv_granularity is not None


def test_what_awq_cannot_express_is_refused_by_module():
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    }  # fmt: skip
    model = parse_model_config(config)
    awq_plan = plan(QuantizeArgs(format="awq", group_size=32))
    assert awq_plan.weights == "int4"
    shapes = tensor_shapes(model)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (20, 64)
    opened = Unquantized(checkpoint=None, model=model, name="tiny")  # type: ignore[arg-type]
    with refuses(ConfigError, "k_proj has 20 outputs", "--ignore", "compressed-tensors"):
        require_integers(opened, awq_plan, ["lm_head"])
    narrow = ("k_proj", "v_proj")
    kv = [name for name in linear_modules(model) if name.endswith(narrow)]
    kv.append("lm_head")
    require_integers(opened, awq_plan, kv)
    with refuses(ConfigError, "mlp.up", "mlp.up_proj", "leave out both"):
        require_integers(opened, awq_plan, [*kv, "model.layers.1.mlp.up"])


def test_groups_in_an_order_of_their_own_are_declared_and_read(tmp_path: Path):
    """`actorder` group, as llm-compressor wrote it until 2026-08; zero points beside it."""
    written = write(FORMS["ct int4 order"])
    resolved = plan(QuantizeArgs(weights="int4", group_size=32, asymmetric=True))
    plain = {key: value for key, value in written.config.items() if key != "quantization_config"}
    written.config = declare(
        plain, replace(resolved, method=Method(gptq=True, act_order=ActOrder.GROUP)), ["lm_head"]
    )
    said = written.config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert said["actorder"] == "group"
    draw = torch.Generator().manual_seed(9)
    group_of: dict[int, Tensor] = {}  # of the inputs of a matrix, by their number
    for name in written.quantized:
        w = written.plain[f"{name}.weight"]
        columns = w.shape[1]
        order = group_of.setdefault(columns, torch.randperm(columns, generator=draw) // 32)
        sorted_inputs = order.argsort(stable=True)
        by_group = round_int_groups(w[:, sorted_inputs], 32, torch.float16, asymmetric=True)
        codes = torch.empty_like(by_group.codes)
        codes[:, sorted_inputs] = by_group.codes
        matrix = replace(by_group, codes=codes, group_of=order.int())
        for suffix, tensor in pack_quantized(matrix).items():
            written.tensors[f"{name}.{suffix}"] = tensor
        written.plain[f"{name}.weight"] = matrix.values()
        assert (matrix.values() - w).square().mean() < 0.01 * w.square().mean()
    folder = written.save(tmp_path / "ordered")
    for index, layer in enumerate(loaded(folder).layers):
        own = written.plain[f"model.layers.{index}.mlp.down_proj.weight"]
        assert torch.equal(layer.mlp.down.weight.dequantized(), own)
    expected = freight_logits(written.save_plain(tmp_path / "plain"), IDS, "float32", "reference")
    found = freight_logits(folder, IDS, "float32", "reference")
    assert (found - expected).abs().max() < 1e-4


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


@given(st.integers(0, 2**32))
def test_nvfp4_costs_no_more_than_by_the_largest_value(seed):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(4, 128, generator=draw) * torch.randn(4, 1, generator=draw).exp2()
    w[2, 16:48] = 0
    w[3] *= 1e-4  # below the least scale of E4M3 beside the others
    rounded = round_nvfp4(w)
    # compressed-tensors' generate_gparam: 448 * 6 / the largest magnitude
    assert torch.allclose(rounded.divisor, 2688 / w.abs().amax().reshape(1), rtol=1e-6)
    groups = w.double().unflatten(1, (-1, 16))
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
    scale = (rounded.scales.double() / rounded.divisor.double())[..., None]
    values = table[rounded.codes.long()].unflatten(1, (-1, 16)) * scale
    assert torch.allclose(rounded.values().double(), values.flatten(1), rtol=1e-6, atol=0)
    assert (values[2, 1:3] == 0).all()
    best = (table * scale[..., None] - groups[..., None]).abs().amin(-1)
    assert torch.allclose((values - groups).abs(), best, rtol=1e-5, atol=1e-9)
    wanted = groups.abs().amax(-1) / 6 * rounded.divisor.double()
    plain = wanted.float().clamp(min=2**-9).to(torch.float8_e4m3fn).double()
    plain = (plain / rounded.divisor.double())[..., None]
    theirs = (table * plain[..., None] - groups[..., None]).square().amin(-1).sum(-1)
    assert ((values - groups).square().sum(-1) <= theirs * (1 + 1e-5) + 1e-12).all()
    by_largest = round_nvfp4(w, searches=False)
    assert torch.equal(by_largest.scales.double() / rounded.divisor.double(), plain[..., 0])


def test_a_matrix_of_zeros_and_one_of_tiny_values_have_a_divisor_in_nvfp4():
    assert round_nvfp4(torch.zeros(2, 32)).divisor.tolist() == [1]
    tiny = round_nvfp4(torch.full((2, 32), 1e-37))
    assert tiny.divisor.isfinite().all()
    assert (1 / tiny.divisor).isfinite().all()


def test_nvfp4_is_written_and_read_with_one_divisor_for_merged_matrices(tmp_path: Path):
    folder = save_plain(tmp_path / "plain")
    plain = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    plain[f"{name}.weight"] *= 3
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    quantize(str(folder), out, weights="nvfp4")
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    group = said["config_groups"]["group_0"]
    assert said["format"] == "nvfp4-pack-quantized"
    assert group["input_activations"] is None
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("tensor_group", 16)
    stored = load_file(out / "model.safetensors")
    table = torch.tensor([*E2M1, *(-x for x in E2M1)])
    values = {}
    for module in PLAIN.quantized:
        original = plain[f"{module}.weight"].float()
        codes = unpacked(stored[f"{module}.weight_packed"], original.shape[1])
        scale = stored[f"{module}.weight_scale"].float() / stored[f"{module}.weight_global_scale"]
        values[f"{module}.weight"] = table[codes] * scale.repeat_interleave(16, 1)
        error = (values[f"{module}.weight"] - original).square().mean() / original.square().mean()
        assert error < 0.012
    for layer, decoded in enumerate(loaded(out).layers):
        prefix = f"model.layers.{layer}."
        for parts in (("q", "k", "v"), ("gate", "up")):
            part = "self_attn" if "q" in parts else "mlp"
            modules = [f"{prefix}{part}.{side}_proj" for side in parts]
            divisors = {stored[f"{module}.weight_global_scale"].item() for module in modules}
            largest = max(plain[f"{module}.weight"].abs().max().item() for module in modules)
            assert len(divisors) == 1
            assert divisors.pop() == pytest.approx(2688 / largest)
        own = values[f"{prefix}mlp.down_proj.weight"]
        assert torch.allclose(decoded.mlp.down.weight.dequantized(), own, rtol=1e-6, atol=0)
    plain = {key: tensor.float() for key, tensor in plain.items()} | values
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    expected = freight_logits(folder, IDS, "float32", "reference")
    found = freight_logits(out, IDS, "float32", "reference")
    assert (found - expected).abs().max() < 1e-4


def test_each_expert_shares_the_divisor_of_nvfp4_with_its_own_matrices(tmp_path: Path):
    written = write(FORMS["ct nvfp4"], "qwen3_moe")
    config = {key: value for key, value in written.config.items() if key != "quantization_config"}
    tensors = {key: tensor.bfloat16().contiguous() for key, tensor in written.plain.items()}
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    quantize(str(folder), tmp_path / "out", weights="nvfp4")
    stored = load_file(tmp_path / "out/model.safetensors")
    divisors = []
    for expert in range(4):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        sides = [
            stored[f"{prefix}{side}_proj.weight_global_scale"].item() for side in ("gate", "up")
        ]
        assert sides[0] == sides[1]
        divisors.append(sides[0])
    assert len(set(divisors)) == 4
    loaded(tmp_path / "out")


def test_ties_of_mxfp4_go_to_the_even_code():
    w = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0] + [0.0] * 22])
    data, scales = round_mxfp4(w)
    assert scales.tolist() == [[127]]
    assert unpacked(data, 32)[0, :10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0, 14]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"weights": "int4"}, 128), ({"weights": "int4", "group_size": 32}, 32), ({"weights": "mxfp4"}, 32),
        ({"weights": "int4", "asymmetric": True}, 128), ({"weights": "int4", "asymmetric": True, "group_size": 64}, 64),
    ],
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
            zero: int | Tensor = 8
            assert weights["symmetric"] is not options.get("asymmetric", False)
            if not weights["symmetric"]:
                zeros = unpacked(stored[f"{name}.weight_zero_point"].t(), len(codes)).t()
                zero = zeros.repeat_interleave(size, 1)
            matrix = (codes - zero).unflatten(1, (-1, size)) * scale.float()[..., None]
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
    ({"weights": "gptq"}, "--weights gptq: .*--weights int4 --method gptq"),
    ({"weights": "awq"}, "--weights awq: .*--weights int4 --method awq"),
    ({"weights": "int4", "group_size": 48}, "--group-size 48: choose 128, 64 or 32 inputs"),
    ({"weights": "fp8", "group_size": 32}, "--group-size 32 with --weights fp8: it is for int4"),
    ({"weights": "mxfp4", "group_size": 32}, "--group-size 32 with --weights mxfp4"),
    (
        {"weights": "mxfp4", "asymmetric": True},
        "--asymmetric with --weights mxfp4: .*--weights int4",
    ),
    (
        {"weights": "nvfp4", "group_size": 32},
        "--group-size 32 with --weights nvfp4: it is for int4",
    ),
    ({"weights": "nvfp4", "asymmetric": True}, "--asymmetric with --weights nvfp4"),
    ({"weights": "nvfp4", "activations": "static"}, "--activations static with --weights nvfp4"),
    ({"weights": "fp8", "asymmetric": True}, "--asymmetric with --weights fp8: .*omit it"),
    ({"weights": "int4", "activations": "dynamic"}, "--activations dynamic with --weights int4"),
    ({"weights": "int4", "format": "fp8"}, "--weights int4 with --format fp8"),
    ({"weights": "mxfp4", "format": "tgi"}, "--weights mxfp4 with --format tgi"),
    (
        {"weights": "mxfp4", "format": "gptq"},
        "--format gptq with --weights mxfp4: .*--weights int4",
    ),
    ({"weights": "fp8", "format": "awq"}, "--format awq with --weights fp8"),
    (
        {"format": "awq", "kv_cache": "fp8"},
        "--format awq with scales of the KV cache: .*--kv-cache",
    ),
    ({"format": "gptq", "kv_budget": "kl=0.1"}, "--format gptq with scales of the KV cache"),
    ({"format": "awq", "lm_head": True}, "--lm-head with --format awq"),
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
