"""Embedding lookup and the row-wise operations of some model families (csrc/rowwise.cpp).

They are LayerNorm, activations without a gate, gates of results, and columns that are normed and
concatenated. A row's bits depend on that row alone. Results differ from the reference's in the
order of a sum or the last bits of an exponential, before the same roundings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freight.kernels.cpu.arguments import address
from freight.kernels.cpu.interface import (
    FORMATS,
    GATE_FUNCTIONS,
    UNGATED_ACTIVATIONS,
    FreightActivated,
    FreightGate,
    FreightLayerNorm,
    FreightLookup,
    FreightPart,
)
from freight.kernels.cpu.library import Library
from freight.operands.activation import Activation, GateFunction
from freight.operands.packed import JoinedPart, PackedWeight


def add_layer_norm(
    library: Library,
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    consumer: PackedWeight | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `KernelSet.add_layer_norm`.

    x, delta: [rows, size]; weight, bias: [size]; all of one dtype
    """
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)
    assert weight.shape == bias.shape == x.shape[1:]
    assert weight.dtype == bias.dtype == x.dtype
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    rows, size = x.shape
    total = x if delta is None else library.empty((rows, size), x.dtype)
    out = library.empty((rows, size), x.dtype)
    library.functions.freight_add_layer_norm(
        FreightLayerNorm(
            x.data_ptr(),
            address(delta),
            address(weight),
            address(bias),
            total.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            FORMATS[x.dtype],
            eps,
            torch.get_num_threads(),
        )
    )
    return total, out


def activated(
    library: Library, x: Tensor, activation: Activation, consumer: PackedWeight | None = None
) -> Tensor:
    """Compute `KernelSet.activated`, with the reference's bits. x: [rows, size]."""
    x = x.contiguous()
    out = library.empty((x.shape[0], x.shape[1]), x.dtype)
    code = UNGATED_ACTIVATIONS[activation]
    library.functions.freight_activated(
        FreightActivated(
            x.data_ptr(), out.data_ptr(), *x.shape, FORMATS[x.dtype], code, torch.get_num_threads()
        )
    )
    return out


def gate(library: Library, x: Tensor, logits: Tensor, function: GateFunction) -> Tensor:
    """Compute `KernelSet.gate`.

    x: [rows, size]; logits: [rows, groups] or [1, groups] in x's dtype; both contiguous within a
    row
    """
    rows, size = x.shape
    same = len(logits) != rows
    groups = logits.shape[1]
    assert logits.dtype == x.dtype
    assert len(logits) == 1 or not same
    assert size % groups == 0
    assert x.stride(1) == 1 or size == 1
    assert logits.stride(1) == 1 or groups == 1
    out = library.empty((rows, size), x.dtype)
    library.functions.freight_gate(
        FreightGate(
            x.data_ptr(),
            logits.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            groups,
            x.stride(0),
            0 if same else logits.stride(0),
            FORMATS[x.dtype],
            GATE_FUNCTIONS[function],
            torch.get_num_threads(),
        )
    )
    return out


def join(library: Library, parts: Sequence[JoinedPart], eps: float = 0.0) -> Tensor:
    """Compute `KernelSet.join`. Each x is contiguous within a row."""
    first = parts[0][0]
    leading = first.shape[:-1]
    width = sum(x.shape[-1] for x, _ in parts)
    rows = leading.numel()
    out = library.empty((*leading, width), first.dtype)
    code = FORMATS[first.dtype]
    at = out.data_ptr()
    for heads, weight in parts:
        x = heads.flatten(0, -2)
        size = x.shape[1]
        group = size if weight is None else len(weight)
        assert len(x) == rows
        assert x.dtype == first.dtype
        assert x.stride(1) == 1 or size == 1
        assert size % group == 0
        assert weight is None or weight.dtype in (x.dtype, torch.float32)
        library.functions.freight_part(
            FreightPart(
                x.data_ptr(),
                address(weight),
                at,
                rows,
                size,
                x.stride(0),
                width,
                group,
                code,
                code if weight is None else FORMATS[weight.dtype],
                eps,
                torch.get_num_threads(),
            )
        )
        at += size * first.itemsize
    return out


def lookup(
    library: Library,
    table: Tensor,
    ids: Tensor,
    multiplier: float = 1.0,
    base: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Compute `KernelSet.lookup`, with the reference's bits.

    Raises KernelError for an id that is not a row of `table`.
    """
    rows = len(ids)
    size = table.shape[1]
    dtype = table.dtype if base is None else base.dtype
    assert ids.dtype == torch.int64
    assert table.stride(1) == 1 or size == 1
    assert base is None or base.shape == (rows, size)
    base = None if base is None else base.contiguous()
    ids = ids.contiguous()
    out = library.empty((rows, size), dtype)
    library.functions.freight_lookup(
        FreightLookup(
            table.data_ptr(),
            ids.data_ptr(),
            address(base),
            out.data_ptr(),
            rows,
            size,
            len(table),
            table.stride(0),
            FORMATS[table.dtype],
            FORMATS[dtype],
            multiplier,
            factor,
            torch.get_num_threads(),
        )
    )
    return out
