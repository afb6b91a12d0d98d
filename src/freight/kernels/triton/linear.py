"""Linear over FP8 weights: a matrix product for the cases that torch does not support.

`torch._scaled_mm` computes products of many rows, with a scale per row and weights with a scale per
output row, on NVIDIA GPUs that multiply FP8. `matmul_kernel` computes the rest: few rows, where
reading the weights takes most of the time; 128 x 128 block scales; weight-only quantization; every
GPU and format without FP8 multiplication, where both operands are decoded to float16, exactly. It
sums over the input features in float32: in order, or for up to 16 rows in four sums that are added
at the end. A row's bits are the same in all batches of up to 16 rows, of 17 to `FEW_ROWS`, and of
more; between these classes they may differ, because the matrix instructions do.
"""

from __future__ import annotations

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
from freight.operands.weight import Weight

FEW_ROWS = 64  # rows up to which reading the weights takes longer than multiplying
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
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, output, live_output, x_stride, SIZE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, X_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute the sums of `product` over the inputs in order."""
    x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight_ptr + output.to(tl.int64)[None, :] * SIZE
    GROUPS: tl.constexpr = (SIZE + 127) // 128
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, INPUTS):
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
        if BLOCKS:
            part = tl.dot(x, weight, input_precision="ieee")
            group = start // 128
            place = output // 128 * GROUPS + group
            part *= tl.load(weight_scale_ptr + place, mask=live_output, other=0.0)[None, :]
            if x_scale_ptr is not None:
                part *= tl.load(x_scale_ptr + row * GROUPS + group)[:, None]
            acc += part
        else:
            # Hopper keeps 14 bits of FP8 sums, so they are added to a float32 sum every 128 inputs.
            PIECE: tl.constexpr = INPUTS if INPUTS < 128 else 128
            acc = tl.dot(x, weight, acc, input_precision="ieee", max_num_imprecise_acc=PIECE)
    return acc


@triton.jit
def product(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, row, output, num_outputs, x_stride, SIZE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINS: tl.constexpr, X_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return x @ weight.T + bias for the rows `row` and the outputs `output`, in float32.

    All rows exist; outputs may be beyond the last. Without BLOCKS scales belong to rows of x and of
    the weight, and multiply the finished sum. With BLOCKS they belong to 128 inputs of x and to 128
    x 128 blocks of the weight, and INPUTS is 128. Scales of plain operands are None.
    """
    live_output = output < num_outputs
    read = tl.minimum(output, num_outputs - 1)  # outputs beyond the last one read the last one
    if CHAINS == 1:
        acc = _one_chain(
            x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, read, live_output, x_stride, SIZE, ROWS, OUTPUTS,
            INPUTS, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
        )  # fmt: skip
    else:
        acc = _chains(
            x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, row, read, live_output, x_stride, SIZE, ROWS, OUTPUTS,
            INPUTS, CHAINS, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
        )  # fmt: skip
    if not BLOCKS:
        if x_scale_ptr is not None:
            acc *= tl.load(x_scale_ptr + row)[:, None]
        if weight_scale_ptr is not None:
            acc *= tl.load(weight_scale_ptr + output, mask=live_output, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + output, mask=live_output, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr, num_rows, num_outputs, x_stride,
    SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINS: tl.constexpr,
    X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows by OUTPUTS outputs of `product`.

    x: [num_rows, SIZE]; weight: [num_outputs, SIZE]; out: [num_rows, num_outputs]
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    acc = product(
        x_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, tl.minimum(row, num_rows - 1), output, num_outputs,
        x_stride, SIZE, ROWS, OUTPUTS, INPUTS, CHAINS, X_FORMAT, WEIGHT_FORMAT, BLOCKS, DOT,
    )  # fmt: skip
    target = out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    live = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a program, and its numbers of warps and pipeline stages.

    `chains` is the number of separate sums of an output; each takes `inputs` inputs at a time.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    chains: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """Return the compile-time constants of a kernel that calls `product`."""
        sizes = {
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "INPUTS": self.inputs,
            "CHAINS": self.chains,
        }
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


def matmul_tile(target: Target, rows: int, outputs: int, blocks: bool, dot: tl.dtype) -> Tile:
    """Choose the tile by the class of `rows`: up to 16, up to FEW_ROWS, or more.

    So within a class a row's bits do not depend on the other rows. The number of `outputs` of the
    weight changes how many of them a program computes, but never the order of a sum.
    """
    if dot == tl.float32:
        return Tile(16, 32, 32 if not blocks else 128, 4, 1)
    stages = 2 if target.backend == "hip" else 4
    if rows <= 16:
        return Tile(16, 32, 128 if blocks else 64, 4, stages if blocks else stages + 2, chains=4)
    if rows <= FEW_ROWS:
        idle = triton.cdiv(outputs, 64) < target.units
        if idle and target.hopper_or_newer:
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


def matmul(
    target: Target,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return x @ weight.T + bias by `matmul_kernel`, [rows, out_features] in `dtype`.

    x: [rows, in_features], FP8 with `x_scale`, or plain
    """
    assert weight.scale is not None
    rows, size = x.shape
    outputs = len(weight.data)
    blocks = weight.scale.ndim == 2
    dot = dot_type(target, x, weight)
    tile = matmul_tile(target, rows, outputs, blocks, dot)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    matmul_kernel[(triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows))](
        carrier(x, target),
        carrier(weight.data, target),
        x_scale,
        weight.scale,
        bias,
        out,
        rows,
        outputs,
        x.stride(0),
        SIZE=size,
        X_FORMAT=str(format_of(x)) if x_scale is not None else "",
        WEIGHT_FORMAT=str(format_of(weight.data)),
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
    target: Target, x: Tensor | Quantized, weight: Weight, bias: Tensor | None = None
) -> Tensor:
    """Compute `KernelSet.linear`. x: [rows, in_features], plain or quantized for this weight.

    Torch multiplies weights of 16 and 32 bits.
    """
    if isinstance(x, Tensor):
        if weight.scale is None:
            return F.linear(x, weight.data, bias)
        if not quantizes(weight):
            return matmul(target, x, None, weight, bias, x.dtype)
        x = quantize(target, x, weight)
    if len(x.codes) > FEW_ROWS and scaled_mm_takes(target, x.dtype, weight):
        assert weight.scale is not None
        product: Tensor = torch._scaled_mm(
            x.codes,
            weight.data.t(),
            x.scale,
            weight.scale[None, :],
            out_dtype=x.dtype,
            use_fast_accum=FAST_SUMS,
        )
        return product if bias is None else product.add_(bias)
    return matmul(target, x.codes, x.scale, weight, bias, x.dtype)


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
