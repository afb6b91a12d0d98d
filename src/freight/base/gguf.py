"""The container of GGUF files, llama.cpp's format: metadata, and each tensor's type, shape and place.

Own code, because a header may come from a stranger, or from range requests of the hub: other readers
need the whole file, transformers' believes every count and length, and that of `gguf` takes half a
minute for a vocabulary of 262,144 tokens with as many merges, where this one takes half a second.

Every count, length and offset is compared with the bytes that are left before anything is allocated
for it. A header has at most MAX_HEADER bytes, MAX_KEYS keys, MAX_VALUES values in arrays and
MAX_TENSORS tensors, and a string MAX_STRING bytes. So time and memory are bounded whatever it says. No
weight is read. Versions 2 and 3 are read, little-endian; both have the same layout.

What the format leaves open is as in llama.cpp (`ggml/src/gguf.cpp`): an array within an array is
refused, names of tensors have at most 63 bytes, and bytes behind the last tensor are allowed. Strings
that are not UTF-8 are refused, where llama.cpp takes them. Its converter writes none, since it writes
bytes of a vocabulary as characters or as escapes. With other bytes replaced, two tokens could become
the same.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from freight.base.files import open_regular
from freight.errors import CheckpointError, shown

MAX_HEADER = 2**26  # bytes; the largest vocabularies known take 16 MiB
MAX_KEYS = 2**16
MAX_STRING = 2**24  # bytes outside arrays; templates of chats have some 10,000
MAX_VALUES = 2**22  # in all arrays together; a vocabulary of 262,144 tokens has about 1,300,000
MAX_TENSORS = 2**17
MAX_ALIGNMENT = 2**20  # bytes
FIRST_READ = 2**20  # bytes; each further read doubles what is there

_LONGEST_KEY = 2**16 - 1  # bytes, the limit of the format
_LONGEST_NAME = 63  # bytes of a tensor's name: ggml's 64 with the NUL
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_LEAST_KEY = 8 + 1 + 4 + 1  # bytes of a key and its value: length, a letter, type, a value
_LEAST_TENSOR = 8 + 1 + 4 + 4 + 8  # length, a letter, dimensions, type, offset

Value: TypeAlias = int | float | bool | str | list[Any]  # a list holds values of one of the others
Read: TypeAlias = Callable[[int, int], bytes]  # (offset, size) -> the bytes of the file there


@dataclass(frozen=True)
class GGMLType:
    """A type of tensors: a block of `bytes` bytes holds `inputs` values, neighbours in a row.

    `name` is llama.cpp's in lower case: 'f32', 'q4_0', 'q4_k', 'iq4_nl'.
    """

    name: str
    inputs: int
    bytes: int


GGML_TYPES: Final[Mapping[int, GGMLType]] = {
    0: GGMLType("f32", 1, 4),
    1: GGMLType("f16", 1, 2),
    2: GGMLType("q4_0", 32, 18),
    3: GGMLType("q4_1", 32, 20),
    6: GGMLType("q5_0", 32, 22),
    7: GGMLType("q5_1", 32, 24),
    8: GGMLType("q8_0", 32, 34),
    9: GGMLType("q8_1", 32, 36),
    10: GGMLType("q2_k", 256, 84),
    11: GGMLType("q3_k", 256, 110),
    12: GGMLType("q4_k", 256, 144),
    13: GGMLType("q5_k", 256, 176),
    14: GGMLType("q6_k", 256, 210),
    15: GGMLType("q8_k", 256, 292),
    16: GGMLType("iq2_xxs", 256, 66),
    17: GGMLType("iq2_xs", 256, 74),
    18: GGMLType("iq3_xxs", 256, 98),
    19: GGMLType("iq1_s", 256, 50),
    20: GGMLType("iq4_nl", 32, 18),
    21: GGMLType("iq3_s", 256, 110),
    22: GGMLType("iq2_s", 256, 82),
    23: GGMLType("iq4_xs", 256, 136),
    24: GGMLType("i8", 1, 1),
    25: GGMLType("i16", 1, 2),
    26: GGMLType("i32", 1, 4),
    27: GGMLType("i64", 1, 8),
    28: GGMLType("f64", 1, 8),
    29: GGMLType("iq1_m", 256, 56),
    30: GGMLType("bf16", 1, 2),
    34: GGMLType("tq1_0", 256, 54),
    35: GGMLType("tq2_0", 256, 66),
    39: GGMLType("mxfp4", 32, 17),
    40: GGMLType("nvfp4", 64, 36),
    41: GGMLType("q1_0", 128, 18),
    42: GGMLType("q2_0", 64, 18),
}
_REMOVED = {  # from ggml; files with them are old
    4: "q4_2",
    5: "q4_3",
    31: "q4_0_4_4",
    32: "q4_0_4_8",
    33: "q4_0_8_8",
    36: "iq4_nl_4_4",
    37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}

_UINT32 = 4
_BOOL = 7
_STRING = 8
_ARRAY = 9
_NUMBERS = {  # the types of values in metadata, as `struct` names them
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    _UINT32: "I",
    5: "i",
    6: "f",
    _BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_LENGTH = struct.Struct("<Q")

_OTHER_MAGIC = {  # the first 4 bytes of what is often taken for a GGUF file
    b"lmgg": "a GGML file of 2023, the format before GGUF; fetch the model as GGUF",
    b"fmgg": "a GGML file of 2023, the format before GGUF; fetch the model as GGUF",
    b"tjgg": "a GGML file of 2023, the format before GGUF; fetch the model as GGUF",
    b"vers": "perhaps a pointer of Git LFS in place of the file; run `git lfs pull`",
    b"PK\x03\x04": "a ZIP archive",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `size` bytes from byte `offset` of `file`, both counted from its begin.

    shape: outermost dimension first, as in PyTorch; () for a single value. Rows, the last dimension,
        are whole blocks of `type`.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file, or of all parts of a split one; `path` is then the first part.

    metadata: in the file's order, from the first part. tensors: by name, in the order of the parts
        and their headers.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF file, and those of the other parts if it is one of a split.

    Any part may be given, not only the first as in llama.cpp: all are the same model. Raises
    CheckpointError, a line that names the file, for one that is missing, cut or damaged.
    """
    file = Path(path)
    try:
        return join_parts(read_part(file), read_part)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def read_part(path: Path) -> GGUFFile:
    """Read the header of one file. Raises FileNotFoundError, else CheckpointError."""
    try:
        with open_regular(path) as stream:

            def read(offset: int, size: int) -> bytes:
                stream.seek(offset)
                return stream.read(size)

            return parse_gguf(read, os.fstat(stream.fileno()).st_size, str(path), path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def join_parts(part: GGUFFile, read_other: Callable[[Path], GGUFFile]) -> GGUFFile:
    """Return the whole file of which `part` is one part; `part` itself if that is not split.

    read_other: reads the header of another part. It raises FileNotFoundError where there is none.
    Raises CheckpointError, also unless the parts make up the file.
    """
    count = _split_number(part, "split.count", 0)
    if count <= 1:
        return part
    number = _split_number(part, "split.no")
    stem = part.path.name.removesuffix(_part_name("", number, count))
    if stem == part.path.name:
        raise CheckpointError(
            f"{part.path} is part {number + 1} of {count}, and its name must end with "
            f"{_part_name('', number, count)}, by which the others are found; give the files their names back"
        )
    parts = []
    for index in range(count):
        path = part.path.with_name(_part_name(stem, index, count))
        if index == number:
            parts.append(part)
            continue
        try:
            parts.append(read_other(path))
        except FileNotFoundError:
            raise CheckpointError(
                f"{part.path} is one of {count} files, and {path.name} is missing beside it; fetch that too"
            ) from None
    return _whole(parts)


def _part_name(stem: str, index: int, count: int) -> str:
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def _split_number(part: GGUFFile, key: str, default: int = -1) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 100_000:
        raise CheckpointError(f"{part.path}: {key} of a split file is {shown(value)}")
    return value


def _whole(parts: list[GGUFFile]) -> GGUFFile:
    first = parts[0]
    tensors: dict[str, GGUFTensor] = {}
    for index, part in enumerate(parts):
        number = _split_number(part, "split.no")
        count = _split_number(part, "split.count")
        if (number, count) != (index, len(parts)):
            raise CheckpointError(
                f"{part.path} says that it is part {number + 1} of {count}, its name {index + 1} of {len(parts)}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{part.path}: tensor {shown(name)} is in {tensors[name].file.name} too"
                )
            tensors[name] = tensor
    declared = first.metadata.get("split.tensors.count")
    if declared != len(tensors):
        raise CheckpointError(
            f"{first.path}: its {len(parts)} parts have {len(tensors)} tensors where split.tensors.count is "
            f"{shown(declared)}; are they parts of one file?"
        )
    return GGUFFile(first.path, first.metadata, tensors)


def parse_gguf(read: Read, size: int, name: str, path: Path) -> GGUFFile:
    """Parse the header of one file of `size` bytes.

    read: (offset, size) -> bytes; asked for ranges from the begin on, each behind the last, up to
        the header's end and at most twice as far. `name` is the file's in messages, `path` that of
        its tensors. Raises CheckpointError; what `read` raises passes.
    """
    header = _Header(read, size, name)
    _check_format(header)
    tensor_count = header.number("Q", "the number of tensors")
    key_count = header.number("Q", "the number of keys")
    header.expect(key_count, _LEAST_KEY, MAX_KEYS, "keys")
    metadata = _metadata(header, key_count)
    header.expect(tensor_count, _LEAST_TENSOR, MAX_TENSORS, "tensors")
    entries = [_entry(header, index) for index in range(tensor_count)]
    return GGUFFile(path, metadata, _placed(header, entries, _alignment(header, metadata), path))


class _Header:
    """A position in the begin of a file, of which as much is read as the header needs."""

    def __init__(self, read: Read, size: int, name: str) -> None:
        self.name = name
        self.size = size
        self.position = 0
        self.values = 0  # of arrays, so far
        self.types: dict[str, int] = {}  # of the keys
        self._read = read
        self._data = bytearray()

    def refusal(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.name} is damaged: {fault}")

    def cut(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.name} is cut short or damaged: {fault}")

    def need(self, stop: int, what: str) -> None:
        """Have all bytes before `stop`, which `what` ends with."""
        if stop <= len(self._data):
            return
        if stop > self.size:
            raise self.cut(f"{what} would end at byte {stop}, the file has {self.size} bytes")
        if stop > MAX_HEADER:
            raise self.refusal(
                f"{what} would end at byte {stop}, and a header has at most {MAX_HEADER}"
            )
        begin = len(self._data)
        wanted = min(max(stop, 2 * begin, FIRST_READ), self.size, MAX_HEADER) - begin
        data = self._read(begin, wanted)
        if len(data) != wanted:
            raise self.cut(f"{len(data)} bytes at byte {begin} where {wanted} were there")
        self._data += data

    def expect(self, count: int, least: int, most: int, what: str) -> None:
        """Refuse `count` things of at least `least` bytes each for which there is no room."""
        left = self.size - self.position
        if count > most:
            raise self.refusal(f"{count} {what}, at most {most} are read")
        if count * least > left:
            raise self.cut(f"{count} {what} where {left} bytes are left")

    def number(self, format: str, what: str) -> Any:
        return self.numbers(format, what)[0]

    def numbers(self, format: str, what: str) -> tuple[Any, ...]:
        """Unpack values by a `format` of struct, without its sign of byte order."""
        layout = f"<{format}"
        begin = self.position
        self.need(begin + struct.calcsize(layout), what)
        self.position = begin + struct.calcsize(layout)
        return struct.unpack_from(layout, self._data, begin)

    def string(self, what: str, longest: int = MAX_STRING) -> str:
        length = self.number("Q", what)
        if length > longest:
            raise self.refusal(f"{what} has a length of {length} bytes, at most {longest}")
        begin = self.position
        self.need(begin + length, what)
        self.position = begin + length
        try:
            return self._data[begin : self.position].decode()
        except UnicodeDecodeError as error:
            raise self.refusal(f"{what} is not UTF-8: {error.reason}") from None

    def strings(self, count: int, what: str) -> list[str]:
        """Read many strings: `string` in a loop without calls, since a vocabulary has 700,000."""
        data = self._data  # grows in place
        position = self.position
        available = len(data)
        values: list[str] = []
        try:
            for _ in range(count):
                begin = position + 8
                if begin > available:
                    self.need(begin, what)
                    available = len(data)
                position = begin + _LENGTH.unpack_from(data, position)[0]
                if position > available:
                    self.need(position, what)
                    available = len(data)
                values.append(data[begin:position].decode())
        except UnicodeDecodeError as error:
            raise self.refusal(f"{what}[{len(values)}] is not UTF-8: {error.reason}") from None
        self.position = position
        return values


def _check_format(header: _Header) -> None:
    magic = bytes(header.numbers("4B", "the magic number"))
    if magic != b"GGUF":
        kind = _OTHER_MAGIC.get(magic, f"it begins with {magic!r}")
        raise CheckpointError(f"{header.name} is not a GGUF file: {kind}")
    version = header.number("I", "the version")
    if version in (2, 3):
        return
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(
            f"{header.name} is a big-endian GGUF file; only little-endian ones are read, fetch or convert it as such"
        )
    raise CheckpointError(
        f"{header.name} is a GGUF file of version {version}; versions 2 and 3 are read"
        + ("; convert the model with a newer llama.cpp" if version == 1 else "")
    )


def _metadata(header: _Header, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = header.string(f"the name of key {index}", _LONGEST_KEY)
        if not key:
            raise header.refusal(f"key {index} has no name")
        if key in metadata:
            raise header.refusal(f"the key {shown(key)} is there twice")
        metadata[key] = _value(header, key)
    return metadata


def _value(header: _Header, key: str) -> Value:
    what = shown(key)
    code = header.number("I", what)
    header.types[key] = code
    if code == _STRING:
        return header.string(what)
    if code == _ARRAY:
        return _array(header, what)
    plain: Value = _plain(header, code, 1, what)[0]
    return plain


def _array(header: _Header, what: str) -> list[Any]:
    code, count = header.numbers("IQ", what)
    if code == _ARRAY:
        raise header.refusal(f"{what} is an array of arrays, which llama.cpp does not read either")
    least = _LENGTH.size if code == _STRING else struct.calcsize(_number_format(header, code, what))
    header.expect(count, least, MAX_VALUES - header.values, f"values of {what}")
    header.values += count
    if code == _STRING:
        return header.strings(count, what)
    return _plain(header, code, count, what)


def _plain(header: _Header, code: int, count: int, what: str) -> list[Any]:
    """Read numbers or booleans, of which `count` fit into the file."""
    values = header.numbers(f"{count}{_number_format(header, code, what)}", what)
    if code != _BOOL:
        return list(values)
    if any(value > 1 for value in values):
        raise header.refusal(f"{what}: a boolean is {max(values)}, neither 0 nor 1")
    return [value == 1 for value in values]


def _number_format(header: _Header, code: int, what: str) -> str:
    if code not in _NUMBERS:
        raise header.refusal(f"{what} has the unknown type {code}")
    return _NUMBERS[code]


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header has it; `offset` counts from the begin of all tensors' data."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    size: int


def _entry(header: _Header, index: int) -> _Entry:
    name = header.string(f"the name of tensor {index}", _LONGEST_NAME)
    if not name:
        raise header.refusal(f"tensor {index} has no name")
    what = f"tensor {shown(name)}"
    if "\0" in name:  # it would have another name in C
        raise header.refusal(f"{what} has a NUL in its name")
    dimensions = header.number("I", what)
    if dimensions > _MOST_DIMENSIONS:
        raise header.refusal(f"{what} has {dimensions} dimensions, at most {_MOST_DIMENSIONS}")
    (*innermost_first, code, offset) = header.numbers(f"{dimensions}QIQ", what)
    shape = tuple(reversed(innermost_first))
    stored = _type(header, code, what)
    row = shape[-1] if shape else 1
    if 0 in shape:
        raise header.refusal(f"{what} has the shape {list(shape)}, so no value")
    if row % stored.inputs:
        raise header.refusal(
            f"{what} has rows of {row} values, which are not whole blocks of {stored.name}: {stored.inputs} values"
        )
    size = math.prod(shape) // stored.inputs * stored.bytes
    return _Entry(name, stored, shape, offset, size)


def _type(header: _Header, code: int, what: str) -> GGMLType:
    if code in _REMOVED:
        raise CheckpointError(
            f"{header.name}: {what} is in {_REMOVED[code]}, which llama.cpp has removed; fetch a newer file"
        )
    if code not in GGML_TYPES:
        raise header.refusal(
            f"{what} has the unknown type {code}, the last known is {max(GGML_TYPES)}"
        )
    return GGML_TYPES[code]


def _alignment(header: _Header, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if header.types.get("general.alignment", _UINT32) != _UINT32 or not isinstance(alignment, int):
        raise header.refusal("general.alignment is not of type uint32")
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise header.refusal(
            f"general.alignment is {alignment}, not a power of 2 from 8 to {MAX_ALIGNMENT}"
        )
    return alignment


def _placed(
    header: _Header, entries: list[_Entry], alignment: int, path: Path
) -> dict[str, GGUFTensor]:
    """Return the tensors with their places; each lies within the file, behind all that begin before."""
    begin = -(-header.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        what = f"tensor {shown(entry.name)}"
        if entry.name in tensors:
            raise header.refusal(f"{what} is there twice")
        if entry.offset % alignment:
            raise header.refusal(
                f"{what} has the offset {entry.offset}, not a multiple of the alignment, {alignment}"
            )
        stop = begin + entry.offset + entry.size
        if stop > header.size:
            raise header.cut(f"{what} would end at byte {stop}, the file has {header.size} bytes")
        tensors[entry.name] = GGUFTensor(
            entry.name, entry.type, entry.shape, path, begin + entry.offset, entry.size
        )
    end = begin
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise header.refusal(
                f"tensor {shown(tensor.name)} begins at byte {tensor.offset}, within another that ends at {end}"
            )
        end = tensor.offset + tensor.size
    return tensors
