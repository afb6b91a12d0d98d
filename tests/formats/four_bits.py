"""A tiny model with weights in 4 bits in every form that is read, packed as the formats' descriptions
say.

Nothing here comes from Freight. A matrix is codes with the scale, and for some the zero point, of
each group; a packer of each form places the codes one by one.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
EXPERT_SHAPES = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's, of the outputs in an int32

Tensors = dict[str, Tensor]


@dataclass
class Coded:
    """A matrix: codes [rows, columns], the group of each column, scales and zero points [rows,
    groups], and the values that they stand for.
    """

    codes: Tensor
    group_of: Tensor
    scales: Tensor
    zeros: Tensor
    values: Tensor


def integers(
    w: Tensor, group: int | None, symmetric: bool, draw: torch.Generator, ordered: bool = False
) -> Coded:
    """Round to integers of 4 bits. `ordered`: the columns of a group are anywhere."""
    rows, columns = w.shape
    size = group or columns
    group_of = torch.arange(columns) // size
    if ordered:
        group_of = group_of[torch.randperm(columns, generator=draw)]
    codes, values = torch.zeros(rows, columns, dtype=torch.int64), torch.zeros(rows, columns)
    scales = torch.zeros(rows, columns // size, dtype=torch.float16)
    zeros = torch.full((rows, columns // size), 8)
    for number in range(columns // size):
        inside = group_of == number
        part = w[:, inside].double()
        if symmetric:
            scale = (part.abs().amax(1) / 7).half()
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / 15).half()
            zeros[:, number] = (-low / scale.double()).round().clamp(0, 15).long()
        zero = zeros[:, number, None]
        code = ((part / scale.double()[:, None]).round() + zero).clamp(0, 15).long()
        codes[:, inside], scales[:, number] = code, scale
        values[:, inside] = (code - zero).float() * scale.float()[:, None]
    return Coded(codes, group_of, scales, zeros, values)


def floats(w: Tensor) -> tuple[Coded, float]:
    """Round to E2M1 with a scale in E4M3 for 16 columns, and one float32 number for all."""
    columns = w.shape[1]
    whole = float(w.abs().amax()) / 6 / 448
    groups = w.double().unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
    scaled = groups / (scales.double() * whole)[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    values = table[codes].float() * (scales.float() * torch.tensor(whole))[..., None]
    empty = torch.zeros(0)
    return Coded(
        codes.flatten(1), torch.arange(columns) // 16, scales, empty, values.flatten(1)
    ), whole


def words(codes: Tensor) -> Tensor:
    """int32 [rows, ceil(columns / 8)] of codes [rows, columns], the first of 8 in the lowest bits,
    with zeros after the last one.
    """
    short = -codes.shape[1] % 8
    eights = torch.nn.functional.pad(codes, (0, short)).unflatten(1, (-1, 8))
    value = (eights << 4 * torch.arange(8)).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).int()


def pairs(codes: Tensor) -> Tensor:
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def packed(coded: Coded, *, zeros: bool = False, order: bool = False) -> Tensors:
    """compressed-tensors' pack-quantized."""
    tensors = {
        "weight_packed": words(coded.codes),
        "weight_scale": coded.scales,
        "weight_shape": torch.tensor(coded.codes.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = words(coded.zeros.t()).t()
    if order:
        tensors["weight_g_idx"] = coded.group_of.int()
    return tensors


def gptq(coded: Coded, added: int) -> Tensors:
    """AutoGPTQ's, where zero points are stored minus `added`: GPTQModel subtracts it from those of an
    int32 at once.
    """
    return {
        "qweight": words(coded.codes).t(),
        "qzeros": words(coded.zeros.t()) - added * 0x11111111,
        "scales": coded.scales.t(),
        "g_idx": coded.group_of.int(),
        "bias": torch.zeros(len(coded.codes), dtype=torch.float16),
    }


def awq(coded: Coded) -> Tensors:
    """AutoAWQ's gemm: of each 8 outputs an int32 has them in AWQ_ORDER."""
    columns = [8 * start + place for start in range(len(coded.codes) // 8) for place in AWQ_ORDER]
    return {
        "qweight": words(coded.codes.t()[:, columns]),
        "qzeros": words(coded.zeros.t()[:, columns]),
        "scales": coded.scales.t(),
    }


def nvfp4(w: Tensor) -> tuple[Tensors, Tensor]:
    """compressed-tensors': the scale of the tensor divides, and there is one of inputs."""
    coded, whole = floats(w)
    return {
        "weight_packed": pairs(coded.codes),
        "weight_scale": coded.scales,
        "weight_global_scale": torch.tensor([1 / whole]),
        "input_global_scale": torch.tensor([300.0]),
    }, coded.values


def modelopt(w: Tensor) -> tuple[Tensors, Tensor]:
    coded, whole = floats(w)
    return {
        "weight": pairs(coded.codes),
        "weight_scale": coded.scales,
        "weight_scale_2": torch.tensor(whole),
        "input_scale": torch.tensor(0.003),
    }, coded.values


def mxfp4(w: Tensor, lowest: int = 0) -> tuple[Tensors, Tensor]:
    """compressed-tensors': powers of two of 32 columns. `lowest`: exponents are no smaller."""
    groups = w.double().unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil().long() + 127
    exponent = exponent.clamp(min=lowest)
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
    scale = torch.exp2(exponent.double() - 127)[..., None]
    codes = ((groups / scale)[..., None] - table).abs().argmin(-1)
    return {
        "weight_packed": pairs(codes.flatten(1)),
        "weight_scale": exponent.to(torch.uint8),
    }, (table[codes] * scale).flatten(1).float()


def ct(
    weights: dict[str, Any], format: str, inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": format,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
        "version": "0.20.0",
    }


def int4(group: int | None, **more: Any) -> dict[str, Any]:
    arguments = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    return ct(arguments | more, "pack-quantized")


FLOAT4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": False,
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "damp_percent": 0.01,
    "desc_act": False,
    "sym": True,
    "true_sequential": True,
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
AUTO_ROUND = {  # as AutoRound 0.9 writes it
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "data_type": "int",
    "group_size": 32,
    "sym": True,
    "iters": 0,
    "block_name_to_quantize": "model.layers",
    "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": False,
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
            },
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "*.mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.37.0"},
}

Rounded = tuple[Tensors, Tensor]
Linear = Callable[[Tensor, torch.Generator], Rounded]


def of_integers(
    group: int | None,
    pack: Callable[[Coded], Tensors],
    symmetric: bool = True,
    ordered: bool = False,
) -> Linear:
    def linear(w: Tensor, draw: torch.Generator) -> Rounded:
        coded = integers(w, group, symmetric, draw, ordered)
        return pack(coded), coded.values

    return linear


@dataclass(frozen=True, eq=False)
class Form:
    """What a producer writes: quantization_config, what becomes of a matrix, and the words by which
    Freight names it.
    """

    said: dict[str, Any]
    linear: Linear
    words: str
    files: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "ct int4 32": Form(int4(32), of_integers(32, packed), "INT4, scales per 32 inputs"),
    "ct int4 64 zeros": Form(
        int4(64, symmetric=False),
        of_integers(64, lambda coded: packed(coded, zeros=True), symmetric=False),
        "INT4, scales and zero points per 64 inputs",
    ),
    "ct int4 128": Form(int4(128), of_integers(128, packed), "INT4, scales per 128 inputs"),
    "ct int4 channel": Form(int4(None), of_integers(None, packed), "INT4, scales per row"),
    "ct int4 channel zeros": Form(
        int4(None, symmetric=False),
        of_integers(None, lambda coded: packed(coded, zeros=True), symmetric=False),
        "INT4, scales and zero points per row",
    ),
    "ct int4 order": Form(
        int4(32, actorder="group"),
        of_integers(32, lambda coded: packed(coded, order=True), ordered=True),
        "INT4, scales per 32 inputs, groups in an order of their own",
    ),
    "gptq": Form(GPTQ, of_integers(32, lambda coded: gptq(coded, 1)), "INT4, scales per 32 inputs"),
    "gptq zeros": Form(
        GPTQ | {"sym": False, "group_size": 64},
        of_integers(64, lambda coded: gptq(coded, 1), symmetric=False),
        "INT4, scales and zero points per 64 inputs",
    ),
    "gptq v2": Form(
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        of_integers(32, lambda coded: gptq(coded, 0), symmetric=False),
        "INT4, scales and zero points per 32 inputs",
    ),
    "gptq order": Form(
        GPTQ | {"desc_act": True},
        of_integers(32, lambda coded: gptq(coded, 1), ordered=True),
        "INT4, scales per 32 inputs, groups in an order of their own",
    ),
    "gptq rows": Form(
        GPTQ | {"group_size": -1}, of_integers(None, lambda c: gptq(c, 1)), "INT4, scales per row"
    ),
    "awq": Form(
        AWQ,
        of_integers(32, awq, symmetric=False),
        "INT4, scales and zero points per 32 inputs",
    ),
    "ct nvfp4": Form(
        ct(FLOAT4, "nvfp4-pack-quantized", FLOAT4 | {"dynamic": "local"}),
        lambda w, _: nvfp4(w),
        "NVFP4, scales per 16 inputs",
    ),
    "modelopt nvfp4": Form(MODELOPT, lambda w, _: modelopt(w), "NVFP4, scales per 16 inputs"),
    "modelopt nvfp4 by group": Form(
        {key: value for key, value in MODELOPT.items() if key != "quant_algo"},
        lambda w, _: modelopt(w),
        "NVFP4, scales per 16 inputs",
    ),
    "ct mxfp4": Form(
        ct(FLOAT4 | {"strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
        lambda w, _: mxfp4(w),
        "MXFP4, scales per 32 inputs",
    ),
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@dataclass
class Written:
    config: dict[str, Any]
    tensors: Tensors
    plain: Tensors  # of the same model, with the values of its codes in float32
    quantized: tuple[str, ...]

    def save(self, folder: Path) -> Path:
        return _save(folder, self.config, self.tensors)

    def save_plain(self, folder: Path) -> Path:
        config = {k: v for k, v in self.config.items() if k != "quantization_config"}
        tensors = {name: tensor.float() for name, tensor in self.plain.items()}
        return _save(folder, config | {"dtype": "float32"}, tensors)


def _save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(form: Form, experts: str = "") -> Written:
    """The tiny model in that form: dense, or with the experts of `qwen3_moe` or `mixtral`. A copy,
    which a test may change.
    """
    return copy.deepcopy(_written(form, experts))


@cache
def _written(form: Form, experts: str) -> Written:
    draw = torch.Generator().manual_seed(3)
    config = CONFIG | {"quantization_config": form.said}
    shapes, routers = dict(SHAPES), []
    if experts:
        names = dict(zip(EXPERT_SHAPES, EXPERT_SHAPES, strict=True))
        block, config = "mlp", config | EXPERTS | {"model_type": experts}
        config["architectures"] = ["Qwen3MoeForCausalLM"]
        if experts == "mixtral":
            names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
            block = "block_sparse_moe"
            config = CONFIG | {
                "quantization_config": form.said,
                "model_type": experts,
                "architectures": ["MixtralForCausalLM"],
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size": 64,
            }
        shapes = {name: shape for name, shape in SHAPES.items() if not name.startswith("mlp")}
        shapes |= {
            f"{block}.experts.{expert}.{names[name]}": shape
            for expert in range(4)
            for name, shape in EXPERT_SHAPES.items()
        }
        routers = [f"{block}.gate"]
    tensors: Tensors = {}
    plain: Tensors = {}
    quantized = []
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            w = torch.randn(shape, generator=draw) / math.sqrt(shape[1])
            stored, plain[f"{prefix}{name}.weight"] = form.linear(w.half().float(), draw)
            tensors |= {f"{prefix}{name}.{suffix}": one for suffix, one in stored.items()}
            quantized.append(prefix + name)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(128).half()
        if experts == "qwen3_moe":
            for side in "qk":
                tensors[f"{prefix}self_attn.{side}_norm.weight"] = torch.ones(32).half()
        for router in routers:
            tensors[f"{prefix}{router}.weight"] = torch.randn(4, 128, generator=draw).half()
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = (
            torch.randn(config["vocab_size"], 128, generator=draw) / 11
        ).half()
    tensors["model.norm.weight"] = torch.ones(128).half()
    kept = {
        name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in quantized
    }
    return Written(config, tensors, plain | kept, tuple(quantized))
