"""Logits of a model with an adapter, against PEFT over transformers in float32
(benchmarks/peers/make_peft.py), and which modules have memory for adapters in every family.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.covering import in_rotation
from tests.parity.random_models import digest_of_weights, save_random
from tests.parity.variants import VARIANTS
from torch import Tensor

from freight import LLM
from freight.engine.prepare import Logits, SequenceSlice
from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.model.adapted import adapted_modules, adapter_bytes
from freight.model.open import open_model
from freight.model.random_weights import random_model
from freight.settings.engine import EngineArgs
from freight.settings.lora import LoraConfig

ADAPTERS = Path(__file__).parents[1] / "fixtures" / "adapters"
EXPECTED = sorted(path.parent.name for path in ADAPTERS.glob("*/expected.safetensors"))
# families of every kind of mixer, feed-forward and gate
ALWAYS = (
    *(
        "llama",
        "phi3",
        "qwen2-moe",
        "qwen3-next",
        "granite-h",
        "kimi-linear",
        "lfm2",
        "deepseek-v3",
    ),
    *("gemma4-moe", "gemma4-own-inputs", "nemotron-h-latent", "step3p7", "gpt-oss"),
)
BLOCKS = 2  # that hold the tokens of each


def served(folder: Path, kernels: str, **options: object) -> LLM:
    """Return the model in float32, with room for two adapters."""
    return LLM(
        str(folder),
        dtype="float32",
        kernels=kernels,
        skip_tokenizer_init=True,
        kv_cache_memory="16MiB",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=64,
        **options,
    )


def logits(llm: LLM, token_ids: list[int], slot: int | None) -> Tensor:
    """float32 [tokens, vocab_size]"""
    runner = llm.engine.runner
    blocks = [table[:BLOCKS] for table in runner.pool.whole]
    step = SequenceSlice(token_ids, 0, blocks, Logits.ALL, slot)
    return runner.run([step]).all_logits().clone()


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", EXPECTED)
def test_logits_are_those_of_peft(name: str, kernels: str, tmp_path: Path):
    with safe_open(ADAPTERS / name / "expected.safetensors", "pt") as file:
        facts = file.metadata()
        token_ids = file.get_tensor("token_ids").flatten().tolist()
        expected = file.get_tensor("logits").view(len(token_ids), -1)
    model = save_random(VARIANTS[facts["variant"]], tmp_path, torch.float32)
    assert digest_of_weights(tmp_path) == facts["base_sha256"]
    llm = served(tmp_path, kernels)
    slot = llm.engine.adapters.load("adapter", str(ADAPTERS / name)).slot
    with_adapter = logits(llm, token_ids, slot)
    assert (with_adapter - expected).abs().max() <= 1e-4
    without = logits(llm, token_ids, None)
    with torch.inference_mode():
        plain = model.eval()(torch.tensor([token_ids])).logits[0].float()
    assert (without - plain).abs().max() <= 1e-4
    assert (expected - plain).abs().max() > 1e-2  # else the adapter would not be seen


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name in ALWAYS or in_rotation(name) else [pytest.mark.slow])
        for name in VARIANTS
    ],
)
def test_banks_are_those_of_the_modules_that_take_adapters(variant: str, tmp_path: Path):
    save_random(VARIANTS[variant], tmp_path, torch.float32)
    model = open_model(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)).model
    lora = LoraConfig(num_slots=2, max_rank=3)
    decoder = random_model(model, REFERENCE, Format.FLOAT32, Format.FLOAT32, 64, "cpu", lora=lora)
    assert decoder.banks is not None
    assert decoder.banks.modules == adapted_modules(model).keys()
    counted = adapter_bytes(model, lora, Format.FLOAT32.bytes)
    # a second A of a module that is a part of two projections is not counted
    assert counted <= decoder.banks.num_bytes <= 1.2 * counted
