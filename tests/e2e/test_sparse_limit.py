"""Models with an indexer (DeepSeek-V3.2, GLM-5) run up to `index_topk` tokens, where they attend to
all of them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.shapes import INDEXER
from tests.parity.variants import VARIANTS

import freight
from freight import LLM, SamplingParams
from freight.cli.inspect import describe
from freight.errors import ConfigError, RequestError
from freight.model.open import open_checkpoint

LIMIT = 48
SPARSE = ("deepseek-v32", "glm-moe-dsa")


def save_sparse(variant: str, folder: Path) -> Any:
    config = VARIANTS[variant]
    return save_random(
        type(config)(**config.to_dict() | {"index_topk": LIMIT}), folder, torch.float32
    )


@pytest.mark.parametrize("variant", SPARSE)
def test_the_limit_is_where_attention_becomes_sparse(variant: str, tmp_path: Path) -> None:
    model, ids = save_sparse(variant, tmp_path), tokens(LIMIT + 16)
    with torch.no_grad():
        sparse = model(torch.tensor([ids])).logits[0]
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"index_topk": INDEXER["index_topk"]})
    )
    dense = freight_logits(tmp_path, ids, "auto")
    assert (dense - sparse)[:LIMIT].abs().max() <= 1e-4
    assert ((dense - sparse)[LIMIT:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("variant", SPARSE)
def test_a_context_is_limited_and_no_tensor_of_the_indexer_is_read(
    variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_sparse(variant, tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    broken = {
        name: torch.full_like(x, torch.nan) if ".indexer." in name else x
        for name, x in stored.items()
    }
    count = sum(".indexer." in name for name in stored)
    assert count == 5 * (2 if variant == "glm-moe-dsa" else 3)
    save_file(broken, file, {"format": "pt"})
    with caplog.at_level(logging.INFO, "freight"):
        llm = LLM(model=str(tmp_path), skip_tokenizer_init=True)
    assert f"context limited to the {LIMIT} tokens of index_topk" in caplog.text
    assert llm.config.max_model_len == LIMIT
    params = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)
    for length, expected in ((LIMIT - 8, 8), (LIMIT - 5, 5)):
        (output,) = llm.generate([{"prompt_token_ids": tokens(length)}], params)
        assert len(output.outputs[0].token_ids) == expected
    with pytest.raises(RequestError, match=str(LIMIT)):
        llm.generate([{"prompt_token_ids": tokens(LIMIT + 1)}], params)
    facts = describe(str(tmp_path))
    assert facts["max_position_embeddings"] == LIMIT
    assert list(facts["skipped"].values()) == [count]


def test_a_longer_context_is_refused(tmp_path: Path) -> None:
    save_sparse("deepseek-v32", tmp_path)
    said = rf"--max-model-len 49 is more than index_topk = {LIMIT} of config.json: .*indexer.*use at most {LIMIT}"
    with pytest.raises(ConfigError, match=said):
        LLM(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=LIMIT + 1)
    assert (
        LLM(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=LIMIT).config.max_model_len
        == LIMIT
    )


def test_a_quantized_model_keeps_its_indexer(tmp_path: Path) -> None:
    save_sparse("glm-moe-dsa", tmp_path / "model")
    freight.quantize(tmp_path / "model", tmp_path / "out", weights="fp8", kv_cache="none")
    stored, kept = (load_file(tmp_path / one / "model.safetensors") for one in ("model", "out"))
    indexer = [name for name in stored if ".indexer." in name]
    assert len(indexer) == 10
    assert all(torch.equal(stored[name], kept[name]) for name in indexer)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert "model.layers.0.self_attn.indexer.wk" in ignored
    assert open_checkpoint(str(tmp_path / "out")).model.dense_limit == LIMIT
