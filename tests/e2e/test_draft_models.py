"""A second model that drafts changes no bit of any request, whatever it drafts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.e2e.test_drafts import (
    EARLY,
    OPTIONS,
    SOURCES,
    check_same,
    outputs_of,
    random_params,
)
from tests.e2e.test_kv_store import PROMPTS, opened
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS
from tests.refusals import refuses

from freight import LLM, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.engine import drafting as drafting_module
from freight.engine.engine import Engine
from freight.engine.guesses import Guesses
from freight.errors import ConfigError, RequestError
from freight.outputs import FinishReason

MOST = 12
CACHES = {
    "fp8": "dynamic",
    "bfloat16": "auto",
    "int8": "dynamic",
    "fp8_e5m2": "auto",
}  # their scales


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with noise on its weights: a model that is often right about what the demo says."""
    folder = tmp_path_factory.mktemp("drafts") / "disturbed"
    shutil.copytree(resolve_model("demo"), folder)
    numbers = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                noise = torch.randn(tensor.shape, generator=numbers)
                tensors[name] = (tensor.float() + 0.15 * tensor.float().std() * noise).to(
                    tensor.dtype
                )
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def drafted_by(folder: str | Path, **options: Any) -> LLM:
    config = {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": MOST,
    }
    llm = LLM(**{"model": "demo", **OPTIONS, "speculative_config": config, **options})
    assert llm.engine._drafting is not None
    llm.engine._drafting._cost = 0.02  # a model of the size of the demo would never pay
    llm.engine._drafting._row = 0.03
    return llm


@contextmanager
def without_drafts(engine: Engine) -> Iterator[None]:
    most = engine.scheduler.most_drafts
    engine.scheduler.most_drafts = 0
    yield
    engine.scheduler.most_drafts = most


@pytest.mark.parametrize(
    ("cache", "count"),
    [
        ("fp8", 24),
        ("int8", 24),
        *(pytest.param(cache, 500, marks=pytest.mark.slow) for cache in CACHES),
    ],
)
def test_random_requests_have_the_bits_of_none(disturbed: Path, cache: str, count: int) -> None:
    """In a cache of few blocks, of which the second model has a half: preempted, aborted, found again."""
    memory = "1440KiB" if cache == "bfloat16" else "720KiB"
    llm = drafted_by(
        disturbed,
        kv_cache_dtype=cache,
        kv_scales=CACHES[cache],
        kv_cache_memory=memory,
        max_num_seqs=6,
        speculate="auto",
    )
    engine = llm.engine
    rng = Random(count)
    requests = {}
    for index in range(count):
        source = rng.choice(SOURCES) * rng.randint(1, 2)
        requests[str(index)] = source[: rng.randint(1, len(source))], random_params(rng)
    with without_drafts(engine):
        expected = dict(outputs_of(engine, requests))
    before = engine.stats()
    assert before.drafted == 0
    found = dict(outputs_of(engine, requests, rng))
    assert found.keys() == expected.keys()
    for name, output in found.items():
        check_same(output, expected[name])
    stats = engine.stats()
    assert stats.accepted > count
    assert stats.drafted_by.keys() == stats.accepted_by.keys() == {"text", "grammar", "draft_model"}
    assert sum(stats.drafted_by.values()) == stats.drafted
    assert sum(stats.accepted_by.values()) == stats.accepted
    assert min(stats.accepted_by["text"], stats.accepted_by["draft_model"]) > 0
    assert stats.drafted - stats.accepted > count / 2
    assert stats.preemptions > before.preemptions
    assert stats.prefix_hits > before.prefix_hits
    assert engine.cache.num_held == 0
    reasons = {one.finish_reason for output in found.values() for one in output.outputs}
    assert reasons - set(EARLY) >= {FinishReason.LENGTH, FinishReason.STOP}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_is_right(temperature: float) -> None:
    """With the same logits and the same random number of a position, both draw the same token."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
    plain = LLM("demo", **OPTIONS, speculate=0)
    llm = drafted_by("demo")
    for text in SOURCES:
        expected = plain.generate([text], params)[0].outputs[0].token_ids
        assert llm.generate([text], params)[0].outputs[0].token_ids == expected
    stats = llm.engine.stats()
    assert stats.drafted > 80
    assert stats.accepted == stats.drafted


def test_a_long_text_is_taken_in_before_anything_is_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few tokens a step; a draft before the last of them would be behind another token."""
    monkeypatch.setattr(drafting_module, "AT_ONCE", 8)
    llm = drafted_by("demo")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm.generate([SOURCES[0] * 2], params)
    stats = llm.engine.stats()
    assert stats.drafted > 20
    assert stats.accepted == stats.drafted


def test_a_draft_with_another_random_number_is_right_less_often(
    disturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the shared random number gains where text is sampled, and the head draws."""
    monkeypatch.setattr(Guesses, "takes_likeliest", False)
    accepted = []
    for is_shared in (True, False):
        llm = drafted_by(disturbed)
        drafting = llm.engine._drafting
        assert drafting is not None
        if not is_shared:
            chosen = drafting._drawn

            def drawn(logits: Any, going: Any, chosen: Any = chosen) -> Any:
                for item in going:
                    row = item.work.row.fork(item.work.row.output_token_ids)
                    row.seed = row.seed + 1
                    item.work = item.work._replace(row=row)
                return chosen(logits, going)

            monkeypatch.setattr(drafting, "_drawn", drawn)
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True)
        llm.generate(SOURCES, params)
        stats = llm.engine.stats()
        accepted.append(stats.accepted / stats.drafted)
    assert accepted[0] > accepted[1] + 0.1


def test_a_model_of_other_weights_rests(tmp_path: Path) -> None:
    """One that is never right drafts hardly anything, and then nothing."""
    save_random(VARIANTS["llama"], tmp_path / "random", torch.bfloat16)
    config = {"method": "draft_model", "model": str(tmp_path / "random")}
    llm = LLM(
        str(tmp_path / "random"), **OPTIONS, speculative_config=config, skip_tokenizer_init=True
    )
    drafting = llm.engine._drafting
    assert drafting is not None
    drafting._cost = 0.3
    drafting._row = 0.03
    drawn = drafting._drawn
    passes = []

    def wrong(logits: Any, going: Any) -> Any:
        passes.append(len(going))
        return drawn(logits.flip(-1), going)

    drafting._drawn = wrong  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    stats = llm.engine.stats()
    assert stats.drafted < 15
    assert len(passes) < 15


def test_a_second_model_of_fewer_positions_drafts_up_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on behind them, from a prompt before their end, at it and behind it."""
    monkeypatch.setattr(Guesses, "likely", lambda self, kinds: 1.0)
    monkeypatch.setattr(Guesses, "goes_on", lambda self, kinds: True)
    model = tmp_path / "model"
    save_random(VARIANTS["llama"], model, torch.bfloat16)
    second = tmp_path / "second"
    shutil.copytree(model, second)
    config = json.loads((second / "config.json").read_text())
    config["max_position_embeddings"] = 50
    (second / "config.json").write_text(json.dumps(config))
    llm = drafted_by(second, model=str(model), skip_tokenizer_init=True)
    drafting = llm.engine._drafting
    assert drafting is not None
    run = drafting._run
    ends = []

    def noted(slices: Any, features: Any) -> Any:
        ends.extend(part.start + len(part.token_ids) for part in slices)
        return run(slices, features)

    drafting._run = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    prompts = [list(range(3, 3 + count)) for count in (5, 49, 50, 51, 100)]
    with without_drafts(llm.engine):
        expected = llm.generate(prompts, params)
    llm.engine.forget_prefixes()
    for prompt, wanted in zip(prompts, expected, strict=True):
        found = llm.generate([prompt], params)[0]
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert llm.engine.stats().accepted > 20
    assert max(ends) == 50


def test_what_is_refused(tmp_path: Path) -> None:
    save_random(VARIANTS["llama"], tmp_path / "llama", torch.bfloat16)
    save_random(VARIANTS["qwen3-5-text"], tmp_path / "hybrid", torch.bfloat16)
    plain = {"method": "draft_model", "model": str(tmp_path / "llama")}
    with refuses(ConfigError, "cannot be compared with the model's", "has no tokenizer"):
        LLM("demo", **OPTIONS, speculative_config=plain)
    with refuses(ConfigError, "has 320 tokens and the model", "same vocabulary"):
        LLM("demo", **OPTIONS, speculative_config=plain, skip_tokenizer_init=True)
    states = {"method": "draft_model", "model": str(tmp_path / "hybrid")}
    with refuses(ConfigError, "keep a state", "attention alone"):
        LLM(str(tmp_path / "llama"), **OPTIONS, skip_tokenizer_init=True, speculative_config=states)
    with refuses(ConfigError, "'draft_model' drafts in an engine of one stage"):
        LLM("demo", **OPTIONS, speculative_config=plain, pipeline_parallel_size=2)


def test_beside_a_model_with_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States take back what a second model drafted."""
    monkeypatch.setattr(Guesses, "wants", lambda self, num_output: True)
    monkeypatch.setattr(Guesses, "likely", lambda self, kinds: 1.0)
    monkeypatch.setattr(Guesses, "goes_on", lambda self, kinds: True)
    save_random(VARIANTS["llama"], tmp_path / "llama", torch.bfloat16)
    save_random(VARIANTS["qwen3-5-text"], tmp_path / "hybrid", torch.bfloat16)
    llm = drafted_by(tmp_path / "llama", model=str(tmp_path / "hybrid"), skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, logprobs=2)
    params = replace(params, detokenize=False)
    prompts = [list(range(3, 3 + count)) for count in (1, 15, 16, 40)]
    found = llm.generate(prompts, params)
    assert llm.engine.stats().drafted > 40
    llm.engine.forget_prefixes()
    with without_drafts(llm.engine):
        expected = llm.generate(prompts, params)
    for drafted, plain in zip(found, expected, strict=True):
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
        assert drafted.outputs[0].logprobs == plain.outputs[0].logprobs


def test_weights_do_not_change_beside_a_second_model(disturbed: Path) -> None:
    llm = drafted_by(disturbed)
    with refuses(RequestError, "a model or layers that draft", "start it again"):
        llm.update_weights("demo")


def test_a_second_model_that_fails_costs_drafts_alone(
    disturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = drafted_by(disturbed)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with without_drafts(llm.engine):
        expected = llm.generate(SOURCES, params)
    drafting = llm.engine._drafting
    assert drafting is not None
    run = drafting._run
    calls = []

    def failing(slices: Any, features: Any) -> Any:
        calls.append(len(slices))
        if len(calls) % 3 == 0:
            raise MemoryError("no memory")
        return run(slices, features)

    drafting._run = failing  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "freight"):
        found = llm.generate(SOURCES, params)
    assert [one.outputs[0].token_ids for one in found] == [
        one.outputs[0].token_ids for one in expected
    ]
    assert llm.engine.stats().accepted > 0
    assert caplog.text.count("a step has no drafts") == 1


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": r"[a-z]{1,12}( = [0-9]{1,4})?\n"},
        {
            "json": {
                "type": "object",
                "properties": {"name": {"type": "string", "minLength": 8, "maxLength": 20}},
                "required": ["name"],
            }
        },
    ],
)
def test_a_grammar_permits_what_a_second_model_drafts(disturbed: Path, structured: Any) -> None:
    llm = drafted_by(disturbed, speculate="auto")
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=40, structured_outputs=structured
        )
        for temperature in (0.0, 0.9)
        for seed in range(3)
    ]
    with without_drafts(llm.engine):
        expected = llm.generate(SOURCES[:1] * len(params), params)
    found = llm.generate(SOURCES[:1] * len(params), params)
    for drafted, plain in zip(found, expected, strict=True):
        check_same(drafted, plain)
    assert llm.engine.stats().drafted > 0


def test_what_a_second_model_computed_comes_from_the_store(tmp_path: Path) -> None:
    """With keys and values of what was found, a model that drafts for itself is right as before."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    answers = []
    found = []
    for _ in range(2):
        config = {"model": "demo", "num_speculative_tokens": MOST}
        llm = opened(tmp_path, threads=1, speculative_config=config)
        assert llm.engine._drafting is not None
        llm.engine._drafting._cost = 0.02
        llm.engine._drafting._row = 0.03
        output = llm.generate([PROMPTS[0]], params)[0]
        answers.append(output.outputs[0].token_ids)
        found.append(output.num_cached_tokens)
        stats = llm.engine.stats()
        assert stats.drafted > 20
        assert stats.accepted == stats.drafted
        llm.engine.close(30)
    assert answers[0] == answers[1]
    assert found[0] == 0
    assert found[1] > 200
