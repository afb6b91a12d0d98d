"""Data sets by their name on the hub, and .parquet files: the samples of .jsonl, and one line where
they fail.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tests.refusals import refuses

from freight.errors import ConfigError
from freight.quantizer.data import read_samples
from freight.quantizer.hub_data import is_hub_id

ROWS = [{"prompt": "p", "input_ids": list(range(i, i + 200))} for i in range(4)]
IDS = [row["input_ids"] for row in ROWS]


def no_tokenizer() -> Any:
    raise AssertionError("token ids need no tokenizer")


def samples(data: object, num_samples: int = 512) -> list[list[int]]:
    return read_samples(data, num_samples, 2048, 256, no_tokenizer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Data sets by name, each with its splits."""
    known: dict[str, dict[str, Any]] = {
        "mgoin/ultrachat_2k": {"test_sft": ROWS[:1], "train_sft": ROWS}
    }

    def load_dataset(name: str) -> dict[str, Any]:
        if name not in known:
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        return known[name]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    return known


def test_the_data_set_of_autofp8s_script(hub: dict[str, dict[str, Any]]):
    assert samples("mgoin/ultrachat_2k") == IDS
    assert samples("mgoin/ultrachat_2k", 2) == IDS[:2]
    assert samples("mgoin/ultrachat_2k:test_sft") == IDS[:1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "mgoin/ultrachat_2k:dev",
            "has the splits test_sft, train_sft; name one of them: mgoin/ultrachat_2k:test_sft",
        ),
        (
            "nobody/nothing",
            r"neither a file nor a data set .* \(FileNotFoundError: Dataset 'nobody/nothing' doesn't",
        ),
        ("owner/two", "has the splits a, b"),
    ],
)
def test_what_the_hub_does_not_have(hub: dict[str, dict[str, Any]], name: str, says: str):
    hub["owner/two"] = {"a": ROWS, "b": ROWS}
    with pytest.raises(ConfigError, match=says):
        samples(name)


def test_without_text_the_row_is_named(hub: dict[str, dict[str, Any]]):
    hub["owner/pictures"] = {"train": [{"image": 1}]}
    with refuses(ConfigError, "owner/pictures", "row 1", "['image']", "object"):
        samples("owner/pictures")


def test_without_the_package_one_line_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refuses(ConfigError, "pip install '.[datasets]'", "local file") as refused:
        samples("mgoin/ultrachat_2k")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_local_file_of_it_gives_the_same(tmp_path: Path, form: str):
    path = tmp_path / f"train.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert samples(path) == IDS


def test_a_parquet_file_that_is_none(tmp_path: Path):
    (tmp_path / "x.parquet").write_text("no")
    with refuses(ConfigError, "x.parquet", "parquet"):
        samples(tmp_path / "x.parquet")


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.parquet").write_text("no")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses(ConfigError, "pip install '.[datasets]'", ".jsonl"):
        samples(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mgoin/ultrachat_2k", True),
        ("owner/name:train_sft", True),
        ("owner/data.jsonl", False),
        ("data.txt", False),
        ("/no/such", False),
        ("./here/there", False),
        ("a/b/c", False),
        ("folder/typo", False),  # where the folder is there, the file is meant
    ],
)
def test_what_is_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: bool
):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(name) is expected
