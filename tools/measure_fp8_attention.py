"""Measure what attention loses when its products multiply FP8, with the defining kernels.

    python tools/measure_fp8_attention.py [--keys 131072] [--queries 32]
    TRITON_INTERPRET=1 python tools/measure_fp8_attention.py --triton --keys 2048     the Triton kernels, on a CPU

Queries and keys are random, of unit variance, and for each query a few keys resemble it, as in
text; `peak` is how much. Keys and values are stored in E4M3 with one scale each. The error is ||out
- exact|| / ||exact|| of a query's output against float64, averaged: over the stored values, which
is the cost of the products alone, and over the given values, which includes the cache's rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freight.base.tables import markdown
from freight.cache.groups import Pages
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import amax, decode, scale_from_amax, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.reference import Fp8Products
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages

DIM = 128
BLOCK_SIZE = 64
PEAKS = (0.0, 1.0, 2.0)
RELATED = 8
Attention = Callable[[Tensor, KVPages, Sequences, AttentionCall], Any]


def reference_computes() -> dict[str, Attention]:
    return {
        "float32": reference.attention,
        "Q·Kᵀ in FP8": partial(reference.attention, products=Fp8Products.SCORES),
        "both in FP8": partial(reference.attention, products=Fp8Products.BOTH),
    }


def triton_computes() -> dict[str, Attention]:
    """Return the products that the GPU computes in FP8; in the interpreter, which has no FP8, both."""
    from freight.kernels.triton import paged
    from freight.kernels.triton.formats import current_target

    target = current_target()
    return {
        "16 bits": partial(paged.attention, target),
        "FP8": partial(paged.attention, target, fp8=True),
    }


def draw(keys: int, queries: int, peak: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q [queries, DIM] float16 and k, v [keys, DIM]."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = [torch.randn(n, DIM, generator=generator) for n in (queries, keys, keys)]
    q = q.half()
    if peak:
        for row in q.float():
            related = torch.randint(0, keys - queries, (RELATED,), generator=generator)
            k[related] = 0.3 * k[related] + peak * torch.linspace(0.5, 1.2, RELATED)[:, None] * row
    return q, k, v


def pages_of(k: Tensor, v: Tensor) -> KVPages:
    """Store one sequence in E4M3 pages, with one scale for all keys and one for all values."""
    blocks = -(-len(k) // BLOCK_SIZE)
    page = torch.zeros(blocks, BLOCK_SIZE, 1, DIM, dtype=torch_dtype(Format.E4M3FN))
    scales = [
        scale_from_amax(amax(x, (0, 1)), Format.E4M3FN).expand(1, DIM).contiguous() for x in (k, v)
    ]
    pages = KVPages(page, page.clone(), scales[0], scales[1], torch.zeros(2, dtype=torch.int64))
    reference.store_kv(k[:, None], v[:, None], torch.arange(len(k)), pages)
    return pages


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of the last len(q) positions in float64."""
    scores = q.double() @ k.double().T * DIM**-0.5
    position = torch.arange(len(k) - len(q), len(k))[:, None]
    probabilities: Tensor = scores.masked_fill(torch.arange(len(k)) > position, -torch.inf).softmax(
        -1
    )
    return probabilities @ v.double()


def error(out: Tensor, wanted: Tensor) -> str:
    return f"{float(((out - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean()):.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=131072)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--triton", action="store_true")
    args = parser.parse_args()
    computes = triton_computes() if args.triton else reference_computes()
    rows = [("peak", "products", "error over what is stored", "error over what was given")]
    for peak in PEAKS:
        q, k, v = draw(args.keys, args.queries, peak)
        pages = pages_of(k, v)
        blocks = list(range(len(pages.k)))
        batch = prepare(
            [SequenceSlice([0] * len(q), len(k) - len(q), (blocks,), Logits.NONE)],
            [Pages((0,), 0, None, BLOCK_SIZE)],
        )
        scales = (pages.k_scale, pages.v_scale)
        stored = [
            decode(page, scale).flatten(0, 2)[: len(k)]
            for page, scale in zip((pages.k, pages.v), scales, strict=True)
        ]
        over_stored = exact(q, *stored)
        over_given = exact(q, k, v)
        for name, attention in computes.items():
            out = attention(q[:, None], pages, batch.sequences(0), AttentionCall(DIM**-0.5))[
                :, 0
            ].double()
            rows.append((f"{peak:g}", name, error(out, over_stored), error(out, over_given)))
    print(markdown(rows, num_left=2))


if __name__ == "__main__":
    main()
