"""Every producer's checkpoint runs: the producer's weights to the bit, activations as declared,
every scale in use.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats.forms import FORMS
from tests.formats.writers import Form, write
from torch import Tensor

from freight import LLM, SamplingParams
from freight.fp8.formats import Format
from freight.fp8.scheme import Activations
from freight.fp8.weights import quantize_rows
from freight.kernels.reference_set import REFERENCE
from freight.kernels.select import select_kernels
from freight.model.decoder import Decoder
from freight.model.layers.linear import Linear, UnmergedLinear
from freight.model.loader import load_model
from freight.model.open import open_model
from freight.operands.weight import Weight
from freight.settings.engine import EngineArgs

ROWS = {"q_proj": 192, "k_proj": 96, "v_proj": 96, "gate_proj": 320, "up_proj": 320}
TOKENS = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(1)).tolist()


def load(folder: str, format: Format) -> Decoder:
    opened = open_model(EngineArgs(folder, skip_tokenizer_init=True, kernels="reference"))
    assert opened.checkpoint is not None
    return load_model(
        opened.checkpoint,
        opened.model,
        REFERENCE,
        Format.BFLOAT16,
        format,
        64,
        "cpu",
        opened.scheme,
    )


def matrices(model: Decoder) -> dict[str, tuple[Weight, Tensor, float | None]]:
    """By module: the Weight it is part of, its dequantized rows, and the limit of its input."""
    found = {}
    for index, layer in enumerate(model.layers):
        for prefix, names, projection in (
            ("self_attn", ("q_proj", "k_proj", "v_proj"), layer.mixer.qkv),
            ("self_attn", ("o_proj",), layer.mixer.o),
            ("mlp", ("gate_proj", "up_proj"), layer.mlp.gate_up),
            ("mlp", ("down_proj",), layer.mlp.down),
        ):
            parts = projection.parts if isinstance(projection, UnmergedLinear) else (projection,)
            rows = [
                part.weight.dequantized().split(
                    [ROWS.get(n, 192) for n in names] if len(parts) == 1 else 999
                )
                for part in parts
            ]
            for name, own, part in zip(
                names, [r for each in rows for r in each], parts * len(names), strict=False
            ):
                found[f"model.layers.{index}.{prefix}.{name}"] = (
                    part.weight,
                    own,
                    part.input_limit,
                )
    found["lm_head"] = (model.head.weight, model.head.weight.dequantized(), model.head.input_limit)
    return found


def logprobs(folder: str, kernels: str = "reference", **options: Any) -> Tensor:
    """Of the 23 tokens that follow the first of a prompt; the cache is in FP8 unless `options` say
    otherwise.
    """
    options = {"kv_cache_dtype": "fp8", **options}
    llm = LLM(model=folder, skip_tokenizer_init=True, kernels=kernels, max_num_seqs=1, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    prompt = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].prompt_logprobs
    assert prompt is not None
    return torch.tensor(
        [row[token].logprob for row, token in zip(prompt, TOKENS, strict=True) if row is not None]
    )


def test_weights_are_the_producer_s_to_the_bit(form: Form, tmp_path: Path):
    made = write(form)
    model = load(made.save(tmp_path), Format.E4M3FN if form.linear else Format.BFLOAT16)
    found = matrices(model)
    if form.linear is not None:
        assert len(made.dequantized) >= 4
    for module, (weight, matrix, limit) in found.items():
        if module in made.dequantized:
            expected = made.dequantized[module]
            assert weight.data.dtype is torch.float8_e4m3fn, module
            assert torch.equal(matrix.to(expected.dtype), expected), module
            assert (weight.activations, limit) == (form.activations, form.input_limit), module
            named = [
                n
                for n in ("input_scale", "act_scale", "activation_scale")
                if f"{module}.{n}" in made.tensors
            ]
            stored = float(made.tensors[f"{module}.{named[0]}"]) if named else None
            assert weight.input_scale == stored
        else:
            assert weight.scale is None
            assert torch.equal(matrix, made.tensors[f"{module}.weight"].float())
    embedding = made.dequantized.get(
        "model.embed_tokens", made.tensors.get("model.embed_tokens.weight")
    )
    assert torch.equal(model.embedding.weight, embedding.to(torch.bfloat16))


def test_an_fnuz_device_has_the_same_weights(form: Form, tmp_path: Path):
    made = write(form)
    found = matrices(load(made.save(tmp_path), Format.E4M3FNUZ if form.linear else Format.BFLOAT16))
    for module, expected in made.dequantized.items():
        if module in found:
            weight, matrix, _ = found[module]
            assert weight.data.dtype is torch.float8_e4m3fnuz
            assert torch.equal(matrix.to(expected.dtype), expected), module
            named = [
                n
                for n in ("input_scale", "act_scale", "activation_scale")
                if f"{module}.{n}" in made.tensors
            ]
            assert weight.input_scale == (
                2 * float(made.tensors[f"{module}.{named[0]}"]) if named else None
            )


def test_every_scale_changes_the_output(form: Form, tmp_path: Path):
    """One of each kind, in the last layer, three times as large. Those of queries and probabilities
    do nothing.
    """
    made = write(form)
    before = logprobs(made.save(tmp_path))
    assert before.isfinite().all()
    scales = [
        name
        for name in made.tensors
        if name.startswith("model.layers.1.") and re.search("scale(_inv)?$", name)
    ]
    kinds = {
        re.sub(r"\.\w+_proj\.", ".", name): name
        for name in scales
        if not re.search("(up|down)_proj", name)
    }
    assert kinds or form.linear is None
    for name in kinds.values():
        kept = made.tensors[name]
        larger = kept.view(torch.uint8) + 2 if kept.element_size() == 1 else kept.float() * 3
        made.tensors[name] = (
            larger.view(kept.dtype) if kept.element_size() == 1 else larger.to(kept.dtype)
        )
        changed = not torch.equal(logprobs(made.save(tmp_path)), before)
        assert changed == (not re.search(r"q_proj\.output_scale|prob_output_scale", name)), name
        made.tensors[name] = kept
    assert torch.equal(logprobs(made.save(tmp_path)), before)


def test_the_compiled_kernels_compute_the_same(form: Form, tmp_path: Path):
    """Every matrix of a checkpoint, with its activations, on three rows; the CPU's kernels and the
    reference.
    """
    model = load(write(form).save(tmp_path), Format.E4M3FN if form.linear else Format.BFLOAT16)
    compiled = select_kernels("auto")
    for weight in {id(weight): weight for weight, *_ in matrices(model).values()}.values():
        x = torch.randn(
            3,
            weight.data.shape[1],
            generator=torch.Generator().manual_seed(4),
            dtype=torch.bfloat16,
        )
        expected = REFERENCE.linear(x, weight, None).float()
        assert torch.allclose(
            compiled.linear(x, compiled.pack(weight), None).float(), expected, rtol=0.01, atol=0.02
        )


def test_weights_alone_in_fp8_compute_with_the_dequantized_ones(
    tmp_path: Path,
):
    """Where activations are left alone, a float32 run is that of the dequantized model."""
    for name in (
        "quark for vllm",
        "modelopt blocks",
        "torchao weights only, with head and embedding",
    ):
        made = write(FORMS[name])
        options = {"dtype": "float32", "kv_cache_dtype": "float32"}
        ours = logprobs(made.save(tmp_path), **options)
        plain = write(Form(None))
        plain.tensors |= {f"{module}.weight": matrix for module, matrix in made.dequantized.items()}
        (tmp_path / "hf_quant_config.json").unlink(missing_ok=True)
        assert (logprobs(plain.save(tmp_path), **options) - ours).abs().max() < 1e-4


def test_rounded_activations_are_those_of_the_definition():
    """fbgemm: amax per row, no larger than the bound; what lies above saturates."""
    draw = torch.Generator().manual_seed(2)
    x, w = torch.randn(5, 64, generator=draw) * 3, torch.randn(16, 64, generator=draw)
    x[0] *= 0.01
    data, scale = quantize_rows(w, Format.E4M3FN)
    linear = Linear(Weight(data, scale, Activations.DYNAMIC, input_limit=2.0), None, REFERENCE, 2.0)
    own = x.abs().amax(1, keepdim=True).clamp(max=2.0) / 448
    rounded = (x / own).clamp(-448, 448).to(torch.float8_e4m3fn).float() * own
    expected = rounded @ (data.float() * scale[:, None]).T
    assert torch.allclose(linear(x), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(Linear(linear.weight, None, REFERENCE)(x), expected, rtol=1e-2)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_asking_for_fp8_again_changes_nothing(quantization: str | None, tmp_path: Path):
    folder = write(FORMS["modelopt in config"]).save(tmp_path)
    assert torch.equal(logprobs(folder, quantization=quantization), logprobs(folder))
