"""Models that pool, quantized: what sentence-transformers wrote of them is kept, and the vectors stay
close. Of encoders what needs calibration is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.pooling_models import ENCODERS, HIDDEN, save_body, save_embedder, save_encoder
from tests.refusals import refuses

import freight
from freight import LLM
from freight.errors import ConfigError
from freight.pooling import PoolingParams, PoolingTask

pytest.importorskip("sentence_transformers")
pytest.importorskip("sentence_transformers.sentence_transformer.modules")
from sentence_transformers.base import modules as base
from sentence_transformers.sentence_transformer.modules import Pooling

TEXTS = ["a", "the quick brown fox jumps over the lazy dog", "def main(): return 0"]
FILES = {"modules.json", "config_sentence_transformers.json", "1_Pooling", "2_Dense"}


def served(folder: Path, **options: Any) -> LLM:
    values = {"dtype": "float32", "kv_cache_dtype": "float32", "kv_cache_memory": "8MiB"}
    return LLM(str(folder), **{**values, "max_num_batched_tokens": 512, **options})


def vectors(folder: Path, **options: Any) -> torch.Tensor:
    outputs = served(folder, **options).embed(TEXTS)
    return torch.tensor([output.outputs.embedding for output in outputs])


def assert_close(found: torch.Tensor, expected: torch.Tensor, least: float) -> None:
    """Cosines of at least `least`, and not the same numbers."""
    cosines = torch.nn.functional.cosine_similarity(found, expected)
    assert cosines.min() >= least, cosines
    assert not torch.equal(found, expected)


def save_dense(folder: Path, body: Path) -> Path:
    torch.manual_seed(6)
    modules = [Pooling(HIDDEN, "lasttoken"), base.Dense(HIDDEN, 24), base.Normalize()]
    save_embedder(folder, body, modules, prompts={"query": "q: "})
    return folder


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_a_decoder_without_a_head(weights: str, tmp_path: Path) -> None:
    model = save_dense(tmp_path / "model", save_body(tmp_path / "body", intermediate_size=64))
    out = tmp_path / "out"
    options: dict[str, Any] = {"group_size": 32} if weights == "int4" else {}
    for _ in range(2):  # the second time over the first
        freight.quantize(str(model), out, weights=weights, overwrite=True, **options)
    assert {path.name for path in out.iterdir()} >= FILES
    assert (out / "2_Dense" / "model.safetensors").read_bytes() == (
        model / "2_Dense" / "model.safetensors"
    ).read_bytes()
    assert served(out).engine.intake.pooling.prompts == {"query": "q: ", "document": ""}
    # random weights have nothing that 4 bits would spare
    assert_close(vectors(out), vectors(model), 0.95 if weights == "fp8" else 0.8)


def test_files_that_freight_did_not_write_are_not_overwritten(tmp_path: Path) -> None:
    model = save_dense(tmp_path / "model", save_body(tmp_path / "body"))
    out = tmp_path / "out"
    freight.quantize(str(model), out, weights="fp8")
    (out / "1_Pooling" / "mine.txt").write_text("x")
    with refuses(ConfigError, "1_Pooling", "did not write"):
        freight.quantize(str(model), out, weights="fp8", overwrite=True)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family: str, tmp_path: Path) -> None:
    body = save_encoder(tmp_path / "body", family)
    modules = [Pooling(HIDDEN, "mean"), base.Normalize()]
    save_embedder(tmp_path / "model", body, modules)
    freight.quantize(str(tmp_path / "model"), tmp_path / "out", weights="fp8-channel")
    assert_close(vectors(tmp_path / "out"), vectors(tmp_path / "model"), 0.98)
    for options in (
        {"weights": "fp8", "kv_cache": "fp8"},
        {"weights": "fp8", "activations": "static"},
        {"weights": "fp8", "method": "smoothquant"},
        {"weights": "int4", "method": "gptq", "group_size": 32},
    ):
        with refuses(ConfigError, "see those after them", "rounded to nearest"):
            freight.quantize(str(tmp_path / "model"), tmp_path / "no", **options)
        assert not (tmp_path / "no").exists()


HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "modernbert": ("head.dense", "classifier"),
    "qwen3": ("score",),
}


@pytest.mark.parametrize("family", HEADS)
def test_heads_that_score_are_kept(family: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    keys = {"hidden_size": 128, "intermediate_size": 256, "num_labels": 1}
    if family == "qwen3":
        save_body(tmp_path / "model", head="ForSequenceClassification", **keys)
    else:
        save_encoder(tmp_path / "model", family, auto, **keys)
    freight.quantize(str(tmp_path / "model"), tmp_path / "out", weights="fp8-channel")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for module in HEADS[family]:
        assert torch.equal(after[f"{module}.weight"], before[f"{module}.weight"])
        assert declared["ignore"].count(module) == 1
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False)
    found = []
    for folder in ("model", "out"):
        outputs = served(tmp_path / folder).classify(TEXTS, pooling_params=params)
        found.append(torch.tensor([output.outputs.probs for output in outputs]))
    assert not torch.equal(*found)
    assert (found[1] - found[0]).abs().max() < 0.25 * found[0].abs().max()


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_rounded_at_load(family: str, quantization: str, tmp_path: Path) -> None:
    """At 128 channels of small weights, where a group has enough inputs."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    body = save_encoder(tmp_path / "body", family, **sizes)
    save_embedder(tmp_path / "model", body, [Pooling(128, "mean"), base.Normalize()])
    found = vectors(tmp_path / "model", quantization=quantization)
    least = 0.9 if quantization == "int4" else 0.99
    assert_close(found, vectors(tmp_path / "model"), least)
