"""Convolutions and recurrences (csrc/states.h), and the row-wise operations around them.

They keep a state of each sequence in the blocks of `States`. A row's bits, and those of the stored
state, depend only on its own history: not on the other rows, the split into calls or the threads.
They differ from the reference's in the order of sums and the last bits of exponentials. The C
functions read lengths and block tables at the time of the call, so a replayed call follows them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freight.errors import KernelError
from freight.kernels.cpu.arguments import address, strided
from freight.kernels.cpu.interface import (
    FORMATS,
    MAX_WIDTH,
    FreightConvolution,
    FreightDecays,
    FreightGatedNorm,
    FreightRecurrence,
)
from freight.kernels.cpu.library import Library
from freight.operands.batch import Sequences
from freight.operands.packed import PackedWeight
from freight.operands.recurrence import (
    Convolution,
    DecayParameters,
    GatedNorm,
    RecurrenceRule,
)
from freight.operands.states import States
from freight.operands.tiles import STATE_TILE


def convolve(
    library: Library,
    x: Tensor,
    convolution: Convolution,
    states: States,
    sequences: Sequences,
) -> Tensor:
    """Compute `KernelSet.convolve`.

    Raises KernelError for a width outside 2 to MAX_WIDTH, and for a context shorter than its rows.
    """
    columns = states.parts["columns"]
    weight = convolution.weight
    bias = convolution.bias
    rows, channels = x.shape
    width = weight.shape[1]
    if not 2 <= width <= MAX_WIDTH:
        raise KernelError(
            f"the CPU kernels support convolutions of a width of 2 to {MAX_WIDTH}, not {width}; use --kernels reference"
        )
    assert weight.dtype == columns.dtype == x.dtype
    assert weight.shape[0] == channels
    kept = columns.shape[1]
    assert kept >= width - 1
    assert columns.shape[2] == channels
    assert bias is None or (bias.dtype == x.dtype and bias.shape == (channels,))
    out = library.empty((rows, channels), x.dtype)
    library.functions.freight_convolution(
        FreightConvolution(  # positional: takes a third of the time of keywords
            strided(x),
            address(weight),
            address(bias),
            out.data_ptr(),
            address(columns),
            address(sequences.query_starts),
            address(sequences.context_lens),
            address(sequences.block_tables),
            x.stride(0),
            sequences.num_seqs,
            sequences.block_tables.shape[1],
            states.every,
            channels,
            width,
            kept,
            FORMATS[x.dtype],
            convolution.silu,
            torch.get_num_threads(),
        )
    )
    return out


def decays(
    library: Library,
    a: Tensor,
    b: Tensor | None,
    parameters: DecayParameters,
) -> tuple[Tensor, Tensor]:
    """Compute `KernelSet.decays`. b has a's dtype."""
    a_log = parameters.a_log
    dt_bias = parameters.dt_bias
    bound = parameters.bound
    rows = len(a)
    heads = len(a_log)
    channels = len(dt_bias)
    assert b is None or (b.shape == (rows, heads) and b.dtype == a.dtype)
    assert b is not None or (channels == heads and bound is None)
    assert a_log.dtype == dt_bias.dtype == torch.float32
    assert a.shape[1] == channels
    assert channels % heads == 0
    each = channels // heads if channels != heads else 0
    beta = library.empty((rows, heads), torch.float32)
    log_decay = library.empty((rows, heads, each) if each else (rows, heads), torch.float32)
    with_b = (None, 0) if b is None else (strided(b), b.stride(0))
    library.functions.freight_decays(
        FreightDecays(
            strided(a),
            with_b[0],
            address(a_log),
            address(dt_bias),
            beta.data_ptr(),
            log_decay.data_ptr(),
            rows,
            heads,
            each,
            a.stride(0),
            with_b[1],
            *parameters.limits,
            bound or 0.0,
            FORMATS[a.dtype],
            torch.get_num_threads(),
        )
    )
    return beta, log_decay


def recurrence(
    library: Library,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    rule: RecurrenceRule,
    states: States,
    sequences: Sequences,
) -> Tensor:
    """Compute `KernelSet.recurrence`. Raises KernelError for a context shorter than its rows."""
    parts = states.parts
    skip = rule.skip
    rows = len(v)
    state = parts["state"]
    kept_k = parts["k"]
    kept_u = parts["u"]
    kept_decay = parts["decay"]
    scale = parts.get("scale")
    blocks, heads, k_dim, v_dim = state.shape
    key_heads = kept_k.shape[2]
    assert q.dtype == k.dtype == v.dtype == kept_k.dtype == kept_u.dtype
    assert beta.dtype == log_decay.dtype == kept_decay.dtype == torch.float32
    assert q.shape == k.shape == (rows, key_heads * k_dim)
    assert v.shape == (rows, heads * v_dim)
    by_channel = kept_decay.ndim == 4
    assert beta.shape == (rows, heads)
    assert log_decay.shape == ((rows, heads, k_dim) if by_channel else (rows, heads))
    assert log_decay.is_contiguous()
    assert skip is None or (skip.dtype is torch.float32 and skip.shape == (heads,))
    assert (state.itemsize == 1) == (scale is not None)
    assert scale is None or (
        scale.dtype is torch.bfloat16 and scale.shape == (blocks, heads, v_dim)
    )
    assert kept_k.shape == (blocks, STATE_TILE, key_heads, k_dim)
    assert kept_u.shape == (blocks, STATE_TILE, heads, v_dim)
    assert kept_decay.shape == (blocks, STATE_TILE, *log_decay.shape[1:])
    assert heads % key_heads == 0
    assert states.every % STATE_TILE == 0
    out = library.empty((rows, heads * v_dim), v.dtype)
    library.functions.freight_recurrence(
        FreightRecurrence(
            strided(q),
            strided(k),
            strided(v),
            address(beta),
            address(log_decay),
            address(skip),
            out.data_ptr(),
            address(state),
            address(scale),
            address(kept_k),
            address(kept_u),
            address(kept_decay),
            address(sequences.query_starts),
            address(sequences.context_lens),
            address(sequences.block_tables),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            sequences.num_seqs,
            sequences.block_tables.shape[1],
            states.every,
            key_heads,
            heads,
            k_dim,
            v_dim,
            FORMATS[v.dtype],
            FORMATS[state.dtype],
            rule.delta,
            rule.norm,
            by_channel,
            k_dim**-0.5,
            torch.get_num_threads(),
        )
    )
    return out


def gated_norm(
    library: Library,
    x: Tensor,
    gate: Tensor,
    norm: GatedNorm,
    consumer: PackedWeight | None = None,
) -> Tensor:
    """Compute `KernelSet.gated_norm`."""
    weight = norm.weight
    group = norm.group
    rows, size = x.shape
    assert gate.shape == x.shape
    assert gate.dtype == x.dtype
    assert size % group == 0
    assert weight.dtype in (x.dtype, torch.float32)
    assert weight.shape in ((size,), (group,))
    out = library.empty((rows, size), x.dtype)
    library.functions.freight_gated_norm(
        FreightGatedNorm(
            strided(x),
            strided(gate),
            address(weight),
            out.data_ptr(),
            rows,
            size,
            group,
            len(weight),
            x.stride(0),
            gate.stride(0),
            FORMATS[x.dtype],
            FORMATS[weight.dtype],
            norm.eps,
            norm.norm_first,
            torch.get_num_threads(),
        )
    )
    return out
