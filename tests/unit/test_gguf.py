"""Headers of GGUF files: what they say, and a line of refusal for all that cannot be so."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_files import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    Stored,
    Tensor,
    gguf_bytes,
    text,
)
from tests.refusals import refuses

from freight.base import gguf
from freight.base.gguf import GGML_TYPES, GGUFFile, parse_gguf, read_gguf
from freight.errors import CheckpointError

F32 = 0
Q4_0 = 2
Q6_K = 14
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.layer_norm_rms_epsilon": Stored(FLOAT32, 0.25),
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": Stored(STRING, ["<s>", "", "a\0b", "▁wörd", "🚢"]),
    "tokenizer.ggml.scores": Stored(FLOAT32, [0.0, -1.0, -2.5, 3.0, 4.0]),
    "tokenizer.ggml.token_type": Stored(INT32, [3, 1, 1, 1, -1]),
    "flags": Stored(BOOL, [True, False]),
    "none": Stored(UINT64, []),
}
TENSORS = {
    "output_norm.weight": Tensor(F32, (3,), b"\1" * 12),
    "blk.0.attn_q.weight": Tensor(Q4_0, (2, 64), b"\2" * 72),
    "blk.0.ffn_up_exps.weight": Tensor(Q6_K, (2, 1, 256), b"\3" * 420),
    "scale": Tensor(F32, (), b"\4" * 4),
}
SECOND = gguf_bytes(
    {
        "general.alignment": 64,
        "general.name": "second",
        "heads": Stored(UINT8, [1, 2]),
        "x": Stored(FLOAT64, 0.1),
    },
    {"a": Tensor(F32, (2, 2), b"\5" * 16), "b": Tensor(F32, (1, 1, 1, 5), b"\6" * 20)},
    alignment=64,
    version=2,
)
FIRST = gguf_bytes(METADATA, TENSORS)


def parsed(content: bytes, asked: list[tuple[int, int]] | None = None) -> GGUFFile:
    def read(offset: int, size: int) -> bytes:
        if asked is not None:
            asked.append((offset, size))
        return content[offset : offset + size]

    return parse_gguf(read, len(content), "x.gguf", Path("x.gguf"))


def test_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(FIRST)
    file = read_gguf(str(path))
    assert file.path == path
    assert dict(file.metadata) == {
        key: value.value if isinstance(value, Stored) else value for key, value in METADATA.items()
    }
    assert list(file.metadata) == list(METADATA)
    assert list(file.tensors) == list(TENSORS)
    for name, tensor in file.tensors.items():
        written = TENSORS[name]
        assert (tensor.name, tensor.file, tensor.shape) == (name, path, written.shape)
        assert tensor.type is GGML_TYPES[written.type]
        assert tensor.offset % 32 == 0
        assert FIRST[tensor.offset : tensor.offset + tensor.size] == written.data


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (UINT8, 255),
        (INT8, -128),
        (UINT16, 65535),
        (INT16, -32768),
        (UINT32, 2**32 - 1),
        (INT32, -(2**31)),
        (UINT64, 2**64 - 1),
        (INT64, -(2**63)),
        (FLOAT32, 1.5),
        (FLOAT64, 0.1),
        (BOOL, False),
        (STRING, "tèxt"),
    ],
)
def test_every_type_of_value_alone_and_in_an_array(code: int, value: object) -> None:
    file = parsed(gguf_bytes({"one": Stored(code, value), "many": Stored(code, [value] * 3)}))
    assert file.metadata == {"one": value, "many": [value] * 3}
    assert isinstance(value, bool) == isinstance(file.metadata["one"], bool)


def test_types_of_ggml() -> None:
    names = [ggml.name for ggml in GGML_TYPES.values()]
    assert len(names) == len(set(names)) == 35
    assert all(name == name.lower() for name in names)


def test_version_2_and_another_alignment() -> None:
    file = parsed(SECOND)
    assert file.metadata["general.alignment"] == 64
    assert [tensor.offset % 64 for tensor in file.tensors.values()] == [0, 0]
    assert file.tensors["b"].shape == (1, 1, 1, 5)


def test_a_file_cut_at_any_byte() -> None:
    for content in (FIRST, SECOND, gguf_bytes(METADATA)):
        tensors = parsed(content).tensors.values()
        # what is behind the last tensor is padding
        end = max((tensor.offset + tensor.size for tensor in tensors), default=len(content))
        for size in range(end):
            with refuses(CheckpointError, "x.gguf", "cut short") as refusal:
                parsed(content[:size])
            assert_a_line(str(refusal.value))
        for whole in (content[:end], content + b"more"):  # both as llama.cpp
            assert len(parsed(whole).tensors) == len(tensors)


def with_tensor(*tensors: tuple[str | bytes, Tensor]) -> bytes:
    return gguf_bytes({}, tensors)


def with_key(key: str | bytes, value: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(key) + value


A = Tensor(F32, (8,), bytes(32))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"tjgg" + bytes(99), ["x.gguf", "GGML"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS", "git lfs pull"]),
        (b"{}\n  ", ["x.gguf", "not a GGUF file"]),
        (gguf_bytes({}, version=1), ["version 1", "versions 2 and 3"]),
        (gguf_bytes({}, version=4), ["version 4"]),
        (gguf_bytes({}, version=0), ["version 0"]),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
        (gguf_bytes([("a", 1), ("a", 2)]), ["'a'", "twice"]),
        (gguf_bytes([("", 1)]), ["key 0"]),
        (gguf_bytes([(b"\xff", 1)]), ["key 0", "UTF-8"]),
        (gguf_bytes([("k" * 70_000, 1)]), ["70000", "65535"]),
        (gguf_bytes([("a", Stored(STRING, b"\xff"))]), ["'a'", "UTF-8"]),
        (gguf_bytes([("a", Stored(STRING, ["b", b"\xff"]))]), ["'a'[1]", "UTF-8"]),
        (with_key("a", struct.pack("<IB", BOOL, 2)), ["'a'", "2"]),
        (with_key("a", struct.pack("<IIQBBB", 9, BOOL, 3, 0, 1, 7)), ["'a'", "7"]),
        (with_key("a", struct.pack("<IQ", 13, 0)), ["'a'", "13"]),
        (with_key("a", struct.pack("<IIQ", 9, 77, 0)), ["'a'", "77"]),
        (with_key("a", struct.pack("<IIQIQ", 9, 9, 1, 4, 0)), ["'a'", "array of arrays"]),
        (with_key("a", struct.pack("<IIQ", 9, UINT8, 2**64 - 1)), ["'a'", str(2**64 - 1)]),
        (with_key("a", struct.pack("<IIQ", 9, STRING, 2**20)), ["'a'", str(2**20), "0 bytes"]),
        (with_key("a", struct.pack("<IQ", STRING, 2**63)), ["'a'", str(2**63)]),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), ["keys", str(2**64 - 1)]),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 9), ["9 keys", "0 bytes"]),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), ["tensors", str(2**63)]),
        (gguf_bytes({"general.alignment": 0}), ["general.alignment", "0"]),
        (gguf_bytes({"general.alignment": 4}), ["general.alignment", "4"]),
        (gguf_bytes({"general.alignment": 48}), ["general.alignment", "48"]),
        (gguf_bytes({"general.alignment": 2**31}), ["general.alignment", str(2**31)]),
        (gguf_bytes({"general.alignment": Stored(INT32, 32)}), ["general.alignment", "uint32"]),
        (gguf_bytes({"general.alignment": "32"}), ["general.alignment", "uint32"]),
        (with_tensor(("a", A), ("a", A)), ["'a'", "twice"]),
        (with_tensor(("", A)), ["tensor 0"]),
        (with_tensor(("n" * 64, A)), ["64 bytes", "63"]),
        (with_tensor(("a\0b", A)), ["'a\\x00b'", "NUL"]),
        (with_tensor((b"\x80", A)), ["tensor 0", "UTF-8"]),
        (with_tensor(("a", Tensor(F32, (1,) * 5, bytes(4)))), ["'a'", "5 dimensions"]),
        (with_tensor(("a", Tensor(F32, (2, 0), b""))), ["'a'", "[2, 0]"]),
        (with_tensor(("a", Tensor(Q4_0, (2, 33), bytes(99)))), ["'a'", "33", "q4_0"]),
        (with_tensor(("a", Tensor(Q4_0, (32, 1), bytes(99)))), ["'a'", "rows of 1"]),
        (with_tensor(("a", Tensor(4, (32,), bytes(99)))), ["'a'", "q4_2", "removed"]),
        (with_tensor(("a", Tensor(43, (32,), bytes(99)))), ["'a'", "43"]),
        (with_tensor(("a", Tensor(F32, (2**63, 2**63), b""))), ["'a'", "cut short"]),
        (with_tensor(("a", Tensor(F32, (8,), bytes(64), 8))), ["'a'", "offset 8"]),
        (with_tensor(("a", Tensor(F32, (8,), bytes(32), 2**63))), ["'a'", "cut short"]),
        (with_tensor(("a", A), ("b", Tensor(F32, (8,), bytes(32), 0))), ["'b'", "within"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(content: bytes, named: Sequence[str]) -> None:
    with refuses(CheckpointError, "x.gguf") as refusal:
        parsed(content)
    message = str(refusal.value)
    assert [word for word in named if word not in message] == []
    assert "\n" not in message


def test_names_of_63_bytes_order_and_gaps() -> None:
    name = "ü" * 31 + "x"
    content = gguf_bytes(
        {}, [(name, Tensor(F32, (8,), bytes(96), 64)), ("b", Tensor(F32, (8,), b"", 0))]
    )
    tensors = parsed(content).tensors
    assert tensors[name].offset == tensors["b"].offset + 64


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with refuses(CheckpointError, "none.gguf", "No such file"):
        read_gguf(tmp_path / "none.gguf")
    with refuses(CheckpointError, str(tmp_path), "directory"):
        read_gguf(tmp_path)
    os.mkfifo(tmp_path / "fifo.gguf")
    with refuses(CheckpointError, "fifo.gguf", "FIFO"):
        read_gguf(tmp_path / "fifo.gguf")


def test_a_header_is_read_in_growing_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "FIRST_READ", 64)
    content = gguf_bytes(
        METADATA | {"long": "x" * 5000}, {"a": Tensor(F32, (2**18,), bytes(2**20))}
    )
    asked: list[tuple[int, int]] = []
    file = parsed(content, asked)
    assert file == parsed(content)
    begin = 0
    for offset, size in asked:
        assert offset == begin
        begin += size
    assert begin < 2 * file.tensors["a"].offset
    assert len(asked) < 10


def test_limits_of_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    content = gguf_bytes(
        {"a": Stored(UINT8, [1] * 8), "b": Stored(UINT8, [1] * 8)}, {"c": A, "d": A}
    )
    for name, limit, named in (
        ("MAX_HEADER", 60, "60"),
        ("MAX_KEYS", 1, "2 keys"),
        ("MAX_VALUES", 15, "8 values of 'b'"),
        ("MAX_TENSORS", 1, "2 tensors"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(gguf, name, limit)
            with refuses(CheckpointError, "x.gguf", named):
                parsed(content)
    assert len(parsed(content).tensors) == 2


@pytest.mark.clock
def test_a_vocabulary_of_262144_tokens_and_as_many_merges() -> None:
    tokens = [f"tök{index}" for index in range(2**18)]
    merges = [f"t {index}" for index in range(2**18)]
    content = gguf_bytes({"tokens": Stored(STRING, tokens), "merges": Stored(STRING, merges)})
    begin = time.process_time()
    file = parsed(content)
    assert time.process_time() - begin < 3  # 0.15 s, without other work
    assert file.metadata == {"tokens": tokens, "merges": merges}


# Splits


def write_parts(folder: Path, count: int = 3, **changed: Any) -> list[Path]:
    """Write a file of `count` parts. changed: keys of metadata of the second, with _ for the dot."""
    paths = []
    for index in range(count):
        metadata = {
            "split.no": Stored(UINT16, index),
            "split.count": Stored(UINT16, count),
            "split.tensors.count": Stored(INT32, count),
        }
        if index == 0:
            metadata |= {"general.name": "whole"}
        if index == 1:
            metadata |= {key.replace("_", "."): value for key, value in changed.items()}
        name = changed.get("tensor", f"t{index}") if index == 1 else f"t{index}"
        paths.append(folder / f"m-q8-{index + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(gguf_bytes(metadata, {name: A}))
    return paths


def test_every_part_is_the_whole_file(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    files = [read_gguf(path) for path in paths]
    assert files[0] == files[1] == files[2]
    assert files[0].path == paths[0]
    assert files[0].metadata["general.name"] == "whole"
    assert [tensor.file for tensor in files[0].tensors.values()] == paths
    assert list(files[0].tensors) == ["t0", "t1", "t2"]


def test_a_split_of_one(tmp_path: Path) -> None:
    (path,) = write_parts(tmp_path, 1)
    assert list(read_gguf(path.rename(tmp_path / "other.gguf")).tensors) == ["t0"]


def test_parts_that_are_no_file(tmp_path: Path) -> None:
    for changed, named in (
        ({"split_no": Stored(UINT16, 2)}, ["part 3 of 3", "2 of 3"]),
        ({"split_count": Stored(UINT16, 4)}, ["part 2 of 4"]),
        ({"split_count": "3"}, ["split.count", "'3'"]),
        ({"split_no": Stored(INT32, -1)}, ["split.no", "-1"]),
        ({"tensor": "t0"}, ["'t0'", "m-q8-00001-of-00003.gguf"]),
    ):
        (first, second, _) = write_parts(tmp_path, **changed)
        with refuses(CheckpointError, str(second), *named):
            read_gguf(first)
    (first, second, third) = write_parts(tmp_path)
    content = first.read_bytes()
    count = text("split.tensors.count") + struct.pack("<I", INT32)
    first.write_bytes(content.replace(count + b"\3", count + b"\4"))
    with refuses(CheckpointError, str(first), "3 tensors", "split.tensors.count is 4"):
        read_gguf(second)
    first.write_bytes(content[:-40])
    with refuses(CheckpointError, str(first), "cut short"):
        read_gguf(third)
    first.unlink()
    with refuses(CheckpointError, str(third), first.name, "missing"):
        read_gguf(third)
    renamed = second.rename(tmp_path / "part.gguf")
    with refuses(CheckpointError, str(renamed), "part 2 of 3", "-00002-of-00003.gguf"):
        read_gguf(renamed)


# Damage

EDGES = [struct.pack("<Q", n) for n in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)]
EDGES += [struct.pack("<I", n) for n in (0, 1, 2**31, 2**32 - 1)]


def mutated(content: bytes, header: int, draw: random.Random) -> bytes:
    """Return the file with one to three faults in its first `header` bytes."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(header)
        fault = draw.randrange(5)
        if fault == 0:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif fault == 1:
            edge = draw.choice(EDGES)
            data[at : at + len(edge)] = edge
        elif fault == 2:
            del data[draw.randrange(len(data)) if draw.random() < 0.5 else at :]
        elif fault == 3:
            data[at:at] = draw.randbytes(draw.randint(1, 9))
        else:
            del data[at : at + draw.randint(1, 9)]
    return bytes(data)


def assert_a_line(message: str) -> None:
    assert message.startswith("x.gguf")
    assert "\n" not in message


def assert_refused_or_within(content: bytes) -> bool:
    """Return whether the file is read; then all its tensors lie in it."""
    try:
        file = parsed(content)
    except CheckpointError as refusal:
        assert_a_line(str(refusal))
        return False
    end = 0
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        assert end <= tensor.offset
        end = tensor.offset + tensor.size
    assert end <= len(content)
    return True


@pytest.mark.clock
def test_5000_damaged_headers() -> None:
    draw = random.Random(61)
    read = 0
    for content in (FIRST, SECOND):
        header = min(tensor.offset for tensor in parsed(content).tensors.values())
        for _ in range(2500):
            read += assert_refused_or_within(mutated(content, header, draw))
    assert 100 < read < 4000  # both outcomes were tried


def test_memory_of_damaged_headers() -> None:
    draw = random.Random(62)
    tracemalloc.start()
    try:
        for content in (FIRST, SECOND):
            header = min(tensor.offset for tensor in parsed(content).tensors.values())
            for _ in range(150):
                damaged = mutated(content, header, draw)
                tracemalloc.reset_peak()
                assert_refused_or_within(damaged)
                assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.clock
def test_a_sparse_file_that_declares_much(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(with_key("a", struct.pack("<IIQ", 9, STRING, gguf.MAX_VALUES)))
    os.truncate(path, 2**40)
    begin = time.process_time()
    assert read_gguf(path).metadata["a"] == [""] * gguf.MAX_VALUES
    assert time.process_time() - begin < 10
    path.write_bytes(with_key("a", struct.pack("<IQ", STRING, gguf.MAX_STRING + 1)))
    os.truncate(path, 2**40)
    tracemalloc.start()
    try:
        with refuses(CheckpointError, str(path), str(gguf.MAX_STRING)):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * gguf.FIRST_READ
    finally:
        tracemalloc.stop()


def test_a_file_that_ends_sooner_than_its_size() -> None:
    with refuses(CheckpointError, "x.gguf", "cut short"):
        parse_gguf(lambda offset, size: FIRST[:90], len(FIRST), "x.gguf", Path("x.gguf"))
