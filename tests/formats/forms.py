"""Every form of an FP8 checkpoint, by producer: what it declares, and what it stores."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from tests.formats.writers import (
    BF16,
    F32,
    MODULES,
    SHAPES,
    Form,
    Rounded,
    Tensors,
    autofp8,
    decoded,
    per_block,
    per_row,
    per_tensor,
    renamed,
    spread,
)
from torch import Tensor


def number(value: float, dtype: torch.dtype = F32, shape: tuple[int, ...] = ()) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def input_scale(module: str) -> float:
    """Another one for every module but for q, k, v and gate, up of one layer, which producers make
    equal.
    """
    return 0.004 * (
        1
        + list(SHAPES).index(
            re.sub("[kv]_proj", "q_proj", module.split(".", 3)[3]).replace("up", "gate")
        )
    )


def kv(
    k: str, v: str = "", dtype: torch.dtype = F32, shape: tuple[int, ...] = ()
) -> Callable[[int], Tensors]:
    names = {k: 0.0091, v: 0.0053}
    return lambda layer: {
        name: number(scale * (layer + 1), dtype, shape) for name, scale in names.items() if name
    }


def from_autofp8(module: str, w: Tensor, inputs: str = "") -> Rounded:
    stored, scale = autofp8(w)
    extra = {inputs: number(input_scale(module))} if inputs else {}
    return {"weight": stored, "weight_scale": scale, **extra}, decoded(stored) * scale


def static(
    rounded: Rounded, module: str, dtype: torch.dtype = F32, shape: tuple[int, ...] = ()
) -> Rounded:
    return renamed(rounded, {}, {"input_scale": number(input_scale(module), dtype, shape)})


def torchao(rounded: Rounded) -> Rounded:
    return renamed(rounded, {"weight": "_weight_qdata", "weight_scale": "_weight_scale"})


def arguments(strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    unset = dict.fromkeys(
        ("actorder", "block_structure", "group_size", "scale_dtype", "zp_dtype", "observer")
    )
    return {
        **unset,
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        **more,
    }


def groups(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": "float-quantized" if inputs else "naive-quantized",
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
        **more,
    }


def quark(qscheme: str, inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    weight = {
        "dtype": "fp8_e4m3",
        "qscheme": qscheme,
        "is_dynamic": False,
        "ch_axis": 0,
        "symmetric": None,
    }
    everywhere = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    export = {"weight_format": "real_quantized", "pack_method": "reorder"}
    return {
        "quant_method": "quark",
        "global_quant_config": everywhere,
        "exclude": ["*lm_head"],
        "export": export,
        **more,
    }


def ao(kind: str, granularity: Any, **data: Any) -> dict[str, Any]:
    default = {"_type": kind, "_version": 2, "_data": {"granularity": granularity, **data}}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": default},
        "modules_to_not_convert": None,
    }


def e8m0(rounded: Rounded, dtype: torch.dtype) -> Rounded:
    """The same bytes under scales that are powers of two, 2 ** (byte - 127), of about the same
    size.
    """
    tensors, _ = rounded
    exponent = tensors["weight_scale"].log2().ceil()
    scale = (exponent + 127).to(torch.uint8).view(dtype)
    wide = spread(2.0**exponent, (128, 128), tuple(tensors["weight"].shape))
    return {"weight": tensors["weight"], "weight_scale_inv": scale}, decoded(
        tensors["weight"]
    ) * wide


TOKEN = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True, "ch_axis": 1}
STATIC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
BLOCKS = {**FP8, "fmt": "e4m3", "weight_block_size": [128, 128], "ignored_layers": None}
AO_DYNAMIC = "Float8DynamicActivationFloat8WeightConfig"
PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}}
OPT = {"producer": {"name": "modelopt", "version": "0.29.0"}}
ARGS = {"dynamic": False, "num_bits": 8, "type": "float"}
OUTPUTS = {"*k_proj": {"weight": STATIC, "input_tensors": STATIC, "output_tensors": STATIC}}
SCALES = ("self_attn.k_scale", "self_attn.v_scale")
INVERSE = {"weight_scale": "weight_scale_inv"}


def modelopt(module: str, w: Tensor) -> Rounded:
    return static(per_tensor(w), module)


def algo(name: str, **more: Any) -> dict[str, Any]:
    return {
        **OPT,
        "quantization": {
            "quant_algo": name,
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head"],
            **more,
        },
    }


FORMS = {
    "autofp8 static": Form(
        {**FP8, "activation_scheme": "static", "kv_cache_scheme": "static"},
        lambda m, w: from_autofp8(m, w, "input_scale"),
        "static",
        kv=kv(*SCALES),
    ),
    "autofp8 dynamic": Form(FP8, from_autofp8, "dynamic"),
    "autofp8 of 2024-04": Form(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda m, w: from_autofp8(m, w, "act_scale"),
        "static",
        kv=kv("self_attn.kv_scale"),
    ),
    "ct tensor static": Form(
        groups(arguments("tensor"), arguments("tensor"), kv_cache_scheme=arguments("tensor")),
        lambda m, w: static(per_tensor(w, BF16, (1,)), m, BF16, (1,)),
        "static",
        kv=kv(*SCALES, BF16, (1,)),
    ),
    "ct channel token": Form(
        groups(arguments("channel"), arguments("token", True)),
        lambda m, w: per_row(w, BF16),
        "dynamic",
    ),
    "ct block": Form(
        groups(
            arguments("block", block_structure=[128, 128]), arguments("group", True, group_size=128)
        ),
        lambda m, w: per_block(w, dtype=BF16),
        "dynamic",
    ),
    "ct weights only": Form(
        groups(arguments("tensor"), None), lambda m, w: per_tensor(w, BF16, (1,))
    ),
    "ct cache only": Form(
        groups({}, None, config_groups={}, format="dense", kv_cache_scheme=arguments("attn_head")),
        kv=kv(*SCALES, BF16, (2, 1, 1)),
    ),
    "ct of 2024": Form(
        None,
        lambda m, w: renamed(
            static(per_tensor(w), m), {}, {"weight_zero_point": torch.zeros(1, dtype=torch.int8)}
        ),
        "static",
        kv=kv("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale", F32, (1,)),
        config={
            "compression_config": {
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": ARGS, "input_activations": ARGS}
                },
                "format": "naive-quantized",
                "ignore": ["re:.*lm_head"],
                "kv_cache_scheme": arguments("tensor"),
                "quantization_status": "frozen",
            }
        },
    ),
    "deepseek": Form(BLOCKS, lambda m, w: renamed(per_block(w), INVERSE), "dynamic"),
    "deepseek ue8m0": Form(
        {**BLOCKS, "scale_fmt": "ue8m0"},
        lambda m, w: e8m0(per_block(w), torch.float8_e8m0fnu),
        "dynamic",
    ),
    "deepseek ue8m0 as bytes": Form(
        {**BLOCKS, "scale_fmt": "ue8m0"}, lambda m, w: e8m0(per_block(w), torch.uint8), "dynamic"
    ),
    "transformers static blocks": Form(
        {**BLOCKS, "activation_scheme": "static"},
        lambda m, w: renamed(
            static(per_block(w), m), {**INVERSE, "input_scale": "activation_scale"}
        ),
        "static",
    ),
    "modelopt own file": Form(
        None,
        modelopt,
        "static",
        kv=kv("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        files={"hf_quant_config.json": algo("FP8", kv_cache_quant_algo="FP8")},
    ),
    "modelopt in config": Form(
        {
            "config_groups": {
                "group_0": {"input_activations": ARGS, "weights": ARGS, "targets": ["Linear"]}
            },
            "ignore": ["lm_head", "model.layers.0.mlp*"],
            "quant_algo": "FP8",
            "kv_cache_scheme": ARGS,
            **OPT,
            "quant_method": "modelopt",
        },
        modelopt,
        "static",
        plain=r"lm_head|embed|layers\.0\.mlp",
        kv=kv("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", F32, (1,)),
    ),
    "modelopt channel token": Form(
        None,
        lambda m, w: renamed(
            per_row(w), {}, {"weight_scale": per_row(w)[0]["weight_scale"].flatten()}
        ),
        "dynamic",
        files={"hf_quant_config.json": algo("FP8_PER_CHANNEL_PER_TOKEN")},
    ),
    "modelopt blocks": Form(
        None,
        lambda m, w: renamed(
            per_block(w), {}, {"weight_scale": per_block(w)[0]["weight_scale"][:, None, :, None]}
        ),
        files={"hf_quant_config.json": algo("fp8_pb_wo")},
    ),
    "modelopt mixed": Form(
        None,
        modelopt,
        "static",
        plain="lm_head|embed|mlp",
        files={
            "hf_quant_config.json": algo(
                "MIXED_PRECISION",
                quantized_layers={m: {"quant_algo": "FP8"} for m in MODULES if "mlp" not in m},
            )
        },
    ),
    "quark for vllm": Form(
        {
            "quant_method": "fp8",
            "activation_scheme": None,
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        },
        lambda m, w: per_tensor(w),
        kv=kv(*SCALES),
    ),
    "quark": Form(
        quark("per_tensor", STATIC, layer_quant_config={**OUTPUTS, "*v_proj": OUTPUTS["*k_proj"]}),
        lambda m, w: renamed(static(per_tensor(w), m), {}, {"weight_zero_point": torch.zeros(())}),
        "static",
        kv=lambda layer: {
            "self_attn.k_proj.output_scale": number(0.01),
            "self_attn.v_proj.output_scale": number(0.01),
            "self_attn.q_proj.output_scale": number(0.02),
            "self_attn.prob_output_scale": number(1 / 448),
        },
    ),
    "quark channel token": Form(
        quark("per_channel", TOKEN, exclude=["lm_head", "*.layers.1.self_attn.v_proj"]),
        lambda m, w: per_row(w),
        "dynamic",
        plain="lm_head|embed|layers.1.self_attn.v_proj",
    ),
    "transformers": Form(
        {
            **BLOCKS,
            "weight_block_size": [64, 256],
            "modules_to_not_convert": ["lm_head", "self_attn"],
            "dequantize": False,
        },
        lambda m, w: renamed(per_block(w, (64, 256)), INVERSE),
        "dynamic",
        plain="lm_head|embed|self_attn|down_proj",  # whose 320 columns blocks of 256 do not divide
    ),
    "transformers per tensor": Form(
        {**FP8, "activation_scheme": "static", "weight_block_size": None, "ignored_layers": None},
        lambda m, w: renamed(
            static(per_tensor(w), m), {**INVERSE, "input_scale": "activation_scale"}
        ),
        "static",
    ),
    "fbgemm": Form(
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1.5,
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"),
            ],
        },
        lambda m, w: renamed(per_row(w), {}, {"input_scale_ub": number(1.5, F32, (1,))}),
        "dynamic",
        1.5,
        plain="lm_head|embed|layers.0.self_attn",
    ),
    "torchao row": Form(
        ao(AO_DYNAMIC, [PER_ROW, PER_ROW]), lambda m, w: torchao(per_row(w)), "dynamic"
    ),
    "torchao tensor": Form(
        ao(AO_DYNAMIC, None, activation_value_ub=2.0),
        lambda m, w: torchao(per_tensor(w, F32, (1, 1))),
        "dynamic",
        2.0,
    ),
    "torchao weights only, with head and embedding": Form(
        ao("Float8WeightOnlyConfig", PER_ROW), lambda m, w: torchao(per_row(w)), plain="nothing"
    ),
    "text generation inference": Form(
        None, kv=kv("self_attn.kv_scale"), config={"kv_cache_torch_dtype": "float8_e4m3fn"}
    ),
}
