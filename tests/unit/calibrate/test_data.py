"""Calibration data: every form gives the token ids that the model would be given, and nothing
malformed passes.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import line_naming, refuses

from freight.errors import ConfigError, RequestError
from freight.quantizer.data import FEW_TOKENS, read_samples

LONG = "x" * 600


class Letters:
    """A tokenizer with a token a character, BOS 1, and a template."""

    bos_token_id = 1
    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        assert not add_generation_prompt, "calibration shows whole conversations"
        if not isinstance(messages, list):
            raise RequestError("messages are a list")
        return [2, *(ord(c) for message in messages for c in message["content"])]


class LettersOfABase(Letters):
    """That of a model that was not trained to converse."""

    has_chat_template = False


def samples(
    data: object,
    num_samples: int = 512,
    max_seq_len: int = 2048,
    vocab_size: int = 256,
    tokenizer: type[Letters] = Letters,
) -> list[list[int]]:
    return read_samples(data, num_samples, max_seq_len, vocab_size, tokenizer)  # type: ignore[arg-type, return-value]


def jsonl(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n"
    )
    return path


def no_tokenizer() -> Any:
    raise AssertionError("token ids need no tokenizer")


def test_a_text_is_cut_and_every_piece_begins_as_a_text_does(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(32 + i % 90) for i in range(1000)))
    got = samples(path, max_seq_len=300)
    assert [len(ids) for ids in got] == [300, 300, 300, 104]
    assert all(ids[0] == 1 for ids in got)
    assert [token for ids in got for token in ids[1:]] == [ord(c) for c in path.read_text()]


def test_lines_of_every_kind(tmp_path: Path):
    path = jsonl(
        tmp_path,
        {"text": LONG, "source": "somewhere"},
        {"messages": [{"role": "user", "content": "ab"}]},
        {"conversations": [{"from": "human", "value": "ab"}]},
        {"input_ids": [7, 8, 9]},
    )
    assert samples(path) == [[1, *map(ord, LONG)], [2, 97, 98], [2, 97, 98], [7, 8, 9]]


def test_python_sequences():
    assert samples([LONG, [5, 6]]) == [[1, *map(ord, LONG)], [5, 6]]


def test_samples_are_counted_and_cut():
    got = samples([[3] * 400] * 5, num_samples=2, max_seq_len=150)
    assert [len(ids) for ids in got] == [150, 150]


def test_token_ids_need_no_tokenizer(tmp_path: Path):
    path = jsonl(tmp_path, {"input_ids": [4] * 300})
    assert read_samples(path, 8, 1024, 256, no_tokenizer) == [[4] * 300]


def test_empty_samples_do_not_count():
    assert samples([[], [3] * 300], num_samples=1) == [[3] * 300]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is not JSON"),
        pytest.param("[" * 200_000, "line 1 is not JSON", id="nested"),
        ([1, 2], "line 1 is list"),
        ({"prompt": "x"}, r"line 1 has \['prompt'\]"),
        ({"text": "x", "input_ids": [1]}, "one of `text`"),
        ({"text": 3}, "`text` is int"),
        ('{"text": "x", "text": "y"}', "line 1 .*'text' twice"),
        ({"input_ids": "abc"}, "token ids must be a list of integers"),
        ({"input_ids": [1, 2.5]}, "token ids must be a list of integers"),
        ({"messages": "hello"}, "line 1: messages are a list"),
        ({"conversations": "hello"}, "line 1: `conversations` is not a list of objects"),
        (
            {"conversations": [{"from": "human"}]},
            "line 1: `conversations` is not a list of objects",
        ),
        ({"input_ids": [300] * 300}, "token id 300 is not in the model's vocabulary"),
        ({"input_ids": [-1] * 300}, "token id -1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, says: str):
    with pytest.raises(ConfigError, match=says):
        samples(jsonl(tmp_path, line))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"text": "x"}\n\n{"text": "\xe9"}\n')
    with refuses(ConfigError, "line 3", "UTF-8"):
        samples(tmp_path / name)


def test_messages_for_a_base_model_are_their_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    line = {
        "messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "yes"}]
    }
    data = jsonl(tmp_path, line, line)
    expected = [1, *map(ord, f"{LONG}\nyes")]
    assert samples(data, tokenizer=LettersOfABase) == [expected] * 2
    line_naming(caplog.text, "no chat template", "texts", "alone")


@pytest.mark.parametrize("messages", ["hello", [], [{"role": "user"}], ["hello"]])
def test_messages_without_texts_are_named(tmp_path: Path, messages: object):
    with refuses(ConfigError, "line 1", "`messages`", "list of objects"):
        samples(jsonl(tmp_path, {"messages": messages}), tokenizer=LettersOfABase)


def test_little_is_a_warning(caplog: pytest.LogCaptureFixture):
    assert samples([[3] * (FEW_TOKENS - 1)]) == [[3] * (FEW_TOKENS - 1)]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("freight", logging.WARNING)
    assert f"calibration_data gives {FEW_TOKENS - 1} tokens in 1 sample" in record.getMessage()
    assert "give more text" in record.getMessage()
    caplog.clear()
    assert samples([[3] * FEW_TOKENS])
    assert not caplog.records


@pytest.mark.parametrize("data", [[], [[]]])
def test_nothing_is_refused(data: list[Any], tmp_path: Path):
    with refuses(ConfigError, "calibration_data", "no token"):
        samples(data)
    with pytest.raises(ConfigError, match="no token"):
        samples(jsonl(tmp_path))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, separator: str):
    """JSON allows the other line separators of Unicode in its strings, unescaped."""
    text = f"one{separator}two"
    line = json.dumps({"text": text}, ensure_ascii=False)
    path = tmp_path / "data.jsonl"
    path.write_bytes(f"{line}\r\n\n{line}\r\n".encode())
    assert samples(path, vocab_size=0x3000) == [[1, *map(ord, text)]] * 2


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text('{"text": "ab"}' if name == "data.jsonl" else "ab", encoding="utf-8-sig")
    assert samples(path) == [[1, 97, 98]]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes | None):
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    with refuses(ConfigError, "data.txt", "text"):
        samples(path)


def test_something_else_is_no_data():
    with pytest.raises(ConfigError, match="is int; give a path"):
        samples(3)
    with pytest.raises(ConfigError, match=r"calibration_data\[0\]"):
        samples([{"prompt": "x"}])


def test_samples_in_python_may_be_dicts_as_the_lines_of_a_file_are():
    chat = [{"role": "user", "content": LONG}]
    given = [{"text": LONG}, {"messages": chat}, {"input_ids": [5, 6]}]
    assert samples(given) == [[1, *map(ord, LONG)], [2, *map(ord, LONG)], [5, 6]]
