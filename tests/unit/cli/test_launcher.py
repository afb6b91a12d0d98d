"""`freight --model-id MODEL …`, TGI's launcher, and `freight run`, Aphrodite's verb: both are
`freight serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.refusals import assert_names

from freight.adapters.tgi_launcher import read
from freight.base.other_engines.tgi import TGI_OPTIONS
from freight.settings.lora import NamedAdapter, named_adapters

Run = Callable[..., Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Each server that was asked for, as its options by name; nothing is started, and no variable
    of TGI is set.
    """
    asked: list[dict[str, Any]] = []

    def run(settings: Any, options: Any) -> int:
        asked.append(vars(settings) | options.engine_args)
        return 0

    monkeypatch.setattr("freight.serve.lifecycle.run", run)
    for name in TGI_OPTIONS:
        monkeypatch.delenv(name.upper(), raising=False)
    return asked


def test_its_documented_command(freight: Run, served: list[dict[str, Any]]) -> None:
    assert freight("--model-id", "demo", "--kv-cache-dtype", "fp8_e5m2").code == 0
    assert freight("serve", "demo", "--kv-cache-dtype", "fp8_e5m2").code == 0
    launched, plain = served
    assert launched == plain
    assert (launched["model"], launched["kv_cache_dtype"]) == ("demo", "fp8_e5m2")


def test_aphrodites_documented_command(
    freight: Run, served: list[dict[str, Any]], tmp_path: Any
) -> None:
    scales = tmp_path / "kv_cache_scales.json"
    scales.write_text("{}")
    argv = ["demo", "--kv-cache-dtype", "fp8", "--quantization-param-path", str(scales)]
    assert freight("run", *argv).code == 0
    assert freight("serve", *argv).code == 0
    assert served[0] == served[1]


@pytest.mark.parametrize("form", [("run", "demo"), ("serve", "demo"), ("--model-id", "demo")])
def test_without_the_servers_packages_one_line_says_what_to_install(
    freight: Run, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys.modules["freight.cli.serve"], "find_spec", lambda name: None)
    answer = freight(*form)
    assert answer.code == 2
    assert "pip install '.[server]'" in answer.err
    assert answer.err.count("\n") == 1


FLAGS = {  # TGI's -> ours
    "--quantize fp8": {"quantization": "fp8"},
    "--quantize compressed-tensors": {},
    "--max-total-tokens 512": {"max_model_len": 512},
    "--max-total-tokens=512": {"max_model_len": 512},
    "--max-batch-prefill-tokens 256": {"max_num_batched_tokens": 256},
    "--max-batch-size 3": {"max_num_seqs": 3},
    "--max-concurrent-requests 100": {"max_num_seqs": 64, "max_queue": 36},
    "--max-concurrent-requests 8": {"max_num_seqs": 8, "max_queue": 0},
    "--max-concurrent-requests 8 --max-batch-size 2": {"max_num_seqs": 2, "max_queue": 6},
    "--num-shard 1": {},
    "--sharded false": {},
    "--hostname 127.0.0.2 -p 81": {"host": "127.0.0.2", "port": 81},
    "--port 82 --revision v2 --dtype float16": {"port": 82, "revision": "v2", "dtype": "float16"},
    "--json-output": {"log_format": "json"},
    "--cors-allow-origin http://a.example": {"allow_origins": ("http://a.example",)},
    "--kv_cache_dtype fp8": {"kv_cache_dtype": "fp8"},
    "--max-queue 5": {"max_queue": 5},
}


@pytest.mark.parametrize("line", FLAGS)
def test_a_flag_of_tgi_has_its_counterpart(
    freight: Run, served: list[dict[str, Any]], line: str
) -> None:
    answer = freight("--model-id", "demo", *line.split())
    assert (answer.code, answer.err) == (0, "")
    freight("serve", "demo")
    assert served[0] == served[1] | FLAGS[line]


VARIABLES = {
    "KV_CACHE_DTYPE": ("fp8_e5m2", {"kv_cache_dtype": "fp8_e5m2"}),
    "PORT": ("81", {"port": 81}),
    "REVISION": ("v2", {"revision": "v2"}),
    "QUANTIZE": ("fp8", {"quantization": "fp8"}),
    "DTYPE": ("float16", {"dtype": "float16"}),
    "MAX_TOTAL_TOKENS": ("512", {"max_model_len": 512}),
    "MAX_BATCH_PREFILL_TOKENS": ("256", {"max_num_batched_tokens": 256}),
    "MAX_CONCURRENT_REQUESTS": ("100", {"max_num_seqs": 64, "max_queue": 36}),
    "CORS_ALLOW_ORIGIN": ("http://a,http://b", {"allow_origins": ("http://a", "http://b")}),
    "JSON_OUTPUT": ("true", {"log_format": "json"}),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_of_tgi_acts_in_this_form_only_and_is_said(
    freight: Run, served: list[dict[str, Any]], name: str
) -> None:
    value, ours = VARIABLES[name]
    answer = freight("--model-id", "demo", **{name: value})
    assert answer.code == 0
    assert answer.err == f"freight: from TGI's variables: {name}={value}\n"
    quiet = freight("serve", "demo", **{name: value})
    assert (quiet.code, quiet.err) == (0, "")
    assert served[0] == served[1] | ours
    assert served[0] != served[1]


def test_the_model_may_be_a_variable_too(freight: Run, served: list[dict[str, Any]]) -> None:
    answer = freight("--port", "81", MODEL_ID="some/model")
    (line,) = answer.err.splitlines()
    assert answer.code == 0
    assert_names(line, "TGI's variables", "MODEL_ID=some/model")
    assert "not used" not in line
    assert (served[0]["model"], served[0]["port"]) == ("some/model", 81)


def test_a_key_is_taken_and_never_printed(freight: Run, served: list[dict[str, Any]]) -> None:
    answer = freight("--model-id", "demo", API_KEY="secret")
    assert served[0]["api_keys"] == ("secret",)
    assert answer.err == "freight: from TGI's variables: API_KEY\n"


def test_flags_rank_above_our_variables_and_those_above_tgis(
    freight: Run, served: list[dict[str, Any]]
) -> None:
    variables = {"KV_CACHE_DTYPE": "fp8_e5m2", "PORT": "81", "MODEL_ID": "c"}
    ours = {"FREIGHT_KV_CACHE_DTYPE": "fp8", "FREIGHT_MODEL_ID": "b"}
    answer = freight("--model-id", "a", **variables, **ours)
    assert answer.err == "freight: from TGI's variables: PORT=81\n"
    assert (served[0]["model"], served[0]["kv_cache_dtype"], served[0]["port"]) == ("a", "fp8", 81)
    assert freight("--port", "82", **variables, **ours).err == ""
    assert (served[1]["model"], served[1]["port"]) == ("b", 82)
    assert (
        freight("--model-id", "a", FREIGHT_MAX_QUEUE="7", MAX_CONCURRENT_REQUESTS="100").err == ""
    )
    assert served[2]["max_queue"] == 7
    freight("--model-id", "a", "--max-concurrent-requests", "100", FREIGHT_MAX_QUEUE="7")
    assert served[3]["max_queue"] == 36


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        ("--num-shard 2", {}),
        ("-tp 2", {}),
        ("--tp-size 2", {}),
        ("--tensor-parallel-size 2", {}),
        ("", {"NUM_SHARD": "2"}),
        ("", {"FREIGHT_TENSOR_PARALLEL_SIZE": "2"}),
    ],
)
def test_ranks_have_the_names_that_people_know(
    freight: Run, served: list[dict[str, Any]], argv: str, environ: dict[str, str]
) -> None:
    assert freight("--model-id", "demo", *argv.split(), **environ).code == 0
    assert served[0]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (("--lora-adapters", "owner/first,sql=./a=b"), {}),
        ((), {"LORA_ADAPTERS": "owner/first, sql=./a=b"}),
    ],
)
def test_adapters_have_tgis_form(
    freight: Run, served: list[dict[str, Any]], argv: tuple[str, ...], environ: dict[str, str]
) -> None:
    assert freight("--model-id", "demo", *argv, **environ).code == 0
    assert served[0]["enable_lora"]
    assert named_adapters(served[0]["lora_modules"]) == [
        NamedAdapter("owner/first", "owner/first"),
        NamedAdapter("sql", "./a=b"),
    ]


def test_adapters_have_vllms_form(freight: Run, served: list[dict[str, Any]]) -> None:
    form = '{"name": "c", "path": "x"}'
    for argv in (
        ("--lora-modules", "a=./a", "org=b/c", form, "--enable-lora"),
        ("--enable-lora", "--lora_modules", "a=./a", "--lora-modules", "org=b/c", form),
    ):
        assert freight("serve", "demo", *argv).code == 0
        assert freight("serve", *argv, "demo" if argv[-1] == "--enable-lora" else "./a=b").code == 0
    for asked in served:
        assert asked["lora_modules"] == ("a=./a", "org=b/c", form)
    assert [asked["model"] for asked in served] == ["demo", "demo", "demo", "./a=b"]


def test_hostname_and_empty_variables_are_not_read(
    freight: Run, served: list[dict[str, Any]]
) -> None:
    answer = freight("--model-id", "demo", HOSTNAME="3f2a", PORT="", NUM_SHARD="1", SHARDED="False")
    assert (answer.code, answer.err, served[0]["host"]) == (0, "", "127.0.0.1")


def test_what_is_ignored_without_harm_is_named_once_with_the_reason(
    freight: Run, served: list[dict[str, Any]]
) -> None:
    answer = freight(
        "--model-id", "demo", "--waiting-served-ratio", "1.2", MAX_INPUT_TOKENS="100", PORT="81"
    )
    assert answer.code == 0
    used, unused = answer.err.split("; not used: ")
    assert_names(used, "TGI's variables", "PORT=81")
    assert_names(unused, "--waiting-served-ratio", "MAX_INPUT_TOKENS", "--max-model-len")
    assert len(served) == 1


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        ("--sharded true", {}, "--sharded true: a model runs on one device"),
        ("", {"NUM_SHARD": "two"}, "NUM_SHARD 'two' must be an integer"),
        ("", {"CUDA_MEMORY_FRACTION": "0.5"}, "--kv-cache-memory='4GiB'"),
        ("--lora-adapters a/b@v2", {}, "an adapter's revision cannot be chosen"),
        ("--quantize awq", {}, "'awq': a checkpoint declares its own scheme"),
        ("--max-concurrent-requests 0", {}, "--max-concurrent-requests '0' must be an integer"),
        ("--max-concurrent-requests 9 --max-queue 3", {}, "give one of the two"),
        ("--max-total-tokens", {}, "--max-total-tokens needs a value"),
        ("--pipeline-parallel-size 0", {}, "--pipeline-parallel-size 0 must be an integer"),
        ("--pp-layers 3,3", {}, "add --pipeline-parallel-size"),
        ("--nonsense", {}, "--nonsense"),
        ("generate", {}, "a verb comes first"),
        ("", {"PORT": "many"}, "PORT 'many' must be an integer"),
    ],
)
def test_what_cannot_be_done_is_refused(
    freight: Run, served: list[dict[str, Any]], argv: str, environ: dict[str, str], says: str
) -> None:
    answer = freight("--model-id", "demo", *argv.split(), **environ)
    assert answer.code == 2
    assert says in answer.err
    assert not served


def test_a_server_needs_a_model(freight: Run, served: list[dict[str, Any]]) -> None:
    answer = freight("--port", "81")
    assert answer.code == 2
    assert_names(answer.err, "error: a server", "--model-id MODEL", "freight --help")
    assert not served


def test_it_has_several_machines_as_well(freight: Run, served: list[dict[str, Any]]) -> None:
    argv = ["-tp", "2", "--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29500"]
    answer = freight("--model-id", "demo", *argv)
    assert answer.code == 0, answer.err
    assert freight("serve", "demo", *argv).code == 0
    launched, plain = served
    assert launched == plain
    assert (launched["master_addr"], launched["master_port"]) == ("10.0.0.1", 29500)


@pytest.mark.parametrize("name", TGI_OPTIONS)
def test_every_flag_and_variable_of_tgi_is_taken_ignored_with_a_reason_or_refused_with_one(
    name: str,
) -> None:
    option = TGI_OPTIONS[name]
    assert option.field or option.instead
    flag = "--" + name.replace("_", "-")
    for asked in option.asks:
        given = read([] if option.switch else [flag, asked], {name.upper(): asked})
        assert (given.argv, given.defaults, given.unused) == ([], {}, [])
    if option.harmless:
        given = read([flag, "1"] if not option.switch else [flag], {})
        assert given.argv == []
        assert given.unused


def test_help_and_version_are_of_the_command(freight: Run) -> None:
    assert "generate" in freight("--help").out
    assert freight("--version").out[0].isdigit()
    assert "--kv-cache-dtype" in freight("--model-id", "demo", "--help").out
