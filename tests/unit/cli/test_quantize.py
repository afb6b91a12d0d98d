"""freight quantize, scales and inspect --picture at the terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file, save_file
from tests.refusals import line_naming

Run = Callable[..., Any]
BASE = str(Path(__file__).parents[2] / "fixtures" / "base_bf16")
AUTOFP8 = str(Path(__file__).parents[2] / "fixtures" / "autofp8_static_kv")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(
            json.dumps({"input_ids": [(i * j) % 256 for i in range(100)]}) + "\n"
            for j in range(1, 5)
        )
    )
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def scaled(freight: Run, data: str, tmp_path: Path) -> str:
    """A model with KV scales by channel."""
    folder = str(tmp_path / "scaled")
    argv = [
        "--weights",
        "none",
        "--kv-cache",
        "fp8",
        "--kv-granularity",
        "channel",
        "--calibration-data",
        data,
    ]
    assert freight("quantize", BASE, folder, *argv).code == 0
    return folder


def test_every_option_reaches_the_checkpoint(freight: Run, data: str, out: Path):
    answer = freight(
        "quantize", BASE, str(out),
        *("--weights", "fp8", "--activations", "static", "--kv-cache", "fp8", "--kv-granularity", "head"),
        *("--ignore", "re:0.*down_proj", "--ignore", "model.layers.1.mlp.down_proj", "--calibration-data", data),
        *("--num-samples", "3", "--max-seq-len", "90", "--observer", "mse", "--format", "compressed-tensors", "--json"),
    )  # fmt: skip
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert said.pop("bytes_before") > said.pop("bytes_after") > 0
    assert said.pop("warnings") == [
        line.removeprefix("warning: ") for line in answer.err.splitlines()
    ]
    assert said == {
        "path": str(out), "format": "compressed-tensors", "weights": "fp8", "method": None, "activations": "static",
        "kv_cache": "fp8", "granularity": "head", "centers": [], "num_samples": 3, "num_tokens": 270,
        "longest_sample": 90,
    }  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert len(config["quantization_config"]["ignore"]) == 3
    assert config["freight"]["kv_scales"]["file"] == "freight_kv_scales.json"


def test_centers_are_of_keys(freight: Run, out: Path, monkeypatch: pytest.MonkeyPatch):
    """What quantize and inspect say of them."""
    monkeypatch.setenv("COLUMNS", "120")
    argv = [
        "demo",
        "--weights",
        "none",
        "--kv-cache",
        "fp8",
        "--num-samples",
        "2",
        "--max-seq-len",
        "128",
        "--center",
    ]
    said = json.loads(freight("quantize", *argv[:1], str(out), *argv[1:], "--json").out)["centers"]
    assert [entry.keys() for entry in said] == [{"layer", "k"}] * 6
    assert all(entry["k"] > 1.25 for entry in said)
    shown = json.loads(freight("inspect", str(out), "--json").out)["kv_cache"]["scales"]
    assert [(layer["k"]["centered"], "centered" in layer["v"]) for layer in shown] == [
        (True, False)
    ] * 6
    assert freight("inspect", str(out)).out.count(", centered") == 6
    again = freight("quantize", *argv[:1], str(out) + "2", *argv[1:])
    line_naming(again.out, "keys centered in 6 of 6 layers", "divided by")
    assert "values" not in again.out


def test_people_are_told_what_was_done(freight: Run, out: Path):
    answer = freight("quantize", BASE, str(out))
    assert answer.code == 0
    line_naming(answer.out, "weights fp8-channel", "activations dynamic", "KV cache 16 bits")
    assert "MiB after" in answer.out
    assert "calibrated" not in answer.out
    assert answer.err == ""


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--weights", "int3"], "--weights 'int3' is unknown"),
        (["--kv-cache", "fp8"], "needs --calibration-data FILE"),
        (["--ignore", "re:nothing"], "matches no Linear module"),
        (["--ignore", "o_proj"], "(did you mean 're:o_proj$'?)"),
        (["--revision", "v2"], "only a hub id has revisions"),
        (["--observer", "mse"], "nothing is calibrated"),
    ],
)
def test_what_is_asked_wrongly_is_status_2(freight: Run, out: Path, argv: list[str], says: str):
    answer = freight("quantize", BASE, str(out), *argv)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err
    assert not out.exists()


def test_text_without_a_tokenizer_is_told_the_way_out(freight: Run, out: Path, tmp_path: Path):
    (tmp_path / "data.txt").write_text("text")
    answer = freight(
        "quantize",
        BASE,
        str(out),
        "--kv-cache",
        "fp8",
        "--calibration-data",
        str(tmp_path / "data.txt"),
    )
    assert answer.code == 1
    assert "has no tokenizer" in answer.err
    assert "`input_ids` in each line" in answer.err


def test_a_revision_of_the_hub_is_what_is_read(
    freight: Run, out: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def download(name: str, revision: str | None, **options: Any) -> str:
        asked.append((name, revision))
        return BASE

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert freight("quantize", "owner/model", str(out), "--revision", "v2").code == 0
    assert freight("inspect", "owner/model", "--revision", "v3").code == 0
    assert asked == [("owner/model", "v2"), ("owner/model", "v3")]


def test_a_quantized_model_is_status_1(freight: Run, out: Path):
    answer = freight("quantize", AUTOFP8, str(out))
    assert answer.code == 1
    assert "is quantized already" in answer.err


def test_ctrl_c_is_130_and_leaves_nothing(freight: Run, out: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("freight.checkpoint.writer.save_file", interrupt)
    assert freight("quantize", BASE, str(out)).code == 130
    assert not list(out.parent.iterdir())


def test_scales_go_out_and_come_back(freight: Run, scaled: str, tmp_path: Path):
    """export has the largest of each layer; import puts it into both sides, to the bit."""
    file, folder = str(tmp_path / "scales.json"), str(tmp_path / "imported")
    assert freight("scales", "export", scaled, file).code == 0
    factors = json.loads(Path(file).read_text())["kv_cache"]["scaling_factor"]["0"]
    finer = json.loads((Path(scaled) / "freight_kv_scales.json").read_text())["layers"]
    assert factors == {str(i): max(layer["k"] + layer["v"]) for i, layer in enumerate(finer)}
    assert freight("scales", "import", file, BASE, folder).code == 0
    stored = load_file(Path(folder) / "model.safetensors")
    for layer, factor in factors.items():
        for side in "kv":
            assert stored[f"model.layers.{layer}.self_attn.{side}_scale"].item() == factor
    again = str(tmp_path / "again.json")
    assert freight("scales", "export", folder, again).code == 0
    assert json.loads(Path(again).read_text()) == json.loads(Path(file).read_text())


def test_export_covers_the_larger_side(freight: Run, tmp_path: Path):
    folder, file = tmp_path / "model", tmp_path / "scales.json"
    shutil.copytree(AUTOFP8, folder)
    stored = load_file(folder / "model.safetensors")
    values = {name: tensor * 16 for name, tensor in stored.items() if name.endswith("v_scale")}
    save_file(stored | values, folder / "model.safetensors")
    assert freight("scales", "export", str(folder), str(file)).code == 0
    factors = json.loads(file.read_text())["kv_cache"]["scaling_factor"]["0"]
    assert list(factors.values()) == [tensor.item() for tensor in values.values()]


@pytest.mark.parametrize("named", [False, True])
def test_extract_takes_both_forms(freight: Run, scaled: str, tmp_path: Path, named: bool):
    folder = str(tmp_path / "extracted")
    positional = [scaled, BASE, folder]
    options = ["--quantized-model", scaled, "--model", BASE, "--save-path", folder]
    answer = freight("scales", "extract", *(options if named else positional))
    assert answer.code == 0, answer.err
    assert "per channel" in answer.out
    assert (Path(folder) / "freight_kv_scales.json").read_bytes() == (
        Path(scaled) / "freight_kv_scales.json"
    ).read_bytes()


def test_extract_keeps_scales_to_the_bit(freight: Run, tmp_path: Path):
    assert freight("scales", "extract", AUTOFP8, BASE, str(tmp_path / "x")).code == 0
    theirs, mine = (
        load_file(f"{AUTOFP8}/model.safetensors"),
        load_file(tmp_path / "x" / "model.safetensors"),
    )
    base = load_file(f"{BASE}/model.safetensors")
    for name, tensor in mine.items():
        expected = theirs[name].view(1) if name.endswith(("k_scale", "v_scale")) else base[name]
        assert tensor.equal(expected)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["extract", AUTOFP8, BASE], 2, "OUT is missing"),
        (["extract", AUTOFP8, BASE, "OUT", "--model", BASE], 2, "BASE is given as"),
        (["extract", AUTOFP8, "demo", "OUT"], 2, "num_layers is 2 there and 6 here"),
        (["extract", BASE, BASE, "OUT"], 1, "has no KV scales"),
        (["extract", AUTOFP8, AUTOFP8, "OUT"], 1, "is quantized already"),
        (["extract", AUTOFP8, BASE, BASE], 2, "exists"),
        (["export", BASE, "OUT.json"], 1, "has no KV scales"),
        (["export", AUTOFP8, f"{AUTOFP8}/config.json"], 2, "exists"),
        (["export", AUTOFP8, "/no/such/folder/x.json"], 2, "cannot be written"),
        (["import", "/nowhere.json", BASE, "OUT"], 2, "there is no such file"),
        (["import", f"{AUTOFP8}/config.json", BASE, "OUT"], 1, "kv_cache"),
    ],
)
def test_bad_input_of_scales(freight: Run, tmp_path: Path, argv: list[str], code: int, says: str):
    argv = [str(tmp_path / part) if part.startswith("OUT") else part for part in argv]
    answer = freight("scales", *argv)
    assert (answer.code, answer.out) == (code, "")
    assert says in answer.err
    assert list(tmp_path.iterdir()) == []


def test_inspect_draws_every_layer(freight: Run, scaled: str, tmp_path: Path):
    picture = tmp_path / "scales.svg"
    assert freight("inspect", scaled, "--picture", str(picture)).code == 0
    svg = ElementTree.parse(picture).getroot()
    tips = [title.text or "" for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert [tip.partition(":")[0] for tip in tips[1:]] == [  # the first one is of the picture
        "layer 0, keys",
        "layer 1, keys",
        "layer 0, values",
        "layer 1, values",
    ]
    assert "448" in picture.read_text()


@pytest.mark.parametrize(
    ("model", "name", "says"),
    [
        (AUTOFP8, "scales.png", "the picture is SVG"),
        (AUTOFP8, "there.svg", "name a new file"),
        (BASE, "scales.svg", "has no KV scales to draw"),
        (AUTOFP8, "no/scales.svg", "in a folder that exists"),
    ],
)
def test_a_picture_that_cannot_be(freight: Run, tmp_path: Path, model: str, name: str, says: str):
    (tmp_path / "there.svg").write_text("mine")
    answer = freight("inspect", model, "--picture", str(tmp_path / name))
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err
    assert (tmp_path / "there.svg").read_text() == "mine"
