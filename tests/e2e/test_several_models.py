"""Several models in one server: three small ones, of which two may be loaded at once.

`python benchmarks/several_models.py` does the same with ten models and 32 clients.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.asking import Answered, Server
from tests.changed_demos import changed_demo
from tests.serving import ServeProcess, has_ended

from freight.llm import LLM
from freight.sampling import SamplingParams

PROMPT = "def main("
CACHE = "16MiB"
NAMES = ("first", "second", "third")
KEY = "several-key"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        changed_demo(folder / name, seed)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, str]:
    """What each model answers alone."""
    found = {}
    for name in NAMES:
        llm = LLM(str(models / name), kv_cache_memory=CACHE, threads=1)
        params = SamplingParams(max_tokens=12, temperature=0.0)
        found[name] = llm.generate([PROMPT], params)[0].outputs[0].text
    assert len(set(found.values())) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def process(models: Path) -> Iterator[ServeProcess]:
    options = ["--models", str(models), "--models-max", "2", "--models-turn", "0.5"]
    options += ["--kv-cache-memory", CACHE, "--threads", "1", "--api-key", f"tests:{KEY}"]
    with ServeProcess(None, options) as server:
        yield server
        assert server.stop() == 0, server.said[-2000:]
        assert "Traceback" not in server.said


@pytest.fixture
def server(process: ServeProcess) -> Server:
    return Server(process.url, {"Authorization": f"Bearer {KEY}"})


def complete(server: Server, name: str | None, **more: Any) -> Answered:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    return server.ask("/v1/completions", body if name is None else body | {"model": name})


def states(server: Server) -> dict[str, str]:
    listed = server.ask("/v1/models").body["data"]
    return {model["id"]: model["status"]["value"] for model in listed}


def until(server: Server, name: str, state: str) -> None:
    end = time.monotonic() + 120
    while states(server)[name] != state:
        assert time.monotonic() < end, states(server)
        time.sleep(0.05)


def test_each_model_answers_as_it_does_alone(
    server: Server, process: ServeProcess, expected: dict[str, str]
) -> None:
    answers: list[tuple[str, Answered]] = []

    def ask(name: str) -> None:
        answers.append((name, complete(server, name)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES * 3]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(process.all_of("worker")) <= 2
        time.sleep(0.05)
    assert len(answers) == 9
    for name, answer in answers:
        assert answer.status == 200, answer.raw
        assert answer.body["model"] == name
        assert answer.body["choices"][0]["text"] == expected[name]
    assert sorted(states(server).values()) == ["failed", "loaded", "loaded", "unloaded"]


def test_what_names_no_model_of_the_server_is_refused_in_words(server: Server) -> None:
    assert complete(Server(server.url), "first").status == 401
    nameless = complete(server, None)
    assert (nameless.status, nameless.error["code"]) == (400, "model_required")
    assert complete(server, "dummy").status == 400
    unknown = complete(server, "fourth")
    assert (unknown.status, unknown.error["param"]) == (404, "model")
    assert "served are 'broken', 'first', 'second', 'third'" in unknown.error["message"]
    assert server.ask("/generate", {"inputs": PROMPT}).body["error_type"] == "validation"
    assert server.ask("/models/load", {"model": "fourth"}).status == 404
    assert server.ask("/models/load", {"name": "first"}).status == 400
    assert server.ask("/v1/models/fourth").status == 404
    assert server.ask("/nothing").status == 404
    assert server.ask("/models", {}).status == 405
    load = server.ask("/models/load")
    assert (load.status, load.headers["allow"]) == (405, "POST")


def test_a_broken_folder_fails_its_requests_alone(server: Server) -> None:
    answer = complete(server, "broken")
    assert (answer.status, answer.error["code"]) == (503, "model_failed")
    assert "broken/config.json is not JSON" in answer.error["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert server.ask("/health").body == {"status": "ok"}


def test_every_path_works_by_model(server: Server, expected: dict[str, str]) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}
    by_query = server.ask("/generate?model=second", body)
    by_header = server.ask("/generate", body, {"x-freight-model": "second"})
    assert by_query.body["generated_text"] == expected["second"]
    assert by_header.body == by_query.body
    assert server.ask("/info?model=second").body["model_id"] == "second"
    assert server.ask("/tokenize", {"model": "second", "prompt": PROMPT}).body["count"] == 4
    assert server.ask("/health?model=second").status == 200
    assert server.ask("/v1/models/second").body["status"] == {"value": "loaded"}
    assert server.ask("/state?model=second").status == 200
    assert server.ask("/").status == 200
    metrics = server.ask("/metrics").raw.decode()
    assert 'freight:model_state{model_name="second",state="loaded"} 1.0' in metrics
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="second"}'
        in (metrics)
    )
    assert metrics.count("# TYPE vllm:time_to_first_token_seconds ") == 1


def test_the_document_has_the_paths_of_several_models(server: Server) -> None:
    paths = server.ask("/openapi.json").body["paths"]
    assert {"/models", "/models/load", "/models/unload", "/v1/completions"} <= set(paths)
    operation = paths["/models/load"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    for body, status in (({"model": "third"}, 200), ({"name": "third"}, 400), ({}, 400)):
        assert server.ask("/models/load", body).status == status
        assert jsonschema_rs.is_valid(schema, body) == (status == 200)
    assert operation["security"]
    assert server.ask("/models/unload", {"model": "third"}).status == 200


def test_each_line_of_the_log_says_which_model_it_is_about(
    server: Server, process: ServeProcess
) -> None:
    assert complete(server, "first", request_id="lines").status == 200
    assert complete(server, "first", temperature=-1).status == 400
    lines = process.said.splitlines()
    for part in (
        " weights: ",
        "ready: first",
        " request request_id=",
        "status=200",
        "param=temperature",
    ):
        assert any(part in line and "model=first" in line for line in lines), part


def test_an_engine_that_is_killed_takes_its_own_requests_only(
    server: Server, process: ServeProcess, expected: dict[str, str]
) -> None:
    for name in NAMES[:2]:
        assert complete(server, name).status == 200
    engine = process.all_of("worker")[0]
    stream = server.open(
        "/v1/completions",
        {"model": "first", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True},
    )
    stream.first_event()
    os.kill(engine, signal.SIGKILL)
    for name in NAMES[:2]:
        end = time.monotonic() + 120
        while (answer := complete(server, name)).status != 200:
            assert answer.error["code"] in ("engine_ended", "loading"), answer.raw
            assert time.monotonic() < end
            time.sleep(0.05)
        assert answer.body["choices"][0]["text"] == expected[name]
    stream.leave()


def test_unloading_lets_answers_end(server: Server, expected: dict[str, str]) -> None:
    assert complete(server, "first").status == 200
    stream = server.open(
        "/v1/completions",
        {"model": "first", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True},
    )
    stream.first_event()
    assert server.ask("/models/unload", {"model": "first"}).body == {"success": True}
    events = stream.whole().events
    stream.leave()
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    until(server, "first", "unloaded")
    assert server.ask("/models/load", {"model": "first"}).body == {"success": True}
    until(server, "first", "loaded")
    assert complete(server, "first").body["choices"][0]["text"] == expected["first"]


def test_sigterm_while_a_model_loads_ends_all(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f"[only]\npath = '{models / 'first'}'\nkv_cache_memory = '{CACHE}'\n")
    with ServeProcess(None, ["--models", str(file), "--threads", "1"]) as process:
        server = Server(process.url)
        opened = server.open("/v1/completions", {"prompt": PROMPT})  # it is the only one
        until(server, "only", "loading")
        engines = process.all_of("worker")
        assert process.stop() == 0, process.said[-2000:]
        assert opened.whole().status == 503
        opened.leave()
        assert all(map(has_ended, engines))


def test_an_unknown_option_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text("[a]\npath = 'demo'\nkv_cache_dtyp = 'fp8'\n")
    with ServeProcess(None, ["--models", str(file)]) as process:
        assert process.wait() == 2
        assert "did you mean kv_cache_dtype?" in process.said
