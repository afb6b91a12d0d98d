"""Nothing outside of a model's folder gets into what is written, or is served as a template: a folder
may be anybody's, and have links to files of this machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.demo_adapter import write_adapter
from tests.demo_chat import DEMO
from tests.refusals import refuses

from freight.checkpoint.convert import convert
from freight.checkpoint.merge import merge
from freight.checkpoint.writer import CheckpointWriter
from freight.errors import CheckpointError
from freight.lab.audit.run import audit
from freight.model.open import open_folder
from freight.quantizer.quantize import quantize
from freight.quantizer.transfer import export_scales, extract_scales, import_scales
from freight.settings.engine import EngineArgs
from freight.text.tokenizer import Tokenizer

SECRET = "a private line"
_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in _FILES:
        shutil.copyfile(DEMO / name, folder / name)
    return folder


def quantized(model: Path, out: Path) -> None:
    quantize(str(model), out)


def converted(model: Path, out: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    convert(str(model), out)


def merged(model: Path, out: Path) -> None:
    merge(str(model), str(write_adapter(model.parent / "adapter")), out)


def imported(model: Path, out: Path) -> None:
    import_scales(Path("tests/fixtures/vllm_kv_scales.json"), str(model), out)


def extracted(model: Path, out: Path) -> None:
    """The base of the scales is the model."""
    quantized = out.with_name("quantized")
    config = json.loads((DEMO / "config.json").read_text())
    factors = {str(layer): 1.0 for layer in range(config["num_hidden_layers"])}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    file = out.with_name("scales.json")
    file.write_text(json.dumps({"model_type": config["model_type"], "kv_cache": cache}))
    import_scales(file, "demo", quantized)
    extract_scales(str(quantized), str(model), out)


def extracted_from(model: Path, out: Path) -> None:
    """The scales are the model's."""
    extract_scales(str(model), "demo", out)


def exported(model: Path, out: Path) -> None:
    export_scales(str(model), out)


def repaired(model: Path, out: Path) -> None:
    audit(EngineArgs(str(model)), [], None, fix=out)


def written(model: Path, out: Path) -> None:
    with CheckpointWriter(out) as writer:
        writer.add({"a": torch.zeros(1)})
        writer.finish({}, model)


WRITERS = [
    *(quantized, converted, merged, imported, extracted, extracted_from, exported, repaired),
    written,
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "name",
    ["special_tokens_map.json", "vocab.txt", "LICENSE", "hf_quant_config.json", "x.jinja", "any"],
)
def test_a_link_out_of_the_model_is_not_written(
    model: Path, tmp_path: Path, secret: Path, write: Callable[[Path, Path], None], name: str
):
    (model / name).symlink_to(secret)
    if name == "hf_quant_config.json":
        secret.write_text("{}")
    with refuses(CheckpointError, name, "outside", "copy of the file"):
        write(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_folder_are_not_written(model: Path, tmp_path: Path):
    (model / "model.safetensors").rename(tmp_path / "private.safetensors")
    (model / "model.safetensors").symlink_to("../private.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*outside"):
        quantize(str(model), tmp_path / "out")
    open_folder(model, str(model))  # running them is another matter


def test_an_index_names_no_link_out_of_the_model(model: Path, tmp_path: Path):
    """Whatever the link is called."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(tmp_path / "private")
    (model / "weights").symlink_to(tmp_path / "private")
    index = {"weight_map": dict.fromkeys(tensors, "weights")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"weights.*outside"):
        quantize(str(model), tmp_path / "out")


@pytest.mark.parametrize("name", ["../private", "/etc/hostname", "a/b", "..", "", "a\0b"])
def test_an_index_names_files_of_the_folder(model: Path, tmp_path: Path, name: str):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(tmp_path / "private")
    index = {"weight_map": dict.fromkeys(tensors, name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model"):
        quantize(str(model), tmp_path / "out")
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with refuses(CheckpointError, "pytorch_model.bin.index.json"):
        convert(str(model), tmp_path / "out")


@pytest.mark.parametrize("name", ["../private", "/etc/hostname", "a\0b"])
def test_the_side_file_of_scales_is_of_the_folder(model: Path, name: str):
    config = json.loads((model / "config.json").read_text())
    config["freight"] = {"kv_scales": {"file": name, "sha256": "0" * 64}}
    (model / "config.json").write_text(json.dumps(config))
    (fault,) = open_folder(model, str(model)).kv_scales.faults
    assert "outside the folder" in fault.what or "cannot be read" in fault.what


def test_a_folder_may_be_linked(model: Path, tmp_path: Path):
    """And so may one inside of it, which nothing reads."""
    (model / "original").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(model)
    quantize(str(tmp_path / "link"), tmp_path / "out")


def test_an_adapter_has_its_own_files(model: Path, tmp_path: Path):
    lora = write_adapter(tmp_path / "adapter")
    (lora / "adapter_model.safetensors").rename(tmp_path / "private.safetensors")
    (lora / "adapter_model.safetensors").symlink_to("../private.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors.*outside"):
        merge(str(model), str(lora), tmp_path / "out")


@pytest.mark.parametrize("linked", [False, True])
def test_blobs_of_the_hub_s_cache_are_the_model_s(tmp_path: Path, linked: bool):
    home = tmp_path / "hub"
    if linked:
        (tmp_path / "disk").mkdir()
        home.symlink_to(tmp_path / "disk")
    root = home / "models--freight--demo"
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, name in enumerate(_FILES):
        shutil.copyfile(DEMO / name, root / "blobs" / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    quantize(str(snapshot), tmp_path / "out")
    assert not [file for file in (tmp_path / "out").iterdir() if file.is_symlink()]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()  # fmt: skip
    assert Tokenizer.load(snapshot).encode("a")


def test_blobs_are_not_another_model_s(tmp_path: Path, secret: Path):
    """The layout of the cache is no way out: neither from another folder, nor by a linked one."""
    root = tmp_path / "models--freight--demo"
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in _FILES:
        shutil.copyfile(DEMO / name, snapshot / name)
    (root / "blobs").symlink_to(secret.parent)
    (snapshot / "vocab.txt").symlink_to("../../blobs/secret")
    with pytest.raises(CheckpointError, match=r"vocab\.txt.*outside"):
        quantize(str(snapshot), tmp_path / "out")


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/x.jinja"])
def test_a_template_from_elsewhere_is_not_read(model: Path, secret: Path, name: str):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"jinja.*outside"):
        Tokenizer.load(model)


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer_config.json", "chat_template.json"),
        *("special_tokens_map.json", "added_tokens.json", "vocab.json"),
    ],
)
@pytest.mark.parametrize("key", ["chat_template", "refresh_token"])
def test_texts_in_json_from_elsewhere_are_not_read(model: Path, secret: Path, name: str, key: str):
    """A name that ends in _token is a token's, also where it is a password's."""
    secret.write_text(json.dumps({key: SECRET}))
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=rf"{name}.*outside"):
        Tokenizer.load(model)


@pytest.mark.parametrize("key", ["vocab", "vocab_file"])
@pytest.mark.parametrize("where", ["absolute", "from the working folder"])
def test_a_vocabulary_that_a_file_names_is_of_the_folder(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, key: str, where: str
):
    """transformers opens the path that it finds in tokenizer_config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(secret.parent)
    path = str(secret) if where == "absolute" else secret.name
    config = {"tokenizer_class": "BertTokenizer", key: path}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{key}.*outside.*remove the key"):
        Tokenizer.load(folder)


def test_a_vocabulary_from_elsewhere_is_not_read(tmp_path: Path, secret: Path):
    """/detokenize would show it, line by line."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (folder / "vocab.txt").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"vocab\.txt.*outside"):
        Tokenizer.load(folder)


def test_a_tokenizer_may_be_linked(model: Path):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(DEMO / "tokenizer.json")
    assert Tokenizer.load(model).encode("a")
