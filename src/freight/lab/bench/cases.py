"""What `freight bench kernels` measures: one operation with the memory that it reads, by kernel,
format and shape.

Shapes: `linear` [rows, out_features, in_features]; `attention` [batch, new tokens, context,
num_heads, num_kv_heads, head_dim]; `rotate_store` [tokens, num_heads + 2 * num_kv_heads, head_dim];
`by_head` [rows, num_heads, out_features, in_features]. Weights and pages hold random finite codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from freight.cache.groups import Pages
from freight.cache.pool import allocate_pool
from freight.cache.spec import KVCacheSpec, LayerKVSpec
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels.interface import KernelSet
from freight.lab.bench.timing import Spread
from freight.model.random_weights import RandomSource
from freight.operands.attention import AttentionCall
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary
from freight.operands.weight import Activations, Codes, Groups, Weight
from freight.settings.engine import KVCacheConfig

Call = Callable[[], object]
MOST_COPIES = 256  # what is so small that these fit into the caches is measured there
BLOCK_SIZE = 16
SCALE = 0.02
# Inputs of a group of a 4-bit weight, and the format of its scale
GROUPS = {Codes.INT4: (128, Format.BFLOAT16), Codes.E2M1: (16, Format.E4M3FN)}


@dataclass(frozen=True)
class Case:
    """One row. `calls` do the same on different memory; each has to move `num_bytes` and to do
    `num_flops`.
    """

    kernel: str
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    num_flops: int
    calls: Sequence[Call]

    def figures(self, spread: Spread, bandwidth: float) -> dict[str, Any]:
        """Return what --json prints of every row: `spread` in seconds, `bandwidth` in bytes per
        second.
        """
        return {
            "kernel": self.kernel,
            "format": self.format,
            "shape": list(self.shape),
            "median_us": spread.median * 1e6,
            "bandwidth_fraction": self.num_bytes / spread.median / bandwidth,
            "low_us": spread.low * 1e6,
            "high_us": spread.high * 1e6,
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer. `v_dim`: channels of a head of v; None: `head_dim`, as of q
    and k; `v_in_k`: whether they are the last of k (`KVPages.v_in_k`)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int | None = None
    v_in_k: bool = False

    @property
    def width(self) -> int:
        """Values of q, k and v that a token has."""
        width = (self.num_heads + self.num_kv_heads) * self.head_dim
        if not self.v_in_k:
            width += self.num_kv_heads * (self.v_dim or self.head_dim)
        return width


@dataclass(frozen=True)
class Bench:
    """Makes cases of `kernels` on `device`: with copies of what they read, as many as exceed
    `cache_size` bytes.
    """

    kernels: KernelSet
    device: str
    cache_size: int = 0

    def linear(
        self,
        rows: int,
        shape: tuple[int, int],
        format: Format,
        activations: Activations = Activations.DYNAMIC,
    ) -> Case:
        """Make the product with a weight [out_features, in_features]; `activations` are those of an
        FP8 or INT8 weight.
        """
        x = self._activations(rows, shape[1])
        source = self._source(format)
        size = math.prod(shape) * format.bytes
        name = str(format)
        if format.is_quantized:
            size += 4 * shape[0]
            name += f", activations {activations}"

        def copy() -> Call:
            weight = source.weight("", shape)
            if format.is_quantized:
                weight = replace(weight, activations=activations)
            return partial(self.kernels.linear, x, self.kernels.pack(weight), None)

        return self._product("linear", name, rows, shape, size, copy)

    def four_bit(
        self, rows: int, shape: tuple[int, int], codes: Codes, activations: Activations
    ) -> Case:
        """Make the product with a weight in 4 bits, whose in_features `GROUPS` divide; `activations`:
        GROUPS, which a model has by default, or PLAIN.
        """
        group, format = GROUPS[codes]
        dtype = torch_dtype(format)
        generator = torch.Generator(self.device).manual_seed(0)
        outputs, inputs = shape
        scales = torch.full(
            (outputs, inputs // group), SCALE, dtype=torch.float32, device=self.device
        )
        groups = Groups(codes, group, scales.to(dtype))
        x = self._activations(rows, inputs)

        def copy() -> Call:
            data = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=self.device)
            data.random_(0, 256, generator=generator)
            weight = Weight(data, activations=activations, groups=groups)
            return partial(self.kernels.linear, x, self.kernels.pack(weight), None)

        size = outputs * inputs // 2 + scales.numel() * dtype.itemsize
        name = f"{codes}, groups of {group}"
        if activations is Activations.GROUPS:
            name += ", inputs in int8"
        return self._product("linear", name, rows, shape, size, copy)

    def torch_linear(self, rows: int, shape: tuple[int, int]) -> Case:
        x = self._activations(rows, shape[1])
        format = Format.BFLOAT16
        source = self._source(format)

        def copy() -> Call:
            return partial(functional.linear, x, source.tensor("", shape))

        size = math.prod(shape) * format.bytes
        return self._product("torch.linear", str(format), rows, shape, size, copy)

    def scaled_mm(self, rows: int, shape: tuple[int, int], fast: bool = False) -> Case:
        """torch's FP8 product alone: activations are quantized beforehand. On a GPU with a scale
        for each row.
        """
        out_features, in_features = shape
        source = self._source(Format.E4M3FN)
        x = source.weight("", (rows, in_features))
        assert x.scale is not None
        scale_a = x.scale[:, None]
        scale_b = torch.full((1, out_features), SCALE, dtype=torch.float32, device=self.device)
        if self.device == "cpu":
            scale_a = torch.ones((), dtype=torch.float32, device=self.device)
            scale_b = scale_a

        def call(weight: Tensor) -> Tensor:
            product: Tensor = torch._scaled_mm(
                x.data, weight.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            return product

        def copy() -> Call:
            return partial(call, source.weight("", shape).data)

        name = str(Format.E4M3FN)
        if fast:
            name += ", fast sums"
        case = self._product("torch._scaled_mm", name, rows, shape, math.prod(shape), copy)
        return replace(case, num_bytes=case.num_bytes - rows * in_features)  # a byte of each

    def attention(
        self,
        batch_size: int,
        new_tokens: int,
        context: int,
        heads: Heads,
        format: Format,
        granularity: Granularity | None,
        note: str = "",
    ) -> Case:
        """Sequences of `context` keys, the last `new_tokens` of them new; their blocks lie in no
        order.
        """
        blocks = -(-context // BLOCK_SIZE)
        pages, size = self._pages(heads, format, granularity, batch_size * blocks)
        order = torch.randperm(
            batch_size * blocks,
            generator=torch.Generator().manual_seed(2),
            dtype=torch.int64,
            device="cpu",
        )
        slices = []
        token_ids = [0] * new_tokens
        for block_ids in order.view(batch_size, blocks).tolist():
            slices.append(SequenceSlice(token_ids, context - new_tokens, (block_ids,), Logits.LAST))
        sequences = prepare(slices, [Pages((0,), 0, None, BLOCK_SIZE)], self.device).sequences(0)
        q = self._activations(batch_size * new_tokens, heads.num_heads * heads.head_dim)
        q = q.view(-1, heads.num_heads, heads.head_dim)
        call = AttentionCall(heads.head_dim**-0.5)
        calls = [partial(self.kernels.attention, q, page, sequences, call) for page in pages]
        shape = (batch_size, new_tokens, context)
        size_of_ends, flops = attention_work(shape, heads)
        return Case(
            kernel="attention",
            format=cache_name(format, granularity) + note,
            shape=(*shape, heads.num_heads, heads.num_kv_heads, heads.head_dim),
            num_bytes=size * batch_size * context + size_of_ends,
            num_flops=flops,
            calls=calls,
        )

    def by_head(self, rows: int, shape: tuple[int, int, int]) -> Case:
        """Make the product of each head with its matrix, of `shape` [num_heads, out_features,
        in_features] in bfloat16.
        """
        heads, out_features, in_features = shape
        x = self._activations(rows, heads * in_features).view(rows, heads, in_features)
        format = Format.BFLOAT16
        source = self._source(format)

        def copy() -> Call:
            matrices = [source.weight("", (out_features, in_features)) for _ in range(heads)]
            return partial(self.kernels.by_head, x, self.kernels.pack_experts(matrices))

        size = math.prod(shape) * format.bytes
        return self._product("by_head", str(format), rows, shape, size, copy)

    def _product(
        self,
        kernel: str,
        format: str,
        rows: int,
        shape: tuple[int, ...],
        size: int,
        copy: Callable[[], Call],
    ) -> Case:
        """Make the case of a product with matrices [..., out_features, in_features] of `size` bytes;
        `copy` makes the call of one copy. Activations and results are in 16 bits.
        """
        vectors = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
        return Case(
            kernel=kernel,
            format=format,
            shape=(rows, *shape),
            num_bytes=size + 2 * rows * vectors,
            num_flops=2 * rows * math.prod(shape),
            calls=[copy() for _ in self._copies(size)],
        )

    def rotate_store(
        self, tokens: int, heads: Heads, format: Format, granularity: Granularity | None
    ) -> Case:
        pages, size = self._pages(heads, format, granularity, -(-tokens // BLOCK_SIZE))
        dim = heads.head_dim
        qkv = self._activations(tokens, heads.width)
        positions = torch.arange(tokens, dtype=torch.int64, device=self.device)
        slots = torch.randperm(tokens, dtype=torch.int64, device=self.device)
        rotary = Rotary(*torch.rand(2, tokens, dim // 2, dtype=torch.float32, device=self.device))
        inputs = (qkv, rotary, positions, slots)
        # qkv and q; cosines and sines
        of_token = 2 * (heads.width + heads.num_heads * dim) + 4 * dim
        return Case(
            kernel="rotate_store",
            format=cache_name(format, granularity),
            shape=(tokens, heads.num_heads + 2 * heads.num_kv_heads, dim),
            num_bytes=tokens * (size + of_token),
            num_flops=0,
            calls=[partial(self.kernels.rotate_store, *inputs, page) for page in pages],
        )

    def _copies(self, num_bytes: int) -> range:
        """Enough of them that none stays in a cache until its turn comes again."""
        return range(min(MOST_COPIES, max(1, -(-self.cache_size // num_bytes))))

    def _source(self, format: Format) -> RandomSource:
        generator = torch.Generator(self.device).manual_seed(0)
        return RandomSource(Format.BFLOAT16, format, self.device, generator)

    def _activations(self, rows: int, columns: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1)
        values = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        return values.normal_(generator=generator)

    def _pages(
        self, heads: Heads, format: Format, granularity: Granularity | None, blocks: int
    ) -> tuple[list[KVPages], int]:
        """Copies of `blocks` blocks full of random codes, and the bytes of one token."""
        scales = None
        dims = (heads.head_dim, heads.v_dim or heads.head_dim)
        if granularity is not None and not granularity.is_dynamic:
            k = (SCALE,) * granularity.num_scales(heads.num_kv_heads, dims[0])
            v = (SCALE,) * granularity.num_scales(heads.num_kv_heads, dims[1])
            scales = KVScales((LayerScales(k, v, granularity),), format)
        layer = LayerKVSpec(format, granularity, heads.num_kv_heads, *dims, v_in_k=heads.v_in_k)
        spec = KVCacheSpec((layer,), BLOCK_SIZE)
        config = KVCacheConfig(format, granularity, None, scales)
        copies = self._copies(spec.bytes_per_token * blocks * BLOCK_SIZE)
        pools = [allocate_pool(spec, config, (blocks,), self.kernels, self.device) for _ in copies]
        pages = [pool.paged[0].pages for pool in pools]
        for page in pages:
            _fill(page)
        return pages, spec.bytes_per_token


# The kernel of a case, and what makes it: one exists at a time, as together they are large
Made = Iterator[tuple[str, partial[Case]]]


def selected(made: Made, only: Sequence[str]) -> Made:
    """Yield the cases of the kernels in `only`; none: all."""
    return (case for case in made if not only or case[0] in only)


def set_of(kernel: str, kernels: KernelSet) -> str:
    """Return the name of the set that a kernel is measured of."""
    return "torch" if kernel.startswith("torch") else kernels.name


def cache_name(format: Format, granularity: Granularity | None) -> str:
    return f"{format}, {granularity}" if granularity else str(format)


def attention_work(shape: tuple[int, int, int], heads: Heads) -> tuple[int, int]:
    """(bytes of q and of the output, floating point operations over the keys that causal attention
    sees).
    """
    batch_size, new_tokens, context = shape
    pairs = batch_size * (new_tokens * context - new_tokens * (new_tokens - 1) // 2)
    width = heads.num_heads * (heads.head_dim + (heads.v_dim or heads.head_dim))
    return 2 * batch_size * new_tokens * width, 2 * pairs * width


def _fill(pages: KVPages) -> None:
    for page in (pages.k, pages.v):
        if not pages.format.is_quantized:
            page.normal_()
        else:
            # no NaN in any FP8 format
            page.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF).bitwise_or_(1)
    if pages.rotated is not None:
        pages.rotated.normal_()
    if pages.dynamic:
        assert pages.k_scale is not None
        assert pages.v_scale is not None
        pages.k_scale.fill_(SCALE)
        pages.v_scale.fill_(SCALE)
