"""IN and OUT of `freight batch`: what is refused before a model is read, and how a run finds what
is done.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.serve.offline.batch import _parts as parts
from freight.serve.offline.batch_files import BatchInput, BatchOutput, require_different
from freight.serve.transport.errors import ApiError

NAMES = ("demo",)


def line(name: str, model: str | None = None) -> str:
    body = {"prompt": name, **({} if model is None else {"model": model})}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(one + "\n" for one in lines))
    return path


def answer(number: str, failed: bool = False) -> bytes:
    return json.dumps({"id": number, "error": {"code": "x"} if failed else None}).encode() + b"\n"


def test_ids_follow_from_the_options_and_the_line(tmp_path: Path) -> None:
    source = written(tmp_path / "in", line("a"), "", line("b"))
    ids = BatchInput(source, ["x"], NAMES).ids
    assert len(set(ids)) == 2
    assert ids == BatchInput(source, ["x"], NAMES).ids
    assert set(ids).isdisjoint(BatchInput(source, ["y"], NAMES).ids)
    assert [one.number for one in BatchInput(source, ["x"], NAMES)] == [1, 3]
    changed = BatchInput(written(tmp_path / "in", line("a"), "", line("c")), ["x"], NAMES).ids
    assert changed[0] == ids[0]
    assert changed[1] != ids[1]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    plain, marked = written(tmp_path / "plain", line("a"), line("b")), tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert BatchInput(marked, [], NAMES).ids == BatchInput(plain, [], NAMES).ids
    marked.write_bytes(plain.read_bytes() + b"\xef\xbb\xbf{}\n")
    assert [one.raw[:1] for one in BatchInput(marked, [], NAMES)] == [b"{", b"{", b"\xef"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), "has no line"),
        (("PK\x03", "[1]"), "line 1 is not JSON"),
        (("[1]",), "line 1.*JSON object"),
        ((line("a"), "{bad", line("b"), line("a")), "lines 1 and 4.*custom_id 'a'"),
        (
            (line("a", "gpt-4o"), line("b", "gpt")),
            "line 1.*'gpt-4o'.*--served-model-name",
        ),
    ],
)
def test_a_pointless_input_is_refused(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BatchInput(written(tmp_path / "in", *lines), [], NAMES)


def test_some_bad_lines_are_not_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "in", "{bad", line("a", "gpt-4o"), line("b", "demo"), "[" * 100_000)
    assert len(BatchInput(source, [], NAMES).ids) == 4
    assert (
        len(BatchInput(written(tmp_path / "in", line("a", "gpt-4o"), line("b")), [], NAMES).ids)
        == 2
    )


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_only_a_regular_file_is_an_input_or_an_output(tmp_path: Path, make: object) -> None:
    path = tmp_path / "no-file"
    make(path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="cannot be read"):
        BatchInput(path, [], NAMES)
    with refuses(ConfigError, str(path)):
        BatchOutput(path, [])


def test_an_output_is_continued_after_its_last_whole_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(answer("1") + answer("2", failed=True) + answer("3")[:-1])
    with BatchOutput(out, ["1", "2", "3"]) as output:
        assert (output.num_done, output.num_failed) == (2, 1)
        output.write(answer("3"))
    assert out.read_bytes() == answer("1") + answer("2", failed=True) + answer("3")
    with BatchOutput(out, ["1", "2", "3"]) as output:
        assert output.num_done == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (answer("batch_req_" + "0" * 16 + "b"), "line 1 does not answer"),
        (
            answer("batch_req_" + "1" * 16 + "a"),
            "line 1.*another model",
        ),
        (answer("batch_req_" + "0" * 16 + "a") * 2, "more lines.* 1"),
        (b"a text\nof somebody", "line 1.*freight batch"),
        (b"[]\n", "line 1.*freight batch"),
    ],
)
def test_another_output_is_refused_and_left_alone(
    tmp_path: Path, content: bytes, said: str
) -> None:
    out = tmp_path / "out"
    out.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        BatchOutput(out, ["batch_req_" + "0" * 16 + "a"])
    assert out.read_bytes() == content


def test_one_run_has_an_output(tmp_path: Path) -> None:
    with BatchOutput(tmp_path / "out", []), pytest.raises(ConfigError, match="another run writes"):
        BatchOutput(tmp_path / "out", [])


def test_an_input_is_no_output(tmp_path: Path) -> None:
    source = written(tmp_path / "in", line("a"))
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ConfigError, match="the same file"):
        require_different(source, tmp_path / "link")
    require_different(source, tmp_path / "out")


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    output = BatchOutput(tmp_path / "out", [])
    with output._file, open("/dev/full", "r+b", buffering=0) as full:
        output._file, kept = full, output._file  # type: ignore[assignment]
        with pytest.raises(OSError) as raised:
            output.write(b"x\n")
        kept.close()
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "out"))


@pytest.mark.parametrize("custom_id", [None, 5, "", ["a"]])
def test_a_line_without_a_text_as_its_id_is_no_request(custom_id: object) -> None:
    with refuses(ApiError, "custom_id"):
        parts({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}})
