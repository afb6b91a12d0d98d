"""Tiny models of many families that llm-compressor quantized itself: Freight computes what the
tool's model computes.

`expected.safetensors` holds the logits of the quantized model in memory, in float32: stored bytes
times scales, with inputs and cache rounded by compressed-tensors.
`benchmarks/peers/make_quantized_families.py` made folder and logits.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from freight.cache.pool import allocate_pool
from freight.checkpoint.kv_scales import parse_scale_name
from freight.engine.runner import ModelRunner
from freight.kernels.select import select_kernels
from freight.model.open import open_checkpoint, open_model
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures/llmcompressor_families"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
OF_INPUTS = ("input_scale", "k_scale", "v_scale")
WITHOUT_CACHE = ("gemma4", "gemma4_moe", "gemma4_own_inputs", "qwen3_vl_moe")


@functools.cache
def stored(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / name / "model.safetensors")


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / name / "expected.safetensors")


def logits(folder: Path, name: str, kernel_set: str) -> Tensor:
    """Of every prompt, [prompts, tokens, vocabulary], in float32 but for what the checkpoint
    quantizes.
    """
    cache = "float32" if name in WITHOUT_CACHE else "auto"
    opened = open_model(
        EngineArgs(
            str(folder),
            dtype="float32",
            kv_cache_dtype=cache,
            kernels=kernel_set,
            skip_tokenizer_init=True,
        )
    )
    config, kernels = opened.resolve(opened.args), select_kernels(kernel_set)
    decoder, spec = opened.load(config), opened.cache_spec(config)
    pool = allocate_pool(
        spec, config.kv, [1] * len(spec.groups), kernels, rotaries=decoder.rotaries
    )
    runner = ModelRunner(decoder, pool, "cpu")
    return torch.stack(
        [runner.logits(row, 0, pool.whole).clone() for row in expected(name)["tokens"].tolist()]
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_tool_s_own_model(name: str):
    """Within 1e-4. A sum in another order may round an input to another code, which changes the
    rows behind it.
    """
    agree = (logits(FIXTURES / name, name, "auto") - expected(name)["logits"]).abs().amax(-1) < 1e-4
    assert agree.sum() >= agree.numel() - 5


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gemma3" else pytest.mark.slow) for n in NAMES]
)
def test_every_scale_changes_the_output(name: str, tmp_path: Path):
    """One of each projection and kind, three times as large: FP8 rounds alike under 2 or 4 times as
    large a scale.

    A norm of queries and keys, in Gemma 4 of values too, cancels one scale of a whole matrix: these
    are left to the test of the logits.
    """
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    before = logits(FIXTURES / name, name, "auto")
    # of the last layer and the last expert
    scales = {
        tuple(n.split(".")[-2:]): n
        for n in sorted(stored(name))
        if n.endswith(("weight_scale", *OF_INPUTS))
    }
    assert len(scales) >= 4
    normed = any("k_norm" in tensor for tensor in stored(name))
    for (projection, _), scale in scales.items():
        whole = scale.endswith("weight_scale") and stored(name)[scale].numel() == 1
        if whole and projection in (("q_proj", "k_proj") if normed else ()) + (
            ("v_proj",) if name == "gemma4" else ()
        ):
            continue
        save_file({**stored(name), scale: stored(name)[scale] * 3}, tmp_path / "model.safetensors")
        assert not torch.equal(logits(tmp_path, name, "auto"), before), scale


@pytest.mark.parametrize("name", NAMES)
def test_kv_scales_are_read(name: str):
    opened = open_checkpoint(str(FIXTURES / name))
    scales = {n: float(t) for n, t in stored(name).items() if parse_scale_name(n) is not None}
    assert len(scales) == (0 if name in WITHOUT_CACHE else 4)
    for index, layer in enumerate(opened.kv_scales.layers):
        own = {n: scale for n, scale in scales.items() if f"layers.{index}." in n}
        assert (layer is None) == (not own)
        assert layer is None or (
            {*layer.k, *layer.v} == set(own.values()) and sorted(layer.names) == sorted(own)
        )
