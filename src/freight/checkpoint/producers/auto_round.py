"""AutoRound's own declaration (`quant_method: auto-round`). Imports no torch.

`packing_format` names the tool whose tensors a file has: AutoGPTQ's, AutoAWQ's, or compressed-tensors'
for numbers of `data_type` mx_fp and nv_fp. The tool leaves head, router and what it does not list in 16
bits, so tensors show which modules are quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from freight.base.fields import JsonObject
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import (
    E4M3,
    UNROUNDED,
    input_rounding,
    mapping,
    part,
    refuse_kv,
)
from freight.checkpoint.producers.gptq import read_awq, read_gptq
from freight.errors import CheckpointError, choices
from freight.fp8.scheme import Activations, LinearScheme, Packing, Rule, Scheme, WeightScales

# By packing_format without `auto_round:`: the declaration of GPTQ or AWQ that has the same tensors.
# The last two store zero points as they are, and no 1 less.
_INTEGERS: Mapping[str, JsonObject] = {
    "auto_gptq": {"checkpoint_format": "gptq"},
    "auto_awq": {},
    "auto_round": {"checkpoint_format": "gptq_v2"},
    "gptqmodel": {"checkpoint_format": "gptq_v2"},
}
# Numbers in compressed-tensors' layout, by the beginning of data_type, and bits
_FLOATS = {
    ("mx_fp", 8): LinearScheme.in_mxfp8(),
    ("mx_fp", 4): LinearScheme.in_four_bits(Packing.MXFP4, 32),
    ("nv_fp", 4): LinearScheme.in_four_bits(Packing.NVFP4, 16),
}
_PACKINGS = (*_INTEGERS, "llm_compressor", "fp8_static")
# Settings of a module that its tensors depend on
_SETTINGS = ("bits", "group_size", "sym", "data_type")
_WAY_OUT = "export the model in 4 bits, in MXFP8 or FP8, or use the model that it was made from"


def read_auto_round(declared: JsonObject) -> Scheme:
    """Read the declaration of AutoRound. Raises CheckpointError for what is not implemented."""
    packing = str(declared.get("packing_format", "auto_round:auto_gptq"))
    packing = packing.removeprefix("auto_round:")
    if packing not in _PACKINGS:
        raise CheckpointError(
            f"auto-round with packing_format {declared['packing_format']!r} is not implemented; {choices(_PACKINGS)} "
            f"are: {_WAY_OUT}"
        )
    if declared.get("rotation_config"):
        raise CheckpointError(
            f"auto-round with rotation_config {declared['rotation_config']!r} is not implemented: inputs would have to "
            "be rotated before every product; quantize the model without it"
        )
    _require_alike(declared)
    return _with_kv(declared, _weights(declared, packing))


def _weights(declared: JsonObject, packing: str) -> Scheme:
    if packing in _INTEGERS:
        return _integers(declared, packing)
    linear = _static_fp8(declared) if packing == "fp8_static" else _floats(declared)
    unused = (("*.input_global_scale", UNROUNDED),) if linear.four else ()
    rule = Rule(patterns.every(), replace(linear, or_plain=True))
    return Scheme("auto-round", E4M3, rules=(rule,), unused=unused)


def _with_kv(declared: JsonObject, scheme: Scheme) -> Scheme:
    """Return `scheme` with the declared KV cache, `static_kv_dtype`."""
    dtype = declared.get("static_kv_dtype")
    if dtype is None:
        return scheme
    if dtype in ("fp8", "float8_e4m3fn"):
        return replace(scheme, kv_format=E4M3, kv_static=True)
    return refuse_kv(scheme, f"static_kv_dtype {dtype!r}")


def _require_alike(declared: JsonObject) -> None:
    """Raise CheckpointError for modules with settings of their own, but for those in 16 bits."""
    of_all = {"bits": 4, "data_type": "int", **declared}
    for name, content in part(declared, "extra_config").items():
        settings = mapping(content, f"extra_config[{name!r}]")
        bits = settings.get("bits", of_all["bits"])
        if isinstance(bits, int) and bits >= 16:
            continue
        for key in _SETTINGS:
            if key in settings and settings[key] != of_all.get(key):
                raise CheckpointError(
                    f"auto-round with {key} {settings[key]!r} of {name!r}, and {of_all.get(key)!r} of all, is not "
                    "implemented: modules have the settings of all, or 16 bits; quantize them alike"
                )


def _integers(declared: JsonObject, packing: str) -> Scheme:
    """Return the scheme of integers in GPTQ's or AWQ's tensors."""
    bits = declared.get("bits")
    kind = declared.get("data_type", "int")
    if kind != "int" or bits != 4 or isinstance(bits, bool):
        raise CheckpointError(
            f"auto-round with bits {bits!r}, data_type {kind!r} and packing_format {packing!r} is not implemented; 4 "
            f"bits of 'int' are: {_WAY_OUT}"
        )
    known = {key: declared[key] for key in ("bits", "group_size", "sym") if key in declared}
    reader = read_awq if packing == "auto_awq" else read_gptq
    scheme = reader({**known, **_INTEGERS[packing]})
    rounding = _input_rounding(declared)
    rules = []
    for rule in scheme.rules:
        assert rule.linear is not None
        rules.append(replace(rule, linear=replace(rule.linear, input_rounding=rounding)))
    return replace(scheme, method="auto-round", rules=tuple(rules))


def _floats(declared: JsonObject) -> LinearScheme:
    """Return the scheme of numbers in compressed-tensors' layout."""
    kind = declared.get("data_type")
    bits = declared.get("bits")
    for (name, size), linear in _FLOATS.items():
        group = (linear.block or (1, 0))[1]
        if str(kind).startswith(name) and bits == size and declared.get("group_size") == group:
            return replace(linear, input_rounding=_input_rounding(declared))
    raise CheckpointError(
        f"auto-round with data_type {kind!r}, bits {bits!r}, group_size {declared.get('group_size')!r} is not "
        f"implemented; mx_fp of 8 and 4 bits in groups of 32, and nv_fp of 4 in groups of 16, are: {_WAY_OUT}"
    )


def _static_fp8(declared: JsonObject) -> LinearScheme:
    """Return the scheme of E4M3 with one static scale of inputs."""
    group = declared.get("group_size")
    scales = WeightScales.ROW if group == -1 else WeightScales.TENSOR
    static = declared.get("act_dynamic") is False and declared.get("act_group_size", 0) == 0
    settings = ("data_type", "bits", "act_bits", "fmt")
    values = tuple(declared.get(key) for key in settings)
    if (
        group not in (-1, 0)
        or not static
        or values[:3] != ("fp", 8, 8)
        or values[3] not in (None, "e4m3")
    ):
        stated = ", ".join(f"{key} {declared.get(key)!r}" for key in (*settings, "group_size"))
        raise CheckpointError(
            f"auto-round with {stated} is not implemented; E4M3 by row (-1) or tensor (0) with one static scale of "
            f"inputs is: {_WAY_OUT}"
        )
    return LinearScheme(scales, Activations.STATIC)


def _input_rounding(declared: JsonObject) -> str:
    """Return how inputs are declared to be rounded; '' for 16 bits."""
    bits = declared.get("act_bits")
    if not isinstance(bits, int) or bits >= 16:
        return ""
    is_int = str(declared.get("act_data_type", "int")).startswith("int")
    group = declared.get("act_group_size")
    return input_rounding(
        {
            "num_bits": bits,
            "type": "int" if is_int else "float",
            "strategy": "token" if group == -1 else "tensor",
            "group_size": group if isinstance(group, int) and group > 0 else None,
            "dynamic": declared.get("act_dynamic", True),
        }
    )
