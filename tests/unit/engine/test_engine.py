"""Engine and LLM over a model that is a pure function of the token history, computed through the blocks it is given.

So a wrong block, a lost or a doubled token changes what comes out. Exceptions are raised at every line in turn, rows
fail alone, and several callers share one engine.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freight import LLM, SamplingParams
from freight.cache.blocks import BlockAllocator
from freight.engine import compute
from freight.engine.engine import Engine
from freight.engine.intake import Intake
from freight.engine.prepare import SequenceSlice
from freight.engine.scheduler import Scheduler
from freight.errors import CapacityError, ConfigError, GenerationError, RequestError
from freight.outputs import FinishReason, RequestOutput

VOCAB, BLOCK, EOS = 61, 4, 60
SOURCES = {str(Path(compute.__file__).parent / f"{name}.py") for name in ("engine", "scheduler", "progress", "compute")}
SOURCES.add(str(Path(compute.__file__).parents[1] / "cache" / "blocks.py"))


class FakeRows:
    def __init__(self, num_rows: list[int], logits: Tensor) -> None:
        self.num_rows, self._logits = num_rows, logits

    def logits(self, rows: Sequence[int]) -> Tensor:
        assert len(rows) <= compute.SCORED_AT_ONCE
        return self._logits[list(rows)]


class FakePool:
    values_per_token = 1

    def counters(self) -> tuple[int, int]:
        return 0, 0


class FakeRunner:
    """Writes a digest of the history into each slot, and makes logits of what it reads back.

    `fails(slices)` may raise, as a whole forward pass would; a history with the token `bad` gives NaN.
    """

    def __init__(self, num_blocks: int) -> None:
        self.slots = [b""] * (num_blocks * BLOCK)
        self.pool = FakePool()
        self.fails: Callable[[Sequence[SequenceSlice]], None] = lambda slices: None
        self.bad: int | None = None
        self.sizes: list[int] = []

    def run(self, slices: Sequence[SequenceSlice]) -> FakeRows:
        self.sizes.append(len(slices))
        self.fails(slices)
        rows = []
        for part in slices:
            of_part = []
            for position, token in enumerate(part.token_ids, part.start):
                before = b"" if position == 0 else self.slots[self._slot(part, position - 1)]
                broken = token == self.bad or before.endswith(b"NaN")
                digest = hashlib.blake2b(before + bytes([token]), digest_size=8).digest() + b"NaN" * broken
                self.slots[self._slot(part, position)] = digest
                history = [self.slots[self._slot(part, earlier)] for earlier in range(position + 1)]
                of_part.append(self._logits(history))
            rows += of_part[len(of_part) - part.num_logit_rows :]
        return FakeRows([part.num_logit_rows for part in slices], torch.stack(rows) if rows else torch.empty(0, VOCAB))

    def _slot(self, part: SequenceSlice, position: int) -> int:
        return part.block_ids[position // BLOCK] * BLOCK + position % BLOCK

    def _logits(self, history: list[bytes]) -> Tensor:
        if history[-1].endswith(b"NaN"):
            return torch.full((VOCAB,), torch.nan)
        seed = int.from_bytes(hashlib.blake2b(b"".join(history), digest_size=7).digest(), "big")
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


class FakeTokenizer:
    """Token t is the character 'A' + t."""

    special_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    def token_text(self, token_id: int) -> str:
        return chr(65 + token_id)

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        return True

    def detokenizer(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> FakeDetokenizer:
        return FakeDetokenizer(params)


class FakeDetokenizer:
    """Holds the last token's character back, as text that may begin a stop string is."""

    def __init__(self, params: SamplingParams) -> None:
        self.stop_reason: str | None = None
        self._held = ""
        self._stops = params.stop

    def append(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            if self.stop_reason is None:
                text, self._held = text + self._held, chr(65 + token)
                self.stop_reason = self._held if self._held in self._stops else None
        return text

    def finish(self) -> str:
        text, self._held = ("" if self.stop_reason else self._held), ""
        return text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def new_llm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setattr("freight.engine.engine.Detokenizer", lambda tokenizer, params, ids: FakeDetokenizer(params))

    def make(num_blocks: int = 24, max_num_seqs: int = 4, budget: int = 16, max_model_len: int = 64) -> LLM:
        allocator = BlockAllocator(num_blocks, BLOCK)
        scheduler = Scheduler(allocator, max_num_seqs, budget, max_model_len)
        intake = Intake(FakeTokenizer(), VOCAB, max_model_len)  # type: ignore[arg-type]
        runner: Any = FakeRunner(num_blocks)
        engine = Engine(
            runner, allocator, scheduler, intake, frozenset({EOS}), seed=0, threads=nullcontext(), clock=Clock()
        )
        monkeypatch.setattr("freight.llm.build_engine", lambda args, before_weights: (engine, None))
        return LLM("demo")

    return make


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 12),
        seed=rng.randrange(9),
        temperature=rng.choice([0.0, 1.0]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
        n=rng.choice([1, 1, 2]),
        stop=rng.choice([(), "F", ("M", "c")]),
        repetition_penalty=rng.choice([1.0, 1.3]),
    )


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(3) for _ in range(rng.randint(1, 20))]


def check_clean(llm: LLM) -> None:
    """Nothing is left of any request."""
    engine, scheduler, allocator = llm.engine, llm.engine.scheduler, llm.engine.allocator
    engine.release("-")  # mends, if need be
    assert not engine._groups
    assert not engine._completions
    assert not engine._deadlines
    assert not llm._turns.unwanted
    assert scheduler.num_waiting == scheduler.num_running == allocator.num_held == 0
    assert allocator.num_free + allocator.num_cached == allocator.num_blocks


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(one.prompt_token_ids, one.outputs, one.prompt_logprobs, one.finished) for one in outputs]


# -------------------------------------------------------------------------------------------------------- interrupts


class Interrupt(BaseException):
    """What a signal handler raises."""


class Interrupter:
    """Raises Interrupt at the `at`-th line that runs in the engine's sources; counts them otherwise."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in SOURCES:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise Interrupt
        return self._trace


def scenario(llm: LLM, rng: random.Random) -> Callable[[], Any]:
    """A batch larger than the cache holds at once, so that it preempts."""
    prompts = [prompt_of(rng) for _ in range(7)]
    params = [params_of(rng) for _ in prompts]
    return lambda: llm.generate(prompts, params)


def test_an_exception_at_any_line_leaves_the_engine_as_if_the_call_had_not_been_made(new_llm: Callable[..., LLM]):
    """… also for a stream that was under way: it goes on with the same tokens, text and log-probabilities."""
    limits = {"num_blocks": 12, "budget": 12, "max_model_len": 40}
    run = scenario(new_llm(**limits), random.Random(1))
    expected = essence(run())
    of_stream = SamplingParams(max_tokens=12, seed=4, logprobs=1, n=2, stop="_")
    whole = list(new_llm(**limits).stream([1, 2, 1, 2, 0], of_stream))[-1]

    with Interrupter() as counter:
        scenario(new_llm(**limits), random.Random(1))()
    assert counter.count > 5000
    for at in random.Random(2).sample(range(1, counter.count + 1), 60):
        llm = new_llm(**limits)
        run = scenario(llm, random.Random(1))
        stream = llm.stream([1, 2, 1, 2, 0], of_stream)
        outputs = [next(stream), next(stream)]
        try:
            with Interrupter(at):
                run()
        except Interrupt:
            pass
        llm.engine.release("-")
        assert len(llm.engine._groups) == 1, at  # the stream's
        outputs += stream
        assert essence([outputs[-1]]) == essence([whole]), at
        assert essence(run()) == expected, at
        check_clean(llm)


def test_an_exception_while_a_stream_is_read_or_left(new_llm: Callable[..., LLM]):
    params = SamplingParams(max_tokens=9, seed=4, n=2, logprobs=0)
    llm = new_llm()
    expected = essence(llm.generate([[1, 2, 1], [2, 2]], params))
    with Interrupter() as counter:
        list(new_llm().stream([0, 1, 2], params))
    for at in random.Random(5).sample(range(1, counter.count + 1), 60):
        stream = llm.stream([0, 1, 2], params)
        try:
            with Interrupter(at):
                next(stream)
                next(stream)
                stream.close()
        except Interrupt:
            stream.close()
        check_clean(llm)
        assert essence(llm.generate([[1, 2, 1], [2, 2]], params)) == expected
        check_clean(llm)


# ------------------------------------------------------------------------------------------------ requests fail alone


def test_a_row_of_nan_ends_its_request_and_changes_no_other(new_llm: Callable[..., LLM]):
    rng = random.Random(7)
    prompts = [prompt_of(rng) for _ in range(16)]
    params = [SamplingParams(max_tokens=8, seed=index, logprobs=1, prompt_logprobs=index % 2) for index in range(16)]
    llm = new_llm(num_blocks=200, max_num_seqs=16, budget=64)
    expected = essence(llm.generate(prompts, params))
    bad = 9
    llm = new_llm(num_blocks=200, max_num_seqs=16, budget=64)
    llm.engine.runner.bad = 59  # type: ignore[attr-defined]
    with_bad = [*prompts[:bad], [*prompts[bad], 59], *prompts[bad + 1 :]]
    outputs = llm.generate(with_bad, params, on_error="return")
    (failed,) = outputs[bad].outputs
    assert (failed.finish_reason, failed.token_ids, failed.text) == (FinishReason.ERROR, [], "")
    assert "NaN" in (failed.error or "")
    assert essence(outputs[:bad] + outputs[bad + 1 :]) == expected[:bad] + expected[bad + 1 :]
    check_clean(llm)
    with pytest.raises(GenerationError, match=r"1 of 16 prompts failed; prompt 9: .*NaN") as error:
        llm.generate(with_bad, params)
    assert essence(error.value.outputs) == essence(outputs)
    with pytest.raises(GenerationError, match="the prompt failed"):
        list(llm.stream(with_bad[bad], params[bad]))
    assert [one.finished for one in llm.stream(with_bad[bad], params[bad], on_error="return")] == [True]
    with pytest.raises(ConfigError, match="'ignore'"):
        llm.generate("A", on_error="ignore")
    check_clean(llm)


def test_what_a_failed_request_computed_is_not_taken_up(new_llm: Callable[..., LLM]):
    llm = new_llm()
    runner: Any = llm.engine.runner
    prompt = [1, 2] * 6
    stream = llm.stream(prompt, SamplingParams(max_tokens=9, temperature=0.0), on_error="return")
    next(stream)

    def fails(slices: Sequence[SequenceSlice]) -> None:
        raise MemoryError("no room")

    runner.fails = fails
    (last,) = stream
    assert last.outputs[0].error == "its step failed: MemoryError: no room"
    runner.fails = lambda slices: None
    assert llm.generate(prompt)[0].num_cached_tokens == 0


def test_a_step_that_fails_is_tried_in_halves(new_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture):
    prompts = [[1, 2, index] for index in range(4)]
    params = SamplingParams(max_tokens=5, temperature=0.0)
    expected = essence(new_llm().generate(prompts, params))
    llm = new_llm()
    runner: Any = llm.engine.runner

    def fails(slices: Sequence[SequenceSlice]) -> None:
        if len(runner.sizes) == 3:  # once, and not again
            raise RuntimeError("sometimes")

    runner.fails = fails
    assert essence(llm.generate(prompts, params)) == expected
    assert runner.sizes[:6] == [4, 4, 4, 2, 2, 4]
    assert "tried again in halves: RuntimeError: sometimes" in caplog.text

    def always(slices: Sequence[SequenceSlice]) -> None:
        if any(part.token_ids[0] == 1 and part.token_ids[-1] == 2 for part in slices):
            raise RuntimeError("always")

    runner.fails = always
    llm.engine.allocator.reset()
    outputs = llm.generate(prompts, params, on_error="return")
    errors = [output.outputs[0].error for output in outputs]
    assert errors == [None, None, *["its step failed: RuntimeError: always"] * 2]  # its half fails with it
    assert essence(outputs[:2]) == expected[:2]
    check_clean(llm)


def test_text_that_cannot_be_decoded_fails_alone(new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch):
    prompts = [[1], [2], [0]]
    expected = essence(new_llm().generate(prompts, [SamplingParams(max_tokens=6, seed=index) for index in range(3)]))
    append = FakeDetokenizer.append

    def broken(self: FakeDetokenizer, token_ids: Sequence[int]) -> str:
        if self._stops:
            raise ValueError("no such token")
        return append(self, token_ids)

    monkeypatch.setattr(FakeDetokenizer, "append", broken)
    llm = new_llm()
    params = [SamplingParams(max_tokens=6, seed=index, stop="?" if index == 1 else ()) for index in range(3)]
    outputs = llm.generate(prompts, params, on_error="return")
    assert "no such token" in (outputs[1].outputs[0].error or "")
    assert essence([outputs[0], outputs[2]]) == [expected[0], expected[2]]
    check_clean(llm)


def test_time_limits_of_waiting_and_running_requests(new_llm: Callable[..., LLM]):
    llm = new_llm(max_num_seqs=1)
    engine = llm.engine
    clock: Any = engine._clock

    def add(name: str, **params: Any) -> None:
        sampling = SamplingParams(ignore_eos=True, temperature=0.0, **params)
        engine.add(name, engine.accept([1, 2], sampling), sampling)

    add("running", timeout_s=5.0, max_tokens=20)
    add("waiting", timeout_s=2.0, max_tokens=20)
    add("free", max_tokens=2)
    assert [delta.request_id for delta in engine.step()] == ["running"]
    clock.now = 2.0
    first, second = engine.step()
    assert (first.request_id, first.finished, first.outputs[0].finish_reason) == ("waiting", True, "timeout")
    assert second.request_id == "running"
    clock.now = 5.5
    deltas = engine.step()
    assert [(delta.request_id, delta.outputs[0].finish_reason) for delta in deltas] == [
        ("running", FinishReason.TIMEOUT),
        ("free", None),
    ]
    (running,) = engine.output("running").outputs
    assert (len(running.token_ids), len(running.text), running.error) == (2, 2, None)
    assert engine.step()[0].outputs[0].finish_reason is FinishReason.LENGTH
    for name in ("running", "waiting", "free"):
        engine.release(name)
    check_clean(llm)


# ------------------------------------------------------------------------------------------------------------- deltas


def test_deltas_add_up_to_the_output(new_llm: Callable[..., LLM]):
    rng = random.Random(11)
    llm = new_llm(num_blocks=14, budget=10, max_model_len=40)
    engine = llm.engine
    given = {str(index): (prompt_of(rng), params_of(rng)) for index in range(12)}
    for name, (prompt, params) in given.items():
        engine.add(name, engine.accept(prompt, params), params)
    tokens: dict[tuple[str, int], list[int]] = {}
    texts: dict[tuple[str, int], str] = {}
    logprobs: dict[tuple[str, int], list[Any]] = {}
    scored: dict[str, list[Any]] = {}
    finished = set()
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.request_id not in finished
            for one in delta.outputs:
                key = (delta.request_id, one.index)
                tokens[key] = [*tokens.get(key, []), *one.token_ids]
                texts[key] = texts.get(key, "") + one.text
                logprobs[key] = [*logprobs.get(key, []), *(one.logprobs or [])]
            scored[delta.request_id] = [*scored.get(delta.request_id, []), *(delta.prompt_logprobs or [])]
            if delta.finished:
                finished.add(delta.request_id)
    assert finished == set(given)
    for name, (_, params) in given.items():
        output = engine.output(name)
        assert scored[name] == (output.prompt_logprobs or [])
        for one in output.outputs:
            assert tokens[name, one.index] == one.token_ids
            assert texts[name, one.index] == one.text
            assert logprobs[name, one.index] == (one.logprobs or [])
            assert (one.logprobs is None) == (params.logprobs is None)


def test_a_prompt_can_be_scored_without_generating(new_llm: Callable[..., LLM]):
    llm = new_llm(budget=7)
    prompt = [1, 2, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1]
    (more,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=2))
    (none,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert none.prompt_logprobs == more.prompt_logprobs
    assert len(none.prompt_logprobs or []) == len(prompt)
    (completion,) = none.outputs
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", FinishReason.LENGTH)
    check_clean(llm)


def test_rows_of_a_long_prompt_are_scored_a_few_at_a_time(new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch):
    prompt = [1, 2, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1]
    (expected,) = new_llm().generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=2, seed=1))
    monkeypatch.setattr(compute, "SCORED_AT_ONCE", 3)  # FakeRows refuses more at once
    (output,) = new_llm().generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=2, seed=1))
    assert essence([output]) == essence([expected])


# ---------------------------------------------------------------------------------------------------- several callers


def texts_of(outputs: Sequence[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def test_streams_side_by_side_and_beside_generate_each_deliver_all_of_theirs(new_llm: Callable[..., LLM]):
    llm = new_llm()
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    prompts = [[1], [2, 2], [0, 1, 2, 0, 1]]
    expected = texts_of(llm.generate(prompts, params))
    first, second = (llm.stream(prompt, params) for prompt in prompts[:2])
    last: list[Any] = [None, None]
    for pair in zip_longest(first, second):
        last = [new or old for new, old in zip(pair, last, strict=True)]
    assert [one.finished for one in last] == [True, True]
    assert texts_of(last) == expected[:2]

    counts = []
    for output in llm.stream(prompts[0], params):
        assert texts_of(llm.generate(prompts[1:], params)) == expected[1:]
        counts.append(len(output.outputs[0].token_ids))
    assert (counts[-1], output.finished, texts_of([output])) == (9, True, expected[:1])
    abandoned = llm.stream(prompts[2], params)
    next(abandoned)
    assert texts_of(llm.generate(prompts, params)) == expected
    abandoned.close()
    check_clean(llm)


def test_a_stream_checks_its_prompt_at_once_and_queues_it_when_read(new_llm: Callable[..., LLM]):
    llm = new_llm(num_blocks=4)
    with pytest.raises(RequestError, match="empty"):
        llm.stream("")
    with pytest.raises(CapacityError, match="17 tokens"):
        llm.stream([1], SamplingParams(max_tokens=16))
    stream = llm.stream([1], SamplingParams(max_tokens=3))
    check_clean(llm)
    assert list(stream)[-1].finished
    check_clean(llm)


def test_a_stream_collected_in_the_middle_of_a_step(new_llm: Callable[..., LLM]):
    """The collector closes generators wherever it runs, also inside the engine."""
    llm = new_llm()
    runner: Any = llm.engine.runner
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    expected = texts_of(llm.generate([[1], [2]], params))

    def cycle() -> None:
        stream = llm.stream([0, 1], params)
        next(stream)
        holder: list[Any] = [stream]
        holder.append(holder)

    gc.disable()
    try:
        cycle()
        assert len(llm.engine._groups) == 1
        runner.fails = lambda slices: gc.collect() if len(slices) == 3 else None
        assert texts_of(llm.generate([[1], [2]], params)) == expected
    finally:
        gc.enable()
    check_clean(llm)


def test_threads_are_served_together_and_each_gets_its_own(new_llm: Callable[..., LLM]):
    llm = new_llm(num_blocks=60, max_num_seqs=8, budget=32)
    rng = random.Random(13)
    work = [([prompt_of(rng) for _ in range(3)], [params_of(rng) for _ in range(3)]) for _ in range(6)]
    expected = [essence(llm.generate(*one)) for one in work]
    got: list[Any] = [None] * 6
    runner: Any = llm.engine.runner
    runner.sizes.clear()

    def call(index: int) -> None:
        if index % 2:
            got[index] = essence(llm.generate(*work[index]))
        else:
            got[index] = essence([list(llm.stream(*one))[-1] for one in zip(*work[index], strict=True)])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == expected
    assert max(runner.sizes) > 3  # more than one call at a time
    check_clean(llm)


def test_a_waiting_thread_has_its_turn_within_a_step(new_llm: Callable[..., LLM]):
    """A thread that steps on and on does not keep others out: turns go by arrival."""
    llm = new_llm()
    turns = llm._turns
    order: list[str] = []
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        done.wait(10)

    def keep_on() -> None:
        turns.run(hold)
        for _ in range(3):
            turns.run(lambda: order.append("again"))

    def once() -> None:
        turns.run(lambda: order.append("other"))

    first = threading.Thread(target=keep_on)
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=once)
    second.start()
    while len(turns._queue) < 2:
        pass
    done.set()
    first.join(10)
    second.join(10)
    assert order[0] == "other"
    assert order.count("again") == 3


def test_calling_again_from_within_a_step_is_refused(new_llm: Callable[..., LLM]):
    llm = new_llm()
    runner: Any = llm.engine.runner
    errors: list[str] = []

    def call_again(slices: Sequence[SequenceSlice]) -> None:
        try:
            llm.generate([1])
        except RequestError as error:
            errors.append(str(error))

    runner.fails = call_again
    llm.generate([1, 2], SamplingParams(max_tokens=1))
    assert "busy in this thread" in errors[0]
    check_clean(llm)


# -------------------------------------------------------------------------------------------------------- prompt forms


def numpy_like(values: list[int]) -> Iterator[Any]:
    tensor = torch.tensor(values)
    yield tensor
    yield tensor.numpy()
    yield list(tensor.numpy())
    yield {"prompt_token_ids": tensor.numpy()}


def test_arrays_and_their_numbers_are_token_ids(new_llm: Callable[..., LLM]):
    llm = new_llm()
    params = SamplingParams(max_tokens=3, temperature=0.0)
    expected = essence(llm.generate([1, 2, 0], params))
    for prompt in numpy_like([1, 2, 0]):
        assert essence(llm.generate(prompt, params)) == expected
    assert essence(llm.generate(torch.tensor([[1, 2, 0]] * 2), params)) == expected * 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"hello", "bytes; decode it"),
        ([b"hello"], "bytes; decode it"),
        ({"prompt_token_ids": b"hello"}, "bytes; decode it"),
        ([[1.0, 2.0]], "1.0, a float"),
        ([[True]], "True, a bool"),
        ([[1, 61]], "61 is outside the vocabulary"),
        ([[1, -1]], "-1 is outside the vocabulary"),
        (5, "not int"),
        ([None], "not NoneType"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_kind(new_llm: Callable[..., LLM], prompts: Any, message: str):
    llm = new_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts)
    check_clean(llm)
