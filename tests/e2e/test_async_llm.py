"""AsyncLLM: what LLM answers, for event loops; whoever leaves frees what is held, and an engine that
ends is no riddle.

`llm` is one whose engine is in a process of its own, and one whose engine is in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.faults import inject
from tests.forked_server import CAN_FORK, forked
from tests.refusals import assert_names, refuses

from freight import (
    LLM,
    AsyncLLM,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    FinishReason,
    GenerationError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)
from freight.engine.loop import Loop
from freight.serve.processes import children
from freight.serve.processes.client import EngineState
from freight.serve.settings import ServerSettings

pytestmark = pytest.mark.clock

OPTIONS: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_memory": "8MiB"}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=900, n=16, temperature=0.0, ignore_eos=True)
IDS = [5, 6, 7]
SECONDS = 300.0


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Engines' processes are forked: their start is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        if CAN_FORK:
            patch.setattr(children, "subprocess", SimpleNamespace(Popen=forked))
        yield


def made(engine: str, **options: Any) -> AsyncLLM:
    with quickly():
        return AsyncLLM(**{**OPTIONS, "engine": engine, **options})


@pytest.fixture(scope="module", params=["process", "thread"])
def llm(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    made_once = made(request.param)
    yield made_once
    made_once.shutdown()


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(**OPTIONS)


def run(test: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(test, SECONDS)

    return asyncio.run(limited())


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, last = [output async for output in outputs]
    assert last.finished
    return last


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def until_nothing_is_held(llm: AsyncLLM) -> None:
    """The statistics are of now afterwards, not of half a second ago: they are sent with what a
    request changes, so those behind the first of two requests have come before the second's end.
    """

    def is_free() -> bool:
        stats = llm.stats()
        return (stats.running, stats.waiting, stats.held_tokens) == (0, 0, 0)

    assert not llm._requests
    for _ in range(2):
        await last_of(llm.generate(IDS, replace(GREEDY, max_tokens=1)))
    await until(is_free)


def like(output: RequestOutput) -> RequestOutput:
    """Without what depends on which requests there were before."""
    return replace(output, request_id="", num_cached_tokens=0)


def test_outputs_grow_to_what_llm_answers(llm: AsyncLLM, offline: LLM) -> None:
    requests: list[tuple[Any, SamplingParams]] = [
        ("def main(", GREEDY),
        ({"prompt_token_ids": IDS}, replace(GREEDY, logprobs=2, prompt_logprobs=1)),
        ("import ", replace(GREEDY, n=3, temperature=1.0, seed=3)),
        ("def main(", replace(GREEDY, stop=("\n",))),
        (IDS, replace(GREEDY, detokenize=False)),
    ]
    expected = offline.generate(*map(list, zip(*requests, strict=True)))

    async def read(number: int) -> list[RequestOutput]:
        return [output async for output in llm.generate(*requests[number], f"mine-{number}")]

    async def test() -> list[list[RequestOutput]]:
        return await asyncio.gather(*map(read, range(len(requests))))

    for number, outputs in enumerate(run(test())):
        assert like(outputs[-1]) == like(expected[number])
        assert {output.request_id for output in outputs} == {f"mine-{number}"}
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        for before, after in pairwise(outputs):
            for part, more in zip(before.outputs, after.outputs, strict=True):
                assert more.text.startswith(part.text)
                assert more.token_ids[: len(part.token_ids)] == part.token_ids


def test_every_step_has_an_output_where_that_is_asked_for(offline: LLM) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with llm:
            outputs = [output async for output in llm.generate(IDS, GREEDY)]
        assert len(outputs[0].outputs[0].token_ids) == 1
        assert len(outputs) > 2
        assert like(outputs[-1]) == like(offline.generate(IDS, GREEDY)[0])

    run(test(made("thread", max_events_per_second=0)))


def test_a_conversation_is_answered_as_llm_does(served_folder: Path) -> None:
    messages = [{"role": "user", "content": "sum two numbers"}]
    options = {"model": str(served_folder), **OPTIONS}
    expected = LLM(**options).chat(messages, GREEDY)[0]

    async def test() -> None:
        async with made("process", **options) as llm:
            assert like(await last_of(llm.chat(messages, GREEDY))) == like(expected)
            with refuses(ConfigError, "enable_thinkin", "chat template"):
                await last_of(llm.chat(messages, GREEDY, enable_thinkin=True))

    run(test())


def test_what_cannot_be_is_refused_before_it_starts(llm: AsyncLLM) -> None:
    for wrong, says in (
        ({"use_tqdm": True}, "use progress"),
        ({"prompt_adapter_request": 1}, "prompt adapters are not implemented"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"tokenization_kwargs": {"x": 1}}, "tokenization_kwargs has 'x'"),
    ):
        with pytest.raises(ConfigError, match=says):
            llm.generate("a", GREEDY, **wrong)

    with refuses(ConfigError, "AsyncLLM", "pickled", "each process"):
        pickle.dumps(llm)
    no_regex = replace(GREEDY, structured_outputs=StructuredOutputs(regex="("))

    async def test() -> None:
        for prompt, params, says in (
            ([], GREEDY, "the prompt is empty"),
            ([4096], GREEDY, "outside the vocabulary"),
            ({"text": "a"}, GREEDY, "a prompt dict is"),
            (IDS * 2000, GREEDY, "the prompt has 6000 tokens"),
            ("a", no_regex, "structured_outputs"),
        ):
            with pytest.raises(RequestError, match=says):
                await last_of(llm.generate(prompt, params))
        await until_nothing_is_held(llm)

    run(test())


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_a_model_that_cannot_be_loaded_raises_as_llm_does(engine: str) -> None:
    before = set(threading.enumerate())
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (CheckpointError, "there is no folder", {"model": "./nowhere"}),
        (ConfigError, "kv_cache_memory", {"gpu_memory_utilization": 0.9}),
        (ConfigError, "kv-scales", {"kv_cache_dtype": "bfloat16", "kv_scales": "unit"}),
        (CapacityError, "does not fit", {"kv_cache_memory": "48KiB", "max_model_len": 512}),
    ]
    for error, says, options in cases:
        with pytest.raises(error, match=says):
            made(engine, **options)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left <= {"freight-children"}  # which starts processes, and lasts


def test_its_own_options_are_checked() -> None:
    with refuses(ConfigError, "'ray'", "'process'", "'thread'"):
        AsyncLLM(engine="ray")
    with refuses(ConfigError, "max_events_per_second", "-1"):
        AsyncLLM(max_events_per_second=-1)
    for value in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="stall_timeout"):
            AsyncLLM(stall_timeout=value)
    stall_timeout = inspect.signature(AsyncLLM).parameters["stall_timeout"].default
    assert stall_timeout == ServerSettings().stall_timeout > 0


def test_whoever_leaves_frees_what_the_request_held(llm: AsyncLLM) -> None:
    async def read(count: int, request_id: str | None = None) -> RequestOutput:
        seen = 0
        async for output in llm.generate(IDS, ENDLESS, request_id):
            seen += 1
            if seen == count:
                return output  # leaves the loop
        raise AssertionError("it is endless")

    async def test() -> None:
        before = llm.stats().generated
        await read(2)
        await until_nothing_is_held(llm)

        task = asyncio.create_task(read(10**6))
        await until(lambda: llm.stats().running > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_nothing_is_held(llm)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(10**6), 0.05)
        await until_nothing_is_held(llm)

        stream = llm.generate(IDS, ENDLESS)
        async with aclosing(stream):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await until_nothing_is_held(llm)
        assert llm.stats().generated - before < 900 * ENDLESS.n

    run(test())


def test_abort_ends_a_request_by_its_id(llm: AsyncLLM) -> None:
    async def test() -> None:
        streams = [llm.generate(IDS, ENDLESS, name) for name in "abc"]
        for output in await asyncio.gather(*map(anext, streams)):
            assert not output.finished  # an id is in use until the last output has been read
        with refuses(RequestError, "id 'a'"):
            await last_of(llm.generate(IDS, GREEDY, "a"))
        await llm.abort("a")
        await llm.abort(["b", "nobody's", "c"])
        for stream in streams:
            output = await last_of(stream)
            assert output.outputs[0].finish_reason is FinishReason.ABORT
            assert len(output.outputs[0].token_ids) < 900
        await until_nothing_is_held(llm)
        assert (await last_of(llm.generate(IDS, GREEDY, "a"))).request_id == "a"

    run(test())


def test_a_reader_that_is_slow_holds_up_nobody(llm: AsyncLLM) -> None:
    async def test() -> None:
        await until_nothing_is_held(llm)
        done = llm.stats().generated + 200
        stream = llm.generate(IDS, replace(GREEDY, max_tokens=200))
        first = await anext(stream)
        # the engine does not wait; `done` may lack the token of the last request before
        while (stats := llm.stats()).generated < done or stats.running:
            time.sleep(0.01)  # the whole event loop stands still
        last = await anext(stream)
        assert (first.finished, last.finished) == (False, True)
        assert len(last.outputs[0].token_ids) == 200  # all in one output: no more was kept

    run(test())


def test_each_request_belongs_to_the_event_loop_that_awaits_it(llm: AsyncLLM, offline: LLM) -> None:
    prompts = [list(range(3, 3 + length)) for length in (4, 30, 17, 9)]
    expected = [output.outputs for output in offline.generate(prompts, GREEDY)]
    found: dict[int, Any] = {}

    async def read() -> Any:
        streams = (llm.generate(prompt, GREEDY) for prompt in prompts)
        return [output.outputs for output in await asyncio.gather(*map(last_of, streams))]

    def in_thread(number: int) -> None:
        found[number] = [run(read()), run(read())]  # one loop after another

    threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [expected] * 2, 1: [expected] * 2}

    stream = llm.generate(IDS, ENDLESS)

    async def one() -> RequestOutput:
        return await anext(stream)

    async def two() -> None:
        first = asyncio.create_task(one())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="another task awaits"):
            await one()
        await first

    run(two())
    with refuses(RequestError, "event loop"):
        run(one())
    run(stream.aclose())
    run(until_nothing_is_held(llm))


def test_of_a_thousand_that_leave_at_random_the_rest_is_whole(llm: AsyncLLM, offline: LLM) -> None:
    """A thousand where the engine is in a process, and a fifth of that where it is in a thread."""
    chance, count = random.Random(36), 1000 if os.getpid() != llm._host.pid else 200
    prompts = [
        [chance.randrange(3, 4000) for _ in range(chance.randrange(2, 9))] for _ in range(count)
    ]
    params = replace(GREEDY, max_tokens=6)
    ways = [chance.choice(("stay", "cancel", "break", "abort")) for _ in prompts]

    async def one(number: int) -> RequestOutput | None:
        if ways[number] != "break":
            return await last_of(llm.generate(prompts[number], params, str(number)))
        async for _ in llm.generate(prompts[number], params):
            break
        return None

    async def leave(number: int, task: asyncio.Task[Any]) -> None:
        if ways[number] in ("cancel", "abort"):
            await asyncio.sleep(chance.uniform(0, count / 500))
            await llm.abort(str(number)) if ways[number] == "abort" else task.cancel()

    async def test() -> list[Any]:
        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        await asyncio.gather(*(leave(number, task) for number, task in enumerate(tasks)))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await until_nothing_is_held(llm)
        return results

    results = run(test())
    whole = [number for number in range(count) if ways[number] == "stay"]
    expected = offline.generate([prompts[number] for number in whole], params)
    assert [results[number].outputs for number in whole] == [one.outputs for one in expected]
    for way, result in zip(ways, results, strict=True):
        if way == "cancel":
            assert isinstance(result, asyncio.CancelledError) or result.finished


def test_a_request_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, {tuple(IDS): 5})

    async def test() -> None:
        async with made("thread") as llm:
            outputs: list[RequestOutput] = []

            async def read() -> None:
                async for output in llm.generate(IDS, GREEDY):
                    outputs.append(output)

            other = asyncio.create_task(last_of(llm.generate([8, 9], GREEDY)))
            with pytest.raises(GenerationError, match="injected") as failed:
                await read()
            assert outputs[-1].outputs[0].finish_reason is FinishReason.ERROR
            assert failed.value.outputs == [outputs[-1]]
            returned = await last_of(llm.generate(IDS, GREEDY, on_error="return"))
            assert returned.outputs[0].error == outputs[-1].outputs[0].error
            assert (await other).outputs[0].finish_reason is FinishReason.LENGTH
            await until_nothing_is_held(llm)

    run(test())


def test_a_killed_engine_fails_what_runs_and_what_comes() -> None:
    async def test() -> None:
        llm = made("process")
        tasks = [asyncio.create_task(last_of(llm.generate(IDS, ENDLESS))) for _ in range(3)]
        await until(lambda: llm.stats().running > 0)
        os.kill(llm._host.pid, signal.SIGKILL)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert_names(str(result), "signal 9")
        await until(lambda: llm._host.end is not None)
        for ask in (last_of(llm.generate(IDS, GREEDY)), asyncio.to_thread(llm.stats)):
            with refuses(EngineError, "signal 9", "AsyncLLM"):
                await ask
        llm.shutdown()
        llm.shutdown()

    run(test())


def test_a_stopped_engine_fails_what_runs_until_it_goes_on() -> None:
    async def test() -> None:
        llm = made("process", stall_timeout=2.0)
        task = asyncio.create_task(last_of(llm.generate(IDS, ENDLESS)))
        await until(lambda: llm.stats().running > 0)
        pid = llm._host.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for ask in (task, last_of(llm.generate(IDS, GREEDY))):
                with pytest.raises(EngineError, match="sign of life"):
                    await asyncio.wait_for(ask, SECONDS)
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: llm._host._engine.client.state is EngineState.READY)  # type: ignore[attr-defined]
        answer = await last_of(llm.generate(IDS, GREEDY))
        assert answer.outputs[0].finish_reason is FinishReason.LENGTH
        await until_nothing_is_held(llm)
        llm.shutdown()

    run(test())


def test_an_engine_whose_thread_ends_fails_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Loop._step

    def failing(self: Loop) -> None:
        step(self)
        raise MemoryError("none is left")

    monkeypatch.setattr(Loop, "_step", failing)

    async def test() -> None:
        llm = made("thread")
        with refuses(EngineError, "MemoryError: none is left"):
            await last_of(llm.generate(IDS, ENDLESS))
        with pytest.raises(EngineError, match="make another"):
            await last_of(llm.generate(IDS, GREEDY))
        llm.shutdown()

    run(test())


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_shutdown_fails_what_runs_and_leaves_nothing(engine: str) -> None:
    def num_threads() -> int:
        return sum(thread.name == "freight-engine" for thread in threading.enumerate())

    async def test() -> None:
        before = num_threads()
        async with made(engine) as one:
            pid = one._host.pid
            tasks = [asyncio.create_task(last_of(one.generate(IDS, ENDLESS))) for _ in range(3)]
            await until(lambda: one.stats().running > 0)
            one.shutdown()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "was shut down" in str(result)
        with pytest.raises(EngineError, match="was shut down"):
            await last_of(one.generate(IDS, GREEDY))
        with pytest.raises(EngineError, match="was shut down"):
            one.stats()
        await one.abort("nobody's")
        assert engine == "thread" or not os.path.exists(f"/proc/{pid}")
        assert num_threads() == before

    run(test())


def test_an_engine_nobody_refers_to_ends() -> None:
    llm = made("process")
    pid = llm._host.pid
    del llm
    run(until(lambda: not os.path.exists(f"/proc/{pid}")))


@pytest.mark.skipif(not CAN_FORK, reason="libraries that have been loaded may not survive a fork")
def test_a_fork_is_refused_and_does_not_keep_the_engine(llm: AsyncLLM) -> None:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads
        child = os.fork()
    if child == 0:
        said = []
        for ask in (lambda: run(last_of(llm.generate(IDS, GREEDY))), llm.stats):
            try:
                ask()
            except EngineError as error:
                said.append(str(error))
        llm.shutdown()  # is not this process's, and left alone
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    expected = f"was made in process {os.getpid()}, and process {child} is a fork of that"
    assert [expected in line for line in said] == [True, True]
    assert run(last_of(llm.generate(IDS, GREEDY))).finished


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "python.md"
    example = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]
    with quickly():
        exec(example, {"__name__": "__main__"})
    assert re.fullmatch(r"2 answers; \d+ tokens\n", capsys.readouterr().out)


SCRIPT = """
import asyncio, multiprocessing, os, sys
from freight import AsyncLLM, SamplingParams

async def answer(llm):
    async for output in llm.generate([5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)):
        pass
    return output.outputs[0].token_ids

def main():
    llm = AsyncLLM(kv_cache_dtype="fp8", kv_cache_memory="8MiB")
    print(asyncio.run(answer(llm)), llm._host.pid, flush=True)
    needed = {"torch", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}
    print(sorted(needed & set(sys.modules)), flush=True)
    globals()["kept"] = llm  # the interpreter ends without a shutdown

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=main)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_a_process_that_is_spawned_has_its_own_and_leaves_none_behind(
    tmp_path: Path, offline: LLM
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    answer, loaded = ran.stdout.splitlines()
    tokens, _, pid = answer.rpartition(" ")
    assert tokens == str(offline.generate(IDS, GREEDY)[0].outputs[0].token_ids)
    assert loaded == "[]"  # neither torch nor the server's packages
    assert not os.path.exists(f"/proc/{pid}")
