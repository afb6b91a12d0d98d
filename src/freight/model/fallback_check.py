"""Self-check of a model that runs through transformers' modules, against eager attention.

Two sequences of random tokens go through the cache: the first in two steps, the second in the step
of the first one's second part. So the check fails for ignored positions, for anything that mixes
tokens outside attention, and for attention that sees too much or too little. The reference uses the
same modules, so no second model is held in memory.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from freight.cache.pool import LayerCache, allocate_pool
from freight.cache.spec import cache_spec
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.kernels.interface import KernelSet
from freight.model.config.model import ModelConfig
from freight.operands.batch import ForwardBatch
from freight.settings.engine import KVCacheConfig

# Allowed error of the logits, relative to their spread. Freight's attention sums in another order
# and rounds at other places, and FP8 activations can turn that into a full step of the format. A
# fault of positions or masks gives 0.3 and more.
TOLERANCE = {Format.FLOAT32: 1e-3, Format.FLOAT16: 2e-2, Format.BFLOAT16: 0.1}
TOLERANCE_FP8 = 0.25
_BLOCK = 16
_LENGTHS = (24, 16)
_FIRST = 13  # tokens of the first step: fewer than a block, so the second step continues one


class Checked(Protocol):
    """The model that is checked (`model.fallback.TransformersModel`)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kernels(self) -> KernelSet: ...

    def forward(self, batch: ForwardBatch, kv_cache: tuple[LayerCache, ...]) -> Tensor: ...

    def eager_logits(self, token_ids: Tensor) -> Tensor: ...


@torch.inference_mode()
def self_check(model: Checked, compute_format: Format, fp8: bool, device: str) -> float:
    """Compare the logits and return their error. Raises CheckpointError where it is larger than
    rounding explains, and for whatever a module raises.
    """
    try:
        error = _measure(model, compute_format, device)
    except CheckpointError:
        raise
    except Exception as fault:
        raise CheckpointError(
            f"{model.config.architecture} of transformers cannot be run over Freight's cache: {type(fault).__name__}: "
            f"{str(fault).splitlines()[0] if str(fault) else ''}"
        ) from fault
    allowed = TOLERANCE_FP8 if fp8 else TOLERANCE[compute_format]
    if not error <= allowed:
        raise CheckpointError(
            f"{model.config.architecture} of transformers does not compute the same over Freight's cache as with its "
            f"own attention: logits differ by {error:.2g} of their spread, and {allowed:g} is allowed in "
            f"{compute_format}{' with FP8 weights' if fp8 else ''}; use an engine that implements "
            f"{model.config.model_type!r}"
        )
    return error


def _measure(model: Checked, compute_format: Format, device: str) -> float:
    config = model.config
    kv = KVCacheConfig(compute_format, granularity=None, scale_source=None, scales=None)
    spec = cache_spec(kv, config, _BLOCK)
    blocks = spec.blocks_of(3 * _BLOCK)
    pool = allocate_pool(spec, kv, blocks, model.kernels, device)
    draw = torch.Generator("cpu").manual_seed(0)

    def tokens_of(count: int) -> Tensor:
        size = (count,)
        drawn = torch.randint(
            config.vocab_size, size, generator=draw, dtype=torch.int64, device="cpu"
        )
        return drawn.to(device)

    first, second = map(tokens_of, _LENGTHS)
    tables = ([0, 1], [2, 0])
    steps = [_batch([(first[:_FIRST], 0, tables[0])], len(blocks), device)]
    steps += [
        _batch([(first[_FIRST:], _FIRST, tables[0]), (second, 0, tables[1])], len(blocks), device)
    ]
    logits = torch.cat([model.forward(batch, pool.layers) for batch in steps])
    eager = torch.cat([model.eager_logits(tokens) for tokens in (first, second)])
    if logits.shape != eager.shape:
        raise CheckpointError(
            f"{config.architecture}: {list(logits.shape)} logits, and {list(eager.shape)} expected"
        )
    spread = (eager - eager.mean(-1, keepdim=True)).square().mean().sqrt()
    return float((logits - eager).square().mean().sqrt() / spread)


def _batch(parts: list[tuple[Tensor, int, list[int]]], groups: int, device: str) -> ForwardBatch:
    """Build a batch. Each part: tokens, the position of the first, the blocks of the sequence.
    Every row wants logits.
    """

    def tensor(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    positions = [range(start, start + len(tokens)) for tokens, start, _ in parts]
    starts = [0]
    for tokens, _, _ in parts:
        starts.append(starts[-1] + len(tokens))
    slots = [
        table[position // _BLOCK] * _BLOCK + position % _BLOCK
        for (_, _, table), row in zip(parts, positions, strict=True)
        for position in row
    ]
    return ForwardBatch(
        token_ids=torch.cat([tokens for tokens, _, _ in parts]),
        positions=tensor([position for row in positions for position in row], torch.int64),
        query_starts=tensor(starts, torch.int32),
        context_lens=tensor([row[-1] + 1 for row in positions], torch.int32),
        slots=(tensor(slots, torch.int64),) * groups,
        block_tables=(torch.tensor([t for _, _, t in parts], dtype=torch.int32, device=device),)
        * groups,
        logit_rows=tensor(list(range(starts[-1])), torch.int64),
    )
