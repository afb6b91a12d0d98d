"""The engine's process: it computes what LLM does, ends with the server, and its end fails what
runs, at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.forked_server import forked
from tests.serving import CAN_FORK

from freight import LLM
from freight.engine.intake import AcceptedPrompt
from freight.errors import CheckpointError, RequestError
from freight.outputs import FinishReason
from freight.sampling import SamplingParams
from freight.serve.inbox import Inbox
from freight.serve.processes import children
from freight.serve.processes.client import EngineClient, EngineState, NotReadyError, WorkerOptions
from freight.settings.engine import EngineArgs

pytestmark = pytest.mark.clock

ARGS = vars(EngineArgs(kv_cache_dtype="fp8", kv_cache_memory="8MiB", max_num_seqs=8))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(
    max_tokens=900, n=64, ignore_eos=True
)  # one after the other, where max_num_seqs is 1


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process is forked: its start is not what is tested."""
    if CAN_FORK:
        monkeypatch.setattr(children, "subprocess", SimpleNamespace(Popen=forked))


def with_engine(test: Callable[[EngineClient], Awaitable[None]], **args: Any) -> int:
    """Run `test` with a started engine; returns its process's exit status."""

    async def run() -> int:
        client = EngineClient(
            WorkerOptions({**ARGS, **args}), lambda _: None, lambda *_: None, lambda: None
        )
        await client.start()
        try:
            await test(client)
        finally:
            await client.stop()
        return await client.ended

    return asyncio.run(asyncio.wait_for(run(), 300))


async def text_of(
    client: EngineClient, name: str, token_ids: Sequence[int], params: SamplingParams
) -> str:
    inbox = Inbox()
    running = client.submit(name, 0, AcceptedPrompt(None, tuple(token_ids)), params, inbox)
    await running.accepted
    text = ""
    while True:
        for _, delta in await inbox.next():
            text += delta.outputs[0].text
            if delta.finished:
                assert delta.outputs[0].finish_reason is not FinishReason.ERROR
                return text


async def rest_of(inbox: Inbox) -> None:
    while True:
        await inbox.next()


def test_an_engine_in_a_process_of_its_own_answers_as_llm_does() -> None:
    prompts = [list(range(3, 3 + length)) for length in (4, 40, 17, 90)]
    expected = [
        output.outputs[0].text
        for output in LLM(kv_cache_dtype="fp8", kv_cache_memory="8MiB").generate(prompts, GREEDY)
    ]

    async def test(client: EngineClient) -> None:
        with pytest.raises(NotReadyError, match="still loading"):
            client.submit("early", 0, AcceptedPrompt(None, (1, 2)), GREEDY, Inbox())
        assert (await client.opened).vocab_size == 4096
        facts = await client.ready
        assert facts.kv_cache["dtype"] == "fp8_e4m3fn"
        texts = await asyncio.gather(
            *(text_of(client, str(i), ids, GREEDY) for i, ids in enumerate(prompts))
        )
        assert texts == expected
        assert client.num_running == 0
        while (  # the statistics of the last step come behind its tokens
            client.stats is None or client.stats.generated < 4 * 24 or client.stats.held_tokens
        ):
            await asyncio.sleep(0.02)
        assert (client.stats.running, client.stats.generated) == (0, 4 * 24)

    assert with_engine(test) == 0


@pytest.mark.usefixtures("quickly")
def test_what_the_engine_refuses_is_refused_alone() -> None:
    async def test(client: EngineClient) -> None:
        facts = await client.ready
        assert facts.max_model_len == 16
        with pytest.raises(RequestError, match="the prompt has 30 tokens"):
            await text_of(client, "long", range(3, 33), GREEDY)
        assert await text_of(client, "short", [5, 6, 7], GREEDY)

    with_engine(test, kv_cache_memory="48KiB", max_model_len=None)


@pytest.mark.usefixtures("quickly")
def test_an_abort_frees_what_the_request_held() -> None:
    async def test(client: EngineClient) -> None:
        await client.ready
        inbox = Inbox()
        running = client.submit("long", 0, AcceptedPrompt(None, (5, 6, 7)), ENDLESS, inbox)
        await inbox.next()
        client.abort(running)
        client.abort(running)  # once more changes nothing
        deadline = time.monotonic() + 300
        while client.stats is None or client.stats.generated == 0 or client.stats.held_tokens:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert client.stats.generated < 900 * ENDLESS.n

    with_engine(test, max_num_seqs=1)


@pytest.mark.usefixtures("quickly")
def test_a_killed_engine_fails_what_runs() -> None:
    async def test(client: EngineClient) -> None:
        await client.ready
        inbox = Inbox()
        client.submit("long", 0, AcceptedPrompt(None, (5, 6, 7)), ENDLESS, inbox)
        await inbox.next()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(NotReadyError, match="has ended"):
            await rest_of(inbox)
        assert client.state is EngineState.ENDED
        assert await client.ended == -signal.SIGKILL
        with pytest.raises(NotReadyError, match="has ended"):
            client.submit("late", 0, AcceptedPrompt(None, (5, 6, 7)), ENDLESS, inbox)

    assert with_engine(test, max_num_seqs=1) == -signal.SIGKILL


@pytest.mark.usefixtures("quickly")
def test_a_model_that_cannot_be_loaded_says_why() -> None:
    async def test(client: EngineClient) -> None:
        assert await client.ended == 1
        assert isinstance(client.failure, CheckpointError)
        assert "there is no folder" in str(client.failure)
        assert client.ready.cancelled()

    assert with_engine(test, model="./nowhere") == 1


def test_the_process_ends_with_its_server() -> None:
    code = (
        "import asyncio, os, signal\n"
        "from freight.settings.engine import EngineArgs\n"
        "from freight.serve.processes.client import EngineClient, WorkerOptions\n"
        "async def run():\n"
        "    client = EngineClient(WorkerOptions(vars(EngineArgs())), print, print, print)\n"
        "    await client.start()\n"
        "    await client.opened\n"
        "    print(client.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(run())\n"
    )
    server = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert server.returncode == -signal.SIGKILL
    pid, deadline = int(server.stdout), time.monotonic() + 300
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, "the engine outlives its server"
        time.sleep(0.05)
