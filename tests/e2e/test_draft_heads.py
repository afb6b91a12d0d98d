"""Heads that take a model's states draft what their definition gives, and change no bit of any request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.e2e.test_drafts import check_same
from tests.parity.random_models import save_random
from tests.parity.test_eagle import TARGET, random_tensors, write_head
from tests.parity.test_eagle import VARIANTS as EAGLES
from tests.parity.test_predicting import CASES, save
from tests.refusals import refuses
from transformers import LlamaConfig

from freight import LLM, SamplingParams
from freight.engine.drafting import KEPT, Drafting
from freight.engine.engine import Engine
from freight.engine.guesses import Guesses
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.errors import ConfigError

MOST = 8
HEADS = ["deepseek-v3", "glm4-moe", "mimo", "qwen3-next", "qwen3-5", "midlayer", "last-states"]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "threads": 1,
    "max_model_len": 160,
}


@pytest.fixture(scope="module", params=HEADS)
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How an engine is made of a model and a head that was not trained for it."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": MOST}
    if name in CASES:
        save(CASES[name], folder)
    else:
        save_random(LlamaConfig(**TARGET), folder, torch.float32)
        variant = EAGLES[name]
        head = write_head(folder / "head", variant, random_tensors(variant))
        config = {**config, "method": "eagle3", "model": str(head)}

    def start(**options: Any) -> LLM:
        return LLM(str(folder), **{**OPTIONS, "speculative_config": config, **options})

    return start


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as there is room for: the heads are hardly ever right."""
    monkeypatch.setattr(Guesses, "wants", lambda self, num_output: True)
    monkeypatch.setattr(Guesses, "likely", lambda self, kinds: 1.0)
    monkeypatch.setattr(Guesses, "goes_on", lambda self, kinds: True)


def drafting_of(engine: Engine) -> Drafting:
    assert engine._drafting is not None
    return engine._drafting


@torch.inference_mode()
def defined(engine: Engine, tokens: list[int], known: int, count: int) -> list[int]:
    """The drafts behind `known` of these tokens: the head over all rows at once, then row by row."""
    drafting = drafting_of(engine)
    head = drafting.runner.head
    pool = drafting.runner.pool
    blocks = [range(group.most_blocks(160, 160)) for group in pool.spec.groups]
    rows = engine.runner.run([SequenceSlice(tokens[:known], 0, blocks, Logits.ALL)])
    assert rows.features is not None
    given = SequenceSlice(tokens[1:known], 0, blocks, Logits.LAST)
    features = rows.features[: known - 1]
    drafts: list[int] = []
    while True:
        states = head.hidden(prepare([given], pool.spec.groups), features, pool.layers)
        token = int(head.logits(states).argmax())
        if head.vocabulary is not None:
            token = int(head.vocabulary[token])
        drafts.append(token)
        if len(drafts) == count:
            return drafts
        features = states
        given = SequenceSlice([token], known - 2 + len(drafts), blocks, Logits.LAST)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "bfloat16"])
@pytest.mark.parametrize("budget", [24, 512])
def test_drafts_are_those_of_the_definition(
    drafted: Any, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, budget: int
) -> None:
    """Of a prompt in chunks, and behind tokens of which some were drafted: whatever the head took in
    before, as one pass over all of it would give.
    """
    llm = drafted(kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=budget)
    engine = llm.engine
    drafting = drafting_of(engine)
    rng = Random(3)
    prompt = [rng.randrange(3, 150) for _ in range(61)]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=40,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=1 if budget == 24 else None,
    )
    engine.scheduler.asks_head = False
    expected = llm.generate([prompt], params)[0].outputs[0].token_ids
    engine.scheduler.asks_head = True
    engine.forget_prefixes()
    proposed: dict[int, tuple[int, ...]] = {}
    propose = drafting._propose

    def noted(work: Any) -> list[tuple[int, ...]]:
        drafts = propose(work)
        for item, tokens in zip(work, drafts, strict=True):
            if tokens:
                proposed[item.chunk.start + 1] = tokens
        # some of them right, so that the next step begins behind them
        told = []
        for item, tokens in zip(work, drafts, strict=True):
            behind = expected[item.row.position :][: len(tokens)]
            right = rng.randint(0, len(tokens))
            told.append((*behind[:right], *tokens[right:]))
            item.chunk.request.guesses.propose(told[-1], [0] * len(told[-1]), item.row.position)
        return told

    monkeypatch.setattr(drafting, "_propose", noted)
    found = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert found == expected
    assert engine.stats().accepted > 5
    assert len(proposed) > 5
    for known, drafts in proposed.items():
        assert list(drafts) == defined(engine, [*prompt, *expected], known, len(drafts)), known


def random_params(rng: Random) -> SamplingParams:
    max_tokens = rng.randint(1, 60)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(100),
        n=rng.choice([1, 1, 2]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, rng.randint(0, max_tokens)]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
        stop_token_ids=rng.choice([(), tuple(rng.sample(range(150), 10))]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        detokenize=False,
    )


def outputs_of(engine: Engine, requests: dict[str, Any], rng: Random) -> Iterator[tuple[str, Any]]:
    """The outputs of requests that come at any time, of which some are aborted."""
    waiting = list(requests)
    while waiting or engine.has_unfinished:
        burst = rng.choice([0, 0, 0, 1, 4])
        for name in waiting[:burst]:
            prompt, params = requests[name]
            engine.add(name, engine.accept(prompt, params), params)
        del waiting[:burst]
        running = [name for name in engine.groups if not engine.is_finished(name)]
        if running and rng.random() < 0.02:
            engine.abort(rng.choice(running))
        engine.step()
        for name in [name for name in engine.groups if engine.is_finished(name)]:
            yield name, engine.output(name)
            engine.release(name)


@pytest.mark.parametrize("count", [24, pytest.param(400, marks=pytest.mark.slow)])
def test_random_requests_have_the_bits_of_none(
    drafted: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """In a cache of few blocks, with drafts that are told what is right at times."""
    llm = drafted(kv_cache_dtype="fp8", kv_cache_memory="1MiB", max_num_seqs=5)
    engine = llm.engine
    drafting = drafting_of(engine)
    rng = Random(count)
    requests = {}
    begin = [rng.randrange(3, 150) for _ in range(40)]
    for index in range(count):
        prompt = begin[: rng.randint(0, 40)] + [
            rng.randrange(3, 150) for _ in range(rng.randint(1, 30))
        ]
        requests[str(index)] = prompt, random_params(rng)
    engine.scheduler.asks_head = False
    expected = {}
    for name, (prompt, params) in requests.items():
        expected[name] = llm.generate([prompt], params)[0]
    assert engine.stats().drafted == 0
    engine.scheduler.asks_head = True
    drawn = drafting._drawn

    def told(logits: Any, going: Any) -> Any:
        further = drawn(logits, going)
        for item in going:
            request = item.work.chunk.request
            name, _, index = request.request_id.partition("/")
            answer = expected[name].outputs[int(index)].token_ids
            position = item.work.row.position + len(item.drafts) - 1
            if item.drafts and position < len(answer) and rng.random() < 0.7:
                item.drafts[-1] = answer[position]
        return further

    monkeypatch.setattr(drafting, "_drawn", told)
    found = dict(outputs_of(engine, requests, rng))
    assert found.keys() == expected.keys()
    for name, output in found.items():
        check_same(output, expected[name])
    stats = engine.stats()
    assert stats.accepted > count
    assert stats.drafted - stats.accepted > count
    assert stats.prefix_hits > 0
    assert engine.cache.num_held == 0


def test_kept_features_hold_no_memory_of_other_requests(
    drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts, a request that decodes keeps one row of each step, and not the step's others. None
    that waits again keeps any.
    """
    llm = drafted(kv_cache_dtype="fp8")
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    engine.add("long", engine.accept([5, 6, 7], params), params)
    request = engine.groups["long"].completions[0].request
    engine.step()
    rng = Random(0)
    once = SamplingParams(max_tokens=1, detokenize=False)
    for index in range(10):
        prompt = [rng.randrange(3, 150) for _ in range(100)]
        engine.add(str(index), engine.accept(prompt, once), once)
        engine.step()
    assert request.guesses is not None
    assert len(request.guesses.kept) >= 10
    for _, features in request.guesses.kept:
        assert features.untyped_storage().nbytes() == features.nbytes
    while engine.scheduler.preempt_latest() is not request:
        pass
    assert request.guesses.kept == []


def test_requests_without_drafts_keep_few_features(drafted: Any) -> None:
    """Beside many others nothing is drafted, and a pass takes the features in now and then."""
    llm = drafted(kv_cache_dtype="fp8", max_num_seqs=12)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True, detokenize=False)
    for index in range(12):
        engine.add(str(index), engine.accept([5 + index, 6, 7], params), params)
    requests = [group.completions[0].request for group in engine.groups.values()]
    most = 0
    while engine.has_unfinished:
        engine.step()
        running = [request.guesses for request in requests if request.guesses is not None]
        most = max([most, *(guesses.num_kept for guesses in running)])
    assert engine.stats().drafted == 0
    assert most == KEPT


def test_auto_finds_the_layers_of_the_checkpoint(tmp_path: Path) -> None:
    save(CASES["mimo"], tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS, speculate="auto")
    assert drafting_of(llm.engine).runner.head.feature_layers == ()
    assert LLM(str(tmp_path), **OPTIONS).engine._drafting is None
    assert LLM("demo", threads=1, speculate="auto").engine._drafting is None
    with refuses(ConfigError, "has no layers that predict further tokens"):
        LLM("demo", threads=1, speculative_config={"method": "mtp"})
