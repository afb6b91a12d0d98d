"""Calibration takes the engine's own path through a model, whatever its family does beside Llama's
block.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import VARIANTS

from freight.cache.pool import allocate_pool
from freight.engine.runner import ModelRunner
from freight.fp8.cast import scale_from_amax
from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.model.open import open_model
from freight.quantizer.calibration import Calibration
from freight.quantizer.plan import QuantizeArgs, plan
from freight.quantizer.quantize import open_unquantized
from freight.settings.engine import EngineArgs

pytestmark = pytest.mark.usefixtures("reference_kernels")

IDS = tokens(100)


def calibrated(folder: Path, **options: object) -> Calibration:
    decided = plan(QuantizeArgs.from_options(weights="none", kv_cache="fp8", **options))
    return open_unquantized(str(folder)).calibrate(decided, [IDS], ())


def stored(folder: Path) -> list[tuple[float, float]]:
    """The scales of K and V that the engine's own float32 cache calls for, by layer."""
    opened = open_model(
        EngineArgs(model=str(folder), kernels="reference", skip_tokenizer_init=True)
    )
    config = opened.resolve(opened.args)
    spec, num_blocks = opened.cache_spec(config), -(-len(IDS) // config.block_size)
    pool = allocate_pool(spec, config.kv, [num_blocks] * len(spec.groups), REFERENCE)
    ModelRunner(opened.load(config), pool, "cpu").logits(IDS, 0, pool.whole)
    # values that are channels of keys are stored with the scale of all channels
    pages = [
        (one.k, one.k if one.v_in_k else one.v)
        for one in (layer.pages for layer in pool.paged.values())
    ]
    sides = [[page.flatten(0, 1)[: len(IDS)].abs().max() for page in both] for both in pages]
    return [tuple(float(scale_from_amax(amax, Format.E4M3FN)) for amax in both) for both in sides]  # type: ignore[misc]


@pytest.mark.parametrize(
    "variant",
    [
        *(
            "llama-llama3",
            "qwen3",
            "ministral3",
            "gemma2",
            "gemma3-two-ropes",
            "phi3-partial",
            "opt",
            "opt-350m",
        ),
        *(
            "granite",
            "glm4",
            "smollm3",
            "mixtral",
            "qwen2-moe",
            "glm4-moe",
            "minimax-m2",
            "hy-v3",
            "ernie4-5-moe",
        ),
        *("ernie4-5", "seed-oss", "gpt-oss", "granite-moe", "gemma4"),
        *("gemma4-own-inputs", "gemma4-moe"),
        *("olmo2", "olmo3", "exaone4", "laguna", "afmoe", "arcee", "hunyuan"),
        *("hunyuan-moe", "muse-glimmer", "ernie4-5-vl-moe"),
        "mimo-v2-flash",
        "step3p7",
        *(
            "lfm2",
            "lfm2-moe",
            "granite-h",
            "nemotron-h-latent",
            "deepseek-v3",
            "kimi-linear",
            "ling",
        ),
    ],
)
def test_scales_are_those_of_the_keys_and_values_that_the_engine_stores(
    variant: str, tmp_path: Path
):
    save_random(VARIANTS[variant], tmp_path, torch.float32)
    measured = calibrated(tmp_path).kv
    assert measured is not None
    found = [(layer.k[0], layer.v[0]) for layer in measured.layers if layer is not None]
    assert found == stored(tmp_path)
