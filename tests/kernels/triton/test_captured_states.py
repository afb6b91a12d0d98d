"""Steps of models with states as CUDA graphs run them: once over padding alone, then over sequences
and padding.

A GPU is not needed for what could go wrong: that the computation which compiles kernels changes a
state, or that padding does. What a graph replays are the same launches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import save_random
from tests.parity.shapes import DELTA_NET
from tests.parity.variants import VARIANTS
from transformers import Qwen3_5TextConfig

from freight.cache.pool import KVPool, allocate_pool
from freight.engine.decode_steps import DecodeSteps, Replay
from freight.engine.graphs import CudaGraphs
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.kernels.select import select_kernels
from freight.model.decoder import Decoder
from freight.model.open import open_model
from freight.operands.batch import ForwardBatch
from freight.settings.engine import EngineArgs

EVERY = 32
# the steps behind end and begin a block of states, a tile, and are within one
LENGTHS = [31, 15, 3]
TWO: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS = {
    "qwen3-5": Qwen3_5TextConfig(
        **DELTA_NET | TWO | {"num_attention_heads": 2, "num_key_value_heads": 1}
    ),
    "lfm2": VARIANTS["lfm2"],
    "granite-h": VARIANTS["granite-h"],
}
SLOW = {"lfm2", "granite-h"}


class Graphs(CudaGraphs):
    """As on a GPU, where what is captured is launched again."""

    def capture(self, batch: ForwardBatch) -> Replay:
        self._model.forward(batch, self._pool.layers)
        return lambda: self._model.forward(batch, self._pool.layers)


def filled(pool: KVPool) -> KVPool:
    """With NaN wherever nothing was written."""
    for kept in pool.states.values():
        for tensor in kept.states.parts.values():
            if tensor.dtype.is_floating_point and tensor.itemsize > 1:
                tensor.fill_(torch.nan)
    return pool


def tensors(pool: KVPool) -> list[torch.Tensor]:
    """All that the pool keeps: states, keys and values in 16 bits or more."""
    pages = [layer.pages for layer in pool.paged.values()]
    assert not any(one.scale_kind for one in pages)
    states = [part for kept in pool.states.values() for part in kept.states.parts.values()]
    return states + [tensor for one in pages for tensor in (one.k, one.v)]


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # rows of padding hold anything, and nothing reads them
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in MODELS]
)
def test_steps_over_padding_leave_states_alone(name: str, tmp_path: Path, device: str) -> None:
    save_random(MODELS[name], tmp_path, torch.float32)
    state = "auto" if name == "lfm2" else "int8"
    args = EngineArgs(str(tmp_path), skip_tokenizer_init=True, state_every=EVERY, state_dtype=state)
    opened = open_model(args)
    config = replace(opened.resolve(args), kernels="triton", device=device)
    kernels = select_kernels("triton", device)
    decoder = opened.load(config)
    assert isinstance(decoder, Decoder)
    spec = opened.cache_spec(config)
    assert len(spec.groups) == 2

    def runner(captures: bool) -> ModelRunner:
        pool = filled(
            allocate_pool(
                spec, config.kv, tuple(12 for _ in spec.groups), kernels, device, decoder.rotaries
            )
        )
        steps = DecodeSteps(Graphs(decoder, pool, 4), pool, 96, device) if captures else None
        return ModelRunner(decoder, pool, device, steps)

    blocks = [tuple(tuple(range(1 + 3 * i, 4 + 3 * i)) for _ in spec.groups) for i in range(3)]
    plain, captured = runner(False), runner(True)
    parts = [
        SequenceSlice(range(n), 0, b, Logits.LAST) for n, b in zip(LENGTHS, blocks, strict=True)
    ]
    assert plain.run(parts).all_logits().isfinite().all()
    for kept, copy in zip(tensors(plain.pool), tensors(captured.pool), strict=True):
        copy.copy_(
            kept
        )  # prompts are not captured: both compute the same, in Triton's interpreter slowly
    found = []
    for one in (plain, captured):
        logits = []
        for step in range(2):
            parts = [
                SequenceSlice([5 + step], n + step, b, Logits.LAST)
                for n, b in zip(LENGTHS, blocks, strict=True)
            ]
            logits.append(one.run(parts).all_logits())
        found.append(torch.cat(logits))
        assert found[-1].isfinite().all()
    # products of unquantized weights are torch's, whose bits may depend on the number of rows
    assert torch.allclose(*found, rtol=0, atol=1e-5)
