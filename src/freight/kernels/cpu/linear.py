"""Linear over packed weights (csrc/linear.cpp): the packing at load, and the call.

A row's bits depend only on that row and the weight: not on the other rows, the threads, or memory
addresses.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.errors import KernelError
from freight.fp8 import mxfp4
from freight.fp8.blocks import BlockFormat
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import COMPUTE_FORMATS, Format
from freight.fp8.four_bits import scales_out_of_range
from freight.kernels.cpu.interface import (
    ACTIVATIONS,
    BLOCK_FORMATS,
    BLOCKS,
    BYTES,
    CACHE_LINE,
    FORMATS,
    INT4,
    INT4_GROUPS,
    INT4_PARTS,
    INT8_INPUTS,
    INTEGERS,
    LANES,
    MXFP4,
    NVFP4,
    FreightBlockRows,
    FreightLinear,
    FreightWeight,
)
from freight.kernels.cpu.library import Library
from freight.operands.packed import PackedWeight, Rows
from freight.operands.weight import Activations, Codes, Groups, Weight

_WEIGHTS = {
    torch_dtype(format): FORMATS[torch_dtype(format)]
    for format in (*COMPUTE_FORMATS, Format.E4M3FN, Format.INT8)
} | {mxfp4.CODES: MXFP4}
LARGE = 2**20  # values from which packing first returns freed memory; see give_back_freed_memory
_LARGE_PAGE = 2**21  # bytes; allocations of this size and more are aligned to such pages


@dataclass(frozen=True, eq=False)
class CpuWeight(PackedWeight):
    """A weight in the layout of one build.

    The other fields own the memory that `descriptor` points to.
    """

    out_features: int
    in_features: int
    data: Tensor
    scale: Tensor
    block_scale: Tensor | None
    order: Tensor | None  # int32
    descriptor: FreightWeight
    address: int  # of the descriptor

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed matrix and its scales."""
        return sum(
            t.numel() * t.element_size()
            for t in (self.data, self.scale, self.block_scale, self.order)
            if t is not None
        )


def aligned(num_bytes: int) -> Tensor:
    """Allocate memory that begins at a large page, or at a cache line for small sizes.

    Large sizes get a separate mapping: on the heap they would lie on small pages, and keep freed
    blocks around them resident.
    """
    if num_bytes < _LARGE_PAGE:
        memory = torch.empty(num_bytes + CACHE_LINE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % CACHE_LINE
    else:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=private)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        start = -memory.data_ptr() % _LARGE_PAGE  # what comes before is never touched
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # In one call for the full range: requests for parts would split the mapping.
            with suppress(OSError):  # a refusal costs only speed
                pages.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _LARGE_PAGE * _LARGE_PAGE)
    return memory[start : start + num_bytes]


def pack(library: Library, weight: Weight) -> CpuWeight:
    """Pack `weight` in the layout of this build.

    Raises KernelError for a weight that no build computes with, and for blocks of a GGUF file with
    a scale that is not finite.
    """
    check(weight)
    if weight.data.numel() >= LARGE:
        give_back_freed_memory()
    return pack_into(library, weight, aligned(packed_bytes(library, weight)))


def give_back_freed_memory() -> None:
    """Return freed heap memory to the system, which glibc would keep: matrices read before.

    Walking the heap takes long compared with packing a small matrix, so small ones skip it.
    """
    with suppress(AttributeError):  # of C libraries other than glibc, which return it by themselves
        ctypes.CDLL(None).malloc_trim(0)


def check(weight: Weight) -> None:
    """Raise KernelError for a weight that no build computes with."""
    if weight.groups is not None or weight.blocks is not None:
        format_of(weight)
    elif weight.data.dtype not in _WEIGHTS or weight.data.device.type != "cpu":
        raise KernelError(
            f"the CPU kernels compute with weights in float32, float16, bfloat16, float8_e4m3fn, int8 and MXFP4 in "
            f"main memory, not {weight.data.dtype} on {weight.data.device}; use --kernels reference for the others"
        )
    if weight.is_int8 and weight.shape[1] > INT8_INPUTS:
        raise KernelError(
            f"a matrix in INT8 has {weight.shape[1]:,} inputs; sums of more than {INT8_INPUTS:,} products may not fit "
            "in int32. Use --quantization fp8 with the unquantized model"
        )


def format_of(weight: Weight) -> int:
    """Return the `FreightFormat` of a weight that `check` accepts."""
    if weight.blocks is not None:
        stored = _format_of_blocks(weight.blocks, weight.activations)
    elif weight.groups is not None:
        stored = _format_of_groups(weight.groups)
        if weight.groups.codes is Codes.INT8 and weight.activations is not Activations.GROUPS:
            raise KernelError(
                "the CPU kernels compute with INT8 in groups by inputs in INT8 alone; convert the matrix to bfloat16"
            )
    else:
        stored = _WEIGHTS[weight.data.dtype]
    if weight.activations is Activations.GROUPS:
        return stored + INTEGERS
    return stored


def _format_of_blocks(blocks: BlockFormat, activations: Activations) -> int:
    """Return BLOCKS with the number of `blocks`. Raises KernelError for what is not multiplied as it
    is stored.
    """
    if blocks not in BLOCK_FORMATS or activations is not Activations.GROUPS:
        names = ", ".join(BLOCK_FORMATS)
        raise KernelError(
            f"the CPU kernels compute with blocks of GGUF files in {names}, by inputs in INT8 alone, not with {blocks} "
            f"and inputs that are {activations}; decode the matrix to bfloat16"
        )
    return BLOCKS + BLOCK_FORMATS[blocks]


def _format_of_groups(groups: Groups) -> int:
    """Return NVFP4, or INT4 with its parts. Raises KernelError for other groups."""
    dtype = groups.scales.dtype
    if (groups.codes, groups.size, dtype) == (Codes.E2M1, 16, torch_dtype(Format.E4M3FN)):
        return NVFP4
    sixteen = dtype in (torch.float16, torch.bfloat16)
    if groups.codes is not Codes.E2M1 and groups.size in INT4_GROUPS and sixteen:
        format = INT4 + INT4_GROUPS[groups.size]
        if groups.zeros is not None:
            format += INT4_PARTS["ZEROS"]
        if dtype is torch.bfloat16:
            format += INT4_PARTS["BFLOAT16"]
        if groups.codes is Codes.INT8:
            format += BYTES
        return format
    raise KernelError(
        f"the CPU kernels compute with {Codes.INT4} in groups of {', '.join(map(str, INT4_GROUPS))} with scales in "
        f"float16 or bfloat16, and with {Codes.E2M1} in groups of 16 with scales in float8_e4m3fn, not with "
        f"{groups.codes} in groups of {groups.size} with scales in {dtype}; use --kernels reference, or convert the "
        "matrix to bfloat16"
    )


def packed_bytes(library: Library, weight: Weight) -> int:
    """Return the bytes of the packed data, a multiple of CACHE_LINE."""
    check(weight)
    return int(library.functions.freight_packed_bytes(format_of(weight), *weight.shape))


def pack_into(library: Library, weight: Weight, packed: Tensor) -> CpuWeight:
    """Pack into `packed`, memory of `packed_bytes` that begins at a cache line."""
    out_features, in_features = weight.shape
    data = _stored(weight)
    format = format_of(weight)
    order = None if weight.order is None else weight.order.to(torch.int32).contiguous()
    assert order is None or order.shape == (in_features,)
    scale = torch.ones(-(-out_features // LANES) * LANES, dtype=torch.float32, device="cpu")
    if weight.scale is not None and weight.scale.ndim == 1:
        scale[:out_features] = weight.scale
    blocked = weight.scale is not None and weight.scale.ndim == 2 and not weight.is_mxfp4
    blocks = weight.scale.float().contiguous() if weight.scale is not None and blocked else None
    library.functions.freight_pack(
        data.data_ptr(),
        format,
        out_features,
        in_features,
        packed.data_ptr(),
        scale.data_ptr(),
        torch.get_num_threads(),
    )
    activations = weight.activations
    if activations is Activations.GROUPS:
        activations = Activations.PLAIN  # part of the format
    descriptor = FreightWeight(
        data=packed.data_ptr(),
        scale=scale.data_ptr(),
        block_scale=None if blocks is None else blocks.data_ptr(),
        order=None if order is None else order.data_ptr(),
        out_features=out_features,
        in_features=in_features,
        format=format,
        activations=ACTIVATIONS[activations],
        input_scale=weight.input_scale or 1.0,
    )
    address = ctypes.addressof(descriptor)
    return CpuWeight(out_features, in_features, packed, scale, blocks, order, descriptor, address)


def _stored(weight: Weight) -> Tensor:
    """Return the matrix as freight_pack takes it. Raises KernelError for values it does not take."""
    if weight.groups is not None:
        return _with_groups(weight, weight.groups)
    return _with_scales(weight) if weight.is_mxfp4 else weight.data.contiguous()


def _with_groups(weight: Weight, groups: Groups) -> Tensor:
    """Interleave codes with what their groups have: uint8 [out_features, groups, bytes].

    Raises KernelError if values may be subnormal or infinite in bfloat16, or NaN.
    """
    if len(scales_out_of_range(groups.scales)):
        raise KernelError(
            "the CPU kernels compute with 4-bit matrices whose scales are 0 or 2 ** -126 to 2 ** 100 in magnitude; "
            "convert the matrix to bfloat16"
        )
    scales = groups.scales.contiguous().view(torch.uint8)
    by_group = scales.view(len(scales), -1, groups.scales.itemsize)
    codes = weight.data.view(torch.uint8).view(*groups.scales.shape, -1)
    parts = [codes, by_group]
    if groups.zeros is not None:
        parts.append(groups.zeros[..., None])
    return torch.cat(parts, -1)


def _with_scales(weight: Weight) -> Tensor:
    """Interleave MXFP4 with its scales: uint8 [out_features, in_features / 32, 17].

    Each group has its 16 bytes of codes, then the byte of its scale. Raises KernelError if values
    would not be normal in bfloat16.
    """
    blocks, scales = weight.mxfp4_bytes
    if not mxfp4.normal(blocks, scales):
        raise KernelError(
            "the CPU kernels compute with MXFP4 whose scale bytes are 3 to 252, except in groups of zeros; convert the "
            "matrix to bfloat16"
        )
    return torch.cat((blocks, scales[..., None]), -1)


def linear(
    library: Library,
    x: Rows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    float32: bool = False,
) -> Tensor:
    """Return x @ weight.T + bias, [rows, out_features] in x's dtype, or in float32, not rounded.

    x: [rows, in_features]; bias: [out_features] in x's dtype
    """
    assert isinstance(x, Tensor)
    assert isinstance(weight, CpuWeight)
    rows, in_features = x.shape
    assert in_features == weight.in_features
    assert bias is None or (
        bias.dtype == x.dtype and bias.is_contiguous() and bias.shape == (weight.out_features,)
    )
    x = x.contiguous()
    out = library.empty((rows, weight.out_features), torch.float32 if float32 else x.dtype)
    library.functions.freight_linear(
        FreightLinear(
            weight.address,
            x.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            FORMATS[x.dtype],
            int(float32),
            torch.get_num_threads(),
        )
    )
    return out


def packed_rows(
    library: Library,
    table: PackedWeight,
    ids: Tensor,
    dtype: torch.dtype,
    multiplier: float = 1.0,
    base: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Compute `KernelSet.packed_rows`, with the reference's bits.

    Raises KernelError for an id that is not a row of `table`.
    """
    assert isinstance(table, CpuWeight)
    assert ids.dtype == torch.int64
    ids = ids.contiguous()
    out = library.empty((len(ids), table.in_features), dtype)
    assert base is None or (base.shape == out.shape and base.dtype == dtype)
    base = None if base is None else base.contiguous()
    library.functions.freight_block_rows(
        FreightBlockRows(
            table.address,
            ids.data_ptr(),
            None if base is None else base.data_ptr(),
            out.data_ptr(),
            len(ids),
            FORMATS[dtype],
            multiplier,
            factor,
            torch.get_num_threads(),
        )
    )
    return out
