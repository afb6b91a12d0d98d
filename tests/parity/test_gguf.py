"""GGUF files of tiny models: in float32 against transformers on the folders that they were made
from, and in blocks against the reference kernels and against the decoded matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from tests.formats.gguf_files import NAMES
from tests.parity.converted_models import config_of, write_gguf
from tests.parity.random_models import freight_logits, save_random, tokens
from torch import Tensor

from freight.checkpoint.gguf.convert import convert_gguf
from freight.errors import CheckpointError
from freight.fp8.block_formats import BlockFormat
from freight.model.decoder import Decoder
from freight.model.layers.embedding import LogitsHead
from freight.model.layers.linear import Linear
from freight.model.open import open_model
from freight.operands.weight import Weight
from freight.settings.engine import EngineArgs

# tied, biases of experts, latents, norms minus one, short convolutions, delta nets
BLOCKS = ("llama3", "qwen3-moe", "deepseek-v2", "gemma3", "gpt-oss", "lfm2", "qwen3-5")

UNKNOWN = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "new-split",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save_random(config_of(name), tmp_path, torch.float32)
    file = tmp_path / "model.gguf"
    write_gguf(name, tmp_path, file)
    ids = tokens()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    assert (freight_logits(file, ids, "float32") - expected).abs().max() <= 1e-4


def mixed(name: str) -> BlockFormat:
    """Two formats among matrices of one input, as in files of mixed types."""
    is_wide = name.endswith(("attn_v.weight", "ffn_up.weight", "token_embd.weight"))
    return BlockFormat.Q8_0 if is_wide else BlockFormat.Q4_0


@pytest.mark.parametrize("name", BLOCKS)
def test_products_with_blocks(name: str, tmp_path: Path) -> None:
    """Every product of the kernels has the bits of the reference's. What lies between products does
    not, so the logits are compared by their direction; in the middle of all tokens, for where
    experts nearly tie, others are chosen.
    """
    save_random(config_of(name), tmp_path, torch.float32)
    file = tmp_path / "model.gguf"
    write_gguf(name, tmp_path, file, mixed)
    packed = list(products(loaded(file, "auto")))
    formats = set()
    for ours, reference in zip(packed, products(loaded(file, "reference")), strict=True):
        weight = reference.weight
        assert isinstance(weight, Weight)
        x = torch.randn(5, weight.shape[1])
        assert torch.equal(ours(x), reference(x))
        formats.add(weight.blocks)
    assert {BlockFormat.Q4_0, BlockFormat.Q8_0} <= formats
    ids = tokens()
    decoded = freight_logits(file, ids, "float32")
    logits = freight_logits(file, ids, "float32", activations="int8")
    definition = freight_logits(file, ids, "float32", "reference", activations="int8")
    assert logits.isfinite().all()
    assert alike(logits, definition) > 0.9999
    assert alike(logits, decoded) > 0.99


def alike(logits: Tensor, expected: Tensor) -> float:
    """The median over tokens of the cosine between logits."""
    return torch.cosine_similarity(logits, expected).median().item()


def loaded(file: Path, kernels: str) -> Decoder:
    args = EngineArgs(str(file), dtype="float32", kernels=kernels, skip_tokenizer_init=True)
    opened = open_model(args)
    decoder = opened.load(opened.resolve(opened.args))
    assert isinstance(decoder, Decoder)
    return decoder


def products(part: object) -> Iterator[Linear | LogitsHead]:
    """The products of a model, in the order of its parts."""
    if isinstance(part, Linear | LogitsHead):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from products(item)
    elif isinstance(part, Decoder):
        yield from products(list(vars(part).values()))
    elif is_dataclass(part):
        yield from products([getattr(part, field.name) for field in fields(part)])


def test_a_tokenizer_that_is_not_read_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    save_random(config_of("llama"), tmp_path, torch.float32)
    write_gguf("llama", tmp_path, file, metadata=UNKNOWN)
    opened = open_model(EngineArgs(str(file), tokenizer="demo"))
    assert opened.load_tokenizer() is not None
    assert 2 in opened.stop_token_ids()  # eos_token_id of the metadata
    with pytest.raises(CheckpointError, match=r"'new-split'.*--tokenizer FOLDER"):
        open_model(EngineArgs(str(file))).load_tokenizer()
    with pytest.raises(CheckpointError, match="new-split"):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
