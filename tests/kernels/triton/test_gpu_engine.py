"""On a GPU: captured steps give what launched ones give, nothing waits for the device in them, and
torch's FP8 product.

Collected only where torch sees a GPU.
"""

from __future__ import annotations

import pytest
import torch

from freight import LLM
from freight.cache.pool import allocate_pool
from freight.cache.spec import cache_spec
from freight.engine.decode_steps import DecodeSteps
from freight.engine.graphs import CudaGraphs
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.engine.sampler import SamplingRow, sample
from freight.engine.step import Mode
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.weights import quantize_rows
from freight.kernels import reference
from freight.kernels.select import select_kernels
from freight.kernels.triton import linear
from freight.kernels.triton.formats import current_target
from freight.model.config.parse import parse_model_config
from freight.model.config.presets import PRESETS
from freight.model.random_weights import random_model
from freight.operands.weight import Activations, Weight
from freight.sampling import SamplingParams
from freight.settings.engine import KVCacheConfig

SMALL = {**PRESETS["llama-1b"], "num_hidden_layers": 2, "vocab_size": 512}
BLOCK = 16
# torch says once that the mode is a prototype, whatever it is set to
waits_are_noticed = pytest.mark.filterwarnings("ignore:.*ynchronization debug mode is a prototype")


@waits_are_noticed
@pytest.mark.parametrize("weights", [Format.BFLOAT16, Format.E4M3FN])
def test_a_captured_step_gives_the_same_bits(weights):
    config, kernels = parse_model_config(SMALL), select_kernels("auto", "cuda")
    model = random_model(config, kernels, Format.BFLOAT16, weights, 256, "cuda")
    kv = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)
    spec = cache_spec(kv, config, BLOCK)
    pool = allocate_pool(spec, kv, (64,), kernels, "cuda")
    launched = ModelRunner(model, pool, "cuda")
    replayed = ModelRunner(
        model, pool, "cuda", DecodeSteps(CudaGraphs(model, pool, 8), pool, 256, "cuda")
    )
    blocks = [tuple(range(8 * i, 8 * i + 8)) for i in range(4)]
    lengths = [3, 40, 100, 17]
    launched.run(
        [
            SequenceSlice(range(n), 0, (b,), Logits.LAST)
            for n, b in zip(lengths, blocks, strict=True)
        ]
    )
    for step in range(3):
        slices = [
            SequenceSlice([5 + step], n + step, (b,), Logits.LAST)
            for n, b in zip(lengths, blocks, strict=True)
        ]
        expected = launched.run(slices).all_logits()
        assert torch.equal(replayed.run(slices).all_logits(), expected)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        replayed.run(slices)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@waits_are_noticed
@pytest.mark.parametrize(("spread", "expected_waits"), [(3.0, 1), (1.0, 2)])
def test_the_sampler_draws_as_on_a_cpu_and_waits_once(spread, expected_waits):
    """A second time for a row whose top_p the most likely tokens do not reach."""
    torch.manual_seed(0)
    logits = torch.randn(4, 4096) * spread
    params = [
        SamplingParams(temperature=0.0, logit_bias={3: 2.0}),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=1.5, top_k=40, min_p=0.01),
        SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=0.5, min_tokens=8),
    ]
    output = [5, 6]
    rows = [SamplingRow(one, 7 + i, (1, 2), output, frozenset({9})) for i, one in enumerate(params)]
    expected = [one.token_id for one in sample(logits, rows)]
    on_gpu = logits.cuda()
    assert [one.token_id for one in sample(on_gpu, rows)] == expected
    output.append(7)  # the penalties take it in without a wait of their own
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing") as waits:
            sample(on_gpu, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(wait.message) for wait in waits) == expected_waits


def test_steps_launched_ahead_generate_the_same():
    """One request at a time, because another number of rows may be rounded otherwise."""
    llm = LLM("demo", device="cuda", kv_cache_memory="8MiB", max_model_len=64)
    assert llm.engine.mode is Mode.OVERLAPPED
    found = []
    for mode in (Mode.OVERLAPPED, Mode.REPEATABLE):
        llm.engine.mode = mode
        params = [
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=9 + 3 * i)
            for i in range(4)
        ]
        found.append([llm.generate([[5, 9, 11]], one)[0].outputs[0].token_ids for one in params])
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [65, 300])
@pytest.mark.parametrize("activations", [Activations.DYNAMIC, Activations.STATIC])
def test_torch_s_product_is_the_reference_s(rows, activations):
    torch.manual_seed(0)
    data, scale = quantize_rows(torch.randn(256, 512, device="cuda") / 512**0.5, Format.E4M3FN)
    weight = Weight(data, scale, activations, 0.02 if activations is Activations.STATIC else None)
    x, bias = (
        torch.randn(rows, 512, device="cuda").bfloat16(),
        torch.randn(256, device="cuda").bfloat16(),
    )
    target = current_target()
    assert linear.scaled_mm_takes(target, x.dtype, weight) == (Format.E4M3FN in target.native)
    got = linear.linear(target, x, weight, bias)
    expected = reference.linear(x.float(), weight, bias.float())
    assert (got.float() - expected).abs().max() <= 0.02 * expected.abs().max()
