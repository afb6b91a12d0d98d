"""AMD Quark's native export: tensor specifications by name pattern, by class, and for all modules.

The first that matches a module applies, in this order. The cache's scales are those of the outputs
of k_proj and v_proj. The specification of such a module also covers its weight and input, so one
that has outputs alone leaves the weight in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from freight.base.fields import JsonObject
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import (
    E4M3,
    block_size,
    mapping,
    part,
    require_blocks_for_groups,
)
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, Rule, Scheme, WeightScales

_FAKE = "the weights are stored unquantized, and used as they are"


def read_quark(declared: JsonObject) -> Scheme:
    """Read the declaration of Quark's native export. Raises CheckpointError for what is not
    implemented.
    """
    if part(declared, "export").get("weight_format") == "fake_quantized":
        scheme = Scheme("quark", unused=(("*.weight_scale", _FAKE), ("*.input_scale", _FAKE)))
    else:
        rules = tuple(_rules(declared))
        scheme = Scheme("quark", patterns.weight_format(rules), rules=rules)
    if _quantizes_kv(declared):
        return replace(scheme, kv_format=E4M3, kv_static=True)
    return scheme


def _rules(declared: JsonObject) -> list[Rule]:
    rules = patterns.rules(declared, "exclude", patterns.wildcard)
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        specs = part(declared, key)
        rules += patterns.rules(declared, key, patterns.wildcard, partial(_named, specs, key))
    linears = []
    for name, spec in part(declared, "layer_type_quant_config").items():
        if name.rpartition(".")[2].lower() == "linear":
            linears.append(_linear(spec, f"layer_type_quant_config[{name!r}]"))
    linears.append(_linear(declared.get("global_quant_config"), "global_quant_config"))
    rules += [Rule(patterns.every(), linear) for linear in linears]
    return rules


def _named(specs: JsonObject, key: str, name: str) -> LinearScheme | None:
    return _linear(specs[name], f"{key}[{name!r}]")


def _linear(config: Any, where: str) -> LinearScheme | None:
    spec = mapping(config, where)
    weight = spec.get("weight")
    inputs = spec.get("input_tensors")
    if weight is None:
        if inputs is not None:
            raise CheckpointError(
                f"quark {where} quantizes input_tensors but no weight, which is not implemented"
            )
        return None
    qscheme = _require_fp8(weight, f"{where}.weight")
    if weight.get("is_dynamic"):
        raise CheckpointError(
            f"quark {where}.weight with is_dynamic true is not implemented; static weights are"
        )
    kind = _activations(inputs, f"{where}.input_tensors")
    if inputs is not None and qscheme in ("per_tensor", "per_channel"):
        require_blocks_for_groups(str(inputs.get("qscheme")), f"quark {where}.input_tensors")
    axis = weight.get("ch_axis")
    if qscheme == "per_tensor":
        return LinearScheme(WeightScales.TENSOR, kind)
    if qscheme == "per_channel" and axis in (None, 0):
        return LinearScheme(WeightScales.ROW, kind)
    if qscheme == "per_block":
        size = block_size(weight.get("block_size"), f"{where} block_size")
        return LinearScheme(WeightScales.BLOCK, kind, size)
    if qscheme == "per_group" and axis in (None, 1, -1):
        size = block_size([1, weight.get("group_size")], f"{where} [1, group_size]")
        return LinearScheme(WeightScales.BLOCK, kind, size)
    raise CheckpointError(
        f"quark {where}.weight {qscheme} with ch_axis {axis!r} is not implemented"
    )


def _activations(spec: Any, where: str) -> Activations:
    if spec is None:
        return Activations.PLAIN
    qscheme = _require_fp8(spec, where)
    if spec.get("is_dynamic"):
        return Activations.DYNAMIC
    if qscheme != "per_tensor":
        raise CheckpointError(
            f"quark {where} of static {qscheme} is not implemented; per_tensor is"
        )
    return Activations.STATIC


def _quantizes_kv(declared: JsonObject) -> bool:
    """Return whether outputs of k_proj and v_proj are quantized. Raises CheckpointError where other
    outputs are.
    """
    quantizes = False
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        for pattern, config in part(declared, key).items():
            outputs = mapping(config, f"{key}[{pattern!r}]").get("output_tensors")
            where = f"{key}[{pattern!r}].output_tensors"
            if outputs is None:
                continue
            if key == "layer_quant_config" and not pattern.endswith(("q_proj", "k_proj", "v_proj")):
                raise CheckpointError(
                    f"quark {where} is not implemented; outputs of k_proj and v_proj are quantized"
                )
            if not pattern.endswith("q_proj"):
                if _require_fp8(outputs, where) != "per_tensor":
                    raise CheckpointError(
                        f"quark {where} of {outputs['qscheme']} is not implemented; per_tensor is"
                    )
                quantizes = True
    if part(declared, "global_quant_config").get("output_tensors") is not None:
        raise CheckpointError("quark global_quant_config.output_tensors is not implemented")
    return quantizes


def _require_fp8(spec: Any, where: str) -> str:
    """Return the qscheme of a specification of FP8 tensors. Raises CheckpointError for any other
    specification.
    """
    declared = spec if isinstance(spec, Mapping) else {}
    if str(declared.get("dtype")).startswith(("fp4", "mxfp4")):
        raise CheckpointError(
            f"quark {where} of dtype {declared['dtype']!r} (MXFP4 or NVFP4 of amd-quark) is not implemented; "
            "MXFP4 is read from OpenAI's own files of gpt-oss (quant_method mxfp4)"
        )
    dtype = declared.get("dtype")
    qscheme = declared.get("qscheme")
    symmetric = declared.get("symmetric")
    if dtype != "fp8_e4m3" or qscheme is None or symmetric is False:
        raise CheckpointError(
            f"quark {where} of dtype {dtype!r}, qscheme {qscheme!r}, symmetric {symmetric!r} is not implemented; "
            "symmetric fp8_e4m3 is"
        )
    return str(qscheme)
