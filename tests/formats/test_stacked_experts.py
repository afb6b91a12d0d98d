"""Experts in 3-D tensors, and modules under transformers' names, are the same model as under the
hub's names.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.experts import LAYER, Made, expert_modules, make
from tests.formats.test_experts import logprobs
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import freight
from freight import LLM
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError
from freight.model.open import open_checkpoint
from freight.model.shapes import tensor_shapes

STACKED = f"{LAYER}mlp.experts."


def stacked(made: Made) -> Made:
    """`made` with the tensors of its experts stacked, scales too; those of gate and up are joined."""
    experts = expert_modules(made.family)
    for suffix in [
        name.rpartition(".")[2] for name in made.tensors if name.startswith(f"{experts[0][2]}.")
    ]:
        parts = [
            [made.tensors.pop(f"{module}.{suffix}") for module in modules] for modules in experts
        ]
        rest = {"weight": ""}.get(suffix, "_" + suffix.removeprefix("weight_"))
        if "weight" in suffix:
            wide = [
                [part.reshape(1, 1) if part.numel() == 1 else part for part in row] for row in parts
            ]
            made.tensors[f"{STACKED}gate_up_proj{rest}"] = torch.stack(
                [torch.cat(row[:2]) for row in wide]
            )
            made.tensors[f"{STACKED}down_proj{rest}"] = torch.stack([row[2] for row in wide])
        else:
            made.tensors[f"{STACKED}gate_up_proj{rest}"] = torch.stack(
                [torch.stack(row[:2]).amax() for row in parts]
            )
            made.tensors[f"{STACKED}down_proj{rest}"] = torch.stack([row[2] for row in parts])
    if made.family == "mixtral":
        made.tensors[f"{LAYER}mlp.gate.weight"] = made.tensors.pop(
            f"{LAYER}block_sparse_moe.gate.weight"
        )
    return made


@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe-sparse", "qwen3-moe"])
def test_transformers_own_form_is_the_same_model(variant: str, tmp_path: Path):
    model = save_random(VARIANTS[variant], tmp_path / "hub", torch.bfloat16)
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    assert any(
        tensor.ndim == 3 for tensor in load_file(tmp_path / "own/model.safetensors").values()
    )
    hub, own = (open_checkpoint(str(tmp_path / folder)) for folder in ("hub", "own"))
    for name, shape in tensor_shapes(hub.model).items():
        assert torch.equal(own.checkpoint.take(name, shape), hub.checkpoint.take(name, shape)), name
    own.checkpoint.finish()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen's own blocks", "qwen3_moe"),
        ("ct channel token", "mixtral"),
        ("autofp8 static", "mixtral"),
        ("weights alone, saved by vLLM", "qwen2_moe"),
    ],
)
def test_scales_beside_stacked_experts_are_those_of_each(name: str, family: str, tmp_path: Path):
    expected = logprobs(make(name, family).save(tmp_path / "hub"), kv_cache_dtype="fp8")
    made = stacked(make(name, family))
    assert torch.equal(logprobs(made.save(tmp_path / "own"), kv_cache_dtype="fp8"), expected)
    for scale in [n for n in made.tensors if n.startswith(STACKED) and "scale" in n]:
        kept = made.tensors[scale]
        for changed in (kept.index_fill(0, torch.tensor([1]), 4.0), None):
            made.tensors.pop(scale)
            made.tensors |= {} if changed is None else {scale: changed}
            folder = made.save(tmp_path / "own")
            if changed is None:
                with pytest.raises(CheckpointError, match=r"scale.* is missing"):
                    LLM(model=folder, skip_tokenizer_init=True)
            else:
                assert not torch.equal(logprobs(folder, kv_cache_dtype="fp8"), expected), scale
        made.tensors[scale] = kept


def test_gate_up_and_down_of_step_are_a_tensor_each(tmp_path: Path):
    """As its hub files have them; freight quantize writes each expert by itself."""
    save_random(VARIANTS["step3p7"], tmp_path / "plain", torch.float32)
    freight.quantize(tmp_path / "plain", tmp_path / "out", weights="fp8")
    path, ids = tmp_path / "out/model.safetensors", tokens(60)
    expected = freight_logits(tmp_path / "out", ids, "float32")
    stored = load_file(path)
    for layer, part in (
        (layer, part) for layer in (1, 2) for part in ("gate_proj", "up_proj", "down_proj")
    ):
        moe = f"model.layers.{layer}.moe."
        for kind in ("weight", "weight_scale"):
            stored[f"{moe}{part}.{kind}"] = torch.stack(
                [stored.pop(f"{moe}experts.{i}.{part}.{kind}") for i in range(8)]
            )
    save_file(stored, path, metadata={"format": "pt"})
    assert torch.equal(freight_logits(tmp_path / "out", ids, "float32"), expected)
    for name in [name for name in stored if re.search(r"moe\.\w+_proj\.weight_scale$", name)]:
        changed = stored[name].clone().index_fill_(0, torch.tensor([1]), 4.0)
        save_file(stored | {name: changed}, path, metadata={"format": "pt"})
        assert not torch.equal(freight_logits(tmp_path / "out", ids, "float32"), expected), name


def test_what_transformers_quantizes_is_read(tmp_path: Path):
    """Its own operation over its own names: `gate_up_proj` and `gate_up_proj_scale_inv`."""
    made = make("qwen's own blocks", "qwen3_moe")
    for module, matrix in made.dequantized.items():
        made.tensors[f"{module}.weight"] = matrix.to(torch.bfloat16)
        made.tensors.pop(f"{module}.weight_scale_inv")
    made = stacked(made)
    config: Any = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))
    linears = [name for name in made.tensors if re.search(r"experts|[qo]_proj\.weight", name)]
    for name in linears:
        made.tensors |= quantizer.convert({name: made.tensors.pop(name)})
    folder = made.save(tmp_path)
    opened = open_checkpoint(folder).checkpoint
    both = made.tensors[f"{STACKED}gate_up_proj"]
    up = opened.take(
        f"{STACKED}2.up_proj.weight", (128, 128), opened.format_of(f"{STACKED}2.up_proj.weight")
    )
    assert torch.equal(up.view(torch.uint8), both[2, 128:].view(torch.uint8))
    scale = opened.take_scale(f"{STACKED}2.up_proj.weight_scale_inv")
    assert torch.equal(scale, made.tensors[f"{STACKED}gate_up_proj_scale_inv"][2, 1:])
    assert logprobs(folder).isfinite().all()


def save(tensors: dict[str, Tensor], made: Made, folder: Path) -> str:
    made.tensors |= tensors
    return made.save(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "gate_up_proj",
            torch.zeros(3, 128, 256).to(torch.float8_e4m3fn),
            r"\[3, 128, 256\].* \[3, 256, 128\]",
        ),
        (
            "gate_up_proj_scale_inv",
            torch.ones(2, 2, 1),
            r"\[2, 2, 1\]; one scale, or scales of 3 experts",
        ),
        (
            "gate_up_proj_scale_inv",
            torch.ones(3, 3, 1),
            r"\[3, 3, 1\]: blocks of scales span gate and up",
        ),
        (
            "0.up_proj.weight",
            torch.zeros(128, 128).to(torch.float8_e4m3fn),
            "are the same tensor twice",
        ),
    ],
)
def test_tensors_that_cannot_be_divided_are_named(
    name: str, tensor: Tensor, message: str, tmp_path: Path
):
    made = stacked(make("qwen's own blocks", "qwen3_moe"))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save({STACKED + name: tensor}, made, tmp_path))


def test_blocks_that_end_within_gate_are_refused(tmp_path: Path):
    """Experts of 64 are two to a block of 128 rows, and of 192 share their second one."""
    made = stacked(make("qwen's own blocks", "qwen3_moe"))
    made.config["moe_intermediate_size"] = 192
    made.tensors[f"{STACKED}gate_up_proj"] = torch.zeros(3, 384, 128).to(torch.float8_e4m3fn)
    made.tensors[f"{STACKED}gate_up_proj_scale_inv"] = torch.ones(3, 4, 1)
    with pytest.raises(CheckpointError, match="span gate and up"):
        open_checkpoint(made.save(tmp_path))


def test_a_part_has_its_own_header_entry(tmp_path: Path):
    """Its shape, its bytes, and the name by which the declaration knows its module."""
    save_file({"all": torch.arange(24.0).reshape(2, 3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.divide("all", {"one": ((1, slice(1, 3)), "module.of.one")})
    part = checkpoint.take("one", (2, 4))
    assert part.tolist() == torch.arange(24.0).reshape(2, 3, 4)[1, 1:3].tolist()
    assert checkpoint.entry("one").size == part.nbytes == 32
    assert checkpoint.declared_module("one") == "module.of.one"
    assert checkpoint.names == {"one"}
