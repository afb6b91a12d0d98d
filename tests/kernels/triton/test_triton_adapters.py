"""What adapters add to rows, in Triton, against float64 (tests/kernels/test_adapters.py)."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_adapters import (
    DTYPES,
    SLOTS,
    assert_near,
    assert_untouched,
    bank_of,
    exact,
    normal,
)
from torch import Tensor

from freight.kernels.triton import adapters as triton_adapters
from freight.kernels.triton.adapters import FEW_ROWS, PART, add_adapters
from freight.operands.adapters import NO_ADAPTER, AdapterBank


def on(device: str, bank: AdapterBank) -> AdapterBank:
    tensors = (bank.a, bank.b, bank.ranks, bank.scalings)
    return AdapterBank(*(tensor.to(device) for tensor in tensors), bank.ends)


def added(device: str, y: Tensor, x: Tensor, bank: AdapterBank, adapters: Tensor) -> Tensor:
    out = y.to(device, copy=True)
    assert add_adapters(out, x.to(device), on(device, bank), adapters.to(device)) is out
    return out.cpu()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize(
    ("in_features", "ends"), [(1, (1,)), (31, (7, 40, 45)), (PART + 50, (150, 171))]
)
def test_every_row_gets_what_its_adapter_adds(dtype, in_features, ends, device):
    torch.manual_seed(0)
    bank = bank_of(in_features, ends, dtype)
    adapters = torch.tensor([3, -1, 0, 0, 1, 0, 4, 0, 0, 2, -1, 0, 3] + [0] * 8, dtype=torch.int32)
    x = normal(len(adapters), in_features, dtype=dtype) / in_features**0.5
    y = normal(len(adapters), ends[-1], dtype=dtype)
    y[1, 0] = -0.0
    out = added(device, y, x, bank, adapters)
    assert_near(out, y, x, bank, adapters)
    assert_untouched(out, y, bank, adapters)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_nan_and_infinity_stay_in_their_rows_and_outputs(device):
    torch.manual_seed(0)
    bank = bank_of(50, (20, 41), torch.bfloat16)
    adapters = torch.tensor([0, 0, 0, 3, 0, -1], dtype=torch.int32)
    x = normal(6, 50, dtype=torch.bfloat16)
    x[1, 49] = torch.nan
    x[2, 0] = torch.inf
    x[5] = torch.nan
    y = normal(6, 41, dtype=torch.bfloat16)
    y[4, 40] = torch.inf
    bank.b[0, 3, 7] = torch.nan
    out = added(device, y, x, bank, adapters)
    results, _ = exact(y, x, bank, adapters)
    assert torch.equal(out.isnan(), results.isnan())
    assert torch.equal(out == torch.inf, results == torch.inf)
    assert torch.equal(out == -torch.inf, results == -torch.inf)


def test_rows_do_not_see_each_other(device, monkeypatch):
    """Few rows and many, of one adapter and of several; x may be columns of a larger tensor."""
    torch.manual_seed(0)
    count = 40
    bank = bank_of(PART + 20, (30, 50), torch.bfloat16)
    x = normal(count, PART + 60, dtype=torch.bfloat16)[:, 40:]
    y = normal(count, 50, dtype=torch.bfloat16)
    mixed = (torch.arange(count) * 5 % (SLOTS + 1) - 1).int()
    whole = added(device, y, x, bank, mixed)
    uniform = added(device, y, x, bank, torch.zeros_like(mixed))
    for row in (0, 1, 17, 39):
        this = slice(row, row + 1)
        assert torch.equal(added(device, y[this], x[this], bank, mixed[this]), whole[this])
        first = torch.zeros(1, dtype=torch.int32)
        assert torch.equal(added(device, y[this], x[this], bank, first), uniform[this])
    assert count <= FEW_ROWS
    monkeypatch.setattr(triton_adapters, "FEW_ROWS", 0)
    assert torch.equal(added(device, y, x, bank, mixed), whole)


def test_no_rows_and_no_adapters(device):
    bank = bank_of(40, (30,), torch.bfloat16)
    none = torch.full((3,), NO_ADAPTER, dtype=torch.int32)
    y = normal(3, 30, dtype=torch.bfloat16)
    x = torch.full((3, 40), torch.nan).bfloat16()
    assert torch.equal(added(device, y, x, bank, none), y)
    assert added(device, y[:0], x[:0], bank, none[:0]).shape == (0, 30)
