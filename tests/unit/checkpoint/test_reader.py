"""Checkpoint: damaged folders are named when they are opened, and every tensor is accounted for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tests.demo_chat import DEMO
from tests.refusals import refuses

from freight.checkpoint.headers import read_header
from freight.checkpoint.reader import Checkpoint, resolve_model
from freight.checkpoint.writer import CheckpointWriter
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format
from freight.model.open import open_folder
from freight.quantizer.quantize import quantize

FIXTURES = Path(__file__).parents[2] / "fixtures"
A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)
INDEX = "model.safetensors.index.json"


def index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(folder, *named):
    with pytest.raises(CheckpointError) as error:
        Checkpoint(folder)
    for word in named:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_single_file(open_tensors):
    checkpoint = open_tensors({"a": A, "b": B}, {"vocab_size": 7})
    assert checkpoint.names == {"a", "b"}
    assert checkpoint.config == {"vocab_size": 7}
    assert checkpoint.generation_config is None
    assert checkpoint.hf_quant_config is None
    assert checkpoint.shape_of("a") == (2, 3)
    assert checkpoint.format_of("b") is Format.BFLOAT16
    assert torch.equal(checkpoint.take("a", (2, 3)), A)
    assert torch.equal(checkpoint.take("b", [4], Format.BFLOAT16), B)
    checkpoint.finish()


def test_any_one_safetensors_file_will_do(write):
    assert Checkpoint(write({"weights.safetensors": {"a": A}})).names == {"a"}


def test_shards(write):
    folder = index(
        write({"1.safetensors": {"a": A}, "2.safetensors": {"b": B}}),
        {"a": "1.safetensors", "b": "2.safetensors"},
    )
    checkpoint = Checkpoint(folder)
    assert torch.equal(checkpoint.take("a", (2, 3)), A)
    assert torch.equal(checkpoint.take("b", (4,)), B)
    checkpoint.finish()


def test_the_other_json_files(write):
    folder = write({"model.safetensors": {"a": A}})
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "hf_quant_config.json").write_text('{"quantization": {}}')
    checkpoint = Checkpoint(folder)
    assert checkpoint.generation_config == {"eos_token_id": 3}
    assert checkpoint.hf_quant_config == {"quantization": {}}


def test_a_missing_shard_is_named(write):
    folder = index(write({"1.safetensors": {"a": A}}), {"a": "1.safetensors", "b": "2.safetensors"})
    refused(folder, "2.safetensors", "missing", INDEX)


def test_index_and_shards_must_agree(write):
    folder = write({"1.safetensors": {"a": A}, "2.safetensors": {"b": B}})
    refused(
        index(folder, {"a": "1.safetensors", "c": "2.safetensors"}), INDEX, "c", "2.safetensors"
    )
    refused(index(folder, {"a": "2.safetensors", "b": "1.safetensors"}), "a", "2.safetensors")
    refused(index(folder, {"a": "../1.safetensors"}), "../1.safetensors", "outside")
    refused(index(folder, {"a": 1}), INDEX, "weight_map")
    (folder / INDEX).write_text("{}")
    refused(folder, INDEX, "weight_map")


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(write, caplog):
    """A re-quantized checkpoint has an overlay beside shards with stale copies; a reused shard has
    tensors that the index does not list. transformers reads what the index maps.
    """
    stale = torch.zeros_like(A)
    folder = write({"1.safetensors": {"a": stale, "c": B}, "2.safetensors": {"a": A, "b": B}})
    checkpoint = Checkpoint(
        index(folder, {"a": "2.safetensors", "b": "2.safetensors", "c": "1.safetensors"})
    )
    assert torch.equal(checkpoint.take("a", (2, 3)), A)
    assert [record.getMessage().count("'a'") for record in caplog.records] == [1]
    checkpoint = Checkpoint(index(folder, {"a": "1.safetensors", "b": "2.safetensors"}))
    assert torch.equal(checkpoint.take("a", (2, 3)), stale)
    assert checkpoint.names == {"a", "b"}
    checkpoint.take("b", (4,))
    checkpoint.finish()


def two_sets(write, **weight_map):
    """A folder with model.safetensors of zeros, shards, and an index of `weight_map`."""
    folder = write(
        {
            "model.safetensors": {"a": torch.zeros_like(A), "b": torch.zeros_like(B)},
            "1.safetensors": {"a": A},
            "2.safetensors": {"b": B},
        }
    )
    return index(folder, weight_map)


def test_a_single_file_beside_an_index_of_other_files_is_refused(write):
    """transformers reads model.safetensors, and vLLM and MLX what the index names."""
    folder = two_sets(write, a="1.safetensors", b="2.safetensors")
    refused(folder, "model.safetensors", INDEX, "1.safetensors", "keep one", "--exclude")
    (folder / "model.safetensors").unlink()
    assert torch.equal(Checkpoint(folder).take("a", (2, 3)), A)


def test_an_index_with_the_single_file_and_others_is_read(write):
    checkpoint = Checkpoint(two_sets(write, a="1.safetensors", b="model.safetensors"))
    assert torch.equal(checkpoint.take("a", (2, 3)), A)
    assert not checkpoint.take("b", (4,)).any()


@pytest.mark.parametrize("missing", ["3.safetensors", "model-\x1b[31m.safetensors"])
def test_an_index_of_an_earlier_model_is_passed_over_with_a_line(write, caplog, missing):
    """Tools that write one file leave the index of the model that they read."""
    checkpoint = Checkpoint(two_sets(write, a="1.safetensors", b=missing))
    assert not checkpoint.take("a", (2, 3)).any()
    (line,) = (record.getMessage() for record in caplog.records)
    assert INDEX in line
    assert "model.safetensors is read" in line
    assert "\x1b" not in line


def test_an_index_of_the_single_file_says_nothing(write, caplog):
    folder = write({"model.safetensors": {"a": A, "b": B}})
    assert Checkpoint(index(folder, {"a": "model.safetensors"})).names == {"a", "b"}
    assert not caplog.records


def test_a_tensor_that_nothing_needs_is_refused_with_the_file_to_leave_it_out_of(write):
    checkpoint = Checkpoint(write({"model.safetensors": {"a": A, "b": B}}))
    checkpoint.take("a", (2, 3))
    with refuses(CheckpointError, "b", "config.json", "model.safetensors"):
        checkpoint.finish()
    (checkpoint.path / "model.safetensors").rename(checkpoint.path / "1.safetensors")
    folder = index(checkpoint.path, {"a": "1.safetensors", "b": "1.safetensors"})
    checkpoint = Checkpoint(folder)
    checkpoint.take("a", (2, 3))
    with pytest.raises(CheckpointError, match=f"remove them from {INDEX}"):
        checkpoint.finish()
    checkpoint = Checkpoint(index(folder, {"a": "1.safetensors"}))
    checkpoint.take("a", (2, 3))
    checkpoint.finish()  # the way out


def test_folders_without_weights(write, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(tmp_path)
    folder = write({})
    refused(folder, "no *.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    refused(folder, "pytorch_model.bin", "safetensors only")


def test_two_files_without_an_index(write):
    refused(
        write({"x.safetensors": {"a": A}, "y.safetensors": {"b": B}}),
        "x.safetensors",
        "y.safetensors",
        INDEX,
    )


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1, -24])
def test_truncated_files_are_named(write, keep):
    folder = write({"model.safetensors": {"a": A}})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, "model.safetensors", "truncated")


def test_files_that_are_too_long_are_named(write):
    folder = write({"model.safetensors": {"a": A}})
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    refused(folder, "model.safetensors", "too long")


def header(entries, data=b"\0" * 24):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ((2**63).to_bytes(8, "little") + b"{}", "truncated"),
        (header(b"{oops"), "damaged"),
        (header(b"[]", b""), "damaged"),
        pytest.param(header(b"[" * 200_000), "damaged", id="nested"),
        (header(b"\xff\xfe", b""), "damaged"),
        (header({"a": GOOD | {"dtype": "F33"}}), "F33"),
        (header({"a": GOOD | {"dtype": ["F32"]}}), "F32"),
        (header({"a": GOOD | {"shape": [2, 2]}}), "does not fill"),
        (header({"a": GOOD | {"shape": [2, 4]}}), "does not fill"),
        (header({"a": GOOD | {"shape": [-2, -3]}}), "damaged"),
        (header({"a": GOOD | {"data_offsets": [0, 2**60], "shape": [2**58]}}), "truncated"),
        (header({"a": GOOD | {"data_offsets": [4, 28]}}), "begins at byte 4"),
        (header({"a": GOOD | {"data_offsets": [24, 0]}}), "a"),
        (header({"a": GOOD, "b": GOOD}), "begins at byte 0"),
        (header({"a": [1]}), "damaged"),
        (header({"a": {"dtype": "F32"}}), "damaged"),
        (header(b'{"a": 1, "a": 2}'), "twice"),
    ],
)
def test_damaged_headers_are_named(write, content, named):
    folder = write({})
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors", named)


def test_broken_json_is_named(write):
    folder = write({"model.safetensors": {"a": A}})
    (folder / "generation_config.json").write_text("[1]")
    refused(folder, "generation_config.json", "list")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "not JSON")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "hf_quant_config.json", INDEX]
)
def test_json_nested_without_end_is_named(write, name):
    folder = write({})
    (folder / name).write_text('{"a":' * 200_000)
    refused(folder, name, "not JSON")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "only.safetensors",
        "generation_config.json",
        "hf_quant_config.json",
        INDEX,
    ],
)
def test_a_link_to_nothing_is_named(write, name):
    """A cache of the hub keeps files as links, and what they point to may have been cleared away."""
    folder = write(
        {} if name.endswith("safetensors") or name == INDEX else {"model.safetensors": {"a": A}}
    )
    (folder / name).symlink_to("../blobs/gone")
    refused(folder, name, "../blobs/gone", "does not exist")


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "only.safetensors", "generation_config.json", "config.json", INDEX],
)
def test_a_folder_in_the_place_of_a_file_is_named(write, name):
    folder = write({})
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    refused(folder, name, "directory")


def test_a_shard_that_is_no_file_is_named(write):
    folder = index(write({"1.safetensors": {"a": A}}), {"a": "1.safetensors", "b": "2.safetensors"})
    (folder / "2.safetensors").symlink_to("gone")
    refused(folder, "2.safetensors", "gone", "does not exist")
    (folder / "2.safetensors").unlink()
    (folder / "2.safetensors").mkdir()
    refused(folder, "2.safetensors", "directory")


def test_take_names_both_shapes(open_tensors):
    checkpoint = open_tensors(
        {"a": A, "n": torch.ones(2, dtype=torch.int64), "q": B.to(torch.float8_e4m3fn)}
    )
    with refuses(CheckpointError, "a has shape [2, 3]", "[3, 2]"):
        checkpoint.take("a", (3, 2))
    with pytest.raises(CheckpointError, match="zzz is missing"):
        checkpoint.take("zzz", (1,))
    with refuses(CheckpointError, "a is stored in float32", "bfloat16"):
        checkpoint.take("a", (2, 3), Format.BFLOAT16)
    with pytest.raises(CheckpointError, match=r"n is stored as I64"):
        checkpoint.take("n", (2,))
    with refuses(CheckpointError, "q is stored in fp8_e4m3fn", "16 or 32 bits"):
        checkpoint.take("q", (4,))
    assert checkpoint.take("q", (4,), Format.E4M3FN).dtype is torch.float8_e4m3fn


def test_check_lists_all_faults_before_anything_is_read(open_tensors):
    checkpoint = open_tensors({"a": A, "b": B})
    checkpoint.check({"a": (2, 3), "b": (4,)})
    with refuses(CheckpointError, "c is missing", "a has shape [2, 3]", "[6]"):
        checkpoint.check({"a": (6,), "b": (4,), "c": (1,)})


def test_what_is_left_over_is_listed(open_tensors):
    checkpoint = open_tensors({"a": A, "b": B, "extra.weight": B + 1})
    checkpoint.take("a", (2, 3))
    with pytest.raises(CheckpointError, match=r"2 tensors .*: b, extra.weight"):
        checkpoint.finish()
    checkpoint.skip("b", "not needed")
    checkpoint.skip("extra.*", "nor these")
    checkpoint.finish()
    assert checkpoint.skipped == {"b": "not needed", "extra.weight": "nor these"}


def test_known_tensors_without_use_are_skipped_with_a_reason(open_tensors):
    prefix = "model.layers.0.self_attn."
    names = [
        "rotary_emb.inv_freq",
        "q_scale",
        "attn.q_scale",
        "q_proj.output_scale",
        "prob_output_scale",
    ]
    zeros = {
        f"{prefix}k_zero_point": torch.zeros(1),
        f"{prefix}v_zero_point": torch.zeros(1, dtype=torch.int8),
    }
    checkpoint = open_tensors({prefix + name: torch.ones(1) for name in names} | zeros)
    checkpoint.finish()
    assert checkpoint.skipped.keys() == checkpoint.names
    assert all(checkpoint.skipped.values())


def test_zero_points_must_be_zero(open_tensors):
    checkpoint = open_tensors({"model.layers.0.self_attn.k_zero_point": torch.ones(1)})
    with refuses(CheckpointError, "k_zero_point", "zero"):
        checkpoint.finish()


def test_a_file_that_vanishes_is_named(open_tensors):
    checkpoint = open_tensors({"a": A})
    (checkpoint.path / "model.safetensors").unlink()
    with refuses(CheckpointError, "model.safetensors", "tensor a", "cannot be read"):
        checkpoint.take("a", (2, 3))


@pytest.mark.parametrize("name", ["autofp8_static_kv", "ct_docs", "base_bf16"])
def test_files_of_real_tools_open(name):
    entries = read_header(FIXTURES / name / "model.safetensors")
    assert entries["model.layers.1.self_attn.k_proj.weight"].shape == (128, 256)
    assert Checkpoint(FIXTURES / name).names == entries.keys()


def test_model_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = resolve_model("demo")
    assert (shipped / "config.json").is_file()
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == shipped
    assert resolve_model("./demo").resolve() == tmp_path / "demo"
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for name in ("./nothing", "/no/such/folder", "a/b/c", ""):
        with pytest.raises(CheckpointError, match="there is no folder"):
            resolve_model(name)
    with pytest.raises(CheckpointError, match="file is a file"):
        resolve_model("file")
    with pytest.raises(ConfigError, match="--revision main"):
        resolve_model("demo", "main")


def test_hub_ids(tmp_path, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model", "abc") == tmp_path
    assert (asked["name"], asked["revision"]) == ("owner/model", "abc")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_a_hub_that_does_not_answer(monkeypatch):
    def download(name, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with refuses(CheckpointError, "'owner/model'", "revision 'abc'", "no connection"):
        resolve_model("owner/model", "abc")


def test_an_impossible_hub_id():
    with refuses(CheckpointError, "'no such model'", "folder"):
        resolve_model("no such model")


def overwritten(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-4] + b"\1\1\1\1")
    os.utime(file, ns=(0, 0))  # at once: clocks of file systems are coarse


def replaced(file: Path) -> None:
    (file.parent / "new").write_bytes(file.read_bytes())
    (file.parent / "new").replace(file)


@pytest.mark.parametrize("change", [overwritten, replaced, Path.unlink])
def test_weights_that_change_while_they_are_read_are_refused(
    tmp_path: Path, change: Callable[[Path], None]
):
    shutil.copytree(DEMO, tmp_path / "model")
    opened = open_folder(tmp_path / "model", "model")
    assert opened.checkpoint is not None
    opened.checkpoint.require_unchanged()
    change(tmp_path / "model" / "model.safetensors")
    with refuses(CheckpointError, "model.safetensors", "changed"):
        opened.checkpoint.require_unchanged()


def test_writing_ends_with_that_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(DEMO, tmp_path / "model")
    add = CheckpointWriter.add

    def late(self: CheckpointWriter, *args: Any) -> None:
        add(self, *args)
        os.utime(tmp_path / "model" / "model.safetensors", ns=(0, 0))

    monkeypatch.setattr(CheckpointWriter, "add", late)
    with pytest.raises(CheckpointError, match="changed or replaced"):
        quantize(str(tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
