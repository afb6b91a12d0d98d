"""A small model on the Triton kernel set: prefill, then steps that mix a chunk and decodes, beside
the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from freight.cache.groups import Pages
from freight.cache.pool import allocate_pool
from freight.cache.spec import cache_spec
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.engine.runner import ModelRunner
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.kernels.interface import KernelSet
from freight.kernels.select import select_kernels
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.model.decoder import Residual
from freight.model.random_weights import random_model
from freight.settings.engine import KVCacheConfig

SMALL = {
    **PRESETS["llama-1b"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 32,
}
STEPS = [  # of a sequence in blocks 3, 1, 4 and of another in block 2; a block has 4 slots
    [SequenceSlice(range(7), 0, ((3, 1, 4),), Logits.LAST)],
    [
        SequenceSlice([7], 7, ((3, 1, 4),), Logits.LAST),
        SequenceSlice(range(2), 0, ((2,),), Logits.ALL),
    ],
    [SequenceSlice([9], 8, ((3, 1, 4),), Logits.LAST), SequenceSlice([3], 2, ((2,),), Logits.LAST)],
]


def logits(kernels: KernelSet, compute: Format, weights: Format, device: str) -> list[torch.Tensor]:
    config = parse_model_config(SMALL)
    model = random_model(config, kernels, compute, weights, 64, device)
    kv = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)
    spec = cache_spec(kv, config, 4)
    runner = ModelRunner(model, allocate_pool(spec, kv, (6,), kernels, device), device)
    return [runner.run(step).all_logits() for step in STEPS]


@pytest.mark.parametrize(
    ("compute", "weights", "bound"),
    [
        (Format.FLOAT32, Format.FLOAT32, 1e-5),
        (
            Format.FLOAT32,
            Format.E4M3FN,
            1e-5,
        ),  # in 16 bits a rounding turns into another FP8 activation here and there
        (Format.BFLOAT16, Format.BFLOAT16, 0.05),
    ],
)
def test_logits_are_those_of_the_reference(compute, weights, bound, device):
    expected = logits(select_kernels("reference"), compute, weights, device)
    for got, wanted in zip(
        logits(select_kernels("triton"), compute, weights, device), expected, strict=True
    ):
        assert (got - wanted).abs().max() / wanted.std() < (bound if device == "cpu" else 0.05)


class OperationsOfTorch(TorchDispatchMode):
    """Collects what would run on the device; memory that is taken and looked at differently does
    not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch._dynamo takes seconds to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or "empty" in str(func) or "unsafe_view" in str(func)):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("weights", "launches", "products"), [(Format.E4M3FN, 10, 0), (Format.BFLOAT16, 6, 4)]
)
def test_the_launches_of_a_layer(weights, launches, products, monkeypatch, device):
    """Those that docs/internals/gpus.md counts, for a step that decodes."""
    config, kernels = parse_model_config(SMALL), select_kernels("triton")
    model = random_model(config, kernels, Format.BFLOAT16, weights, 64, device)
    kv = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)
    spec = cache_spec(kv, config, 8)
    pool = allocate_pool(spec, kv, (6,), kernels, device)
    batch = prepare(
        [SequenceSlice([7], 10, ((3, 1, 4),), Logits.LAST)], [Pages((0,), 0, None, 8)], device
    )
    x = model.embedding(batch.token_ids, batch.positions)
    made = []

    def note(kernel, *args, warmup=False, **kwargs):
        if not warmup:  # asks what fits on a multiprocessor
            made.append(kernel)

    for executor, method in ((GridExecutor, "__call__"), (JITFunction, "run")):
        monkeypatch.setattr(executor, method, note)
    with torch.inference_mode(), OperationsOfTorch() as operations:
        model.layers[0](Residual(x, x), batch, pool.layers[0])
    assert len(made) == launches
    assert len(operations.found) == products
    assert all("linear" in name or "mm" in name for name in operations.found)
