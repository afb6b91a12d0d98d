"""freight plan: what it prints, what it fetches, and that it answers without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.refusals import assert_names, line_naming, refuses
from tests.unit.cli.conftest import Answer
from tests.unit.evaluate.published import GEMMA_3_27B, LLAMA_3_1_8B

from freight.checkpoint.config_only import read_config_only
from freight.errors import CheckpointError, ConfigError
from freight.lab.capacity import size
from freight.model.config.presets import PRESETS

Run = Callable[..., Answer]
# of Llama 3.1 8B, 32 layers: inputs and outputs of q, o, k, v, gate, up and down
LORA_CHANNELS = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
WISH = ("--memory", "24GiB", "--context", "8192", "--concurrency", "16", "--device", "cuda")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    return str(tmp_path)


def test_a_table_with_bars_and_one_sentence(freight: Run, llama: str) -> None:
    answer = freight("plan", llama, *WISH)
    assert (answer.code, answer.err) == (0, "")
    first, dtype, heading, *rows, basis, verdict = answer.out.splitlines()
    assert_names(first, "cuda", "24.0 GiB", "8,192 tokens")
    assert dtype == "dtype: bfloat16, from config.json"
    assert heading.split() == ["weights", "KV", "cache", "tokens", "requests"]
    assert len(rows) == 8
    assert [row[0] for row in rows] == [" ", "*", *" " * 6]
    assert "bfloat16    15.0 GiB  fp8_e4m3fn, token    8.1 GiB  131,216        16" in rows[1]
    bars = [row.count("#") for row in rows]
    assert bars[5:] == [24, 24, 24]
    assert bars[0] < bars[1] < bars[4 + 1]
    assert answer.out.isascii()
    assert_names(basis, "90%", "rotary tables", "Not counted: activations, logits")
    assert_names(verdict, "Take bfloat16", "fp8_e4m3fn, token", "--kv-cache-dtype fp8")


def test_adapters_are_counted_and_named(freight: Run, llama: str) -> None:
    wish = ("--memory", "48GiB", "--context", "8192", "--device", "cpu")
    plain = json.loads(freight("plan", llama, *wish, "--json").out)["settings"][0]
    options = (*wish, "--max-loras", "8", "--max-lora-rank", "64")
    counted = json.loads(freight("plan", llama, *options, "--json").out)["settings"][0]
    assert plain["adapter_bytes"] == 0
    assert counted["adapter_bytes"] == 8 * 64 * 2 * LORA_CHANNELS
    answer = freight("plan", llama, *options)
    assert_names(answer.out, size(counted["adapter_bytes"]), "8 adapters of rank 64")
    # on a CPU, where there are any
    assert_names(answer.out, "--speculative-config", "is counted where it is named")
    verdict = answer.out.splitlines()[-1]
    assert_names(verdict, "--enable-lora --max-loras 8 --max-lora-rank 64")
    refused = freight("plan", llama, *options, "--max-loras", "1024")
    assert refused.code == 1
    assert_names(refused.err, "adapters need", "--max-loras", "--max-lora-rank", "at least")


def test_what_drafts_is_counted_and_named(freight: Run) -> None:
    config = '{"method": "draft_model", "model": "demo"}'
    wish = ("demo", "--memory", "64MiB", "--context", "128", "--device", "cpu")
    options = (*wish, "--speculative-config", config)
    made = json.loads(freight("plan", *options, "--json").out)
    assert made["head"] == {"method": "draft_model", "model": "demo", "layers": 6}
    for setting in made["settings"]:
        parts = ("weight_bytes", "embedding_bytes", "rotary_table_bytes")
        assert setting["head_bytes"] == sum(setting[part] for part in parts)
        assert 2 * setting["head_bytes_per_token"] >= setting["bytes_per_token"]
    answer = freight("plan", *options)
    assert_names(answer.out, "What drafts is counted, the second model demo: 13.1 MiB", "3,072 of")
    assert f"--speculative-config '{config}'" in answer.out.splitlines()[-1]
    without = json.loads(freight("plan", *wish, "--json").out)
    assert "head" not in without
    assert without["settings"][0]["head_bytes"] == 0
    none = freight("plan", *wish, "--speculate", "auto")
    assert_names(none.out, "No head drafts", "--speculate auto")
    small = freight("plan", "demo", "--memory", "8MiB", "--device", "cpu", *options[-2:])
    assert small.code == 1
    assert_names(small.err, "the head has", "omit --speculative-config")
    refused = freight("plan", *wish, "--speculative-config", '{"method": "mtp"}')
    assert_names(refused.err, "demo has no layers that predict further tokens")


def test_ranks_are_planned_without_torch(freight: Run, llama: str) -> None:
    options = ("--memory", "48GiB", "--context", "8192", "--device", "cpu", "-tp", "2")
    answer = freight("plan", llama, *options)
    assert (answer.code, answer.err) == (0, "")
    first, ranks, *rows, verdict = answer.out.splitlines()
    assert_names(first, "cpu", "48.0 GiB", "8,192 tokens")
    assert_names(ranks, "2 ranks", "24.0 GiB", "each rank")
    assert any("bfloat16    7.5 GiB  bfloat16 " in row for row in rows)  # half of 15.0
    assert "--tensor-parallel-size 2" in verdict
    # a store has the heads of all ranks: 128 KiB of Llama 3.1 8B a token, and 8 bytes of its id
    assert "A GiB of --kv-store holds 8,1" in answer.out
    refused = freight("plan", llama, *options[:-1], "3")
    assert_names(refused.err, "32 attention heads of layer 0", "1, 2, 4")


def test_stages_are_planned_without_torch(freight: Run) -> None:
    options = ("--memory", "160GiB", "--context", "8192", "--device", "cuda", "-pp", "2")
    answer = freight("plan", "llama-70b", *options)
    assert (answer.code, answer.err) == (0, "")
    line_naming(answer.out, "2 devices", "80.0 GiB")
    for device in ("cuda:0", "cuda:1"):
        line_naming(answer.out, device, "40 layers", "weights 65.7 GiB", "up to 12.9 GiB")
    assert_names(answer.out.splitlines()[-1], "Take bfloat16", "--pipeline-parallel-size 2")
    made = json.loads(freight("plan", "llama-70b", *options, "--json").out)
    assert made["stages"] == 2
    setting = made["settings"][made["choice"]]
    assert [part["layers"] for part in setting["devices"]] == [40, 40]
    assert sum(part["kv_cache_bytes"] for part in setting["devices"]) == setting["kv_cache_bytes"]
    alone = json.loads(
        freight("plan", "llama-70b", "--memory", "80GiB", *options[2:6], "--json").out
    )
    assert (alone["settings"][0]["capacity_tokens"], alone["choice"]) == (0, 4)
    assert "devices" not in alone["settings"][0]


def test_layers_of_stages_are_taken_and_named(freight: Run) -> None:
    options = (
        "--memory",
        "160GiB",
        "--context",
        "8192",
        "--device",
        "cuda",
        "-tp",
        "2",
        "-pp",
        "2",
    )
    answer = freight("plan", "llama-70b", *options, "--pp-layers", "60,20")
    line_naming(answer.out, "2 ranks", "2 devices", "40.0 GiB")
    line_naming(answer.out, "cuda:0", "60 layers")
    assert_names(answer.out.splitlines()[-1], "--tensor-parallel-size 2", "--pp-layers 60,20")
    on_cpu = freight("plan", "llama-70b", *options[:4], "--device", "cpu", "-pp", "2")
    line_naming(on_cpu.out, "CPU", "stages", "gain nothing")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("-pp", "0"), "--pipeline-parallel-size 0 must be an integer from 1"),
        (("-pp", "33"), "use up to 32"),
        (("-pp", "2", "--pp-layers", "16,15"), "31 layers, and the model has 32"),
        (("-pp", "2", "--pp-layers", "32"), "as in 20,20"),
        (("--pp-layers", "16,16"), "add --pipeline-parallel-size"),
    ],
)
def test_stages_that_cannot_be_had_are_refused(
    freight: Run, llama: str, argv: tuple[str, ...], says: str
) -> None:
    answer = freight("plan", llama, "--memory", "80GiB", "--device", "cuda", *argv)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_the_documented_example_is_what_is_printed(freight: Run) -> None:
    documented = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    command, _, shown = (
        documented.partition("$ freight plan ")[2].partition("```")[0].partition("\n")
    )
    assert freight("plan", *command.split()).out == shown


def test_a_model_of_transformers_modules_is_counted_and_named(freight: Run, tmp_path: Path) -> None:
    """Pythia 410M's published config.json: 405 million parameters, 24 layers of 2 x 1,024 numbers a
    token.
    """
    content = {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    answer = freight("plan", str(tmp_path), "--memory", "4GiB", "--device", "cuda", "--json")
    made = json.loads(answer.out)
    assert made["runs"] == "through transformers"
    plain = made["settings"][0]
    assert plain["weight_dtype"] == "float16"
    assert plain["weight_bytes"] + plain["embedding_bytes"] == 2 * 405_334_016
    assert plain["bytes_per_token"] == 24 * 2 * 1024 * 2
    assert (
        "transformers' modules"
        in freight("plan", str(tmp_path), "--memory", "4GiB", "--device", "cuda").out
    )


def test_a_terminal_has_blocks_for_bars(
    freight: Run, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for columns, length in (("120", 24), ("80", 12), ("40", 4)):
        monkeypatch.setenv("COLUMNS", columns)
        answer = freight("plan", llama, *WISH)
        assert max(line.count("█") for line in answer.out.splitlines()) == length
        assert "#" not in answer.out


GPT_OSS_20B = Path(__file__).parents[2] / "fixtures" / "published" / "openai--gpt-oss-20b.json"


def test_a_published_config_without_a_dtype_is_planned_in_16_bits(freight: Run) -> None:
    wish = (str(GPT_OSS_20B), "--memory", "24GiB", "--device", "cuda")
    _, dtype, _, first, *_ = freight("plan", *wish).out.splitlines()
    assert_names(dtype, "dtype: bfloat16, assumed", "config.json")
    assert (
        "21.2 GiB  bfloat16            2.5 GiB  100,944" in first
    )  # in float32 the weights alone take 24.6 GiB
    plan = json.loads(freight("plan", *wish, "--dtype", "half", "--json").out)
    assert (plan["dtype"], plan["dtype_source"]) == ("float16", "--dtype")
    assert (
        freight("plan", *wish, "--dtype", "half").out.splitlines()[1]
        == "dtype: float16, from --dtype"
    )


def test_the_tensors_beside_a_config_without_a_dtype_say_it(freight: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(GPT_OSS_20B.read_text())
    save_file(
        {"model.norm.weight": torch.zeros(2880, dtype=torch.float16)},
        tmp_path / "model.safetensors",
    )
    for model in (tmp_path, tmp_path / "config.json"):
        said = freight("plan", str(model), "--memory", "24GiB", "--device", "cpu").out
        assert_names(line_naming(said, "dtype: float16"), "tensors", "no config")


def test_json_has_every_setting_and_the_choice(freight: Run, llama: str) -> None:
    plan = json.loads(freight("plan", llama, *WISH, "--json").out)
    assert plan["model"] == llama
    assert (plan["dtype"], plan["dtype_source"]) == ("bfloat16", "config.json")
    assert (plan["device"], plan["memory"], plan["context"], plan["concurrency"]) == (
        "cuda",
        24 * 2**30,
        8192,
        16,
    )
    chosen = plan["settings"][plan["choice"]]
    assert chosen["options"] == ["--kv-cache-dtype", "fp8", "--kv-scales", "dynamic"]
    assert chosen["groups"] == [
        {"layers": 32, "window": None, "bytes_per_block": 16 * 66560, "blocks": 8201}
    ]
    assert (chosen["capacity_tokens"], chosen["requests"], chosen["bytes_per_token"]) == (
        131216,
        16,
        66560,
    )
    parts = (
        "weight_bytes",
        "embedding_bytes",
        "rotary_table_bytes",
        "kv_cache_bytes",
        "rest_bytes",
    )
    for setting in plan["settings"]:
        assert sum(setting[part] for part in parts) == plan["memory"]
    assert plan["verdict"].startswith("Take bfloat16 weights")


def test_groups_of_windows_are_listed(freight: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_27B))
    answer = freight(
        "plan", str(tmp_path / "config.json"), "--memory", "80GiB", "--device", "cpu", "--json"
    )
    groups = json.loads(answer.out)["settings"][0]["groups"]
    assert [(group["layers"], group["window"]) for group in groups] == [(52, 1024), (10, None)]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("--memory", "24"), 2, "write 24GiB"),
        (("--memory", "4GiB"), 1, "the weights alone need"),
        (("--memory", "24GiB", "--context", "200000"), 2, "use at most 131072"),
        (("--memory", "24GiB", "--concurrency", "0"), 2, "--concurrency 0 must be"),
        (("--memory", "24GiB", "--device", "gpu"), 2, "--device 'gpu' is unknown"),
        ((), 2, "--memory"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(
    freight: Run, llama: str, argv: tuple[str, ...], code: int, says: str
) -> None:
    answer = freight("plan", llama, *argv)
    assert answer.code == code
    assert says in answer.err
    assert answer.out == ""


def test_it_answers_without_torch(llama: str) -> None:
    code = (
        "import sys; from freight.cli.main import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    argv = [sys.executable, "-c", code, "plan", llama, *WISH[:-1], "cpu", "-tp", "2"]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    line_naming(answer.stdout, "Take int4", "fp8_e4m3fn")  # the only ones so small


def hub(monkeypatch: pytest.MonkeyPatch, fetch: Callable[..., str]) -> None:
    module: Any = ModuleType("huggingface_hub")
    module.snapshot_download = fetch  # which gives up at once without a network
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_of_a_hub_model_config_json_alone_is_fetched(
    freight: Run, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str], str | None]] = []

    def fetch(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns, revision))
        return str(tmp_path)

    hub(monkeypatch, fetch)
    answer = freight("plan", "meta-llama/Llama-3.1-8B", *WISH, "--revision", "main")
    assert answer.code == 0
    assert asked == [("meta-llama/Llama-3.1-8B", ["config.json"], "main")]


def test_what_cannot_be_fetched_names_the_nearest_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise OSError("no network")

    hub(monkeypatch, fetch)
    with refuses(CheckpointError, "'lama-8b'", "did you mean llama-8b", "OSError: no network"):
        read_config_only("lama-8b")


def test_presets_and_the_shipped_model_need_no_file() -> None:
    assert read_config_only("llama-70b") == (PRESETS["llama-70b"], None)
    assert read_config_only("demo")[0]["model_type"] == "llama"
    for name in ("demo", "llama-70b"):
        with refuses(ConfigError, "revisions"):
            read_config_only(name, "main")


@pytest.mark.parametrize(
    ("content", "says"), [("[1]", "holds list"), ("{", "is not JSON"), (None, "cannot be read")]
)
def test_a_config_that_is_none_is_refused(content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        read_config_only(str(tmp_path))


def test_what_modelopt_declares_beside_is_read() -> None:
    folder = Path(__file__).parents[2] / "fixtures" / "modelopt_blocks"
    config, beside = read_config_only(str(folder))
    assert config["model_type"] == "llama"
    assert beside is not None


@pytest.mark.parametrize(
    ("count", "said_of_it"),
    [
        (0, "0.0 KiB"),
        (42_720, "41.7 KiB"),
        (2**20, "1.0 MiB"),
        (2**30 - 1, "1,024.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
    ],
)
def test_no_size_that_is_more_than_nothing_is_said_to_be_nothing(
    count: int, said_of_it: str
) -> None:
    assert size(count) == said_of_it


@pytest.mark.parametrize(
    ("asked", "said_of_it"),
    [
        (
            "auto",
            "87.0 MiB for each request in bfloat16, 51.5 MiB in int8 beside 8-bit caches (in float32 159.0 MiB)",
        ),
        ("int8", "51.5 MiB for each request in int8 (in float32 159.0 MiB)"),
        ("float32", "159.0 MiB for each request in float32"),
    ],
)
def test_states_by_format(freight: Run, asked: str, said_of_it: str) -> None:
    """Of Qwen3.5-27B: 48 layers with 48 heads of 128 x 128 and 16 of keys; the convolution sees
    10,240 channels.
    """
    published = Path(__file__).parents[2] / "fixtures/published/Qwen--Qwen3.5-27B.json"
    memory = ("--memory", "80GiB", "--context", "8192", "--device", "cuda")
    printed = freight("plan", str(published), *memory, "--state-dtype", asked).out
    line_naming(printed, "states", said_of_it, "as much again")
    assert (f"--state-dtype {asked}" in printed.splitlines()[-1]) is (asked != "auto")
