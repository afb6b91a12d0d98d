"""Experts in calibration: one input scale for each side of a layer, that of all tokens that reached
any expert.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import VARIANTS
from tests.refusals import refuses
from tests.unit.calibrate.test_run import Ledger

import freight
import freight.quantizer.quantize
from freight.errors import CheckpointError, ConfigError
from freight.kernels.reference_set import REFERENCE
from freight.model.sources import CheckpointSource
from freight.operands.weight import Weight
from freight.quantizer.calibration import Calibration, calibrate
from freight.quantizer.modules import ignored_modules, kept_modules, layer_modules, linear_modules
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import open_unquantized
from freight.quantizer.tree import model_tree

pytestmark = pytest.mark.usefixtures("reference_kernels")

IDS = tokens(60)
EXPERTS = {  # names of one expert's modules within a layer
    "mixtral": ("block_sparse_moe.experts.{}.", ("w1", "w3"), "w2"),
    "qwen2-moe": ("mlp.experts.{}.", ("gate_proj", "up_proj"), "down_proj"),
    "qwen3-moe": ("mlp.experts.{}.", ("gate_proj", "up_proj"), "down_proj"),
    "glm4-moe": ("mlp.experts.{}.", ("gate_proj", "up_proj"), "down_proj"),
    "minimax-m2": ("block_sparse_moe.experts.{}.", ("w1", "w3"), "w2"),
    "granite-moe": ("block_sparse_moe.experts.{}.", ("gate_proj", "up_proj"), "down_proj"),
    "hy-v3": ("mlp.experts.{}.", ("gate_proj", "up_proj"), "down_proj"),
    "ernie4-5-moe": ("mlp.experts.{}.", ("gate_proj", "up_proj"), "down_proj"),
    "gpt-oss": ("mlp.experts.{}.", ("gate_proj", "up_proj"), "down_proj"),
}


def measure(
    folder: Path, ids: list[int] = IDS, ignored: tuple[str, ...] = (), **options: str
) -> Calibration:
    decided = plan(QuantizeArgs(**{"activations": "static", **options}))
    opened = open_unquantized(str(folder)).quantized_as(decided.weights, decided.layout, ignored)
    return opened.calibrate(decided, [ids], (*ignored, "lm_head"))


def between(module: Any, expert: int, row: torch.Tensor) -> torch.Tensor:
    """What one of transformers' experts computes between its products."""
    if hasattr(module, "gate_up_proj_bias"):  # gpt-oss
        return module._apply_gate(
            row @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert]
        )
    gate, up = (module.gate_up_proj[expert] @ row).chunk(2)
    return torch.nn.functional.silu(gate) * up


def seen_by_transformers(model: Any, ids: list[int]) -> dict[int, tuple[float, float, set[int]]]:
    """Of each layer with experts: the largest input of all of these, the largest of what is
    between, and the experts reached."""
    found = {}

    def see(index: int, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        x, chosen, _ = args
        x, hidden = x.flatten(0, -2), 0.0
        for row, experts in zip(x, chosen, strict=True):
            for expert in experts.tolist():
                hidden = max(hidden, float(between(module, expert, row).abs().max()))
        found[index] = (float(x.abs().max()), hidden, set(chosen.flatten().tolist()))

    for index, layer in enumerate(model.model.layers):
        mlp = getattr(layer, "block_sparse_moe", None) or layer.mlp  # the first is Granite's
        if hasattr(mlp, "experts"):
            mlp.experts.register_forward_pre_hook(partial(see, index))
    with torch.inference_mode():
        model(torch.tensor([ids]))
    return found


@pytest.mark.parametrize("count", [3, 60])
@pytest.mark.parametrize("variant", EXPERTS)
def test_one_scale_for_each_side_is_that_of_all_tokens_and_experts(
    variant: str, count: int, tmp_path: Path
) -> None:
    """With 3 tokens some experts see none: these have the scale too, and are named."""
    model = save_random(VARIANTS[variant], tmp_path, torch.float32)
    got, seen = measure(tmp_path, IDS[:count]), seen_by_transformers(model, IDS[:count])
    expert, gate_up, down = EXPERTS[variant]
    num_experts, unseen = 4 if variant == "mixtral" else 8, []
    for index, (largest_input, largest_hidden, reached) in seen.items():
        prefix = f"model.layers.{index}.{expert}"
        for one in range(num_experts):
            for part in gate_up:
                assert got.input_scales[prefix.format(one) + part] == pytest.approx(
                    largest_input / 448, rel=1e-4
                )
            assert got.input_scales[prefix.format(one) + down] == pytest.approx(
                largest_hidden / 448, rel=1e-4
            )
        unseen += [
            prefix.format(one).rstrip(".") for one in range(num_experts) if one not in reached
        ]
    assert got.unseen == tuple(unseen)
    assert unseen or count == 60


@pytest.mark.parametrize("observer", ["percentile", "mse"])
def test_the_other_observers_see_experts_too(observer: str, tmp_path: Path) -> None:
    save_random(VARIANTS["qwen3-moe"], tmp_path, torch.float32)
    most, other = measure(tmp_path).input_scales, measure(tmp_path, observer=observer).input_scales
    assert other.keys() == most.keys()
    assert all(most[name] / 2 <= other[name] <= most[name] for name in most)


def test_experts_without_tokens_are_listed_and_a_cache_alone_lists_none(tmp_path: Path) -> None:
    save_random(VARIANTS["qwen3-moe"], tmp_path / "model", torch.float32)
    options: dict[str, Any] = {"calibration_data": [IDS[:3]], "kv_cache": "fp8"}
    result = freight.quantize(
        tmp_path / "model", tmp_path / "out", weights="fp8", activations="static", **options
    )
    said = [
        warning
        for warning in result.warnings
        if "no token of the calibration data reached" in warning
    ]
    for name in measure(tmp_path / "model", IDS[:3]).unseen:
        assert any(f"{name}," in warning or f"{name}:" in warning for warning in said)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = [scale for name, scale in stored.items() if name.endswith("scale")]
    assert all(bool((scale.isfinite() & (scale > 0) & (scale != 1)).all()) for scale in scales)
    dynamic = freight.quantize(tmp_path / "model", tmp_path / "dynamic", weights="fp8", **options)
    assert not [warning for warning in dynamic.warnings if "no token" in warning]


def test_nan_from_one_expert_is_refused(tmp_path: Path) -> None:
    save_random(VARIANTS["qwen3-moe"], tmp_path, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.experts.2.up_proj.weight"][:] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refuses(CheckpointError, "model.layers.1.mlp.experts.*.down_proj", "input", "NaN"):
        measure(tmp_path)


def test_one_layer_with_its_experts_is_in_memory_at_a_time(tmp_path: Path) -> None:
    save_random(VARIANTS["qwen3-moe"], tmp_path, torch.float32)
    opened = open_unquantized(str(tmp_path))
    format = opened.model.checkpoint_format
    ledger = Ledger(CheckpointSource(opened.checkpoint, format, format, "cpu"))
    decided = plan(QuantizeArgs(activations="static", kv_cache="fp8"))
    calibrate(opened.model, ledger, REFERENCE, decided, [IDS], ("lm_head",))
    assert ledger.most == 1
    assert not ledger.alive.total()


def test_routers_and_gates_of_shared_experts_are_never_quantized(tmp_path: Path) -> None:
    save_random(VARIANTS["qwen2-moe-sparse"], tmp_path, torch.float32)  # layer 1 alone has experts
    config = open_unquantized(str(tmp_path)).model
    kept = ("model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate")
    assert kept_modules(config) == kept
    assert not {*kept} & {*linear_modules(config)}
    assert ignored_modules(config, []) == ((*kept, "lm_head"), ())
    assert ignored_modules(config, ["re:mlp.gate$"]) == ((*kept, "lm_head"), ())
    dense, sparse, _ = layer_modules(config)
    assert dense.dense["gate_up"] == ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    assert sparse.dense["gate_up"] == (
        "model.layers.1.mlp.shared_expert.gate_proj",
        "model.layers.1.mlp.shared_expert.up_proj",
    )


def test_experts_are_ignored_together_or_not_at_all(tmp_path: Path) -> None:
    save_random(VARIANTS["qwen3-moe"], tmp_path, torch.float32)
    config = open_unquantized(str(tmp_path)).model
    for pattern in (
        "model.layers.1.mlp.experts.3.down_proj",
        r"re:layers\.1.*experts\.3",
        r"re:experts.*down_proj",
    ):
        with refuses(ConfigError, "mlp.experts", "engines", "together"):
            ignored_modules(config, [pattern])
    ignored, torn = ignored_modules(config, [r"re:model\.layers\.1\.mlp\.experts\."])
    assert len(ignored) == 8 * 3 + 3 + 1  # the experts, the routers, the head
    assert torn == ()
    scales = measure(tmp_path, ignored=ignored).input_scales
    assert not {*ignored} & scales.keys()
    assert len(scales) == 3 * 4 + 2 * 8 * 3


@pytest.mark.parametrize(("width", "fits"), [(32, False), (128, True)])
def test_blocks_that_would_span_gate_and_up_are_refused(
    width: int, fits: bool, tmp_path: Path
) -> None:
    shape = VARIANTS["qwen3-moe"].to_dict() | {"moe_intermediate_size": width}
    save_random(type(VARIANTS["qwen3-moe"])(**shape), tmp_path / "model", torch.float32)
    if fits:
        freight.quantize(tmp_path / "model", tmp_path / "out", weights="fp8-block")
        return
    with refuses(ConfigError, "experts.0", "32", "fp8-channel"):
        freight.quantize(tmp_path / "model", tmp_path / "out", weights="fp8-block")
    experts_in_16_bits = ["re:experts"]
    freight.quantize(
        tmp_path / "model", tmp_path / "out", weights="fp8-block", ignore=experts_in_16_bits
    )


def test_a_tree_shows_all_experts_of_a_layer_as_one(tmp_path: Path) -> None:
    save_random(VARIANTS["qwen3-moe-dense-layer"], tmp_path, torch.float32)
    opened = open_unquantized(str(tmp_path))
    decided = plan(QuantizeArgs(weights="fp8"))
    shown = model_tree(
        opened.checkpoint, opened.model, decided, ignored_modules(opened.model, [])[0]
    )
    lines = [line.strip() for line in shown.splitlines()]
    assert (
        lines.count("(mlp.experts.0-7.up_proj): Linear(64 -> 32), fp8_e4m3fn, inputs dynamic") == 2
    )
    assert lines.count("(mlp.up_proj): Linear(64 -> 96), fp8_e4m3fn, inputs dynamic") == 1
    assert lines.count("(mlp.gate): [8, 64], float32") == 2
    assert not [line for line in lines if "experts.1" in line]


def test_experts_are_read_one_after_the_other_as_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading needs memory for the packed model and for one expert; that is so with static inputs,
    too.
    """
    from freight.model.open import open_model
    from freight.settings.engine import EngineArgs

    save_random(VARIANTS["qwen3-moe"], tmp_path / "plain", torch.float32)
    freight.quantize(
        tmp_path / "plain",
        tmp_path / "out",
        weights="fp8",
        activations="static",
        calibration_data=[IDS],
    )
    opened = open_model(EngineArgs(str(tmp_path / "out"), skip_tokenizer_init=True, device="cpu"))
    alive, most, read = Counter[str](), Counter[str](), CheckpointSource.weight

    def seen(source: CheckpointSource, name: str, shape: tuple[int, ...]) -> Weight:
        weight, kind = read(source, name, shape), "experts" if ".experts." in name else "others"
        alive[kind] += 1
        most[kind] = max(most[kind], alive[kind])
        weakref.finalize(weight.data, alive.subtract, [kind])
        return weight

    monkeypatch.setattr(CheckpointSource, "weight", seen)
    model = opened.load(opened.resolve(opened.args))
    assert most["experts"] <= 4  # gate and up, and those of the expert before while it is replaced
    inputs = {
        descriptor.input_scale for descriptor in model.layers[0].mlp.experts.gate_up.descriptors
    }
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert inputs == {stored["model.layers.0.mlp.experts.0.up_proj.input_scale"].item()}
