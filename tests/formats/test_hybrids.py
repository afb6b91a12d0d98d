"""Models whose layers keep a state, in the FP8 forms of their producers: what they compute, and that no scale is unused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.formats.hybrids import CASES, FORMS, LONG, PROMPTS, make
from torch import Tensor

from freight import LLM, SamplingParams

WIDE = {"dtype": "float32", "kv_cache_dtype": "float32"}


def logprobs(folder: str, prompts: list[list[int]] = PROMPTS, kernels: str = "auto", **options: str) -> Tensor:
    """As `Hybrid.logprobs`."""
    llm = LLM(model=folder, skip_tokenizer_init=True, kernels=kernels, max_num_seqs=1, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    found = [[row[token].logprob for row, token in zip(output.prompt_logprobs or [], prompt, strict=True) if row]
             for output, prompt in zip(outputs, prompts, strict=True)]  # fmt: skip
    return torch.tensor(found)


@pytest.mark.parametrize(("name", "family"), [case for case in CASES if FORMS[case[0]].said is not None])
def test_weights_are_those_of_the_dequantized_model(name: str, family: str, tmp_path: Path) -> None:
    """With inputs as they are, nothing is rounded beside the weights."""
    made = make(FORMS[name].of_weights_alone(), family)
    expected = made.logprobs(tmp_path / "plain", LONG)
    assert expected.std() > 0.3
    found = logprobs(made.save(tmp_path / "fp8"), LONG, **WIDE)
    print(name, family, (found - expected).abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_logits_are_those_of_the_dequantized_model(name: str, family: str, tmp_path: Path) -> None:
    """Sums in another order round an input to another code now and then, which changes a prompt from there on."""
    made = make(FORMS[name], family)
    expected = made.logprobs(tmp_path / "plain", PROMPTS)
    assert expected.std() > 0.3
    difference = (logprobs(made.save(tmp_path / "fp8"), **WIDE) - expected).abs()
    print(name, family, (difference < 1e-4).sum(), difference.max())
    assert (difference < 1e-4).sum() >= 16, difference
    assert difference.max() < 0.3, difference


@pytest.mark.parametrize(("name", "family"), CASES)
def test_every_scale_changes_the_output(name: str, family: str, tmp_path: Path) -> None:
    made = make(FORMS[name], family)
    before = logprobs(made.save(tmp_path), kv_cache_dtype="fp8")
    for scale in made.one_of_each_kind():
        kept = made.tensors[scale]
        factor = torch.where(torch.arange(kept.numel()) < max(1, kept.numel() // 2), 3.0, 1.0).reshape(kept.shape)
        made.tensors[scale] = (kept.float() * factor).to(kept.dtype)
        assert not torch.equal(logprobs(made.save(tmp_path), kv_cache_dtype="fp8"), before), scale
        made.tensors[scale] = kept
