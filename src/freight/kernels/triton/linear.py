"""Linear over FP8 weights: a matrix product for the cases that torch does not support.

`torch._scaled_mm` computes products of many rows, with a scale per row and weights with a scale per
output row, on NVIDIA GPUs that multiply FP8. `matmul_kernel` computes the rest: few rows, where
reading the weights takes most of the time; 128 x 128 block scales; weight-only quantization; every
GPU and format without FP8 multiplication, where both operands are decoded to float16, exactly. It
sums over the input features in float32: in order, or in several sums that are added at the end. A
row's bits are the same in all batches of up to 16 rows, of 17 to `FEW_ROWS`, and of more; between
these classes they may differ, because the matrix instructions do.

Over few rows the time is that of reading the weight, and it takes many programs to keep the memory
busy. On Hopper, a weight of few outputs is therefore divided along its inputs, too
(`part_of`); the program that finishes last adds the parts, in order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from freight.errors import KernelError
from freight.fp8.cast import format_of
from freight.fp8.formats import Format
from freight.kernels.triton.formats import Target, carrier, decode
from freight.kernels.triton.rows import Quantized, quantize, quantizes
from freight.kernels.triton.sizes import cdiv
from freight.operands.weight import Weight

FEW_ROWS = 64  # rows up to which reading the weights takes longer than multiplying
LEAST_PART = 512  # inputs: a shorter part would begin and end more than it reads
MOST_TILES = 4096  # of a product with parts, which has fewer than two tiles a multiprocessor
# If True, `torch._scaled_mm` leaves all sums of a product to Hopper's matrix units, which keep
# about 14 bits of them, instead of adding them to a float32 sum every 128 inputs. It is faster;
# `freight bench kernels --device cuda` times both.
FAST_SUMS = False


def check(weight: Weight) -> None:
    """Raise KernelError for a matrix in 4 bits."""
    if weight.groups is not None or weight.is_mxfp4:
        raise KernelError(
            "the Triton kernels compute with matrices in 16 or 32 bits and in FP8, not in 4 bits; convert the matrix "
            "to bfloat16, or use --kernels reference"
        )


@triton.jit
def _chains(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, output, live_output, x_stride, SIZE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINS: tl.constexpr, X_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute the sums of `product` in CHAINS parts, and add these.

    Chain c takes the tiles of inputs c, c + CHAINS, c + 2 CHAINS, … Each warp multiplies another
    chain: over few rows and outputs the matrix instructions of one sum wait for one another, and
    those of CHAINS sums do not.
    """
    GROUPS: tl.constexpr = (SIZE + 127) // 128
    EVEN: tl.constexpr = SIZE % (INPUTS * CHAINS) == 0
    chain = tl.arange(0, CHAINS)
    index = chain[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]  # [CHAINS, INPUTS]
    x_row = x_ptr + row.to(tl.int64)[None, :, None] * x_stride + index[:, None, :]
    weight_row = weight_ptr + output.to(tl.int64)[None, None, :] * SIZE + index[:, :, None]
    acc = tl.zeros((CHAINS, ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, INPUTS * CHAINS):
        if EVEN:
            x = tl.load(x_row + start)
            weight = tl.load(weight_row + start)
        else:
            x = tl.load(x_row + start, mask=(start + index < SIZE)[:, None, :], other=0.0)
            weight = tl.load(weight_row + start, mask=(start + index < SIZE)[:, :, None], other=0.0)
        if not DOT.is_fp8():
            x = decode(x, X_FORMAT).to(DOT)
            weight = decode(weight, WEIGHT_FORMAT).to(DOT)
        if BLOCKS:
            part = tl.dot(x, weight, input_precision="ieee")
            # Inputs after the last group are 0, so its scale may be used for them.
            group = tl.minimum(start // 128 + chain, GROUPS - 1)
            place = (output // 128 * GROUPS)[None, :] + group[:, None]
            part *= tl.load(weight_scale_ptr + place, mask=live_output[None, :], other=0.0)[
                :, None, :
            ]
            if x_scale_ptr is not None:
                part *= tl.load(x_scale_ptr + (row * GROUPS)[None, :] + group[:, None])[:, :, None]
            acc += part
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit
def _one_chain(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, output, live_output, x_stride, begin, end,
    SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SWAPPED: tl.constexpr,
    X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute the sums of `sums` over the inputs [begin, end) in order.

    With SWAPPED the weight is the first operand. Hopper's `wgmma` takes 64 rows of the first and as
    few as 8 of the second, and reads both from shared memory as they are stored.
    """
    x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight_ptr + output.to(tl.int64)[None, :] * SIZE
    GROUPS: tl.constexpr = (SIZE + 127) // 128
    if SWAPPED:
        acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(begin, end, INPUTS):
        index = start + tl.arange(0, INPUTS)
        if SIZE % INPUTS == 0:
            x = tl.load(x_row + index[None, :])
            weight = tl.load(weight_row + index[:, None])
        else:
            x = tl.load(x_row + index[None, :], mask=(index < SIZE)[None, :], other=0.0)
            weight = tl.load(weight_row + index[:, None], mask=(index < SIZE)[:, None], other=0.0)
        if not DOT.is_fp8():
            x = decode(x, X_FORMAT).to(DOT)
            weight = decode(weight, WEIGHT_FORMAT).to(DOT)
        if SWAPPED:
            first = tl.trans(weight)
            second = tl.trans(x)
        else:
            first = x
            second = weight
        if BLOCKS:
            part = tl.dot(first, second, input_precision="ieee")
            group = start // 128
            place = output // 128 * GROUPS + group
            scale = tl.load(weight_scale_ptr + place, mask=live_output, other=0.0)
            part *= scale[:, None] if SWAPPED else scale[None, :]
            if x_scale_ptr is not None:
                x_scale = tl.load(x_scale_ptr + row * GROUPS + group)
                part *= x_scale[None, :] if SWAPPED else x_scale[:, None]
            acc += part
        else:
            # Hopper keeps 14 bits of FP8 sums, so they are added to a float32 sum every 128 inputs.
            PIECE: tl.constexpr = INPUTS if INPUTS < 128 else 128
            acc = tl.dot(first, second, acc, input_precision="ieee", max_num_imprecise_acc=PIECE)
    return tl.trans(acc) if SWAPPED else acc


@triton.jit
def sums(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, output, num_outputs, x_stride, begin, end,
    SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINS: tl.constexpr,
    SWAPPED: tl.constexpr, X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Return the sums of `product` over the inputs [begin, end), float32 [ROWS, OUTPUTS].

    With BLOCKS they are scaled. Several CHAINS always take all inputs.
    """
    live_output = output < num_outputs
    read = tl.minimum(output, num_outputs - 1)  # outputs beyond the last one read the last one
    if CHAINS == 1:
        acc = _one_chain(
            x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, read, live_output, x_stride, begin, end, SIZE, ROWS,
            OUTPUTS, INPUTS, SWAPPED, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
        )  # fmt: skip
    else:
        acc = _chains(
            x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, read, live_output, x_stride, SIZE, ROWS, OUTPUTS,
            INPUTS, CHAINS, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
        )  # fmt: skip
    return acc


@triton.jit
def finished(
    acc, x_scale_ptr, weight_scale_ptr, bias_ptr, row, output, num_outputs, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the result of `product` from the sums over all inputs."""
    live_output = output < num_outputs
    if not BLOCKS:
        if x_scale_ptr is not None:
            acc *= tl.load(x_scale_ptr + row)[:, None]
        if weight_scale_ptr is not None:
            acc *= tl.load(weight_scale_ptr + output, mask=live_output, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + output, mask=live_output, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def product(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, row, output, num_outputs, x_stride, SIZE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINS: tl.constexpr, SWAPPED: tl.constexpr,
    X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return x @ weight.T + bias for the rows `row` and the outputs `output`, in float32.

    All rows exist; outputs may be beyond the last. Without BLOCKS scales belong to rows of x and of
    the weight, and multiply the finished sum. With BLOCKS they belong to 128 inputs of x and to 128
    x 128 blocks of the weight, and INPUTS is 128. Scales of plain operands are None.
    """
    acc = sums(
        x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, output, num_outputs, x_stride, 0, SIZE, SIZE, ROWS,
        OUTPUTS, INPUTS, CHAINS, SWAPPED, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
    )  # fmt: skip
    return finished(acc, x_scale_ptr, weight_scale_ptr, bias_ptr, row, output, num_outputs, BLOCKS)


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, num_rows,
    num_outputs, x_stride, SIZE: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, CHAINS: tl.constexpr, SWAPPED: tl.constexpr, X_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows by OUTPUTS outputs of `product`, over PART inputs.

    x: [num_rows, SIZE]; weight: [num_outputs, SIZE]; out: [num_rows, num_outputs]. If PART is less
    than SIZE, the sums of each part go to partial [parts, num_rows, num_outputs], and the last
    program of a tile adds them up. It is found by `arrived`, a zero for each tile, and leaves it 0.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    read = tl.minimum(row, num_rows - 1)
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    live = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    begin = 0
    end = SIZE
    if PART < SIZE:
        begin = tl.program_id(2) * PART
        end = tl.minimum(begin + PART, SIZE)
    acc = sums(
        x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, read, output, num_outputs, x_stride, begin, end, SIZE, ROWS,
        OUTPUTS, INPUTS, CHAINS, SWAPPED, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
    )  # fmt: skip
    if PART < SIZE:
        step = num_rows.to(tl.int64) * num_outputs
        tl.store(partial_ptr + tl.program_id(2) * step + place, acc, mask=live)
        # All threads of the program must have stored the part before it is counted as written.
        tl.debug_barrier()
        own_ptr = arrived_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(own_ptr, 1, sem="acq_rel", scope="gpu") < tl.num_programs(2) - 1:
            return
        tl.store(own_ptr, 0)
        acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for part in tl.static_range((SIZE + PART - 1) // PART):
            acc += tl.load(partial_ptr + part * step + place, mask=live, other=0.0)
    acc = finished(acc, x_scale_ptr, weight_scale_ptr, bias_ptr, read, output, num_outputs, BLOCKS)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a program, and its numbers of warps and pipeline stages.

    `chains` is the number of separate sums of an output; each takes `inputs` inputs at a time.
    `swapped`: the weight is the first operand of the product.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    chains: int = 1
    swapped: bool = False

    @property
    def constants(self) -> dict[str, int]:
        """Return the compile-time constants of a kernel that calls `product`."""
        sizes = {
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "INPUTS": self.inputs,
            "CHAINS": self.chains,
            "SWAPPED": self.swapped,
        }
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


def matmul_tile(target: Target, rows: int, outputs: int, blocks: bool, dot: tl.dtype) -> Tile:
    """Choose the tile by the class of `rows`: up to 16, up to FEW_ROWS, or more.

    So within a class a row's bits do not depend on the other rows. outputs: of the whole weight
    (`Weight.whole`), so that they do not depend on the number of ranks, either.
    """
    if dot == tl.float32:
        return Tile(16, 32, 32 if not blocks else 128, 4, 1)
    stages = 2 if target.backend == "hip" else 4
    if target.arch == 90 and rows <= FEW_ROWS:
        return _hopper_tile(target, rows, outputs, blocks, dot.primitive_bitwidth == 8)
    if rows <= 16:
        return Tile(16, 32, 128 if blocks else 64, 4, stages if blocks else stages + 2, chains=4)
    if rows <= FEW_ROWS:
        if target.hopper_or_newer and cdiv(outputs, 64) < target.units:
            return Tile(64, 32, 128, 4, stages + 2)
        return Tile(64, 64, 128, 4, stages)
    if dot.primitive_bitwidth == 8 and target.hopper_or_newer:
        if blocks and int(target.arch) >= 100:
            # Sums come from tensor memory group by group; with more outputs they spill.
            return Tile(128, 64, 128, 8, stages)
        return Tile(128, 128, 128, 8, stages)
    if blocks:
        return Tile(128, 64, 128, 8, stages - 1)
    return Tile(128, 128, 64, 8, stages - 1)


def part_of(target: Target, tile: Tile, outputs: int, size: int, dot: tl.dtype) -> int:
    """Choose how many of the `size` inputs of a weight a program takes: all, or a number of tiles.

    Few rows by few outputs make too few programs to read at the memory's speed. The parts are as
    many as give two programs a multiprocessor, or one of 64 rows, of at least LEAST_PART inputs
    each. They do not depend on the rows, which therefore keep their bits. There is one part on
    GPUs other than Hopper's, which alone were measured, and in float32, whose tile is the same for
    any number of rows. outputs: as `matmul_tile` takes them.
    """
    if target.arch != 90 or dot == tl.float32 or tile.rows > FEW_ROWS:
        return size
    programs = target.units * (2 if tile.rows <= 16 else 1)
    most_parts = cdiv(programs, cdiv(outputs, tile.outputs))
    parts = max(1, min(most_parts, size // LEAST_PART))
    return min(size, cdiv(cdiv(size, tile.inputs), parts) * tile.inputs)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """Return zeros for the tiles of a `matmul_kernel` with parts, which leaves them 0.

    One product at a time may use them: all products of a device are launched on one stream.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def _hopper_tile(target: Target, rows: int, outputs: int, blocks: bool, in_fp8: bool) -> Tile:
    """Choose the tile of a product of few rows; measured on an H100.

    in_fp8: both operands are FP8; otherwise the weight is decoded in registers
    """
    if rows <= 16:
        # Enough programs without parts share a multiprocessor by themselves: deeper pipelines.
        stages = 5 if in_fp8 and cdiv(outputs, 64) >= 2 * target.units else 3
        return Tile(16, 64, 128 if blocks else 256, 4, stages + (2 if blocks else 0), swapped=True)
    if not in_fp8:
        return Tile(64, 64, 128, 4, 4)
    if cdiv(outputs, 128) >= target.units:
        return Tile(64, 128, 128, 4, 4)
    return Tile(64, 32 if cdiv(outputs, 64) < target.units else 64, 128, 4, 6)


def matmul(
    target: Target,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return x @ weight.T + bias by `matmul_kernel`, [rows, out_features] in `dtype`.

    x: [rows, in_features], FP8 with `x_scale`, or plain; weight: FP8, or plain in x's dtype
    """
    rows, size = x.shape
    outputs = len(weight.data)
    blocks = weight.scale is not None and weight.scale.ndim == 2
    dot = dot_type(target, x, weight)
    whole = weight.whole_outputs
    tile = matmul_tile(target, rows, whole, blocks, dot)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    grid = cdiv(outputs, tile.outputs), cdiv(rows, tile.rows)
    part = part_of(target, tile, whole, size, dot)
    parts = cdiv(size, part)
    partial = arrived = None
    if parts > 1:
        assert grid[0] * grid[1] <= MOST_TILES
        partial = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device)
    matmul_kernel[(*grid, parts)](
        carrier(x, target),
        carrier(weight.data, target),
        x_scale,
        weight.scale,
        bias,
        out,
        partial,
        arrived,
        rows,
        outputs,
        x.stride(0),
        SIZE=size,
        PART=part,
        X_FORMAT=str(format_of(x)) if x_scale is not None else "",
        WEIGHT_FORMAT="" if weight.scale is None else str(format_of(weight.data)),
        BLOCKS=blocks,
        DOT=dot,
        **tile.constants,
    )
    return out


def dot_type(target: Target, x: Tensor, weight: Weight) -> tl.dtype:
    """Return the operand type of a product.

    It is the type of a plain x; for an FP8 x, FP8 if the hardware multiplies it, else float16.
    """
    plain = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if x.dtype in plain:
        return plain[x.dtype]
    if x.dtype == weight.data.dtype and format_of(x) in target.native:
        return tl.dtype(
            {Format.E4M3FN: "fp8e4nv", Format.E4M3FNUZ: "fp8e4b8", Format.E5M2: "fp8e5"}[
                format_of(x)
            ]
        )
    return tl.float16


def linear(
    target: Target,
    x: Tensor | Quantized,
    weight: Weight,
    bias: Tensor | None = None,
    float32: bool = False,
    exact: bool = False,
) -> Tensor:
    """Compute `KernelSet.linear`. x: [rows, in_features], plain or quantized for this weight.

    Torch multiplies weights of 16 and 32 bits, where it can give the dtype of the result. exact: it
    multiplies none: its order of summation follows from the number of outputs, so one rank and
    several would differ.
    """
    dtype = torch.float32 if float32 else x.dtype
    if isinstance(x, Tensor):
        if weight.scale is None and not exact:
            return _plain(target, x, weight, bias, dtype)
        if not quantizes(weight):
            return matmul(target, x, None, weight, bias, dtype)
        x = quantize(target, x, weight)
    if not exact and len(x.codes) > FEW_ROWS and scaled_mm_takes(target, dtype, weight):
        assert weight.scale is not None
        product: Tensor = torch._scaled_mm(
            x.codes,
            weight.data.t(),
            x.scale,
            weight.scale[None, :],
            out_dtype=dtype,
            use_fast_accum=FAST_SUMS,
        )
        return product if bias is None else product.add_(bias)
    return matmul(target, x.codes, x.scale, weight, bias, dtype)


def _plain(
    target: Target, x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute `linear` over a weight without scales, in x's dtype.

    torch's product of 16 bits has float32 results on NVIDIA GPUs alone.
    """
    if dtype is x.dtype:
        return F.linear(x, weight.data, bias)
    if target.backend != "cuda" or not target.arch:
        return matmul(target, x, None, weight, bias, dtype)
    out: Tensor = torch.mm(x, weight.data.t(), out_dtype=dtype)
    return out if bias is None else out.add_(bias)


def scaled_mm_takes(target: Target, dtype: torch.dtype, weight: Weight) -> bool:
    """Say whether `torch._scaled_mm` supports this product.

    It does for E4M3FN on NVIDIA, with scales per row, bfloat16 results and sizes that are multiples
    of 16.
    """
    return (
        target.backend == "cuda"
        and format_of(weight.data) in target.native & {Format.E4M3FN}
        and weight.scale is not None
        and weight.scale.ndim == 1
        and dtype is torch.bfloat16
        and all(size % 16 == 0 for size in weight.data.shape)
    )
