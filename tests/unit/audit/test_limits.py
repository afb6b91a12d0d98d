"""What audit does not know, and what it does not measure, is said and not left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names
from tests.unit.audit.conftest import CT, CT_KV, DEMO, PLAIN, Write, freight

from freight.lab.audit.effects import Facts, StoredScale, view
from freight.lab.audit.facts import read_facts
from freight.lab.audit.measure import engine_scales
from freight.lab.audit.rules import Engine
from freight.lab.audit.schemes import KVScheme, vllm_refusal
from freight.lab.audit.verdict import Cost, sentence

__all__ = ["freight"]  # the fixture is used by tests here

STORED = tuple(
    StoredScale(f"model.layers.0.self_attn.{side}_scale", 0, side, (0.5,)) for side in "kv"
)
LLAMA = Facts(
    "compressed-tensors",
    "tensor",
    True,
    "llama",
    1,
    STORED,
    scheme=KVScheme("float", 8, "tensor", True),
)
SMALL, PLAIN_COST = Cost(10.0, 0.001, 1.0), Cost(10.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({}, ""),
        ({"strategy": "attn_head"}, ""),
        ({"dynamic": True}, ""),
        ({"strategy": "channel"}, "NotImplementedError"),
        ({"strategy": "token"}, "NotImplementedError"),
        ({"strategy": "token", "dynamic": True}, "NotImplementedError"),
        ({"symmetric": None}, "NotImplementedError"),
        ({"symmetric": False}, "NotImplementedError"),
        ({"type": "int"}, "NotImplementedError"),
        ({"num_bits": 4}, "NotImplementedError"),
        ({"strategy": None}, "ValueError"),
    ],
)
@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_vllm_stops_at_schemes_that_it_does_not_have(
    write: Write, changed: dict[str, Any], error: str, version: str
):
    """None removes the key. The folder is read as a user's is."""
    scheme = {key: value for key, value in (CT_KV | changed).items() if value is not None}
    facts = read_facts(write({**CT, "kv_cache_scheme": scheme}, PLAIN))[1]
    seen = view(Engine.VLLM, version, facts)
    assert (error in seen.refusal) if error else not seen.refusal
    assert ("does not load" in sentence(seen, None, None, None)) == bool(error)


def test_0_6_3_has_no_scales_per_head():
    assert not vllm_refusal(KVScheme("float", 8, "attn_head", True), per_head=True)
    assert "NotImplementedError" in vllm_refusal(
        KVScheme("float", 8, "attn_head", True), per_head=False
    )
    unknown = KVScheme("float", 8, "column", True)  # 0.6.3 does not parse it
    refusal = vllm_refusal(unknown, per_head=False)
    assert_names(refusal, "NotImplementedError", "strategy 'column'", "tensor")
    assert "ValueError" in vllm_refusal(unknown, per_head=True)
    seen = view(
        Engine.VLLM, "0.6.3", replace(LLAMA, scheme=KVScheme("float", 8, "attn_head", True))
    )
    assert "attn_head" in seen.refusal


def test_scales_per_head_name_the_backend_that_they_need():
    per_head = replace(LLAMA, strategy="attn_head", scheme=KVScheme("float", 8, "attn_head", True))
    assert any("FlashAttention 3" in note for note in view(Engine.VLLM, "0.33", per_head).notes)
    assert not any(
        "scales per head need" in note for note in view(Engine.VLLM, "0.33", LLAMA).notes
    )


def test_options_that_leave_scales_unused_are_named():
    notes = " ".join(view(Engine.VLLM, "0.33", LLAMA).notes)
    assert "--kv-cache-dtype-skip-layers" in notes
    assert "fp8_per_token_head" in notes
    assert not view(Engine.VLLM, "0.6.3", LLAMA).notes


def test_a_safe_verdict_says_that_queries_are_quantized():
    seen = view(Engine.VLLM, "0.33", LLAMA)
    said = sentence(seen, SMALL, PLAIN_COST, SMALL)
    assert "safe on this text" in said
    assert "q_scale = 1.0" in said
    with_scale = view(Engine.VLLM, "0.33", replace(LLAMA, query_scales=1))
    assert "q_scale = 1.0" not in sentence(with_scale, SMALL, PLAIN_COST, SMALL)
    other = view(Engine.SGLANG, "0.5.23", LLAMA)
    assert "q_scale" not in sentence(other, SMALL, PLAIN_COST, SMALL)


def test_unknown_is_said_and_not_measured():
    seen = view(Engine.SGLANG, "0.5.23", replace(LLAMA, architecture="NewForCausalLM"))
    said = sentence(seen, None, None, None)
    assert_names(said, "not known", "self_attn.k_scale of NewForCausalLM", "SGLang 0.5.23")
    assert "drops" not in said
    assert engine_scales(seen) is None
    assert not seen.refusal


def test_the_command_prints_unknown(freight: Callable[..., Any], write: Write):
    path = write(CT, PLAIN)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("LlamaForCausalLM", "NewForCausalLM"))
    out = freight("audit", str(path), "--engine", "sglang", "--engine", "tgi").out
    assert "SGLang 0.5.23: not known" in out
    assert "TGI 3.3.7 with an FP8 cache uses" in out


def test_the_command_refuses_a_version_that_was_not_read(freight: Callable[..., Any]):
    answer = freight("audit", str(Path(DEMO)), "--engine", "vllm=0.20")
    assert answer.code == 2
    assert "0.6.3, 0.32, 0.33" in answer.err
