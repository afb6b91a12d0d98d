"""Where config.json and the tensors of a checkpoint contradict each other, the tensors count, with a
line; and what is stored matters only where it is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.four_bits import FORMS, write
from tests.refusals import refuses
from torch import Tensor

import freight
from freight import LLM
from freight.checkpoint.merge import merge
from freight.checkpoint.reader import Checkpoint, untied
from freight.errors import CheckpointError
from freight.lab.audit.facts import read_facts
from freight.lab.audit.repair import choose_form, write_repaired
from freight.lab.audit.rules import READ, Engine
from freight.model.decoder import Decoder
from freight.model.open import open_checkpoint, open_model
from freight.settings.engine import EngineArgs
from freight.settings.kv_source import uniform_scales

DEMO = Path(freight.__file__).parent / "demo"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj"
KV_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "kv_cache_scheme": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False,
    },
}  # fmt: skip


@dataclass
class Model:
    """A copy of the demo model, to be changed and saved."""

    folder: Path
    tensors: dict[str, Tensor]
    config: dict = field(default_factory=dict)

    def save(self) -> str:
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        (self.folder / "config.json").write_text(json.dumps(self.config))
        return str(self.folder)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    return Model(folder, load_file(folder / "model.safetensors"), config)


def loaded(folder: str, **options: object) -> Decoder:
    args = EngineArgs(
        folder, device="cpu", kernels="reference", skip_tokenizer_init=True, **options
    )
    opened = open_model(args)
    decoder = opened.load(opened.resolve(args))
    assert isinstance(decoder, Decoder)
    return decoder


def head_of(decoder: Decoder) -> Tensor:
    return decoder.head.weight.dequantized()


def lines(caplog: pytest.LogCaptureFixture, word: str) -> int:
    return sum(word in record.getMessage() for record in caplog.records)


def test_a_stored_head_counts_where_config_says_that_it_is_tied(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Full fine-tunes and merged adapters are saved so; transformers unties, and warns."""
    assert model.config["tie_word_embeddings"] is True
    model.tensors[HEAD] = model.tensors[EMBEDDING].flip(0).contiguous()
    folder = model.save()
    decoder = loaded(folder)
    assert torch.equal(head_of(decoder).bfloat16(), model.tensors[HEAD])
    assert torch.equal(decoder.embedding.weight, model.tensors[EMBEDDING])
    assert lines(caplog, "tie_word_embeddings") == 1
    freight.quantize(folder, tmp_path / "out", weights="fp8")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[HEAD], model.tensors[HEAD])
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["tie_word_embeddings"] is False
    freight.quantize(folder, tmp_path / "head", weights="fp8", lm_head=True)
    assert load_file(tmp_path / "head" / "model.safetensors")[HEAD].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("kind", ["copy", "empty"])
def test_a_stored_head_that_is_the_embedding_stays_tied_in_silence(
    kind: str, model: Model, caplog: pytest.LogCaptureFixture
):
    same = model.tensors[EMBEDDING].clone()
    model.tensors[HEAD] = same if kind == "copy" else torch.empty(0, dtype=torch.bfloat16)
    opened = open_checkpoint(model.save())
    assert opened.model.tie_word_embeddings
    assert lines(caplog, "tie_word_embeddings") == 0
    assert torch.equal(head_of(loaded(str(model.folder))).bfloat16(), same)


def test_a_head_alone_is_the_embedding_too(model: Model):
    """Tools that store one of two shared tensors may store either."""
    model.tensors[HEAD] = model.tensors.pop(EMBEDDING)
    decoder = loaded(model.save())
    assert torch.equal(decoder.embedding.weight, model.tensors[HEAD])


def test_a_bias_of_a_tied_head_is_not_dropped(model: Model):
    model.tensors["lm_head.bias"] = torch.ones(len(model.tensors[EMBEDDING]), dtype=torch.bfloat16)
    model.tensors[HEAD] = model.tensors[EMBEDDING].clone()
    with refuses(CheckpointError, "lm_head.bias", "config.json"):
        loaded(model.save())


def test_a_head_in_fp8_is_used_where_config_says_that_it_is_tied(model: Model, tmp_path: Path):
    model.config["tie_word_embeddings"] = False
    model.tensors[HEAD] = model.tensors[EMBEDDING].flip(0).contiguous()
    freight.quantize(model.save(), tmp_path / "out", weights="fp8", lm_head=True)
    expected = head_of(loaded(str(tmp_path / "out")))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": True})
    )
    assert torch.equal(head_of(loaded(str(tmp_path / "out"))), expected)


def test_every_key_that_ties_is_changed():
    text = {"text_config": {"tie_embedding": True, "x": 1}, "tie_word_embeddings": True}
    expected = {"text_config": {"tie_embedding": False, "x": 1}, "tie_word_embeddings": False}
    assert untied(text) == expected


def adapter_of(folder: Path, module: str, outputs: int, inputs: int) -> str:
    folder.mkdir()
    draw = torch.Generator().manual_seed(1)
    prefix = f"base_model.model.{module}"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(2, inputs, generator=draw),
        f"{prefix}.lora_B.weight": torch.randn(outputs, 2, generator=draw),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["x"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("stored", ["other", "copy"])
def test_an_adapter_of_a_head_that_is_stored_and_tied_is_merged(
    stored: str, model: Model, tmp_path: Path
):
    embedding = model.tensors[EMBEDDING]
    model.tensors[HEAD] = (embedding if stored == "copy" else embedding.flip(0)).clone()
    adapter = adapter_of(tmp_path / "adapter", "lm_head", *embedding.shape)
    result = merge(model.save(), adapter, tmp_path / "out")
    assert result.untied == (stored == "copy")
    part = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (part[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    expected = (b @ a + model.tensors[HEAD].float()).bfloat16()
    assert torch.equal(head_of(loaded(str(tmp_path / "out"))).bfloat16(), expected)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["tie_word_embeddings"] is False


@pytest.mark.parametrize("body", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_text_model_is_merged_into_one_of_text_and_pictures(
    body: str, tmp_path: Path
):
    name = f"{body}layers.0.self_attn.q_proj.weight"
    base = tmp_path / "base"
    base.mkdir()
    stored = {name: torch.ones(6, 4), "model.visual.blocks.0.proj.weight": torch.ones(6, 4)}
    save_file(stored, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    adapter = adapter_of(tmp_path / "adapter", Q, 6, 4)
    assert merge(str(base), adapter, tmp_path / "out").num_changed == 1
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(written[name], stored[name])


def put_scales(model: Model, spoil: Callable[[dict[str, Tensor]], object]) -> str:
    for layer in range(6):
        for side in "kv":
            name = f"model.layers.{layer}.self_attn.{side}_scale"
            model.tensors[name] = torch.tensor([0.03])
    spoil(model.tensors)
    model.config["quantization_config"] = KV_CACHE
    return model.save()


K2 = "model.layers.2.self_attn.k_scale"
SPOILED: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "zero": lambda tensors: tensors[K2].zero_(),
    "nan": lambda tensors: tensors[K2].fill_(torch.nan),
    "negative": lambda tensors: tensors[K2].neg_(),
    "shape": lambda tensors: tensors.update({K2: torch.ones(5)}),
    "integers": lambda tensors: tensors.update({K2: torch.ones(1, dtype=torch.int32)}),
    "two values": lambda tensors: tensors.update(
        {"model.layers.2.self_attn.attn.k_scale": torch.ones(1)}
    ),
    "bias": lambda tensors: tensors.update(
        {"model.layers.2.self_attn.k_proj.k_bias": torch.ones(1)}
    ),
    "zero point": lambda tensors: tensors.update(
        {"model.layers.2.self_attn.k_zero_point": torch.ones(1)}
    ),
}


UNUSED = (
    {"kv_scales": "dynamic"},
    {"kv_scales": "0.03"},
    {"kv_cache_dtype": "bfloat16"},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype_skip_layers": ("2",)},
)


@pytest.mark.parametrize("kind", list(SPOILED))
def test_kv_scales_that_cannot_be_used_stop_what_uses_them_alone(
    kind: str, model: Model, tmp_path: Path
):
    folder = put_scales(model, SPOILED[kind])
    with pytest.raises(CheckpointError, match=r"layers\.2\..*--kv-scales dynamic"):
        LLM(folder, skip_tokenizer_init=True)
    for number, options in enumerate(UNUSED):
        opened = open_model(EngineArgs(folder, device="cpu", skip_tokenizer_init=True, **options))
        config = opened.resolve(opened.args)
        if number == list(SPOILED).index(kind) % len(UNUSED):
            opened.load(config)
    freight.quantize(folder, tmp_path / "out", weights="fp8")
    assert not any("k_scale" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


def test_a_side_file_that_is_missing_stops_what_uses_it_alone(model: Model):
    named = {"file": "freight_kv_scales.json", "sha256": "0" * 64}
    model.config["freight"] = {"kv_scales": named}
    folder = model.save()
    with refuses(CheckpointError, "freight_kv_scales.json", "cannot be read"):
        LLM(folder, skip_tokenizer_init=True)
    loaded(folder, kv_cache_dtype="bfloat16")
    loaded(folder, kv_scales="dynamic", kv_cache_dtype="fp8")


def test_audit_repairs_kv_scales_of_0(model: Model, tmp_path: Path):
    folder = put_scales(model, SPOILED["zero"])
    checkpoint, facts = read_facts(Path(folder))
    engines = [(Engine.VLLM, READ[Engine.VLLM][-1])]
    repaired = uniform_scales((0.5, 0.25), 6)
    write_repaired(checkpoint, repaired, choose_form(facts, repaired, engines), tmp_path / "out")
    layers = open_checkpoint(str(tmp_path / "out")).kv_scales.layers
    assert {(layer.k, layer.v) for layer in layers if layer} == {((0.5,), (0.25,))}


def declared_packed(model: Model, status: str) -> str:
    """Weights in 16 bits with the scales that they are to be packed with."""
    for name in [name for name in model.tensors if name.endswith("proj.weight")]:
        module, (rows, columns) = name.removesuffix("weight"), model.tensors[name].shape
        scale = torch.zeros(rows, columns // 128, dtype=torch.bfloat16)
        zeros = torch.full((rows, columns // 128), 3, dtype=torch.int8)
        model.tensors |= {f"{module}weight_scale": scale, f"{module}weight_zero_point": zeros}
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True,
    }  # fmt: skip
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": status,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return model.save()


def test_weights_that_are_not_compressed_yet_run_as_they_are_stored(model: Model):
    plain = dict(model.tensors)
    down = loaded(declared_packed(model, "frozen")).layers[1].mlp.down.weight
    expected = plain["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(down.dequantized().bfloat16(), expected)


def test_the_way_out_of_weights_that_are_said_to_be_compressed_works(model: Model):
    folder = declared_packed(model, "compressed")
    with pytest.raises(CheckpointError, match=r"quantization_status 'frozen'"):
        loaded(folder)
    model.config["quantization_config"]["quantization_status"] = "frozen"
    loaded(model.save())


@pytest.mark.parametrize(
    ("method", "file", "own"),
    [
        ("gptq", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
    ],
)
def test_a_declaration_in_the_file_of_the_tool_is_read(
    method: str, file: str, own: dict, tmp_path: Path
):
    written = write(FORMS[method])
    declared = dict(written.config.pop("quantization_config"))
    if own:
        own["q_group_size"] = declared.get("group_size", declared.get("q_group_size"))
    declared.pop("quant_method", None)
    folder = Path(written.save(tmp_path))
    with pytest.raises(CheckpointError, match=r"quantize_config\.json"):
        loaded(str(folder))
    (folder / file).write_text(json.dumps(own or declared))
    assert Checkpoint(folder).config["quantization_config"]["quant_method"] == method
    down = loaded(str(folder)).layers[1].mlp.down.weight
    assert torch.equal(down.dequantized(), written.plain["model.layers.1.mlp.down_proj.weight"])
