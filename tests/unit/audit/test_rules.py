"""The table of rules, name by name, and what becomes of a layer that lacks a side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import ConfigError
from freight.lab.audit.effects import Facts, StoredScale, parse_engine, view
from freight.lab.audit.rules import (
    ASSEMBLIES,
    AUTO_RULES,
    INPUT_RULES,
    NAME_RULES,
    READ,
    Effect,
    Engine,
)

K, V = "self_attn.k_scale", "self_attn.v_scale"
INSIDE = ("self_attn.attn.k_scale", "self_attn.attn.v_scale")
MODELOPT = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
OUTPUT = ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")
FUSED = ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale")
BOTH = ("self_attn.kv_scale",)


def facts(
    *names: str,
    method: str = "fp8",
    strategy: str = "tensor",
    model_type: str = "llama",
    values: int = 1,
    architecture: str = "",
) -> Facts:
    stored = tuple(
        StoredScale(
            f"model.layers.0.{name}",
            0,
            "kv" if "kv_scale" in name else "k" if ".k_" in name else "v",
            tuple(0.5 + i for i in range(values)),
        )
        for name in names
    )
    return Facts(
        method, strategy, strategy != "none", model_type, 1, stored, architecture=architecture
    )


def effects(engine: str, seen: Facts) -> tuple[Effect, Effect]:
    layer = view(*parse_engine(engine), seen).layers[0]
    return layer.k.effect, layer.v.effect


USED, IGNORED, ONE, REFUSED = Effect.USED, Effect.IGNORED, Effect.ONE, Effect.REFUSED
CONVERTED, UNKNOWN = Effect.CONVERTED, Effect.UNKNOWN
CT = {"method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("engine", "names", "given_facts", "expected"),
    [
        ("vllm", (K, V), {}, USED),
        ("vllm", MODELOPT, {"method": "modelopt"}, USED),
        ("vllm", FUSED, CT, USED),
        ("vllm", INSIDE, CT, USED),
        ("vllm", OUTPUT, {"method": "quark"}, USED),
        ("vllm", OUTPUT, CT, REFUSED),
        ("vllm", BOTH, {}, CONVERTED),
        ("vllm", (K, V), {"method": "none", "strategy": "none"}, REFUSED),
        ("vllm", (K, V), {"method": "fbgemm_fp8"}, IGNORED),
        ("vllm", (K, V), {"values": 2}, REFUSED),
        ("vllm", (K, V), {**CT, "strategy": "attn_head", "values": 2}, USED),
        ("vllm=0.6.3", (K, V), {}, USED),
        ("vllm=0.6.3", BOTH, CT, CONVERTED),
        ("vllm=0.6.3", OUTPUT, CT, USED),
        ("vllm=0.6.3", MODELOPT, {"method": "modelopt"}, IGNORED),
        ("vllm=0.6.3", INSIDE, {}, IGNORED),
        ("vllm=0.6.3", (K, V), {"method": "none"}, IGNORED),
        ("sglang", (K, V), {}, USED),
        ("sglang", (K, V), {"method": "none", "strategy": "none"}, IGNORED),
        ("sglang", INSIDE, {}, IGNORED),
        ("sglang", FUSED, {}, IGNORED),
        ("sglang", MODELOPT, {"method": "modelopt"}, USED),
        ("sglang", OUTPUT, {"method": "quark"}, USED),
        ("sglang", (K, V), {"model_type": "qwen3_moe"}, IGNORED),
        ("sglang", (K, V), {"model_type": "qwen2"}, IGNORED),
        *(("sglang", (K, V), {"model_type": kind}, IGNORED) for kind in ("mixtral", "qwen2_moe")),
        *(("sglang", INSIDE, {"model_type": kind}, USED) for kind in ("mixtral", "qwen2_moe")),
        *(
            ("vllm", (K, V), {"model_type": kind}, USED)
            for kind in ("mixtral", "qwen2_moe", "qwen3_moe")
        ),
        ("tgi", (K, V), {"model_type": "mixtral"}, USED),
        *(("tgi", (K, V), {"model_type": kind}, IGNORED) for kind in ("qwen2_moe", "qwen3_moe")),
        ("sglang", (K, V), {**CT, "strategy": "attn_head", "values": 2}, IGNORED),
        ("tgi", (K, V), {"method": "none"}, USED),
        ("tgi", MODELOPT, {"method": "modelopt"}, IGNORED),
        ("tgi", OUTPUT, CT, IGNORED),
        ("tgi", (K, V), {"values": 2}, REFUSED),
        ("tgi", (K, V), {"model_type": "qwen3"}, IGNORED),
        *((engine, (), {}, ONE) for engine in Engine),
        # Families that SGLang serves through a loader of their own, or through Llama's.
        *(
            ("sglang", (K, V), {"architecture": name}, USED)
            for name in (
                "Exaone4ForCausalLM",
                "ArceeForCausalLM",
                "MiniMaxM2ForCausalLM",
                "Ministral3ForCausalLM",
                "PhiMoEForCausalLM",
                "CohereForCausalLM",
                "Gemma4ForCausalLM",
            )
        ),
        # Their attention is given no quantization, so it has no scales to load into.
        ("sglang", (K, V), {"architecture": "HunYuanDenseV1ForCausalLM"}, IGNORED),
        *(
            ("sglang", names, {"model_type": kind}, IGNORED)
            for kind in ("qwen3", "qwen3_moe")
            for names in ((K, V), INSIDE)
        ),
        ("sglang", (K, V), {"model_type": "granite"}, REFUSED),
        ("sglang", MODELOPT, {"model_type": "mixtral"}, REFUSED),
        ("tgi", (K, V), {"model_type": "granite"}, USED),
        # What was not read is not known, whatever the name.
        *((engine, (K, V), {"model_type": "a_new_family"}, UNKNOWN) for engine in Engine),
        ("vllm", (K, V), {"method": "a_new_method"}, UNKNOWN),
        ("sglang", (K, V), {"method": "a_new_method"}, UNKNOWN),
        ("vllm=0.6.3", (K, V), {"model_type": "qwen2"}, UNKNOWN),
    ],
)
def test_names(engine: str, names: tuple[str, ...], given_facts: dict[str, str], expected: Effect):
    assert effects(engine, facts(*names, **given_facts)) == (expected, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "name", "method", "expected"),
    [
        ("vllm", K, "fp8", (CONVERTED, CONVERTED)),
        ("vllm", V, "fp8", (REFUSED, REFUSED)),
        ("vllm", K, "compressed-tensors", (USED, ONE)),
        ("vllm", BOTH[0], "compressed-tensors", (USED, IGNORED)),
        ("sglang", V, "fp8", (REFUSED, REFUSED)),
        ("tgi", K, "fp8", (IGNORED, ONE)),
    ],
)
def test_one_side_alone(engine: str, name: str, method: str, expected: tuple[Effect, Effect]):
    assert effects(engine, facts(name, method=method)) == expected


def test_a_scale_that_is_not_used_is_1():
    layer = view(Engine.SGLANG, "0.5.23", facts(K, V, model_type="mixtral")).layers[0]
    assert (layer.k.values, layer.v.values) == ((1.0,), (1.0,))
    assert layer.k.name.endswith(K)
    assert "sglang/srt/models/mixtral.py:" in layer.k.source


def test_tgi_rounds_kv_scale_to_the_model_s_dtype():
    stored = facts(*BOTH)
    rounded = Facts(**{**vars(stored), "rounded": ((stored.stored[0].name, 0.4990234375),)})
    assert view(Engine.TGI, "3.3.7", rounded).layers[0].k.values == (0.4990234375,)
    assert effects("tgi", rounded) == (CONVERTED, CONVERTED)


def test_fp8_without_being_asked():
    assert view(Engine.VLLM, "0.33", facts(K, V, method="compressed-tensors")).auto_fp8
    assert not view(Engine.VLLM, "0.33", facts(K, V, method="fp8")).auto_fp8
    assert not view(
        Engine.VLLM, "0.33", facts(K, V, method="compressed-tensors", strategy="none")
    ).auto_fp8


def test_input_scales():
    seen = Facts(
        "fp8", "none", False, "llama", 1, (), (("activation_scale", 3), ("input_scale", 2))
    )
    by_engine = {
        engine: {n: e for n, _, e in view(engine, READ[engine][-1], seen).input_scales}
        for engine in Engine
    }
    assert by_engine[Engine.VLLM] == {"activation_scale": IGNORED, "input_scale": USED}
    assert by_engine[Engine.SGLANG]["activation_scale"] is USED


@pytest.mark.parametrize(
    "text",
    [
        "trt",
        "vllm=",
        "vllm=new",
        "vllm=0.5.0",
        "vllm=0.7",
        "vllm=0.31",
        "vllm=0.320",
        "vllm=0.34",
        "sglang=0.5.1",
    ],
)
def test_engines_that_are_not_known(text: str):
    if text == "vllm=":
        assert parse_engine(text) == (Engine.VLLM, READ[Engine.VLLM][-1])
        return
    with pytest.raises(ConfigError, match=r"0\.6\.3, 0\.32, 0\.33|0\.5\.23|choose|not a version"):
        parse_engine(text)


def test_a_patch_release_has_the_rules_of_its_version():
    assert view(Engine.VLLM, "0.32.5", facts()).rules_of == "0.32"
    assert parse_engine("tgi=2.4.1") == (Engine.TGI, "2.4.1")
    with pytest.raises(ConfigError, match=r"were not read.*2\.4, 3\.3\.7"):
        parse_engine("tgi=3.0")


def test_only_newer_versions_double_scales_for_fnuz():
    assert not view(Engine.VLLM, "0.6.3", facts(K, V)).doubled
    assert view(Engine.VLLM, "0.33", facts(K, V)).doubled
    assert not view(Engine.VLLM, "0.33", facts(K, V, method="compressed-tensors")).doubled


def test_every_rule_has_a_source_and_every_engine_an_end():
    for row in (*NAME_RULES, *ASSEMBLIES, *AUTO_RULES):
        assert row.source
    assert all(source for *_, source in INPUT_RULES)
    for rule in NAME_RULES:
        assert rule.why or rule.effect is USED, rule
    assert {row.engine for row in ASSEMBLIES} == set(Engine)


@given(
    st.sampled_from(list(Engine)),
    st.lists(st.sampled_from([K, V, *INSIDE, *MODELOPT, *OUTPUT, *FUSED, *BOTH]), unique=True),
    st.sampled_from(["fp8", "compressed-tensors", "modelopt", "quark", "awq", "none", "torchao"]),
    st.sampled_from(["llama", "qwen2", "qwen3_moe", "gemma2", "opt", "something"]),
    st.sampled_from(["tensor", "attn_head", "none"]),
    st.sampled_from([1, 2]),
)
def test_every_checkpoint_has_an_answer(
    engine: Engine, names: list[str], method: str, model_type: str, strategy: str, values: int
):
    """A side is used with a stored number, or it is 1.0; nothing else, whatever is stored."""
    seen = facts(*names, method=method, strategy=strategy, model_type=model_type, values=values)
    said = view(engine, READ[engine][-1], seen)
    for side in said.sides:
        if side.effect in (USED, CONVERTED):
            assert side.name
            assert side.values in {one.values for one in seen.stored}
        else:
            assert side.values == (() if side.effect is UNKNOWN else (1.0,))
    assert bool(said.refusal) == any(side.effect is REFUSED for side in said.sides)
