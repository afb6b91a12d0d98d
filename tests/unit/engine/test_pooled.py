"""Prompts that are pooled, through the engine: one vector each, with the same bits however their
chunks fall.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from dataclasses import asdict

import numpy as np
import pytest
from tests.unit.engine.fakes import essence

from freight import LLM, PoolingParams, SamplingParams
from freight.cache.prefix import RecentKeys
from freight.engine.intake import Intake
from freight.engine.prepare import Logits, SequenceSlice, types_of
from freight.errors import GenerationError, RequestError
from freight.model.config.pooling import PoolingConfig, PoolingKind
from freight.outputs import CompletionDelta, FinishReason, Pooled, RequestDelta
from freight.pooling import PoolingTask
from freight.serve.processes import wire

EMBED = SamplingParams(max_tokens=0, pooling=PoolingParams())
KINDS = ("last", "mean", "cls")


def demo(kind: str, **options: object) -> LLM:
    memory = {"kv_cache_memory": "4MiB", "max_model_len": 256}
    return LLM("demo", pooling=kind, **(memory | options))


def prompts(seed: int, count: int = 6) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 4000) for _ in range(rng.randint(1, 70))] for _ in range(count)]


def vectors(llm: LLM, texts: object) -> list[list[float]]:
    return [result.outputs.embedding for result in llm.embed(texts)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_any_chunks_batches_orders_and_threads_give_the_same_bits(kind: str):
    batch = prompts(1)
    expected = [vectors(demo(kind), [prompt])[0] for prompt in batch]
    for options in ({"max_num_batched_tokens": 7}, {"threads": 2}, {"max_num_seqs": 2}):
        llm = demo(kind, **options)
        assert vectors(llm, batch) == expected
        assert vectors(llm, batch[::-1]) == expected[::-1]
        assert llm.engine.cache.num_held == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_loses_its_blocks_is_pooled_anew(kind: str):
    batch = [[7 + index] * 60 for index in range(4)]
    expected = [vectors(demo(kind), [prompt])[0] for prompt in batch]
    engine = demo(kind, max_num_batched_tokens=16).engine
    names = [str(index) for index in range(len(batch))]
    for name, prompt in zip(names, batch, strict=True):
        engine.add(name, engine.accept(prompt, EMBED), EMBED)
    while not all(map(engine.is_finished, names)):
        engine.step()
        if engine.scheduler.num_running and engine.stats().preemptions < 5:
            engine.scheduler.preempt_latest()  # after one chunk of it
            engine.step()
    pooled = [engine.output(name).pooled for name in names]
    assert [result.values.tolist() for result in pooled if result] == expected
    assert engine.stats().preemptions == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_is_repeated(kind: str, monkeypatch: pytest.MonkeyPatch):
    batch = prompts(3)
    llm = demo(kind, max_num_batched_tokens=48)
    expected = vectors(llm, batch)
    hidden = type(llm.engine.runner.model).hidden
    calls = []

    def failing(self: object, *arguments: object) -> object:
        calls.append(1)
        if len(calls) % 5 == 1:
            raise RuntimeError("no memory")
        return hidden(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(llm.engine.runner.model), "hidden", failing)
    assert vectors(llm, batch) == expected
    assert len(calls) > 5


def test_nan_ends_the_prompt_alone(monkeypatch: pytest.MonkeyPatch):
    llm = demo("last")
    pooler = llm.engine.runner.model.pooler
    assert pooler is not None
    finish = type(pooler).finish
    seen = []

    def spoiled(self: object, state: object, params: PoolingParams) -> object:
        seen.append(1)
        return finish(self, state, params) * (math.nan if len(seen) == 2 else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(type(pooler), "finish", spoiled)
    with pytest.raises(GenerationError, match=r"prompt 1: .*NaN or infinite states") as error:
        llm.embed([[3, 4], [5, 6], [7, 8]])
    failed = [output.outputs[0].finish_reason for output in error.value.outputs]
    assert failed == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert llm.engine.cache.num_held == 0


def test_text_beside_it_has_the_same_bits():
    llm = demo("mean", max_num_batched_tokens=40)
    text = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    batch = prompts(4)
    expected = essence(llm.generate(batch[:3], text))
    pooled = vectors(llm, batch)
    both = llm.generate(batch[:3] + batch, [text] * 3 + [EMBED] * 6)
    assert essence(both[:3]) == expected
    assert [output.pooled.values.tolist() for output in both[3:] if output.pooled] == pooled
    assert all(output.pooled is None for output in both[:3])
    assert [output.outputs[0].token_ids for output in both[3:]] == [[]] * 6


def test_a_prompt_of_one_token_is_not_a_decode_step():
    llm = demo("last")
    assert vectors(llm, [[5]]) == vectors(llm, [[5], [5]])[:1]


def test_blocks_are_kept_where_another_prompt_began_alike():
    llm = demo("last")
    shared = list(range(100, 148))

    def cached(prompt: list[int]) -> int:
        [result] = llm.embed([prompt])
        return result.num_cached_tokens

    assert cached([*shared, *range(200, 220)]) == 0
    assert llm.engine.stats().reusable_tokens == 0  # nothing follows it
    assert cached([*shared, *range(300, 320)]) == 0
    assert llm.engine.stats().reusable_tokens == 48  # two began alike, and ended otherwise
    assert cached([*shared, *range(400, 420)]) == 48
    assert vectors(llm, [[*shared, 7, 8]]) == vectors(demo("last"), [[*shared, 7, 8]])
    assert llm.engine.stats().reusable_tokens == 48


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_blocks_are_not_kept_where_every_row_is_needed(kind: str):
    llm = demo(kind)
    for _ in range(3):
        [result] = llm.embed([list(range(100, 164))])
        assert result.num_cached_tokens == 0
    assert llm.engine.stats().reusable_tokens == 0


def test_keys_are_forgotten_in_the_order_of_their_last_use():
    recent = RecentKeys(3)
    assert recent.note([b"a", b"b"]) == 0
    assert recent.note([b"a", b"c"]) == 1  # b, a, c
    assert recent.note([b"d"]) == 0  # a, c, d
    assert recent.note([b"a", b"b"]) == 1
    assert recent.note([b"c"]) == 0


def test_dimensions_and_normalization():
    llm = demo("mean")
    [whole] = vectors(llm, ["a text"])
    assert math.isclose(math.hypot(*whole), 1, rel_tol=1e-6)
    raw = llm.embed("a text", pooling_params=PoolingParams(normalize=False))[0].outputs.embedding
    assert not math.isclose(math.hypot(*raw), 1, rel_tol=1e-3)
    cut = llm.embed("a text", pooling_params=PoolingParams(dimensions=8))[0].outputs.embedding
    length = math.hypot(*raw[:8])
    assert cut == pytest.approx([value / length for value in raw[:8]], rel=1e-6)


def test_truncation_keeps_the_beginning():
    llm = demo("last")
    prompt = list(range(100, 140))
    [result] = llm.embed([prompt], truncate_prompt_tokens=12)
    assert result.prompt_token_ids == prompt[:12]
    with pytest.raises(RequestError, match="max_model_len 256"):
        llm.embed([[5] * 257])
    [result] = llm.embed([[5] * 257], truncate_prompt_tokens=-1)
    assert len(result.prompt_token_ids) == 256


class Ended:
    """A tokenizer that ends every text with 9."""

    special_token_ids = frozenset({9})


def test_truncation_keeps_the_tokens_that_end_a_text():
    config = PoolingConfig(PoolingTask.EMBED, PoolingKind.LAST, 4)
    intake = Intake(Ended(), 100, 50, config, False)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=0, pooling=PoolingParams(), truncate_prompt_tokens=4)
    assert list(intake.cut([1, 2, 3, 4, 5, 9], params)) == [1, 2, 3, 9]
    assert list(intake.cut([1, 2, 3, 9], params)) == [1, 2, 3, 9]
    assert list(intake.cut([9] * 6, params)) == [9] * 4
    assert list(intake.accept([1, 2, 3, 4, 5, 9], params).token_ids) == [1, 2, 3, 9]


def test_what_a_model_does_not_do_is_refused():
    with pytest.raises(RequestError, match=r"declares no pooling.*--pooling last, mean or cls"):
        LLM("demo").embed("x")
    embedder = PoolingConfig(PoolingTask.EMBED, PoolingKind.LAST, 64, dimensions=(32,), source="s")
    intake = Intake(None, 100, 50, embedder, False)
    with pytest.raises(RequestError, match=r"gives embeddings and no text.*LLM.embed"):
        intake.accept([1], SamplingParams())
    for params, error in (
        (PoolingParams(task=PoolingTask.CLASSIFY), "gives embeddings and no scores"),
        (PoolingParams(dimensions=65), "dimensions is 65; the embeddings of this model have 64"),
        (PoolingParams(dimensions=16), "trained to be cut to 32"),
    ):
        with pytest.raises(RequestError, match=error):
            intake.accept([1], SamplingParams(max_tokens=0, pooling=params))
    for dimensions in (32, 64):
        params = PoolingParams(dimensions=dimensions)
        intake.accept([1], SamplingParams(max_tokens=0, pooling=params))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"task": "rank"}, "task 'rank': choose embed or classify"),
        ({"dimensions": 0}, "dimensions is 0"),
        ({"dimensions": True}, "dimensions is True"),
        ({"dimensions": 2.0}, "dimensions is 2.0"),
        ({"task": "classify", "dimensions": 4}, "dimensions is for embeddings"),
        ({"normalize": 1}, "normalize is 1"),
        ({"use_activation": "no"}, "use_activation is 'no'"),
    ],
)
def test_parameters_are_checked(options: dict[str, object], error: str):
    with pytest.raises(RequestError, match=error):
        PoolingParams(**options)  # type: ignore[arg-type]


def test_pooling_generates_nothing():
    with pytest.raises(RequestError, match="max_tokens is 5 with pooling"):
        SamplingParams(max_tokens=5, pooling=PoolingParams())
    with pytest.raises(RequestError, match="give a PoolingParams"):
        SamplingParams(max_tokens=0, pooling={"task": "embed"})  # type: ignore[arg-type]


def test_vectors_cross_between_processes():
    values = array("f", [0.1, -2.5e-38, 3.0])
    pooled = Pooled(values)
    completion = CompletionDelta(0, [], "", None, FinishReason.LENGTH, None, None)
    delta = RequestDelta("a", [completion], True, num_cached_tokens=3, pooled=pooled)
    read = wire.delta_from_json(json.loads(json.dumps(wire.delta_to_json(delta))))
    assert read == delta
    assert read.pooled is not None
    assert read.pooled.values.tobytes() == values.tobytes()
    params = SamplingParams(
        max_tokens=0, pooling=PoolingParams(dimensions=3, normalize=False), truncate_prompt_tokens=2
    )
    assert wire.params_from_json(json.loads(json.dumps(wire.params_to_json(params)))) == params


def test_how_a_model_pools_crosses_between_processes():
    config = PoolingConfig(
        PoolingTask.CLASSIFY,
        PoolingKind.MEAN,
        2,
        labels=("no", "yes"),
        token_ids=(4, 5),
        prompts={"query": "Q: "},
        dimensions=(8, 16),
        source="1_Pooling/config.json",
    )
    read = wire.pooling_from_json(json.loads(json.dumps(asdict(config))))
    assert read == config
    assert repr(read) == repr(config)  # members of enums, which are compared by `is`, equal strings


def test_a_request_ends_in_time_or_by_its_caller():
    llm = demo("mean")
    engine = llm.engine
    for request_id in ("late", "gone", "kept"):
        engine.add(request_id, engine.accept([5] * 100, EMBED), EMBED)
    engine.abort("gone")
    engine.release("late")
    while not engine.is_finished("kept"):
        engine.step()
    assert engine.output("gone").pooled is None
    kept = engine.output("kept").pooled
    assert kept is not None
    assert kept.values.tolist() == vectors(llm, [[5] * 100])[0]
    for request_id in ("gone", "kept"):
        engine.release(request_id)
    assert engine.cache.num_held == 0


def test_texts_beside_pairs_have_the_first_token_type_alone():
    starts_of_second = (2, None, 1)
    slices = [
        SequenceSlice([5] * 3, 0, [range(1)], Logits.NONE, None, second)
        for second in starts_of_second
    ]
    position = np.array([0, 1, 2] * 3)
    sequence = np.repeat(np.arange(3), 3)
    types = types_of(slices, position, sequence)
    assert types is not None
    assert types.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert types_of(slices[1:2], position[:3], sequence[:3]) is None
