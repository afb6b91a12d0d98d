"""Models with short convolutions, Mamba-2, Kimi delta attention or latents against transformers:
prompts of every length that begins, ends or fits in a block, then token by token, on every set of
kernels that runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from transformers import AutoModelForCausalLM

from freight.cache.manager import CacheManager, SequenceBlocks
from freight.cache.pool import allocate_pool
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.kernels.cpu import library
from freight.kernels.select import select_kernels
from freight.model import open as opening
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROMPTS, DECODED, EVERY = (1, 2, 3, 15, 16, 17, 40), 40, 16
KERNELS = ("reference", *(f"cpu-{build}" for build in library.runnable()))
CONVOLUTIONS = ("lfm2", "lfm2-biases", "lfm2-moe", "lfm2-moe-plain", "lfm2-vl")
KIMI = ("kimi-linear", "kimi-linear-groups", "ling", "ling-unbounded")
MAMBA = ("granite-h", "granite-h-moe", "nemotron-h", "nemotron-h-moe", "nemotron-h-latent")
RECURRENT = (*MAMBA, *KIMI)
LATENT = (
    *(
        "deepseek-v3",
        "deepseek-v3-without-q-lora",
        "glm4-moe-lite",
        "mistral4",
        "deepseek-v2",
        "deepseek-v32",
    ),
    *("deepseek-v2-lite", "glm-moe-dsa", "mistral4-groups"),
)


def cases() -> list[Any]:
    """(model, kernels, prompt); of recurrences prompts for convolutions are slow tests, and most on
    kernels that do not run by default. Of latents one prompt on the default kernels is not slow."""
    late = [
        (RECURRENT, KERNELS, (2, 3)),
        (RECURRENT, (KERNELS[0], *KERNELS[2:]), [prompt for prompt in PROMPTS if prompt != 17]),
        (LATENT, KERNELS, [prompt for prompt in PROMPTS if prompt != 17]),
        (LATENT, (KERNELS[0], *KERNELS[2:]), PROMPTS),
    ]
    return [
        pytest.param(
            *case, marks=[pytest.mark.slow] if any(map(_among, late, [case] * len(late))) else []
        )
        for case in product((*CONVOLUTIONS, *RECURRENT, *LATENT), KERNELS, PROMPTS)
    ]


def _among(sets: Sequence[Sequence[Any]], case: Sequence[Any]) -> bool:
    return all(one in members for one, members in zip(case, sets, strict=True))


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_random(VARIANTS[request.param], folder, torch.float32)


def in_steps(folder: Path, kernel_set: str, prompt: int, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocab_size]: the first `prompt` tokens in one step, then one in each."""
    args = EngineArgs(str(folder), skip_tokenizer_init=True)
    opened, kernels = open_model(args), select_kernels(kernel_set)
    if opened.cache_spec(opened.resolve(args)).bytes_per_state:
        args = replace(args, state_every=EVERY)
    config = opened.resolve(args)
    spec = opened.cache_spec(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "select_kernels", lambda *_: kernels)
        decoder = opened.load(config)
    assert decoder.kernels.name == kernel_set
    pool = allocate_pool(spec, config.kv, [8] * len(spec.groups), kernels)
    for state in pool.states.values():
        for part in state.states.parts.values():
            part.fill_(torch.nan)  # a block that was never written holds anything
    runner, rows = ModelRunner(decoder, pool, "cpu"), []
    manager = CacheManager(spec.groups, pool.num_blocks, config.block_size, len(ids))
    held = SequenceBlocks(((),) * len(spec.groups), (0,) * len(spec.groups))
    for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, len(ids)))]:
        grown = manager.grow(manager.trim(held, start), end)
        assert grown is not None
        held = grown
        rows.append(
            runner.run(
                [SequenceSlice(ids[start:end], start, held.block_ids, Logits.ALL)]
            ).all_logits()
        )
    return torch.cat(rows)


@pytest.mark.parametrize(("model", "kernel_set", "prompt"), cases(), indirect=["model"])
def test_a_prompt_and_the_tokens_behind_it(
    model: tuple[Path, Any], kernel_set: str, prompt: int
) -> None:
    folder, theirs = model
    ids = tokens(prompt + DECODED)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    assert (in_steps(folder, kernel_set, prompt, ids) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["hybrids/delta_net", "hybrids/mamba2", "latents/deepseek_v3"])
def test_trained_models(kind: str) -> None:
    """Their logits spread by 5, those of random models by 1."""
    theirs = AutoModelForCausalLM.from_pretrained(
        FIXTURES / kind, dtype=torch.float32, attn_implementation="eager"
    )
    ids = tokens(150)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([ids])).logits[0]
    assert expected.std() > 3
    assert (freight_logits(FIXTURES / kind, ids, "float32") - expected).abs().max() <= 1e-4
