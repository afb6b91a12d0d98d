"""The tables of engines' loaders, and the interpreter of their sources that wrote them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_rules import OUTPUT, generate
from engine_sources.modules import ClassRef, Tree
from engine_sources.probe import probe
from engine_sources.values import UNKNOWN

from freight.lab.audit.families import family_of, known, tables
from freight.lab.audit.rules import READ, Effect, Engine

SOURCES = os.environ.get("FREIGHT_ENGINE_SOURCES", "")
PLAIN, INSIDE, MODELOPT = "self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale"
# Lines that people found in SGLang 0.5.23 and TGI 3.3.7 by reading; the interpreter has to come to
# the same ones.
READ_BY_HAND = [
    (
        Engine.SGLANG,
        "0.5.23",
        "GraniteForCausalLM",
        PLAIN,
        Effect.REFUSED,
        "sglang/srt/models/granite.py:472",
    ),
    (
        Engine.SGLANG,
        "0.5.23",
        "MixtralForCausalLM",
        MODELOPT,
        Effect.REFUSED,
        "sglang/srt/models/mixtral.py:435",
    ),
    (
        Engine.SGLANG,
        "0.5.23",
        "Exaone4ForCausalLM",
        PLAIN,
        Effect.USED,
        "sglang/srt/models/exaone4.py:",
    ),
    (
        Engine.SGLANG,
        "0.5.23",
        "Ministral3ForCausalLM",
        PLAIN,
        Effect.USED,
        "sglang/srt/models/llama.py:",
    ),
    (Engine.TGI, "3.3.7", "granite", PLAIN, Effect.USED, "flash_llama_modeling.py:"),
    (
        Engine.VLLM,
        "0.33",
        "LlamaForCausalLM",
        PLAIN,
        Effect.USED,
        "vllm/model_executor/models/llama.py:",
    ),
]


@pytest.mark.parametrize(("engine", "version", "family", "tail", "effect", "line"), READ_BY_HAND)
def test_the_interpreter_comes_to_the_lines_that_people_found(
    engine: Engine, version: str, family: str, tail: str, effect: Effect, line: str
):
    found = known(engine, version, family, tail, "fp8", "tensor")
    assert found is not None
    assert found.effect is effect
    assert line in found.source


@pytest.mark.parametrize(("engine", "version", "least"), [("vllm", "0.32", 30), ("vllm", "0.33", 30),
                                                          ("sglang", "0.5.23", 30), ("tgi", "3.3.7", 10)])  # fmt: skip
def test_enough_families_and_forms_are_known(engine: str, version: str, least: int):
    content = tables()
    families = content["engines"][engine][version]["families"]
    pairs = [
        (family, form)
        for family, row in families.items()
        for forms in list(content["profiles"][row["profile"]].values())[:1]
        for form in forms
    ]
    assert len(families) >= least
    assert len(pairs) >= 3 * least
    for family, row in families.items():
        for situation, forms in content["profiles"][row["profile"]].items():
            assert set(forms.values()) <= row["at"].keys(), (
                f"{family} {situation}: an effect without a line"
            )


def test_every_version_that_was_read_has_its_table_but_the_oldest():
    for engine, versions in READ.items():
        assert {one for one in versions if one != "0.6.3"} == set(tables()["engines"][engine])


def test_a_model_without_architectures_is_found_by_its_model_type():
    assert family_of(Engine.VLLM, "", "llama") == "LlamaForCausalLM"
    assert family_of(Engine.VLLM, "Other", "llama") == "Other"
    assert family_of(Engine.TGI, "Other", "llama") == "llama"
    assert family_of(Engine.SGLANG, "", "a_new_family") == "a_new_family"


@pytest.mark.slow
@pytest.mark.skipif(
    not SOURCES, reason="FREIGHT_ENGINE_SOURCES names no folder of unpacked engines"
)
def test_the_sources_give_the_file():
    assert generate(Path(SOURCES)) == OUTPUT.read_text(encoding="utf-8")


MODEL = """
from torch import nn
from pack.layers import RadixAttention, remap, default_weight_loader

class Attention_(nn.Module):
    def __init__(self, quant_config):
        self.attn = RadixAttention(1, {quantized})

class Layer(nn.Module):
    def __init__(self, quant_config):
        self.self_attn = Attention_(quant_config)

class Base(nn.Module):
    def __init__(self, config, quant_config):
        self.layers = [Layer(quant_config)]

    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        for name, tensor in weights:
{body}

class TinyForCausalLM(Base):
    pass
"""
LAYERS = """
from torch import nn
class RadixAttention(nn.Module):
    pass
def remap(name, params):
    new = name.replace(".k_scale", ".attn.k_scale").replace(".v_scale", ".attn.v_scale")
    return new if new in params else None
"""
LOAD = (
    "param = params_dict[name]\n"
    "loader = getattr(param, 'weight_loader', default_weight_loader)\n"
    "loader(param, tensor)"
)


@pytest.mark.parametrize(
    ("body", "form", "effect"),
    [
        ("name = remap(name, params_dict)\nif name is None:\n    continue\n" + LOAD, "plain", "uses"),
        ("name = remap(name, params_dict)\nif name is None:\n    continue\n" + LOAD, "inside", "drops"),
        (LOAD, "plain", "stops: KeyError"),
        (LOAD, "inside", "uses"),
        ("if name not in params_dict:\n    continue\n" + LOAD, "plain", "drops"),
        ("if name not in params_dict:\n    raise RuntimeError(name)\n" + LOAD, "plain", "stops: RuntimeError"),
        # The configuration decides, and nothing is known of it.
        ("if self.config.skip:\n    continue\n" + LOAD, "inside", "unknown"),
        # It does not matter which way is taken.
        ("if self.config.fast:\n    pass\n" + LOAD, "inside", "uses"),
        ("if self.config.fast and 'lm_head' in name:\n    continue\n" + LOAD, "inside", "uses"),
        # A loader that cannot be read.
        ("self.magic(name, tensor, params_dict)", "inside", "unknown"),
        ("while True:\n    break\n" + LOAD, "inside", "unknown"),
        # V's tensor goes into K's parameter.
        ("name = name.replace('v_scale', 'k_scale')\n" + LOAD, "inside", "unknown"),
        (LOAD.replace("loader(param, tensor)", "param.data.copy_(tensor)"), "inside", "unknown"),
        ("for old, new in (('k_proj', 'qkv_proj'), ('v_proj', 'qkv_proj')):\n    if old in name:\n"
         "        name = name.replace(old, new)\n        break\nelse:\n    continue\n" + LOAD, "modelopt",
         "stops: KeyError"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_name(tmp_path: Path, body: str, form: str, effect: str):
    assert outcome(tmp_path, body, form, "quant_config=quant_config") == effect


def test_attention_without_a_configuration_has_no_scales(tmp_path: Path):
    assert (
        outcome(
            tmp_path, "if name not in params_dict:\n    continue\n" + LOAD, "inside", "prefix=''"
        )
        == "drops"
    )


def outcome(folder: Path, body: str, form: str, quantized: str) -> str:
    """The effect of a model of three classes whose loader is `body`."""
    package = folder / "pack"
    (package / "models").mkdir(parents=True)
    indented = "\n".join(f"            {line}" for line in body.splitlines())
    (package / "__init__.py").write_text("")
    (package / "models" / "__init__.py").write_text("")
    (package / "layers.py").write_text(LAYERS)
    (package / "models" / "tiny.py").write_text(MODEL.format(body=indented, quantized=quantized))
    module = Tree(folder, "pack").module("pack.models.tiny")
    assert module is not None
    cls = module.resolve("TinyForCausalLM")
    assert isinstance(cls, ClassRef)
    return probe(cls, form, True, UNKNOWN).effect
