"""Embedding lookup and the row-wise operations of some model families, in plain torch.

They are LayerNorm, activations without a gate, gates of results, what adapters add, and the norms of
separate columns.
As in `reference.py`, a row's result depends on that row alone. Operations compute in float32 and
round once, to their input's dtype, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from freight.kernels.reference import gelu, linear, rms_norm
from freight.operands.activation import Activation, GateFunction
from freight.operands.adapters import AdapterBank
from freight.operands.packed import JoinedPart, PackedWeight
from freight.operands.weight import Weight


def lookup(
    table: Tensor,
    ids: Tensor,
    multiplier: float = 1.0,
    base: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return (base + table[ids] * multiplier) * factor; without `base` nothing is added.

    table: [table_rows, size]; ids: [rows] int64; base: [rows, size]. The result has base's dtype,
    or table's without `base`; the rows, each product and the sum are rounded to it.
    """
    rows = table[ids] if base is None else table[ids].to(base.dtype)
    if multiplier != 1:
        rows = rows * multiplier
    if base is not None:
        rows = base + rows
    return rows if factor == 1 else rows * factor


def packed_rows(
    table: PackedWeight,
    ids: Tensor,
    dtype: torch.dtype,
    multiplier: float = 1.0,
    base: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return (base + table[ids] * multiplier) * factor, as `lookup` in the decoded table, rounded to
    `dtype`.

    table: [table_rows, size] in blocks; ids: [rows] int64; base: [rows, size]
    """
    assert isinstance(table, Weight)
    rows = replace(table, data=table.data[ids]).dequantized().to(dtype)
    every = torch.arange(len(ids), dtype=torch.int64, device=ids.device)
    return lookup(rows, every, multiplier, base, factor)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the LayerNorm of x over the last dimension (Ba et al. 2016), rounded once, at the end.

    It is (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) * weight + bias.
    """
    values = x.float()
    values = values - values.mean(-1, keepdim=True)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def add_layer_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    consumer: PackedWeight | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + delta in x's dtype (x if delta is None), and the `layer_norm` of that.

    x, delta: [rows, size].
    """
    x = x if delta is None else x + delta
    return x, layer_norm(x, weight, bias, eps)


def activated(x: Tensor, activation: Activation, consumer: PackedWeight | None = None) -> Tensor:
    """Return activation(x), element by element; NaN stays NaN. GELU is computed in float32."""
    if activation is Activation.GELU:
        return gelu(x.float()).to(x.dtype)
    positive = torch.relu(x)
    return positive.square() if activation is Activation.RELU_SQUARED else positive


def gate(x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
    """Return x * function(logits) of [rows, size] and [rows or 1, groups].

    Computed in float64, so that no factor depends on its neighbours.
    """
    factors = logits.double()
    if function is GateFunction.SOFTPLUS:
        factors = F.softplus(factors)
    elif function is GateFunction.SIGMOID:
        factors = torch.sigmoid(factors)
    return (x.double() * factors.repeat_interleave(x.shape[1] // logits.shape[1], 1)).to(x.dtype)


def add_adapters(y: Tensor, x: Tensor, bank: AdapterBank, adapters: Tensor) -> Tensor:
    """Add to each row of y what its adapter adds, in place; return y (`KernelSet.add_adapters`).

    y: [rows, out_features]; x: [rows, in_features]; adapters: [rows] int32
    """
    for slot in torch.unique(adapters).tolist():
        if not 0 <= slot < bank.num_slots:
            continue
        rows = (adapters == slot).nonzero().flatten()
        inputs = x[rows].float()
        for part, (begin, end) in enumerate(bank.outputs):
            rank = int(bank.ranks[slot, part])
            if not rank:
                continue
            a = Weight(bank.a[slot, part, :rank].float())
            b = Weight(bank.b[slot, :rank, begin:end].t().float().contiguous())
            added = linear(linear(inputs, a), b) * bank.scalings[slot, part]
            y[rows, begin:end] = (y[rows, begin:end].float() + added).to(y.dtype)
    return y


def join(parts: Sequence[JoinedPart], eps: float = 0.0) -> Tensor:
    """Concatenate the columns of all parts.

    A part is x, [rows, size] or [rows, heads, size], and None or the weight [group] of the
    `rms_norm` of each `group` columns.
    """
    columns = []
    for x, weight in parts:
        if weight is not None:
            x = rms_norm(x.unflatten(-1, (-1, len(weight))), weight, eps).flatten(-2)
        columns.append(x)
    return torch.cat(columns, -1)
