"""Contexts of more than index_topk tokens through an engine, with the reference kernels: a request has
the same bits whatever runs beside it, and those of a dense model up to index_topk.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drafters import Told
from tests.parity.random_models import tokens
from tests.parity.test_predicting import nextn, save
from tests.parity.test_sparse import (
    CONFIGS,
    SHAPE,
    Choices,
    by_indexer,
    model_of,
    our_choices,
    rows_alike,
    their_choices,
)
from tests.refusals import refuses
from transformers import DeepseekV32Config

from freight import LLM, SamplingParams
from freight.cache import stored
from freight.engine import drafting
from freight.engine.guesses import Guesses
from freight.errors import ConfigError
from freight.model.decoder import Decoder
from freight.model.open import open_checkpoint
from freight.settings.engine import EngineArgs
from freight.settings.sparse import for_context

CONTEXT = 256
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True, logprobs=3, prompt_logprobs=1
)
SEEDED = replace(PARAMS, temperature=0.9, seed=5)
CACHES = ("auto", "fp8", "int8")


def sparse_llm(folder: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "kernels": "reference",
        "max_model_len": CONTEXT,
        "skip_tokenizer_init": True,
        "speculate": 0,
        "threads": 1,
        "kv_cache_memory": "4MiB",
        "enable_prefix_caching": False,
    }
    return LLM(str(folder), **{**given, **options})


def prompts_around(topk: int) -> list[list[int]]:
    """Of 1 token, around index_topk, and of several times as many."""
    several = tokens(3 * topk if topk > 50 else 9 * topk)
    lengths = (1, topk - 1, topk, topk + 1, len(several))
    return [several[-length:] for length in lengths]


def answers(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS
) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    return [
        (out.prompt_logprobs, out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs
    ]


def alone(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> list[Any]:
    return [answers(llm, [ids], params)[0] for ids in prompts]


def of_choice(*few: tuple[str, int, str]) -> pytest.MarkDecorator:
    """Every model, index_topk and cache; but for a few, slow."""
    every = [(name, topk, kv) for name in CONFIGS for topk in (8, 64) for kv in CACHES]
    marked = [
        pytest.param(
            *case, marks=[] if case in few else [pytest.mark.slow], id="-".join(map(str, case))
        )
        for case in every
    ]
    return pytest.mark.parametrize(("name", "topk", "kv"), marked)


@of_choice(("deepseek", 8, "auto"), ("glm-shared", 64, "fp8"), ("glm", 8, "int8"))
def test_a_request_has_the_same_bits_in_any_chunks_and_beside_others(
    name: str, topk: int, kv: str, tmp_path: Path
) -> None:
    model_of(name, topk, tmp_path)
    prompts = prompts_around(topk)
    expected = alone(sparse_llm(tmp_path, kv_cache_dtype=kv), prompts)
    for options in (
        {"max_num_batched_tokens": 5, "max_num_seqs": 1},  # chunks
        {"max_num_seqs": 8},  # beside each other
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    ):
        assert answers(sparse_llm(tmp_path, kv_cache_dtype=kv, **options), prompts) == expected
    # found in the cache, which a request with prompt_logprobs does not use
    llm = sparse_llm(tmp_path, kv_cache_dtype=kv, enable_prefix_caching=True)
    without = replace(SEEDED, prompt_logprobs=None)
    longest = prompts[-1:]
    seeded = alone(sparse_llm(tmp_path, kv_cache_dtype=kv), longest, without)
    assert alone(llm, longest, without) == seeded
    again = llm.generate([{"prompt_token_ids": longest[0]}], without)[0]
    assert again.num_cached_tokens >= 48
    assert (None, again.outputs[0].token_ids, again.outputs[0].logprobs) == seeded[0]


@of_choice(("glm-shared", 8, "auto"), ("deepseek", 64, "int8"))
def test_preempted_and_recomputed(name: str, topk: int, kv: str, tmp_path: Path) -> None:
    model_of(name, topk, tmp_path)
    begin = tokens()
    prompts = [begin[shift : shift + 70] for shift in range(6)]
    params = replace(PARAMS, max_tokens=40, prompt_logprobs=None)
    expected = alone(sparse_llm(tmp_path, kv_cache_dtype=kv), prompts, params)
    llm = sparse_llm(tmp_path, kv_cache_dtype=kv)
    allocator = llm.engine.cache.allocators[0]
    free = allocator.allocate(allocator.num_free - 34)  # six begin with five blocks each
    assert answers(llm, prompts, params) == expected
    assert llm.engine.stats().preemptions > 0
    assert free


@of_choice(("deepseek", 8, "fp8"), ("glm-shared", 64, "auto"))
@pytest.mark.parametrize("kind", ["mixed", pytest.param("wrong", marks=pytest.mark.slow)])
def test_drafts_asked_for_by_name(name: str, topk: int, kv: str, kind: str, tmp_path: Path) -> None:
    model_of(name, topk, tmp_path)
    params = replace(SEEDED, max_tokens=40)
    prompts = prompts_around(topk)
    expected = alone(sparse_llm(tmp_path, kv_cache_dtype=kv), prompts, params)
    llm = sparse_llm(tmp_path, kv_cache_dtype=kv, speculate=5, max_num_seqs=3)
    told = Told([one[1] for one in expected], kind, random.Random(1), SHAPE["vocab_size"])
    llm.engine.drafters = lambda prompt, params: [told] * params.n  # type: ignore[method-assign]
    assert answers(llm, prompts, params) == expected
    stats = llm.engine.stats()
    assert stats.drafted > 20
    assert (stats.accepted > 0) == (kind != "wrong")


@of_choice(*(("glm", 64, kv) for kv in CACHES), ("deepseek", 64, "auto"))
def test_up_to_index_topk_it_is_the_dense_model(
    name: str, topk: int, kv: str, tmp_path: Path
) -> None:
    model_of(name, topk, tmp_path)
    dense = sparse_llm(tmp_path, kv_cache_dtype=kv, max_model_len=topk)
    assert dense.engine.runner.model.config.dense_limit == topk
    llm = sparse_llm(tmp_path, kv_cache_dtype=kv)
    prompts = [tokens(length) for length in (1, topk // 2, topk - 4)]
    params = replace(PARAMS, max_tokens=4)
    expected = alone(dense, prompts, params)
    assert alone(llm, prompts, params) == expected
    # and beside one that attends sparsely
    assert answers(llm, [*prompts, tokens(2 * topk)], params)[:-1] == expected
    mixers = llm.engine.runner.model.config.paged.values()
    indexers = [mixer for mixer in mixers if mixer.index_dim]
    assert indexers
    sizes = {"auto": 4 * SHAPE["index_head_dim"]}  # in 8 bits a scale of 4 bytes
    of_keys = sizes.get(kv, SHAPE["index_head_dim"] + 4) * len(indexers)
    pools = [one.engine.runner.pool for one in (llm, dense)]
    assert pools[0].spec.bytes_per_token - pools[1].spec.bytes_per_token == of_keys


@pytest.mark.parametrize("topk", [8, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_decoded_logits_equal_transformers(
    name: str, topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 decoded tokens behind a prompt of about index_topk."""
    model = model_of(name, topk, tmp_path)
    llm = sparse_llm(tmp_path, dtype="float32", activations="bfloat16")
    prompt = tokens(topk + 2)
    params = replace(PARAMS, max_tokens=40, logprobs=20, prompt_logprobs=None)
    computed: list[torch.Tensor] = []
    logits_of = Decoder.logits

    def watched(self: Decoder, states: Any) -> torch.Tensor:
        computed.append(logits_of(self, states))
        return computed[-1]

    monkeypatch.setattr(Decoder, "logits", watched)
    with our_choices() as calls:
        ((_, generated, logprobs),) = answers(llm, [prompt], params)
    ids = [*prompt, *generated[:-1]]
    theirs: Choices = []
    scores: list[torch.Tensor] = []
    with torch.no_grad(), their_choices(theirs, scores):
        expected = model(torch.tensor([ids])).logits[0, len(prompt) - 1 :]
    ours = by_indexer(calls, len(theirs), len(ids))
    alike = rows_alike(theirs, ours, scores, topk) - (len(prompt) - 1)
    assert alike > 0
    assert len(computed) == 40
    assert (torch.cat(computed) - expected)[:alike].abs().max() <= 1e-4
    for of_row, found in zip(torch.log_softmax(expected, -1)[:alike], logprobs, strict=False):
        for token, one in found.items():
            assert abs(one.logprob - of_row[token]) <= 1e-4


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_layers_that_predict_draft_and_read_all_keys(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guesses, "wants", lambda self, num_output: True)  # it is hardly ever right
    monkeypatch.setattr(drafting, "LEAST", 0.0)
    config = DeepseekV32Config(
        **{**SHAPE, "index_topk": 8},
        first_k_dense_replace=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    saved = save(nextn(config), tmp_path)
    assert saved.main_layers == 2
    prompts = prompts_around(8)
    params = replace(SEEDED, max_tokens=20)
    expected = alone(sparse_llm(tmp_path, kv_cache_dtype=kv), prompts, params)
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    llm = sparse_llm(tmp_path, kv_cache_dtype=kv, speculative_config=drafts, speculate=None)
    assert alone(llm, prompts, params) == expected  # a request alone has the most drafts
    assert answers(llm, prompts, params) == expected
    assert llm.engine.stats().drafted > 20


def test_a_store_keeps_the_keys_of_indexers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one engine stored another finds, but no dense one."""
    monkeypatch.setattr(stored, "LEAST_TOKENS", 1)
    model_of("glm-shared", 32, tmp_path / "model")
    params = replace(PARAMS, prompt_logprobs=None)
    options: dict[str, Any] = {
        "kv_store": str(tmp_path / "store"),
        "enable_prefix_caching": True,
        "kv_cache_dtype": "fp8",
    }

    def run(length: int, **more: Any) -> tuple[int, Any]:
        llm = sparse_llm(tmp_path / "model", **options, **more)
        try:
            while not llm.engine.store.mover.tiers.is_open:  # type: ignore[union-attr]
                time.sleep(0.001)
            (out,) = llm.generate([{"prompt_token_ids": tokens(length)}], params)
        finally:
            llm.engine.close()
        return out.num_cached_tokens, (out.outputs[0].token_ids, out.outputs[0].logprobs)

    missed, expected = run(100)
    hit, found = run(100)
    assert missed == 0
    assert hit >= 48
    assert found == expected
    assert run(20, max_model_len=32)[0] == 0


def test_what_does_not_run_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of("deepseek", 8, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    for options, said in (
        ({"kernels": "auto"}, "--kernels reference"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"attention_compute": "fp8", "kv_cache_dtype": "fp8"}, "--attention-compute fp8"),
        ({"pooling": "embed"}, "pooling"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
    ):
        with refuses(ConfigError, said):
            sparse_llm(tmp_path, **options)
    model = open_checkpoint(str(tmp_path)).model
    args = EngineArgs(str(tmp_path), kernels="reference", max_model_len=9)
    with refuses(ConfigError, "a GPU", "--device cpu", "at most 8"):
        for_context(model, args, "cuda")
    assert for_context(model, replace(args, max_model_len=8), "cuda") is model
    assert for_context(model, replace(args, kernels="auto"), "cpu") is model
    with refuses(ConfigError, "256 positions"):
        sparse_llm(tmp_path, max_model_len=257)


def test_what_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_of("deepseek", 8, tmp_path)
    with caplog.at_level(logging.INFO, "freight"):
        sparse_llm(tmp_path)
    assert "attention is sparse" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "freight"):
        sparse_llm(tmp_path, max_model_len=None)
    assert "attention is sparse" not in caplog.text
    assert "--kernels reference" in caplog.text
