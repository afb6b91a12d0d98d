"""Experts without a gate and latent experts, through all that runs and quantizes a model: the model
type is that of `tests/latent_experts.py`. transformers' module of Nemotron-H is the oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.latent_experts import EXPERTS, LATENT, config_of, register, save
from tests.parity import random_models
from tests.parity.random_models import freight_logits, tokens
from tests.parity.variants import SHAPE
from tests.refusals import refuses
from tests.unit.engine.test_recordings import Batch, build, recordings_of
from tests.unit.models.test_sizes import require_equal

import freight
from freight import LLM, SamplingParams
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.kernels.cpu import library
from freight.kernels.select import select_kernels
from freight.lab.bench.drive import weight_bytes
from freight.model import open as opening
from freight.model.config.parse import parse_model_config
from freight.model.open import open_checkpoint, open_model, open_random
from freight.model.shapes import tensor_shapes
from freight.model.sizes import ONLINE
from freight.operands.activation import Activation
from freight.quantizer.modules import ignored_modules, kept_modules, layer_modules
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import open_unquantized
from freight.quantizer.tree import model_tree
from freight.settings.engine import EngineArgs

BUILDS = [f"cpu-{build}" for build in library.runnable()]
IDS = tokens(90)
PROMPTS = [IDS[:count] for count in (64, 1, 40, 17, 16)]
SPACES: dict[str, dict[str, Any]] = {
    "latent": {},
    "latent, none shared": {"moe_shared_expert_intermediate_size": None},
    "the token's own": {"moe_latent_size": None},
    "relu, no groups": {"mlp_hidden_act": "relu", "norm_topk_prob": False}
    | dict.fromkeys(("n_group", "topk_group")),
}
STATIC: dict[str, Any] = {"weights": "fp8", "activations": "static", "calibration_data": [IDS]}
LAYER = "model.layers.1.mlp."
ROUTERS = [f"model.layers.{index}.mlp.gate" for index in range(3)]


@pytest.fixture(autouse=True)
def model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def transformers_logits(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def on(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """All that is opened from here on runs on this set of kernels."""
    for module in (opening, random_models):
        monkeypatch.setattr(module, "select_kernels", lambda *_: select_kernels(kernels))


@pytest.mark.parametrize("kernels", ["reference", *BUILDS])
@pytest.mark.parametrize("space", SPACES)
def test_logits_are_those_of_transformers(
    space: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = transformers_logits(save(tmp_path, **SPACES[space]))
    assert expected.std() > 0.1
    on(monkeypatch, kernels)
    assert (freight_logits(tmp_path, IDS, "float32") - expected).abs().max() <= 1e-4


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    """As transformers holds them, [experts, outputs, inputs], without a gate."""
    save(tmp_path / "hub", torch.bfloat16)
    save(tmp_path / "own", torch.bfloat16, stacked=True)
    assert tensors(tmp_path / "own")[f"{LAYER}experts.up_proj"].shape == (EXPERTS, 40, LATENT)
    hub, own = (open_checkpoint(str(tmp_path / folder)) for folder in ("hub", "own"))
    for name, shape in tensor_shapes(hub.model).items():
        assert torch.equal(own.checkpoint.take(name, shape), hub.checkpoint.take(name, shape)), name
    own.checkpoint.finish()


def test_a_stacked_tensor_of_another_space_is_refused(tmp_path: Path) -> None:
    save(tmp_path, stacked=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_latent_size": None}))
    with refuses(CheckpointError, "[8, 40, 48]", "config.json", "[8, 40, 64]"):
        open_checkpoint(str(tmp_path))


def test_a_space_of_no_channels_is_refused() -> None:
    for size in (0, -4, "48"):
        with pytest.raises(CheckpointError, match="moe_latent_size"):
            parse_model_config(config_of(moe_latent_size=size))


def test_what_a_config_says() -> None:
    moe, own = (
        parse_model_config(config_of(**changes)).layers[0].feed_forward
        for changes in ({}, {"moe_latent_size": None})
    )
    said = (moe.activation, moe.latent_size, moe.up_sizes)
    assert said == (Activation.RELU_SQUARED, LATENT, (40,))
    assert (moe.shared.intermediate_size, moe.shared.up_sizes) == (72, (72,))
    assert own.latent_size is None


# -----------------------------------------------------------------------------------------------------
# same bits


@pytest.mark.parametrize("kernels", ["reference", *BUILDS])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_chunks_and_neighbours_change_no_bit(
    quantization: str | None, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, torch.bfloat16)
    on(monkeypatch, kernels)
    drawn: dict[str, Any] = {"max_tokens": 6, "temperature": 0.9, "seed": 7, "logprobs": 2}
    params = SamplingParams(ignore_eos=True, detokenize=False, **drawn)
    common = {"kv_cache_memory": "4MiB", "device": "cpu", "skip_tokenizer_init": True}
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def said(count: int, **options: Any) -> list[Any]:
        llm = LLM(str(tmp_path), quantization=quantization, **common, **options)
        outputs = []
        for at in range(0, len(prompts), count):
            outputs += llm.generate(prompts[at : at + count], params)
        choices = [output.outputs[0] for output in outputs]
        return [(list(choice.token_ids), repr(choice.logprobs)) for choice in choices]

    alone = said(1, enable_prefix_caching=False)
    assert said(len(PROMPTS), enable_prefix_caching=False, max_num_batched_tokens=23) == alone
    assert said(3) == alone


def test_a_decode_step_is_recorded() -> None:
    recorded, plain = build(config_of(), "fp8_e4m3fn")
    batch = Batch.of(recorded)
    steps = [batch.advance((0,), 3), batch.advance((1,), 30)]
    for step in [*steps, *(batch.advance((0, 1)) for _ in range(3))]:
        assert torch.equal(recorded.run(step).all_logits(), plain.run(step).all_logits())
    assert recordings_of(recorded).obstacle == ""


# -----------------------------------------------------------------------------------------------
# what is counted


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("space", SPACES)
def test_what_it_occupies_is_what_is_counted(
    space: str, quantization: str | None, kernels: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(**{**SPACES[space], "dtype": "bfloat16"})))
    args = EngineArgs(kernels=kernels, quantization=quantization, device="cpu")
    opened = open_random(args, str(file))
    require_equal(opened, kernels, lambda _: ONLINE if quantization else None)


def require_counted(folder: Path) -> None:
    opened = open_model(EngineArgs(str(folder), device="cpu", skip_tokenizer_init=True))
    require_equal(opened, "auto", opened.scheme.linear)


def test_bytes_that_a_step_reads_are_those_of_the_experts_it_chooses() -> None:
    model = parse_model_config(config_of())
    every, few = (
        weight_bytes(model, Format.BFLOAT16, Format.BFLOAT16, rows) for rows in (10**6, 1)
    )
    expert = 2 * 40 * LATENT * Format.BFLOAT16.bytes
    assert every - few == model.num_layers * round(EXPERTS * expert * (1 - 3 / EXPERTS))


# ---------------------------------------------------------------------------------------------------
# quantization


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    stored = tensors(folder)
    return {
        name: tensor.float() * stored[f"{name}_scale"] if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
    }


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel"])
def test_transformers_computes_the_same_from_what_is_written(weights: str, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    model = save(plain)
    freight.quantize(plain, out, weights=weights, activations="none")
    values, stored = dequantized(out), tensors(out)
    for part in ("fc1_latent_proj", "fc2_latent_proj"):
        assert stored[f"{LAYER}{part}.weight"].dtype is torch.float8_e4m3fn
    for name, tensor in model.state_dict().items():
        prefix, part = name.rsplit(".", 1)
        if ".experts." in name:
            experts = [values[f"{prefix}.{expert}.{part}.weight"] for expert in range(EXPERTS)]
            tensor.copy_(torch.stack(experts))
        else:
            tensor.copy_(values[name])
    ours = freight_logits(out, IDS, "float32")
    torch.testing.assert_close(ours, transformers_logits(model), atol=1e-4, rtol=1e-4)
    left_out = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert left_out == [*ROUTERS, "lm_head"]


@pytest.mark.parametrize("form", ["compressed-tensors", "fp8"])
def test_every_scale_is_used(form: str, tmp_path: Path) -> None:
    few = {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    save(tmp_path / "plain", shape={**SHAPE, "num_hidden_layers": 1}, **few)
    out = tmp_path / "out"
    freight.quantize(tmp_path / "plain", out, **STATIC, format=form)
    stored, before = tensors(out), freight_logits(out, IDS[:20], "float32")
    scales = [name for name in stored if name.endswith("scale")]
    assert len(scales) == 2 * (4 + 2 * 2 + 2 + 2)  # attention, experts, shared, latent
    for name in scales:
        write(out, stored | {name: stored[name] * 3})
        assert not torch.equal(freight_logits(out, IDS[:20], "float32"), before), name


def test_input_scales_are_those_of_what_transformers_sees(tmp_path: Path) -> None:
    """Of the latents for the experts, of what is between for their second side, and of both
    projections' own inputs.
    """
    model = save(tmp_path / "plain")
    seen: dict[str, float] = {}

    def see(name: str, values: torch.Tensor) -> torch.Tensor:
        seen[name] = max(seen.get(name, 0.0), float(values.abs().max()))
        return values

    mlp = model.model.layers[1].mlp
    projections = {name: getattr(mlp, name) for name in ("fc1_latent_proj", "fc2_latent_proj")}
    for name, module in (projections | {"up": mlp.experts}).items():
        module.register_forward_pre_hook(lambda _, args, name=name: (see(name, args[0]), *args[1:]))
    function = mlp.experts.act_fn.forward
    mlp.experts.act_fn.forward = lambda values: see("down", function(values))
    transformers_logits(model)
    freight.quantize(tmp_path / "plain", tmp_path / "out", **STATIC)
    stored = tensors(tmp_path / "out")
    names = {name: [name] for name in projections}
    names |= {part: [f"experts.{i}.{part}_proj" for i in range(EXPERTS)] for part in ("up", "down")}
    for part, modules in names.items():
        for module in modules:
            scale = stored[f"{LAYER}{module}.input_scale"].item()
            assert scale == pytest.approx(seen[part] / 448, rel=1e-3), module


def test_modules_by_name(tmp_path: Path) -> None:
    save(tmp_path)
    opened = open_unquantized(str(tmp_path))
    layer = layer_modules(opened.model)[1]
    latent = [(f"{LAYER}fc{number}_latent_proj",) for number in (1, 2)]
    assert list(layer.latent.values()) == latent
    assert layer.experts.gate_up == tuple(f"{LAYER}experts.{i}.up_proj" for i in range(EXPERTS))
    shared = [(f"{LAYER}shared_experts.{part}_proj",) for part in ("up", "down")]
    assert list(layer.dense.values()) == shared
    assert kept_modules(opened.model) == tuple(ROUTERS)
    ignored, torn = ignored_modules(opened.model, ["re:_latent_proj$"])
    assert torn == ()
    assert f"{LAYER}fc2_latent_proj" in ignored
    shown = model_tree(opened.checkpoint, opened.model, plan(QuantizeArgs(weights="fp8")), ignored)
    assert "(mlp.experts.0-7.up_proj): Linear(48 -> 40), fp8_e4m3fn, inputs dynamic" in shown


def test_blocks_need_no_whole_number_of_them_where_there_is_no_gate(tmp_path: Path) -> None:
    """Nothing is beside up that a block could span."""
    save(tmp_path / "plain", moe_intermediate_size=200)
    freight.quantize(tmp_path / "plain", tmp_path / "out", weights="fp8-block", activations="none")
    assert tensors(tmp_path / "out")[f"{LAYER}experts.0.up_proj.weight_scale"].shape == (2, 1)
    assert freight_logits(tmp_path / "out", IDS, "float32").isfinite().all()


def test_a_file_of_modelopt_s_form_may_leave_the_projections_out(tmp_path: Path) -> None:
    """With one scale for a matrix and its inputs, and patterns of what stays in 16 bits."""
    save(tmp_path / "plain", torch.bfloat16)
    out, file = tmp_path / "out", tmp_path / "out" / "config.json"
    freight.quantize(tmp_path / "plain", out, ignore=["re:_latent_proj$"], **STATIC)
    expected, config = freight_logits(out, IDS, "float32"), json.loads(file.read_text())
    stored = tensors(out)
    for name in stored:
        if name.endswith("scale"):
            stored[name] = stored[name].reshape(())
    write(out, stored)
    for pattern in ("model.layers.*.mlp.fc*_latent_proj", "*latent_proj*"):
        said = {"quant_method": "modelopt", "quant_algo": "FP8"}
        said |= {"ignore": ["lm_head", pattern, *ROUTERS]}
        file.write_text(json.dumps(config | {"quantization_config": said}))
        assert torch.equal(freight_logits(out, IDS, "float32"), expected), pattern
        require_counted(out)


@pytest.mark.parametrize("part", ["_latent_proj", "experts"])
def test_projections_and_experts_may_stay_in_16_bits(part: str, tmp_path: Path) -> None:
    """Each without the other, as published files have it."""
    save(tmp_path / "plain", torch.bfloat16)
    freight.quantize(tmp_path / "plain", tmp_path / "out", weights="fp8", ignore=[f"re:{part}"])
    stored = {name: tensor for name, tensor in tensors(tmp_path / "out").items() if LAYER in name}
    matrices = {name for name, tensor in stored.items() if tensor.ndim > 1}
    kept = {name for name in matrices if stored[name].dtype is torch.bfloat16}
    assert kept == {name for name in stored if part in name or "gate.weight" in name}
    require_counted(tmp_path / "out")
    assert freight_logits(tmp_path / "out", IDS, "bfloat16").isfinite().all()
