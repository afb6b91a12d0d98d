"""Caches that no kernel has: keys and values rounded to fewer bits as they are stored, in pages of 16 bits.

What is simulated is the rounding, as a cache would do it: once, before anything reads a token's keys and
values, with a scale for each token and head from the largest magnitude, or for each group of their
channels. Memory and speed are those of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from freight.cache.pool import AngleTables, KVPool, PagedKV, less_bias_pages
from freight.engine.runner import ModelRunner
from freight.fp8.cast import amax, decode, encode, token_scale
from freight.fp8.formats import Format
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import read_slots, write_slots
from freight.operands.rotary import Rotary

import torch  # isort: skip  (after freight, which sets the waiting of threads)
from torch import Tensor  # isort: skip

Rounding = Callable[[Tensor], Tensor]  # float32 [rows, num_kv_heads, head_dim] -> the same


def to_integers(values: Tensor, bits: int, group: int | None = None) -> Tensor:
    """Round to integers of `bits`, symmetric, with a scale for each vector or each `group` of its
    channels.
    """
    size = values.shape[-1] if group is None else group
    vectors = values.unflatten(-1, (-1, size))
    largest = 2 ** (bits - 1) - 1
    size_of = vectors.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale = size_of / largest
    codes = (vectors / scale).round().clamp(-largest, largest)
    return (codes * scale).flatten(-2)


def to_e4m3(values: Tensor, measured: bool) -> Tensor:
    """Round to E4M3, with a scale for each vector if it is `measured`, else with 1.0."""
    scale: Tensor | None = None
    if measured:
        scale = token_scale(amax(values, -1), Format.E4M3FN).float()[..., None]
    return decode(encode(values, 1.0 if scale is None else scale, Format.E4M3FN), scale)


SIMULATED: Mapping[str, Rounding] = {
    "token-biased": partial(to_e4m3, measured=True),
    "unit-biased": partial(to_e4m3, measured=False),
    "int7": partial(to_integers, bits=7),
    "int6": partial(to_integers, bits=6),
    "int5": partial(to_integers, bits=5),
    "int4-32": partial(to_integers, bits=4, group=32),
    "int4": partial(to_integers, bits=4),
    "int3-32": partial(to_integers, bits=3, group=32),
}


# of keys as they are projected; the others are of keys without large biases, as Freight's own
# 8-bit caches are
BIASED = ("token-biased", "unit-biased")


@dataclass(frozen=True, kw_only=True)
class RoundedKV(PagedKV):
    """A layer's cache whose keys and values are rounded as they are stored."""

    rounding: Rounding

    def store(self, qkv: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        q = super().store(qkv, rotary, batch)
        slots = batch.slots[self.group]
        slots = slots[slots >= 0]
        for page in (self.pages.k, self.pages.v):
            stored = read_slots(page, slots)
            write_slots(page, slots, self.rounding(stored.float()).to(stored.dtype))
        return q


def with_rounding(pool: KVPool, rounding: Rounding) -> KVPool:
    """`pool`, which is not quantized, with every layer's keys and values rounded."""
    layers = {}
    for index, kv in pool.paged.items():
        assert not kv.pages.v_in_k, "values of latents are part of their keys"
        layers[index] = RoundedKV(kv.pages, kv.kernels, kv.group, kv.shared, rounding=rounding)
    return pool.with_layers(layers)


def rounded_runner(runner: ModelRunner, name: str) -> ModelRunner:
    """`runner` over the simulated cache `name`. Its steps are not replayed: what was captured stores
    without rounding.
    """
    pool = runner.pool if name in BIASED else _less_bias(runner)
    return replace(runner, pool=with_rounding(pool, SIMULATED[name]), captured=None)


def _less_bias(runner: ModelRunner) -> KVPool:
    """The pool, with keys stored without large biases."""
    tables = AngleTables()
    layers = {}
    for index, kv in runner.pool.paged.items():
        pages = less_bias_pages(kv.pages, runner.model.rotaries[index], tables)
        layers[index] = replace(kv, pages=pages)
    return runner.pool.with_layers(layers)
