"""What `freight audit` says of quantized weights, over files that other tools wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.test_real_four_bits import SAID
from tests.refusals import assert_names, line_naming

from freight.lab.audit.weights import read_weights
from freight.model.open import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOUR_BITS = FIXTURES / "four_bits"
CODES = ("qweight", "weight_packed")
Tensors = dict[str, torch.Tensor]


def modules_of(tensors: Tensors) -> set[str]:
    """The modules that are quantized, by the names of the tools."""
    return {
        name.rpartition(".")[0]
        for name, tensor in tensors.items()
        if name.endswith(CODES) or is_in_bytes(name, tensor)
    }


def is_in_bytes(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dtype in (torch.int8, torch.float8_e4m3fn)


def scale_values(stored: torch.Tensor) -> torch.Tensor:
    """Scales in float32; bytes are exponents of 2, plus 127."""
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.double() - 127).float().flatten()
    return stored.float().flatten()


@pytest.mark.parametrize("name", [*SAID, "compressed_int8/token", "compressed_int8/static"])
def test_what_the_files_of_tools_hold(name: str):
    folder = FIXTURES / name if "/" in name else FOUR_BITS / name
    facts = read_weights(open_checkpoint(str(folder)))
    assert facts is not None
    tensors = load_file(folder / "model.safetensors")
    modules = modules_of(tensors)
    own = {key: one for key, one in tensors.items() if key.rpartition(".")[0] in modules}
    assert sum(facts.kinds.values()) == len(modules)
    of_codes = [one for key, one in own.items() if key.endswith(CODES) or is_in_bytes(key, one)]
    weights = sum(
        one.numel() if one.itemsize == 1 and one.dtype != torch.uint8 else 2 * one.nbytes
        for one in of_codes
    )
    assert facts.bits == 8 * sum(one.nbytes for one in own.values()) / weights
    ends = (".scales", ".weight_scale")
    scales = [scale_values(one) for key, one in own.items() if key.endswith(ends)]
    if name.endswith("mxfp4"):  # powers of two
        assert facts.scales is None
    else:
        assert facts.scales is not None
        every = torch.cat(scales)
        assert facts.scales.count == len(every)
        assert (facts.scales.least, facts.scales.largest) == (every.min(), every.max())
    assert facts.reordered == (len(modules) if "order" in name else 0)
    assert bool(facts.zero_points) == ("zero points" in SAID.get(name, ""))
    dtype = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    assert facts.embedding == facts.head == dtype
    assert facts.on_cpus == ("mxfp" not in name)


def test_the_lines_at_the_terminal(freight: Callable[..., Any]):
    said = freight("audit", str(FOUR_BITS / "gptq_order"), "--engine", "vllm").out.splitlines()
    assert said[:6] == [
        "Weights (gptq): 7 in INT4, scales and zero points per 32 inputs, groups in an order of their own, activations "
        "plain; 5.07 bits a weight, scales included; embedding and head in float16",
        "  checked: every tensor has its place, dtype and shape; 1,152 scales are finite, 0.021 to 0.0662; 1,152 zero "
        "points",
        "  7 matrices have groups in an order of their own, into which inputs are put before each product",
        "  Freight computes with these weights on CPUs; on GPUs it refuses them",
        "  no FP8 cache is declared, and no KV scales are stored: with --kv-cache-dtype fp8 Freight measures one per "
        "token",
        "  what rounding the weights cost is in no figure here, as all have these weights: compare the perplexity with "
        "that of the model they were made from (freight evaluate caches)",
    ]
    families = freight(
        "audit", str(FIXTURES / "llmcompressor_families/gpt_oss"), "--engine", "vllm"
    )
    line_naming(families.out, "FP8 cache", "declared", "KV scales", "2 layers")
    line_naming(families.out, "fp8_e4m3fn", "scales per row", "activations dynamic", "8.50 bits")


def test_negative_scales_zeros_and_what_is_left_out_are_counted(tmp_path: Path):
    """As AutoRound and AutoAWQ write them: `modules_to_not_convert` may leave matrices in 16 bits."""
    tensors = load_file(FOUR_BITS / "awq/model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    scales = tensors["model.layers.0.mlp.up_proj.scales"]
    scales[0, 0] *= -1
    scales[1, 0] = 0
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{suffix}"]
    tensors[f"{name}.weight"] = torch.ones(64, 128, dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((FOUR_BITS / "awq/config.json").read_text())
    facts = read_weights(open_checkpoint(str(tmp_path)))
    assert facts is not None
    assert (facts.unquantized, sum(facts.kinds.values())) == ({"float16": 1}, 6)
    assert facts.scales is not None
    assert (facts.scales.negative, facts.scales.zero) == (1, 1)
    first, checked, *_ = facts.lines()
    assert "; 1 more in float16; embedding" in first
    assert_names(checked, "1 of them negative", "1 of them 0", "896 zero points")


def test_one_object_for_programs(freight: Callable[..., Any]):
    said = json.loads(freight("audit", str(FOUR_BITS / "awq"), "--json").out)["weights"]
    assert said["kinds"] == {"INT4, scales and zero points per 32 inputs, activations plain": 7}
    assert (said["reordered"], said["cpus_only"], said["not_quantized"]) == (0, True, {})
    plain = freight("audit", str(FIXTURES / "base_bf16"), "--json").out
    assert json.loads(plain)["weights"] is None


def test_a_scale_that_is_none_is_named(freight: Callable[..., Any], tmp_path: Path):
    tensors = load_file(FOUR_BITS / "awq/model.safetensors")
    name = "model.layers.0.mlp.up_proj.scales"
    tensors[name][1, 2] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((FOUR_BITS / "awq/config.json").read_text())
    said = freight("audit", str(tmp_path)).out
    assert f"{name} has nan among its 256 values" in said
    assert "Weights" not in said


def test_kv_scales_are_repaired_where_weights_do_not_load(
    freight: Callable[..., Any], tmp_path: Path
):
    """A tensor that no part of the model needs: nothing is measured."""
    tensors = load_file(FIXTURES / "ct_docs/model.safetensors") | {"beside": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((FIXTURES / "ct_docs/config.json").read_text())
    said = freight("audit", str(tmp_path), "--engine", "vllm", "--fix", str(tmp_path / "out"))
    assert said.code == 0, said.err
    line_naming(said.out, "Not measured", "1 tensors", "config.json", "beside")
    assert (tmp_path / "out/model.safetensors").is_file()
