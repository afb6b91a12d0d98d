"""Adapters over the experts of a mixture, through an engine: every answer is that of its adapter
alone, to the bit, whatever runs beside it, on one rank and on two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import VARIANTS

from freight import LLM, LoRARequest, SamplingParams

ADAPTERS = Path(__file__).parents[1] / "fixtures" / "adapters"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)


def answers(folder: Path, names: list[str | None], **options: object) -> list[object]:
    """Return what is answered with each adapter alone, then with all of them together."""
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        kv_cache_memory="8MiB",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=4,
        enable_prefix_caching=False,
        **options,
    )
    requests = [name and LoRARequest(name, 1, str(ADAPTERS / name)) for name in names]
    prompt = {"prompt_token_ids": tokens(20)}
    alone = [llm.generate(prompt, GREEDY, lora_request=one)[0] for one in requests]
    together = llm.generate([prompt] * len(names), GREEDY, lora_request=requests)
    llm.engine.close()
    return [output.outputs[0].logprobs for output in (*alone, *together)]


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_rows_are_those_of_a_row_alone(quantization: str, tmp_path: Path) -> None:
    save_random(VARIANTS["qwen2-moe"], tmp_path, torch.bfloat16)
    names = ["qwen2-moe-experts", None, "qwen2-moe"]
    results = answers(tmp_path, names, quantization=quantization)
    assert results[:3] == results[3:]
    assert results[0] != results[1] != results[2] != results[0]


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen2-moe", "qwen2-moe-experts"),
        ("gpt-oss", "gpt-oss-experts"),
        ("nemotron-h-latent", "nemotron-h-experts"),
    ],
)
def test_ranks_give_the_bits_of_one(variant: str, name: str, tmp_path: Path) -> None:
    save_random(VARIANTS[variant], tmp_path, torch.bfloat16)
    one = answers(tmp_path, [name, None], dtype="bfloat16")
    two = answers(tmp_path, [name, None], dtype="bfloat16", tensor_parallel_size=2)
    assert one == two
    assert one[0] != one[1]
