"""What each token has for each layer (Gemma 4 E2B, E4B): how its table is held and how it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS

from freight.model.decoder import Decoder
from freight.model.open import OpenModel, open_model
from freight.quantizer.modules import ignored_modules
from freight.settings.engine import EngineArgs

TABLE = "model.embed_tokens_per_layer.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random(VARIANTS["gemma4-own-inputs-alone"], folder, torch.bfloat16)
    return folder


def opened(folder: Path, **options: str) -> tuple[OpenModel, Decoder]:
    found = open_model(
        EngineArgs(str(folder), kernels="reference", skip_tokenizer_init=True, **options)
    )
    model = found.load(found.resolve(found.args))
    assert isinstance(model, Decoder)
    return found, model


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "float16"}, {"quantization": "fp8"}]
)
def test_the_table_stays_as_it_is_stored(folder: Path, options: dict[str, str]) -> None:
    """Only rows that are read are converted: of a large model the table is the larger half."""
    _, model = opened(folder, **options)
    inputs = model.per_layer_embeddings
    assert inputs is not None
    assert inputs.table.dtype is torch.bfloat16
    embedded = torch.randn(5, 64, dtype=model.embedding.weight.dtype)
    assert inputs(embedded, torch.arange(5)).shape == (5, 4, 16)
    assert inputs(embedded, torch.arange(5)).dtype is embedded.dtype


def test_fp8_is_for_the_projections_within_layers(folder: Path) -> None:
    found, model = opened(folder, quantization="fp8")
    assert model.per_layer_embeddings is not None
    own = model.layers[0].per_layer
    assert own is not None
    parts = (own.gate, own.down, model.per_layer_embeddings.projection)
    held = [part.weight.data.dtype for part in parts]  # type: ignore[union-attr]
    assert held == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16]
    kept, _ = ignored_modules(found.model, ())
    assert "model.per_layer_model_projection" in kept
    assert "model.layers.0.per_layer_input_gate" not in kept


def test_float32_over_a_16_bit_table_computes_what_a_float32_table_does(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    ids = tokens(20)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path)
    narrow, wide = (freight_logits(one, ids, "float32", "reference") for one in (folder, tmp_path))
    assert torch.equal(narrow, wide)
