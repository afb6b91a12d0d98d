"""Pages in another layout under the whole engine: the same tokens and log-probabilities to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import VARIANTS

from freight import LLM, SamplingParams
from freight.cache.pool import KVPool, allocate_pool
from freight.engine import build
from freight.settings.engine import KVCacheConfig, PageLayout

PROMPTS = [tokens(40), tokens(40)[:20] + tokens(9), tokens(3)]
CACHES = [("bfloat16", "auto"), ("fp8", "dynamic"), ("fp8", "unit"), ("int8", "auto")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows and none in turn, layers that read the pages of others, heads of two widths."""
    folder = tmp_path_factory.mktemp("layouts") / "model"
    save_random(VARIANTS["gemma4-shared"], folder, torch.float32)
    return folder


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(("cache", "scales"), CACHES)
def test_no_layout_changes_a_bit(folder, cache, scales, kernels, monkeypatch):
    options = {
        "kv_cache_dtype": cache,
        "kv_scales": scales,
        "kernels": kernels,
        "dtype": "bfloat16",
    }
    params = SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)

    def answers(layout: PageLayout) -> list[Any]:
        def allocate(spec: Any, kv: KVCacheConfig, *rest: Any, **named: Any) -> KVPool:
            pool = allocate_pool(spec, replace(kv, layout=layout), *rest, **named)
            strides.add(pool.paged[0].pages.strides)
            return pool

        monkeypatch.setattr(build, "allocate_pool", allocate)
        llm = LLM(str(folder), skip_tokenizer_init=True, max_num_batched_tokens=40, **options)
        outputs = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[:1], params)]
        assert outputs[-1].num_cached_tokens == 32
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

    strides: set[Any] = set()
    expected, *others = (answers(layout) for layout in PageLayout)
    assert all(other == expected for other in others)
    assert len(strides) == len(PageLayout)
