"""Tiny GGUF models that run: the metadata and shapes that llama.cpp's converter makes of a config, with
random matrices in any type.
"""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

from tests.formats.gguf_files import converted
from tests.gguf_files import Stored, Tensor, gguf_bytes

from freight.base.gguf import GGML_TYPES
from freight.fp8.block_formats import BlockFormat

_CODES = {kind.name: code for code, kind in GGML_TYPES.items()}
_PLAIN = (
    "norm",
    "inp",
    "conv",
    "ssm_a",
    "scale",
    "bias",
)  # parts of names of matrices that are not in blocks
_STEP = 0.004  # of values in blocks


def write_model(path: Path, name: str, types: tuple[str, ...] = ("q8_0",), seed: int = 0) -> None:
    """Write the model of a fixture as `path`. Matrices take `types` in turns, where blocks divide
    their rows, and are in float32 otherwise.
    """
    model = converted(name)
    numbers = random.Random(seed)
    tensors = {}
    for count, (tensor, shape) in enumerate(model.shapes.items()):
        kind = types[count % len(types)]
        is_plain = len(shape) < 2 or any(part in tensor for part in _PLAIN)
        if tensor in model.values:
            data = struct.pack(f"<{len(model.values[tensor])}f", *model.values[tensor])
            tensors[tensor] = Tensor(_CODES["f32"], shape, data)
        elif is_plain or shape[-1] % BlockFormat(kind).inputs:
            tensors[tensor] = Tensor(_CODES["f32"], shape, _floats(tensor, shape, numbers))
        else:
            tensors[tensor] = Tensor(_CODES[kind], shape, _blocks(kind, shape, numbers))
    path.write_bytes(
        gguf_bytes({key: _stored(value) for key, value in model.metadata.items()}, tensors)
    )


def _stored(value: object) -> object:
    """Give a list the type of its items, as `gguf_bytes` takes it."""
    if not isinstance(value, list):
        return value
    return Stored(_kind(value[0]), value)


def _kind(item: object) -> int:
    for kind, code in ((bool, 7), (int, 5), (float, 6)):
        if isinstance(item, kind):
            return code
    return 8


def _floats(name: str, shape: tuple[int, ...], numbers: random.Random) -> bytes:
    count = math.prod(shape)
    centre = 1.0 if "norm" in name else 0.0
    sign = -1.0 if name.endswith("ssm_a") else 1.0
    values = [sign * (centre + numbers.uniform(-0.2, 0.2)) for _ in range(count)]
    if name.endswith("ssm_a"):
        values = [-0.5 - abs(value) for value in values]
    return struct.pack(f"<{count}f", *values)


def _blocks(kind: str, shape: tuple[int, ...], numbers: random.Random) -> bytes:
    """Random codes; all scales and minima of blocks are small."""
    format = BlockFormat(kind)
    count = math.prod(shape) // format.inputs
    data = bytearray(numbers.randbytes(count * format.bytes))
    for block in range(0, len(data), format.bytes):
        for at in format.floats:
            struct.pack_into("<e", data, block + at, _STEP * numbers.uniform(0.5, 1))
        if format is BlockFormat.MXFP4:
            data[block] = 121
    return bytes(data)
