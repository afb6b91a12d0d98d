"""Make tiny models with weights in 4 bits by the tools that write them, and the logits of their values.

    python benchmarks/peers/make_four_bits.py tests/fixtures/four_bits --autoawq SOURCE --autogptq SOURCE

Needs llmcompressor, compressed-tensors and transformers, and the sources of AutoAWQ 0.2.9 and AutoGPTQ
0.8.0.dev0, of which only the modules that round and pack a matrix are used (`awq.modules.linear.gemm`,
`auto_gptq.nn_modules.qlinear.qlinear_cuda`). Each folder gets config.json and model.safetensors, and
`expected.safetensors`: token ids, and the logits in float32 of transformers' model with the values that
the tool itself makes of the packed tensors.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers as tf
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
random = torch.Generator().manual_seed(7)
IDS = torch.randint(3, VOCAB, (24,), generator=random)
INT = {"num_bits": 4, "type": "int", "dynamic": False}
MADE = {
    "int4": QuantizationModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": INT | {
            "strategy": "group", "group_size": 32, "symmetric": True}}}, ignore=["lm_head"]),
    "int4_zeros": QuantizationModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": INT | {
            "strategy": "group", "group_size": 64, "symmetric": False}}}, ignore=["lm_head"]),
    "nvfp4": QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]),
    "mxfp4": QuantizationModifier(targets="Linear", scheme="MXFP4A16", ignore=["lm_head"]),
    "int4_experts": QuantizationModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": INT | {
            "strategy": "group", "group_size": 32, "symmetric": True}}},
        ignore=["lm_head", "re:.*mlp.gate$"]),
}  # fmt: skip


def random_model(folder: str, experts: bool = False) -> tf.PreTrainedModel:
    """Make a model with random parameters in bfloat16."""
    torch.manual_seed(0)
    config: tf.PretrainedConfig = tf.LlamaConfig(**SHAPE)
    if experts:
        more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        config = tf.Qwen3MoeConfig(**SHAPE, **more)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder)
    return model


def logits(folder: str, values: dict[str, Tensor]) -> Tensor:
    """Compute with transformers in float32, with `values` in the place of the stored matrices."""
    model = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, matrix in values.items():
            module, _, last = name.removesuffix(".weight").rpartition(".")
            experts = module.rpartition(".experts.")
            if experts[1]:  # transformers keeps all experts in one tensor
                own = experts[0] + ".experts."
                number = int(experts[2])
                half = 64 * (last == "up_proj")
                if last == "down_proj":
                    parameters[f"{own}down_proj"][number].copy_(matrix)
                else:
                    parameters[f"{own}gate_up_proj"][number, half : half + 64].copy_(matrix)
            else:
                parameters[name].copy_(matrix)
        return model(IDS[None]).logits[0]


def save(out: Path, base: str, values: dict[str, Tensor]) -> None:
    expected = {"input_ids": IDS, "logits": logits(base, values).contiguous()}
    save_file(expected, out / "expected.safetensors")


def with_llm_compressor(name: str, out: Path) -> None:
    """Quantize with `oneshot`; the values are those of compressed-tensors' own compressor."""
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as made:
        experts = name.endswith("experts")
        random_model(base, experts)
        load = tf.AutoModelForCausalLM.from_pretrained
        if experts:
            with load_quantizable_moe():
                model = load(base, dtype=torch.bfloat16)
        else:
            model = load(base, dtype=torch.bfloat16)
        oneshot(model=model, recipe=MADE[name])
        model.save_pretrained(made, save_compressed=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(Path(made) / file, out / file)
        said = json.loads((out / "config.json").read_text())["quantization_config"]
        config = QuantizationConfig.model_validate(said)
        (scheme,) = config.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(said["format"])
        stored = load_file(out / "model.safetensors")
        values = {}
        for packed in [key for key in stored if key.endswith("weight_packed")]:
            module = packed.rpartition(".")[0]
            own = {k.rpartition(".")[2]: v for k, v in stored.items() if k.startswith(f"{module}.")}
            # in float32: the library multiplies in bfloat16, the dtype of scales and of E2M1
            if own["weight_scale"].dtype == torch.bfloat16:
                own["weight_scale"] = own["weight_scale"].float()
            if name == "nvfp4":
                rows, half = own["weight_packed"].shape
                codes = unpack_fp4_from_uint8(own["weight_packed"], rows, 2 * half, torch.float32)
                matrix = dequantize(
                    codes,
                    own["weight_scale"].float(),
                    args=scheme.weights,
                    dtype=torch.float32,
                    global_scale=own["weight_global_scale"],
                )
            else:
                matrix = compressor.decompress(own, scheme)["weight"].float()
            values[f"{module}.weight"] = matrix
        save(out, base, values)


def stub(name: str, path: Path, **members: Any) -> None:
    """Put an empty package in the place of one whose __init__ imports what is not there."""
    package = ModuleType(name)
    package.__path__ = [str(path)]
    for member, value in members.items():
        setattr(package, member, value)
    sys.modules[name] = package


def rounded(w: Tensor, size: int, symmetric: bool, group_of: Tensor) -> tuple[Tensor, ...]:
    """Return the scales and zero points [rows, groups] and the rounded matrix, by the tools' rule."""
    rows, columns = w.shape
    scales = torch.zeros(rows, columns // size)
    zeros = torch.zeros_like(scales)
    result = torch.zeros_like(w)
    for number in range(columns // size):
        part = w[:, group_of == number]
        high = part.amax(1).clamp(min=0)
        low = part.amin(1).clamp(max=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / 15).half().float()
        zero = torch.full_like(scale, 8.0) if symmetric else (-low / scale).round()
        code = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, 15)
        scales[:, number] = scale
        zeros[:, number] = zero
        result[:, group_of == number] = (code - zero[:, None]) * scale[:, None]
    return scales, zeros, result


def linears(model: tf.PreTrainedModel) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def packed_by(tool: Any, out: Path, said: dict[str, Any]) -> None:
    """Write the random model in float16 with the modules that `tool` packs."""
    with tempfile.TemporaryDirectory() as base:
        model = random_model(base).half()
        tensors = dict(model.state_dict())
        values = {}
        for name, linear in linears(model).items():
            del tensors[f"{name}.weight"]
            stored, values[f"{name}.weight"] = tool(linear)
            tensors |= {f"{name}.{suffix}": item.contiguous() for suffix, item in stored.items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((Path(base) / "config.json").read_text())
        config |= {"dtype": "float16", "quantization_config": said}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        plain = {name: item.float() for name, item in model.state_dict().items()}
        save_file(plain, Path(base) / "model.safetensors", metadata={"format": "pt"})
        save(out, base, values)


def awq(source: Path, out: Path) -> None:
    stub("awq", source / "awq")
    stub("awq.modules", source / "awq/modules")
    stub("awq.utils", source / "awq/utils")
    gemm = importlib.import_module("awq.modules.linear.gemm")
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm

    def tool(linear: nn.Linear) -> tuple[dict[str, Tensor], Tensor]:
        w = linear.weight.data.float()
        scales, zeros, linear.weight.data = rounded(w, 32, False, torch.arange(w.shape[1]) // 32)
        made = gemm.WQLinear_GEMM.from_linear(
            linear, 4, 32, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        stored = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
        # the tool multiplies in the dtype of the scales
        value = dequantize(made.qweight, made.qzeros, made.scales.float(), 4, 32)
        return stored, value.t().float()

    said = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    packed_by(tool, out, said)


def gptq(source: Path, out: Path, symmetric: bool, ordered: bool) -> None:
    stub("auto_gptq", source / "auto_gptq")
    stub("auto_gptq.nn_modules", source / "auto_gptq/nn_modules")
    stub("auto_gptq.nn_modules.qlinear", source / "auto_gptq/nn_modules/qlinear")
    qlinear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    draw = torch.Generator().manual_seed(5)
    orders = {size: torch.randperm(size, generator=draw) for size in (64, 128)}

    def tool(linear: nn.Linear) -> tuple[dict[str, Tensor], Tensor]:
        w = linear.weight.data.float()
        columns = w.shape[1]
        group_of = torch.arange(columns) // 32
        if ordered:  # by the statistics of the inputs, which q, k and v share
            group_of = group_of[orders[columns]]
        scales, zeros, linear.weight.data = rounded(w, 32, symmetric, group_of)
        made = qlinear.QuantLinear(4, 32, columns, len(w), False, weight_dtype=torch.float32)
        made.pack(linear, scales, zeros, group_of.int())
        value = made(torch.eye(columns)).t()
        names = ("qweight", "qzeros", "scales", "g_idx")
        stored = {name: getattr(made, name) for name in names}
        return stored | {"scales": made.scales.half()}, value.float()

    said = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": ordered,
        "static_groups": False, "sym": symmetric, "true_sequential": True,
    }  # fmt: skip
    packed_by(tool, out, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--autoawq", type=Path)
    parser.add_argument("--autogptq", type=Path)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    made: dict[str, Any] = {name: (with_llm_compressor, name) for name in MADE}
    if args.autoawq:
        made["awq"] = awq, args.autoawq
    if args.autogptq:
        made["gptq"] = lambda out: gptq(args.autogptq, out, symmetric=True, ordered=False), None
        made["gptq_order"] = lambda out: gptq(args.autogptq, out, False, ordered=True), None
    for name, (make, given) in made.items():
        if args.only and name not in args.only:
            continue
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        make(folder) if given is None else make(given, folder)
        print(name, sum(file.stat().st_size for file in folder.iterdir()))


if __name__ == "__main__":
    main()
