"""FP8Cache in transformers' `generate`: the tokens of Freight's engine, and of a cache that only
rounds.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from tests.shares import one_in
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from freight import LLM, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.fp8.cast import amax, decode, encode, token_scale
from freight.fp8.formats import Format
from freight.transformers import FP8Cache

DEMO = resolve_model("demo")
ROOT = Path(__file__).parents[2]
PROMPT = torch.randint(3, 4096, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@cache
def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@cache
def random_model(variant: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(VARIANTS[variant]).to(dtype).eval()


def generated(
    model: Any, prompts: list[list[int]], cache: Any, count: int, **options: Any
) -> list[list[int]]:
    """Greedy tokens of prompts, padded on the left."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
    options = {"do_sample": False, **ends, **options}
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    return [row[length:] for row in output.tolist()]


def of_engine(
    folder: Path, prompts: list[list[int]], count: int, **options: Any
) -> list[list[int]]:
    options |= {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory": "8MiB"}
    llm = LLM(model=str(folder), **options)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with KV scales, one per KV head, other ones for keys and values."""
    folder = tmp_path_factory.mktemp("scaled") / "demo"
    shutil.copytree(DEMO, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(6):
        for side, scale in (("k", [0.05, 0.07]), ("v", [0.011, 0.013])):
            name = f"model.layers.{layer}.self_attn.{side}_scale"
            tensors[name] = torch.tensor(scale, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [("fp8", "auto"), ("fp8_e5m2", "auto"), ("fp8_e5m2", "dynamic"), ("fp8", "checkpoint")],
)
def test_tokens_are_those_of_the_engine(dtype: str, scales: str, scaled: Path) -> None:
    """Both compute in float32, so they differ by its rounding; what they store is the same but for
    that.
    """
    model, folder = demo(), scaled if scales == "checkpoint" else DEMO
    stored = FP8Cache(model.config, dtype, scales, model=folder)
    prompts = [PROMPT, PROMPT[5:28]]
    ours = generated(model, prompts, stored, 24)
    assert ours == of_engine(folder, prompts, 24, kv_cache_dtype=dtype, kv_scales=scales)


@pytest.mark.parametrize(
    ("dtype", "scales"), [("fp8", "dynamic"), ("fp8", "checkpoint"), ("fp8_e5m2", "unit")]
)
def test_logits_are_those_of_the_engine(dtype: str, scales: str, scaled: Path) -> None:
    """FP8 moves them; in both systems to the same place, but for what float32 rounds."""
    model, ids = demo(), torch.tensor([PROMPT])
    folder = scaled if scales == "checkpoint" else DEMO
    stored = FP8Cache(model.config, dtype, scales, model=folder)
    with torch.no_grad():
        ours = model(ids, past_key_values=stored).logits[0]
        plain = model(ids).logits[0]
    engine = freight_logits(folder, PROMPT, "float32", kv_cache_dtype=dtype, kv_scales=scales)
    moved = (ours - plain).abs().mean()
    assert moved > 0.01
    assert (ours - engine).abs().mean() < moved / 20


@pytest.mark.parametrize("variant", ["mistral-window", "gemma3"])
def test_tokens_of_models_with_windows_are_those_of_the_engine(
    variant: str, tmp_path: Path
) -> None:
    """The prompts are longer than the window of 24."""
    model = save_random(VARIANTS[variant], tmp_path, torch.float32)
    prompts = [tokens(60), tokens(45)]
    ours = generated(model, prompts, FP8Cache(model.config), 16)
    assert ours == of_engine(tmp_path, prompts, 16, kv_cache_dtype="fp8")


class RoundingCache(DynamicCache):
    """What FP8Cache stores, kept in the dtype of the model."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def rounded(x: Tensor) -> Tensor:
    scale = token_scale(amax(x, -1), Format.E4M3FN).float()[..., None]
    return decode(encode(x, scale, Format.E4M3FN), scale).to(x.dtype)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 16},
    "look-up": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize(
    ("variant", "way"),  # gemma3 has layers with a window, and layers as Llama's
    [*(("gemma3", way) for way in WAYS), *one_in(len(WAYS), [("llama", way) for way in WAYS])],
)
def test_every_way_of_generating(variant: str, way: str) -> None:
    """The same bits come back from both caches, so the tokens are equal; with a window, and in
    bfloat16.
    """
    model = random_model(variant, torch.bfloat16)
    prompts = [(tokens(12) * 4)[:40], tokens(33)][: 1 if way == "look-up" else 2]
    answers = []
    for kind in (FP8Cache, RoundingCache):
        torch.manual_seed(7)
        answers.append(generated(model, prompts, kind(config=model.config), 20, **WAYS[way]))
    assert answers[0] == answers[1]


def test_an_assistant_model_changes_no_token() -> None:
    """Tokens that the model does not accept are removed from the cache."""
    torch.manual_seed(0)
    model, assistant = (
        AutoModelForCausalLM.from_config(VARIANTS["gemma3"]).eval() for _ in range(2)
    )
    plain, assisted = (
        generated(model, [tokens(40)], FP8Cache(model.config), 20, **options)
        for options in ({}, {"assistant_model": assistant})
    )
    assert assisted == plain


def test_the_conversation_goes_on_in_the_same_cache() -> None:
    model, own = demo(), FP8Cache(demo().config)
    first = generated(model, [PROMPT], own, 8)[0]
    stored = own.layers[3].values.view(torch.uint8).clone()
    prompts = [PROMPT + first + PROMPT[:5]]
    second = generated(model, prompts, own, 8)
    assert torch.equal(own.layers[3].values.view(torch.uint8)[:, :, : stored.shape[2]], stored)
    assert second == generated(model, prompts, FP8Cache(model.config), 8)


def test_the_example_of_the_documents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|text)\n(.*?)^```\n", text, re.MULTILINE | re.DOTALL)
    program, shown = blocks[:2]
    exec(compile(program, "docs/transformers.md", "exec"), {})
    assert capsys.readouterr().out == shown
