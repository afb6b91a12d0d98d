"""What `freight evaluate` reports beside quality: the memory of the weights, and a row for each
cache, once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import freight
from freight.checkpoint.reader import resolve_model
from freight.lab.evaluate.report import compare_caches
from freight.model.open import open_model
from freight.model.weight_bytes import WeightBytes, weight_bytes
from freight.settings.engine import EngineArgs

TEXT = "def main():\n    return 1\n"
SHARE = 0.55  # of BF16, what weights in FP8 may take


def loaded(model: str, **options: str) -> WeightBytes:
    opened = open_model(EngineArgs(model, **options))  # type: ignore[arg-type]
    return weight_bytes(opened.load(opened.resolve(opened.args)))


def test_weights_count_every_tensor_once():
    """The reference keeps the tensors of the file as they are; head and embedding of the demo are
    one.
    """
    stored = load_file(resolve_model("demo") / "model.safetensors")
    embedding = stored.pop("model.embed_tokens.weight")
    expected = WeightBytes(sum(tensor.nbytes for tensor in stored.values()), embedding.nbytes)
    assert loaded("demo", kernels="reference") == expected


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_weights_quantized_at_load_take_half(kernels: str):
    plain, quantized = (
        loaded("demo", kernels=kernels, **options) for options in ({}, {"quantization": "fp8"})
    )
    assert quantized.layers <= SHARE * plain.layers
    assert quantized.embeddings == plain.embeddings


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel", "fp8-block", "int8"])
def test_quantized_checkpoints_take_half(weights: str, tmp_path: Path):
    freight.quantize("demo", tmp_path / "out", weights=weights)
    plain, quantized = loaded("demo", kernels="reference"), loaded(str(tmp_path / "out"))
    assert quantized.layers <= SHARE * plain.layers


@pytest.mark.parametrize(
    ("caches", "dtypes"),
    [
        ([("bfloat16", "auto")], ["bfloat16"]),
        ([("auto", "auto")], ["bfloat16"]),
        ([("float32", "auto")], ["bfloat16", "float32"]),
        ([("fp8", "auto"), ("bfloat16", "auto")], ["bfloat16", "fp8_e4m3fn"]),
    ],
)
def test_a_cache_is_scored_once(caches: list[tuple[str, str]], dtypes: list[str]):
    scores = compare_caches(EngineArgs("demo"), caches, TEXT)
    assert [score.dtype for score in scores] == dtypes
    assert scores[0].mean_kl == 0
