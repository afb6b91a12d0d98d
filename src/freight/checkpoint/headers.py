"""Headers of safetensors files: the tensors of a file, each entry checked against the file's size.

No weight is read here, and no tensor made.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from freight.base.files import open_regular, unique_names
from freight.errors import CheckpointError
from freight.fp8.formats import Format

_DTYPES = {
    "BOOL",
    "U8",
    "I8",
    "U16",
    "I16",
    "U32",
    "I32",
    "U64",
    "I64",
    "F64",
    "F32",
    "F16",
    "BF16",
    "C64",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "F8_E4M3",
    "F8_E4M3FNUZ",
    "F8_E5M2",
    "F8_E5M2FNUZ",
    "F8_E8M0",
}
FORMAT_NAMES = {
    "F32": Format.FLOAT32,
    "F16": Format.FLOAT16,
    "BF16": Format.BFLOAT16,
    "F8_E4M3": Format.E4M3FN,
    "F8_E4M3FNUZ": Format.E4M3FNUZ,
    "F8_E5M2": Format.E5M2,
    "I8": Format.INT8,
}
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format

Shape: TypeAlias = tuple[int, ...]
Index = tuple[int | slice, ...]  # of a part within a stored tensor, over its leading dimensions


@dataclass(frozen=True)
class TensorEntry:
    """The header entry of one tensor. `dtype` is safetensors' name, e.g. 'BF16'; `size` in bytes.

    A tensor made by `Checkpoint.divide` is the slice `index` of the file's tensor `stored`, and
    `module` is its module's name in the declaration; these are empty for all others. With `turned`
    the file has its last two dimensions exchanged. One made by `Checkpoint.narrow` is `pieces` of
    that, joined along their first dimension.
    """

    file: Path
    dtype: str
    shape: Shape
    size: int
    stored: str = ""
    index: Index = ()
    module: str = ""
    turned: bool = False
    pieces: tuple[Index, ...] = ()

    @property
    def dtype_name(self) -> str:
        """Freight's name of the dtype ('bfloat16'); safetensors' name in lower case for other
        dtypes.
        """
        return str(FORMAT_NAMES.get(self.dtype, self.dtype.lower()))

    def size_of(self, shape: Shape) -> int:
        """Return the bytes of a part that has this shape."""
        return self.size * math.prod(shape) // max(1, math.prod(self.shape))


def part_shape(shape: Shape, index: Index) -> Shape:
    """Return the shape of the part at `index` of a tensor."""
    sizes = []
    for size, at in zip(shape, index, strict=False):
        if isinstance(at, slice):
            sizes.append(len(range(size)[at]))
    return (*sizes, *shape[len(index) :])


def narrowed(shape: Shape, pieces: Sequence[Index]) -> Shape:
    """Return the shape of `pieces` of a tensor, joined along their first dimension. Their indices
    are slices.
    """
    shapes = [part_shape(shape, piece) for piece in pieces]
    return (sum(first for first, *_ in shapes), *shapes[0][1:])


def unreadable(path: Path, error: OSError) -> str:
    """Say why `path` cannot be read; a dangling link names its target."""
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {path.readlink()}, which does not exist; fetch the model again, or repair the link"
    return f"{path} cannot be read: {error}"


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the entries of one safetensors file. Raises CheckpointError unless the header describes
    the file exactly.
    """
    try:
        with open_regular(file) as stream:
            return _read_header(file, stream, file.stat().st_size)
    except OSError as error:
        raise CheckpointError(unreadable(file, error)) from error


def _read_header(file: Path, stream: BinaryIO, size: int) -> dict[str, TensorEntry]:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{file} is truncated, or not a safetensors file: {size} bytes, header of {length}"
        )
    try:
        header = json.loads(stream.read(length), object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is damaged: it is not a JSON object")
    header.pop("__metadata__", None)
    placed = []
    for name, fields in header.items():
        entry, begin, stop = _entry(file, name, fields)
        placed.append((begin, stop, name, entry))
    placed.sort(key=lambda place: place[:2])
    end = 0
    entries = {}
    for begin, stop, name, entry in placed:
        if begin != end:
            raise CheckpointError(
                f"{file}: tensor {name} begins at byte {begin}, where {end} is expected"
            )
        end = stop
        entries[name] = entry
    if size != 8 + length + end:
        kind = "truncated" if size < 8 + length + end else "too long"
        raise CheckpointError(
            f"{file} is {kind}: {size} bytes where its header describes {8 + length + end}"
        )
    return entries


def _entry(file: Path, name: str, fields: Any) -> tuple[TensorEntry, int, int]:
    """Read one header entry and its byte range; dtype, shape and size are checked against each
    other.
    """
    try:
        dtype = fields["dtype"]
        shape = tuple(fields["shape"])
        (begin, stop) = fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file}: the header's entry of {name} is damaged: {fields!r}"
        ) from error
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype!r}, which is unknown")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, stop)):
        raise CheckpointError(f"{file}: the header's entry of {name} is damaged: {fields!r}")
    if (stop - begin) * 8 != math.prod(shape) * _bits(dtype):
        raise CheckpointError(
            f"{file}: tensor {name}, {dtype} {list(shape)}, does not fill its {stop - begin} bytes"
        )
    return TensorEntry(file, dtype, shape, stop - begin), begin, stop


def _bits(dtype: str) -> int:
    """Return the bits of a value: 8 of a BOOL, else the number that its name begins with."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
