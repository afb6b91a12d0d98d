"""Each further family of experts in its published FP8 form: what it computes, and that no scale is
unused.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.formats.mixtures import CASES, PROMPTS, make
from tests.shares import one_in
from torch import Tensor

from freight import LLM, SamplingParams
from freight.checkpoint.kv_scales import parse_scale_name
from freight.errors import CheckpointError
from freight.model.open import open_checkpoint

WIDE = {"dtype": "float32", "kv_cache_dtype": "float32"}


def logprobs(folder: str, kernels: str = "auto", **options: str) -> Tensor:
    """As `Made.logprobs`."""
    llm = LLM(model=folder, skip_tokenizer_init=True, kernels=kernels, max_num_seqs=1, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    found = [[row[token].logprob for row, token in zip(output.prompt_logprobs or [], prompt, strict=True) if row]
             for output, prompt in zip(outputs, PROMPTS, strict=True)]  # fmt: skip
    return torch.tensor(found)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_logits_are_those_of_the_dequantized_model(name: str, family: str, tmp_path: Path) -> None:
    """Sums in another order round an input to another code now and then, which changes a prompt
    from there on.
    """
    made = make(name, family)
    expected = made.logprobs(tmp_path / "plain")
    assert expected.std() > 0.3
    folder = made.save(tmp_path / "fp8")
    for kernels in ("reference", "auto"):
        difference = (logprobs(folder, kernels, **WIDE) - expected).abs()
        assert (difference < 1e-4).sum() >= 16, (kernels, difference)
        assert difference.max() < 0.3, (kernels, difference)


@pytest.mark.parametrize(("name", "family"), one_in(4, CASES))
def test_every_scale_changes_the_output(name: str, family: str, tmp_path: Path) -> None:
    """Half of a tensor's scales three times as large: norms behind a product undo what all its rows
    have in common.
    """
    made = make(name, family)
    before = logprobs(made.save(tmp_path), kv_cache_dtype="fp8")
    scales = made.one_of_each_kind()
    assert len(scales) >= 5
    for scale in scales:
        kept = made.tensors[scale]
        factor = torch.where(
            torch.arange(kept.numel()) < max(1, kept.numel() // 2), 3.0, 1.0
        ).reshape(kept.shape)
        made.tensors[scale] = (kept.float() * factor).to(kept.dtype)
        assert not torch.equal(logprobs(made.save(tmp_path), kv_cache_dtype="fp8"), before), scale
        made.tensors[scale] = kept


@pytest.mark.parametrize(("name", "family"), CASES)
def test_kv_scales_of_every_name_are_read(name: str, family: str, tmp_path: Path) -> None:
    """Those of a layer that predicts further tokens are not: it does not run."""
    made = make(name, family)
    stored = {
        n: float(t)
        for n, t in made.tensors.items()
        if parse_scale_name(n) is not None and "layers.2." not in n
    }
    layers = open_checkpoint(made.save(tmp_path)).kv_scales.layers
    of_a_layer = [
        one for one in made.form.kv(0) if "q.scale" not in one
    ]  # that of queries is not the cache's
    assert len(stored) == len(layers) * len(of_a_layer)
    for index, layer in enumerate(layers):
        assert layer is not None
        own = {n: scale for n, scale in stored.items() if f"layers.{index}." in n}
        assert sorted(layer.names) == sorted(own)
        assert {*layer.k, *layer.v} == set(own.values())


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_missing_scale_of_experts_is_named(name: str, family: str, tmp_path: Path) -> None:
    made = make(name, family)
    experts = [n for n in made.tensors if "expert" in n or "block_sparse_moe" in n]
    for scale in [
        n
        for n in experts
        if re.search(r"(layers.1\D.*(\.0\.\w+|experts\.\w+|linear))[._]\w*scale(_inv)?$", n)
    ]:
        kept = made.tensors.pop(scale)
        with pytest.raises(CheckpointError, match=r"_scale\w* is missing"):
            LLM(model=made.save(tmp_path), skip_tokenizer_init=True)
        made.tensors[scale] = kept
