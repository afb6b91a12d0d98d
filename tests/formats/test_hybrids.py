"""Models whose layers keep a state, in the FP8 forms of their producers: what they compute, that no
scale is unused, and that those which freight quantize writes are near the model that they were made
from."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.formats import hybrids
from tests.formats.hybrids import (
    CASES,
    FORMS,
    LONG,
    MODELS,
    PROMPTS,
    QWEN_MOE,
    make,
    save_unrounded,
)
from tests.refusals import refuses
from tests.shares import one_in
from tests.unit.models.test_sizes import require_equal
from torch import Tensor
from transformers import Qwen3NextConfig

import freight
from freight import LLM, SamplingParams
from freight.cli.inspect import describe
from freight.errors import CheckpointError, ConfigError
from freight.lab.audit.effects import Engine, view
from freight.lab.audit.facts import read_facts
from freight.model.open import open_checkpoint, open_model
from freight.settings.engine import EngineArgs

WIDE = {"dtype": "float32", "kv_cache_dtype": "float32"}
CALIBRATION = [torch.randint(3, 64, (100,), generator=torch.Generator().manual_seed(5)).tolist()]
ATTENTION = {
    "qwen3_5": 1,
    "qwen3_next": 1,
    "nemotron_h": 2,
    "granitemoehybrid": 1,
}  # the layer that has it


def attention_of(family: str) -> int:
    return ATTENTION[family.removesuffix("_moe").removesuffix("_latent")]


def logprobs(folder: str, prompts: list[list[int]] = PROMPTS, **options: str) -> Tensor:
    """As `Hybrid.logprobs`."""
    llm = LLM(model=folder, skip_tokenizer_init=True, max_num_seqs=1, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    found = [[row[token].logprob for row, token in zip(output.prompt_logprobs or [], prompt, strict=True) if row]
             for output, prompt in zip(outputs, prompts, strict=True)]  # fmt: skip
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("name", "family"), one_in(2, [case for case in CASES if FORMS[case[0]].said is not None])
)
def test_weights_are_those_of_the_dequantized_model(name: str, family: str, tmp_path: Path) -> None:
    """With inputs as they are, nothing is rounded beside the weights."""
    made = make(FORMS[name].of_weights_alone(), family)
    expected = made.logprobs(tmp_path / "plain", LONG)
    assert expected.std() > 0.3
    torch.testing.assert_close(
        logprobs(made.save(tmp_path / "fp8"), LONG, **WIDE), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("name", "family"), one_in(3, CASES))
def test_logits_are_those_of_the_dequantized_model(name: str, family: str, tmp_path: Path) -> None:
    """Sums in another order round an input to another code now and then, which changes a prompt
    from there on.
    """
    made = make(FORMS[name], family)
    expected = made.logprobs(tmp_path / "plain", PROMPTS)
    difference = (logprobs(made.save(tmp_path / "fp8"), **WIDE) - expected).abs()
    assert (difference < 1e-4).sum() >= 16, difference
    assert difference.max() < 0.3, difference


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), CASES)
def test_every_scale_changes_the_output(name: str, family: str, tmp_path: Path) -> None:
    """Half of a tensor's scales three times as large: norms behind a product undo what all its rows
    have in common.
    """
    made = make(FORMS[name], family)
    before = logprobs(made.save(tmp_path), kv_cache_dtype="fp8")
    for scale in made.one_of_each_kind():
        kept = made.tensors[scale]
        factor = torch.where(
            torch.arange(kept.numel()) < max(1, kept.numel() // 2), 3.0, 1.0
        ).reshape(kept.shape)
        made.tensors[scale] = (kept.float() * factor).to(kept.dtype)
        assert not torch.equal(logprobs(made.save(tmp_path), kv_cache_dtype="fp8"), before), scale
        made.tensors[scale] = kept


@pytest.mark.parametrize(("name", "family"), CASES)
def test_headers_say_what_is_there(name: str, family: str, tmp_path: Path) -> None:
    """KV scales of the one layer with attention and of no other part; all FP8 matrices declared;
    bytes as counted.
    """
    made = make(FORMS[name], family)
    folder = made.save(tmp_path)
    scales, kv = open_checkpoint(folder).kv_scales, made.form.kv
    assert scales.missing == (() if kv else (attention_of(family),))
    assert [index for index, layer in enumerate(scales.layers) if layer] == [
        attention_of(family)
    ] * bool(kv)
    assert all(
        layer is None or (layer.k, layer.v) == (layer.k, (2 * layer.k[0],))
        for layer in scales.layers
    )

    facts = describe(folder)
    assert "not declared" not in facts["scheme"]["fp8_weights"]
    assert ("of a layer that predicts further tokens" in facts["skipped"]) == (
        family != "granitemoehybrid"
    )
    without = [
        entry["layer"]
        for entry in facts["kv_cache"]["scales"]
        if not entry.get("stores_keys", True)
    ]
    assert without == [i for i in range(facts["num_layers"]) if i != attention_of(family)] * bool(
        kv
    )

    opened = open_model(EngineArgs(folder, skip_tokenizer_init=True))
    require_equal(opened, "auto", opened.scheme.linear)


@pytest.mark.parametrize(("name", "family"), one_in(3, CASES))
def test_a_missing_scale_is_named(name: str, family: str, tmp_path: Path) -> None:
    made = make(FORMS[name], family)
    for scale in [
        n for n in made.one_of_each_kind() if re.search(r"(weight|proj)_scale(_inv)?$", n)
    ][:2]:
        kept = made.tensors.pop(scale)
        with pytest.raises(CheckpointError, match=r"_scale\w* is missing"):
            LLM(model=made.save(tmp_path), skip_tokenizer_init=True)
        made.tensors[scale] = kept


@pytest.mark.parametrize("name", ["qwen3.5's own blocks", "ct tensor static"])
@pytest.mark.parametrize("rest", [r"in_proj_a\.", r"nothing"])
def test_gates_in_fp8_run_too(
    name: str, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or both of in_proj_a and in_proj_b, by a recipe that does not leave them out: they may
    not be mergeable.
    """
    monkeypatch.setattr(
        hybrids, "ALWAYS_PLAIN", hybrids.ALWAYS_PLAIN.replace(r"in_proj_(a|b|ba)\.", rest)
    )
    form = FORMS[name]
    assert form.said is not None
    key = "ignore" if "ignore" in form.said else "modules_to_not_convert"
    left_out = [one for one in form.said[key] if "in_proj_" not in one]
    left_out += [f"re:.*{rest[:-2]}$"] * rest.startswith("in")
    made = make(replace(form, said=form.said | {key: left_out}).of_weights_alone(), "qwen3_5")
    assert "model.language_model.layers.0.linear_attn.in_proj_b" in made.quantized
    expected = made.logprobs(tmp_path / "plain", LONG)
    torch.testing.assert_close(
        logprobs(made.save(tmp_path / "fp8"), LONG, **WIDE), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("changes", "module"), [({"linear_key_head_dim": 64}, "in_proj_qkvz"),
                                                 ({"linear_value_head_dim": 32}, "in_proj_qkvz"),
                                                 ({"head_dim": 64}, "q_proj")])  # fmt: skip
def test_blocks_that_span_parts_of_heads_are_refused(
    changes: dict[str, int], module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read and written alike: their rows are taken apart, and one scale would be for two parts."""
    family = f"qwen3_next {changes}"
    monkeypatch.setitem(MODELS, family, Qwen3NextConfig(**QWEN_MOE | changes))
    folder = make(FORMS["qwen3-next's own blocks"], family).save(tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=rf"{module}.*span blocks of 128 x 128 scales"):
        LLM(model=folder, skip_tokenizer_init=True)
    plain = save_unrounded(family, tmp_path / "plain")
    with refuses(ConfigError, module, "rows for each head"):
        freight.quantize(plain, tmp_path / "out", weights="fp8-block", kv_cache="none")


WEIGHTS: tuple[dict[str, Any], ...] = (
    {"weights": "fp8", "activations": "static"},
    {"weights": "fp8", "activations": "dynamic", "format": "fp8"},
    {"weights": "fp8-channel"},
    {"weights": "fp8-block"},
    {"weights": "fp8-block", "format": "fp8"},
)
IN_16_BITS = r"embed|lm_head|visual|mtp|norm|linear_attn\.in_proj_(a|b|ba)\.|\.gate\.|shared_expert_gate|conv1d|router"


FAMILIES = ("qwen3_5", "qwen3_next", "nemotron_h_latent", "granitemoehybrid")


@pytest.mark.parametrize(("family", "at"), one_in(3, product(FAMILIES, range(len(WEIGHTS)))))
def test_what_is_written_is_near_its_source(family: str, at: int, tmp_path: Path) -> None:
    plain, out = save_unrounded(family, tmp_path / "plain"), tmp_path / "out"
    options = {**WEIGHTS[at], "kv_cache": "fp8", "calibration_data": CALIBRATION}
    if family == "granitemoehybrid" and "block" in options["weights"]:
        with refuses(ConfigError, "span", "gate", "up"):
            freight.quantize(plain, out, **options)
        return
    freight.quantize(plain, out, **options)
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    for name, one in after.items():
        if one.ndim == 2 and "scale" not in name:
            assert (one.dtype is torch.float8_e4m3fn) != bool(re.search(IN_16_BITS, name)), name
        if one.dtype is not torch.float8_e4m3fn and name in before:
            assert torch.equal(one, before[name])
    mixer = "mixer" if "nemotron" in family else "self_attn"
    kv = [name.partition("layers.")[2] for name in after if name.endswith((".k_scale", ".v_scale"))]
    assert sorted(kv) == [f"{attention_of(family)}.{mixer}.{side}_scale" for side in "kv"]

    exact, found = (logprobs(str(folder), LONG, dtype="float32") for folder in (plain, out))
    assert (
        0 < (found - exact).abs().mean() < 0.4 * exact.std()
    )  # rounded weights alone: 0.33 by transformers
    engine = view(Engine.VLLM, "0.33", read_facts(out)[1])
    assert [layer.layer for layer in engine.layers] == [attention_of(family)]
    assert not engine.unit


def test_a_model_without_a_number_of_layers_is_audited(tmp_path: Path) -> None:
    """Nemotron's config.json lists the kinds of its layers."""
    made = make(FORMS["modelopt"], "nemotron_h_moe")
    made.config.pop("num_hidden_layers", None)
    facts = read_facts(Path(made.save(tmp_path)))[1]
    assert (facts.num_layers, facts.without_keys) == (5, frozenset({0, 1, 3, 4}))
    assert [one.name for one in facts.stored] == [
        f"backbone.layers.2.mixer.{x}_proj.{x}_scale" for x in "kv"
    ]
