"""Launches that are compiled ahead of time: each calls a launcher with tensors of no memory, as a model would."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from freight.batch import ForwardBatch
from freight.fp8.formats import Format
from freight.fp8.quantize import torch_dtype
from freight.fp8.values import KVPages
from freight.kernels.triton import paged, store
from freight.kernels.triton.formats import Target

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pages(format: Format, scales: str, heads: int, dim: int) -> KVPages:
    shape = (64, 16, heads, dim)
    scale = {
        "unit": None,
        "static": empty(heads, dim, dtype=torch.float32),
        "token": empty(*shape[:3]),
    }[scales]
    page = empty(*shape, dtype=torch_dtype(format))
    return KVPages(page, page, scale, scale, empty(1, dtype=torch.int64))


def batch(rows: int, num_seqs: int) -> ForwardBatch:
    long, int32 = empty(rows, dtype=torch.int64), torch.int32
    tables = empty(num_seqs, 512, dtype=int32)
    return ForwardBatch(long, long, long, empty(num_seqs + 1, dtype=int32), empty(num_seqs, dtype=int32), tables, long)


def attend(
    format: Format, scales: str, heads: int, group: int, dim: int, rows: int, window: int | None, target: Target
) -> None:
    q = empty(rows, heads * group, dim)
    paged.attention(target, q, pages(format, scales, heads, dim), batch(rows, 64), 0.1, window)


def keep(format: Format, scales: str, dim: int, rows: int, target: Target) -> None:
    merged = empty(rows, 48, dim)
    store.store_kv(
        target, merged[:, 32:40], merged[:, 40:], empty(rows, dtype=torch.int64), pages(format, scales, 8, dim)
    )


CASES: dict[str, Callable[[Target], object]] = {
    "prefill fp8 static": partial(attend, Format.E4M3FN, "static", 8, 4, 128, 8192, None),
    "prefill fp8 token": partial(attend, Format.E4M3FN, "token", 8, 4, 128, 8192, None),
    "prefill fnuz static": partial(attend, Format.E4M3FNUZ, "static", 8, 4, 128, 8192, None),
    "prefill e5m2": partial(attend, Format.E5M2, "unit", 8, 4, 128, 8192, None),
    "prefill bf16": partial(attend, Format.BFLOAT16, "unit", 8, 4, 128, 8192, None),
    "prefill bf16 window": partial(attend, Format.BFLOAT16, "unit", 8, 4, 128, 8192, 4096),
    "prefill fp8 static dim 64": partial(attend, Format.E4M3FN, "static", 8, 7, 64, 8192, None),
    "prefill fp8 static dim 256": partial(attend, Format.E4M3FN, "static", 4, 2, 256, 8192, None),
    "store static": partial(keep, Format.E4M3FN, "static", 128, 8192),
    "store token": partial(keep, Format.E4M3FN, "token", 128, 8192),
    "store token few": partial(keep, Format.E4M3FN, "token", 128, 64),
    "store fnuz static": partial(keep, Format.E4M3FNUZ, "static", 128, 8192),
    "store bf16": partial(keep, Format.BFLOAT16, "unit", 128, 8192),
}
