"""Every operation in plain torch: specification and test oracle of the fast kernels, and fallback.

It guarantees more than the formulas: **a row's result depends only on its own history**, to the
bit. A BLAS library may choose another order of summation for another number of rows, so matrix
products here are only called in one shape per weight: rows in tiles of `ROW_TILE`, padded with
zeros; keys in tiles of `KEY_TILE` at absolute positions, walked in order (online softmax, Milakov
and Gimelshein 2018). A tile that a row does not see changes no bit of that row. So chunking,
batching, prefix hits and preemption change no bit of any token. In float32 the number of threads
changes no bit either, except for a single KV head of 512 channels or more.

Row-wise operations compute in float32 and round once, to their input's dtype, unless they say
otherwise (`rms_norm`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from freight.errors import KernelError
from freight.fp8 import blocks, mxfp4
from freight.fp8.blocks import BlockFormat, Integers
from freight.fp8.cast import (
    amax,
    clipped,
    decode,
    encode,
    format_of,
    scale_from_amax,
    token_scale,
)
from freight.fp8.formats import SCALE_GROUP, Format, ScaleKind
from freight.fp8.weights import BLOCK, expand_blocks
from freight.operands.activation import GatedActivation, GatedFunction
from freight.operands.attention import AttentionCall
from freight.operands.batch import Sequences
from freight.operands.kv_pages import KVPages, read_slots, spread, write_slots
from freight.operands.packed import PackedWeight
from freight.operands.rotary import Rotary
from freight.operands.tiles import KEY_TILE
from freight.operands.weight import Activations, Codes, Groups, Weight

# torch's exp and others call MKL, whose first call in a process gave other last bits where two threads
# made it (torch 2.13). This one is made by one thread.
torch.ones(1, dtype=torch.float32, device="cpu").exp()

ROW_TILE = 32  # rows of one call of a matrix product; fewer are padded with zeros
# Inputs that float32 products sum in one call: a BLAS splits longer sums by the number of threads.
INPUT_TILE = 512
OUTPUT_TILE = 4096  # output features decoded at once; a multiple of 128, the size of scale blocks
QUERY_TILE = 32  # rows of one sequence that attention computes together; fewer are padded


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    """Return x @ weight.T + bias, [rows, out_features] in x's dtype. x: [rows, in_features].

    With `float32` the products, their sums and the bias are added in float32, and the result is not
    rounded.
    """
    if weight.is_int8:
        return _int8_linear(x, weight, bias, float32)
    if weight.order is not None:
        return linear(x[:, weight.order], replace(weight, order=None), bias, float32)
    if weight.activations is Activations.GROUPS:
        return _grouped_linear(x, weight, bias, float32)
    if weight.blocks is not None:
        return linear(x, Weight(weight.dequantized().to(x.dtype)), bias, float32)
    if weight.groups is not None and weight.scale is None and x.dtype is not torch.float16:
        decoded = Weight(weight.groups.decode(weight.data).to(x.dtype))
        return linear(x, decoded, bias, float32)
    rounds_late = float32 and x.dtype is not torch.float32
    if weight.scale is not None or weight.groups is not None or rounds_late:
        return _scaled_linear(x, weight, bias, float32)
    rows, in_features = x.shape
    out = x.new_empty(rows, weight.data.shape[0])
    for start in range(0, rows, ROW_TILE):
        part = x[start : start + ROW_TILE]
        tile = x.new_zeros(ROW_TILE, in_features)
        tile[: len(part)] = part
        if x.dtype == torch.float32:
            product = _product(tile, weight.data, bias)
        else:
            product = F.linear(tile, weight.data, bias)
        out[start : start + ROW_TILE] = product[: len(part)]
    return out


def _product(tile: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return tile @ matrix.T + bias in float32.

    Inputs are summed `INPUT_TILE` at a time, so that the thread count changes no bit.
    """
    pieces = zip(tile.split(INPUT_TILE, 1), matrix.split(INPUT_TILE, 1), strict=True)
    out = F.linear(*next(pieces))
    for inputs, columns in pieces:
        out += F.linear(inputs, columns)
    return out if bias is None else out + bias


def _scaled_linear(x: Tensor, weight: Weight, bias: Tensor | None, float32: bool) -> Tensor:
    """Compute `linear` with float32 products and sums of the decoded values: over FP8 and 4-bit
    weights, and over 16-bit weights where the result is not rounded.

    With a scale per output row both scales multiply the finished sum; with 128 x 128 blocks they
    multiply each value beforehand. The bias is added last, and the result rounded once, unless it
    stays float32. Decodes `OUTPUT_TILE` output features at a time.
    """
    values, factor = _activations(x, weight)
    padding = -len(x) % ROW_TILE
    tiles = F.pad(values, (0, 0, 0, padding)).split(ROW_TILE)
    out = x.new_empty(len(x) + padding, len(weight.data), dtype=_result(x, float32))
    for begin in range(0, len(weight.data), OUTPUT_TILE):
        part = slice(begin, begin + OUTPUT_TILE)
        matrix = _decoded(weight, begin, x.dtype)
        product = torch.cat([_product(tile, matrix) for tile in tiles])
        if factor is not None:
            product *= F.pad(factor, (0, 0, 0, padding))
        if weight.scale is not None and weight.scale.ndim == 1:
            product *= weight.scale[part]
        out[:, part] = product if bias is None else product + bias[part].float()
    return out[: len(x)]


def _result(x: Tensor, float32: bool) -> torch.dtype:
    """Return the dtype of `linear`'s result."""
    return torch.float32 if float32 else x.dtype


def _decoded(weight: Weight, begin: int, dtype: torch.dtype) -> Tensor:
    """Decode `OUTPUT_TILE` rows from `begin` on to float32, with the scales of blocks and groups.

    Values of groups are rounded to bfloat16 for rows of that dtype.
    """
    part = slice(begin, begin + OUTPUT_TILE)
    if weight.groups is not None:
        values = weight.groups.of_rows(part).decode(weight.data[part])
        return values.bfloat16().float() if dtype is torch.bfloat16 else values
    matrix = decode(weight.data[part])
    if weight.scale is not None and weight.scale.ndim == 2:
        matrix *= expand_blocks(
            weight.scale[begin // BLOCK : (begin + OUTPUT_TILE) // BLOCK], matrix.shape
        )
    return matrix


def int8_rows(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """Return the codes of rows for a product in INT8, int8 [rows, in_features], and their scales,
    float32 [rows].

    A code is x / scale, rounded to nearest, ties to even, and clamped to -128 .. 127. The scale is
    the row's largest finite magnitude / 127, at least 2 ** -126; with STATIC the weight's. INT8 has
    no NaN: a row with one has the scale NaN, which makes its results NaN. Infinities are clamped.
    """
    if weight.activations is Activations.STATIC:
        assert weight.input_scale is not None
        scale = torch.full((len(x),), weight.input_scale, dtype=torch.float32, device=x.device)
    else:
        assert weight.activations is Activations.DYNAMIC
        scale = scale_from_amax(amax(x, -1), Format.INT8)
    codes = (x.float() / scale[:, None]).round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
    return codes, scale.masked_fill(x.isnan().any(-1), torch.nan)


def _int8_linear(x: Tensor, weight: Weight, bias: Tensor | None, float32: bool) -> Tensor:
    """Compute `linear` over INT8 weights: exact sums of integer products (float64 holds them), so
    that every set of kernels gives the same bits.

    Each of these rounds to float32, in this order: the sum, its product with the row's scale, that
    with the scale of the weight's row, and the sum with the bias. Then the result is rounded once,
    unless it stays float32.
    """
    assert weight.scale is not None
    codes, scale = int8_rows(x, weight)
    values = codes.double()
    out = x.new_empty(len(x), len(weight.data), dtype=_result(x, float32))
    for begin in range(0, len(weight.data), OUTPUT_TILE):
        part = slice(begin, begin + OUTPUT_TILE)
        product = F.linear(values, weight.data[part].double()).float()
        product = product * scale[:, None] * weight.scale[part]
        out[:, part] = product if bias is None else product + bias[part].float()
    return out


LEAST_GROUP = 32  # inputs of a row that share a scale where they are rounded to INT8


def int8_groups(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Round rows to INT8 in groups of `size` inputs: codes, float32 [rows, groups, size], and
    scales, float32 [rows, groups]. The last group may be short; it has zeros behind it.

    A code is x / scale, rounded to nearest, ties to even. The scale is the group's largest finite
    magnitude / 127, at least 2 ** -126. Infinities become 127 or -128. A group with a NaN has the
    scale NaN, which makes the results of its row NaN.
    """
    groups = F.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    scale = scale_from_amax(amax(groups, -1), Format.INT8)
    codes = (groups.float() / scale[..., None]).round().clamp(-128, 127).nan_to_num(0.0)
    return codes, scale.masked_fill(groups.isnan().any(-1), torch.nan)


def weight_integers(weight: Weight, part: slice[int, int, None]) -> Integers:
    """Return rows of a matrix with groups as integers, float32 [rows, groups, size], and the scales
    of their groups, float32 [rows, groups]: INT4 minus its zero points; INT8; E2M1 twice its
    values, with half the scales; blocks of GGUF files, of which some have minima, too.
    """
    if weight.blocks is not None:
        return _block_integers(weight.data[part], weight.blocks)
    if weight.is_mxfp4:
        stored, exponents = weight.mxfp4_bytes
        data = stored[part].flatten(1)
        scales = (exponents[part].double() - mxfp4.BIAS).exp2().float()
        groups = Groups(Codes.E2M1, mxfp4.GROUP, scales)
    else:
        assert weight.groups is not None
        data = weight.data[part]
        groups = weight.groups.of_rows(part)
        scales = groups.scales.float()
    codes = replace(groups, scales=torch.ones_like(scales)).decode(data)
    codes = codes.unflatten(1, (-1, groups.size))
    if groups.codes is not Codes.E2M1:
        return Integers(codes, scales)
    return Integers(2 * codes, _of_any_zeros(2 * codes, scales / 2))


def _of_any_zeros(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the scales; of groups of zeros, which in MXFP4 may have any, infinity too, 1."""
    return scales.masked_fill((codes == 0).all(-1), 1.0)


def _block_integers(rows: Tensor, format: BlockFormat) -> Integers:
    integers = blocks.integers(rows, format)
    if format is not BlockFormat.MXFP4:
        return integers
    return integers._replace(scales=_of_any_zeros(integers.codes, integers.scales))


def _grouped_linear(x: Tensor, weight: Weight, bias: Tensor | None, float32: bool) -> Tensor:
    """Compute `linear` over weights in 4 bits, INT8 or blocks of GGUF files and inputs rounded to
    INT8, both in groups, so that every set of kernels gives the same bits.

    A group's term is the exact sum of its integer products (at most 128 * 128 * 128 in magnitude,
    which float32 holds) times the product of both scales; both products round to
    float32. With minima a group has a second term after the first: the sum of its codes of x times
    their scale, times the minimum, both rounded. Terms are added in order, each sum rounded. Then
    come the scale of the weight's row, the bias, and one rounding unless the result stays float32.
    """
    size = weight.group_size
    codes, scale = int8_groups(x, max(size, LEAST_GROUP))
    terms = codes.flatten(1)[:, : x.shape[1]].unflatten(1, (-1, size))
    scale = scale.repeat_interleave(max(1, LEAST_GROUP // size), 1)
    out = x.new_empty(len(x), len(weight.data), dtype=_result(x, float32))
    for begin in range(0, len(weight.data), OUTPUT_TILE):
        part = slice(begin, begin + OUTPUT_TILE)
        matrix, factors, minima = weight_integers(weight, part)
        product = torch.zeros(len(x), len(matrix), dtype=torch.float32, device=x.device)
        for group in range(matrix.shape[1]):
            total = F.linear(terms[:, group], matrix[:, group])
            product += total * (scale[:, group, None] * factors[:, group])
            if minima is not None:
                sums = terms[:, group].sum(-1) * scale[:, group]
                product += sums[:, None] * minima[:, group]
        if weight.scale is not None and not weight.is_mxfp4:
            product *= weight.scale[part]
        out[:, part] = product if bias is None else product + bias[part].float()
    return out


def _activations(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Return the float32 values that enter the product, and the scale that multiplies the result.

    The scale is [rows, 1], or None if nothing multiplies the result.
    """
    if weight.activations is Activations.PLAIN:
        return x.float(), None
    stored = format_of(weight.data)
    format = stored if stored.is_e4m3 else Format.E4M3FN
    if weight.activations is Activations.STATIC:
        assert weight.input_scale is not None
        scale = torch.full((len(x), 1), weight.input_scale, dtype=torch.float32, device=x.device)
    elif weight.scale is not None and weight.scale.ndim == 2:
        padded = F.pad(x, (0, -x.shape[1] % BLOCK))  # zeros do not raise an amax
        by_group = scale_from_amax(amax(padded.unflatten(1, (-1, BLOCK)), -1), format)
        scale = by_group.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        return decode(encode(x, scale, format), scale), None
    else:
        scale = scale_from_amax(amax(x, -1), format)[:, None]
    return decode(encode(x, scale, format)), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    A weight in x's dtype multiplies the rounded norm, as in Llama; a float32 weight multiplies
    before the only rounding, as in Gemma, whose weights are stored as their difference from 1.
    """
    values = x.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        return weight * normed.to(x.dtype)
    return (normed * weight).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    consumer: PackedWeight | None = None,
    delta_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + delta in x's dtype (x if delta is None), and the `rms_norm` of that.

    x, delta: [rows, size]. With `delta_weight` the `rms_norm` of delta is added instead of delta.
    """
    if delta is not None:
        x = x + (delta if delta_weight is None else rms_norm(delta, delta_weight, eps))
    return x, rms_norm(x, weight, eps)


def gelu(x: Tensor) -> Tensor:
    """Return x / 2 * (1 + erf(x / sqrt(2))) of float32 (Hendrycks and Gimpel 2016). With erfc nothing
    cancels where x is far below 0.
    """
    return x * (0.5 * torch.erfc(x * -math.sqrt(0.5)))


def gated(
    gate_up: Tensor, activation: GatedActivation, consumer: PackedWeight | None = None
) -> Tensor:
    """Return activation(gate) * up of a merged [rows, 2 * intermediate_size], gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation.function is GatedFunction.CLAMPED_SWIGLU:  # 7 and 1.702 are those of gpt-oss
        gate = gate.clamp(max=7.0)
        up = up.clamp(-7.0, 7.0)
        return (gate / (1.0 + torch.exp(-1.702 * gate)) * (up + 1.0)).to(gate_up.dtype)
    if activation.function is GatedFunction.GELU_TANH:
        value = F.gelu(gate, approximate="tanh")
    elif activation.function is GatedFunction.GEGLU:
        value = gelu(gate)
    else:
        value = gate / (1.0 + torch.exp(-gate))
    limit = activation.limit or math.inf  # 0: the function has no limit
    return (value.clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding (Su et al. 2021) to the first rotary_dim channels of each head.

    Channels i and i + rotary_dim / 2 are a pair. x: [rows, heads, head_dim]; cos, sin: [rows,
    rotary_dim / 2] float32 at each row's position.
    """
    half = cos.shape[1]
    first, second, unrotated = x.float().tensor_split((half, 2 * half), dim=-1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.cat(
        (first * cos - second * sin, second * cos + first * sin, unrotated), dim=-1
    ).to(x.dtype)


def rotate_queries(q: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """Apply `rotate` at `positions`, then multiply by `rotary.q_factor`; each rounds to q's dtype.

    q: [rows, num_heads, k_dim]; positions: [rows] int64.
    """
    q = rotate(q, rotary.cos[positions], rotary.sin[positions])
    if rotary.q_factor is None:
        return q
    return q * rotary.q_factor[positions].to(q.dtype)[:, None, None]


def split_heads(qkv: Tensor, rotary: Rotary, pages: KVPages) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v before rotary embedding: q and k normed, the center of keys subtracted.

    qkv: [rows, num_heads * k_dim + num_kv_heads * (k_dim + v_dim)], the heads of q, then of k, then
    of v.
    """
    num_kv_heads = pages.k.shape[2]
    k_dim = pages.k_dim
    v_dim = pages.v.shape[3]
    k_size = num_kv_heads * k_dim
    v_size = 0 if pages.v_in_k else num_kv_heads * v_dim
    q, k, v = qkv.split((qkv.shape[1] - k_size - v_size, k_size, v_size), 1)
    q = q.unflatten(1, (-1, k_dim))
    k = k.unflatten(1, (-1, k_dim))
    v = v.unflatten(1, (-1, v_dim))
    if rotary.norms is not None:
        q_norm, k_norm = rotary.norms
        q = rms_norm(q, q_norm, rotary.eps)
        k = rms_norm(k, k_norm, rotary.eps)
    if pages.k_center is not None:
        k = (k.float() - pages.k_center.b).to(k.dtype)
    return q, k, v


def rotate_store(
    qkv: Tensor, rotary: Rotary, positions: Tensor, slots: Tensor | None, pages: KVPages
) -> Tensor:
    """Run the steps between projection and attention, and return q, [rows, num_heads, k_dim].

    The steps are `split_heads`, `rotate` of k at `positions`, `store_kv`, and `rotate_queries`.
    Without slots `qkv` holds only the heads of q.
    """
    if slots is None:
        q = qkv.unflatten(1, (-1, pages.k_dim))
        normed = q if rotary.norms is None else rms_norm(q, rotary.norms[0], rotary.eps)
        return rotate_queries(normed, rotary, positions)
    q, k, v = split_heads(qkv, rotary, pages)
    store_kv(rotate(k, rotary.cos[positions], rotary.sin[positions]), v, slots, pages)
    return rotate_queries(q, rotary, positions)


def store_kv(k: Tensor, v: Tensor, slots: Tensor, pages: KVPages) -> None:
    """Quantize k and v, [rows, num_kv_heads, k_dim or v_dim], into the slots of the pages.

    Slot -1 stores nothing. With `group` scales the first channels of k are stored in bfloat16.
    Adds to the pages' counters: NaNs, and values clipped to the range of their scale. Those of each
    row are counted on their own as well, where `counters_of_rows` has room for them.
    """
    stores = slots >= 0
    by_row = torch.zeros(len(slots), 2, dtype=torch.int64, device=slots.device)
    parts = [(k, pages.k, pages.k_scale)]
    if not pages.v_in_k:
        parts.append((v, pages.v, pages.v_scale))
    for rows, page, scale in parts:
        values = rows[stores]
        by_row[stores, 0] += values.isnan().sum((1, 2))
        if not pages.format.is_quantized:
            write_slots(page, slots[stores], values.to(page.dtype))
            continue
        factor: Tensor | float = 1.0
        if pages.dynamic:
            assert scale is not None
            vectors = values
            if pages.rotated is not None:
                first, values = values.split((pages.rotated.shape[3], page.shape[3]), -1)
                write_slots(pages.rotated, slots[stores], first.to(torch.bfloat16))
                vectors = values.unflatten(-1, (-1, SCALE_GROUP))
            # [rows, num_kv_heads], or [rows, num_kv_heads, groups]; bfloat16
            measured = token_scale(amax(vectors, -1), pages.format)
            write_slots(scale, slots[stores], measured)
            factor = spread(measured)
        elif scale is not None:
            factor = scale
        by_row[stores, 1] += clipped(values, factor, pages.format).sum((1, 2))
        write_slots(page, slots[stores], encode(values, factor, pages.format))
    pages.counters.add_(by_row.sum(0))
    row_counters = pages.counters_of_rows(len(slots))
    if row_counters is not None:
        row_counters.copy_(by_row)


def slots_at(positions: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Return the slots of `positions` of a sequence with these `blocks`, int64 as both."""
    return blocks[positions // block_size] * block_size + positions % block_size


def load_slots(page: Tensor, token_scale: Tensor | None, slots: Tensor) -> Tensor:
    """Read `slots` [count] as key tiles [tiles, num_kv_heads, KEY_TILE, dim].

    The result is float32. Scales of tokens and of their groups are multiplied in; static ones
    multiply q and the output of attention instead. What is behind the slots in the last tile is 0:
    other slots may hold anything, NaN included.
    """
    heads, dim = page.shape[2:]
    values = decode(read_slots(page, slots))
    if token_scale is not None:
        values = values * spread(read_slots(token_scale, slots))
    tiles = -(-len(slots) // KEY_TILE)
    padded = values.new_zeros(tiles * KEY_TILE, heads, dim)
    padded[: len(slots)] = values
    return padded.view(tiles, KEY_TILE, heads, dim).transpose(1, 2).contiguous()


def load_keys_and_values(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Read the keys and values of `slots` as `load_slots` does, keys transposed: [tiles,
    num_kv_heads, k_dim, KEY_TILE] and [tiles, num_kv_heads, KEY_TILE, v_dim].
    """
    scales = (pages.k_scale, pages.v_scale) if pages.dynamic else (None, None)
    k = load_slots(pages.k, scales[0], slots)
    v = k
    if pages.rotated is None:
        v = load_slots(pages.v, scales[1], slots)
    else:
        k = torch.cat((load_slots(pages.rotated, None, slots), k), -1)
    return k.transpose(2, 3).contiguous(), v


class Fp8Products(StrEnum):
    """The products of attention that multiply FP8 by FP8, over E4M3 pages without `group` scales.

    The other products decode K and V first.
    """

    NONE = "none"
    SCORES = "scores"  # Q·Kᵀ: each row of q is rounded to E4M3 with its own scale
    # Also P·V, unless V has `token` scales: probabilities are multiplied by a power of two and
    # rounded to E4M3.
    BOTH = "both"


def attention(
    q: Tensor,
    pages: KVPages,
    sequences: Sequences,
    call: AttentionCall,
    products: Fp8Products = Fp8Products.NONE,
) -> Tensor:
    """Compute grouped-query attention of each row over the stored keys of its sequence.

    q: [num_tokens, num_heads, k_dim]; the sequences' keys, this step's included, are stored
    already. A key at position j is visible from position i if j <= i or the call is not causal, and
    with a sliding window, if |i - j| < window. With a soft cap (Gemma 2, Riviere et al. 2024) a
    score s = softmax_scale * q . k becomes soft_cap * tanh(s / soft_cap). Sinks are an additional
    score of each row of that head whose value is 0, so that it enters only the sum of the softmax
    (Xiao et al. 2024; learned in gpt-oss, arXiv 2508.10925). Neither window, soft cap nor center
    changes it.
    Returns [num_tokens, num_heads, v_dim] in q's dtype; computes in float32. Raises KernelError for
    a context shorter than its queries: a row before the first key would have no key to attend to.
    """
    out = q.new_empty(*q.shape[:2], pages.v.shape[3])
    window = call.window
    assert call.causal or sequences.are_whole, "later keys of a sequence are not stored yet"
    starts = sequences.query_starts.tolist()
    lengths = sequences.context_lens.tolist()
    for seq, length in enumerate(lengths):
        begin = starts[seq]
        end = starts[seq + 1]
        if length < end - begin:
            raise KernelError(
                "a sequence has more queries than keys: its context must include the tokens of this step; "
                f"sequence {seq} has {end - begin} and {length}"
            )
        if begin == end:
            continue
        # Keys before the first row's window are not read: their blocks may have been freed.
        skipped = 0 if window is None else max(0, length - (end - begin) - window + 1) // KEY_TILE
        table = sequences.block_tables[seq, : -(-length // pages.block_size)].long()
        position = torch.arange(skipped * KEY_TILE, length, dtype=torch.int64, device=q.device)
        k, v = load_keys_and_values(pages, slots_at(position, table, pages.block_size))
        for row in range(begin, end, QUERY_TILE):
            rows = slice(row, min(row + QUERY_TILE, end))
            first = length - (end - row)  # position of the tile's first row
            out[rows] = attend_tile(
                q[rows],
                k,
                v,
                first,
                length,
                skipped,
                pages,
                call,
                products,
            )
    return out


def _by_kv_head(rows: Tensor) -> Tensor:
    """Rearrange [rows, num_kv_heads, group, n] to [num_kv_heads, rows * group, n]."""
    return rows.permute(1, 0, 2, 3).flatten(1, 2).contiguous()


def _rounded_probabilities(probabilities: Tensor, format: Format) -> Tensor:
    """Round numbers in [0, 1] as E4M3 does after scaling by its largest power of two."""
    scale = 2.0 ** -math.floor(math.log2(format.max))
    return decode(encode(probabilities, scale, format), scale)


def _weighted(probabilities: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return probabilities @ v of a key tile.

    A NaN or infinity in v reaches only the rows that see its key: 0 times it would be NaN.
    """
    out = torch.bmm(probabilities, v)
    for row in range(0 if v.isfinite().all() else len(seen)):
        out[:, row] = torch.bmm(probabilities, v.masked_fill(~seen[row, :, None], 0.0))[:, row]
    return out


def attend_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    length: int,
    skipped: int,
    pages: KVPages,
    call: AttentionCall,
    products: Fp8Products,
) -> Tensor:
    """Attend with one query tile, at positions from `first` on, over the key tiles of a sequence of
    `length` keys.

    k (transposed) and v hold the tiles from tile `skipped` on. Returns [rows, num_heads, v_dim].
    """
    rows, num_heads, dim = q.shape
    window = call.window
    soft_cap = call.soft_cap
    sinks = call.sinks
    num_kv_heads = v.shape[1]
    group = num_heads // num_kv_heads
    padded = q.new_zeros(QUERY_TILE, num_kv_heads, group, dim, dtype=torch.float32)
    padded[:rows] = q.view(rows, num_kv_heads, group, dim).float() * call.softmax_scale
    center = pages.k_center
    coefficients = None if center is None else _by_kv_head(center.coefficients(padded))
    static = pages.scale_kind is ScaleKind.STATIC
    if static:
        assert pages.k_scale is not None
        padded *= pages.k_scale[:, None]
    queries = _by_kv_head(padded)
    if not pages.format.is_e4m3 or pages.scale_kind is ScaleKind.GROUP:
        products = Fp8Products.NONE
    if products is not Fp8Products.NONE:
        scale = scale_from_amax(amax(queries, -1), pages.format)[..., None]
        queries = decode(encode(queries, scale, pages.format), scale)
    position = (
        first
        + torch.arange(QUERY_TILE * group, dtype=torch.int64, device=q.device)[:, None] // group
    )
    start = (
        sinks if sinks is not None else q.new_full((num_heads,), -torch.inf, dtype=torch.float32)
    )
    best = start.view(num_kv_heads, group, 1).repeat(1, QUERY_TILE, 1)
    total = torch.full_like(best, 0.0 if sinks is None else 1.0)
    output = queries.new_zeros(*queries.shape[:2], v.shape[-1])
    begin = 0 if window is None else max(0, first - window + 1) // KEY_TILE
    end = first + rows if call.causal else length
    if window is not None:
        end = min(end, first + rows - 1 + window)
    for tile in range(begin, -(-end // KEY_TILE)):
        key = torch.arange(
            tile * KEY_TILE, (tile + 1) * KEY_TILE, dtype=torch.int64, device=q.device
        )
        seen = key <= position if call.causal else (key < length).expand(len(position), -1)
        if window is not None:
            seen = seen & ((position - key).abs() < window)
        scores = torch.bmm(queries, k[tile - skipped])
        if center is not None and coefficients is not None:
            scores = scores + torch.bmm(coefficients, center.angles(tile))
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        # -inf - -inf would be NaN: a row that has seen no key yet subtracts 0.
        reference = new_best.masked_fill(new_best == -torch.inf, 0.0)
        probabilities = torch.exp(scores - reference)
        decay = torch.exp(best - reference)
        total = total * decay + probabilities.sum(-1, keepdim=True)
        if products is Fp8Products.BOTH and not pages.dynamic:
            probabilities = _rounded_probabilities(probabilities, pages.format)
        output = output * decay + _weighted(probabilities, v[tile - skipped], seen)
        best = new_best
    output = (output / total).view(num_kv_heads, QUERY_TILE, group, -1).permute(1, 0, 2, 3)[:rows]
    if static:
        assert pages.v_scale is not None
        output = output * pages.v_scale[:, None]
    return output.reshape(rows, num_heads, -1).to(q.dtype)
