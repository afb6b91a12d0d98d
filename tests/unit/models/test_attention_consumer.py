"""Attention's output goes to the o projection as the kernels return it for that, unless something
stands between.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freight.cache.pool import PagedKV
from freight.kernels.reference_set import REFERENCE
from freight.lab.evaluate.stored_error import Probe, ProbedKV
from freight.model.layers.linear import Linear
from freight.model.mixers.attention.layer import Attention, OutputGate
from freight.operands.activation import GateFunction
from freight.operands.attention import AttentionCall
from freight.operands.weight import Weight

QUANTIZED = object()
HEADS, DIM = 2, 4


class Output:
    """An o projection, which returns its input."""

    consumer = "o"

    def __call__(self, x: Any, adapters: Tensor | None) -> Any:
        return x


class Kernels:
    """A set that quantizes for a consumer, whose attention returns q."""

    def attention(
        self,
        q: Tensor,
        pages: Any,
        sequences: Any,
        call: AttentionCall,
        consumer: Any = None,
    ) -> Any:
        assert consumer in (None, "o")
        return q if consumer is None else QUANTIZED

    def rotate_store(self, qkv: Tensor, *_: Any) -> Tensor:
        return qkv.view(-1, HEADS, DIM)


class Batch:
    positions, slots, adapters = None, (None,), None

    def sequences(self, group: int) -> None:
        return None


def attend(gate: OutputGate | None, probe: Probe) -> Any:
    x = torch.arange(3 * HEADS * DIM, dtype=torch.float32).view(3, -1)
    kv: Any = ProbedKV(None, Kernels(), 0, probe=probe)  # type: ignore[arg-type]
    layer = Attention(lambda x, adapters: x, Output(), None, AttentionCall(1.0), output_gate=gate)  # type: ignore[arg-type]
    return layer(x, Batch(), kv)  # type: ignore[arg-type]


def test_kernels_quantize_for_the_projection():
    assert attend(None, Probe(1)) is QUANTIZED


def test_a_gate_of_heads_takes_a_tensor():
    gate = OutputGate(
        Linear(Weight(torch.zeros(HEADS, HEADS * DIM)), None, REFERENCE),
        GateFunction.SIGMOID,
        REFERENCE,
    )
    expected = torch.arange(3 * HEADS * DIM, dtype=torch.float32).view(3, -1) / 2
    assert torch.equal(attend(gate, Probe(1)), expected)


def test_what_is_compared_with_a_16_bit_run_is_not_quantized(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProbedKV, "store", PagedKV.store)
    probe = Probe(1, rows=torch.tensor([1], dtype=torch.int64))
    assert attend(None, probe).shape == (3, HEADS * DIM)
    assert probe.outputs[0].shape == (1, HEADS, DIM)
