"""StoredTokens: keys or values of one layer in FP8, in one tensor, for unpaged attention.

The bytes and scales are those that `rotate_store` writes into pages for the same keys and values.
`read` decodes all of them. `append`, `keep` and `select` are the only writers.

Memory is allocated outside of inference mode: an inference tensor cannot be written to later, and a
cache that was filled in `torch.inference_mode()` is often continued by `generate`, which runs under
`no_grad` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freight.errors import ConfigError
from freight.fp8.cast import amax, decode, encode, token_scale, torch_dtype
from freight.fp8.formats import Format

# memory is allocated for this many further tokens, or for this part of the tokens if that is more
SPARE_TOKENS = 16
SPARE_PART = 32  # one 32nd


@dataclass(frozen=True)
class Storage:
    """The stored form of a layer's keys, or of its values.

    `scale` is the static scale, [num_kv_heads, head_dim] float32; None with `dynamic`, and if
    stored values need no scale.
    """

    format: Format
    dynamic: bool
    scale: Tensor | None = None


class StoredTokens:
    """The keys, or the values, of one layer: bytes [batch, num_kv_heads, tokens, head_dim], and, if
    dynamic, bfloat16 scales [batch, num_kv_heads, tokens], in memory with spare room for further
    tokens.
    """

    @torch.inference_mode(False)
    def __init__(self, storage: Storage, states: Tensor) -> None:
        """Start empty, for states of the shape and on the device of `states`. Raises ConfigError if
        the scales have another shape.
        """
        batch, heads, _, dim = states.shape
        if storage.scale is not None and storage.scale.shape != (heads, dim):
            raise ConfigError(
                f"the KV scales are for {list(storage.scale.shape)} KV heads and channels, but the keys or values have "
                f"{[heads, dim]}; use the scales of the same model"
            )
        self._format = storage.format
        self._dynamic = storage.dynamic
        self._static = None if storage.scale is None else storage.scale.to(states.device)
        self._bytes = torch.empty((batch, heads, 0, dim), dtype=torch.uint8, device=states.device)
        self._scales = torch.empty((batch, heads, 0), dtype=torch.bfloat16, device=states.device)
        self._begin = self._end = 0  # the range of tokens in use; content outside is unspecified

    @property
    def num_tokens(self) -> int:
        return self._end - self._begin

    @property
    def stored(self) -> Tensor:
        """The FP8 values, [batch, num_kv_heads, tokens, head_dim]."""
        return self._bytes[:, :, self._begin : self._end].view(torch_dtype(self._format))

    @property
    def scale(self) -> Tensor | None:
        """The scales: bfloat16 [batch, num_kv_heads, tokens], float32 [num_kv_heads, head_dim], or
        None.
        """
        if self._dynamic:
            return self._scales[:, :, self._begin : self._end]
        return self._static

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes, with the scales and the spare room."""
        num_bytes = self._bytes.nbytes + self._scales.nbytes
        if self._static is not None:
            num_bytes += self._static.nbytes
        return num_bytes

    def append(self, states: Tensor) -> None:
        """Quantize states, [batch, num_kv_heads, new tokens, head_dim], and store them after the
        others.
        """
        end = self._end + states.shape[2]
        states = states.detach()
        if end > self._bytes.shape[2]:
            self._allocate(self.num_tokens + states.shape[2])
            end = self._end + states.shape[2]
        new = slice(self._end, end)
        factor: Tensor | float = 1.0
        if self._dynamic:
            measured = token_scale(amax(states, -1), self._format)
            self._scales[:, :, new] = measured
            factor = measured.float()[..., None]
        elif self._static is not None:
            factor = self._static[:, None]
        self._bytes[:, :, new] = encode(states, factor, self._format).view(torch.uint8)
        self._end = end

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the stored values in `dtype`, [batch, num_kv_heads, tokens, head_dim]."""
        scale = self.scale
        if scale is None:
            return decode(self.stored).to(dtype)
        if self._dynamic:
            scale = scale.float()[..., None]
        else:
            scale = scale[:, None]
        return decode(self.stored, scale).to(dtype)

    def keep(self, last: int, but: int = 0) -> None:
        """Forget the last `but` tokens, and of the others all but the last `last` ones."""
        self._end = max(self._begin, self._end - but)
        self._begin = max(self._begin, self._end - last)
        if self._bytes.shape[2] > self.num_tokens + 2 * _spare(self.num_tokens):
            self._allocate(self.num_tokens)

    def select(self, rows: Tensor) -> None:
        """Replace the batch by these rows of it: indices, or a mask."""
        rows = rows.to(self._bytes.device)
        with torch.inference_mode(False):
            self._bytes = self._bytes[rows]
            self._scales = self._scales[rows]

    @torch.inference_mode(False)
    def _allocate(self, tokens: int) -> None:
        """Move the tokens in use to new memory for `tokens` tokens and a reserve."""
        batch, heads, _, dim = self._bytes.shape
        capacity = tokens + _spare(tokens)
        used = self.num_tokens
        stored = self._bytes.new_empty((batch, heads, capacity, dim))
        stored[:, :, :used] = self._bytes[:, :, self._begin : self._end]
        if self._dynamic:
            scales = self._scales.new_empty((batch, heads, capacity))
            scales[:, :, :used] = self._scales[:, :, self._begin : self._end]
            self._scales = scales
        self._bytes = stored
        self._begin = 0
        self._end = used


def _spare(tokens: int) -> int:
    return max(SPARE_TOKENS, tokens // SPARE_PART)
