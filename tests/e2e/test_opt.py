"""OPT from end to end: from the pickled file that its authors published to text, FP8 weights and
every FP8 cache.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from tests.refusals import assert_names

import freight
from freight import LLM, ConfigError, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.cli.main import main

IDS = tokens(100)
DATA: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes it, with the tokenizer of the demo model."""
    folder, demo, small = (
        tmp_path_factory.mktemp("opt") / "model",
        resolve_model("demo"),
        VARIANTS["opt"],
    )
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = type(small)(**small.to_dict() | {"vocab_size": vocab_size})
    save_random(config, folder, torch.float32)
    for file in demo.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def freight_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs `freight ARGV`; its standard output."""

    def command(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["freight", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    return command


def test_the_first_file_of_opt_is_converted_and_completes_a_prompt(
    model: Path, tmp_path: Path, freight_command: Callable[..., str]
):
    """Facebook's own files have a version beside the tensors, the head as the embedding, and
    shorter names.
    """
    folder, out, quantized = (tmp_path / name for name in ("opt", "out", "quantized"))
    shutil.copytree(model, folder)
    stored = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    tensors["decoder.version"] = torch.tensor([3.0])
    tensors["lm_head.weight"] = tensors["decoder.embed_tokens.weight"]
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")

    said = freight_command("convert", str(folder), str(out))
    assert_names(said, "lm_head.weight", "decoder.embed_tokens.weight")
    options = ("--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--json")
    sizes = ("--kv-cache-memory", "8MiB", "--max-model-len", "128")
    said = freight_command("generate", str(out), "--prompt", "def main(", *options, *sizes)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    llm = LLM(str(model), kv_cache_memory="8MiB", max_model_len=128)
    expected = llm.generate("def main(", params)[0].outputs[0].text
    assert json.loads(said)["outputs"][0]["text"] == expected
    freight.quantize(out, quantized, weights="fp8")  # under these names, too
    assert "decoder.layers.0.fc1.weight_scale" in load_file(quantized / "model.safetensors")


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    centered = (x - x.mean(1, keepdim=True) for x in (one, other))
    return bool(torch.cosine_similarity(*centered, dim=1).min() > 0.98)


def test_fp8_weights_and_caches_of_every_granularity(model: Path, tmp_path: Path):
    exact = freight_logits(model, IDS, "float32")
    for options in (
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "kv_scales": "unit"},
        {"kv_cache_dtype": "int8"},
    ):
        logits = freight_logits(model, IDS, "float32", **options)
        assert near(logits, exact)
        assert not torch.equal(logits, exact)
    for granularity in ("tensor", "head", "channel"):
        out = tmp_path / granularity
        freight.quantize(model, out, **DATA, kv_granularity=granularity)
        assert near(freight_logits(out, IDS, "float32", kv_cache_dtype="fp8"), exact)


def test_centers_are_for_keys_that_are_rotated(model: Path, tmp_path: Path):
    """Without rotation a mean of keys adds the same to all scores of a query."""
    with pytest.raises(ConfigError, match="--center gains nothing"):
        freight.quantize(model, tmp_path / "out", center=True, **DATA)


def test_fp8_weights_are_evaluated(
    model: Path, tmp_path: Path, freight_command: Callable[..., str]
):
    """Stored in FP8, rounded at load, and as schemes of --weights."""
    out, file = str(tmp_path / "out"), tmp_path / "text"
    file.write_text("def main():\n    return 1\n")
    freight_command("quantize", str(model), out)

    def evaluated(*argv: str) -> Any:
        options = ("--data", str(file), "--no-speed", "--json", "--caches", "token")
        return json.loads(freight_command("evaluate", "caches", *argv, *options))

    for argv in ((out,), (str(model), "--quantization", "fp8")):
        said = evaluated(*argv)
        assert said["weights"]["dtype"] == "fp8_e4m3fn"
        assert [run["kv_cache_dtype"] for run in said["runs"]] == ["float32", "fp8_e4m3fn"]
        assert all(0 < run["perplexity"] < 1e6 for run in said["runs"])
    said = evaluated(str(model), "--weights", "fp8,fp8-channel,fp8-block")
    assert len(said["runs"]) == 2 + 2 * 3
    assert all(run["kl_mean"] > 0 for run in said["runs"][1:])
