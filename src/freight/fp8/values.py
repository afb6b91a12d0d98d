"""Quantized data: a Linear's weight, and the pages of one layer's KV cache, each with its scales.

Tensors and scales are always passed together. The format follows from the tensor's dtype and is never passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.fp8.formats import Format
from freight.fp8.quantize import decode, format_of
from freight.fp8.scheme import Activations as Activations
from freight.fp8.weights import BLOCK, expand_blocks


@dataclass(frozen=True)
class Weight:
    """The matrix of a Linear.

    data           [out_features, in_features], contiguous; FP8 or 16/32-bit
    scale          None for 16/32 bits; float32 [out_features], one per output row; or float32
                   [ceil(out_features / 128), ceil(in_features / 128)], one per 128 x 128 block
    activations    how the input is quantized; PLAIN unless data is FP8
    input_scale    the static activation scale, > 0; only with STATIC
    input_limit    only with DYNAMIC: the Linear layer clips its input to this magnitude; kernels do not see it
    """

    data: Tensor
    scale: Tensor | None = None
    activations: Activations = Activations.PLAIN
    input_scale: float | None = None
    input_limit: float | None = None

    def dequantized(self) -> Tensor:
        """[out_features, in_features] float32: every stored value times its scale, rounded once."""
        if self.scale is None:
            return self.data.float()
        scale = self.scale[:, None] if self.scale.ndim == 1 else expand_blocks(self.scale, self.data.shape)
        return decode(self.data, scale)

    @staticmethod
    def mergeable(parts: Sequence[Weight]) -> bool:
        """Whether `concat` is exact: schemes and input scales agree, and no block of 128 rows spans two parts."""
        blocks = any(part.scale is not None and part.scale.ndim == 2 for part in parts)
        return len({part._kind for part in parts}) == 1 and not (
            blocks and any(len(part.data) % BLOCK for part in parts[:-1])
        )

    @property
    def _kind(self) -> tuple[object, ...]:
        dims = None if self.scale is None else self.scale.ndim
        return self.data.dtype, dims, self.activations, self.input_scale, self.input_limit

    @staticmethod
    def concat(parts: Sequence[Weight]) -> Weight:
        """Merge `mergeable` parts along the output features (q, k, v or gate, up): exact, rows keep their bits."""
        first = parts[0]
        if len(parts) == 1:
            return first
        assert Weight.mergeable(parts)
        scales = [part.scale for part in parts if part.scale is not None]
        return replace(first, data=torch.cat([p.data for p in parts]), scale=torch.cat(scales) if scales else None)


@dataclass(frozen=True)
class KeyCenter:
    """A constant b, subtracted from keys before their rotary embedding R; attention adds it back to the scores.

    What is stored is R(p)(k - b), p the key's position, so a score is q . stored + q . R(p)b. With c and s the cosine
    and sine of a pair's angle at p, its part of q . R(p)b is c (q1 b1 + q2 b2) + s (q2 b1 - q1 b2), at every position.
    b is 0 except in `num_pairs` channel pairs (i, i + head_dim / 2) of each KV head.

    b          [num_kv_heads, head_dim] float32
    pairs      [num_kv_heads, num_pairs] int32; padded with pairs whose b is 0
    parts      [2, num_kv_heads, num_pairs] float32: b1 and b2 of these pairs
    cos, sin   [positions / 64, head_dim / 2, 64] float32; the same tensors for all layers
    """

    b: Tensor
    pairs: Tensor
    parts: Tensor
    cos: Tensor
    sin: Tensor

    @staticmethod
    def angle_tiles(table: Tensor) -> Tensor:
        """Cosines or sines by position, [positions, head_dim / 2] -> by tiles of 64 positions, the last one padded."""
        padded = torch.cat((table, table.new_zeros(-len(table) % 64, table.shape[1])))
        return padded.view(-1, 64, table.shape[1]).transpose(1, 2).contiguous()

    @staticmethod
    def of(b: Tensor, cos: Tensor, sin: Tensor) -> KeyCenter:
        """From b, not all zero, and the angles as `angle_tiles` makes them."""
        halves = torch.stack(b.chunk(2, dim=-1))  # [2, num_kv_heads, head_dim / 2]
        used = (halves != 0).any(0)
        num_pairs = int(used.sum(-1).max())
        pairs = torch.sort(used.byte(), dim=-1, descending=True, stable=True).indices[:, :num_pairs]
        parts = halves.gather(-1, pairs.expand(2, -1, -1)).contiguous()
        return KeyCenter(b, pairs.int().contiguous(), parts, cos, sin)

    def coefficients(self, q: Tensor) -> Tensor:
        """What multiplies the cosines, then the sines, of each row: float32 [rows, num_kv_heads, group, 2 * num_pairs].

        q: float32 [rows, num_kv_heads, group, head_dim], rotated.
        """
        half = q.shape[-1] // 2
        index = self.pairs.long()[None, :, None].expand(*q.shape[:3], -1)
        first, second = q.gather(-1, index), q.gather(-1, index + half)
        b1, b2 = self.parts[:, None, :, None]
        return torch.cat((first * b1 + second * b2, second * b1 - first * b2), -1)


@dataclass(frozen=True)
class KVPages:
    """One layer's pages, the scales they were written with, and the centers subtracted before that.

    k, v                [num_blocks, block_size, num_kv_heads, head_dim], FP8 or 16/32-bit
    k_scale, v_scale    None: stored values are the true ones (16 or 32 bits, or `unit`);
                        [num_kv_heads, head_dim] float32: static, whatever the granularity they came in;
                        [num_blocks, block_size, num_kv_heads] bfloat16: `token`
    counters            [2] int64: NaNs that were stored so far (FP8 keeps them NaN), and values that FP8 clipped
                        because they lay beyond the range of their scale
    k_center            subtracted from keys by `rotate_store`, added back to the scores by `attention`
    v_center            [num_kv_heads, head_dim] float32: subtracted from values by `rotate_store`, added back to the
                        output of `attention` by the layer
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    counters: Tensor
    k_center: KeyCenter | None = None
    v_center: Tensor | None = None

    @property
    def format(self) -> Format:
        return format_of(self.k)

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def dynamic(self) -> bool:
        """Whether each token has its own scales, measured when it is stored."""
        return self.k_scale is not None and self.k_scale.ndim == 3
