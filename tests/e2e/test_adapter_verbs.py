"""Adapters of the verbs and of AsyncLLM give what `LLM` gives with them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.demo_adapter import write_random_adapter
from tests.forked_server import CAN_FORK, forked
from tests.refusals import refuses
from typer.testing import CliRunner

from freight import LLM, AsyncLLM, SamplingParams
from freight.cli.main import app
from freight.engine.adapters import LoRARequest
from freight.errors import CapacityError, CheckpointError, ConfigError, RequestError
from freight.serve.processes import children

OPTIONS: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_memory": "16MiB"}
FLAGS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "16MiB", "--enable-lora"]
PROMPT = "def main("
PARAMS = SamplingParams(max_tokens=12, temperature=0.0)
GREEDY = ["--max-tokens", "12", "--temperature", "0"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' processes are forked: their start is not what is tested."""
    if CAN_FORK:
        monkeypatch.setattr(children, "subprocess", SimpleNamespace(Popen=forked))


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Verbs that run in this process set up the log, to a stream that ends with them."""
    loggers = [logging.getLogger(name) for name in ("freight", "freight.server", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = list(logger.handlers)
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.propagate = propagate
        logger.setLevel(level)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_random_adapter(root / name, seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    return LLM("demo", enable_lora=True, lora_modules=modules, **OPTIONS)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> dict[str, str]:
    """The completion with each adapter; under "" that of the model alone."""
    requests = [LoRARequest("a"), LoRARequest("b"), None]
    outputs = llm.generate([PROMPT] * 3, PARAMS, lora_request=requests)
    found = [output.outputs[0].text for output in outputs]
    assert len(set(found)) == 3
    return dict(zip(("a", "b", ""), found, strict=True))


def run(*argv: str, status: int = 0) -> str:
    answer = CliRunner().invoke(app, argv)
    assert answer.exit_code == status, answer.output
    return answer.stdout


def modules_of(folders: dict[str, Path]) -> list[str]:
    return ["--lora-modules", *(f"{name}={folder}" for name, folder in folders.items())]


def test_generate_answers_with_the_adapter_that_is_named(
    folders: dict[str, Path], texts: dict[str, str]
):
    common = ["generate", "demo", *FLAGS, *GREEDY, "--prompt", PROMPT, *modules_of(folders)]
    assert run(*common) == f"{texts['a']}\n"
    printed = json.loads(run(*common, "--lora", "b", "--json"))
    assert printed["outputs"][0]["text"] == texts["b"]
    with refuses(ConfigError, "--lora 'zz'", "a or b"):
        CliRunner().invoke(app, [*common, "--lora", "zz"], catch_exceptions=False)
    with refuses(ConfigError, "--lora 'a'", "--enable-lora"):
        CliRunner().invoke(
            app, ["generate", "demo", "--prompt", "x", "--lora", "a"], catch_exceptions=False
        )


def test_batch_and_verify_take_the_adapter_that_a_line_names(
    folders: dict[str, Path], texts: dict[str, str], tmp_path: Path
):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    models = ["a", "demo", "b", "nothing"]
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions"}
        | {"body": {**body, "model": model}}
        for model in models
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    run("batch", str(source), str(out), "demo", *FLAGS, *modules_of(folders))
    answers = [json.loads(line)["response"] for line in out.read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200, 200, 200, 404]
    bodies = [answer["body"] for answer in answers[:3]]
    assert [answer["choices"][0]["text"] for answer in bodies] == [
        texts[name] for name in ("a", "", "b")
    ]
    stated = [
        {"request": line["body"], "response": answer}
        for line, answer in zip(lines, bodies, strict=False)
    ]
    stated.append({"request": lines[0]["body"], "response": bodies[2]})  # of another adapter
    records = tmp_path / "stated.jsonl"
    records.write_text("".join(json.dumps(entry) + "\n" for entry in stated))
    printed = run("verify", str(records), "demo", *FLAGS, *modules_of(folders), "--json", status=2)
    results = [json.loads(line) for line in printed.splitlines()]
    assert [result["outcome"] for result in results] == ["equal"] * 3 + ["unknown"]
    assert "its adapter 'a'" in results[3]["reason"]


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_async_llm_gives_what_llm_gives(
    engine: str, llm: LLM, folders: dict[str, Path], texts: dict[str, str], tmp_path: Path
):
    async def text_of(asynchronous: AsyncLLM, request: LoRARequest | None) -> str:
        text = ""
        async for output in asynchronous.generate(PROMPT, PARAMS, lora_request=request):
            text = output.outputs[0].text
        return text

    async def scenario() -> None:
        options = {"enable_lora": True, "max_loras": 2, **OPTIONS}
        async with AsyncLLM("demo", engine=engine, **options) as asynchronous:
            assert asynchronous.adapters == {}
            # one name for two adapters: each request has its own
            requests = [LoRARequest("x", 0, str(folders[name])) for name in "ab"]
            at_once = asyncio.gather(*(text_of(asynchronous, request) for request in requests))
            assert await at_once == [texts["a"], texts["b"]]
            assert asynchronous.adapters == {"x": llm.adapters["b"]}
            assert await text_of(asynchronous, None) == texts[""]
            with refuses(RequestError, "'zz'", "x"):
                await text_of(asynchronous, LoRARequest("zz"))
            with refuses(CheckpointError, "missing"):
                await asynchronous.load_adapter("x", str(tmp_path / "missing"))
            assert await text_of(asynchronous, LoRARequest("x")) == texts["b"]
            await asynchronous.load_adapter("y", str(folders["a"]))
            with refuses(CapacityError, "max-loras"):
                await asynchronous.load_adapter("z", str(folders["a"]))
            await asynchronous.unload_adapter("x")
            assert asynchronous.adapters == {"y": llm.adapters["a"]}
            with refuses(RequestError, "'x'", "y"):
                await asynchronous.unload_adapter("x")

    asyncio.run(asyncio.wait_for(scenario(), 120))
