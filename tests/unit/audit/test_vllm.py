"""What the rules say of vLLM is what vLLM 0.32 does, on eight checkpoints that were loaded by it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.audit.conftest import DEMO, RECORDED, Write, freight

from freight.fp8.cast import decode, encode
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales
from freight.kernels import reference
from freight.lab.audit.effects import view
from freight.lab.audit.facts import read_facts
from freight.lab.audit.measure import engine_scales, static
from freight.lab.audit.rules import Engine
from freight.lab.audit.vllm_cpu import VllmCpuKernels, truncated
from freight.lab.evaluate.report import cache_run, plain_config
from freight.model.open import open_model
from freight.operands.kv_pages import KVPages
from freight.operands.rotary import Rotary
from freight.settings.engine import EngineArgs
from freight.text.tokenizer import Tokenizer

__all__ = ["freight"]  # the fixture is used by tests here

SAME_LOGPROBS = ("kv_scale_pairs", "modelopt_names", "kv_scale_alone")


def logprobs_as_vllm_cpu(path: Path, scales: KVScales, token_ids: list[int]) -> torch.Tensor:
    """Log-probability of token_ids[1:], float32, as vLLM's CPU kernels have them."""
    opened = open_model(EngineArgs(model=str(path), dtype="float32", kernels="reference"))
    config = replace(plain_config(opened), kv=static(scales, Format.E4M3FN))
    length = len(token_ids)
    with opened.threads(config):
        decoder = opened.load(config, length)
        runner = cache_run(opened, decoder, config, length, kernels=VllmCpuKernels()).runner
        logits = runner.logits(token_ids, 0, runner.pool.whole)
    targets = torch.tensor(token_ids[1:], dtype=torch.int64)
    return torch.log_softmax(logits[:-1], -1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("name", RECORDED)
def test_it_divides_by_the_scales_that_vllm_loaded(
    name: str, write: Write, recorded: dict[str, Any]
):
    said = view(Engine.VLLM, "0.32", read_facts(write(*RECORDED[name]))[1])
    seen = recorded["checkpoints"][name]
    if "error" in seen:
        assert said.refusal
        return
    assert not said.refusal
    assert [[*layer.k.values, *layer.v.values] for layer in said.layers] == seen["scales"]


@pytest.mark.parametrize("name", SAME_LOGPROBS)
def test_log_probabilities_are_vllm_s(name: str, write: Write, recorded: dict[str, Any]):
    """Equal to float32's noise, but where that moves a key or value over a step of E4M3: then
    within 0.02.

    Rounded to nearest, as vLLM's GPU kernels and Freight do, the mean difference is 0.09.
    """
    path = write(*RECORDED[name])
    scales = engine_scales(view(Engine.VLLM, "0.32", read_facts(path)[1]))
    assert scales is not None
    differences = []
    for ids, theirs in zip(
        recorded["token_ids"], recorded["checkpoints"][name]["logprobs"], strict=True
    ):
        ours = logprobs_as_vllm_cpu(path, scales, ids)
        differences.append((ours - torch.tensor(theirs)).abs())
    assert max(float(one.max()) for one in differences) < 0.02
    assert max(float(one.mean()) for one in differences) < 1e-3


def test_the_command_has_a_row_that_rounds_as_vllm_does_on_a_cpu(
    freight: Callable[..., Any], write: Write, tmp_path: Path
):
    """Its perplexity is that of the log-probabilities above, and not that of the row which rounds
    to nearest.
    """
    path = write(*RECORDED["kv_scale_pairs"])
    text = (DEMO / "heldout.txt").read_text()[:200]
    (tmp_path / "text").write_text(text)
    argv = [
        "audit",
        str(path),
        "--engine",
        "vllm",
        "--data",
        str(tmp_path / "text"),
        "--dtype",
        "float32",
    ]
    (said,) = json.loads(freight(*argv, "--json").out)["engines"]
    scales = engine_scales(view(Engine.VLLM, "0.33", read_facts(path)[1]))
    assert scales is not None
    token_ids = Tokenizer.load(path).encode(text)
    logprobs = logprobs_as_vllm_cpu(path, scales, token_ids)
    wanted = math.exp(-float(logprobs.double().mean()))
    assert said["cost_on_cpus"]["perplexity"] == pytest.approx(wanted, rel=2e-4)
    assert said["cost"]["perplexity"] != pytest.approx(wanted, rel=2e-3)
    out = freight(*argv).out
    assert "| as vLLM 0.33 on a CPU |" in out
    assert "rounds them towards zero" in out
    (older,) = json.loads(freight(*argv[:3], "vllm=0.6.3", *argv[4:], "--json").out)["engines"]
    assert older["cost_on_cpus"] is None


@given(st.floats(-600, 600, width=32))
def test_truncation_is_the_next_value_towards_zero(x: float):
    value = torch.tensor([x])
    got = truncated(value)
    assert decode(encode(got, 1.0, Format.E4M3FN)).equal(got), "not a value of E4M3FN"
    assert got.abs() <= value.abs()
    nearest = decode(encode(value, 1.0, Format.E4M3FN))
    assert (nearest == got) | (nearest.abs() > value.abs()), "not the next one"


def test_the_awq_checkpoint_loses_its_scales_in_silence(
    write: Write, recorded: dict[str, Any], tmp_path: Path
):
    """vLLM loaded it without a word, at 1.0 in every layer, although each layer has scales."""
    said = view(Engine.VLLM, "0.33", read_facts(write(*RECORDED["awq_method"]))[1])
    assert recorded["checkpoints"]["awq_method"]["scales"] == [[1.0, 1.0]] * 6
    assert said.lost == said.unit == tuple(range(6))


def test_queries_are_the_reference_s_with_their_factor():
    """Only what is stored is truncated."""
    torch.manual_seed(0)
    angles = torch.rand(8, 4)
    rotary = Rotary(angles.cos(), angles.sin(), q_factor=torch.linspace(1, 2, 8))
    qkv, positions, slots = torch.randn(3, 4 * 8), torch.tensor([2, 5, 7]), torch.arange(3)
    pages = [
        KVPages(*torch.zeros(2, 1, 4, 1, 8), None, None, torch.zeros(2, dtype=torch.int64))
        for _ in range(2)
    ]
    wanted = reference.rotate_store(qkv, rotary, positions, slots, pages[0])
    assert torch.equal(
        VllmCpuKernels().rotate_store(qkv, rotary, positions, slots, pages[1]), wanted
    )
    assert not torch.equal(
        wanted, reference.rotate_queries(qkv.view(3, 4, 8)[:, :2], rotary, positions - 1)
    )
