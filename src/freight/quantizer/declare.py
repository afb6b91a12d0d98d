"""Written checkpoint layouts: the declaration in config.json, and the scale tensors.

compressed-tensors  `weight_scale` [1], [rows, 1] or [blocks, blocks], `input_scale` [1], `k_scale`,
                    `v_scale` [1], in bfloat16 for a bfloat16 model, as llm-compressor writes them,
                    else in float32; in 4 bits the tensors of `quantizer.packing`
fp8                 AutoFP8's: `weight_scale`, `input_scale`, `k_scale`, `v_scale` float32 []; with
                    blocks DeepSeek's: `weight_scale_inv` float32 [blocks, blocks], a multiplier as
                    every scale is
gptq, awq           AutoGPTQ's and AutoAWQ's of INT4 (`quantizer.packing`), without KV scales
tgi                 `kv_scale` float32 [], for K and V, and `kv_cache_torch_dtype` in config.json
mxfp4               gpt-oss's own, kept; `k_scale` and `v_scale` as in compressed-tensors, and
                    `kv_cache_format` within its quantization_config

These tensors hold one KV scale per layer and side. Finer scales go into a separate file
(`checkpoint.extras`), so every engine can use the tensors. Only keys that old readers know are
written, because some readers refuse unknown ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freight.base.fields import JsonObject
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.four_bits import NVFP4_GROUP, in_pairs
from freight.fp8.mxfp4 import GROUP as MXFP4_GROUP
from freight.fp8.scheme import LayerScales, Packing
from freight.fp8.weights import BLOCK
from freight.model.config.dtype import TEXT_KEYS
from freight.quantizer.packing import pack
from freight.quantizer.plan import (
    ActivationScheme,
    ActOrder,
    Layout,
    QuantizePlan,
    WeightScheme,
)
from freight.quantizer.rounding import RoundedMatrix

_REPLACED = (
    "quantization_config",
    "compression_config",
    "kv_cache_torch_dtype",
    "kv_cache_dtype",
    "freight",
)
Content = dict[str, Any]  # of an object of JSON
# compressed-tensors' format of a file, where activations do not decide it
_FORMATS = {
    WeightScheme.INT8: "int-quantized",
    WeightScheme.INT4: str(Packing.INT4),
    WeightScheme.MXFP4: str(Packing.MXFP4),
    WeightScheme.NVFP4: str(Packing.NVFP4),
}
# Of its QuantizationArgs of weights, what is not as in `_arguments`
_WEIGHTS: Mapping[WeightScheme, Content] = {
    WeightScheme.TENSOR: {},
    WeightScheme.CHANNEL: {"strategy": "channel"},
    WeightScheme.BLOCK: {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
    WeightScheme.INT8: {"strategy": "channel", "type": "int"},
    WeightScheme.INT4: {"strategy": "group", "num_bits": 4, "type": "int"},
    WeightScheme.MXFP4: {
        "strategy": "group",
        "num_bits": 4,
        "group_size": MXFP4_GROUP,
        "scale_dtype": "torch.uint8",
    },
    WeightScheme.NVFP4: {
        "strategy": "tensor_group",
        "num_bits": 4,
        "group_size": NVFP4_GROUP,
        "scale_dtype": "torch.float8_e4m3fn",
    },
}

_ACT_ORDERS = {ActOrder.NONE: None, ActOrder.STATIC: "weight", ActOrder.GROUP: "group"}


def scale_format(layout: Layout, model_format: Format) -> Format:
    """Return the format in which scales are stored. float16 lacks the range."""
    if layout is Layout.COMPRESSED_TENSORS and model_format is Format.BFLOAT16:
        return Format.BFLOAT16
    return Format.FLOAT32


@dataclass(frozen=True)
class PlannedModules:
    """Modules that have a plan of their own.

    targets   names of modules, or `re:` and an expression that is matched from a name's start
    """

    targets: tuple[str, ...]
    plan: QuantizePlan


def declare(
    config: JsonObject,
    plan: QuantizePlan,
    ignored: Sequence[str],
    keeps: bool = False,
    mixed: Sequence[PlannedModules] = (),
) -> Content:
    """Return `config`, the config.json of the 16-bit model, with the declaration of what `plan`
    quantizes. `mixed`: where modules differ, the plan of each.

    A declaration of KV scales that the model already has is replaced. `keeps`: the declared weights
    stay as they are (MXFP4), and only the format of the KV scales is added to the declaration.
    """
    declared = _without(config, _REPLACED)
    for key in TEXT_KEYS:
        if isinstance(declared.get(key), Mapping):
            declared[key] = _without(declared[key], _REPLACED)
    if keeps:
        weights = config.get("quantization_config") or config.get("compression_config") or {}
        weights = _without(weights, ("kv_cache_format", "kv_cache_scheme"))
        if plan.kv_granularity is not None:
            weights["kv_cache_format"] = str(Format.E4M3FN)
        declared["quantization_config"] = weights
    elif plan.layout is Layout.TGI:
        declared["kv_cache_torch_dtype"] = Format.E4M3FN.torch_name
    elif plan.layout in _DECLARED:
        declared["quantization_config"] = _DECLARED[plan.layout](plan, ignored)
    # Otherwise there is a mixed cache alone, which has no standard declaration
    elif plan.weights is not WeightScheme.NONE or plan.kv_granularity is not None:
        declared["quantization_config"] = _compressed_tensors(plan, ignored, mixed)
    return declared


def with_own_head(declared: Content) -> Content:
    """Return a config.json that says that the output head is a tensor of its own."""
    key = "tie_word_embeddings"
    own: Content = {key: False}
    for part in TEXT_KEYS:
        if isinstance(declared.get(part), Mapping) and declared[part].get(key):
            own[part] = {**declared[part], key: False}
    return declared | own


def _without(config: JsonObject, keys: Sequence[str]) -> Content:
    return {key: value for key, value in config.items() if key not in keys}


def _fp8(plan: QuantizePlan, ignored: Sequence[str]) -> Content:
    content: Content = {
        "quant_method": "fp8",
        "activation_scheme": str(plan.activations),
        "ignored_layers": list(ignored),
    }
    if plan.weights is WeightScheme.BLOCK:
        content |= {
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(ignored),
        }
    return content | _kv(plan, "static")


def _gptq(plan: QuantizePlan, ignored: Sequence[str]) -> Content:
    """Modules are left out by expressions that are matched from the start of a name (GPTQModel's
    `dynamic`); the head has a key of its own.
    """
    content: Content = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": plan.group_size,
        "desc_act": plan.ordered,
        "sym": not plan.asymmetric,
        "checkpoint_format": "gptq_v2" if plan.asymmetric else "gptq",
        "lm_head": plan.lm_head,
    }
    left_out = [name for name in ignored if name != "lm_head"]
    if left_out:
        content["dynamic"] = {f"-:{re.escape(name)}$": {} for name in left_out}
    return content


def _awq(plan: QuantizePlan, ignored: Sequence[str]) -> Content:
    """Zero points are stored always, symmetric ones too."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": plan.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(ignored),
    }


_DECLARED = {Layout.FP8: _fp8, Layout.GPTQ: _gptq, Layout.AWQ: _awq}


def _compressed_tensors(
    plan: QuantizePlan, ignored: Sequence[str], mixed: Sequence[PlannedModules]
) -> Content:
    quantized = plan.weights is not WeightScheme.NONE
    parts = [PlannedModules(("Linear",), plan)] if quantized else []
    groups: dict[str, Content] = {}
    formats = []
    for index, part in enumerate(mixed or parts):
        formats.append(_format(part.plan))
        groups[f"group_{index}"] = {
            "targets": list(part.targets),
            "weights": _weights(part.plan),
            "input_activations": _activations(part.plan),
        }
    if mixed:  # as llm-compressor does, each names its own
        for group, format in zip(groups.values(), formats, strict=True):
            group["format"] = format
    different = len(set(formats)) > 1
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mixed-precision" if different else [*formats, "dense"][0],
        "config_groups": groups,
        "ignore": list(ignored) if quantized else [],
        **_kv(plan, _arguments("tensor", observer="static_minmax")),
    }


def _kv(plan: QuantizePlan, scheme: object) -> Content:
    """Return the KV cache's scheme, and the format that its scales were made for."""
    if plan.kv_granularity is None:
        return {}
    return {"kv_cache_scheme": scheme, "kv_cache_format": str(Format.E4M3FN)}


def _arguments(strategy: str, *, dynamic: bool = False, observer: str | None = None) -> Content:
    """Return compressed-tensors' QuantizationArgs."""
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": None,
        "block_structure": None,
        "observer": observer,
    }


def _format(plan: QuantizePlan) -> str:
    weight_only = plan.activations is ActivationScheme.NONE
    default = "naive-quantized" if weight_only else "float-quantized"
    return _FORMATS.get(plan.weights, default)


def _weights(plan: QuantizePlan) -> Content:
    content = _arguments("tensor", observer="static_minmax") | _WEIGHTS[plan.weights]
    if plan.weights is WeightScheme.INT4:
        content["group_size"] = plan.group_size
        content["symmetric"] = not plan.asymmetric
        if plan.method.gptq:
            content["actorder"] = _ACT_ORDERS[plan.method.act_order]
    return content


def _activations(plan: QuantizePlan) -> Content | None:
    if plan.activations is ActivationScheme.NONE:
        return None
    if plan.activations is ActivationScheme.STATIC:
        return _arguments("tensor", observer="static_minmax")
    if plan.weights is WeightScheme.BLOCK:
        return _arguments("group", dynamic=True) | {"group_size": BLOCK}
    kind = "int" if plan.weights is WeightScheme.INT8 else "float"
    return _arguments("token", dynamic=True) | {"type": kind}


def stored_tensors(
    plan: QuantizePlan,
    module: str,
    matrix: RoundedMatrix,
    input_scale: float | None,
    format: Format,
) -> dict[str, Tensor]:
    """Return the tensors of one quantized Linear. Scales of FP8 and INT8 are stored in `format`."""
    if not plan.weights.in_four_bits:
        return weight_tensors(plan, module, matrix.codes, matrix.scales, input_scale, format)
    if plan.weights is WeightScheme.MXFP4:
        tensors = {"weight_packed": in_pairs(matrix.codes), "weight_scale": matrix.scales}
    else:
        tensors = pack(matrix.groups, plan.layout)
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def weight_tensors(
    plan: QuantizePlan,
    module: str,
    data: Tensor,
    scale: Tensor,
    input_scale: float | None,
    format: Format,
) -> dict[str, Tensor]:
    """Return the tensors of one quantized Linear: `data` FP8 or INT8, `scale` float32 [], [rows] or
    [blocks, blocks]. Scales are stored in `format`.
    """
    stored = scale.to(torch_dtype(format))
    if plan.layout is Layout.COMPRESSED_TENSORS and stored.ndim < 2:
        stored = stored.view(1) if stored.ndim == 0 else stored[:, None]
    name = f"{module}.weight_scale"
    if plan.layout is Layout.FP8 and plan.weights is WeightScheme.BLOCK:
        name = f"{module}.weight_scale_inv"
    tensors = {f"{module}.weight": data, name: stored}
    if input_scale is not None:
        tensors[f"{module}.input_scale"] = _scalar(plan.layout, input_scale, format)
    return tensors


def kv_tensors(
    plan: QuantizePlan, attention: str, scales: LayerScales, format: Format
) -> dict[str, Tensor]:
    """Return the KV scales of the attention module named `attention`; `scales` has one for K and
    one for V.
    """
    (k,) = scales.k
    (v,) = scales.v
    if plan.layout is Layout.TGI:
        return {f"{attention}.kv_scale": _scalar(plan.layout, max(k, v), format)}
    return {
        f"{attention}.k_scale": _scalar(plan.layout, k, format),
        f"{attention}.v_scale": _scalar(plan.layout, v, format),
    }


def _scalar(layout: Layout, value: float, format: Format) -> Tensor:
    values = [value] if layout is Layout.COMPRESSED_TENSORS else value
    return torch.tensor(values, dtype=torch.float32, device="cpu").to(torch_dtype(format))
