"""freight inspect: what a checkpoint is, also for one that would be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.parity.test_predicting import CASES, save
from tests.pooling_models import save_encoder
from tests.refusals import assert_names

from freight.cli.inspect import inspect
from freight.errors import CheckpointError

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def as_json(capsys):
    def inspector(model):
        inspect(str(model), True)
        return json.loads(capsys.readouterr().out)

    return inspector


def test_the_shipped_model(as_json):
    facts = as_json("demo")
    assert facts["architecture"] == "LlamaForCausalLM"
    assert list(facts["bytes"]) == ["bfloat16"]
    assert (facts["dtype"], facts["dtype_source"]) == ("bfloat16", "config.json")
    assert facts["bytes"]["bfloat16"] == 2 * facts["num_parameters"]
    assert facts["scheme"]["method"] is None
    assert facts["scheme"]["fp8_weights"] == {}
    assert facts["kv_cache"]["scales"] == []


@pytest.mark.parametrize(
    ("name", "method"), [("autofp8_static_kv", "fp8"), ("ct_docs", "compressed-tensors")]
)
def test_fp8_checkpoints_of_real_tools(as_json, name, method):
    facts, base = as_json(FIXTURES / name), as_json(FIXTURES / "base_bf16")
    assert facts["num_parameters"] == base["num_parameters"] == 1115392
    assert facts["bytes"]["fp8_e4m3fn"] == 983040
    assert facts["scheme"]["method"] == method
    assert facts["scheme"]["fp8_weights"] == {"scales per tensor, activations static": 14}
    assert facts["scheme"]["weight_format"] == facts["kv_cache"]["scales_format"] == "fp8_e4m3fn"
    for index, layer in enumerate(facts["kv_cache"]["scales"]):
        assert layer["layer"] == index
        for side in "kv":
            scale = layer[side]
            assert scale.get("centered") == (False if side == "k" else None)
            assert scale["names"] == [f"model.layers.{index}.self_attn.{side}_scale"]
            assert scale["granularity"] == "tensor"
            assert scale["min"] == scale["max"] == scale["value"] > 0


@pytest.fixture
def partial(tmp_path):
    """base_bf16 with scales per head in layer 1 only."""
    tensors = load_file(FIXTURES / "base_bf16" / "model.safetensors")
    tensors["model.layers.1.self_attn.kv_scale"] = torch.tensor([0.5, 0.25])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FIXTURES / "base_bf16" / "config.json").read_text())
    return tmp_path


def test_layers_without_scales_and_scales_per_head(as_json, partial):
    empty, layer = as_json(partial)["kv_cache"]["scales"]
    assert (empty["k"], empty["v"]) == (None, None)
    assert layer["k"] == layer["v"] | {"centered": False}
    assert layer["v"] == {
        "granularity": "head",
        "min": 0.25,
        "max": 0.5,
        "names": ["model.layers.1.self_attn.kv_scale"],
    }


def test_table(capsys, partial, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    inspect(str(partial), False)
    out = capsys.readouterr().out
    for word in (
        "LlamaForCausalLM",
        "1.1 M",
        "bfloat16",
        "missing",
        "0.25 … 0.5",
        "│ self_attn.kv_scale",
    ):
        assert word in out
    inspect("demo", False)
    assert "none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind", "everywhere"),
    [
        ("four_bits/awq", "4-bit", False),
        ("four_bits/mxfp4", "4-bit", True),
        ("compressed_int8/token", "INT8", False),
        ("base_bf16", "FP8", True),
    ],
)
def test_weights_that_gpus_refuse_are_said_to_be_for_cpus(name, kind, everywhere, capsys):
    inspect(str(FIXTURES / name), False)
    out = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in out.splitlines() if line[:1].strip())
    assert rows["runs"].strip().startswith("natively")
    assert ("on CPUs" in rows["runs"]) is not everywhere
    assert [key for key in rows if key.endswith("matrices")] == [f"{kind} matrices"]


def test_an_assumed_format_of_scales_is_said(as_json, partial, capsys):
    assert as_json(partial)["kv_cache"]["scales_format_assumed"]
    assert not as_json(FIXTURES / "ct_docs")["kv_cache"]["scales_format_assumed"]
    inspect(str(partial), False)
    said = " ".join(capsys.readouterr().out.split())
    assert_names(said, "fp8_e4m3fn, assumed", "kv_cache_torch_dtype")
    inspect(str(FIXTURES / "ct_docs"), False)
    assert "assumed" not in capsys.readouterr().out


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}  # fmt: skip
WRAPPED: dict[str, Any] = {
    "model_type": "mistral3",
    "text_config": {**LLAMA, "model_type": "ministral3"},
    "vision_config": {"a": 1},
}
CONFIGS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "native": (LLAMA, "natively", None),
    "wrapped": (WRAPPED, "natively", None),
    "by the fallback": ({**LLAMA, "model_type": "cohere2"}, "through transformers", None),
    "unknown key": ({**LLAMA, "new_kind": 7}, "natively", None),
    "computing key": ({**LLAMA, "scale_emb": 7}, None, "scale_emb = 7 decides what a model computes"),
    "computing key inside": (
        {**WRAPPED, "text_config": {**WRAPPED["text_config"], "scale_emb": 7}}, None, "scale_emb = 7 decides"
    ),
    "unknown text model": ({**WRAPPED, "text_config": LLAMA}, None, "'mistral', 'ministral3' or 'mistral4' is"),
    "unknown model": ({**LLAMA, "model_type": "none_such"}, None, "model_type 'none_such' is not implemented"),
    "no fallback": ({**LLAMA, "model_type": "mamba", "ssm_cfg": 1}, None, "a recurrent state"),
    "quantization": ({**LLAMA, "quantization_config": {"quant_method": "gguf"}}, None, "gguf"),
    "4 bits by the fallback": (
        {**LLAMA, "model_type": "cohere2", "quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True}},
        None, "weights in 4 bits are implemented for Freight's own decoder, and model_type 'cohere2' runs through",
    ),
    "code of its own": (
        {**LLAMA, "model_type": "baichuan", "auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"}},
        None, "auto_map names code in the checkpoint, which is never run here; vLLM runs it with --trust-remote-code",
    ),
    "nothing": ({}, None, "model_type None is not implemented"),
}  # fmt: skip


@pytest.mark.parametrize("said", CONFIGS)
def test_any_config_json_says_whether_it_runs_or_what_stands_in_the_way(
    as_json, capsys, monkeypatch, tmp_path, said
):
    """Alone as a file, alone in a folder, and beside weights, in one line each."""
    config, runs, obstacle = CONFIGS[said]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    facts = as_json(path)
    assert (facts["runs"], facts["model_type"]) == (runs, config.get("model_type"))
    assert facts["obstacle"] is None if obstacle is None else obstacle in facts["obstacle"]
    assert "\n" not in str(facts["obstacle"])
    assert (facts["num_parameters"], facts["bytes"]) == (None, {})
    assert as_json(tmp_path) == facts | {"model": str(tmp_path), "path": str(tmp_path)}
    save_file({"norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    beside = as_json(tmp_path)
    assert [beside[key] for key in ("runs", "obstacle", "num_parameters")] == [
        runs,
        facts["obstacle"],
        64,
    ]
    monkeypatch.setenv("COLUMNS", "2000")
    inspect(str(tmp_path), False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("runs ")]
    assert [line.split(maxsplit=1)[1].strip() for line in lines] == [
        runs or f"no: {facts['obstacle']}"
    ]


def test_what_is_known_of_a_model_that_cannot_run(as_json, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            CONFIGS["computing key inside"][0]
            | {"architectures": ["Mistral3ForConditionalGeneration"]}
        )
    )
    facts = as_json(path)
    assert (facts["architecture"], facts["num_layers"]) == ("Mistral3ForConditionalGeneration", 2)
    inspect(str(path), False)
    assert "none: a config.json alone" in " ".join(capsys.readouterr().out.split())


def test_the_dtype_of_a_config_without_one(as_json, capsys, tmp_path):
    config = (FIXTURES / "published" / "MiniMaxAI--MiniMax-M2.5.json").read_text()
    (tmp_path / "config.json").write_text(config)
    facts = as_json(tmp_path)
    assert (facts["dtype"], facts["dtype_source"]) == ("bfloat16", "assumed")
    save_file(
        {"model.norm.weight": torch.zeros(8, dtype=torch.float16)}, tmp_path / "model.safetensors"
    )
    for more, runs in ({}, "natively"), ({"scale_emb": 12}, None):
        (tmp_path / "config.json").write_text(json.dumps(json.loads(config) | more))
        facts = as_json(tmp_path)
        assert (facts["runs"], facts["dtype"], facts["dtype_source"]) == (
            runs,
            "float16",
            "tensors",
        )
    inspect(str(tmp_path), False)
    assert "float16, as the tensors are stored" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads(config) | {"dtype": "float8_e4m3fn"})
    )
    facts = as_json(tmp_path)
    assert (facts["dtype"], facts["dtype_source"]) == (None, None)
    assert "dtype 'float8_e4m3fn' is not implemented" in facts["obstacle"]


def test_what_a_model_pools_and_that_its_head_is_read(as_json, capsys, tmp_path):
    head = transformers.AutoModelForSequenceClassification
    scorer = save_encoder(tmp_path / "scorer", "bert", head, num_labels=1)
    facts = as_json(scorer)
    assert (facts["runs"], facts["skipped"]) == ("natively", {})
    assert facts["pooling"].startswith("the state of the first token, 1 scores")
    inspect(str(scorer), False)
    assert "the state of the first token" in capsys.readouterr().out
    embedder = save_encoder(tmp_path / "embedder", "bert")
    facts = as_json(embedder)
    assert facts["pooling"].startswith("the mean of all states, an embedding of 32 numbers")
    assert facts["skipped"] == {"of a head that is not used": 2}
    assert as_json("demo")["pooling"] is None


@pytest.mark.parametrize(
    ("name", "layers", "says"),
    [
        ("mimo", 1, "1 layer predicts further tokens, {}: drafts on a CPU"),
        ("deepseek-v3-two", 2, "2 layers predict further tokens, {}: the first of them drafts"),
        ("qwen3-5", 1, "1 layer predicts further tokens, {}: drafts on a CPU"),
    ],
)
def test_layers_that_predict_further_tokens(as_json, capsys, tmp_path, name, layers, says):
    saved = save(CASES[name], tmp_path)
    facts = as_json(tmp_path)
    size = 0
    for tensor, value in load_file(tmp_path / "model.safetensors").items():
        layer = saved.case.layer.format(saved.main_layers * saved.case.follows)
        later = saved.case.layer.format(saved.main_layers + 1)
        roots = (layer, saved.case.outer or layer, later)
        size += value.nbytes * tensor.startswith(roots)
    assert facts["predicting"] == {"layers": layers, "bytes": size}
    assert facts["skipped"]["of a layer that predicts further tokens"] > 0
    inspect(str(tmp_path), False)
    line = " ".join(capsys.readouterr().out.split())
    assert says.format(f"{size / 2**20:,.2f} MiB") in line
    assert as_json("demo")["predicting"] is None


def test_pooling_that_is_not_implemented_stands_in_the_way(as_json, tmp_path):
    model = save_encoder(tmp_path, "bert")
    (model / "modules.json").write_text("[]")
    facts = as_json(model)
    assert facts["runs"] is None
    assert "modules.json" in facts["obstacle"]


def test_damage_is_an_error_still(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="list, not a JSON object"):
        inspect(str(tmp_path), True)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="freight convert"):
        inspect(str(tmp_path), True)
