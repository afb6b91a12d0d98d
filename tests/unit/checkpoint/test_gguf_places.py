"""Which GGUF file of a folder or a repository is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.refusals import refuses

from freight.checkpoint.gguf.places import chosen_file, gguf_in, is_gguf, parts_of
from freight.errors import CheckpointError

FILES = [
    "README.md",
    "mmproj-model-f16.gguf",
    "model-Q4_K_M.gguf",
    "model-UD-Q4_K_XL.gguf",
    "model-Q4_K_S.gguf",
    "model-IQ4_XS.gguf",
    "model.Q8_0.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
    "config.json",
]


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("model-Q4_K_S.gguf", "model-Q4_K_S.gguf"),
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q4_k_m", "model-Q4_K_M.gguf"),
        ("Q8_0", "model.Q8_0.gguf"),
        ("bf16", "BF16/model-BF16-00001-of-00002.gguf"),
        ("Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        ("XS", "model-IQ4_XS.gguf"),
    ],
)
def test_a_part_of_a_name_chooses_a_file(wanted: str, file: str) -> None:
    assert chosen_file(FILES, wanted, f"org/model:{wanted}") == file


@pytest.mark.parametrize("wanted", ["Q5_K_M", "Q4_K", "zz"])
def test_what_fits_no_file_or_several_names_them(wanted: str) -> None:
    with refuses(CheckpointError, f"org/model:{wanted}", "model-Q4_K_M.gguf"):
        chosen_file(FILES, wanted, f"org/model:{wanted}")


def test_a_repository_without_gguf_files() -> None:
    with refuses(CheckpointError, "org/model:Q4_0", "no GGUF file"):
        chosen_file(["model.safetensors"], "Q4_0", "org/model:Q4_0")


def test_all_parts_of_a_split_file_are_fetched() -> None:
    assert parts_of("BF16/model-BF16-00001-of-00002.gguf") == "BF16/model-BF16-*.gguf"
    assert parts_of("model-Q4_K_M.gguf") == "model-Q4_K_M.gguf"


def test_a_folder_with_one_model_stands_for_it(tmp_path: Path) -> None:
    assert gguf_in(tmp_path) is None
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert gguf_in(tmp_path) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with refuses(CheckpointError, "m-00001-of-00002.gguf", "other.gguf"):
        gguf_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_in(tmp_path) is None


def test_a_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    blob = tmp_path / "sha256-00"
    blob.write_bytes(b"GGUF\3\0\0\0")
    assert is_gguf(blob)
    assert is_gguf(tmp_path / "missing.gguf")
    blob.write_bytes(b"GGML")
    assert not is_gguf(blob)
