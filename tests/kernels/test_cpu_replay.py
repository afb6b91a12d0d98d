"""Several C calls at once: the same bits as one by one, and the first failure ends them under its
own name.
"""

from __future__ import annotations

import ctypes

import torch
from tests.refusals import refuses

from freight.errors import KernelError
from freight.kernels.cpu import library
from freight.kernels.cpu.interface import (
    FORMATS,
    FUNCTIONS,
    FreightAttention,
    FreightCall,
    FreightGated,
    FreightNorm,
    replay,
)


def norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> FreightNorm:
    pointers = (x.data_ptr(), None, weight.data_ptr(), None, None, out.data_ptr())
    return FreightNorm(*pointers, *x.shape, FORMATS[x.dtype], FORMATS[x.dtype], 0, 1e-6, 1)


def gated(gate_up: torch.Tensor, out: torch.Tensor) -> FreightGated:
    return FreightGated(
        gate_up.data_ptr(), out.data_ptr(), *out.shape, FORMATS[out.dtype], 0, 0.0, 1
    )


def calls_of(*calls: tuple[str, ctypes.Structure]) -> ctypes.Array[FreightCall]:
    """Calls with the structs' addresses; the caller keeps the structs."""
    return (FreightCall * len(calls))(
        *((ctypes.addressof(one), FUNCTIONS.index(name)) for name, one in calls)
    )


def test_replayed_calls_follow_one_another():
    functions = library.load().functions
    x, weight = torch.randn(3, 64), torch.rand(64)
    normed, product = torch.empty(3, 64), torch.empty(3, 32)
    first, second = norm(x, weight, normed), gated(normed, product)
    functions.freight_add_rms_norm(first)
    functions.freight_gated(second)
    expected = product.clone()
    normed.zero_()
    product.zero_()
    replay(functions, calls_of(("add_rms_norm", first), ("gated", second)))
    assert torch.equal(product, expected)


def test_a_failure_ends_the_replay_and_has_the_name_of_its_function():
    functions = library.load().functions
    x, before, after = torch.randn(3, 64), torch.zeros(3, 32), torch.zeros(3, 32)
    starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    short = FreightAttention(
        query_starts=starts.data_ptr(),
        context_lens=lengths.data_ptr(),
        num_seqs=1,
        num_heads=1,
        num_kv_heads=1,
    )
    first, last = gated(x, before), gated(x, after)
    calls = calls_of(("gated", first), ("attention", short), ("gated", last))
    with refuses(KernelError, "freight_attention", "more queries than keys"):
        replay(functions, calls)
    assert before.any()
    assert not after.any()
