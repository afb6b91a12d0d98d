"""What an INT8 cache stores, against its definition in float64, and what its reader makes of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from freight.fp8.cast import decode, torch_dtype
from freight.fp8.formats import Format
from freight.kernels import reference
from freight.kernels.reference_set import REFERENCE
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages

BLOCK = 8


def make_pages(format: Format, num_blocks: int, heads: int, dim: int) -> KVPages:
    shape = (num_blocks, BLOCK, heads)
    pages = (torch.zeros((*shape, dim), dtype=torch_dtype(format)) for _ in "kv")
    scales = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in "kv")
    return KVPages(*pages, *scales, torch.zeros(2, dtype=torch.int64))


def stored(format: Format, k: Tensor, v: Tensor) -> KVPages:
    pages = make_pages(format, -(-len(k) // BLOCK), *k.shape[1:])
    reference.store_kv(k, v, torch.arange(len(k)), pages)
    return pages


def by_token(page: Tensor, count: int) -> np.ndarray:
    return page.double().flatten(0, 1)[:count].numpy()


def test_what_is_stored_is_the_definition() -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(50, 3, 38) * 10.0 ** torch.randint(-6, 6, (50, 3, 1)) for _ in "kv")
    pages = stored(Format.INT8, k, v)
    for values, page, scale in ((k, pages.k, pages.k_scale), (v, pages.v, pages.v_scale)):
        assert scale is not None
        x = values.double().numpy()
        largest = np.abs(x).max(-1, keepdims=True)
        factor = (largest / 127).astype(ml_dtypes.bfloat16).astype(np.float64)
        codes = by_token(page, 50)
        np.testing.assert_array_equal(by_token(scale, 50)[..., None], factor)
        exact = x / factor
        assert (np.abs(codes - exact) <= 0.5 + 1e-5).all()
        near_a_tie = (
            np.abs(np.abs(exact - np.floor(exact)) - 0.5) < 1e-4
        )  # the quotient is rounded to float32
        np.testing.assert_array_equal(codes[~near_a_tie], np.rint(exact)[~near_a_tie])
        assert (np.abs(codes).max(-1) == 127).all()
    assert pages.counters.tolist() == [0, 0]


def test_on_smooth_data_the_error_is_a_fraction_of_that_of_e4m3() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(64, 2, 64), torch.randn(64, 2, 64)
    errors = []
    for format in (Format.INT8, Format.E4M3FN):
        pages = stored(format, k, v)
        assert pages.k_scale is not None
        values = decode(pages.k, pages.k_scale.float()[..., None]).flatten(0, 1)
        errors.append(float((values - k).square().mean().sqrt()))
    assert errors[0] < 0.4 * errors[1]


def test_infinities_saturate_and_do_not_raise_the_scale() -> None:
    values = torch.tensor([1.0, -0.5, torch.inf, -torch.inf]).expand(1, 1, 4)
    pages = stored(Format.INT8, values, values)
    assert pages.k[0, 0, 0].tolist() == [127, -64, 127, -127]
    assert pages.counters.tolist() == [0, 4]


@pytest.mark.parametrize("part", ["k", "v"])
def test_nan_is_counted_and_stays_nan_in_what_reads_it(part: str) -> None:
    torch.manual_seed(0)
    values = {"k": torch.randn(20, 1, 16), "v": torch.randn(20, 1, 16)}
    values[part][12, 0, 3] = torch.nan
    pages = stored(Format.INT8, **values)
    assert pages.counters.tolist() == [1, 0]
    assert decode(getattr(pages, part)).isnan().sum() == 1
    table = torch.arange(3, dtype=torch.int32)[None]
    for length, spoiled in ((12, False), (13, True), (20, True)):
        ends = torch.tensor([length], dtype=torch.int32)
        sequences = Sequences(torch.tensor([0, 1], dtype=torch.int32), ends, table)
        out = REFERENCE.attention(torch.randn(1, 2, 16), pages, sequences, AttentionCall(0.25))
        assert bool(out.isnan().any()) == spoiled
