"""What `freight verify` reads: one bad line costs that line, and a byte order mark costs none."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freight.cli.verify import _read
from freight.engine.verification import Outcome, Verification
from freight.errors import ConfigError

GOOD = b'{"a": "\xe2\x80\xa8 \xc3\xa9"}'
VALUE = {"a": "\u2028 é"}
BAD = [b'{"a": "\xe9"}', b"\xff\xfe", b'{"a": 1, "a": 2}', b"{", b"[" * 100_000]


def read(data: bytes, folder: Path) -> list[Any]:
    file = folder / "answers.jsonl"
    file.write_bytes(data)
    return list(_read(file))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_bad_line_is_one_result(bad: bytes, mark: bytes, end: bytes, tmp_path: Path) -> None:
    values = read(mark + end.join([GOOD, bad, b"", GOOD]), tmp_path)
    assert [values[0], values[2]] == [VALUE, VALUE]
    assert isinstance(values[1], Verification)
    assert values[1].outcome is Outcome.UNKNOWN
    assert "line 2" in values[1].reason


def test_a_byte_order_mark_before_one_value_or_one_line_is_nothing(tmp_path: Path) -> None:
    assert read(b"\xef\xbb\xbf" + GOOD, tmp_path) == [VALUE]
    assert read(b'\xef\xbb\xbf{\n"a": 1}', tmp_path) == [{"a": 1}]


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf\n", b"\xff\n\xff", b"{\n{"])
def test_a_file_without_a_value_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"answers\.jsonl"):
        read(data, tmp_path)


def test_standard_input_is_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\n".join([GOOD, b"\xff", GOOD])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    values = list(_read(Path("-")))
    assert [values[0], values[2]] == [VALUE, VALUE]
