"""Requests through the engine, step by step, with the time of each: what all benchmarks of the
engine have in common.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from freight.base.terminal import OnProgress
from freight.engine.build import start_engine
from freight.engine.engine import Engine
from freight.engine.prepare import SequenceSlice
from freight.engine.runner import ModelRunner, StepRows
from freight.fp8.formats import Format
from freight.model.architectures import tensor_names
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.decoder import LanguageModel
from freight.model.loader import tensor_shapes
from freight.model.open import OpenModel
from freight.model.sizes import ONLINE, LinearOf, int4_online
from freight.sampling import SamplingParams
from freight.settings.engine import EngineConfig


@dataclass(frozen=True)
class TimedRows(StepRows):
    """Rows whose logits are timed, in seconds, as the host sees it; the token of `following`, where
    there is one for each row, is by far the most likely.
    """

    seconds: list[float] = field(default_factory=list)
    following: Sequence[int] = ()

    def logits(self, rows: Sequence[int]) -> Tensor:
        begin = time.perf_counter()
        logits = super().logits(rows)
        if self.following:
            for index, row in enumerate(rows):
                logits[index, self.following[row]] = 1e30
        self.seconds.append(time.perf_counter() - begin)
        return logits


@dataclass(frozen=True)
class TimedRunner(ModelRunner):
    """A runner that records how long each part of a step took, in seconds, as the host sees it:
    layers, then logits.

    Captured steps are replayed as they are without it; theirs is one part. `text`: the tokens by
    position that all sequences get, whatever the model computes; empty: those that it computes.
    """

    seconds: list[float] = field(default_factory=list)
    text: Sequence[int] = ()

    def run(self, slices: Sequence[SequenceSlice], tokens: Tensor | None = None) -> StepRows:
        begin = time.perf_counter()
        rows = super().run(slices, tokens)
        self.seconds.append(time.perf_counter() - begin)
        following = []
        if self.text:
            for part in slices:
                end = part.start + len(part.token_ids)
                for position in range(end - part.num_logit_rows, end):
                    following.append(self.text[min(position + 1, len(self.text) - 1)])
        return TimedRows(**vars(rows), seconds=self.seconds, following=following)


@dataclass(frozen=True)
class StepRecord:
    """One step: its time and the model's part of it, how many requests got a token, how many ran,
    the share of the cache's blocks in use, and how many tokens were drawn: with drafts a request may
    get several."""

    seconds: float
    model_seconds: float
    num_sampled: int
    num_running: int
    cache_share: float
    num_tokens: int


def start(
    opened: OpenModel, decoder: LanguageModel | None = None, **changes: Any
) -> tuple[Engine, EngineConfig]:
    """Start an engine without a tokenizer, with `changes` of its arguments; without drafts unless
    they ask for them, so that a step is the same from run to run. `decoder`: weights to share.
    """
    args = replace(opened.args.without_drafts(), skip_tokenizer_init=True, **changes)
    return start_engine(replace(opened, args=args), decoder=decoder)


def counted(total: int, on_progress: OnProgress) -> Iterator[int]:
    """Yield 0 … `total` - 1 and report each before it is used."""
    for done in range(total):
        on_progress(done, total)
        yield done
    on_progress(total, total)


def random_prompt(length: int, vocab_size: int, numbers: random.Random) -> list[int]:
    return [numbers.randrange(vocab_size) for _ in range(length)]


def greedy(length: int) -> SamplingParams:
    """Exactly `length` tokens, token ids only."""
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)


def drive(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    text: Sequence[int] = (),
) -> list[StepRecord]:
    """Add all requests at once and step until they are done; then forget them. `text`: that of
    `TimedRunner`.
    """
    ids = [f"bench {index}" for index in range(len(prompts))]
    for request_id, prompt, sampling in zip(ids, prompts, params, strict=True):
        engine.add(request_id, engine.intake.accept(prompt, sampling), sampling)
    records = []
    scheduler = engine.scheduler
    runner = TimedRunner(**(vars(engine.runner) | {"text": text}))
    engine.runner = runner
    unfinished = len(ids)
    while engine.has_unfinished:
        runner.seconds.clear()
        begin = time.perf_counter()
        deltas = engine.step()
        seconds = time.perf_counter() - begin
        outputs = chain.from_iterable(delta.outputs for delta in deltas)
        record = StepRecord(
            seconds=seconds,
            model_seconds=sum(runner.seconds),
            num_sampled=len(deltas),
            num_running=unfinished - scheduler.num_waiting,  # with those that end here
            cache_share=engine.cache.used_share,
            num_tokens=sum(len(output.token_ids) for output in outputs),
        )
        records.append(record)
        unfinished = scheduler.num_running + scheduler.num_waiting
    for request_id in ids:
        engine.release(request_id)
    return records


def full_steps(records: Sequence[StepRecord], batch_size: int) -> list[int]:
    """Return the indices of the steps in which every sequence of a batch got a token."""
    return [index for index, record in enumerate(records) if record.num_sampled == batch_size]


def token_rate(records: Sequence[StepRecord]) -> float:
    """Return the tokens per second of steps."""
    return sum(record.num_tokens for record in records) / sum(record.seconds for record in records)


def occupancy(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Means over time: of the requests that run, and of the share of the cache's blocks in use."""
    seconds = sum(record.seconds for record in records)
    running = sum(record.seconds * record.num_running for record in records)
    in_use = sum(record.seconds * record.cache_share for record in records)
    return running / seconds, in_use / seconds


def weight_bytes(
    model: ModelConfig,
    compute_format: Format,
    weight_format: Format,
    num_rows: int = 1,
    linear_of: LinearOf | None = None,
) -> int:
    """Return bytes of weights that a step of `num_rows` tokens reads, scales included. Of an
    embedding that is not the head, and of tables of positions and per-layer inputs, only rows are
    read, which are not counted; of experts, as many as are chosen on average if all are equally
    likely. `linear_of`: how each module's matrix is quantized; None: all are in `weight_format`.
    """
    online = ONLINE if weight_format.is_quantized else None

    def matrix_bytes(module: str, values: int, outputs: int) -> int:
        scheme = linear_of(module) if linear_of else online
        if scheme is None:
            return values * compute_format.bytes
        if scheme.blocks is not None:
            if not scheme.blocks.is_multiplied:
                return values * compute_format.bytes
            return scheme.blocks.row_bytes(values)
        if scheme.four is not None:
            return scheme.four.stored_bytes(values)
        return values * weight_format.bytes + outputs * Format.FLOAT32.bytes

    names = tensor_names(model)
    unread = {names.positions, names.per_layer_table}
    if not model.tie_word_embeddings:
        unread.add(names.embedding)
    plain = {name for name in names.outer if not _in_blocks(name, linear_of)}
    total = 0
    for name, shape in tensor_shapes(model).items():
        size = math.prod(shape)
        if name in unread:
            continue
        if len(shape) == 1 or name.endswith("bias") or name in plain:
            total += size * compute_format.bytes
        else:
            outputs = shape[0] if len(shape) == 2 else shape[0] * shape[2]  # of all experts
            total += matrix_bytes(name.removesuffix(".weight"), size, outputs)
    for index, layer in enumerate(model.layers):
        moe = layer.feed_forward
        if not isinstance(moe, MoEConfig):
            continue
        channels = moe.expert_channels(model.hidden_size)
        inner = sum(moe.up_sizes)
        prefix = names.layer.format(index) + names.expert.format(0)
        expert = matrix_bytes(prefix + names.expert_gate_up[0], inner * channels, inner)
        down = moe.intermediate_size * channels
        expert += matrix_bytes(prefix + names.expert_down, down, channels)
        left_out = (1 - moe.routing.top_k / moe.num_experts) ** num_rows
        total -= round(moe.num_experts * expert * left_out)
    return total


def _in_blocks(name: str, linear_of: LinearOf | None) -> bool:
    """Return whether a tensor is a matrix in a GGUF file's blocks."""
    scheme = linear_of(name.removesuffix(".weight")) if linear_of else None
    return scheme is not None and scheme.blocks is not None


def linears_of(opened: OpenModel, config: EngineConfig) -> LinearOf | None:
    """Return how each module's matrix is quantized; None: all are in `config.weight_format`."""
    if config.int4:
        return int4_online
    if opened.scheme.weight_format is None and not opened.multiplies_blocks(config):
        return None
    return opened.scheme.linear


def describe_run(
    opened: OpenModel, engine: Engine, config: EngineConfig, name: str
) -> dict[str, Any]:
    """Return what ran, for the JSON of every benchmark of the engine."""
    kv = config.kv
    return {
        "model": name,
        "kernels": engine.runner.model.kernels.name,
        "device": config.device,
        "threads": torch.get_num_threads(),
        "dtype": str(config.compute_format),
        "weight_dtype": opened.weight_dtype(config),
        "int8_activations": config.int8_activations,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "most_drafts": engine.scheduler.most_drafts,
        "kv_cache": {
            **kv.names(),
            "bytes_per_token": engine.runner.pool.spec.bytes_per_token,
        },
    }
