"""freight audit at the terminal: what is caught, what it costs, what repairs it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.hybrids import folder
from tests.refusals import assert_names, line_naming
from tests.unit.audit.conftest import AWQ, CT, DEMO, PLAIN, Write

from freight.lab.audit.effects import view
from freight.lab.audit.facts import read_facts
from freight.lab.audit.rules import Engine
from freight.lab.audit.verdict import Cost, is_safe
from freight.model.open import open_checkpoint

Run = Callable[..., Any]
FEW = ("--max-tokens", "96", "--layer-tokens", "64", "--window", "64")


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text((DEMO / "heldout.txt").read_text()[:1500])
    return str(path)


def test_silently_missing_scales_are_caught(freight: Run, write: Write, text: str):
    """Layer 3, whose keys are a thousand times larger, has no scales: vLLM loads it and takes 1.0."""
    path = write(CT, PLAIN, missing=(3,), keys=1e3)
    said = json.loads(
        freight("audit", str(path), "--engine", "vllm", "--data", text, *FEW, "--json").out
    )
    (vllm,) = said["engines"]
    assert vllm["scales"] == {"used": 10, "one": 2}
    assert vllm["layers"][3]["k"]["effect"] == "one"
    assert_names(vllm["verdict"], "no scales", "1 of 6 layers (layer 3)", "not safe")
    assert vllm["cost"]["kl_mean"] > 20 * said["caches"]["dynamic"]["kl_mean"]
    assert vllm["worst_layers"][0]["layer"] == 3
    assert vllm["worst_layers"][0]["added_kl"] > 0.1


def test_the_fix_is_a_checkpoint_that_the_engine_loads(
    freight: Run,
    write: Write,
    text: str,
    tmp_path: Path,
):
    path, out = write(CT, PLAIN, missing=(3,), keys=1e3), tmp_path / "fixed"
    answer = freight(
        "audit", str(path), "--engine", "vllm", "--data", text, *FEW, "--fix", str(out)
    )
    assert answer.code == 0, answer.err
    assert view(Engine.VLLM, "0.33", read_facts(out)[1]).counts.keys() <= {"used", "converted"}
    again = json.loads(
        freight("audit", str(out), "--engine", "vllm", "--data", text, *FEW, "--json").out
    )
    assert "safe on this text" in again["engines"][0]["verdict"]
    assert "not safe" not in again["engines"][0]["verdict"]
    weights = "model.layers.2.mlp.down_proj.weight"
    assert load_file(out / "model.safetensors")[weights].equal(
        load_file(path / "model.safetensors")[weights]
    )
    assert not open_checkpoint(str(out)).kv_scales.missing


def test_layers_that_keep_a_state_need_no_scales(freight: Run, text: str, tmp_path: Path):
    """One layer of four has attention: it is measured, repaired, and alone in what is said."""
    model, out = Path(__file__).parents[2] / "fixtures/hybrids/delta_net", tmp_path / "fixed"
    options = ("--engine", "vllm", "--data", text, *FEW)
    said = freight("audit", str(model), *options, "--calibration-data", text, "--fix", str(out))
    assert said.code == 0, said.err
    line_naming(said.out, "1.0 in every layer with attention")
    assert "KV scales of 1 layer," in said.out
    (vllm,) = json.loads(freight("audit", str(out), *options, "--json").out)["engines"]
    assert (vllm["scales"], [layer["layer"] for layer in vllm["layers"]]) == ({"used": 2}, [3])
    assert_names(vllm["verdict"], "stored scales", "one layer with attention: safe")


def test_kimi_delta_attention_needs_no_scales():
    """Its projections are named as those of attention: layers 0, 1 and 3 keep a state, and layer 2
    attends.
    """
    facts = read_facts(folder("kimi_linear"))[1]
    assert facts.without_keys == {0, 1, 3}
    assert [layer.layer for layer in view(Engine.SGLANG, "0.5.23", facts).layers] == [2]


def test_an_undeclared_checkpoint_is_declared_and_keeps_its_scales(
    freight: Run,
    write: Write,
    tmp_path: Path,
):
    """vLLM stops at scales that no quantization_config announces. Nothing is measured for that fix."""
    path, out = write(None, PLAIN), tmp_path / "fixed"
    said = freight("audit", str(path), "--engine", "vllm", "--fix", str(out)).out
    assert "does not load this checkpoint" in said
    before, after = open_checkpoint(str(path)).kv_scales, open_checkpoint(str(out)).kv_scales
    assert [(x.k, x.v) for x in before.layers if x] == [(x.k, x.v) for x in after.layers if x]
    assert view(Engine.VLLM, "0.33", read_facts(out)[1]).counts.keys() <= {"used", "converted"}
    assert (
        json.loads((out / "config.json").read_text())["quantization_config"]["kv_cache_scheme"][
            "num_bits"
        ]
        == 8
    )


def test_what_freight_cannot_run_is_judged_by_the_rules(freight: Run, write: Write, text: str):
    in_8_bits = write(AWQ | {"bits": 8}, PLAIN)
    said = json.loads(freight("audit", str(in_8_bits), "--data", text, "--json").out)
    assert [one["scales"] for one in said["engines"]] == [
        {"ignored": 12},
        {"ignored": 12},
        {"used": 12},
    ]
    assert "awq" in said["unmeasured"]
    assert all("not measured" in one["verdict"] for one in said["engines"])


def test_mixtral_in_sglang_gets_the_names_that_it_loads(write: Write):
    """sglang#39942: of the forms that are known, one alone is loaded there."""
    from freight.lab.audit.repair import choose_form

    path = write(CT, PLAIN)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]})
    )
    facts = read_facts(path)[1]
    assert view(Engine.SGLANG, "0.5.23", facts).lost == tuple(range(6))
    scales = open_checkpoint(str(write(CT, PLAIN))).kv_scales
    form = choose_form(facts, scales, [(Engine.SGLANG, "0.5.23"), (Engine.VLLM, "0.33")])
    assert form.names == "self_attn.attn.{side}_scale"
    assert form.engines == (Engine.SGLANG, Engine.VLLM)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--kv-cache-dtype", "fp8"), "No such option"),
        (("--engine", "trt"), "choose"),
        (("--fix", "/proc/nothing/here"), "--fix|output"),
    ],
)
def test_bad_input(freight: Run, argv: tuple[str, ...], said: str):
    answer = freight("audit", "demo", *argv)
    assert answer.code == 2
    assert any(word in answer.err for word in said.split("|"))


def test_a_cache_chosen_for_other_verbs_changes_nothing(
    freight: Run, write: Write, monkeypatch: pytest.MonkeyPatch
):
    path = str(write(CT, PLAIN))
    said = freight("audit", path, "--json").out
    monkeypatch.setenv("FREIGHT_KV_CACHE_DTYPE", "fp8")
    monkeypatch.setenv("FREIGHT_KV_SCALES", "unit")
    assert freight("audit", path, "--json").out == said
    assert "--kv-cache-dtype" not in freight("audit", "--help").out


def test_a_fix_without_scales_or_text_says_what_is_missing(
    freight: Run, write: Write, tmp_path: Path
):
    answer = freight("audit", str(write(None, "")), "--fix", str(tmp_path / "out"))
    assert answer.code == 2
    assert "--data" in answer.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_scale_without_its_other_is_not_written_for_both(
    freight: Run, write: Write, text: str, tmp_path: Path, side: str
):
    """Of layer 2 only one side has a scale: the other is missing, and --fix has to measure."""
    path, out = write(CT, PLAIN), tmp_path / "fixed"
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.2.self_attn.{'kv'.replace(side, '')}_scale"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "--data" in freight("audit", str(path), "--engine", "vllm", "--fix", str(out)).err
    said = freight(
        "audit", str(path), "--engine", "vllm", "--data", text, *FEW, "--fix", str(out), "--json"
    )
    assert json.loads(said.out)["caches"]["stored"] is None
    layer = open_checkpoint(str(out)).kv_scales.layers[2]
    assert layer is not None
    assert layer.k != layer.v


def test_a_cost_is_judged_by_the_bounds_of_evaluate():
    assert is_safe(Cost(10.0, 0.004, 0.96))
    for kl, same_top in ((0.006, 0.96), (0.004, 0.94), (math.nan, 1.0)):
        assert not is_safe(Cost(10.0, kl, same_top))


def test_the_verb_is_there_before_torch():
    code = "import sys, freight.cli.audit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
