"""Quantized mixtures of experts: what is written loads here and in transformers, and every scale of
it is used.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.mxfp4 import EXPERTS
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from tests.refusals import refuses
from tests.unit.models.test_sizes import require_equal
from transformers import AutoModelForCausalLM

import freight
from freight.errors import ConfigError
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

IDS = tokens(80)
STATIC: dict[str, Any] = {"activations": "static", "kv_cache": "fp8", "calibration_data": [IDS]}
WIDE = dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128
)
KEPT = {  # modules that stay in 16 bits, and the first layer that has them
    "mixtral": (["block_sparse_moe.gate"], 0),
    "qwen2-moe": (["mlp.gate", "mlp.shared_expert_gate"], 0),
    "qwen3-moe": (["mlp.gate"], 0),
    "glm4-moe": (["mlp.gate"], 1),
    "minimax-m2": (["block_sparse_moe.gate"], 0),
    "hy-v3": (["mlp.router.gate"], 1),
    "ernie4-5-moe": (["mlp.gate"], 1),
    "gpt-oss": (["mlp.router"], 0),
}
CHOICE_BIAS = {
    "glm4-moe": "mlp.gate.e_score_correction_bias",
    "minimax-m2": "block_sparse_moe.e_score_correction_bias",
    "hy-v3": "mlp.expert_bias",
    "ernie4-5-moe": "mlp.moe_statics.e_score_correction_bias",
}


def make(variant: str, folder: Path, **changes: Any) -> Path:
    """A float32 model whose experts have whole blocks."""
    own = VARIANTS[variant].to_dict()
    wide = {key: value for key, value in WIDE.items() if key in own}
    save_random(type(VARIANTS[variant])(**own | wide | changes), folder, torch.float32)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def declared(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return said


def dequantized(folder: Path, plain: Path, out: Path) -> Path:
    """The checkpoint in `folder` with weights times their scales, as a float32 model, with the
    config of `plain`.
    """
    stored = tensors(folder)
    values = {}
    for name, tensor in stored.items():
        scale = stored.get(f"{name}_scale", stored.get(f"{name}_scale_inv"))
        if name.endswith(("_scale", "_scale_inv")):
            continue
        if scale is not None and scale.ndim == 2 and scale.shape != (len(tensor), 1):
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            scale = scale[: len(tensor), : tensor.shape[1]]
        values[name] = tensor if scale is None else tensor.float() * scale
    out.mkdir()
    save_file(values, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(plain / "config.json", out)
    return out


def restacked(folder: Path) -> Path:
    """`folder`, with separate experts of gpt-oss as the 3-D tensors that transformers reads."""
    stored = tensors(folder)

    def taken(layer: int, part: str, kind: str) -> torch.Tensor:
        prefix = EXPERTS.format(layer)
        every = [stored.pop(f"{prefix}{at}.{part}_proj.{kind}").float() for at in range(8)]
        return torch.stack(every).mT.contiguous() if kind == "weight" else torch.stack(every)

    stacked = {}
    for layer, (kind, suffix) in itertools.product(range(3), (("weight", ""), ("bias", "_bias"))):
        gate, up, down = (taken(layer, part, kind) for part in ("gate", "up", "down"))
        both = torch.stack((gate, up), -1).flatten(-2)
        stacked[f"{EXPERTS.format(layer)}gate_up_proj{suffix}"] = both
        stacked[f"{EXPERTS.format(layer)}down_proj{suffix}"] = down
    assert not [name for name in stored if ".experts." in name]
    save_file(stored | stacked, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


SLOWER = [pytest.param(weights, marks=pytest.mark.slow) for weights in ("fp8", "fp8-block")]


@pytest.mark.parametrize("weights", ["fp8-channel", *SLOWER])
@pytest.mark.parametrize("variant", KEPT)
def test_transformers_computes_the_same_from_what_is_written(
    variant: str, weights: str, tmp_path: Path
) -> None:
    """With inputs in 32 bits, the only error is that of the stored weights."""
    plain, out = make(variant, tmp_path / "plain"), tmp_path / "out"
    freight.quantize(plain, out, weights=weights, activations="none")
    ours = freight_logits(out, IDS, "float32")
    values = dequantized(out, plain, tmp_path / "dequantized")
    model = AutoModelForCausalLM.from_pretrained(
        restacked(values) if variant == "gpt-oss" else values
    )
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    modules, first = KEPT[variant]
    kept = [f"model.layers.{index}.{module}" for index in range(first, 3) for module in modules]
    assert declared(out)["ignore"] == [*kept, "lm_head"]
    exact = [f"{name}.weight" for name in kept]
    exact += [f"model.layers.2.{CHOICE_BIAS[variant]}"] if variant in CHOICE_BIAS else []
    assert all(torch.equal(tensors(out)[name], tensors(plain)[name]) for name in exact)


@pytest.mark.parametrize("weights", ["fp8", "fp8-block"])
def test_autofp8s_form_has_the_same_weights_and_leaves_out_the_same(
    weights: str, tmp_path: Path
) -> None:
    plain = make("qwen2-moe", tmp_path / "plain")
    forms = {form: tmp_path / form for form in ("compressed-tensors", "fp8")}
    for form, out in forms.items():
        freight.quantize(plain, out, weights=weights, format=form)
    ours, theirs = (tensors(out) for out in forms.values())
    assert {name.removesuffix("_inv") for name in theirs} == ours.keys()
    for name, tensor in theirs.items():
        own = ours[name.removesuffix("_inv")]
        assert torch.equal(tensor.float().flatten(), own.float().flatten())
    plainly, tersely = map(declared, forms.values())
    assert plainly["ignore"] == tersely["ignored_layers"]
    assert torch.equal(*(freight_logits(out, IDS, "float32") for out in forms.values()))


@pytest.mark.parametrize(
    ("variant", "form"),
    [("mixtral", "fp8"), ("qwen2-moe", "compressed-tensors"), ("gpt-oss", "compressed-tensors")],
)
def test_every_scale_is_used(variant: str, form: str, tmp_path: Path) -> None:
    one: dict[str, Any] = {"layer_types": ["full_attention"]}
    few = {
        "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 2},
        "qwen2-moe": one | {"num_experts": 2, "num_experts_per_tok": 2},
        "gpt-oss": one | {"num_local_experts": 2, "num_experts_per_tok": 2},
    }
    plain = make(variant, tmp_path / "plain", num_hidden_layers=1, **few[variant])
    out = tmp_path / "out"
    freight.quantize(plain, out, weights="fp8", **STATIC, format=form)
    stored = tensors(out)
    before = freight_logits(out, IDS, "float32", kv_cache_dtype="fp8")
    scales = [name for name in stored if name.endswith("scale")]
    feed_forward = {"mixtral": 2 * 3, "qwen2-moe": 2 * 3 + 3, "gpt-oss": 2 * 3}
    assert len(scales) == 2 * (4 + feed_forward[variant]) + 2
    for name in scales:
        changed = stored | {name: stored[name] * 3}
        save_file(changed, out / "model.safetensors", metadata={"format": "pt"})
        after = freight_logits(out, IDS, "float32", kv_cache_dtype="fp8")
        assert not torch.equal(after, before), name


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        *(("qwen2-moe", weights) for weights in ("fp8", "fp8-channel", "fp8-block")),
        ("gpt-oss", "fp8-channel"),
    ],
)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_what_is_loaded_occupies_what_is_counted(
    variant: str, weights: str, kernels: str, tmp_path: Path
) -> None:
    plain, out = make(variant, tmp_path / "plain"), tmp_path / "out"
    freight.quantize(plain, out, weights=weights)
    args = EngineArgs(str(out), kernels=kernels, device="cpu", skip_tokenizer_init=True)
    opened = open_model(args)
    require_equal(opened, kernels, opened.scheme.linear)


@pytest.mark.parametrize(("ignore", "says"), [(["lm_head", "re:.*mlp.gate$"], 0), (["lm_head"], 1)])
def test_a_recipe_may_name_routers_which_stay_in_16_bits_anyway(
    ignore: list[str], says: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from freight.llm_compressor import QuantizationModifier, oneshot

    plain = make("qwen3-moe", tmp_path / "plain", num_hidden_layers=1)
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=ignore)
    oneshot(model=str(plain), recipe=recipe, output_dir=str(tmp_path / "out"))
    routers = [line for line in caplog.messages if "model.layers.0.mlp.gate" in line]
    assert len([line for line in routers if "16 bits" in line]) == says
    assert not [line for line in caplog.messages if "matches no Linear module" in line]
    stored = tensors(tmp_path / "out")
    assert stored["model.layers.0.mlp.gate.weight"].dtype is torch.float32
    assert stored["model.layers.0.mlp.experts.7.down_proj.weight"].dtype is torch.float8_e4m3fn


def test_kv_scales_move_into_a_model_with_experts(tmp_path: Path) -> None:
    """AutoFP8's form lists every module as left out, the routers too: readers take no list for 'all
    quantized'.
    """
    from freight.quantizer.transfer import extract_scales

    plain = make("qwen2-moe", tmp_path / "plain")
    kv_cache: dict[str, Any] = {"kv_cache": "fp8", "calibration_data": [IDS]}
    freight.quantize(plain, tmp_path / "scales", weights="none", **kv_cache)
    extract_scales(str(tmp_path / "scales"), str(plain), tmp_path / "out", format="fp8")
    matrices = [name for name, tensor in tensors(plain).items() if tensor.ndim == 2]
    left_out = {*declared(tmp_path / "out")["ignored_layers"], "model.embed_tokens"}
    assert {name.removesuffix(".weight") for name in matrices} == left_out
    one, other = (
        freight_logits(tmp_path / name, IDS, "float32", kv_cache_dtype="fp8")
        for name in ("scales", "out")
    )
    assert torch.equal(one, other)


def with_prediction_layer(folder: Path) -> dict[str, torch.Tensor]:
    """A GLM-4.5 as its hub files are: behind the last layer is one that predicts a further token."""
    save_random(VARIANTS["glm4-moe"], folder, torch.float32)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    stored = tensors(folder)
    names = ("self_attn.q_proj.weight", "input_layernorm.weight", "eh_proj.weight", "enorm.weight")
    shapes = {name: (64, 64) if "proj" in name else (64,) for name in names}
    further = {f"model.layers.3.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(stored | further, folder / "model.safetensors", metadata={"format": "pt"})
    return further


@pytest.mark.parametrize("form", ["compressed-tensors", "fp8"])
def test_layers_that_predict_further_tokens_are_carried_in_16_bits(
    form: str, tmp_path: Path
) -> None:
    further = with_prediction_layer(tmp_path / "plain")
    freight.quantize(tmp_path / "plain", tmp_path / "out", weights="fp8", format=form)
    stored = tensors(tmp_path / "out")
    assert all(torch.equal(stored[name], tensor) for name, tensor in further.items())
    left_out = declared(tmp_path / "out")["ignored_layers" if form == "fp8" else "ignore"]
    assert left_out[-3:] == ["lm_head", "model.layers.3.eh_proj", "model.layers.3.self_attn.q_proj"]
    assert freight_logits(tmp_path / "out", IDS, "float32").isfinite().all()


def test_experts_of_gpt_oss_become_separate_matrices(tmp_path: Path) -> None:
    """Biases, routers and sinks stay as they are. Greedy tokens are those of transformers from the
    same values, and the distributions of tokens close to those of the model."""
    plain, out = make("gpt-oss", tmp_path / "plain"), tmp_path / "out"
    freight.quantize(plain, out, weights="fp8-channel", activations="none")
    stored, before = tensors(out), tensors(plain)
    kept = ("sinks", "router.weight", "router.bias", "norm.weight", "q_proj.bias")
    same = [name for name in before if name.endswith(kept)]
    assert all(torch.equal(stored[name], before[name]) for name in same)
    prefix = "model.layers.1.mlp.experts"
    biases = [stored[f"{prefix}.5.{part}_proj.bias"] for part in ("gate", "up")]
    assert torch.equal(torch.stack(biases, 1).flatten(), before[f"{prefix}.gate_up_proj_bias"][5])
    ours, exact = (freight_logits(folder, IDS, "float32") for folder in (out, plain))
    kl = exact.softmax(-1) * (exact.log_softmax(-1) - ours.log_softmax(-1))
    assert 0 < kl.sum(-1).mean() < 0.05
    model = AutoModelForCausalLM.from_pretrained(
        restacked(dequantized(out, plain, tmp_path / "dequantized"))
    )
    with torch.inference_mode():
        ids = torch.tensor([IDS[:40]])
        greedy = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 40:].tolist()
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "device": "cpu"}
    llm = freight.LLM(str(out), **options, skip_tokenizer_init=True)
    params = freight.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    assert list(llm.generate([IDS[:40]], params)[0].outputs[0].token_ids) == greedy


@pytest.mark.parametrize("ignore", ["re:mlp.experts", "re:layers.1.mlp.experts"])
def test_experts_of_gpt_oss_stay_in_16_bits_where_they_are_ignored(
    ignore: str, tmp_path: Path
) -> None:
    """All of them in the tensors that the model has; those of some layers as separate matrices,
    named as left out.
    """
    plain, out = make("gpt-oss", tmp_path / "plain"), tmp_path / "out"
    freight.quantize(plain, out, weights="fp8", ignore=[ignore], **STATIC)
    stored, before = tensors(out), tensors(plain)
    layers = [f"model.layers.{index}.self_attn" for index in range(3)]
    attention = {f"{layer}.{part}_proj.weight" for layer in layers for part in "qkvo"}
    quantized = {name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn}
    if ignore == "re:mlp.experts":
        assert quantized == attention
        same = [name for name in before if ".mlp." in name]
        assert all(torch.equal(stored[name], before[name]) for name in same)
    else:
        assert attention < quantized
        assert not [name for name in quantized if "layers.1.mlp" in name]
        assert "model.layers.1.mlp.experts.7.up_proj" in declared(out)["ignore"]
        up = before["model.layers.1.mlp.experts.gate_up_proj"][7, :, 1::2]
        assert torch.equal(stored["model.layers.1.mlp.experts.7.up_proj.weight"], up.t())
    ours = freight_logits(out, IDS, "float32", kv_cache_dtype="fp8")
    exact = freight_logits(plain, IDS, "float32")
    # other experts are chosen for some tokens
    assert 0 < (ours - exact).norm() < 0.4 * exact.norm()


def test_other_tools_interfaces_write_the_same_experts_of_gpt_oss(tmp_path: Path) -> None:
    from freight.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig
    from freight.llm_compressor import QuantizationModifier, oneshot

    plain = make("gpt-oss", tmp_path / "plain", num_hidden_layers=1, layer_types=["full_attention"])
    dynamic: dict[str, Any] = {"targets": "Linear", "scheme": "FP8_DYNAMIC"}
    recipe = QuantizationModifier(**dynamic, ignore=["lm_head", "re:.*router"])
    oneshot(model=str(plain), recipe=recipe, output_dir=str(tmp_path / "oneshot"))
    freight.quantize(plain, tmp_path / "rows", weights="fp8-channel")
    ours = tensors(tmp_path / "rows")
    theirs = tensors(tmp_path / "oneshot")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name].float(), tensor.float()) for name, tensor in ours.items())
    kept = QuantizationModifier(**dynamic, ignore=["lm_head", "re:.*experts.*"])
    oneshot(model=str(plain), recipe=kept, output_dir=str(tmp_path / "kept"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors(tmp_path / "kept")
    config = BaseQuantizeConfig(activation_scheme="dynamic")
    quantizer = AutoFP8ForCausalLM.from_pretrained(plain, config)
    assert "(mlp.experts.0-7.gate_proj): Linear(64 -> 128)" in str(quantizer)
    quantizer.quantize([])
    quantizer.save_quantized(tmp_path / "autofp8")
    scale = tensors(tmp_path / "autofp8")["model.layers.0.mlp.experts.7.down_proj.weight_scale"]
    assert scale.shape == ()


def test_oneshot_compares_the_experts_of_a_loaded_gpt_oss_with_those_of_its_folder(
    tmp_path: Path,
) -> None:
    from freight.llm_compressor import QuantizationModifier, oneshot

    plain = make("gpt-oss", tmp_path / "plain", num_hidden_layers=1, layer_types=["full_attention"])
    model = AutoModelForCausalLM.from_pretrained(plain)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[3, 0, 0] += 1
    with refuses(ConfigError, "model.layers.0.mlp.experts.down_proj", "differs"):
        oneshot(model=model, recipe=QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"]))


def test_oneshot_refuses_blocks_that_would_span_gate_and_up(tmp_path: Path) -> None:
    from freight.llm_compressor import QuantizationModifier, oneshot

    plain = make("qwen3-moe", tmp_path / "plain", moe_intermediate_size=32)
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_BLOCK", ignore=["lm_head"])
    with refuses(ConfigError, "experts.0", "32"):
        oneshot(model=str(plain), recipe=recipe)


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel", "fp8-block"])
def test_granites_3d_experts_become_separate_matrices(weights: str, tmp_path: Path) -> None:
    """Under the names that vLLM 0.33 has for them; transformers reads the 3-D tensors alone."""
    plain, out = make("granite-moe", tmp_path / "plain"), tmp_path / "out"
    freight.quantize(plain, out, weights=weights, activations="none")
    stored, before = tensors(out), tensors(plain)
    inner = before["model.layers.1.block_sparse_moe.input_linear.weight"]
    prefix = "model.layers.1.block_sparse_moe.experts.3."
    names = itertools.product(("gate", "up", "down"), ("weight", "weight_scale"))
    assert {name.removeprefix(prefix) for name in stored if name.startswith(prefix)} == {
        f"{part}_proj.{kind}" for part, kind in names
    }
    for name, part in (("gate_proj", inner[3, :128]), ("up_proj", inner[3, 128:])):
        scale = stored[f"{prefix}{name}.weight_scale"]  # of its one block, with fp8-block
        assert (stored[f"{prefix}{name}.weight"].float() * scale - part).norm() < 0.05 * part.norm()
    router = "model.layers.1.block_sparse_moe.router.layer.weight"
    assert torch.equal(stored[router], before[router])
    ours, exact = (freight_logits(folder, IDS, "float32") for folder in (out, plain))
    # other experts are chosen for some tokens
    assert 0 < (ours - exact).norm() < 0.4 * exact.norm()
