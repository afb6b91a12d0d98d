"""Recorded decode steps on the CPU give what ordinary ones give, to the bit: logits, and all that
lies in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.refusals import refuses

from freight import LLM, SamplingParams
from freight.cache.pool import KVPool, allocate_pool
from freight.cache.spec import cache_spec
from freight.engine.decode_steps import DecodeSteps
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.recordings import CpuRecordings, CpuStep
from freight.engine.runner import ModelRunner
from freight.errors import KernelError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.interface import FreightLinear, FreightLookup
from freight.kernels.cpu.linear import CpuWeight
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.decoder import Decoder
from freight.model.layers.linear import Linear, UnmergedLinear
from freight.model.random_weights import random_model
from freight.operands.weight import Activations, Weight
from freight.settings.engine import KVCacheConfig

BLOCK, MAX_LEN = 8, 96
KERNELS = CpuKernels(library.load())
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
GEMMA = {
    **SHAPE,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MODELS = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "model_type": "mistral", "sliding_window": 16},
    "qwen3": {**SHAPE, "model_type": "qwen3"},
    "qwen3_moe": {**SHAPE, "model_type": "qwen3_moe", **MOE},
    "gemma2": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **GEMMA,
        "model_type": "gemma3_text",
        "rope_local_base_freq": 20.0,
        "num_hidden_layers": 7,
    },
}


class Rounding(CpuKernels):
    """Weights whose products round their inputs to FP8 (W8A8)."""

    def pack(self, weight: Weight) -> CpuWeight:
        quantized = weight.data.dtype.itemsize == 1
        return super().pack(
            replace(weight, activations=Activations.DYNAMIC) if quantized else weight
        )


def cache(name: str, config: ModelConfig) -> KVCacheConfig:
    mixer = next(iter(config.paged.values()))
    size = mixer.num_kv_heads * mixer.k_dim
    scales = LayerScales((0.05,), (0.05,), Granularity.TENSOR)
    centered = replace(scales, k_center=tuple(0.3 - 0.01 * i for i in range(size)))
    static = {"static": scales, "centers": centered}
    if name in static:
        of_layers = KVScales((static[name],) * len(config.layers))
        return KVCacheConfig(Format.E4M3FN, Granularity.TENSOR, ScaleSource.CHECKPOINT, of_layers)
    if name == "bfloat16":
        return KVCacheConfig(Format.BFLOAT16, None, None, None)
    if name == "skipped":
        dynamic = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)
        return dynamic.skipping({0}, len(config.layers), Format.BFLOAT16)
    return KVCacheConfig(Format(name), Granularity.TOKEN, ScaleSource.DYNAMIC, None)


def build(
    shape: dict[str, Any], cache_name: str, kernels: CpuKernels = KERNELS
) -> tuple[ModelRunner, ModelRunner]:
    """A runner that records, and one that does not, over caches of their own."""
    config = parse_model_config(shape)
    weights = Format.BFLOAT16 if kernels is KERNELS else Format.E4M3FN
    model = random_model(config, kernels, Format.BFLOAT16, weights, MAX_LEN, "cpu")
    return recording_runner(model, new_pool(model, cache_name)), ModelRunner(
        model, new_pool(model, cache_name), "cpu"
    )


def new_pool(model: Decoder, cache_name: str) -> KVPool:
    kv = cache(cache_name, model.config)
    spec = cache_spec(kv, model.config, BLOCK, Format.BFLOAT16)
    blocks = [4 * MAX_LEN // BLOCK] * len(spec.groups)
    pool = allocate_pool(spec, kv, blocks, KERNELS, "cpu", model.rotaries)
    for tensor in tensors_of(pool):
        tensor.view(torch.uint8).zero_()
    return pool


def tensors_of(pool: KVPool) -> list[torch.Tensor]:
    states = [part for layer in pool.states.values() for part in layer.states.parts.values()]
    pages = [layer.pages for layer in pool.paged.values()]
    tokens = [
        one
        for page in pages
        for one in (page.k_scale, page.v_scale)
        if one is not None and page.dynamic
    ]
    return [*(page.k for page in pages), *(page.v for page in pages), *tokens, *states]


def recording_runner(model: Decoder, pool: KVPool) -> ModelRunner:
    recordings = CpuRecordings(model, pool, KERNELS, 4)
    return ModelRunner(model, pool, "cpu", DecodeSteps(recordings, pool, MAX_LEN, "cpu"))


def recordings_of(runner: ModelRunner) -> CpuRecordings:
    assert runner.captured is not None
    capture = runner.captured._capture
    assert isinstance(capture, CpuRecordings)
    return capture


class Batch:
    """Four sequences; a step takes some of them by one token. Their blocks have `sizes` tokens, by
    group.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        counts = [MAX_LEN // size for size in sizes]
        self.lengths = [0] * 4
        self.blocks = [
            tuple(tuple(range(count * i, count * i + count)) for count in counts) for i in range(4)
        ]

    @classmethod
    def of(cls, runner: ModelRunner) -> Batch:
        return cls([group.tokens_per_block for group in runner.pool.spec.groups])

    def advance(
        self, sequences: tuple[int, ...], count: int = 1, logits: Logits = Logits.LAST
    ) -> list[SequenceSlice]:
        slices = []
        for i in sequences:
            start = self.lengths[i]
            tokens = [(7 * i + 11 * (start + k)) % 64 for k in range(count)]
            slices.append(SequenceSlice(tokens, start, self.blocks[i], logits))
            self.lengths[i] += count
        return slices


def compare(recorded: ModelRunner, plain: ModelRunner) -> None:
    """Steps of growing contexts, over the edges of blocks and windows, by changing numbers of
    sequences.
    """
    batch = Batch.of(recorded)
    steps = [batch.advance((i,), count) for i, count in enumerate((3, 6, 40, 17))]
    for which in [(0, 1, 2, 3), (2,), (3, 1), (0, 1, 2), (1,)] * 2:
        steps += [batch.advance(which), batch.advance(which)]
    steps += [
        batch.advance((0, 3), 5),
        batch.advance((0,), logits=Logits.ALL),
        batch.advance((3, 2, 1, 0)),
        # as tokens with drafts, in recordings that steps of single tokens made
        batch.advance((0,), 3, Logits.ALL),
        batch.advance((2,), 1, Logits.ALL) + batch.advance((1,), 3, Logits.ALL),
        batch.advance((3, 0), 2, Logits.ALL),
        batch.advance((3, 2, 1, 0)),
    ]
    for step in steps:
        assert torch.equal(recorded.run(step).all_logits(), plain.run(step).all_logits())
    assert recorded.pool.counters() == plain.pool.counters()
    for ours, theirs in zip(tensors_of(recorded.pool), tensors_of(plain.pool), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("cache_name", ["fp8_e4m3fn"])
def test_every_model_has_the_same_bits(shape, cache_name):
    recorded, plain = build(MODELS[shape], cache_name)
    compare(recorded, plain)
    assert recordings_of(recorded).obstacle == ""


@pytest.mark.parametrize(
    "cache_name", ["bfloat16", "fp8_e5m2", "int8", "static", "centers", "skipped"]
)
def test_every_cache_has_the_same_bits(cache_name):
    recorded, plain = build(SHAPE, cache_name)
    compare(recorded, plain)
    assert recordings_of(recorded).obstacle == ""


def test_products_that_round_their_inputs_have_the_same_bits():
    recorded, plain = build(SHAPE, "fp8_e4m3fn", Rounding(KERNELS.library))
    compare(recorded, plain)
    assert recordings_of(recorded).obstacle == ""


def test_a_decode_step_is_recorded_once_and_then_replayed(monkeypatch):
    recorded, _ = build(SHAPE, "bfloat16")
    batch, layers = Batch([BLOCK]), []
    original = Decoder.layers_over
    monkeypatch.setattr(Decoder, "layers_over", lambda *a: layers.append(1) or original(*a))
    for step in range(1, 4):
        recorded.run(batch.advance((0, 1)))
        assert len(layers) == 1, step
    recorded.run(batch.advance((2,)))
    assert len(layers) == 2
    recorded.run(batch.advance((0, 1), 2))  # not a decode step
    assert len(layers) == 3


def test_a_token_with_drafts_is_replayed_by_the_recording_of_as_many_rows(monkeypatch):
    recorded, plain = build(SHAPE, "bfloat16")
    batch, layers = Batch([BLOCK]), []
    for step in (batch.advance((0, 1, 2)), batch.advance((3,), 7)):
        recorded.run(step)
        plain.run(step)
    original = Decoder.layers_over
    monkeypatch.setattr(Decoder, "layers_over", lambda *a: layers.append(1) or original(*a))
    drafted = [
        batch.advance((0,), 3, Logits.ALL),
        batch.advance((3,), 2, Logits.ALL) + batch.advance((1,), 1, Logits.ALL),
        batch.advance((2,), 1, Logits.ALL) + batch.advance((3,), 2, Logits.ALL),
    ]
    found = [recorded.run(step).all_logits().clone() for step in drafted]
    assert layers == []
    for logits, step in zip(found, drafted, strict=True):
        assert torch.equal(logits, plain.run(step).all_logits())


def test_a_recording_is_the_whole_step_from_token_ids_to_logits():
    recorded, _ = build(SHAPE, "bfloat16")
    recorded.run(Batch([BLOCK]).advance((0, 1)))
    assert recorded.captured is not None
    replay = recorded.captured.steps[2, False][1]
    assert isinstance(replay, CpuStep)
    ((recording, _),) = replay.recordings.values()
    first, last = recording.arguments[0], recording.arguments[-1]
    assert isinstance(first, FreightLookup)
    assert isinstance(last, FreightLinear)
    assert (last.rows, last.wide) == (2, 1)
    assert recording.output.shape == (2, 64)


@pytest.mark.parametrize("change", [{"input_limit": 0.5}, {"divisor": 3.0, "soft_cap": 2.0}])
def test_what_torch_has_of_a_head_follows_the_recording(change):
    recorded, plain = build(SHAPE, "bfloat16")
    model = replace(plain.model, head=replace(plain.model.head, **change))
    recorded = recording_runner(model, recorded.pool)
    compare(recorded, replace(plain, model=model))
    assert recordings_of(recorded).obstacle == ""


def test_another_number_of_threads_is_another_recording():
    recorded, plain = build(SHAPE, "bfloat16")
    batch, before = Batch([BLOCK]), torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            step = batch.advance((0, 1, 2))
            assert torch.equal(recorded.run(step).all_logits(), plain.run(step).all_logits())
            assert recorded.captured is not None
            replay = recorded.captured.steps[3, False][1]
            assert isinstance(replay, CpuStep)
            of_threads, _ = replay.recordings[threads]
            assert {call.threads for call in of_threads.arguments} == {threads}
    finally:
        torch.set_num_threads(before)


def test_projections_that_could_not_be_merged_have_the_same_bits():
    recorded, plain = build(SHAPE, "bfloat16")
    layer = plain.model.layers[1]
    qkv = layer.mixer.qkv
    assert isinstance(qkv, Linear)
    numbers = torch.Generator().manual_seed(3)
    parts = [Weight((torch.randn(n, 64, generator=numbers) / 8).bfloat16()) for n in (64, 32, 32)]
    unmerged = UnmergedLinear(tuple(Linear(KERNELS.pack(part), None, KERNELS) for part in parts))
    layers = (plain.model.layers[0], replace(layer, mixer=replace(layer.mixer, qkv=unmerged)))
    model = replace(plain.model, layers=(*layers, plain.model.layers[2]))
    recorded = recording_runner(model, recorded.pool)
    compare(recorded, replace(plain, model=model))
    assert recordings_of(recorded).obstacle == ""


def test_a_model_with_an_operation_of_torch_runs_as_written():
    """Inputs that are clipped, as fbgemm's checkpoints have it."""
    recorded, plain = build(SHAPE, "bfloat16")
    layer = plain.model.layers[1]
    down = layer.mlp.down
    assert isinstance(down, Linear)
    layers = (
        plain.model.layers[0],
        replace(layer, mlp=replace(layer.mlp, down=replace(down, input_limit=0.25))),
    )
    model = replace(plain.model, layers=(*layers, plain.model.layers[2]))
    recorded = recording_runner(model, recorded.pool)
    compare(recorded, replace(plain, model=model))
    assert "aten.clamp" in recordings_of(recorded).obstacle


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_kernel_that_fails_is_reported_and_does_no_harm(steps_before):
    recorded, plain = build(SHAPE, "bfloat16")
    batch = Batch([BLOCK])
    for _ in range(steps_before):
        step = batch.advance((0, 1))
        assert torch.equal(recorded.run(step).all_logits(), plain.run(step).all_logits())
    bad = [part._replace(start=-1) for part in batch.advance((0, 1))]
    with refuses(KernelError, "freight_attention", "more queries than keys"):
        recorded.run(bad)
    batch.lengths = [steps_before] * 2 + [0, 0]
    for _ in range(3):
        step = batch.advance((0, 1))
        assert torch.equal(recorded.run(step).all_logits(), plain.run(step).all_logits())


def test_a_captured_step_belongs_to_its_cache():
    recorded, plain = build(SHAPE, "bfloat16")
    with pytest.raises(AssertionError):
        replace(recorded, pool=plain.pool)


def test_the_engine_records_and_generates_the_same():
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=6 + 3 * i, ignore_eos=True, logprobs=2)
        for i in range(6)
    ]
    found = []
    for recording in (True, False):
        llm = LLM(
            "demo",
            kv_cache_dtype="fp8_e4m3",
            kv_cache_memory="2MiB",
            max_model_len=64,
            max_num_seqs=4,
        )
        runner = llm.engine.runner
        assert isinstance(recordings_of(runner), CpuRecordings)
        if not recording:
            llm.engine.runner = replace(runner, captured=None)
        outputs = llm.generate([[5 + i, 9, 11] for i in range(6)], params)
        found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
        if recording:
            assert {(rows, False) for rows in (1, 2, 3, 4)} & set(runner.captured.steps)
    assert found[0] == found[1]
