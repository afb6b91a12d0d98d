"""KVPages: one layer's pages of the KV cache, the scales they were written with, and the center
subtracted from keys before.

The format follows from the tensor's dtype and is never passed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from freight.fp8.cast import format_of
from freight.fp8.formats import SCALE_GROUP, Format, ScaleKind

# Norms of the bias of a pair of key channels: a layer is centered if one has the first, and then
# the pairs that have the second
LARGE_BIAS = 8.0
SMALL_BIAS = 4.0


@dataclass(frozen=True)
class KeyCenter:
    """A constant b, subtracted from keys before their rotary embedding R; attention adds its part
    back to the scores.

    The stored key is R(p)(k - b), with p the key's position, so a score is q . stored + q . R(p)b.
    With c and s the cosine and sine of a pair's angle at p, the pair's part of q . R(p)b is
    c (q1 b1 + q2 b2) + s (q2 b1 - q1 b2). b is 0 except in `num_pairs` channel pairs
    (i, i + rotary_dim / 2) of each KV head, so also in every channel that is not rotated.

    b          [num_kv_heads, k_dim] float32
    pairs      [num_kv_heads, num_pairs] int32; padded with pairs whose b is 0
    parts      [2, num_kv_heads, num_pairs] float32: b1 and b2 of these pairs
    cos, sin   [positions / 64, rotary_dim / 2, 64] float32; the same tensors for all layers
    """

    b: Tensor
    pairs: Tensor
    parts: Tensor
    cos: Tensor
    sin: Tensor

    @staticmethod
    def angle_tiles(table: Tensor) -> Tensor:
        """Cut cosines or sines by position, [positions, rotary_dim / 2], into tiles of 64
        positions, the last padded: [tiles, rotary_dim / 2, 64].
        """
        padded = torch.cat((table, table.new_zeros(-len(table) % 64, table.shape[1])))
        return padded.view(-1, 64, table.shape[1]).transpose(1, 2).contiguous()

    @staticmethod
    def of(b: Tensor, cos: Tensor, sin: Tensor) -> KeyCenter:
        """Build the center from b, not all zero, and the angles from `angle_tiles`."""
        half = cos.shape[1]
        assert not b[:, 2 * half :].any()
        # [2, num_kv_heads, rotary_dim / 2]
        halves = torch.stack((b[:, :half], b[:, half : 2 * half]))
        used = (halves != 0).any(0)
        num_pairs = int(used.sum(-1).max())
        pairs = torch.sort(used.byte(), dim=-1, descending=True, stable=True).indices[:, :num_pairs]
        parts = halves.gather(-1, pairs.expand(2, -1, -1)).contiguous()
        return KeyCenter(b, pairs.int().contiguous(), parts, cos, sin)

    @staticmethod
    def of_bias(bias: Tensor, rotary_dim: int) -> Tensor | None:
        """Return the part of a key's bias that is worth subtracting: b, [num_kv_heads, k_dim]; None
        where no pair of channels has a norm of LARGE_BIAS.

        Rounding to 8 bits has a relative error, or one that grows with the largest channel, so a
        bias that is many times what a token adds to it drowns the token. Keys without their biases
        are of the size of 1 in each channel, as scores are divided by the root of head_dim. Channels
        that are not rotated have no center. bias: float32 [num_kv_heads, k_dim].
        """
        half = rotary_dim // 2
        norms = torch.hypot(bias[:, :half], bias[:, half : 2 * half])
        norms = torch.where(norms.isfinite(), norms, 0.0)  # what is not finite stays in the keys
        if half == 0 or float(norms.max()) < LARGE_BIAS:
            return None
        subtracted = norms >= SMALL_BIAS
        b = torch.zeros_like(bias)
        b[:, : 2 * half] = bias[:, : 2 * half] * subtracted.repeat(1, 2)
        return b

    def coefficients(self, q: Tensor) -> Tensor:
        """Return the factors of the cosines, then of the sines, for each row: float32 [rows,
        num_kv_heads, group, 2 * num_pairs].

        q: float32 [rows, num_kv_heads, group, k_dim], rotated.
        """
        half = self.cos.shape[1]
        index = self.pairs.long()[None, :, None].expand(*q.shape[:3], -1)
        first = q.gather(-1, index)
        second = q.gather(-1, index + half)
        b1, b2 = self.parts[:, None, :, None]
        return torch.cat((first * b1 + second * b2, second * b1 - first * b2), -1)

    def angles(self, tile: int) -> Tensor:
        """Return the cosines, then the sines, of the pairs in a tile of 64 positions: float32
        [num_kv_heads, 2 * num_pairs, 64].
        """
        pairs = self.pairs.long()
        return torch.cat((self.cos[tile][pairs], self.sin[tile][pairs]), 1)


# Distances of blocks, tokens and heads, in units of as many values as the last number: their
# greatest common divisor, because kernels count units in 32 bits.
Strides = tuple[int, int, int, int]


def _strides_of(tensor: Tensor | None) -> Strides:
    """Return the strides of pages or scales; a placeholder for None."""
    if tensor is None:
        return 0, 1, 0, 1
    block, token, head = tensor.stride()[:3]
    unit = math.gcd(block, token, head)
    blocks, tokens, heads = tensor.shape[:3]
    assert (blocks * block + tokens * token + heads * head) // unit < 2**31
    return block // unit, token // unit, head // unit, unit


@dataclass(frozen=True)
class IndexPages:
    """The keys of one layer's indexer, which chooses the keys that attention reads. They are in the
    blocks and slots of the layer's pages.

    k       [num_blocks, block_size, 1, channels], quantized or 16/32-bit, of any strides but the last
    scale   [num_blocks, block_size, 1] float32, of any strides: the scale of each token's key,
            measured when it is stored; None: stored values are the true ones
    """

    k: Tensor
    scale: Tensor | None = None

    @property
    def format(self) -> Format:
        """Stored format, from the dtype of k."""
        return format_of(self.k)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[1]


@dataclass(frozen=True)
class KVPages:
    """One layer's pages, the scales they were written with, and the center subtracted from keys
    before that.

    k, v               [num_blocks, block_size, num_kv_heads, k_dim or v_dim], quantized or
                       16/32-bit. The values of a head of a token are adjacent; other strides are
                       free and make the layout of a block
    k_scale, v_scale   None: stored values need no scale (16 or 32 bits, or `unit`);
                       [num_kv_heads, k_dim or v_dim] float32: static, of any granularity;
                       [num_blocks, block_size, num_kv_heads] bfloat16, of any strides: `token`;
                       [num_blocks, block_size, num_kv_heads, v_dim / SCALE_GROUP] bfloat16, the
                       last dimension adjacent, the same tensor for both: `group`
    counters           [2] int64: NaNs stored so far (they stay NaN), and values clipped because
                       they exceeded the range of their scale
    row_counters       [rows, 2] int64: the same counts of each row of the last call that had no more
                       rows and stored any; None: not wanted
    k_center           subtracted from keys by `rotate_store`, added back to the scores by
                       `attention`
    v_in_k             whether v is a view of channels of k, as for latents: storing the keys stores
                       the values
    rotated            with `group` scales only: the first channels of keys, [num_blocks,
                       block_size, num_kv_heads, k_dim - v_dim] bfloat16, of any strides like k. k
                       then has the other channels, which are v's
    index              keys of the layer's indexer; None: it has none
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    counters: Tensor
    k_center: KeyCenter | None = None
    v_in_k: bool = False
    rotated: Tensor | None = None
    row_counters: Tensor | None = None
    index: IndexPages | None = None

    def __post_init__(self) -> None:
        assert self.k.stride(3) == self.v.stride(3) == 1
        assert (self.rotated is not None) == (self.scale_kind is ScaleKind.GROUP)
        assert self.rotated is None or self.v_in_k
        assert self.k_center is None or not self.v_in_k, (
            "the values would lack what is subtracted from keys"
        )

    @property
    def format(self) -> Format:
        """Stored format of keys and values, from the dtype of k."""
        return format_of(self.k)

    def counters_of_rows(self, rows: int) -> Tensor | None:
        """Return where to count each of `rows` rows on its own; None: nowhere."""
        by_row = self.row_counters
        if by_row is None or rows > len(by_row):
            return None
        return by_row[:rows]

    @property
    def k_dim(self) -> int:
        """Channels of a key of one head."""
        channels = self.k.shape[3]
        if self.rotated is not None:
            channels += self.rotated.shape[3]
        return channels

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[1]

    @cached_property
    def strides(self) -> tuple[Strides, Strides, Strides, Strides]:
        """Strides of k, v, and their `token` or `group` scales; placeholders for scales that do not
        exist.
        """
        k = _strides_of(self.k)
        v = _strides_of(self.v)
        if self.dynamic:
            return k, v, _strides_of(self.k_scale), _strides_of(self.v_scale)
        return k, v, _strides_of(None), _strides_of(None)

    @property
    def dynamic(self) -> bool:
        """True if each token has scales measured when it is stored: `token` or `group`."""
        return self.scale_kind in (ScaleKind.TOKEN, ScaleKind.GROUP)

    @property
    def scale_kind(self) -> ScaleKind:
        """Form of the scales, from their number of dimensions."""
        if self.k_scale is None:
            return ScaleKind.NONE
        return {2: ScaleKind.STATIC, 3: ScaleKind.TOKEN, 4: ScaleKind.GROUP}[self.k_scale.ndim]


def read_slots(page: Tensor, slots: Tensor) -> Tensor:
    """Return the content of `slots` [rows]: [rows, num_kv_heads, dim] of k or v, [rows,
    num_kv_heads] of `token` scales, with a further dimension for `group` scales.

    Slot s is token s % block_size of block s // block_size, whatever the strides of `page`.
    """
    block_size = page.shape[1]
    return _bytes(page)[slots // block_size, slots % block_size].view(page.dtype)


def write_slots(page: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store `values` in `slots` [rows], in the dtype and shape that `read_slots` returns."""
    block_size = page.shape[1]
    _bytes(page)[slots // block_size, slots % block_size] = _bytes(values)


def spread(scales: Tensor) -> Tensor:
    """Expand `token` or `group` scales from `read_slots` to factors of the values: float32 [rows,
    num_kv_heads, 1 or v_dim].
    """
    if scales.ndim == 2:
        return scales.float()[..., None]
    return scales.float().repeat_interleave(SCALE_GROUP, -1)


def _bytes(values: Tensor) -> Tensor:
    """View FP8 as bytes, because torch cannot index it; return other dtypes unchanged."""
    if values.itemsize == 1:
        return values.view(torch.uint8)
    return values
