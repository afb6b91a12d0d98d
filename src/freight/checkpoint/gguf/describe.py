"""What the header of a GGUF file says of its model: config.json, tensors, formats. Imports no torch."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import FileIO

from freight.base.gguf import GGUFFile, GGUFTensor
from freight.checkpoint.gguf.config import GGUFConfig, config_of
from freight.checkpoint.gguf.names import Change, Placed, TensorPlaces, tensor_names
from freight.errors import CheckpointError, first_line
from freight.fp8.block_formats import BlockFormat
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme

# Types whose values are not in blocks
PLAIN = {"f32": Format.FLOAT32, "f16": Format.FLOAT16, "bf16": Format.BFLOAT16}
_BLOCKS = frozenset(map(str, BlockFormat))
# Types that are decoded as they load, by the package `gguf`
DECODED_BY_GGUF = frozenset(
    ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0"]
)


@dataclass(frozen=True)
class GGUFModel:
    """The model of a file. `stored`: the dtype to compute in."""

    file: GGUFFile
    described: GGUFConfig
    places: TensorPlaces
    scheme: Scheme
    stored: Format


def describe(
    file: GGUFFile, numbers: Callable[[GGUFTensor], list[float]] | None = None
) -> GGUFModel:
    """Describe the model of a file. `numbers` reads a small float32 tensor; None: from the file.

    Raises CheckpointError, naming the file, for a model that Freight does not read.
    """
    read = numbers or read_numbers
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    try:
        described = config_of(file.metadata, shapes, lambda name: read(file.tensors[name]))
        places = tensor_names(described, shapes)
        for tensor in file.tensors.values():
            _require_type(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    blocks = {}
    for name, placed in places.placed.items():
        format = block_format(file.tensors, placed)
        if format is not None and name.endswith(".weight"):
            blocks[name.removesuffix(".weight")] = format
    stored = _stored(file.tensors)
    types = {tensor.type.name for tensor in file.tensors.values()}
    scheme = Scheme("gguf", blocks=blocks, decoded=tuple(sorted(types & DECODED_BY_GGUF)))
    scheme = replace(scheme, description=f"gguf: {scheme.counted_blocks or stored}")
    return GGUFModel(file, described, places, scheme, stored)


def block_format(tensors: Mapping[str, GGUFTensor], placed: Placed) -> BlockFormat | None:
    """Return the format of a matrix whose rows are rows of blocks of the file; None if its values
    have to be changed, or are in no blocks.
    """
    types = {tensors[name].type.name for name in placed.sources}
    if len(types) > 1 or placed.change is not Change.NONE or placed.columns is not None:
        return None
    (type_name,) = types
    return BlockFormat(type_name) if type_name in _BLOCKS else None


def read_numbers(tensor: GGUFTensor) -> list[float]:
    """Return the values of a small float32 tensor. Raises CheckpointError."""
    return as_numbers(read_bytes(tensor, 0, tensor.size))


def as_numbers(data: bytes | bytearray) -> list[float]:
    """Return float32 numbers."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def read_bytes(tensor: GGUFTensor, offset: int, size: int) -> bytearray:
    """Return `size` bytes of a tensor from `offset` on. Raises CheckpointError if they are not
    there.
    """
    data = bytearray(size)
    try:
        with tensor.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.offset + offset)
            count = _fill(stream, data)
    except OSError as error:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} cannot be read: {first_line(error)}"
        ) from error
    if count < size:
        raise CheckpointError(
            f"{tensor.file} ends within tensor {tensor.name}; fetch the file again"
        )
    return data


def _fill(stream: FileIO, data: bytearray) -> int:
    """Read until `data` is full or the file ends. Returns the bytes that were read."""
    count = 0
    with memoryview(data) as left:
        while count < len(data):
            more = stream.readinto(left[count:])
            if not more:
                break
            count += more
    return count


def _require_type(tensor: GGUFTensor) -> None:
    """Raise CheckpointError for a type that is not decoded. The package `gguf` decodes those of 1 to 3
    bits, where it is installed.
    """
    type_name = tensor.type.name
    if type_name in PLAIN or type_name in _BLOCKS:
        return
    if type_name not in DECODED_BY_GGUF:
        raise CheckpointError(
            f"tensor {tensor.name} is stored as {type_name.upper()}, which is not implemented; quantize the model "
            f"again to one of {', '.join(sorted(format.upper() for format in _BLOCKS))}"
        )
    if find_spec("gguf") is None:
        raise CheckpointError(
            f"tensor {tensor.name} is stored as {type_name.upper()}, which the package gguf decodes: pip install gguf"
        )


def _stored(tensors: Mapping[str, GGUFTensor]) -> Format:
    """Return the dtype to compute in: float16 or float32 where most values of matrices are stored
    so, else bfloat16.
    """
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] += math.prod(tensor.shape)
    largest = sizes.most_common(1)
    return PLAIN.get(largest[0][0], Format.BFLOAT16) if largest else Format.BFLOAT16
