"""StoredTokens: the bytes are those of the engine's pages, and of ml_dtypes; what is kept stays as
it was stored.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refuses
from tests.shares import examples
from torch import Tensor

from freight.cache.contiguous import Storage, StoredTokens
from freight.errors import ConfigError
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels.reference import store_kv
from freight.operands.kv_pages import KVPages

BATCH, HEADS, TOKENS, DIM = 2, 3, 21, 16
NUMPY: dict[Format, Any] = {
    Format.E4M3FN: ml_dtypes.float8_e4m3fn,
    Format.E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    Format.E5M2: ml_dtypes.float8_e5m2,
}
F32 = torch.float32


def states(tokens: int = TOKENS, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Magnitudes from 1e-3 to 1e3, one vector of zeros, an infinity and a NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((BATCH, HEADS, tokens, DIM), generator=generator, dtype=F32)
    x *= 10.0 ** torch.randint(-3, 4, (BATCH, HEADS, tokens, 1), generator=generator)
    if tokens > 2:
        x[0, 0, 0], x[1, 2, 1, 3], x[1, 1, 2, 5] = 0.0, torch.inf, torch.nan
    return x.to(dtype)


def storage(format: Format, kind: str) -> Storage:
    scale = (
        torch.rand((HEADS, DIM), generator=torch.Generator().manual_seed(5), dtype=F32) * 0.1 + 0.01
    )
    return Storage(format, kind == "token", scale if kind == "static" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["token", "static", "unit"])
@pytest.mark.parametrize("format", NUMPY, ids=str)
def test_bytes_and_scales_are_those_of_the_engines_pages(
    format: Format, kind: str, dtype: torch.dtype
) -> None:
    """`store_kv` is the definition of what all kernels store. Tokens come in three parts here."""
    x, how = states(dtype=dtype), storage(format, kind)
    tokens = StoredTokens(how, x)
    for part in x.split([8, 1, TOKENS - 9], 2):
        tokens.append(part)
    page = torch.zeros((TOKENS, 1, HEADS, DIM), dtype=torch.uint8).view(torch_dtype(format))
    for row in range(BATCH):
        scale = torch.zeros((TOKENS, 1, HEADS), dtype=torch.bfloat16) if how.dynamic else how.scale
        pages = KVPages(page, page.clone(), scale, scale, torch.zeros(2, dtype=torch.int64))
        keys = x[row].transpose(0, 1)
        store_kv(keys, keys, torch.arange(TOKENS), pages)
        assert torch.equal(
            tokens.stored.view(torch.uint8)[row], pages.k.view(torch.uint8)[:, 0].transpose(0, 1)
        )
        if how.dynamic:
            assert tokens.scale is not None
            assert pages.k_scale is not None
            assert torch.equal(tokens.scale[row], pages.k_scale[:, 0].transpose(0, 1))


@pytest.mark.parametrize("format", NUMPY, ids=str)
def test_bytes_and_values_are_those_of_ml_dtypes(format: Format) -> None:
    """Computed apart from Freight: amax / max in float32, rounded to bfloat16; then the division,
    clipped.
    """
    x = states()
    tokens = StoredTokens(storage(format, "token"), x)
    tokens.append(x)
    exact = x.numpy()
    finite = np.where(np.isfinite(exact), np.abs(exact), 0)
    largest = np.float32(ml_dtypes.finfo(NUMPY[format]).max)
    scale = np.maximum(finite.max(-1) / largest, np.float32(2.0**-126)).astype(ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)[..., None]
    with np.errstate(invalid="ignore"):
        stored = np.clip(exact / wide, -largest, largest).astype(NUMPY[format])
    is_nan = np.isnan(exact)
    assert np.array_equal(
        tokens.stored.view(torch.uint8).numpy()[~is_nan], stored.view(np.uint8)[~is_nan]
    )
    assert tokens.scale is not None
    assert np.array_equal(tokens.scale.view(torch.uint16).numpy(), scale.view(np.uint16))
    assert np.array_equal(
        tokens.read(F32).numpy(), stored.astype(np.float32) * wide, equal_nan=True
    )
    assert is_nan.sum() == 1


@settings(max_examples=examples(60))
@given(data=st.data(), kind=st.sampled_from(["token", "static", "unit"]))
def test_what_is_kept_is_never_changed(data: st.DataObject, kind: str) -> None:
    """However tokens come, go and move, what is read is what was stored at first: nothing is
    rounded twice.
    """
    how = storage(Format.E4M3FN, kind)
    tokens, expected = StoredTokens(how, states(0)), states(0)
    for seed in range(data.draw(st.integers(1, 8))):
        new = states(data.draw(st.integers(1, 70)), seed=seed)[:1].expand(
            expected.shape[0], -1, -1, -1
        )
        alone = StoredTokens(how, new)
        alone.append(new)
        tokens.append(new)
        expected = torch.cat((expected, alone.read(F32)), 2)
        if data.draw(st.booleans()):
            last, but = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 20))
            tokens.keep(last, but)
            expected = expected[:, :, : max(0, expected.shape[2] - but)]
            expected = expected[:, :, max(0, expected.shape[2] - last) :]
        if data.draw(st.booleans()):
            rows = torch.tensor(
                data.draw(st.lists(st.integers(0, expected.shape[0] - 1), min_size=1, max_size=3))
            )
            tokens.select(rows)
            expected = expected[rows]
        assert tokens.num_tokens == expected.shape[2]
        assert torch.equal(tokens.read(F32).nan_to_num(7.0), expected.nan_to_num(7.0))
        assert (
            tokens.num_bytes
            <= expected.shape[0] * HEADS * (DIM + 2) * (expected.shape[2] * 17 / 16 + 48) + 4 * 48
        )


@pytest.mark.parametrize("count", [1, 3])
def test_a_window_moves_through_its_memory(count: int) -> None:
    """Memory runs out behind a window again and again, as it moves on by a few tokens."""
    tokens, expected = StoredTokens(storage(Format.E4M3FN, "token"), states(0)), states(0)
    for seed in range(60):
        new = states(count, seed=seed)
        alone = StoredTokens(storage(Format.E4M3FN, "token"), new)
        alone.append(new)
        tokens.append(new)
        expected = torch.cat((expected, alone.read(F32)), 2)[:, :, -12:]
        tokens.keep(12)
        assert torch.equal(tokens.read(F32).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_memory_grows_by_a_part_and_is_given_back() -> None:
    tokens = StoredTokens(storage(Format.E4M3FN, "token"), states(0))
    moved, one = set(), states(1)
    for _ in range(1024):
        tokens.append(one)
        moved.add(tokens.stored.data_ptr())
    assert len(moved) < 64  # not for every token
    per_token = BATCH * HEADS * (DIM + 2)
    assert 1024 * per_token <= tokens.num_bytes <= 1024 * per_token * 33 / 32 + 16 * per_token
    tokens.keep(15)
    assert tokens.num_bytes <= 48 * per_token


def test_scales_of_another_model_are_refused() -> None:
    wide = torch.zeros((BATCH, HEADS, 0, 2 * DIM))
    with refuses(ConfigError, "[3, 16]", "[3, 32]", "KV heads"):
        StoredTokens(storage(Format.E4M3FN, "static"), wide)


def test_gradients_end_here() -> None:
    x = states().requires_grad_()
    tokens = StoredTokens(storage(Format.E4M3FN, "token"), x)
    tokens.append(x)
    assert not tokens.read(F32).requires_grad
