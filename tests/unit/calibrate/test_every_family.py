"""freight quantize of every family: weights, static inputs and cache at once, and the result runs.

Every scale is a positive number that was measured, and changes what is computed when it changes.
Routers and other gates keep their 16 or 32 bits. Experts that saw no token have the scale of the
others, and are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS

import freight
import freight.quantizer.quantize
from freight.lab.evaluate.divergence import kl_divergence
from freight.quantizer.modules import kept_modules, layer_modules, linear_modules
from freight.quantizer.quantize import open_unquantized

pytestmark = pytest.mark.usefixtures("reference_kernels")

IDS = tokens(100)
STATIC: dict[str, Any] = {
    "weights": "fp8",
    "activations": "static",
    "kv_cache": "fp8",
    "calibration_data": [IDS],
}
UNSEEN = (
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "minimax-m2",
    "ernie4-5-moe",
)  # the text does not reach every expert
FIRST = {config.model_type: name for name, config in reversed(VARIANTS.items())}
EVERY = tuple(
    FIRST[model_type] for model_type in reversed(FIRST) if model_type != "gpt_oss"
)  # it has its own tests


def make(variant: str, folder: Path) -> Path:
    """A float32 model; one of text and pictures is whole."""
    save_random(VARIANTS[variant], folder, torch.float32)
    return folder


def log_probabilities(folder: Path) -> torch.Tensor:
    return freight_logits(folder, IDS, "float32", kv_cache_dtype="auto").log_softmax(1)


def in_the_last_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """By kind of scale, those in the last layer that has it: one, or that of every expert."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: int(re.findall(r"\.layers\.(\d+)\.", name)[0])):
        kind, layer = re.sub(r"\d+", "#", name), name.partition(".layers.")[2].partition(".")[0]
        same = kinds.setdefault(kind, [])
        if same and f".layers.{layer}." not in same[0]:
            same.clear()
        same.append(name)
    return kinds


def experts_without_tokens(result: freight.QuantizeResult) -> set[str]:
    said = [
        re.fullmatch(r"no token of the calibration data reached (.*?): .*", line)
        for line in result.warnings
    ]
    return {name for match in said if match is not None for name in match[1].split(", ")}


@pytest.mark.slow
@pytest.mark.parametrize("variant", EVERY)
def test_a_quantized_model_of_every_family_uses_every_scale(variant: str, tmp_path: Path) -> None:
    plain, out = make(variant, tmp_path / "plain"), tmp_path / "out"
    config = open_unquantized(str(plain)).model
    result = freight.quantize(plain, out, **STATIC)
    before, stored = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")

    modules, layers = linear_modules(config), layer_modules(config)
    named = {f"{module}.{kind}_scale" for module in modules for kind in ("weight", "input")}
    named |= {f"{layers[index].mixer}.{kind}_scale" for index in config.paged for kind in "kv"}
    scales = {name: x for name, x in stored.items() if name in named}
    assert scales.keys() == named
    assert all(bool((x.isfinite() & (x > 0) & (x != 1)).all()) for x in scales.values())

    quantized = {f"{module}.weight" for module in modules}
    assert not {f"{module}.weight" for module in kept_modules(config)} & quantized
    assert all(stored[name].dtype is torch.float8_e4m3fn for name in quantized)
    others = stored.keys() - quantized - named
    assert bool(result.beside) == (
        hasattr(VARIANTS[variant], "vision_config") or config.dense_limit is not None
    )
    assert {name for name, x in before.items() if x.ndim < 3} <= others | quantized
    assert all(torch.equal(stored[name], before[name]) for name in others)

    unseen = experts_without_tokens(result)
    assert bool(unseen) == (variant in UNSEEN)
    for experts in (layer.experts for layer in layers if layer.experts is not None):
        for side in (experts.gate_up, experts.down):
            assert len({float(stored[f"{module}.input_scale"]) for module in side}) == 1
    assert all(f"{name}." in " ".join(modules) for name in unseen)

    exact, ours = log_probabilities(plain), log_probabilities(out)
    other_positions = kl_divergence(exact, exact.roll(1, 0)).mean()
    assert 0 < kl_divergence(exact, ours).mean() < 0.1 * other_positions
    for kind, names in in_the_last_layer(scales).items():
        if kind.endswith(".v_scale") and not config.attention:
            # values in keys have the scale of keys; it is there for engines that want both
            continue
        # norms of q and k hide a factor near 1, and of the inputs of gate and up the larger scale
        # counts
        factor = 2**-12 if kind.endswith("weight_scale") else 3
        changed = {name: stored[name] * factor for name in names}
        save_file(stored | changed, out / "model.safetensors", {"format": "pt"})
        assert not torch.equal(log_probabilities(out), ours), kind
