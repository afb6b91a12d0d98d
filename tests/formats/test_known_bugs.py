"""Faults that other engines had with these files. Each test fails with the engine that had the
fault.

Others of the kind are held elsewhere: all names of KV scales (unit/checkpoint/test_kv_scales.py), a
JSON of scales that is read and not used (e2e/test_kv_scales.py), a weight scale of 0
(test_refusals.py), and merged projections that are rounded again to one scale (test_forms.py, where
q, k and v have different ones).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.formats.forms import FORMS
from tests.formats.writers import Written, write
from tests.refusals import refuses

from freight import LLM, SamplingParams
from freight.errors import CheckpointError
from freight.fp8.formats import Format, ScaleSource
from freight.fp8.scheme import Activations
from freight.kernels.reference_set import REFERENCE
from freight.kernels.select import select_kernels
from freight.model.open import OpenModel, open_model
from freight.operands.weight import Weight
from freight.settings.engine import EngineArgs, EngineConfig
from freight.settings.resolve import resolve

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def opened(made: Written, folder: Path) -> OpenModel:
    return open_model(EngineArgs(made.save(folder), skip_tokenizer_init=True))


def decided(model: OpenModel, native: Format = Format.E4M3FN) -> EngineConfig:
    device = SimpleNamespace(
        kind=model.device.kind, name="this", native_e4m3=native, cores=model.device.cores
    )
    return resolve(model.args, model.model, model.scheme, model.kv_scales, device)


def in_use(model: OpenModel, native: Format = Format.E4M3FN) -> list[tuple[float, float]]:
    """(k, v) of each layer, as the cache will have them."""
    kv = decided(model, native).kv
    assert kv.scale_source is ScaleSource.CHECKPOINT
    assert kv.scales is not None
    return [(layer.k[0], layer.v[0]) for layer in kv.scales.layers if layer is not None]


def stored(made: Written, k: str, v: str) -> list[tuple[float, float]]:
    layers = [f"model.layers.{layer}.self_attn." for layer in range(2)]
    return [(float(made.tensors[layer + k]), float(made.tensors[layer + v])) for layer in layers]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["autofp8 static", "ct tensor static"])
def test_no_family_drops_its_scales(family: str, name: str, tmp_path: Path):
    """vLLM 54623 (Qwen3.5), SGLang 39942 (Qwen2, Mixtral): loaded without a word, served with 1.0."""
    made = write(FORMS[name])
    made.config |= {"model_type": family, "architectures": [FAMILIES[family]]}
    assert in_use(opened(made, tmp_path)) == stored(made, "k_scale", "v_scale")


@pytest.mark.parametrize(
    ("name", "suffix"), [("autofp8 static", "k_scale"), ("quark", "k_proj.output_scale")]
)
def test_a_promised_scale_that_is_missing_is_an_error(name: str, suffix: str, tmp_path: Path):
    """vLLM 6738, 6761: 1.0 for the layer, or a crash in the middle of loading."""
    made = write(FORMS[name])
    for side in "kv":
        del made.tensors["model.layers.1.self_attn." + suffix.replace("k_", f"{side}_", 1)]
    with pytest.raises(CheckpointError, match="none for layer 1 of 2"):
        decided(opened(made, tmp_path))


@pytest.mark.parametrize("other", ["k_scale", "v_scale"])
def test_a_scale_of_k_serves_v_and_one_of_v_nobody(other: str, tmp_path: Path):
    """vLLM 0.33: an assertion fails when only v is there."""
    made = write(FORMS["ct tensor static"])
    for layer in range(2):
        del made.tensors[f"model.layers.{layer}.self_attn.{other}"]
    model = opened(made, tmp_path)
    if other == "v_scale":
        assert in_use(model) == stored(made, "k_scale", "k_scale")
        return
    with refuses(CheckpointError, "V", "none of K", "layers 0, 1 of 2"):
        in_use(model)


@pytest.mark.parametrize(
    "name", ["ct tensor static", "autofp8 static", "text generation inference"]
)
def test_every_path_doubles_for_fnuz(name: str, tmp_path: Path):
    """vLLM's path for compressed-tensors leaves the scales as they are on FNUZ devices."""
    model = opened(write(FORMS[name]), tmp_path)
    assert in_use(model, Format.E4M3FNUZ) == [(2 * k, 2 * v) for k, v in in_use(model)]


def test_a_scale_of_queries_is_nobody_else_s(tmp_path: Path):
    """vLLM 51534: a missing q_scale takes part in what k_scale is, and the other way round."""
    made = write(FORMS["ct tensor static"])
    before = in_use(opened(made, tmp_path))
    for layer in range(2):
        made.tensors[f"model.layers.{layer}.self_attn.q_scale"] = torch.full((1,), 0.5)
    assert in_use(opened(made, tmp_path)) == before
    LLM(model=str(tmp_path), skip_tokenizer_init=True)  # and it is accounted for


def test_kv_scale_keeps_its_float32(tmp_path: Path):
    """Text Generation Inference: `kv_scale` passes through the model's dtype and loses 16 of its
    bits.
    """
    made = write(FORMS["text generation inference"])
    exact = torch.tensor(0.0152239128947258)
    for layer in range(2):
        made.tensors[f"model.layers.{layer}.self_attn.kv_scale"] = exact.clone()
    assert float(exact) != float(exact.bfloat16())
    assert in_use(opened(made, tmp_path)) == [(float(exact), float(exact))] * 2


def test_scales_of_one_are_taken_and_none_at_all_are_said(tmp_path: Path):
    """ModelOpt stored at least 1.0 until 2026 (its issue 20), and stores none in cast mode; neither
    is a fault here.
    """
    made = write(FORMS["modelopt own file"])
    for layer in range(2):
        for side in "kv":
            made.tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"].fill_(1.0)
    assert in_use(opened(made, tmp_path)) == [(1.0, 1.0)] * 2
    made.tensors = {
        name: tensor
        for name, tensor in made.tensors.items()
        if not name.endswith((".k_scale", ".v_scale"))
    }
    kv = decided(opened(made, tmp_path)).kv
    assert (kv.format, kv.scale_source) == (Format.E4M3FN, ScaleSource.UNIT)
    assert "cast mode" in kv.note


@pytest.mark.parametrize(
    "scales", ["k_scale", "v_scale", "mlp.down_proj.input_scale", "self_attn.q_proj.input_scale"]
)
def test_what_a_scale_does_not_reach_saturates(scales: str, tmp_path: Path):
    """Scales may be too small: measured before RoPE (AutoFP8, Quark), or on the last batch only
    (llm-compressor).

    Text Generation Inference casts without a clamp, which gives NaN.
    """
    made = write(FORMS["autofp8 static"])
    for name in made.tensors:
        if name.endswith(scales):
            made.tensors[name] = torch.tensor(1e-5)
    made.save(tmp_path)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, detokenize=False)
    for kernels in ("reference", "auto"):
        llm = LLM(model=str(tmp_path), skip_tokenizer_init=True, kernels=kernels)
        logprobs = (
            llm.generate([{"prompt_token_ids": list(range(3, 30))}], params)[0].outputs[0].logprobs
        )
        assert logprobs is not None
        assert torch.tensor([entry.logprob for entry in logprobs[0].values()]).isfinite().all()


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("scale", [torch.ones(256), torch.ones(2, 2)])
def test_a_row_of_zeros_stays_zero(kernels: str, scale: torch.Tensor):
    """DeepSeek's own kernel divides 0 by 0 in a group of zeros."""
    chosen = REFERENCE if kernels == "reference" else select_kernels(kernels)
    data = torch.ones(256, 256).to(torch.float8_e4m3fn)
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    x[1, 200] = 2.0
    out = chosen.linear(x, chosen.pack(Weight(data, scale, Activations.DYNAMIC)), None)
    assert out[0].eq(0).all()
    assert out[1].eq(2).all()
