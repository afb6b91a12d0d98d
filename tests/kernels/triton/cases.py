"""Launches that are compiled ahead of time: each calls a launcher with tensors of no memory, as a
model would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels.triton import (
    adapters,
    convolution,
    elementwise,
    experts,
    gates,
    linear,
    paged,
    push,
    recurrence,
    route,
    rows,
    store,
)
from freight.kernels.triton.formats import Target
from freight.operands.activation import (
    Activation,
    AnyActivation,
    GatedActivation,
    GateFunction,
    clamped_silu,
)
from freight.operands.adapters import AdapterBank
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.experts import ExpertLayers, Router
from freight.operands.kv_pages import KeyCenter, KVPages
from freight.operands.recurrence import Convolution, DecayParameters, GatedNorm, RecurrenceRule
from freight.operands.rotary import Rotary
from freight.operands.routing import Routing, Scoring
from freight.operands.states import States
from freight.operands.tiles import STATE_TILE
from freight.operands.weight import Activations, Weight
from freight.parallel.peers import Layout, Peers

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pages(format: Format, scales: str, heads: int, dim: int, v_dim: int | None = None) -> KVPages:
    def scale(width: int) -> Tensor | None:
        return {
            "unit": None,
            "static": empty(heads, width, dtype=torch.float32),
            "token": empty(64, 16, heads),
        }[scales]

    k, v = (empty(64, 16, heads, width, dtype=torch_dtype(format)) for width in (dim, v_dim or dim))
    return KVPages(k, v, scale(dim), scale(v_dim or dim), empty(2, dtype=torch.int64))


def push_columns(rows: int, columns: int, size: int, dtype: torch.dtype, target: Target) -> Tensor:
    """The columns of one rank of `size`, into slots of 64 MiB."""
    layout = Layout(size, 64 << 20)
    addresses = empty(size + 1, dtype=torch.int64)
    page = empty(2, dtype=torch.int64)
    peers = Peers(empty(layout.total, dtype=torch.uint8), addresses, page, lambda: None)
    return push.push(empty(rows, columns, dtype=dtype), peers, layout, 1)


def sequences(num_seqs: int) -> Sequences:
    int32 = torch.int32
    tables = empty(num_seqs, 512, dtype=int32)
    return Sequences(empty(num_seqs + 1, dtype=int32), empty(num_seqs, dtype=int32), tables)


def attend(
    format: Format,
    scales: str,
    heads: int,
    group: int,
    dim: int,
    rows: int,
    window: int | None,
    target: Target,
    num_pairs: int = 0,
    soft_cap: float | None = None,
    fp8: bool = False,
    v_dim: int | None = None,
    sinks: bool = False,
    to: tuple[bool, Activations] | None = None,
) -> None:
    """`to`: whether the weight that takes the rows has scales of blocks, and how it takes them."""
    q = empty(rows, heads * group, dim)
    cache = pages(format, scales, heads, dim, v_dim)
    if num_pairs:
        parts, angles = (
            empty(2, heads, num_pairs, dtype=torch.float32),
            empty(512, dim // 2, 64, dtype=torch.float32),
        )
        pairs = empty(heads, num_pairs, dtype=torch.int32)
        center = KeyCenter(empty(heads, dim, dtype=torch.float32), pairs, parts, angles, angles)
        cache = replace(cache, k_center=center)
    of_heads = empty(heads * group, dtype=torch.float32) if sinks else None
    reader = consumer(*to, heads * group * (v_dim or dim)) if to else None
    paged.attention(
        target,
        q,
        cache,
        sequences(64),
        AttentionCall(0.1, window, soft_cap, of_heads),
        fp8=fp8,
        consumer=reader,
    )


def keep(
    format: Format, scales: str, dim: int, rows: int, target: Target, more: bool = False,
    rotary_dim: int | None = None, v_dim: int | None = None,
) -> None:  # fmt: skip
    """`more`: norms of heads, a factor of queries, and a center of keys."""
    v_dim = v_dim or dim
    cache, row = pages(format, scales, 8, dim, v_dim), empty(rows, dtype=torch.int64)
    norms = (empty(dim), empty(dim)) if more else None
    half = (dim if rotary_dim is None else rotary_dim) // 2
    rotary = Rotary(*(empty(8192, half, dtype=torch.float32) for _ in ("cos", "sin")), norms, 1e-6)
    if more:
        rotary = replace(rotary, q_factor=empty(8192, dtype=torch.float32))
        b, none = empty(8, dim, dtype=torch.float32), empty(0)
        cache = replace(cache, k_center=KeyCenter(b, none, none, none, none))
    store.rotate_store(target, empty(rows, 40 * dim + 8 * v_dim), rotary, row, row, cache)


def multiply(
    format: Format, blocks: bool, activations: Activations, rows: int, target: Target
) -> None:
    """What `linear` does where torch has no product of its own: float16 is a compute type that
    `_scaled_mm` refuses.
    """
    outputs, inputs = 4096, 14336
    scale = empty(*((outputs // 128, inputs // 128) if blocks else (outputs,)), dtype=torch.float32)
    weight = Weight(empty(outputs, inputs, dtype=torch_dtype(format)), scale, activations)
    linear.linear(target, empty(rows, inputs, dtype=torch.float16), weight)


def head(rows: int, target: Target, dtype: torch.dtype = BF16) -> None:
    """What `linear` does on AMD where the result of a 16-bit product stays float32."""
    weight = Weight(empty(128256, 4096, dtype=dtype))
    linear.matmul(target, empty(rows, 4096, dtype=dtype), None, weight, None, torch.float32)


def native(target: Target) -> Format:
    """The E4M3 that the target has, or would have."""
    return Format.E4M3FNUZ if Format.E4M3FNUZ in target.native else Format.E4M3FN


def consumer(blocks: bool, activations: Activations, inputs: int) -> Weight:
    scale = empty(*((4096 // 128, -(-inputs // 128)) if blocks else (4096,)), dtype=torch.float32)
    static = 0.5 if activations is Activations.STATIC else None
    return Weight(empty(4096, inputs, dtype=torch.float8_e4m3fn), scale, activations, static)


def norm(
    blocks: bool, activations: Activations, size: int, target: Target, sandwich: bool = False
) -> None:
    """`sandwich`: delta is normed, too, and weights are float32."""
    x, reader = empty(64, size), consumer(blocks, activations, size)
    weight = empty(size, dtype=torch.float32 if sandwich else BF16)
    elementwise.add_rms_norm(target, x, x, weight, 1e-5, reader, weight if sandwich else None)


def activate(
    blocks: bool,
    activations: Activations,
    size: int,
    target: Target,
    function: AnyActivation = GatedActivation.SILU,
) -> None:
    to = consumer(blocks, activations, size)
    if isinstance(function, Activation):
        elementwise.activated(target, empty(64, size), function, to)
    else:
        elementwise.gated(target, empty(64, 2 * size), function, to)


def mix(
    format: Format, blocks: bool, activations: Activations, rows: int, target: Target,
    hidden: int = 2048, inner: int = 768, function: AnyActivation = GatedActivation.SILU, biases: bool = False,
    shared: bool = False, count: int = 128, top_k: int = 8,
) -> None:  # fmt: skip
    """Experts of the size of Qwen3-30B-A3B's; in 16 bits without scales. `shared`: beside one that
    takes every row.
    """

    def stack(outputs: int, inputs: int) -> experts.ExpertStack:
        shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs,)
        scale = empty(count, *shape, dtype=torch.float32) if format.is_fp8 else None
        data = empty(count, outputs, inputs, dtype=torch_dtype(format))
        one = Weight(data[0], None if scale is None else scale[0], activations)
        return experts.ExpertStack(data, scale, empty(count, outputs) if biases else None, one)

    ids, weights = empty(rows, top_k, dtype=torch.int32), empty(rows, top_k, dtype=torch.float32)
    pair = (
        stack(inner if isinstance(function, Activation) else 2 * inner, hidden),
        stack(hidden, inner),
    )
    base = empty(rows, hidden) if shared else None
    experts.experts(target, empty(rows, hidden), ids, weights, ExpertLayers(*pair, function), base)


def by_head(
    heads: int, inputs: int, outputs: int, rows: int, target: Target, dtype: torch.dtype = BF16
) -> None:
    """What latent attention multiplies with; x: the first columns of queries with 64 of rope each."""
    data = empty(heads, outputs, inputs, dtype=dtype)
    x = empty(rows, heads, inputs + 64, dtype=dtype)[..., :inputs]
    experts.by_head(target, x, experts.ExpertStack(data, None, None, Weight(data[0])))


def adapt(
    rows: int, inputs: int, ends: tuple[int, ...], max_rank: int, target: Target,
    dtype: torch.dtype = BF16,
) -> None:  # fmt: skip
    """Eight adapters of a projection of several parts."""
    parts, outputs = len(ends), ends[-1]
    bank = AdapterBank(
        empty(8, parts, max_rank, inputs, dtype=dtype),
        empty(8, max_rank, outputs, dtype=dtype),
        empty(8, parts, dtype=torch.int32),
        empty(8, parts, dtype=torch.float32),
        ends,
    )
    y, x = empty(rows, outputs, dtype=dtype), empty(rows, inputs, dtype=dtype)
    adapters.add_adapters(y, x, bank, empty(rows, dtype=torch.int32))


def choose(rows: int, routing: Routing, target: Target, hidden: int = 2048) -> None:
    """A router of logits with a bias where they are chosen first, and with one for the choice where
    it is sigmoid.
    """
    gate, bias = (
        Weight(empty(routing.num_experts, hidden, dtype=torch.float32)),
        empty(routing.num_experts),
    )
    of_logits = bias if routing.scoring is Scoring.CHOSEN else None
    of_choice = bias.float() if routing.scoring is Scoring.SIGMOID else None
    route.route(empty(rows, hidden), Router(gate, routing, of_logits, of_choice))


def layer_norm(size: int, consumer: Weight | None, target: Target) -> None:
    x, weight = empty(64, size), empty(size)
    elementwise.add_layer_norm(target, x, x, weight, weight, 1e-5, consumer)


def convolve(channels: int, width: int, rows: int, target: Target, more: bool = True) -> None:
    """`more`: a bias, and SiLU."""
    x = empty(rows, 2 * channels)[:, :channels]
    states = States({"columns": empty(64, width - 1, channels)}, 2048)
    bias = empty(channels) if more else None
    convolution.convolve(x, Convolution(empty(channels, width), bias, more), states, sequences(64))


def recur(
    format: Format, delta: bool, rows: int, target: Target, key_heads: int = 16, heads: int = 48, k_dim: int = 128,
    v_dim: int = 128, dtype: torch.dtype = BF16, by_channel: bool = False,
) -> None:  # fmt: skip
    """A gated delta net of the size of Qwen3.6-27B's, or Mamba-2; `by_channel`: Kimi delta
    attention.
    """
    float32, decays = torch.float32, (heads, k_dim) if by_channel else (heads,)
    parts = {
        "state": empty(64, heads, k_dim, v_dim, dtype=torch_dtype(format)),
        "k": empty(64, STATE_TILE, key_heads, k_dim, dtype=dtype),
        "u": empty(64, STATE_TILE, heads, v_dim, dtype=dtype),
        "decay": empty(64, STATE_TILE, *decays, dtype=float32),
    }
    if format.is_quantized:
        parts["scale"] = empty(64, heads, v_dim)
    qkv = empty(rows, (2 * key_heads * k_dim) + heads * v_dim, dtype=dtype)
    q, k, v = qkv.split((key_heads * k_dim, key_heads * k_dim, heads * v_dim), 1)
    beta, decay = empty(rows, heads, dtype=float32), empty(rows, *decays, dtype=float32)
    skip = None if delta else empty(heads, dtype=float32)
    recurrence.recurrence(
        *(target, q, k, v, beta, decay, RecurrenceRule(delta, delta, skip)),
        *(States(parts, 2048), sequences(64)),
    )


def gated_norm(
    size: int,
    group: int,
    norm_first: bool,
    target: Target,
    to: tuple[bool, Activations] | None = None,
) -> None:
    x, weight = empty(64, size), empty(group if norm_first else size)
    gates.gated_norm(
        target,
        x,
        x,
        GatedNorm(weight, 1e-6, group, norm_first),
        consumer(*to, size) if to else None,
    )


def decay(
    heads: int, target: Target, delta: bool = True, k_dim: int = 1, bound: float | None = None
) -> None:
    a, a_log, dt_bias = (
        empty(64, heads * (k_dim + 1)),
        *(empty(n, dtype=torch.float32) for n in (heads, heads * k_dim)),
    )
    gates.decays(
        a[:, :-heads],
        a[:, -heads:] if delta else None,
        DecayParameters(a_log, dt_bias, (0.0, 1.0), bound),
    )


# compiled whenever the tests run
CASES: dict[str, Callable[[Target], object]] = {
    "attention fp8 static": partial(attend, Format.E4M3FN, "static", 8, 4, 128, 8192, None),
    "attention fp8 token": partial(attend, Format.E4M3FN, "token", 8, 4, 128, 8192, None),
    "attention fp8 centered": partial(
        attend, Format.E4M3FN, "static", 8, 4, 128, 8192, None, num_pairs=20
    ),
    "attention fp8 soft cap": partial(
        attend, Format.E4M3FN, "static", 8, 4, 128, 8192, None, soft_cap=50.0
    ),
    "attention fp8 compute": lambda target: attend(
        native(target), "static", 8, 4, 128, 8192, None, target, fp8=True
    ),
    "attention fp8 compute, dim 16": lambda target: attend(
        native(target), "static", 1, 2, 16, 8192, None, target, fp8=True
    ),
    "attention fp8 sinks, window": partial(
        attend, Format.E4M3FN, "static", 8, 8, 64, 8192, 128, sinks=True
    ),
    "merge by row": partial(
        attend, Format.E4M3FN, "static", 8, 4, 128, 64, None, to=(False, Activations.DYNAMIC)
    ),
    "attention bf16 window": partial(attend, Format.BFLOAT16, "unit", 8, 4, 128, 8192, 4096),
    "store token, norms, centers": partial(keep, Format.E4M3FN, "token", 128, 8192, more=True),
    "store token": partial(keep, Format.E4M3FN, "token", 128, 8192),
    "linear fp8": partial(multiply, Format.E4M3FN, False, Activations.DYNAMIC, 8192),
    "linear fp8 blocks": partial(multiply, Format.E4M3FN, True, Activations.DYNAMIC, 8192),
    "linear fnuz": partial(multiply, Format.E4M3FNUZ, False, Activations.DYNAMIC, 8192),
    "linear plain one row": partial(multiply, Format.E4M3FN, False, Activations.PLAIN, 1),
    "experts fp8": partial(mix, Format.E4M3FN, False, Activations.DYNAMIC, 64),
    "experts fp8 blocks": partial(mix, Format.E4M3FN, True, Activations.DYNAMIC, 64),
    "by head, one row": partial(by_head, 128, 128, 512, 1),  # DeepSeek-V3
    "by head, few rows": partial(by_head, 20, 192, 512, 64),  # GLM-4.7-Flash
    "by head": partial(by_head, 128, 512, 128, 8192),
    "adapters": partial(adapt, 8192, 4096, (4096, 5120, 6144), 16),
    "adapters, few rows": partial(adapt, 64, 4096, (4096, 5120, 6144), 16),
    "route": partial(choose, 64, Routing(128, 8)),
    "norm by row": partial(norm, False, Activations.DYNAMIC, 4096),
    "gated": lambda target: elementwise.gated(target, empty(64, 28672), GatedActivation.SILU),
    "relu": lambda target: elementwise.activated(target, empty(64, 28672), Activation.RELU),
    "gelu": lambda target: elementwise.activated(target, empty(64, 28672), Activation.GELU),
    "geglu": lambda target: elementwise.gated(target, empty(64, 28672), GatedActivation.GEGLU),
    "relu squared": lambda target: elementwise.activated(
        target, empty(64, 28672), Activation.RELU_SQUARED
    ),
    "relu squared by row": partial(
        activate, False, Activations.STATIC, 5376, function=Activation.RELU_SQUARED
    ),
    "recurrence int8": partial(recur, Format.INT8, True, 64),
    "recurrence e4m3": lambda target: recur(native(target), True, 64, target),
    "recurrence mamba": partial(recur, Format.BFLOAT16, False, 64, key_heads=8, heads=64, v_dim=64),
    "recurrence of channels": partial(
        recur, Format.INT8, True, 64, key_heads=32, heads=32, by_channel=True
    ),
    "convolve": partial(convolve, 10240, 4, 8192),
    "convolve, one row": partial(convolve, 10240, 4, 64),
    "decays": partial(decay, 48),
    "decays of channels": partial(decay, 32, k_dim=128, bound=-5.0),
    "gated norm by row": partial(gated_norm, 6144, 128, True, to=(False, Activations.DYNAMIC)),
    "gated norm of groups": partial(gated_norm, 4096, 512, False, to=(False, Activations.DYNAMIC)),
    "gated clamped": lambda target: elementwise.gated(
        target, empty(64, 5760), GatedActivation.CLAMPED_SWIGLU
    ),
    "gated clamped silu": lambda target: elementwise.gated(
        target, empty(64, 2560), clamped_silu(7.0)
    ),
    "gated by row": partial(activate, False, Activations.DYNAMIC, 14336),
}
# compiled with `aot.py TARGET all`
MORE_CASES: dict[str, Callable[[Target], object]] = {
    "adapters, float16, rank 64": partial(adapt, 8192, 14336, (4096,), 64, dtype=torch.float16),
    "adapters, float32, one row": partial(adapt, 1, 2048, (512,), 8, dtype=torch.float32),
    "by head, one row of values": partial(by_head, 20, 512, 256, 1),
    "by head, float16, many rows": partial(by_head, 20, 192, 512, 8192, dtype=torch.float16),
    "by head, float32": partial(by_head, 16, 128, 512, 8192, dtype=torch.float32),
    "attention fnuz static": partial(attend, Format.E4M3FNUZ, "static", 8, 4, 128, 8192, None),
    "attention fnuz token": partial(attend, Format.E4M3FNUZ, "token", 8, 4, 128, 8192, None),
    "attention e5m2": partial(attend, Format.E5M2, "unit", 8, 4, 128, 8192, None),
    "attention e5m2 token": partial(attend, Format.E5M2, "token", 8, 4, 128, 8192, None),
    "attention bf16": partial(attend, Format.BFLOAT16, "unit", 8, 4, 128, 8192, None),
    "attention bf16, soft cap, window, dim 256": partial(
        attend, Format.BFLOAT16, "unit", 4, 2, 256, 8192, 4096, soft_cap=50.0
    ),
    "attention fp8 static, dim 80": partial(attend, Format.E4M3FN, "static", 8, 4, 80, 8192, None),
    "attention fp8 token, dim 96": partial(attend, Format.E4M3FN, "token", 8, 4, 96, 8192, None),
    "attention fp8 token, sinks, window": partial(
        attend, Format.E4M3FN, "token", 8, 8, 64, 8192, 128, sinks=True
    ),
    "attention fp8 token, centered": partial(
        attend, Format.E4M3FN, "token", 8, 4, 128, 8192, None, num_pairs=20
    ),
    "attention fp8 static, dim 64": partial(attend, Format.E4M3FN, "static", 8, 7, 64, 8192, None),
    "attention fp8 static, dim 256": partial(
        attend, Format.E4M3FN, "static", 4, 2, 256, 8192, None
    ),
    "attention fp8 token, dim 256": partial(attend, Format.E4M3FN, "token", 4, 2, 256, 8192, None),
    "attention fp8 token, soft cap, window, dim 256": partial(
        attend, Format.E4M3FN, "token", 4, 2, 256, 8192, 4096, soft_cap=50.0
    ),
    "attention fp8 static, dims 192 and 128": partial(
        attend, Format.E4M3FN, "static", 8, 4, 192, 8192, None, v_dim=128
    ),
    "merge static": partial(
        attend, Format.E4M3FN, "static", 8, 4, 128, 64, None, to=(False, Activations.STATIC)
    ),
    "merge static, blocks": partial(
        attend, Format.E4M3FN, "token", 8, 7, 64, 64, None, to=(True, Activations.STATIC)
    ),
    "merge by group": partial(
        attend, Format.E4M3FN, "static", 8, 4, 128, 64, None, to=(True, Activations.DYNAMIC)
    ),
    "merge by group, dim 64": partial(
        attend, Format.E4M3FN, "token", 8, 7, 64, 64, None, to=(True, Activations.DYNAMIC)
    ),
    "merge by row, dim 256": partial(
        attend, Format.E4M3FN, "token", 8, 16, 256, 64, 4096, to=(False, Activations.DYNAMIC)
    ),
    "attention fp8 compute token": lambda target: attend(
        native(target), "token", 8, 4, 128, 8192, None, target, fp8=True
    ),
    "attention fp8 compute, sinks": lambda target: attend(
        native(target), "static", 8, 8, 64, 8192, None, target, fp8=True, sinks=True
    ),
    "attention fp8 compute, dim 256": lambda target: attend(
        native(target), "static", 4, 2, 256, 8192, None, target, fp8=True
    ),
    "store token, partial rotary, narrow values": partial(
        keep, Format.E4M3FN, "token", 192, 8192, rotary_dim=64, v_dim=128
    ),
    "store static": partial(keep, Format.E4M3FN, "static", 128, 8192),
    "store token, one row": partial(keep, Format.E4M3FN, "token", 128, 1),
    "store fnuz static": partial(keep, Format.E4M3FNUZ, "static", 128, 8192),
    "store bf16": partial(keep, Format.BFLOAT16, "unit", 128, 8192),
    "store static, norms, centers, one row": partial(
        keep, Format.E4M3FN, "static", 128, 1, more=True
    ),
    "linear fp8, one row": partial(multiply, Format.E4M3FN, False, Activations.DYNAMIC, 1),
    "linear fp8, 64 rows": partial(multiply, Format.E4M3FN, False, Activations.DYNAMIC, 64),
    "linear fp8 blocks, one row": partial(multiply, Format.E4M3FN, True, Activations.DYNAMIC, 1),
    "linear fnuz, one row": partial(multiply, Format.E4M3FNUZ, False, Activations.DYNAMIC, 1),
    "linear plain": partial(multiply, Format.E4M3FN, False, Activations.PLAIN, 8192),
    "linear e5m2 plain blocks": partial(multiply, Format.E5M2, True, Activations.PLAIN, 8192),
    "linear bf16 to float32, one row": partial(head, 1),
    "linear float16 to float32, 64 rows": partial(head, 64, dtype=torch.float16),
    "linear bf16 to float32, 512 rows": partial(head, 512),
    "experts plain": partial(mix, Format.E4M3FN, False, Activations.PLAIN, 64),
    "experts bf16": partial(mix, Format.BFLOAT16, False, Activations.PLAIN, 64),
    "experts fnuz": partial(mix, Format.E4M3FNUZ, False, Activations.DYNAMIC, 64),
    "recurrence float32": partial(recur, Format.FLOAT32, True, 64, dtype=torch.float32),
    "recurrence bf16": partial(recur, Format.BFLOAT16, True, 64),
    "recurrence int8, dims 64": partial(recur, Format.INT8, True, 64, k_dim=64, v_dim=64),
    "recurrence e4m3 by bits": partial(recur, Format.E4M3FN, True, 64),
    "convolve, no bias": partial(convolve, 2048, 3, 8192, more=False),
    "decays, mamba": partial(decay, 64, delta=False),
    "recurrence of channels, float32": partial(
        recur, Format.FLOAT32, True, 64, dtype=torch.float32, by_channel=True
    ),
    "gated norm": partial(gated_norm, 6144, 128, True),
    "gated norm by group": partial(gated_norm, 6144, 128, True, to=(True, Activations.DYNAMIC)),
    "route groups": partial(
        choose, 64, Routing(256, 8, Scoring.SIGMOID, num_groups=8, top_groups=4)
    ),
    "norm": lambda target: elementwise.add_rms_norm(
        target, empty(64, 4096), None, empty(4096), 1e-5
    ),
    "gate": lambda target: gates.gate(empty(64, 4096), empty(64, 32), GateFunction.SOFTPLUS),
    "join": lambda target: gates.join(
        [(empty(64, 6144)[:, :4096], empty(4096)), (empty(64, 1024), None)], 1e-5
    ),
    "norm by group, wide": partial(norm, True, Activations.DYNAMIC, 16384),
    "norm by row, sandwich": partial(norm, False, Activations.DYNAMIC, 4096, sandwich=True),
    "norm static": partial(norm, False, Activations.STATIC, 4096),
    "gated by group": partial(activate, True, Activations.DYNAMIC, 14336),
    "gated by row, gelu": partial(
        activate, False, Activations.DYNAMIC, 14336, function=GatedActivation.GELU_TANH
    ),
    "gated by row, widest": partial(activate, False, Activations.DYNAMIC, rows.WIDE),
}
_GPT_OSS = {
    "hidden": 2880,
    "inner": 2880,
    "function": GatedActivation.CLAMPED_SWIGLU,
    "biases": True,
}
_NEMOTRON = {
    "hidden": 1024,
    "inner": 2688,
    "function": Activation.RELU_SQUARED,
    "count": 512,
    "top_k": 22,
}  # 3 Super
# compiled whenever the tests run, too: the largest heads, experts and rows of the families in
# docs/models.md
LARGE_CASES: dict[str, Callable[[Target], object]] = {
    "attention bf16, dim 512": partial(
        attend, Format.BFLOAT16, "unit", 4, 8, 512, 8192, None
    ),  # Gemma 4
    "attention fp8 static, dim 512": partial(
        attend, Format.E4M3FN, "static", 4, 8, 512, 8192, None
    ),
    "attention fp8 token, dim 512": partial(attend, Format.E4M3FN, "token", 1, 16, 512, 8192, None),
    "attention fnuz token, dim 512": partial(
        attend, Format.E4M3FNUZ, "token", 1, 16, 512, 8192, None
    ),
    "attention fp8 static, centered, dim 256": partial(
        attend, Format.E4M3FN, "static", 4, 2, 256, 8192, None, num_pairs=20
    ),
    "attention fp8 token, centered, dim 512": partial(
        attend, Format.E4M3FN, "token", 4, 8, 512, 8192, None, num_pairs=20
    ),
    "attention fp8 compute, dim 512": lambda target: attend(
        native(target), "static", 4, 8, 512, 8192, None, target, fp8=True
    ),
    "attention float32, dim 512": partial(attend, Format.FLOAT32, "unit", 4, 8, 512, 8192, None),
    "attention float32, dim 256": partial(attend, Format.FLOAT32, "unit", 4, 2, 256, 8192, None),
    "attention fp8 static, group 48": partial(
        attend, Format.E4M3FN, "static", 1, 48, 128, 8192, None
    ),
    "merge by row, dim 512": partial(
        attend, Format.E4M3FN, "static", 4, 8, 512, 64, None, to=(False, Activations.DYNAMIC)
    ),
    "store token, dim 512": partial(keep, Format.E4M3FN, "token", 512, 8192, more=True),
    "experts plain, biases, 2880": partial(
        mix, Format.E4M3FN, False, Activations.PLAIN, 64, **_GPT_OSS
    ),
    "experts bf16, biases, 2880": partial(
        mix, Format.BFLOAT16, False, Activations.PLAIN, 64, **_GPT_OSS
    ),
    "experts fp8 blocks, shared": partial(  # Qwen3-Coder-480B, GLM-4.6
        mix, Format.E4M3FN, True, Activations.DYNAMIC, 64, hidden=6144, inner=2560, shared=True
    ),
    "experts fp8, no gate, 22 of 512": partial(
        mix, Format.E4M3FN, False, Activations.STATIC, 64, **_NEMOTRON
    ),
    "route sigmoid, 22 of 512 experts": partial(
        choose, 64, Routing(512, 22, Scoring.SIGMOID), hidden=8192
    ),
    "recurrence int8, dims 256": partial(recur, Format.INT8, True, 64, k_dim=256, v_dim=256),
    "recurrence float32, dims 256": partial(
        recur, Format.FLOAT32, True, 64, k_dim=256, v_dim=256, dtype=torch.float32
    ),
    "recurrence int8, dims 192 and 96": partial(recur, Format.INT8, False, 64, k_dim=192, v_dim=96),
    "recurrence mamba, one key head": partial(  # Granite
        recur, Format.INT8, False, 64, key_heads=1, heads=128, k_dim=128, v_dim=64
    ),
    "gated norm of rows": partial(gated_norm, 8192, 8192, False, to=(False, Activations.DYNAMIC)),
    "route chosen": partial(choose, 64, Routing(128, 4, Scoring.CHOSEN), hidden=2880),
    "route sigmoid, 192 experts": partial(
        choose, 64, Routing(192, 8, Scoring.SIGMOID), hidden=6144
    ),
    "join, whole rows": lambda target: gates.join(
        [(empty(64, 6144), empty(6144)), (empty(64, 1024), None)], 1e-5
    ),
    "gate of whole rows": lambda target: gates.gate(
        empty(64, 8192), empty(64, 8192), GateFunction.SIGMOID
    ),
    "gated gelu": lambda target: elementwise.gated(
        target, empty(64, 43008), GatedActivation.GELU_TANH
    ),  # Gemma
    "gate of heads": lambda target: gates.gate(
        empty(64, 8192), empty(64, 64), GateFunction.IDENTITY
    ),
    "layer norm": partial(layer_norm, 9216, None),  # OPT-66B
    "layer norm by row": lambda target: layer_norm(
        9216, consumer(False, Activations.DYNAMIC, 9216), target
    ),
    "gated by row, beyond the widest": partial(
        activate, False, Activations.DYNAMIC, 53248
    ),  # Llama 3.1 405B
    "gated by group, beyond the widest": partial(activate, True, Activations.DYNAMIC, 53248),
    "gated static, beyond the widest": partial(activate, False, Activations.STATIC, 53248),
    "push": partial(push_columns, 64, 1024, 8, BF16),
    "push, 2 ranks": partial(push_columns, 8192, 4096, 2, torch.uint8),
    "push, odd": partial(push_columns, 3, 257, 3, torch.uint8),
}
