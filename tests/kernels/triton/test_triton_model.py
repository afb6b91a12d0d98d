"""A small model on the Triton kernel set: prefill, then steps that mix a chunk and decodes, beside the reference."""

from __future__ import annotations

import pytest
import torch

from freight.cache.pool import allocate_pool, cache_spec
from freight.config.engine import KVCacheConfig
from freight.config.model import parse_model_config
from freight.config.presets import PRESETS
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.kernels.kernel_set import KernelSet, select_kernels
from freight.models.random_weights import random_model

SMALL = {
    **PRESETS["llama-1b"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
}
STEPS = [  # of a sequence in blocks 3, 1, 4 and of another in block 2
    [SequenceSlice(range(10), 0, (3, 1, 4), Logits.LAST)],
    [SequenceSlice([7], 10, (3, 1, 4), Logits.LAST), SequenceSlice(range(5), 0, (2,), Logits.ALL)],
    [SequenceSlice([9], 11, (3, 1, 4), Logits.LAST), SequenceSlice([3], 5, (2,), Logits.LAST)],
]


def logits(kernels: KernelSet, compute: Format, weights: Format, device: str) -> list[torch.Tensor]:
    config = parse_model_config(SMALL)
    model = random_model(config, kernels, compute, weights, 64, device)
    kv = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)
    spec = cache_spec(kv, config.num_layers, config.num_kv_heads, config.head_dim, 8)
    runner = ModelRunner(model, allocate_pool(spec, kv, 6, kernels, device), device)
    return [torch.cat(runner.run(step)) for step in STEPS]


@pytest.mark.parametrize(
    ("compute", "weights", "bound"),
    [
        (Format.FLOAT32, Format.FLOAT32, 1e-5),
        (Format.FLOAT32, Format.E4M3FN, 1e-5),  # in 16 bits a rounding turns into another FP8 activation here and there
        (Format.BFLOAT16, Format.BFLOAT16, 0.05),
    ],
)
def test_logits_are_those_of_the_reference(compute, weights, bound, device):
    expected = logits(select_kernels("reference"), compute, weights, device)
    for got, wanted in zip(logits(select_kernels("triton"), compute, weights, device), expected, strict=True):
        assert (got - wanted).abs().max() / wanted.std() < (bound if device == "cpu" else 0.05)
