"""How a request is computed changes no bit of a model with recurrent states: tokens,
log-probabilities, states.

Chunks × alone or in a batch × prefix hit or miss × preempted or not × formats of states and of
pages × tokens of a block: a covering array of them, and as slow tests all. Then odd prompts, and
requests that share, end or fail within a tile. `test_equivalences.py` does so for models without
states, `test_states.py` for the simplest kind with one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.covering import covered
from tests.faults import inject, raising_behind
from tests.hybrids import (
    CHUNKS,
    DRAWN,
    LENGTH,
    MODELS,
    PAGES,
    STATES,
    Run,
    Setup,
    check,
    ids,
    oracle,
)
from tests.means import said

from freight import SamplingParams
from freight.cache import stored
from freight.kernels.cpu import library
from freight.model.mixers.delta_net.layer import DeltaNet
from freight.model.mixers.kimi_delta.layer import KimiDelta
from freight.model.mixers.mamba2.layer import Mamba2

MIXERS = [DeltaNet, Mamba2, KimiDelta]
OTHER_KERNELS = ["reference", *(f"cpu-{build}" for build in library.runnable()[1:])]
# chunks and formats of states
FEW = [(1, "int8"), (7, "fp8"), (16, "bfloat16"), (33, "float32"), (33, "fp8_e4m3fnuz")]
EACH = [Setup(model, "int8", "fp8") for model in MODELS]
each_model = pytest.mark.parametrize("setup", EACH, ids=MODELS)


@pytest.mark.parametrize(
    ("model", "chunk", "batched", "hit", "preempted", "states", "pages", "every"),
    covered(MODELS, CHUNKS, [False, True], [False, True], [False, True], STATES, PAGES, [16, 32]),
)
def test_no_company_changes_a_bit(
    model: str,
    chunk: int,
    batched: bool,
    hit: bool,
    preempted: bool,
    states: str,
    pages: str,
    every: int,
) -> None:
    check(Setup(model, states, pages), chunk, batched, hit, preempted, every)


def of_kernels() -> list[Any]:
    """The first set but for the reference with all of `FEW`, the others with one; the rest is slow."""
    sets = [(kernels, *few) for kernels in ["auto", *OTHER_KERNELS] for few in FEW]
    quick = [row for row in sets if (row[1:] == FEW[-1]) or row[0] == "cpu-avx2"]
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.slow) for row in sets]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kernels", "chunk", "states"), of_kernels())
def test_nor_on_other_kernels(model: str, kernels: str, chunk: int, states: str) -> None:
    check(Setup(model, states, "fp8", kernels), chunk, True, True, True, every=32)


@pytest.mark.parametrize(
    ("model", "states", "pages", "every"), covered(MODELS, STATES, PAGES, [16, 32])
)
def test_nor_does_a_store(
    model: str, states: str, pages: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States and pages that one engine stored are those that another would compute."""
    monkeypatch.setattr(stored, "LEAST_TOKENS", 1)
    setup, prompt = Setup(model, states, pages), ids(model)[:LENGTH]
    for found in (0, (LENGTH - 1) // every * every):
        options = {"kv_store": str(tmp_path), "max_num_batched_tokens": 128}
        llm = setup.engine(enable_prefix_caching=True, state_every=every, **options)
        while not llm.engine.store.mover.tiers.is_open:
            time.sleep(0.001)
        run = Run(llm, prompt)
        assert run.answer() == oracle(setup)[0]
        assert run.request.num_cached_tokens == run.chunks[0].start == found
        llm.engine.close()


@pytest.mark.parametrize("model", MODELS)
def test_formats_have_bits_of_their_own(model: str) -> None:
    """Otherwise the rest shows nothing of them."""
    setups = [Setup(model, states, PAGES[0]) for states in STATES]
    setups += [Setup(model, STATES[0], pages) for pages in PAGES[1:]]
    assert len({tuple(oracle(setup)[0].logprobs) for setup in setups}) == len(setups)


# Shorter than a convolution is wide; a tile or a block, and a token more or less; a token less than
# there may be.
ODD = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 95, 96, 127]


@each_model
@pytest.mark.parametrize("tokens", [1, 33])
def test_odd_prompts(setup: Setup, tokens: int) -> None:
    """`tokens` a step, in turns, and again over what is cached; the longest ends with the model's
    length.
    """
    prompts, params = [ids(setup.model)[:count] for count in ODD], replace(DRAWN, max_tokens=6)
    alone = setup.engine(max_model_len=128, max_num_batched_tokens=128)
    plain = [said(alone, [prompt], params)[0] for prompt in prompts]
    assert [len(one) for one, _ in plain] == [6] * (len(ODD) - 1) + [1]
    options = {"max_model_len": 128, "max_num_batched_tokens": tokens, "max_num_seqs": 32}
    llm = setup.engine(enable_prefix_caching=True, state_every=16, **options)
    assert said(llm, prompts, params) == plain
    before = llm.engine.scheduler.totals.prefix_hits
    assert said(llm, prompts, params) == plain
    hits = sum((count - 1) // 16 * 16 for count in ODD)
    assert llm.engine.scheduler.totals.prefix_hits == before + hits


@each_model
def test_a_prompt_of_the_models_length(setup: Setup) -> None:
    """Nothing can follow it: its own log-probabilities are all that it gives."""
    prompt = {"prompt_token_ids": ids(setup.model)[:128]}
    params, scores = replace(DRAWN, max_tokens=0, prompt_logprobs=2), set()
    for tokens in (128, 33, 1):
        llm = setup.engine(max_model_len=128, max_num_batched_tokens=tokens)
        scores.add(repr(llm.generate([prompt], params)[0].prompt_logprobs))
    assert len(scores) == 1


@each_model
def test_siblings(setup: Setup) -> None:
    """Each goes on from its prompt's last full block in a block of its own."""
    prompt, params = {"prompt_token_ids": ids(setup.model)[:77]}, replace(DRAWN, n=3)
    plain = setup.engine(max_num_batched_tokens=256).generate([prompt], params)[0].outputs
    llm = setup.engine(max_num_batched_tokens=33, enable_prefix_caching=True)
    found = llm.generate([prompt], params)[0].outputs
    assert llm.engine.scheduler.totals.prefix_hits == 2 * 64
    answers, expected = (
        [repr((one.token_ids, one.logprobs)) for one in outputs] for outputs in (found, plain)
    )
    assert answers == expected
    assert len({tuple(one.token_ids) for one in found}) == 3


@each_model
def test_what_ends_within_a_tile_leaves_nothing_behind(setup: Setup) -> None:
    """Its full blocks are found again, its open ones are handed on as they are."""
    llm = setup.engine(max_num_batched_tokens=33, enable_prefix_caching=True)
    beside = Run(llm, ids(setup.model)[200:240], replace(DRAWN, max_tokens=200), "beside")
    ended = Run(llm, ids(setup.model)[:85], name="ended")
    ended.until(70)
    assert ended.request.num_computed_tokens % 16
    llm.engine.abort("ended")
    run = Run(llm, ids(setup.model)[:85])
    assert run.answer() == oracle(setup)[0]
    assert run.request.num_cached_tokens == 64
    assert run.company == {2}
    llm.engine.abort(beside.name)
    assert llm.engine.cache.num_held == 0


def several(setup: Setup, params: SamplingParams = DRAWN) -> tuple[list[list[int]], list[Any]]:
    """Prompts, and what each gives alone."""
    spans, tokens = ((0, 85), (200, 61), (300, 40), (400, 100)), ids(setup.model)
    prompts = [tokens[start : start + count] for start, count in spans]
    alone = setup.engine(max_num_batched_tokens=256)
    return prompts, [said(alone, [prompt], params)[0] for prompt in prompts]


@each_model
@pytest.mark.parametrize("caching", [False, True])
def test_blocks_that_run_out(setup: Setup, caching: bool) -> None:
    params = replace(DRAWN, max_tokens=48)
    prompts, plain = several(setup, params)
    llm = setup.engine(enable_prefix_caching=caching, max_num_batched_tokens=33, max_model_len=160)
    for allocator in llm.engine.cache.allocators:
        if allocator.block_size == 16:  # of pages
            allocator.allocate(allocator.num_free - 16)
    assert said(llm, prompts, params) == plain
    assert llm.engine.scheduler.totals.preemptions > 0


@each_model
@pytest.mark.parametrize("caching", [False, True])
def test_a_step_that_is_lost(setup: Setup, caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mixer did to states before the step raised is in no answer."""
    prompts, plain = several(setup)
    faults = inject(monkeypatch, {tuple(prompts[0]): 70, tuple(prompts[3]): 107}, once=True)
    for mixer in MIXERS:
        monkeypatch.setattr(mixer, "__call__", raising_behind(mixer.__call__, faults))
    llm = setup.engine(enable_prefix_caching=caching, max_num_batched_tokens=33)
    assert said(llm, prompts, DRAWN) == plain
    assert faults.at == {}
    assert 1 in faults.sizes
    assert max(faults.sizes) > 1
