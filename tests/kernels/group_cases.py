"""Products with inputs in INT8 by group whose bits are in a file, `int8_groups.json`.

    PYTHONPATH=. .venv/bin/python -m tests.kernels.group_cases

writes it from the reference. The numbers come from Python's generator, whose integers no version of
a library changes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from freight.fp8 import mxfp4
from freight.fp8.blocks import BlockFormat
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.operands.activation import Activation
from freight.operands.experts import ExpertLayers
from freight.operands.weight import Activations, Codes, Groups, Weight

DIGESTS = Path(__file__).with_name("int8_groups.json")
ROWS = tuple(range(1, 34))
SHAPES = ((1, 1), (17, 3), (40, 5), (33, 17))  # outputs, and groups of 128 inputs or of what fits


@dataclass(frozen=True)
class GroupCase:
    """A format, its group, and what the numbers are: any, or those with the largest sums."""

    format: str
    size: int
    scales: torch.dtype
    zeros: bool = False
    extreme: bool = False

    def __str__(self) -> str:
        parts = [self.format, str(self.size), str(self.scales)[6:]]
        if self.zeros:
            parts.append("zeros")
        if self.extreme:
            parts.append("extreme")
        return " ".join(parts)


def _cases() -> Iterator[GroupCase]:
    for extreme in (False, True):
        for size in (32, 64, 128):
            for scales in (torch.float16, torch.bfloat16):
                for zeros in (False, True):
                    yield GroupCase("int4", size, scales, zeros, extreme)
        yield GroupCase("int8", 32, torch.float16, extreme=extreme)
        yield GroupCase("int8", 128, torch.bfloat16, extreme=extreme)
        yield GroupCase("nvfp4", 16, torch.float8_e4m3fn, extreme=extreme)
        yield GroupCase("mxfp4", 32, torch.uint8, extreme=extreme)


# Blocks of GGUF files, and where a block has float16 numbers
BLOCKS = {
    BlockFormat.Q4_0: (0,),
    BlockFormat.Q4_1: (0, 2),
    BlockFormat.Q5_0: (0,),
    BlockFormat.Q5_1: (0, 2),
    BlockFormat.Q8_0: (0,),
    BlockFormat.Q4_K: (0, 2),
    BlockFormat.Q5_K: (0, 2),
    BlockFormat.Q6_K: (208,),
    BlockFormat.IQ4_NL: (0,),
    BlockFormat.IQ4_XS: (0,),
    BlockFormat.MXFP4: (),
}


def _block_cases() -> Iterator[GroupCase]:
    for extreme in (False, True):
        for format in BLOCKS:
            yield GroupCase(f"block {format}", format.inputs, torch.float16, extreme=extreme)


BLOCK_CASES = tuple(_block_cases())
CASES = (*_cases(), *BLOCK_CASES)


def _bytes(numbers: random.Random, *shape: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.frombuffer(bytearray(numbers.randbytes(count)), dtype=torch.uint8).view(shape)


def block_weight(
    format: BlockFormat, outputs: int, inputs: int, numbers: random.Random, extreme: bool = False
) -> Weight:
    """Blocks of any bytes, or of one byte each, with finite float16 numbers, subnormals among them."""
    shape = (outputs, inputs // format.inputs, format.bytes)
    data = _bytes(numbers, *shape).clone()
    if extreme:
        patterns = torch.tensor([0xFF, 0x00, 0x77, 0xF0, 0x7F], dtype=torch.uint8)
        data[...] = patterns[_bytes(numbers, *shape[:2]).long() % len(patterns)][..., None]
        data[0] = 0xFF
    for at in BLOCKS[format]:
        data[..., at : at + 2] = _bytes(numbers, *shape[:2], 2)
        data[..., at + 1] &= 0xBF  # below 2 in magnitude
    if format is BlockFormat.MXFP4:
        data[..., 0] = _bytes(numbers, *shape[:2]) % 20 + 118
    return Weight(data.flatten(1), activations=Activations.GROUPS, blocks=format)


def weight_of(case: GroupCase, outputs: int, inputs: int, numbers: random.Random) -> Weight:
    """Extreme codes are the largest and the smallest, in whole groups and in turns."""
    if case.format.startswith("block "):
        format = BlockFormat(case.format.removeprefix("block "))
        return block_weight(format, outputs, inputs, numbers, case.extreme)
    if case.format == "int8":
        data = _bytes(numbers, outputs, inputs).view(torch.int8)
        if case.extreme:
            data = torch.where(data % 3 == 0, -128, 127).to(torch.int8)
        scales = _bytes(numbers, outputs, inputs // case.size).float() / 64 - 1
        groups = Groups(Codes.INT8, case.size, scales.to(case.scales))
        return Weight(data, activations=Activations.GROUPS, groups=groups)
    data = _bytes(numbers, outputs, inputs // 2)
    if case.extreme:
        patterns = torch.tensor([0xFF, 0x00, 0x77, 0xF0, 0x7F], dtype=torch.uint8)
        by_group = patterns[_bytes(numbers, outputs, inputs // case.size).long() % len(patterns)]
        data = by_group.repeat_interleave(case.size // 2, 1)
    exponents = _bytes(numbers, outputs, inputs // case.size)
    if case.format == "mxfp4":
        scale = (exponents % 20 + 118).view(mxfp4.SCALES)
        return Weight(data.view(mxfp4.CODES), scale, Activations.GROUPS)
    scales = (exponents.float() - 100) / 64
    zeros = _bytes(numbers, *exponents.shape) % 16 if case.zeros else None
    codes = Codes.E2M1 if case.format == "nvfp4" else Codes.INT4
    groups = Groups(codes, case.size, scales.to(case.scales), zeros)
    factor = (_bytes(numbers, outputs).float() + 1) / 128 if codes is Codes.E2M1 else None
    return Weight(data, factor, Activations.GROUPS, groups=groups)


def rows_of(case: GroupCase, rows: int, inputs: int, numbers: random.Random) -> Tensor:
    """Bfloat16 of very different magnitudes; extreme: all of a group the largest, of one sign, and
    infinities.
    """
    integers = _bytes(numbers, rows, inputs).float() - 128
    powers = torch.exp2(_bytes(numbers, rows, inputs).float() % 12 - 6)
    if not case.extreme:
        return (integers / 32 * powers).bfloat16()
    signs = 1 - _bytes(numbers, rows, -(-inputs // 32)).float() % 2 * 2
    x = signs.repeat_interleave(32, 1)[:, :inputs].bfloat16()
    return torch.where(integers == 127, torch.tensor(torch.inf).bfloat16() * x, x)


def digest(kernels: KernelSet, case: GroupCase) -> str:
    """The results of all shapes and numbers of rows, in bfloat16 and in float32."""
    numbers = random.Random(str(case))
    result = hashlib.sha256()
    for outputs, groups in SHAPES:
        inputs = groups * case.size
        weight = weight_of(case, outputs, inputs, numbers)
        packed = kernels.pack(weight)
        x = rows_of(case, ROWS[-1], inputs, numbers)
        for rows in ROWS:
            part = x[-rows:]
            for out in (kernels.linear(part, packed), kernels.linear(part, packed, float32=True)):
                result.update(out.contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def experts_digests(kernels: KernelSet) -> dict[str, str]:
    """Three of five experts for each of some rows, with ReLU, whose bits are everyone's."""
    digests = {}
    for case in (*CASES[:16:3], *BLOCK_CASES[1 : len(BLOCKS) : 2]):
        numbers = random.Random(f"experts {case}")
        size = max(case.size, 128)
        weights = [weight_of(case, size, size, numbers) for _ in range(5)]
        packed = kernels.pack_experts(weights)
        down = kernels.pack_experts([weight_of(case, size, size, numbers) for _ in range(5)])
        x = rows_of(case, 9, size, numbers)
        chosen = [sorted(numbers.sample(range(5), 3)) for _ in range(9)]  # sums are by id
        ids = torch.tensor(chosen, dtype=torch.int32)
        shares = torch.full((9, 3), 0.25, dtype=torch.float32)
        layers = ExpertLayers(packed, down, Activation.RELU)
        out = kernels.experts(x, ids, shares, layers)
        name = f"experts {case}"
        digests[name] = hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()
    return digests


def main() -> None:
    """Write the file."""
    digests = {str(case): digest(REFERENCE, case) for case in CASES}
    digests |= experts_digests(REFERENCE)
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
