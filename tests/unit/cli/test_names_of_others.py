"""Every name that people paste from vLLM, SGLang, llama-server and TGI: it works, or a sentence says
what to use. The names are read from each engine's sources (`tools/list_engine_options.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names, refuses
from typer.main import get_command

from freight.adapters.tgi_launcher import read
from freight.base.other_engines.fields import BODIES, SAMPLING
from freight.base.other_engines.instead import SHORT, TABLES, as_flag, instead_of, spelled
from freight.base.other_engines.tgi import TGI_OPTIONS
from freight.base.other_engines.values import OTHER_KV_CACHES, OTHER_QUANTIZATIONS
from freight.cli.main import app
from freight.cli.options import CONTEXT, Command
from freight.errors import ConfigError, RequestError
from freight.sampling import SamplingParams
from freight.serve.openai.chat_request import ChatRequest
from freight.serve.openai.completion_request import CompletionRequest
from freight.settings.engine import EngineArgs
from freight.settings.kv_source import KV_DTYPE_NAMES
from freight.settings.resolve import QUANTIZATIONS, check

FIXTURES = Path(__file__).parents[2] / "fixtures" / "other_engines"
ENGINES: Mapping[str, Any] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*.json"))
}
# Options of theirs that Freight has under the same name: each is looked at, and means the same.
SAME = """
    api-key api-key-file block-size chat-template device disable-custom-all-reduce dtype
    enable-auto-tool-choice enable-lora
    enable-prefix-caching enable-tokenizer-info-endpoint help host kv-cache-dtype
    kv-cache-dtype-skip-layers kv-events-config lora-modules master-addr master-port max-lora-rank max-loras
    max-model-len max-num-batched-tokens max-num-seqs model model-id models-max
    nnodes no-enable-prefix-caching pipeline-parallel-size pp pp-size
    node-rank num-shard otlp-traces-endpoint pooling port quantization quantization-param-path
    reasoning-budget reasoning-parser revision
    scheduling-policy seed
    served-model-name skip-tokenizer-init speculate speculative-config ssl-certfile ssl-keyfile
    ssl-keyfile-password tensor-parallel-size threads tokenizer tool-call-parser tp tp-size
"""
# a value of each that the engine's documentation has -> what it is here
FORMS = [
    ("--max-model-len 32k", "max_model_len", 32_000),
    ("--max-model-len 32K", "max_model_len", 32_768),
    ("--max-model-len auto", "max_model_len", None),
    ("--max-model-len -1", "max_model_len", None),
    ("--max-num-batched-tokens 8K", "max_num_batched_tokens", 8192),
    ("--max-num-batched-tokens 8k", "max_num_batched_tokens", 8000),
    ("--kv-cache-dtype fp8_per_token_head", "kv_cache_dtype", "fp8_per_token_head"),
    ("--kv-cache-dtype-skip-layers 0 2", "kv_cache_dtype_skip_layers", ["0,2"]),
    ("--served-model-name a b", "served_model_name", ["a", "b"]),
    ("--served_model_name a b --port 1", "served_model_name", ["a", "b"]),
    ("--served-model-name a --served-model-name b", "served_model_name", ["a", "b"]),
    ("--lora-modules a=./a b=./b", "lora_modules", ["a=./a", "b=./b"]),
    ("-tp 2", "tensor_parallel_size", 2),
    ("--tp-size 2", "tensor_parallel_size", 2),
    ("--no-enable-prefix-caching", "enable_prefix_caching", False),
]


@pytest.fixture(scope="module")
def serve() -> Command:
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert isinstance(command, Command)
    return command


def spellings(command: Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def parsed(command: Command, argv: list[str]) -> dict[str, Any]:
    """Return what the command makes of its arguments, as `freight VERB` reads them."""
    return command.make_context(str(command.name), argv, **CONTEXT).params


def options(engine: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each spelling of an option of the engine, and a command line with it."""
    for option in ENGINES[engine]["options"]:
        for name in (*option["names"], *option.get("negative", ())):
            yield name, [name] if "switch" in option else [name, "1"]


def test_the_lists_are_whole() -> None:
    sizes = {engine: len(listed["options"]) for engine, listed in ENGINES.items()}
    assert sizes == {"llama_server": 254, "sglang": 531, "tgi": 54, "vllm": 320}
    for listed in ENGINES.values():
        assert listed["version"]
        assert listed["sources"]
        assert all(listed["fields"].values())


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_server"])
def test_an_option_works_or_says_what_to_use(serve: Command, engine: str) -> None:
    ours = spellings(serve)
    for name, argv in options(engine):
        if name in ("--help", "-h"):
            continue
        if name in ours:
            assert name.lstrip("-") in SAME.split(), f"does {name} mean the same?"
            continue
        with pytest.raises(ConfigError, match=r"^no such option: -.*; .{10}"):
            parsed(serve, ["demo", *argv])


def test_a_launchers_option_works_or_says_what_to_use(serve: Command) -> None:
    ours = spellings(serve)
    for name, argv in options("tgi"):
        option = TGI_OPTIONS[SHORT["TGI"].get(name, name[2:].replace("-", "_"))]
        refused = option.field is None and not option.harmless and argv[-1] not in option.asks
        if refused and name not in ("--json-output", "--max-concurrent-requests"):
            with pytest.raises(ConfigError, match=re.escape(spelled(option.instead, as_flag))):
                read(argv, {})
            continue
        request = read(argv, {})
        if argv[-1] in option.asks:
            continue
        assert request.unused or request.concurrent or request.argv[0] in ours, name


def test_no_name_has_two_sentences() -> None:
    names = [name for table in TABLES.values() for name in table]
    assert len(names) == len(set(names))
    for engine, table in SHORT.items():
        for short, name in table.items():
            assert instead_of(name) or as_flag(name)[2:] in SAME.split(), (engine, short)


def test_what_freight_has_by_now_is_not_said_to_be_missing(serve: Command) -> None:
    ours = {name.removeprefix("--").replace("-", "_") for name in spellings(serve)}
    bodies = {*ChatRequest.model_fields, *ChatRequest.unread} & {
        *CompletionRequest.model_fields,
        *CompletionRequest.unread,
    }
    assert not bodies & set(BODIES)
    keywords = {"model_id", "num_shard", "tp", "tp_size"}  # LLM refuses them with these sentences
    for table in TABLES.values():
        assert ours.intersection(table) <= keywords


@pytest.mark.parametrize(("given", "field", "value"), FORMS)
def test_a_value_in_another_engines_form(
    serve: Command, given: str, field: str, value: object
) -> None:
    values = parsed(serve, ["demo", *given.split()])
    assert values["model"] == "demo"
    assert values[field] == value


def test_a_list_of_names_needs_the_model_before_it(serve: Command) -> None:
    values = parsed(serve, ["--served-model-name", "a", "demo"])
    assert (values["model"], values["served_model_name"]) == ("demo", ["a"])
    argv = ["--model", "demo", "--served-model-name", "a", "b"]
    assert parsed(serve, argv)["served_model_name"] == ["a", "b"]
    batch = get_command(app).commands["batch"]  # type: ignore[attr-defined]
    argv = ["demo", "--served-model-name", "a", "in.jsonl", "out.jsonl"]
    assert parsed(batch, argv)["served_model_name"] == ["a"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--ctx-size 8192", ["--ctx-size", "use --max-model-len"]),
        ("-c 8192", ["--ctx-size", "use --max-model-len"]),
        ("-c8192", ["--ctx-size", "use --max-model-len"]),
        ("-ngl 99", ["--n-gpu-layers", "--device"]),
        ("-hf OWNER/NAME", ["--hf-repo", "OWNER/NAME:FILE.gguf"]),  # not -h
        ("-np 4", ["--parallel", "use --max-num-seqs"]),
        ("-O3", ["--optimization-level", "captured and replayed"]),
        ("-q fp8", ["-q", "write --quantization"]),
        ("-n 2", ["vLLM's is --nnodes: write --nnodes", "llama-server's is --n-predict"]),
        ("--n_gpu_layers=99", ["--n-gpu-layers", "--device"]),
        ("--speculative-config.method ngram", ["one JSON that has method"]),
        (
            "-md small.gguf",
            [
                "--model-draft",
                '--speculative-config=\'{"method": "draft_model", "model": "FOLDER"}\'',
            ],
        ),
        ("--speculative-algorithm EAGLE3", ['\'{"method": "eagle3", "model": "FOLDER"}\'']),
        ("--compilation-config.mode 3", ["captured and replayed"]),
        ("--no-enable-chunked-prefill", ["always split into chunks"]),
        ("--no-enable-lora", ["off without --enable-lora"]),
        ("--no-enable-fault-tolerance", ["nothing to turn off"]),
        ("--fim-qwen-1.5b-default", ["OWNER/NAME"]),
        ("--dp-size 2", ["one engine", "router"]),
        ("--log-level info", ["--log-format"]),
    ],
)
def test_what_is_said(freight: Callable[..., Any], given: str, says: list[str]) -> None:
    answer = freight("serve", "demo", *given.split())
    assert (answer.code, answer.out) == (2, "")
    assert_names(answer.err, "no such option: ", *says)


def test_letters_that_are_a_value_are_no_option(serve: Command) -> None:
    argv = ["demo", "--served-model-name", "-ngl", "--", "-hf"]
    with pytest.raises(Exception, match="extra argument"):
        parsed(serve, argv)
    assert parsed(serve, argv[:3])["served_model_name"] == ["-ngl"]


def test_an_option_of_ours_keeps_its_letter(freight: Callable[..., Any]) -> None:
    generate = get_command(app).commands["generate"]  # type: ignore[attr-defined]
    for argv in (["-n", "3"], ["-n3"]):
        assert parsed(generate, ["demo", *argv])["n"] == 3
    answer = freight("generate", "demo", "-np", "4")
    assert_names(answer.err, "--parallel", "use --max-num-seqs")


# --- values


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_format_of_the_cache_works_or_says_what_to_use(engine: str) -> None:
    for name in ENGINES[engine]["values"]["kv_cache_dtype"]:
        if name in KV_DTYPE_NAMES:
            check(EngineArgs(kv_cache_dtype=name, device="cpu"))
            continue
        with refuses(ConfigError, f"--kv-cache-dtype '{name}'", OTHER_KV_CACHES[name]):
            check(EngineArgs(kv_cache_dtype=name))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_quantization_works_or_says_what_to_use(engine: str) -> None:
    for name in ENGINES[engine]["values"]["quantization"]:
        if name in QUANTIZATIONS:
            continue
        with refuses(ConfigError, f"--quantization '{name}'", OTHER_QUANTIZATIONS[name]):
            check(EngineArgs(quantization=name))


# --- fields of requests


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_a_field_of_a_body_works_or_says_what_to_use(
    engine: str, model: type[ChatRequest | CompletionRequest]
) -> None:
    known = {*model.model_fields, *model.unread, *model.others}
    for source, names in ENGINES[engine]["fields"].items():
        assert set(names) <= known, source


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_server", "tgi"])
def test_a_sampling_parameter_works_or_says_what_to_use(engine: str) -> None:
    sources = {"vllm": "SamplingParams", "sglang": "SamplingParams", "tgi": "GenerateParameters"}
    for name in ENGINES[engine]["fields"].get(sources.get(engine, ""), ()):
        if name in SamplingParams.__dataclass_fields__ or name in BODIES:
            continue
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{name: 1})
        said = str(refused.value)
        assert SAMPLING.get(name, "") in said or "did you mean" in said
        assert re.search(r"(: |\(did you mean )", said), said


def test_no_field_of_ours_is_said_to_be_missing() -> None:
    assert not set(SAMPLING) & set(SamplingParams.__dataclass_fields__)
    assert not set(SAMPLING) & set(BODIES)
    assert not set(SAMPLING) & {*ChatRequest.model_fields, *CompletionRequest.model_fields}
