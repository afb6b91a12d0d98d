"""Experts without a gate and latent experts, through all that runs and quantizes a model: the model
type is that of `tests/latent_experts.py`. transformers' module of Nemotron-H is the oracle.
"""

from __future__ import annotations

import json
import re
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
PROMPTS = [IDS[:count] for count in (90, 1, 40, 17, 16, 64, 33)]
SPACES: dict[str, dict[str, Any]] = {
    "latent": {},
    "latent, none shared": {"moe_shared_expert_intermediate_size": None},
    "the token's own": {"moe_latent_size": None},
    "relu, no groups": {
        "mlp_hidden_act": "relu",
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": False,
    },
}
LAYER = "model.layers.1.mlp."


@pytest.fixture(autouse=True)
def model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def transformers_logits(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


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


@pytest.mark.parametrize("size", [0, -4, "48"])
def test_a_space_of_no_channels_is_refused(size: object) -> None:
    with pytest.raises(CheckpointError, match="moe_latent_size"):
        parse_model_config(config_of(moe_latent_size=size))


def test_what_a_config_says() -> None:
    moe = parse_model_config(config_of()).layers[0].feed_forward
    assert (moe.activation, moe.latent_size, moe.up_sizes) == (
        Activation.RELU_SQUARED,
        LATENT,
        (40,),
    )
    assert (moe.shared.intermediate_size, moe.shared.up_sizes) == (72, (72,))
    assert (
        parse_model_config(config_of(moe_latent_size=None)).layers[0].feed_forward.latent_size
        is None
    )


# -----------------------------------------------------------------------------------------------------
# same bits


@pytest.mark.parametrize("kernels", ["reference", *BUILDS])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_chunks_and_neighbours_change_no_bit(
    quantization: str | None, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, torch.bfloat16)
    on(monkeypatch, kernels)
    params = SamplingParams(
        max_tokens=12, temperature=0.9, seed=7, logprobs=2, ignore_eos=True, detokenize=False
    )

    def said(count: int, **options: Any) -> list[Any]:
        common: dict[str, Any] = {
            "kv_cache_memory": "4MiB",
            "quantization": quantization,
            "device": "cpu",
        }
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, **common, **options)
        groups = [PROMPTS[at : at + count] for at in range(0, len(PROMPTS), count)]
        outputs = [
            one
            for group in groups
            for one in llm.generate([{"prompt_token_ids": ids} for ids in group], params)
        ]
        return [(list(one.outputs[0].token_ids), repr(one.outputs[0].logprobs)) for one in outputs]

    alone = said(1, enable_prefix_caching=False)
    assert said(len(PROMPTS), enable_prefix_caching=False, max_num_batched_tokens=23) == alone
    assert said(3) == alone


def test_a_decode_step_is_recorded() -> None:
    recorded, plain = build(config_of(), "fp8_e4m3fn")
    batch = Batch.of(recorded)
    steps = [
        batch.advance((0,), 3),
        batch.advance((1,), 30),
        *(batch.advance((0, 1)) for _ in range(3)),
    ]
    for step in steps:
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
    opened = open_random(
        EngineArgs(kernels=kernels, quantization=quantization, device="cpu"), str(file)
    )
    require_equal(opened, kernels, lambda _: ONLINE if quantization else None)


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
    scales = {name: scale for name, scale in stored.items() if name.endswith("_scale")}
    return {
        name: tensor.float() * scales[f"{name}_scale"] if f"{name}_scale" in scales else tensor
        for name, tensor in stored.items()
        if name not in scales
    }


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel"])
def test_transformers_computes_the_same_from_what_is_written(weights: str, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    model = save(plain)
    freight.quantize(plain, out, weights=weights, activations="none")
    values, stored = dequantized(out), tensors(out)
    quantized = {name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn}
    assert {f"{LAYER}{part}.weight" for part in ("fc1_latent_proj", "fc2_latent_proj")} <= quantized
    for name, tensor in model.state_dict().items():
        prefix, part = name.rsplit(".", 1)
        stacked = ".experts." in name
        read = (
            [values[f"{prefix}.{expert}.{part}.weight"] for expert in range(EXPERTS)]
            if stacked
            else values[name]
        )
        tensor.copy_(torch.stack(read) if stacked else read)
    ours = freight_logits(out, IDS, "float32")
    torch.testing.assert_close(ours, transformers_logits(model), atol=1e-4, rtol=1e-4)
    left_out = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert left_out == [*(f"model.layers.{index}.mlp.gate" for index in range(3)), "lm_head"]


@pytest.mark.parametrize("form", ["compressed-tensors", "fp8"])
def test_every_scale_is_used(form: str, tmp_path: Path) -> None:
    one = {**SHAPE, "num_hidden_layers": 1}
    few = {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    plain, out = tmp_path / "plain", tmp_path / "out"
    save(plain, shape=one, **few)
    data: dict[str, Any] = {"calibration_data": [IDS], "format": form}
    freight.quantize(plain, out, weights="fp8", activations="static", **data)
    stored, before = tensors(out), freight_logits(out, IDS, "float32")
    scales = [name for name in stored if name.endswith("scale")]
    assert len(scales) == 2 * (4 + 2 * 2 + 2 + 2)  # attention, experts, shared, latent
    for name in scales:
        save_file(
            stored | {name: stored[name] * 3}, out / "model.safetensors", metadata={"format": "pt"}
        )
        assert not torch.equal(freight_logits(out, IDS, "float32"), before), name


def test_input_scales_are_those_of_what_transformers_sees(tmp_path: Path) -> None:
    """Of the latents for the experts, of what is between for their second side, and of both
    projections' own inputs.
    """
    model = save(tmp_path / "plain")
    seen: dict[str, float] = {}

    def see(name: str, values: torch.Tensor) -> None:
        seen[name] = max(seen.get(name, 0.0), float(values.abs().max()))

    mlp = model.model.layers[1].mlp
    for name in ("fc1_latent_proj", "fc2_latent_proj"):
        getattr(mlp, name).register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
    function = mlp.experts.act_fn.forward

    def between(values: torch.Tensor) -> torch.Tensor:
        see("down", function(values))
        return function(values)

    mlp.experts.act_fn.forward = between
    mlp.experts.register_forward_pre_hook(lambda _, args: see("up", args[0]))
    transformers_logits(model)
    options: dict[str, Any] = {"weights": "fp8", "activations": "static", "calibration_data": [IDS]}
    freight.quantize(tmp_path / "plain", tmp_path / "out", **options)
    stored = tensors(tmp_path / "out")
    names = {name: [name] for name in ("fc1_latent_proj", "fc2_latent_proj")}
    names |= {part: [f"experts.{i}.{part}_proj" for i in range(EXPERTS)] for part in ("up", "down")}
    for part, modules in names.items():
        for module in modules:
            assert stored[f"{LAYER}{module}.input_scale"].item() == pytest.approx(
                seen[part] / 448, rel=1e-3
            ), module


def test_modules_by_name(tmp_path: Path) -> None:
    save(tmp_path)
    opened = open_unquantized(str(tmp_path))
    layer = layer_modules(opened.model)[1]
    assert (layer.latent_in, layer.latent_out) == (
        (f"{LAYER}fc1_latent_proj",),
        (f"{LAYER}fc2_latent_proj",),
    )
    assert layer.experts.gate_up == tuple(f"{LAYER}experts.{i}.up_proj" for i in range(EXPERTS))
    assert layer.gate_up == (f"{LAYER}shared_experts.up_proj",)
    assert kept_modules(opened.model) == tuple(
        f"model.layers.{index}.mlp.gate" for index in range(3)
    )
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


@pytest.mark.parametrize("pattern", ["model.layers.*.mlp.fc*_latent_proj", "*latent_proj*"])
def test_a_file_of_modelopt_s_form_may_leave_the_projections_out(
    pattern: str, tmp_path: Path
) -> None:
    """With one scale for a matrix and its inputs, and patterns of what stays in 16 bits."""
    save(tmp_path / "plain", torch.bfloat16)
    options: dict[str, Any] = {"weights": "fp8", "activations": "static", "calibration_data": [IDS]}
    freight.quantize(tmp_path / "plain", tmp_path / "out", ignore=["re:_latent_proj$"], **options)
    expected = freight_logits(tmp_path / "out", IDS, "float32")
    path = tmp_path / "out" / "config.json"
    routers = [f"model.layers.{index}.mlp.gate" for index in range(3)]
    said = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head", pattern, *routers],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    stored = {
        name: one.reshape(()) if name.endswith("scale") else one
        for name, one in tensors(tmp_path / "out").items()
    }
    save_file(stored, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(freight_logits(tmp_path / "out", IDS, "float32"), expected)
    opened = open_model(EngineArgs(str(tmp_path / "out"), device="cpu", skip_tokenizer_init=True))
    require_equal(opened, "auto", opened.scheme.linear)


@pytest.mark.parametrize("ignore", ["re:_latent_proj$", "re:experts"])
def test_projections_and_experts_may_stay_in_16_bits(ignore: str, tmp_path: Path) -> None:
    """Each without the other, as published files have it."""
    save(tmp_path / "plain", torch.bfloat16)
    freight.quantize(tmp_path / "plain", tmp_path / "out", weights="fp8", ignore=[ignore])
    stored = tensors(tmp_path / "out")
    kept = {
        name
        for name in stored
        if LAYER in name and stored[name].dtype is torch.bfloat16 and stored[name].ndim > 1
    }
    pattern = re.compile(ignore.removeprefix("re:").removesuffix("$"))
    assert kept == {
        name for name in stored if LAYER in name and (pattern.search(name) or "gate.weight" in name)
    }
    opened = open_model(EngineArgs(str(tmp_path / "out"), device="cpu", skip_tokenizer_init=True))
    require_equal(opened, "auto", opened.scheme.linear)
    assert freight_logits(tmp_path / "out", IDS, "bfloat16").isfinite().all()
