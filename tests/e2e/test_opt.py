"""OPT from end to end: from the pickled file that its authors published to text, FP8 weights and
every FP8 cache.
"""

from __future__ import annotations

import json
import shutil
import sys
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
SMALL: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_model_len": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes it, with the tokenizer of the demo model."""
    folder, demo = tmp_path_factory.mktemp("opt") / "model", resolve_model("demo")
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    save_random(
        type(VARIANTS["opt"])(**VARIANTS["opt"].to_dict() | {"vocab_size": vocab_size}),
        folder,
        torch.float32,
    )
    for file in demo.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def text(model: Path, **options: Any) -> str:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return LLM(str(model), **SMALL | options).generate("def main(", params)[0].outputs[0].text


def test_the_first_file_of_opt_is_converted_and_completes_a_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Facebook's own files have a version beside the tensors, the head as the embedding, and
    shorter names.
    """
    folder, out = tmp_path / "opt", tmp_path / "out"
    shutil.copytree(model, folder)
    tensors = {
        name.removeprefix("model."): one
        for name, one in load_file(folder / "model.safetensors").items()
    }
    tensors |= {
        "decoder.version": torch.tensor([3.0]),
        "lm_head.weight": tensors["decoder.embed_tokens.weight"],
    }
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")

    def command(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["freight", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    assert_names(
        command("convert", str(folder), str(out)), "lm_head.weight", "decoder.embed_tokens.weight"
    )
    options = (
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--ignore-eos",
        "--kv-cache-memory",
        "8MiB",
        "--json",
    )
    said = json.loads(
        command("generate", str(out), "--prompt", "def main(", "--max-model-len", "128", *options)
    )
    assert said["outputs"][0]["text"] == text(model)
    freight.quantize(out, tmp_path / "quantized", weights="fp8")  # under these names, too
    assert "decoder.layers.0.fc1.weight_scale" in load_file(
        tmp_path / "quantized" / "model.safetensors"
    )


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
        got = freight_logits(model, IDS, "float32", **options)
        assert near(got, exact)
        assert not torch.equal(got, exact)
    data: dict[str, Any] = {"weights": "none", "kv_cache": "fp8", "calibration_data": [IDS]}
    for granularity in ("tensor", "head", "channel"):
        freight.quantize(model, tmp_path / granularity, **data, kv_granularity=granularity)
        assert near(
            freight_logits(tmp_path / granularity, IDS, "float32", kv_cache_dtype="fp8"), exact
        )


def test_centers_are_for_keys_that_are_rotated(model: Path, tmp_path: Path):
    """Without rotation a mean of keys adds the same to all scores of a query."""
    with pytest.raises(ConfigError, match="--center gains nothing"):
        freight.quantize(
            model,
            tmp_path / "out",
            weights="none",
            kv_cache="fp8",
            center=True,
            calibration_data=[IDS],
        )


def test_fp8_weights_are_evaluated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Stored in FP8, rounded at load, and as schemes of --weights."""

    def command(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["freight", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    out, file = str(tmp_path / "out"), tmp_path / "text"
    file.write_text("def main():\n    return 1\n")
    command("quantize", str(model), out)
    options = ("--data", str(file), "--no-speed", "--json", "--caches", "token")
    for argv in ((out,), (str(model), "--quantization", "fp8")):
        said = json.loads(command("evaluate", "caches", *argv, *options))
        assert said["weights"]["dtype"] == "fp8_e4m3fn"
        assert [run["kv_cache_dtype"] for run in said["runs"]] == ["float32", "fp8_e4m3fn"]
        assert all(0 < run["perplexity"] < 1e6 for run in said["runs"])
    said = json.loads(
        command(
            "evaluate", "caches", str(model), *options, "--weights", "fp8,fp8-channel,fp8-block"
        )
    )
    assert len(said["runs"]) == 2 + 2 * 3
    assert all(run["kl_mean"] > 0 for run in said["runs"][1:])
