"""freight quantize --method gptq: of every family, and of runs that are killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.covering import in_rotation
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from tests.refusals import assert_names, refuses
from tests.unit.calibrate.test_every_family import EVERY
from transformers import AutoModelForCausalLM, AutoTokenizer

from freight import quantize
from freight.base.terminal import unseen
from freight.checkpoint.reader import resolve_model
from freight.errors import CheckpointError, ConfigError
from freight.quantizer import layer_rounder
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import linear_modules
from freight.quantizer.normed import Norm
from freight.quantizer.plan import QuantizeArgs, WeightScheme, plan
from freight.quantizer.quantize import open_unquantized
from freight.quantizer.report import digest as digest_of_tokens
from freight.quantizer.rounding import RoundedMatrix
from freight.quantizer.transformed import Folded

IDS = tokens(100)
ALWAYS = ("llama", "gemma3", "mixtral", "deepseek-v3", "olmo2", "qwen3-next", "nemotron-h")
FAMILIES = [
    pytest.param(name, marks=[] if name in ALWAYS or in_rotation(name) else [pytest.mark.slow])
    for name in EVERY
]
SAMPLES = [IDS[:60], IDS[60:]]


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_matrix_of_every_family_is_rounded_by_its_inputs(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_random(VARIANTS[variant], tmp_path / "plain", torch.float32)
    model = open_unquantized(str(tmp_path / "plain")).model
    rounded: dict[str, int] = {}
    original = layer_rounder.LayerRounder.rounded

    def note(self: Any, group: Any, statistics: Any, roundings: Any) -> Any:
        rounded.update(dict.fromkeys(group, statistics.num_rows))
        return original(self, group, statistics, roundings)

    monkeypatch.setattr(layer_rounder.LayerRounder, "rounded", note)
    options: dict[str, Any] = {"weights": "fp8-channel", "activations": "none"}
    result = quantize(
        str(tmp_path / "plain"),
        tmp_path / "out",
        method="gptq",
        calibration_data=SAMPLES,
        **options,
    )
    assert set(rounded) == set(linear_modules(model))
    # every token is seen, but for experts
    experts = {module for module in rounded if "experts" in module}
    assert {rounded[module] for module in rounded.keys() - experts} <= {100}
    if any(rounded[module] == 0 for module in experts):
        assert any("tokens of the calibration data reached" in line for line in result.warnings)
    quantize(str(tmp_path / "plain"), tmp_path / "nearest", **options)
    logits = {}
    for name in ("plain", "out", "nearest"):
        logits[name] = freight_logits(tmp_path / name, IDS, "float32", kv_cache_dtype="auto")
    assert logits["out"].isfinite().all()
    assert not torch.equal(logits["out"], logits["nearest"])
    error = (logits["out"] - logits["plain"]).square().mean()
    of_nearest = (logits["nearest"] - logits["plain"]).square().mean()
    assert error < 1.5 * of_nearest
    assert not list(tmp_path.glob(".freight*"))


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("method", ["awq", "smoothquant", "rotation"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_a_transform_of_every_family_changes_rounding_alone(
    variant: str, method: str, tmp_path: Path
):
    save_random(VARIANTS[variant], tmp_path / "plain", torch.float32)
    options: dict[str, Any] = {"weights": "fp8-channel"}
    if method == "awq":
        options["activations"] = "none"
    data = {} if method == "rotation" else {"calibration_data": SAMPLES}
    quantize(str(tmp_path / "plain"), tmp_path / "nearest", **options)
    try:
        quantize(str(tmp_path / "plain"), tmp_path / "out", method=method, **data, **options)
    except ConfigError as error:
        way = "no layer of this model has a place"
        if method == "rotation":
            way = "nothing of this model can be rotated"
        assert_names(str(error), f"--method {method}", way)
        assert not list(tmp_path.glob(".freight*"))
        return
    logits = {}
    for name in ("plain", "out", "nearest"):
        logits[name] = freight_logits(tmp_path / name, IDS, "float32", kv_cache_dtype="auto")
    error = (logits["out"] - logits["plain"]).square().mean()
    of_nearest = (logits["nearest"] - logits["plain"]).square().mean()
    assert error < 4 * of_nearest
    assert not torch.equal(logits["out"], logits["nearest"])
    assert not list(tmp_path.glob(".freight*"))


@pytest.mark.parametrize("variant", ["gemma3", "llama"])
@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_a_norm_times_its_scale_is_what_it_was_in_16_bits_too(
    variant: str, method: str, tmp_path: Path
):
    """A weight to which 1 is added has few digits near -1."""
    save_random(VARIANTS[variant], tmp_path / "plain", torch.bfloat16)
    opened = open_unquantized(str(tmp_path / "plain"))
    options = {"activations": "none"} if method == "awq" else {}
    decided = plan(QuantizeArgs(weights="fp8-channel", method=method, **options))
    with LayerStore(tmp_path / "out", {}) as store:
        smoothed = opened.smoothed(decided, SAMPLES, (), unseen, "cpu", store)
    assert isinstance(smoothed.transformed, Folded)
    offset = 1.0 if variant == "gemma3" else 0.0
    before = load_file(tmp_path / "plain" / "model.safetensors")
    seen = 0
    for name, places in smoothed.transformed.scales.items():
        changed = smoothed.changed(name)
        assert changed is not None
        if not isinstance(places[0][0].source, Norm) or changed.dim() > 1:
            continue
        ((_, scale),) = places
        product = (changed.bfloat16().float() + offset) * scale
        assert torch.allclose(product, before[name].float() + offset, rtol=1e-6)
        if method == "smoothquant":  # what AWQ finds best may be no change
            assert (scale != 1).float().mean() > 0.5
        seen += 1
    assert seen


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_scales_that_are_chosen_are_not_measured_again(method: str, tmp_path: Path):
    save_random(VARIANTS["llama"], tmp_path / "plain", torch.float32)
    opened = open_unquantized(str(tmp_path / "plain"))
    options = {"activations": "none"} if method == "awq" else {}
    decided = plan(QuantizeArgs(weights="fp8-channel", method=method, **options))
    name = "model.layers.0.input_layernorm.weight"
    norms = []
    stages: list[int] = []

    def count(what: str, done: int, total: int) -> None:
        stages.append(done)

    with LayerStore(tmp_path / "out", {}) as store:
        for _ in range(2):
            smoothed = opened.smoothed(decided, SAMPLES, (), count, "cpu", store)
            changed = smoothed.changed(name)
            assert changed is not None
            norms.append((changed, len(stages)))
    (first, steps), (again, steps_again) = norms
    assert steps > 0
    assert steps_again == steps
    assert torch.equal(first, again)


def digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }


MATRIX = RoundedMatrix(torch.ones(2, 32, dtype=torch.uint8), torch.ones(2, 1))
OPTIONS = ["--weights", "int4", "--method", "gptq", "--num-samples", "3", "--max-seq-len", "128"]


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "freight", "quantize", "demo", str(out), *OPTIONS]


def test_a_run_that_was_killed_goes_on_and_writes_the_same_file(tmp_path: Path):
    whole = tmp_path / "whole"
    subprocess.run(command(whole), check=True, capture_output=True)
    cut = tmp_path / "cut"
    layers = tmp_path / ".freight.cut.layers"
    for wanted in (1, 3):
        process = subprocess.Popen(
            command(cut), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while (
            len(list(layers.glob("layer-?????.safetensors"))) < wanted
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not cut.exists()
    done = len(list(layers.glob("layer-?????.safetensors")))
    assert done >= 3
    last = subprocess.run(command(cut), check=True, capture_output=True, text=True)
    assert f"{done} layers are quantized already" in " ".join(last.stderr.split())
    assert digest(cut) == digest(whole)
    assert not layers.exists()


def test_layers_of_another_run_are_not_used(tmp_path: Path):
    store = LayerStore(tmp_path / "out", {"model": "a"})
    store.add(0, {"q_proj": MATRIX})
    assert store.has(0)
    with refuses(ConfigError, "another run quantizes into"):
        LayerStore(tmp_path / "out", {"model": "a"})
    store.close()
    again = LayerStore(tmp_path / "out", {"model": "a"})
    assert again.has(0)
    stored = again.matrix("q_proj")
    assert stored is not None
    assert torch.equal(stored.codes, MATRIX.codes)
    assert stored.zeros is None
    assert again.matrix("k_proj") is None
    again.close()
    other = LayerStore(tmp_path / "out", {"model": "b"})
    assert not other.has(0)
    other.remove()
    assert not list(tmp_path.glob(".freight*"))


def test_a_damaged_layer_is_named_with_the_way_out(tmp_path: Path):
    store = LayerStore(tmp_path / "out", {})
    store.add(0, {"q_proj": MATRIX})
    store.close()
    (file,) = store.folder.glob("layer-?????.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    with refuses(ConfigError, "is damaged", "remove"):
        LayerStore(tmp_path / "out", {})


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("weights", ["fp8", "fp8-block", "int8", "int4", "nvfp4", "mxfp4"])
def test_every_format_is_rounded_with_less_error_of_outputs(weights: str, tmp_path: Path):
    """NVFP4's matrices of one input share a divisor, which is stored with each."""
    save_random(VARIANTS["llama"], tmp_path / "plain", torch.float32)
    options: dict[str, Any] = {"weights": weights}
    if weights == "int4":
        options["group_size"] = 32
    quantize(str(tmp_path / "plain"), tmp_path / "nearest", **options)
    quantize(
        str(tmp_path / "plain"),
        tmp_path / "out",
        method="gptq",
        calibration_data=SAMPLES,
        **options,
    )
    logits = {}
    for name in ("plain", "nearest", "out"):
        logits[name] = freight_logits(tmp_path / name, IDS, "float32", "reference")
    errors = {name: (logits[name] - logits["plain"]).square().mean() for name in ("nearest", "out")}
    assert errors["out"] < errors["nearest"]


@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4", "int4", "fp8-channel"])
def test_a_matrix_with_nan_is_refused_before_its_layer_is_kept(weights: str, tmp_path: Path):
    save_random(VARIANTS["llama"], tmp_path / "plain", torch.float32)
    file = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][2, 3] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    options: dict[str, Any] = {"group_size": 32} if weights == "int4" else {}
    with refuses(CheckpointError, name, "NaN"):
        quantize(
            str(tmp_path / "plain"),
            tmp_path / "out",
            weights=weights,
            method="gptq",
            calibration_data=SAMPLES,
            **options,
        )
    kept = [path.name for path in (tmp_path / ".freight.out.layers").glob("layer-*")]
    assert kept == ["layer-00000.safetensors"]


@pytest.mark.usefixtures("reference_kernels")
def test_experts_that_stay_in_16_bits_are_rotated_for_the_layers_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A rotation of values leaves the size of the output projection's inputs."""
    save_random(VARIANTS["gpt-oss"], tmp_path / "plain", torch.float32)
    monkeypatch.setattr(layer_rounder.LayerRounder, "changed", lambda rounder: rounder.source)
    original = layer_rounder.LayerRounder.rounded
    sizes: dict[str, dict[str, float]] = {"gptq": {}, "rotation,gptq": {}}
    for method, size in sizes.items():

        def note(self: Any, group: Any, statistics: Any, roundings: Any, size: Any = size) -> Any:
            size[group[0]] = float(statistics.hessian.trace())
            return original(self, group, statistics, roundings)

        monkeypatch.setattr(layer_rounder.LayerRounder, "rounded", note)
        quantize(
            str(tmp_path / "plain"),
            tmp_path / method,
            weights="fp8-channel",
            method=method,
            ignore=("re:experts",),
            calibration_data=[IDS[:40]],
        )
    outputs = [name for name in sizes["gptq"] if name.endswith("o_proj")]
    assert len(outputs) > 1
    for name in outputs:
        assert sizes["rotation,gptq"][name] == pytest.approx(sizes["gptq"][name], rel=1e-4)


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
@pytest.mark.parametrize("method", ["awq", "rotation"])
def test_a_transform_makes_a_model_with_an_outlier_easier_to_round(
    variant: str, method: str, tmp_path: Path
):
    save_random(VARIANTS[variant], tmp_path / "plain", torch.float32)
    file = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[5] *= 20
    save_file(tensors, file, {"format": "pt"})
    options: dict[str, Any] = {"weights": "int4", "group_size": 32}
    quantize(str(tmp_path / "plain"), tmp_path / "nearest", **options)
    data = {"calibration_data": SAMPLES} if method == "awq" else {}
    quantize(str(tmp_path / "plain"), tmp_path / "out", method=method, **data, **options)
    logits = {}
    for name in ("plain", "nearest", "out"):
        logits[name] = freight_logits(tmp_path / name, IDS, "float32", "reference")
    errors = {name: (logits[name] - logits["plain"]).square().mean() for name in ("nearest", "out")}
    assert errors["out"] < errors["nearest"]


def routed(folder: Path, samples: list[list[int]]) -> list[list[int]]:
    """By layer, the tokens that transformers sends to each expert, each sample by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen = model.config.num_experts_per_tok
    counts: list[torch.Tensor] = []
    for ids in samples:
        with torch.no_grad():
            answer = model(torch.tensor([ids]), output_router_logits=True)
        for layer, logits in enumerate(answer.router_logits):
            experts = logits.topk(chosen, -1).indices.flatten()
            counts += [torch.zeros(logits.shape[1], dtype=torch.int64)] * (layer == len(counts))
            counts[layer] = counts[layer] + torch.bincount(experts, minlength=logits.shape[1])
    return [count.tolist() for count in counts]


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_the_report_has_the_tokens_that_each_expert_had(variant: str, tmp_path: Path):
    save_random(VARIANTS[variant], tmp_path / "plain", torch.float32)
    options: dict[str, dict[str, Any]] = {
        "static": {"weights": "fp8", "activations": "static"},
        "budget": {"budget": "bits=12"},
        "awq": {"weights": "fp8-weight-only", "method": "awq"},
        "gptq": {"weights": "int4", "group_size": 32, "method": "gptq"},
    }
    for name, of_run in options.items():
        out = tmp_path / name
        quantize(str(tmp_path / "plain"), out, calibration_data=SAMPLES, **of_run)
        report = json.loads((out / "freight_quantization.json").read_text())
        seen = SAMPLES[:1] if name == "budget" else SAMPLES  # the other half verifies
        expected = routed(tmp_path / "plain", seen)
        if name == "gptq":  # later layers see what is rounded before them
            expected = expected[:1]
        for layer, counts in zip(report["layers"], expected, strict=False):
            assert list(layer["experts"].values()) == counts
            assert layer["num_tokens"] == sum(map(len, seen))
            for group in layer["groups"]:
                if "experts" not in group["modules"][0]:
                    assert group["num_tokens"] == layer["num_tokens"]
    page = (tmp_path / "gptq" / "freight_quantization.md").read_text()
    assert "tokens of an expert" in page
    assert "## Warnings" in page


@pytest.mark.parametrize("form", ["text", "messages", "conversations", "parquet"])
def test_a_method_reads_data_of_every_form(form: str, tmp_path: Path):
    """The tokens of the report are those that transformers makes of the same texts."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo", None))
    turns = [("user", "Which fish lives longest?"), ("assistant", "The Greenland shark. " * 20)]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": text} for _, text in turns],
        "messages": [{"messages": messages, "id": 3}],
        "conversations": [
            {"conversations": [{"from": "human", "value": turns[0][1]},
                               {"from": "gpt", "value": turns[1][1]}]}
        ],
    }  # fmt: skip
    rows["parquet"] = rows["messages"]
    if tokenizer.chat_template is None:
        expected = [tokenizer("\n".join(text for _, text in turns))["input_ids"]]
    else:
        expected = [tokenizer.apply_chat_template(messages, return_dict=False)]
    if form == "text":
        expected = [tokenizer(text)["input_ids"] for _, text in turns]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows[form])))
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "data.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows[form]), path)
    quantize(
        "demo",
        tmp_path / "out",
        weights="int8",
        method="gptq",
        calibration_data=path,
        ignore=[r"re:layers\.[1-5]\."],
    )
    report = json.loads((tmp_path / "out" / "freight_quantization.json").read_text())
    assert report["calibration"]["data"] == path.name
    assert report["calibration"]["num_samples"] == len(expected)
    assert report["calibration"]["num_tokens"] == sum(map(len, expected))
    assert report["calibration"]["tokens_sha256"] == digest_of_tokens(expected)
    assert report["layers"][0]["groups"][0]["num_tokens"] == sum(map(len, expected))


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("weights", [scheme for scheme in WeightScheme if scheme != "none"])
def test_gptq_lowers_the_error_of_outputs_in_every_format(weights: str, tmp_path: Path):
    save_random(VARIANTS["llama"], tmp_path / "plain", torch.bfloat16)
    sizes = {"group_size": 32} if weights == "int4" else {}
    quantize(
        str(tmp_path / "plain"),
        tmp_path / "out",
        weights=weights,
        method="gptq",
        calibration_data=SAMPLES,
        **sizes,
    )
    report = json.loads((tmp_path / "out" / "freight_quantization.json").read_text())
    for layer in report["layers"]:
        assert len(layer["groups"]) == 4
        for group in layer["groups"]:
            assert 0 < group["error"] < group["error_nearest"] < 0.05
