"""Steps that are lost because a forward pass raises where layers keep states: only the request that
is at fault ends.

The model is that of `tests/means.py`, and the oracle what each prompt gives alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.covering import covered
from tests.faults import ERROR, inject, raising_behind
from tests.means import DRAWN, IDS, PROMPTS, Mean, engine, plain_answers, register, save_means
from tests.refusals import assert_names

from freight import LLM
from freight.engine import compute
from freight.engine.engine import Engine
from freight.engine.request import Request
from freight.engine.scheduler import Scheduler

Plain = dict[str, list[Any]]  # by cache, what each of PROMPTS gives alone


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def suspect_of(scheduler: Scheduler) -> Request | None:
    return scheduler._recovery.suspect(scheduler._requests)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_means(tmp_path_factory.mktemp("means"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return plain_answers(folder)


# prompt, position
FAULTS = [
    *((0, 0), (0, 47), (0, 299), (0, 300), (4, 64), (4, 66), (9, 200), (9, 215), (1, 1)),
    *((14, 122), (15, 191)),
]
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 48}
SCARCE: dict[str, Any] = {"kv_cache_memory": "140KiB", "max_num_seqs": 16, "max_model_len": 340}
ROOM: dict[str, dict[str, Any]] = {
    "caching": CHUNKS,
    "without": {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
    "scarce": CHUNKS | SCARCE,
}


def answers(
    llm: LLM, prompts: Sequence[Sequence[int]], bad: Mapping[int, int], expected: Sequence[Any]
) -> None:
    """Every prompt has what it has alone; those of `bad` until the token at that position, and then
    the error.
    """
    asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
    outputs = llm.generate(asked, DRAWN, on_error="return")
    for index, (output, (token_ids, logprobs)) in enumerate(zip(outputs, expected, strict=True)):
        (one,) = output.outputs
        if index not in bad:
            assert (list(one.token_ids), repr(one.logprobs)) == (token_ids, logprobs)
            continue
        count = max(0, bad[index] - len(prompts[index]) + 1)
        assert (one.finish_reason, one.error) == ("error", ERROR)
        assert list(one.token_ids) == token_ids[:count]
    assert llm.engine.cache.num_held == 0
    assert suspect_of(llm.engine.scheduler) is None


def until_alone(running: Engine, indexes: Sequence[int]) -> None:
    """Add these prompts, and run until a step has failed, after which each of them runs alone."""
    for index in indexes:
        running.add(str(index), running.accept(PROMPTS[index], DRAWN), DRAWN)
    while suspect_of(running.scheduler) is None:
        running.step()


def finish(running: Engine, expected: Mapping[str, Any]) -> None:
    """Run to the end: these requests have what they have alone."""
    while running.has_unfinished:
        running.step()
    for name, answer in expected.items():
        (one,) = running.output(name).outputs
        assert (list(one.token_ids), repr(one.logprobs)) == answer


@pytest.mark.parametrize(("fault", "room", "place"), covered(FAULTS, ROOM, ["within", "behind"]))
def test_a_request_that_raises_fails_alone(
    folder: Path, plain: Plain, monkeypatch: Any, fault: tuple[int, int], room: str, place: str
) -> None:
    """Behind the mixer of the first layer, which has changed its states, or behind all layers."""
    index, position = fault
    faults = inject(monkeypatch, {tuple(PROMPTS[index]): position})
    if place == "within":
        monkeypatch.setattr(Mean, "__call__", raising_behind(Mean.__call__, faults))
    llm = engine(folder, **ROOM[room])
    answers(llm, PROMPTS, {index: position}, plain["bfloat16"])
    assert 1 in faults.sizes
    faults.at = {}
    answers(llm, PROMPTS, {}, plain["bfloat16"])  # what the failed one stored is nobody's prefix


@pytest.mark.parametrize("room", ROOM)
def test_several_that_raise_fail_alone(
    folder: Path, plain: Plain, monkeypatch: Any, room: str
) -> None:
    bad = {0: 299, 2: 70, 5: 130, 9: 205, 10: 7, 15: 191}
    inject(monkeypatch, {tuple(PROMPTS[index]): position for index, position in bad.items()})
    answers(engine(folder, "fp8-token", **ROOM[room]), PROMPTS, bad, plain["fp8-token"])


@pytest.mark.parametrize("room", ROOM)
def test_what_raises_once_ends_nobody(
    folder: Path, plain: Plain, monkeypatch: Any, room: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {tuple(PROMPTS[index]): at for index, at in ((0, 100), (9, 205), (4, 80))}
    faults = inject(monkeypatch, bad, once=True)
    monkeypatch.setattr(Mean, "__call__", raising_behind(Mean.__call__, faults))
    answers(engine(folder, **ROOM[room]), PROMPTS, {}, plain["bfloat16"])
    assert faults.at == {}
    assert_names(caplog.text, "again alone", "FloatingPointError: injected")
    assert "failed alone" not in caplog.text


def test_a_fault_of_all_ends_all_and_is_logged_once(
    folder: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    faults = inject(monkeypatch, {tuple(ids): 0 for ids in PROMPTS})
    llm = engine(folder, max_num_batched_tokens=2048, max_num_seqs=16)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], DRAWN, on_error="return")
    assert {one.outputs[0].error for one in outputs} == {ERROR}
    assert faults.sizes == [16] + [1] * 16
    assert sum("failed alone" in message for message in caplog.messages) == 1
    assert llm.engine.cache.num_held == 0


def test_others_may_come_and_go_while_requests_run_alone(
    folder: Path, plain: Plain, monkeypatch: Any
) -> None:
    """One is aborted before its turn, and one that comes meanwhile waits until all have had theirs."""
    faults = inject(monkeypatch, {tuple(PROMPTS[9]): 205})
    running = engine(folder, **CHUNKS, max_num_seqs=8).engine
    until_alone(running, (0, 9, 5, 8))
    assert faults.sizes[-1] == 4
    running.abort("0")
    running.add("late", running.accept(PROMPTS[4], DRAWN), DRAWN)
    while suspect_of(running.scheduler) is not None:
        running.step()
        assert faults.sizes[-1] == 1
    alone = plain["bfloat16"]
    finish(running, {"5": alone[5], "8": alone[8], "late": alone[4]})
    assert running.output("9").outputs[0].error == ERROR
    assert running.output("0").outputs[0].finish_reason == "abort"
    assert running.cache.num_held == 0


def test_an_interrupt_while_requests_run_alone(
    folder: Path, plain: Plain, monkeypatch: Any
) -> None:
    inject(monkeypatch, {tuple(PROMPTS[9]): 205})
    running = engine(folder, **CHUNKS).engine
    until_alone(running, (0, 9, 5))
    run = compute._compute

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(compute, "_compute", run)
        run(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(compute, "_compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.step()
    finish(running, {str(index): plain["bfloat16"][index] for index in (0, 5)})
    assert running.output("9").outputs[0].error == ERROR


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_of_several_completions_fails_alone(folder: Path, monkeypatch: Any, bad: int) -> None:
    params = replace(DRAWN, n=3, prompt_logprobs=1)
    prompt = {"prompt_token_ids": IDS[:100]}
    expected = engine(folder, **CHUNKS).generate([prompt], params)[0]
    faults = inject(monkeypatch, {tuple(IDS[:100]): 110})
    hits = faults.hits
    monkeypatch.setattr(
        faults, "hits", lambda work: hits([one for one in work if one.chunk.request.index == bad])
    )
    (output,) = engine(folder, **CHUNKS).generate([prompt], params, on_error="return")
    for index, (one, other) in enumerate(zip(output.outputs, expected.outputs, strict=True)):
        if index == bad:
            assert (one.error, list(one.token_ids)) == (ERROR, list(other.token_ids[:11]))
        else:
            assert repr((one.token_ids, one.logprobs)) == repr((other.token_ids, other.logprobs))
    assert output.prompt_logprobs == expected.prompt_logprobs


def test_an_interrupt_within_a_step_computes_states_anew(
    folder: Path, plain: Plain, monkeypatch: Any
) -> None:
    running, calls = engine(folder, max_num_batched_tokens=512).engine, itertools.count(1)
    call = Mean.__call__

    def interrupted(self: Mean, *args: Any) -> Any:
        result = call(self, *args)
        if next(calls) == 21:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Mean, "__call__", interrupted)
    for index in (0, 9):
        running.add(str(index), running.accept(PROMPTS[index], DRAWN), DRAWN)
    with pytest.raises(KeyboardInterrupt):
        deque(running.step() for _ in range(1000))
    finish(running, {str(index): plain["bfloat16"][index] for index in (0, 9)})
