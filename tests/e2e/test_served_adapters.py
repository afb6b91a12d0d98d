"""Adapters of a server: named as models, they give the tokens and log-probabilities of `LLM`, of one
version each, also while they are loaded, replaced and taken away.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.asking import Answered, Server
from tests.demo_adapter import write_random_adapter
from tests.serving import ServeProcess, freight_serve

from freight import SamplingParams
from freight.engine.adapters import LoRARequest
from freight.llm import LLM

KEY = {"Authorization": "Bearer adapters-key"}
KEYS = ("--api-key", "tests:adapters-key")
OPTIONS = ("--kv-cache-dtype", "fp8", "--kv-cache-memory", "32MiB")
PROMPT = "def main("
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
NAMES = ("a", "b", "c")
TURNING = ("x", "y", "z")

Scored = list[tuple[int, float]]


@dataclass(frozen=True)
class Adapters:
    """Folders by name, and what `LLM` gives with each; under "" what the model alone gives."""

    folders: Mapping[str, Path]
    expected: Mapping[str, Scored]
    digests: Mapping[str, str]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    root = tmp_path_factory.mktemp("adapters")
    folders = {
        name: write_random_adapter(root / name, seed, rank=1 + 3 * seed)
        for seed, name in enumerate((*NAMES, "d"))
    }
    llm = LLM("demo", enable_lora=True, max_loras=4, kv_cache_dtype="fp8", kv_cache_memory="32MiB")
    expected = {"": scored(llm.generate(PROMPT, PARAMS)[0].outputs[0])}
    for name, folder in folders.items():
        output = llm.generate(PROMPT, PARAMS, lora_request=LoRARequest(name, 0, str(folder)))[0]
        expected[name] = scored(output.outputs[0])
    assert len({str(answer) for answer in expected.values()}) == len(expected)
    return Adapters(folders, expected, llm.adapters)


@pytest.fixture(scope="module")
def server(adapters: Adapters) -> Iterator[Server]:
    modules = [f"{name}={adapters.folders[name]}" for name in NAMES]
    options = (*OPTIONS, *KEYS, "--enable-lora", "--max-loras", "5", "--lora-modules", *modules)
    with freight_serve("demo", options) as url:
        yield Server(url, KEY)


def scored(output: Any) -> Scored:
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return [(token, entry[token].logprob) for token, entry in pairs]


def answer_of(answer: Answered) -> Scored:
    assert answer.status == 200, answer.raw
    choice = answer.body["choices"][0]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def complete(server: Server, model: str, **fields: Any) -> Answered:
    body = {**BODY, "model": model, "return_token_ids": True, **fields}
    return server.ask("/v1/completions", body)


def load(server: Server, name: str, path: Path | str) -> Answered:
    return server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def unload(server: Server, name: str) -> Answered:
    return server.ask("/v1/unload_lora_adapter", {"lora_name": name})


def test_requests_at_once_give_what_llm_gives(server: Server, adapters: Adapters):
    models = ["demo", *NAMES] * 4
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(lambda model: complete(server, model), models))
    for model, answer in zip(models, answers, strict=True):
        name = "" if model == "demo" else model
        assert answer_of(answer) == adapters.expected[name]
        assert answer.body["model"] == model
        fingerprint = answer.body["system_fingerprint"]
        if name:
            assert fingerprint.endswith(f"-{adapters.digests[name][:8]}")
    base = answers[0].body["system_fingerprint"]
    assert all(answer.body["system_fingerprint"].startswith(base) for answer in answers)


def test_models_lists_adapters_after_the_model(server: Server, adapters: Adapters):
    data = server.ask("/v1/models").body["data"]
    assert [entry["id"] for entry in data][:4] == ["demo", *NAMES]
    assert "parent" not in data[0]
    assert data[1]["parent"] == "demo"
    assert data[1]["root"] == str(adapters.folders["a"])
    assert server.ask("/v1/models/b").body == data[2]


def test_every_api_takes_an_adapters_name(server: Server, adapters: Adapters):
    whole = complete(server, "b").body["choices"][0]["text"]
    generated = server.ask(
        "/generate", {"inputs": PROMPT, "parameters": {"adapter_id": "b", "max_new_tokens": 12}}
    )
    assert generated.body["generated_text"] == whole
    assert server.ask("/tokenize", {"model": "b", "prompt": PROMPT}).status == 200
    unknown = server.ask("/generate", {"inputs": PROMPT, "parameters": {"adapter_id": "zz"}})
    assert unknown.status == 422
    assert "zz" in unknown.body["error"]
    assert "demo, a, b, c" in unknown.body["error"]


def test_an_unknown_name_is_404_and_says_what_there_is(server: Server):
    for path in ("/v1/completions", "/tokenize"):
        answer = server.ask(path, {"model": "nothing", "prompt": PROMPT})
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"
        assert "demo, a, b, c" in answer.error["message"]


def test_prefixes_are_found_within_one_adapter_only(server: Server):
    prompt = "Every part of the prefix cache has one owner. " * 8

    def cached(model: str) -> int:
        usage = complete(server, model, prompt=prompt, max_tokens=1).body["usage"]
        details = usage["prompt_tokens_details"] or {"cached_tokens": 0}
        return int(details["cached_tokens"])

    assert [cached(model) for model in ("demo", *NAMES)] == [0] * 4
    assert all(cached(model) > 0 for model in ("demo", *NAMES))


def test_adapters_are_loaded_and_taken_away(server: Server, adapters: Adapters):
    answer = load(server, "d", adapters.folders["d"])
    assert answer.raw == b"Success: LoRA adapter 'd' added successfully."
    assert answer_of(complete(server, "d")) == adapters.expected["d"]
    requests = server.metric("freight:adapter_requests_total", adapter="d")
    assert requests == 1
    assert unload(server, "d").raw == b"Success: LoRA adapter 'd' removed successfully."
    assert complete(server, "d").status == 404
    again = unload(server, "d")
    assert again.status == 404
    assert "'d'" in again.error["message"]


def test_metrics_say_which_adapters_run(server: Server):
    assert server.metric("vllm:lora_requests_info", max_lora="5") > 1e9
    body = {**BODY, "model": "b", "max_tokens": 400, "n": 8, "ignore_eos": True, "logprobs": None}
    with server.streaming(body):
        end = time.monotonic() + 60
        while 'running_lora_adapters="b"' not in server.ask("/metrics").raw.decode():
            assert time.monotonic() < end, "no sample says that b runs"
            time.sleep(0.05)


def test_what_cannot_be_loaded_changes_nothing(server: Server, adapters: Adapters, tmp_path: Path):
    broken = write_random_adapter(tmp_path / "broken", 7)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for name in ("a", "new"):
        answer = load(server, name, broken)
        assert answer.status == 400
        assert "broken" in answer.error["message"]
    paths = (tmp_path / "missing", "/" + "x" * 5000, "a\0b", "\ud800", " ", "~no-such-user/x")
    for path in (*paths, weights, "/dev/zero", "https://127.0.0.1/x"):
        assert load(server, "new", path).status == 400
    for name in ("a\n", " ", "x" * 257):
        answer = load(server, name, adapters.folders["a"])
        assert (answer.status, answer.error["param"]) == (400, "lora_name")
    assert complete(server, "new").status == 404
    assert answer_of(complete(server, "a")) == adapters.expected["a"]
    same = load(server, "demo", adapters.folders["a"])
    assert same.status == 400
    assert "name of the served model" in same.error["message"]


def test_all_slots_in_use_are_said(server: Server, adapters: Adapters):
    loaded = []
    try:
        for name in ("p", "q"):
            assert load(server, name, adapters.folders["d"]).status == 200
            loaded.append(name)
        full = load(server, "r", adapters.folders["d"])
        assert (full.status, full.error["code"]) == (400, "no_slot")
        assert "--max-loras" in full.error["message"]
    finally:
        for name in loaded:
            unload(server, name)


def test_answers_under_replacement_are_of_one_version(server: Server, adapters: Adapters):
    """An answer's tokens, log-probabilities and fingerprint are those of one version."""
    versions = {adapters.digests[name][:8]: adapters.expected[name] for name in ("a", "b", "d")}
    assert load(server, "turning", adapters.folders["d"]).status == 200
    over = threading.Event()
    seen: list[str] = []

    def ask() -> None:
        while not over.is_set():
            answer = complete(server, "turning")
            digest = answer.body["system_fingerprint"].rpartition("-")[2]
            assert answer_of(answer) == versions[digest]
            seen.append(digest)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for number in range(20):
                name = ("a", "b", "d")[number % 3]
                # the slots of versions that requests still use are not free
                while load(server, "turning", adapters.folders[name]).status != 200:
                    time.sleep(0.01)
        finally:
            over.set()
        for future in asking:
            future.result()
    assert len(set(seen)) > 1
    unload(server, "turning")


@dataclass
class Soak:
    """Clients of a server whose adapters are loaded, replaced and taken away meanwhile.

    sizes  of the engine's process after every hundred changes (`memory_and_files`)
    """

    server: Server
    worker: int
    adapters: Adapters
    over: threading.Event = field(default_factory=threading.Event)
    answered: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.over.is_set():
            name = draw.choice(("demo", *TURNING))
            if draw.random() < 0.1:
                body = {**BODY, "model": name, "stream": True}
                left = self.server.open("/v1/completions", body)
                time.sleep(0.02)
                left.leave(reset=True)
                continue
            answer = complete(self.server, name, n=draw.choice((1, 2)))
            self.answered.append(answer.status)
            if answer.status == 200:
                self._check(name, answer)

    def _check(self, name: str, answer: Answered) -> None:
        digest = answer.body["system_fingerprint"].rpartition("-")[2]
        version = ""
        if name != "demo":
            digests = self.adapters.digests
            version = next(other for other in digests if digests[other].startswith(digest))
        for choice in answer.body["choices"]:
            scores = choice["logprobs"]["token_logprobs"]
            tokens = list(zip(choice["token_ids"], scores, strict=True))
            assert tokens == self.adapters.expected[version]

    def change(self, seed: int) -> None:
        draw = random.Random(seed)
        while self.changed.count(200) < 500:
            name = draw.choice(TURNING)
            if draw.random() < 0.25:
                answer = unload(self.server, name)
            else:
                version = draw.choice(list(self.adapters.folders))
                answer = load(self.server, name, self.adapters.folders[version])
            self.changed.append(answer.status)
            if answer.status == 200 and self.changed.count(200) % 100 == 0:
                self.sizes.append(memory_and_files(self.worker))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="sizes are read from /proc")
def test_five_hundred_changes_under_sixteen_clients(adapters: Adapters):
    """Every answer is wholly of one version, nothing fails but what is refused by name, and memory,
    slots and open files are in the end what they were.
    """
    options = (*OPTIONS, *KEYS, "--enable-lora", "--max-loras", "4")
    with ServeProcess("demo", options, forked=True) as process:
        server = Server(process.wait_until_healthy(), KEY)
        soak = Soak(server, process.children()["worker"], adapters)
        with ThreadPoolExecutor(18) as pool:
            asking = [pool.submit(soak.ask, seed) for seed in range(16)]
            try:
                for changing in [pool.submit(soak.change, seed) for seed in (16, 17)]:
                    changing.result()
            finally:
                soak.over.set()
            for future in asking:
                future.result()
        assert set(soak.answered) == {200, 404}  # 404: nothing had the name then
        assert set(soak.changed) <= {200, 400, 404}  # 400: requests used all slots
        server.wait_for(running=0)
        for name in TURNING:
            unload(server, name)
        for number in range(4):  # all slots are free again
            assert load(server, f"last-{number}", adapters.folders["a"]).status == 200
        memory, files = memory_and_files(soak.worker)
        first_memory, first_files = soak.sizes[0]
        assert memory < first_memory + 32 * 2**20
        assert files <= first_files + 2
        assert process.children()["worker"] == soak.worker
        assert process.stop() == 0


def memory_and_files(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process, and how many files it has open."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


def test_loading_needs_keys_and_adapters(adapters: Adapters):
    for options, status, hint in (
        (("--enable-lora",), 403, "--api-key"),
        (KEYS, 404, "--enable-lora"),
    ):
        with freight_serve("demo", (*OPTIONS, *options)) as url:
            server = Server(url, KEY)
            answer = load(server, "a", adapters.folders["a"])
            assert answer.status == status
            assert hint in answer.error["message"]
            assert unload(server, "a").status == status


def test_another_engine_loads_what_was_loaded(adapters: Adapters, tmp_path: Path):
    options = (*OPTIONS, *KEYS, "--enable-lora", "--max-loras", "3", "--restart-engine")
    modules = ("--lora-modules", f"a={adapters.folders['a']}", f"b={adapters.folders['b']}")
    gone = write_random_adapter(tmp_path / "gone", 9)
    with ServeProcess("demo", (*options, *modules), forked=True) as process:
        server = Server(process.wait_until_healthy(), KEY)
        assert unload(server, "a").status == 200
        assert load(server, "b", adapters.folders["d"]).status == 200
        assert load(server, "gone", gone).status == 200
        (gone / "adapter_config.json").unlink()
        worker = process.children()["worker"]
        os.kill(worker, signal.SIGKILL)
        end = time.monotonic() + 120
        while process.children().get("worker") in (None, worker):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.wait_until_healthy()
        assert [entry["id"] for entry in server.ask("/v1/models").body["data"]] == ["demo", "b"]
        assert answer_of(complete(server, "b")) == adapters.expected["d"]
        assert "'gone' is not loaded any more" in process.said
        assert process.stop() == 0


def test_a_name_of_the_model_is_refused_at_the_start(adapters: Adapters):
    options = ("--enable-lora", "--lora-modules", f"demo={adapters.folders['a']}")
    with ServeProcess("demo", options, forked=True) as process:
        assert process.wait() == 2
        assert "a name of the model here" in process.said


def test_a_name_is_json_too(adapters: Adapters):
    module = json.dumps({"name": "with=sign", "path": str(adapters.folders["a"])})
    options = (*OPTIONS, "--enable-lora", "--lora-modules", module)
    with freight_serve("demo", options) as url:
        assert answer_of(complete(Server(url), "with=sign")) == adapters.expected["a"]
