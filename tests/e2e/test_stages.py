"""Layers over several devices: the bits of one device, and no operation with tensors of two.

There is one device here. `Cards` stands for several: it notes on which a tensor is, as it is made,
moved and computed with, and fails where an operation would take tensors of two.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.e2e.test_ranks import CASES, opened_as, outputs_of, started
from tests.parity.random_models import save_random
from tests.parity.variants import VARIANTS
from tests.rank_follower import pages_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from freight import SamplingParams
from freight.cache.pool import allocate_pool
from freight.engine import build
from freight.engine import graphs as graphs_module
from freight.engine import runner as runner_module
from freight.engine.decode_steps import Buffers, DecodeSteps
from freight.engine.engine import Engine
from freight.engine.graphs import CudaGraphs
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.engine.runner import ModelRunner
from freight.engine.step import Mode
from freight.errors import ConfigError
from freight.kernels.cpu import library
from freight.model import decoder as decoder_module
from freight.model import open as open_model_module
from freight.model.decoder import Decoder, Residual
from freight.model.held_tensors import tensors_in
from freight.model.moved import Mover
from freight.model.open import open_model
from freight.operands.batch import ForwardBatch
from freight.parallel.stages import Stage, stages_of
from freight.settings.engine import EngineArgs

CHEAP = (
    "16 bits",
    "W8A8, scales per token",
    "soft caps, tied",
    "latents, of q too",
    "delta nets, states in INT8",
    "experts in W8A8, and a shared one",
)


KINDS = (
    "llama-biases",
    "gemma3-two-ropes",
    "gemma4",
    "gemma4-shared",
    "gemma4-moe",
    "phi3-long",
    "qwen3-moe",
    "kimi-linear",
    "qwen3-next",
    "nemotron-h-latent",
    "granite-h-moe",
    "lfm2",
    "gpt-oss",
    "deepseek-v3",
    "opt-350m",
)


@pytest.mark.skipif(not library.installed(), reason="recorded steps are of the compiled kernels")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in CHEAP else [pytest.mark.slow]) for case in CASES],
)
def test_two_stages_have_the_bits_of_one(case: str, tmp_path: Path) -> None:
    given, options = CASES[case]
    if options.get("kv_scales") == "by rank":
        options = options | {"kv_scales": "0.03"}
    alone = started(opened_as(given, options, tmp_path)[0])
    expected = outputs_of(alone)
    opened = opened_as(given, options, tmp_path, pipeline_parallel_size=2)[0]
    engine = started(opened)
    assert len(engine.runner.pool.stages) == 2
    assert outputs_of(engine) == expected
    for one, two in zip(pages_of(alone.runner.pool), pages_of(engine.runner.pool), strict=True):
        for name, page in one.items():
            assert torch.equal(page, two[name]), name


def test_steps_of_two_microbatches_have_the_bits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where a step of each is under way."""
    given, options = CASES["W8A8, scales per token"]
    alone = started(opened_as(given, options, tmp_path)[0])
    expected = outputs_of(alone), tokens_of(alone)
    monkeypatch.setattr(build, "_mode", lambda *_: Mode.OVERLAPPED)
    engine = started(opened_as(given, options, tmp_path, pipeline_parallel_size=2)[0])
    assert engine.scheduler.num_microbatches == 2
    ahead = []
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda *args: ahead.append(args[2:]) or run(*args))
    assert (outputs_of(engine), tokens_of(engine)) == expected
    assert len([tokens for tokens in ahead if tokens and tokens[0] is not None]) > 20


def tokens_of(engine: Engine) -> list[list[int]]:
    """Tokens of six requests of which nothing needs the host."""
    for index in range(6):
        params = SamplingParams(max_tokens=10 + index, temperature=index % 2, seed=index)
        prompt = engine.accept(range(3 + index, 20 + index), params)
        engine.add(f"t{index}", prompt, params)
    while engine.has_unfinished:
        engine.step()
    return [engine.output(f"t{index}").outputs[0].token_ids for index in range(6)]


class Cards(TorchDispatchMode):
    """Notes the device of every tensor, by its storage, and fails where an operation mixes two. What
    is on none is the host's, of which a device gets copies.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_of: dict[int, str] = {}
        self._kept: list[Any] = []  # an address must not be used again

    def device_of(self, tensor: Tensor) -> str | None:
        if not tensor.numel():  # all of these have the same address
            return None
        return self._device_of.get(tensor.untyped_storage().data_ptr())

    def note(self, tensor: Tensor, device: str) -> Tensor:
        storage = tensor.untyped_storage()
        self._device_of[storage.data_ptr()] = device
        self._kept.append(storage)
        return tensor

    def moved(self, part: Any, device: str) -> Any:
        """A tensor, or several, on `device`."""
        if isinstance(part, tuple):
            return tuple(self.moved(each, device) for each in part)
        if not isinstance(part, Tensor) or self.device_of(part) == device:
            return part
        with _disable_current_modes():
            return self.note(part.clone(), device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = set()
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).index is not None:
            devices.add(str(asked))
            if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to):
                return self.note(func(*args, **kwargs), str(asked))
        if func is torch.ops.aten.copy_.default:  # what is copied stays where it is
            return func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs)):
            # one number may be of the host
            if isinstance(tensor, Tensor) and tensor.ndim and self.device_of(tensor):
                devices.add(str(self.device_of(tensor)))
        assert len(devices) <= 1, f"{func} takes tensors of {sorted(devices)}"
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if devices and isinstance(tensor, Tensor):
                self.note(tensor, *devices)
        return result


def name_devices(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stages on devices of their own, in name: 'cpu:0', 'cpu:1'."""

    def named(counts: Any, devices: Any) -> tuple[Stage, ...]:
        return stages_of(counts, [f"cpu:{index}" for index in range(len(devices))])

    def stream_on(stream: Residual, device: str) -> Residual:
        return Residual._make(cards.moved(tuple(stream), device))

    monkeypatch.setattr(open_model_module, "stages_of", named)
    monkeypatch.setattr(Residual, "on", stream_on)
    for module in (decoder_module, graphs_module):
        monkeypatch.setattr(module, "computing_on", lambda device: nullcontext())


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Devices in name, each of which has copies of a batch of the host."""
    cards = Cards()
    name_devices(cards, monkeypatch)

    def batch_on(batch: ForwardBatch, device: str) -> ForwardBatch:
        values = [cards.moved(getattr(batch, field.name), device) for field in fields(batch)]
        return ForwardBatch(*values)

    def prepared(slices: Any, groups: Any, *_: Any) -> ForwardBatch:
        return prepare(slices, groups)

    def moved(move: Mover, tensor: Tensor) -> Tensor:
        return cards.moved(tensor, str(move._device))

    monkeypatch.setattr(Mover, "_tensor", moved)
    monkeypatch.setattr(ForwardBatch, "on", batch_on)
    monkeypatch.setattr(runner_module, "prepare", prepared)
    return cards


def logits_of(folder: Path, cards: Cards | None, **options: Any) -> list[Tensor]:
    """Logits of a prompt in two chunks and of a token behind, by the reference kernels."""
    args = EngineArgs(
        model=str(folder), kernels="reference", max_model_len=64, threads=1, **options
    )
    with cards or nullcontext():
        opened = open_model(args)
        config = opened.resolve(args)
        model = opened.load(config)
        assert isinstance(model, Decoder)
        spec = opened.cache_spec(config)
        blocks = spec.blocks_of(64)
        kernels = opened.kernels(config)
        parts = (kernels, "cpu", model.rotaries, None, model.stages)
        pool = allocate_pool(spec, config.kv, blocks, *parts)
        runner = ModelRunner(model, pool, "cpu")
        found = []
        for begin, tokens in ((0, range(3, 16)), (13, range(30, 38)), (21, (5,))):
            found.append(runner.logits(tuple(tokens), begin, pool.whole))
    if cards is not None:
        for stage in model.stages:
            for index in stage.layers:
                for tensor in tensors_in((model.layers[index], pool.layers[index])):
                    assert cards.device_of(tensor) in (stage.device, None), index
                    assert stage.first == 0 or cards.device_of(tensor) or not tensor.numel()
        assert {cards.device_of(logits) for logits in found} == {model.stages[-1].device}
    return found


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow]) for name in VARIANTS],
)
def test_no_operation_has_tensors_of_two_devices(
    variant: str, tmp_path: Path, cards: Cards
) -> None:
    save_random(VARIANTS[variant], tmp_path / "model", torch.bfloat16)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "pipeline_parallel_size": 2}
    try:
        found = logits_of(tmp_path / "model", cards, **options)
    except ConfigError as error:  # such as 'use up to 1'
        pytest.skip(str(error))
    options["pipeline_parallel_size"] = 1
    for one, two in zip(logits_of(tmp_path / "model", None, **options), found, strict=True):
        assert torch.equal(one, two)


def test_cards_see_a_tensor_of_another_device(tmp_path: Path, cards: Cards) -> None:
    """The check itself: a layer that is left on the first device is found."""
    save_random(VARIANTS["llama"], tmp_path / "model", torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mover, "__call__", lambda move, part: part)
        with pytest.raises(AssertionError, match="takes tensors of"):
            logits_of(tmp_path / "model", cards, pipeline_parallel_size=2)


def captured(graphs: CudaGraphs, device: str | None, compute: Any) -> tuple[Any, Any]:
    """In the place of a graph: computes anew, into the tensors of the first time."""
    output = compute()

    def replay() -> None:
        again = compute()
        if isinstance(output, Residual):
            output.take(again)
        else:
            output.copy_(again)

    return SimpleNamespace(replay=replay), output


def captured_logits(folder: Path, stages: int) -> list[Tensor]:
    """Logits of steps of one, two and three sequences that grow."""
    args = EngineArgs(
        model=str(folder),
        kv_cache_dtype="fp8",
        max_model_len=64,
        threads=1,
        pipeline_parallel_size=stages,
    )
    opened = open_model(args)
    config = opened.resolve(args)
    model = opened.load(config)
    assert isinstance(model, Decoder)
    spec = opened.cache_spec(config)
    parts = (opened.kernels(config), "cpu", model.rotaries, None, model.stages)
    pool = allocate_pool(spec, config.kv, (24,) * len(spec.groups), *parts)
    steps = DecodeSteps(CudaGraphs(model, pool, 4), pool, 64, "cpu")
    found = []
    for step in range(40):
        slices = []
        for sequence in range(1 + step % 3):
            blocks = tuple(range(4 * sequence, 4 * sequence + 4))
            tables = (blocks,) * len(spec.groups)
            start = step // 3
            slices.append(SequenceSlice([step + sequence], start, tables, Logits.LAST))
        found.append(steps.run(slices).clone())
    return found


@pytest.mark.parametrize("variant", ["llama-biases", "gemma4-own-inputs"])
def test_a_captured_step_goes_from_stage_to_stage(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a graph would compute, and the copies between two as they are."""
    monkeypatch.setattr(CudaGraphs, "_captured", captured)
    monkeypatch.setattr(CudaGraphs, "bucket_of", lambda graphs, count: count)
    monkeypatch.setattr(CudaGraphs, "largest_first", False)
    fill = Buffers.fill

    def filled(buffers: Buffers, slices: Any) -> None:
        """With tokens of another block where there would be padding, which these kernels refuse."""
        apart = SequenceSlice([0], 0, ((20,),) * len(buffers._groups), Logits.LAST)
        fill(buffers, slices or [apart] * len(buffers._lengths))

    monkeypatch.setattr(Buffers, "fill", filled)
    save_random(VARIANTS[variant], tmp_path / "model", torch.bfloat16)
    with torch.inference_mode():
        expected = captured_logits(tmp_path / "model", 1)
        name_devices(Cards(), monkeypatch)
        # packed weights stay in the memory that was made for them
        monkeypatch.setattr(Mover, "_tensor", lambda move, tensor: tensor)
        found = captured_logits(tmp_path / "model", 2)
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one, two)
