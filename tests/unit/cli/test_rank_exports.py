"""AMMO's exports at the terminal: inspect, scales extract, export and import, every --format, and
what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.rank_exports import SCALES, ammo_json, tensorrt_llm_json, write_export, write_rank

from freight import LLM

Run = Callable[..., Any]
BASE = str(Path(__file__).parents[2] / "fixtures" / "base_bf16")
AUTOFP8 = str(Path(__file__).parents[2] / "fixtures" / "autofp8_static_kv")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return write_export(tmp_path / "export")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def cache_of(folder: Path) -> tuple[str, str, tuple[float, ...]]:
    """(dtype, source of the scales, K's of each layer) of a model as it loads."""
    llm = LLM(
        str(folder),
        kv_cache_dtype="fp8",
        kv_cache_memory="4MiB",
        max_model_len=64,
        skip_tokenizer_init=True,
    )
    info = llm.kv_cache_info()
    scales = [layer.pages.k_scale for layer in llm.engine.runner.pool.layers]
    return (
        info["dtype"],
        info["scale_source"],
        tuple(float(scale.max()) for scale in scales if scale is not None),
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["ammo", "tensorrt_llm"])
def test_both_layouts_are_inspected(
    freight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, ranks: int
):
    monkeypatch.setenv("COLUMNS", "200")
    config = ammo_json(ranks) if layout == "ammo" else tensorrt_llm_json(ranks)
    name = f"llama_tp{ranks}.json" if layout == "ammo" else "config.json"
    folder = str(write_export(tmp_path / "export", ranks=ranks, config=config, name=name))
    said = json.loads(freight("inspect", folder, "--json").out)
    assert [layer["k"]["value"] for layer in said["kv_cache"]["scales"]] == list(SCALES)
    assert said["kv_cache"]["scales_format"] == "fp8_e4m3fn"
    assert (said["model_type"], said["num_layers"], said["max_position_embeddings"]) == (
        "llama",
        2,
        256,
    )
    assert said["bytes"] == {"int8": 32 * ranks, "float32": 8 * ranks}
    shown = freight("inspect", folder)
    assert shown.code == 0, shown.err
    assert ("in 1 rank," if ranks == 1 else "in 2 ranks,") in shown.out
    assert "attention.kv_cache_scaling_factor" in shown.out


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_scales_go_into_the_16_bit_model(freight: Run, tmp_path: Path, out: Path, ranks: int):
    folder = write_export(tmp_path / "export", ranks=ranks)
    answer = freight("scales", "extract", str(folder), BASE, str(out))
    assert answer.code == 0, answer.err
    assert cache_of(out) == ("fp8_e4m3fn", "checkpoint", SCALES)


def test_ranks_that_differ_are_scales_of_their_heads(freight: Run, tmp_path: Path, out: Path):
    """Layer 1 has 0.5 in rank 1, and the model two KV heads: one of each rank."""
    folder = write_export(tmp_path / "export", ranks=2)
    write_rank(folder, 1, {0: SCALES[0], 1: 0.5})
    said = json.loads(freight("inspect", str(folder), "--json").out)
    assert [layer["k"]["granularity"] for layer in said["kv_cache"]["scales"]] == ["head", "head"]
    answer = freight("scales", "extract", str(folder), BASE, str(out))
    assert answer.code == 0, answer.err
    llm = LLM(str(out), kv_cache_dtype="fp8", kv_cache_memory="4MiB", skip_tokenizer_init=True)
    assert llm.kv_cache_info()["granularity"] == "head"
    scales = [layer.pages.k_scale for layer in llm.engine.runner.pool.layers]
    assert [scale[:, 0].tolist() for scale in scales if scale is not None] == [
        [SCALES[0], SCALES[0]],
        [SCALES[1], 0.5],
    ]
    file = tmp_path / "scales.json"
    assert freight("scales", "export", str(folder), str(file)).code == 0
    factors = json.loads(file.read_text())["kv_cache"]["scaling_factor"]
    assert factors == {"0": {"0": SCALES[0], "1": 0.5}}  # one for all heads: the largest


def test_export_writes_what_older_engines_extracted(freight: Run, export: Path, tmp_path: Path):
    file = tmp_path / "kv_cache_scales.json"
    assert freight("scales", "export", str(export), str(file)).code == 0
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": SCALES[0], "1": SCALES[1]}}}
    assert json.loads(file.read_text()) == {"model_type": "llama", "kv_cache": kv_cache}


def test_import_takes_the_folder_in_the_place_of_a_file(freight: Run, export: Path, out: Path):
    assert freight("scales", "import", str(export), BASE, str(out)).code == 0
    assert cache_of(out)[2] == SCALES


@pytest.mark.parametrize("form", ["compressed-tensors", "fp8", "tgi"])
@pytest.mark.parametrize("verb", ["extract", "import"])
def test_every_format_is_written_and_loads(
    freight: Run, export: Path, tmp_path: Path, out: Path, form: str, verb: str
):
    source = str(export)
    if verb == "import":
        source = str(tmp_path / "scales.json")
        freight("scales", "export", str(export), source)
    answer = freight("scales", verb, source, BASE, str(out), "--format", form)
    assert answer.code == 0, answer.err
    assert cache_of(out) == ("fp8_e4m3fn", "checkpoint", SCALES)
    assert freight("scales", "export", str(out), str(tmp_path / "again.json")).code == 0
    assert list(
        json.loads((tmp_path / "again.json").read_text())["kv_cache"]["scaling_factor"][
            "0"
        ].values()
    ) == list(SCALES)
    weights, base = load_file(out / "model.safetensors"), load_file(f"{BASE}/model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in base.items())


def test_the_extraction_of_tgi_as_its_author_wrote_it(freight: Run, out: Path):
    """extract_fp8_kv_scales.py --quantized-model … --model … --save-path …, and the tensors that
    TGI reads.
    """
    argv = ["--quantized-model", AUTOFP8, "--model", BASE, "--save-path", str(out)]
    assert freight("scales", "extract", *argv, "--format", "tgi").code == 0
    theirs, mine = load_file(f"{AUTOFP8}/model.safetensors"), load_file(out / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        assert f"{prefix}k_scale" not in mine
        scale = mine[f"{prefix}kv_scale"]
        assert (scale.shape, scale.dtype) == ((), torch.float32)
        assert scale == max(theirs[f"{prefix}k_scale"], theirs[f"{prefix}v_scale"])
    config = json.loads((out / "config.json").read_text())
    assert config["kv_cache_torch_dtype"] == "float8_e4m3fn"
    assert "quantization_config" not in config


@pytest.mark.parametrize("form", ["compressed-tensors", "fp8", "tgi"])
def test_quantize_keeps_the_scales_that_were_put_in(
    freight: Run, export: Path, tmp_path: Path, out: Path, form: str
):
    scaled = str(tmp_path / "scaled")
    assert freight("scales", "extract", str(export), BASE, scaled, "--format", form).code == 0
    answer = freight("quantize", scaled, str(out), "--weights", "fp8", "--json")
    assert answer.code == 0, answer.err
    assert (json.loads(answer.out)["kv_cache"], json.loads(answer.out)["num_tokens"]) == ("fp8", 0)
    assert "kv_cache_torch_dtype" not in json.loads((out / "config.json").read_text())
    dtype, source, scales = cache_of(out)
    assert (dtype, source) == ("fp8_e4m3fn", "checkpoint")
    assert scales == tuple(float(torch.tensor(scale).bfloat16()) for scale in SCALES)


def test_quantize_does_not_calibrate_again_what_is_there(
    freight: Run, export: Path, tmp_path: Path, out: Path
):
    scaled = str(tmp_path / "scaled")
    assert freight("scales", "extract", str(export), BASE, scaled).code == 0
    answer = freight("quantize", scaled, str(out), "--weights", "none", "--kv-cache", "fp8")
    assert (answer.code, "is quantized already" in answer.err) == (1, True)


def test_it_does_not_run_and_says_what_to_type(freight: Run, export: Path):
    answer = freight("generate", str(export), "--prompt", "x")
    assert answer.code == 1
    assert f"freight scales extract {export} BASE OUT" in " ".join(answer.err.split())


def without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def with_json(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "llama_tp1.json").write_text(json.dumps(ammo_json(2) | changes))


def write_one_head(folder: Path, heads: int | None = 1) -> None:
    """The description of an export of two ranks with so many KV heads, None if it says nothing."""
    layers = [layer | {"num_kv_heads": heads} for layer in ammo_json(2)["layers"]]
    with_json(layers=layers)(folder)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank missing": (
        without("rank1.safetensors"),
        "describes 2 ranks, but rank1.safetensors is missing",
    ),
    "the first rank missing": (without("rank0.safetensors"), "but rank0.safetensors is missing"),
    "a rank too many": (
        lambda folder: write_rank(folder, 2, {}),
        "rank2.safetensors is beyond them",
    ),
    "no JSON": (without("llama_tp1.json"), "no JSON file that describes them"),
    "two JSON files": (
        lambda folder: (folder / "config.json").write_text(json.dumps(tensorrt_llm_json(2))),
        "config.json and llama_tp1.json both describe an export",
    ),
    "ranks that differ in one head": (
        lambda folder: (
            write_one_head(folder),
            write_rank(folder, 1, {0: SCALES[0], 1: 0.5}),
        ),
        "ranks that have the same KV head have different factors in layer 1 (rank 0: 0.0244140625, rank 1: 0.5)",
    ),
    "ranks that differ, of an unknown number of heads": (
        lambda folder: (
            write_one_head(folder, heads=None),
            write_rank(folder, 1, {0: SCALES[0], 1: 0.5}),
        ),
        "differ in the KV scale of layer 1, but the number of KV heads that they share is not there",
    ),
    "a layer missing": (
        lambda folder: write_rank(folder, 1, {0: SCALES[0]}),
        "rank1.safetensors has no kv_cache_scaling_factor of layer 1",
    ),
    "a scale of 0": (
        lambda folder: write_rank(folder, 0, {0: 0.0, 1: 1.0}),
        "is 0.0; a scale has to be finite",
    ),
    "a cache in INT8": (
        lambda folder: (folder / "llama_tp1.json").write_text(
            json.dumps(ammo_json(2, kv_cache_dtype="INT8"))
        ),
        'the KV cache is "INT8"',
    ),
    "a pipeline": (with_json(pipeline_parallel=2), "2 stages of a pipeline"),
    "no decoder": (with_json(layers=[{}]), "layers[0].decoder_type is None"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_refused_by_name(freight: Run, tmp_path: Path, out: Path, fault: str):
    folder = write_export(tmp_path / "export", ranks=2)
    damage, says = FAULTS[fault]
    damage(folder)
    for argv in (["inspect", str(folder)], ["scales", "extract", str(folder), BASE, str(out)]):
        answer = freight(*argv)
        assert (answer.code, answer.out) == (1, "")
        assert says in " ".join(answer.err.split())
    assert not out.exists()


def test_a_model_of_another_shape_is_refused(freight: Run, export: Path, out: Path):
    answer = freight("scales", "extract", str(export), "demo", str(out))
    assert (answer.code, "num_layers is 2 there and 6 here" in answer.err) == (2, True)


def test_npz_files_are_refused_with_the_way_out(freight: Run, tmp_path: Path):
    (tmp_path / "llama_tp1_rank0.npz").write_bytes(b"")
    answer = freight("inspect", str(tmp_path))
    assert (answer.code, "export again as safetensors" in answer.err) == (1, True)
