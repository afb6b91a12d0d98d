"""Weights of a server that change while it is used: every answer is of one version, and of the version
that it states.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.asking import Answered, Server
from tests.serving import ServeProcess, freight_serve
from tests.weight_versions import changed_tensors, write_version

from freight import AsyncLLM, SamplingParams
from freight.errors import CheckpointError, ConfigError, EngineError, RequestError
from freight.llm import LLM

OPTIONS = ("--kv-cache-dtype", "fp8", "--kv-cache-memory", "16MiB", "--enable-weight-updates")
PROMPTS = ("def main(", "import os\n", "class A:\n")
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
LONG = {"prompt": "def main(", "max_tokens": 900, "temperature": 0, "ignore_eos": True}

Scored = list[tuple[int, float]]


@dataclass(frozen=True)
class Versions:
    """Folders, and what an engine gives that starts with each: by fingerprint, then by prompt."""

    folders: tuple[Path, ...]
    fingerprints: tuple[str, ...]
    expected: dict[str, list[Scored]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    root = tmp_path_factory.mktemp("versions")
    folders = []
    fingerprints = []
    expected = {}
    for seed in range(3):
        folder = write_version(root / f"v{seed}", changed_tensors(seed))
        llm = LLM(str(folder), kv_cache_dtype="fp8", kv_cache_memory="16MiB")
        folders.append(folder)
        fingerprints.append(llm.fingerprint)
        expected[llm.fingerprint] = [
            scored(output.outputs[0]) for output in llm.generate(list(PROMPTS), PARAMS)
        ]
    assert len({str(answers) for answers in expected.values()}) == 3
    return Versions(tuple(folders), tuple(fingerprints), expected)


@pytest.fixture(scope="module")
def server(versions: Versions) -> Iterator[Server]:
    with freight_serve(versions.folders[0], OPTIONS) as url:
        yield Server(url, {})


def scored(output: Any) -> Scored:
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return [(token, entry[token].logprob) for token, entry in pairs]


def complete(server: Server, **fields: Any) -> Answered:
    body = {
        "prompt": list(PROMPTS),
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        **fields,
    }
    return server.ask("/v1/completions", body)


def check(answer: Answered, versions: Versions) -> str:
    """Hold an answer to all prompts to the version that it states, which is returned."""
    fingerprint: str = answer.body["system_fingerprint"]
    for choice, expected in zip(
        answer.body["choices"], versions.expected[fingerprint], strict=True
    ):
        pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        assert list(pairs) == expected
    return fingerprint


def get(server: Server, path: str) -> Answered:
    return server.ask(path)


def update(server: Server, folder: Path | str, **fields: Any) -> Answered:
    return server.ask("/update_weights_from_disk", {"model_path": str(folder), **fields})


def test_every_answer_is_of_one_version(server: Server, versions: Versions):
    is_over = threading.Event()

    def use(_: int) -> tuple[set[str], int]:
        seen = set()
        num_aborted = 0
        while not is_over.is_set():
            answer = complete(server)
            if answer.status == 200:
                seen.add(check(answer, versions))
            else:
                assert answer.error["code"] == "aborted", answer.raw
                num_aborted += 1
        return seen, num_aborted

    generator = random.Random(0)
    with ThreadPoolExecutor(6) as pool:
        users = [pool.submit(use, number) for number in range(6)]
        try:
            for number in range(12):
                version = (number + 1) % 3
                abort = generator.random() < 0.3
                name = f"step {number}"
                answer = update(
                    server,
                    versions.folders[version],
                    weight_version=name,
                    abort_all_requests=abort,
                )
                assert answer.status == 200, answer.raw
                assert answer.body["success"] is True
                stated = get(server, "/get_weight_version").body
                assert stated == {
                    "weight_version": name,
                    "fingerprint": versions.fingerprints[version],
                }
                time.sleep(0.2)
        finally:
            is_over.set()
        seen = set()
        for user in users:
            seen |= user.result()[0]
    assert len(seen) > 1


def test_a_failed_update_leaves_the_old_weights(server: Server, versions: Versions, tmp_path: Path):
    before = complete(server)
    for folder, words in ((tmp_path / "none", "no folder"), ("", "model_path is empty")):
        answer = update(server, folder)
        assert answer.status == 400
        assert words in answer.error["message"]
    cut = write_version(tmp_path / "cut", changed_tensors(1))
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert update(server, cut).status == 400
    assert update(server, cut, modell="x").error["message"].startswith("modell is not a field")
    assert update(server, cut, load_format="dummy").status == 400
    after = complete(server)
    assert after.body["choices"] == before.body["choices"]
    check(after, versions)


def test_requests_wait_while_it_is_paused(server: Server, versions: Versions):
    assert get(server, "/is_paused").body == {"is_paused": False}
    assert server.ask("/pause?mode=wait", {}).status == 200
    assert get(server, "/is_paused").body == {"is_paused": True}
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(complete, server)
        time.sleep(0.3)
        assert not waiting.done()
        update(server, versions.folders[1])  # it stays paused
        time.sleep(0.2)
        assert not waiting.done()
        assert server.ask("/resume", {}).status == 200
        assert check(waiting.result(), versions) == versions.fingerprints[1]


def test_running_requests_end_finish_or_stand_still(server: Server, versions: Versions):
    update(server, versions.folders[0])
    whole = complete(server, **LONG).body["choices"]
    for mode in ("abort", "wait", "keep"):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(complete, server, **LONG)
            wait_until(lambda: server.load()[0] > 0)
            assert server.ask("/pause", {"mode": mode}).status == 200
            if mode == "keep":
                time.sleep(0.3)
                assert not running.done()
                refused = update(server, versions.folders[1])
                assert refused.status == 409
                assert "stand still halfway" in refused.error["message"]
            assert server.ask("/resume", {}).status == 200
            answer = running.result()
        if mode == "abort":
            assert (answer.status, answer.error["code"]) == (503, "aborted")
        else:
            assert answer.body["choices"] == whole


def wait_until(is_so: Any) -> None:
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_sleep_and_wake_up(server: Server, versions: Versions):
    update(server, versions.folders[2])
    for level in (1, 2):
        assert server.ask(f"/sleep?level={level}", {}).status == 200
        assert get(server, "/is_sleeping").body == {"is_sleeping": True}
        refused = complete(server)
        assert (refused.status, refused.error["code"]) == (503, "sleeping")
        assert get(server, "/health").status == 200
        assert server.ask("/wake_up?tags=weights", {}).status == 200
        assert complete(server).status == 503
        assert server.ask("/wake_up", {}).status == 200
        assert check(complete(server), versions) == versions.fingerprints[2]
    assert server.ask("/sleep?level=4", {}).status == 400
    assert server.ask("/reset_prefix_cache", {}).status == 200
    assert server.ask("/reset_prefix_cache?reset_external=true", {}).status == 400


def test_only_where_it_is_enabled(demo_server: Any):
    headers = {"Authorization": f"Bearer {demo_server.key}"}
    assert Server(demo_server.url, headers).ask("/sleep", {}).status == 404


def test_a_web_page_needs_a_body_of_json(server: Server):
    opened = server.open("/sleep", None, {"Origin": "https://example.com"}, "POST")
    assert opened.whole().status == 403
    opened.leave()
    assert get(server, "/is_sleeping").body == {"is_sleeping": False}


def test_an_engine_that_is_killed_comes_back_with_its_version(versions: Versions):
    options = (*OPTIONS, "--restart-engine")
    with ServeProcess(versions.folders[0], options, forked=True) as process:
        server = Server(process.wait_until_healthy(), {})
        assert update(server, versions.folders[1]).status == 200
        os.kill(process.children()["worker"], signal.SIGKILL)
        wait_until(lambda: get(server, "/health").status == 503)
        wait_until(lambda: get(server, "/health").status == 200)
        assert check(complete(server), versions) == versions.fingerprints[1]
        with ThreadPoolExecutor(1) as pool:  # in the middle of an update: the old or the new
            changing = pool.submit(update, server, versions.folders[2])
            time.sleep(0.05)
            os.kill(process.children()["worker"], signal.SIGKILL)
            changed = changing.result().status == 200
        wait_until(lambda: get(server, "/health").status == 503)
        wait_until(lambda: get(server, "/health").status == 200)
        expected = versions.fingerprints[2 if changed else 1]
        assert check(complete(server), versions) == expected


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_async_llm(engine: str, versions: Versions):
    async def run() -> None:
        llm = await asyncio.to_thread(
            AsyncLLM,
            str(versions.folders[0]),
            engine=engine,
            kv_cache_dtype="fp8",
            kv_cache_memory="16MiB",
        )
        async with llm:
            await use(llm, versions)

    asyncio.run(run())


async def use(llm: AsyncLLM, versions: Versions) -> None:
    async def answers() -> list[Scored]:
        last = [await whole(llm.generate(prompt, PARAMS)) for prompt in PROMPTS]
        return [scored(output.outputs[0]) for output in last]

    assert await answers() == versions.expected[versions.fingerprints[0]]
    await llm.update_weights_from_disk(str(versions.folders[1]))
    assert llm.fingerprint == versions.fingerprints[1]
    assert await answers() == versions.expected[versions.fingerprints[1]]
    with pytest.raises(CheckpointError):
        await llm.update_weights_from_disk("/nowhere")
    with pytest.raises(ConfigError, match="mode is 'stop'"):
        await llm.pause_generation("stop")
    for mode, reason in (("abort", "abort"), ("wait", "length"), ("keep", "length")):
        params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        stream = llm.generate("def main(", params)
        await anext(stream)
        await llm.pause_generation(mode)
        assert await llm.is_paused()
        if mode == "keep":
            with pytest.raises(RequestError, match="stand still halfway"):
                await llm.update_weights_from_disk(str(versions.folders[2]))
        waiting = asyncio.create_task(whole(llm.generate(PROMPTS[0], PARAMS)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await llm.resume_generation()
        assert (await whole(stream)).outputs[0].finish_reason == reason
        assert scored((await waiting).outputs[0]) == versions.expected[versions.fingerprints[1]][0]
    await llm.sleep(2)
    assert await llm.is_sleeping()
    with pytest.raises((RequestError, EngineError), match="sleeps at level 2"):
        await whole(llm.generate(PROMPTS[0], PARAMS))
    await llm.update_weights_from_disk(str(versions.folders[2]))
    await llm.wake_up()
    await llm.reset_prefix_cache()
    assert await answers() == versions.expected[versions.fingerprints[2]]


async def whole(stream: Any) -> Any:
    outputs = [output async for output in stream]
    return outputs[-1]


def test_options_in_the_query(server: Server, versions: Versions):
    folder = versions.folders[0]
    answer = server.ask(f"/update_weights_from_disk?weight_version=100&model_path={folder}", {})
    assert answer.status == 200, answer.raw
    assert get(server, "/get_weight_version").body["weight_version"] == "100"
    for level in ("9" * 5000, "-1", "x"):
        assert server.ask(f"/sleep?level={level}", {}).status == 400


def test_the_server_outlives_what_cannot_be_a_path_and_the_end_of_its_folder(versions: Versions):
    with freight_serve(versions.folders[0], OPTIONS) as url:
        server = Server(url, {})
        assert update(server, "x" * 5000).status == 400
        gone = write_version(versions.folders[0].parent / "gone", changed_tensors(1))
        assert update(server, gone).status == 200
        shutil.rmtree(gone)
        assert server.ask("/reset_prefix_cache", {}).status == 200
        assert (
            check(complete(server), versions)
            == get(server, "/get_weight_version").body["fingerprint"]
        )
        assert update(server, versions.folders[2]).status == 200
        assert check(complete(server), versions) == versions.fingerprints[2]


def test_the_answer_of_an_update_is_json(server: Server, versions: Versions):
    answer = update(server, versions.folders[0])
    assert json.loads(answer.raw)["num_paused_requests"] == 0
