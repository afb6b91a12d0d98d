"""freight convert: tensors out of pickled files and nothing else, whole or not at all."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from freight.checkpoint import convert as module
from freight.checkpoint import unpickle
from freight.checkpoint.convert import convert
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.unpickle import RefusedError, convert_file, read
from freight.cli.main import main
from freight.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.clock

SOURCE = Path(module.__file__).parents[1]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHT = torch.arange(12, dtype=torch.float32).view(3, 4)
TENSORS = {
    EMBEDDING: WEIGHT,
    "transposed": WEIGHT.T.to(torch.bfloat16).T[:, ::2],  # not contiguous, of 16 bits
    "scalar": torch.tensor(2.5, dtype=torch.float16),
    "empty": torch.zeros(0, 3),
    "ids": torch.arange(3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    (made / "tokenizer.json").write_text("{}")
    return made


class Here:
    """In place of a process: what the command says is said in this one, without limits."""

    def __init__(self, command: list[str], **options: Any) -> None:
        assert command[:4] == [sys.executable, "-P", "-m", unpickle.__name__]
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr(unpickle, "end_with_parent", lambda: None)
            patch.setattr(unpickle, "limit_memory", lambda size: None)
            unpickle.main(*command[4:])
        self.stdout = io.StringIO(said.getvalue())

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait(self) -> int:
        return 0

    def kill(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started, for what does not depend on it: each takes seconds to import torch."""
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Here, DEVNULL=None, PIPE=None))


def single(folder: Path, content: Any = TENSORS, **options: Any) -> Path:
    torch.save(content, folder / "pytorch_model.bin", **options)
    return folder


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("zipped", [True, False])
def test_the_tensors_and_the_other_files(
    folder: Path, tmp_path: Path, zipped: bool, request: pytest.FixtureRequest
):
    """Both forms that torch.save has had; one of them read by a process of its own."""
    if not zipped:
        request.getfixturevalue("here")
    seen = []
    result = convert(
        str(single(folder, _use_new_zipfile_serialization=zipped)),
        tmp_path / "out",
        on_progress=lambda *at: seen.append(at),
    )
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), TENSORS)
    expected = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == expected
    assert (result.num_tensors, result.num_files, result.tied) == (5, 1, {})
    assert Checkpoint(tmp_path / "out").names == TENSORS.keys()
    size = (folder / "pytorch_model.bin").stat().st_size
    assert seen[-1] == ("converting", size, size)
    assert seen == sorted(seen)


def test_tied_tensors_are_written_once_unless_the_model_has_a_head_of_its_own(
    folder: Path, tmp_path: Path, here: None
):
    single(folder, {HEAD: WEIGHT, EMBEDDING: WEIGHT, "other": WEIGHT[:2]})
    config = folder / "config.json"
    config.write_text(
        json.dumps({"model_type": "opt"})
    )  # whose embedding is its head unless it says otherwise
    result = convert(str(folder), tmp_path / "tied")
    assert result.tied == {HEAD: EMBEDDING}
    assert_same(
        load_file(tmp_path / "tied" / "model.safetensors"), {EMBEDDING: WEIGHT, "other": WEIGHT[:2]}
    )
    config.write_text(json.dumps({"model_type": "unknown", "tie_word_embeddings": False}))
    assert convert(str(folder), tmp_path / "untied").tied == {}
    assert load_file(tmp_path / "untied" / "model.safetensors").keys() == {EMBEDDING, HEAD, "other"}


def sharded(
    folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> dict[str, str]:
    names = [f"pytorch_model-0000{index}-of-00002.bin" for index in (1, 2)]
    weight_map = {}
    for name, tensors in zip(names, (first, second), strict=True):
        torch.save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_several_files(folder: Path, tmp_path: Path, here: None):
    sharded(folder, {"a": WEIGHT}, {"b": WEIGHT + 1, "c": WEIGHT + 2})
    result = convert(str(folder), tmp_path / "out")
    assert (result.num_tensors, result.num_files, result.num_bytes) == (3, 2, 3 * 48)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert index == {
        "metadata": {"total_size": 144},
        "weight_map": {"a": files[0], "b": files[1], "c": files[1]},
    }
    assert torch.equal(load_file(tmp_path / "out" / files[1])["c"], WEIGHT + 2)
    Checkpoint(tmp_path / "out")


def refused(folder: Path, *named: str) -> None:
    """In one line, and nothing is left."""
    out = folder.parent / "out"
    with pytest.raises((CheckpointError, ConfigError)) as error:
        convert(str(folder), out)
    assert "\n" not in str(error.value)
    for word in named:
        assert word in str(error.value)
    assert list(folder.parent.iterdir()) == [folder]


def test_an_index_that_contradicts_the_files(folder: Path, here: None):
    weight_map = sharded(folder, {"a": WEIGHT}, {"b": WEIGHT})
    index = folder / "pytorch_model.bin.index.json"
    for changed, named in [
        (weight_map | {"c": weight_map["b"]}, "places 'c'"),
        ({**weight_map, "b": "../x.bin"}, "outside"),
        ({**weight_map, "b": "pytorch_model-9.bin"}, "missing"),
        ({}, "weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": changed}))
        refused(folder, named)


def test_what_the_index_does_not_place_in_a_file_is_not_written(
    folder: Path, here: None, tmp_path: Path
):
    """Of a stale copy in another file, the one that the index maps counts."""
    weight_map = sharded(folder, {"a": WEIGHT, "b": WEIGHT * 0}, {"b": WEIGHT, "other": WEIGHT})
    index = folder / "pytorch_model.bin.index.json"
    places = {name: weight_map[name] for name in ("a", "b")}
    index.write_text(json.dumps({"weight_map": places | {"b": weight_map["other"]}}))
    assert convert(str(folder), tmp_path / "out").num_tensors == 2
    assert torch.equal(Checkpoint(tmp_path / "out").copy("b"), WEIGHT)


class Attack:
    """Pickled, it is a call that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_code_in_a_pickle_does_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even where the environment tells torch to allow it, and in none of the forms that torch
    reads.
    """
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    attack, file = {"a": WEIGHT, "b": Attack(tmp_path / "made")}, folder / "pytorch_model.bin"
    refused(
        single(folder, attack), str(file), "posix.mkdir", "nothing of it was run", "safetensors"
    )
    single(folder, attack, _use_new_zipfile_serialization=False)
    with pytest.raises(RefusedError, match=r"posix\.mkdir"):
        read(file)
    file.write_bytes(pickle.dumps(attack))
    with pytest.raises(RefusedError):
        read(file)
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(attack))
    assert (tmp_path / "made").exists()  # what it does where pickle is trusted


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([WEIGHT], "list"),
        ({"a": WEIGHT, "b": [1]}, "'b'"),
        ({"a": WEIGHT.to_sparse()}, "sparse"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({}, "dict"),
    ],
)
def test_what_is_not_tensors_by_name(folder: Path, content: Any, named: str):
    single(folder, content)
    with pytest.raises(RefusedError, match=named):
        read(folder / "pytorch_model.bin")


def test_a_small_file_that_claims_large_tensors(folder: Path, tmp_path: Path):
    """32 GiB in a kilobyte: a tensor whose rows are the same."""
    single(folder, {"a": torch.zeros(1).expand(2**33)})
    with pytest.raises(RefusedError, match="more than its"):
        convert_file(folder / "pytorch_model.bin", tmp_path / "out.safetensors", ())
    assert not (tmp_path / "out.safetensors").exists()


def test_damaged_and_missing_files(folder: Path):
    refused(folder, "pytorch_model.bin", "nothing to convert")
    file = single(folder) / "pytorch_model.bin"
    whole = file.read_bytes()
    for damaged in (whole[:-300], whole[:100], b""):
        file.write_bytes(damaged)
        with pytest.raises(RefusedError, match="cannot be read") as error:
            read(file)
        assert "weights_only" not in str(error.value)
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "safetensors already")


def test_a_deadline_ends_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "deadline", lambda size: 0.05)
    started = time.monotonic()
    refused(single(folder), "more than 0 seconds")
    assert time.monotonic() - started < 300


@pytest.mark.slow
def test_memory_is_limited_to_a_multiple_of_the_file():
    script = (
        "from freight.checkpoint.unpickle import limit_memory\n"
        "limit_memory(100 * 2**20)\n"
        "fits = bytearray(900 * 2**20)\n"
        "try:\n    bytearray(600 * 2**20)\n"
        "except MemoryError:\n    print('limited')"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert said.stdout == "limited\n"


def test_nothing_else_reads_pickle():
    """`torch.load` is in one file, and says weights_only each time; no file imports pickle."""
    sources = {path: path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    suspects = {
        path: text
        for path, text in sources.items()
        if re.search(r"\b(pickle|dill|joblib|load)\b", text)
    }
    assert len(suspects) < len(sources) / 2  # the others are not parsed
    for path, text in suspects.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "joblib"} & {name.split(".")[0] for name in names}, (
                    path
                )
            loads = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "load"
            )
            if loads and ast.unparse(node.func) == "torch.load":
                assert path.name == "unpickle.py"
                assert "weights_only=True" in ast.unparse(node)


def test_the_command(
    folder: Path,
    tmp_path: Path,
    here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    single(folder, {HEAD: WEIGHT, EMBEDDING: WEIGHT})
    (folder / "config.json").write_text(json.dumps({"model_type": "opt"}))
    with pytest.raises(CheckpointError, match=f"freight convert {folder} OUT"):
        Checkpoint(folder)
    monkeypatch.setattr(sys, "argv", ["freight", "convert", str(folder), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: 1 tensors, 0.00 MiB, in 1 file" in said
    assert f"{HEAD} is {EMBEDDING}: written once" in said
