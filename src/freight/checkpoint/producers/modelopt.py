"""NVIDIA ModelOpt: one algorithm, or one per module, in hf_quant_config.json or config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freight.base.fields import JsonObject
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import (
    E4M3,
    UNROUNDED,
    mapping,
    part,
    refuse_kv,
    with_kv_scheme,
)
from freight.checkpoint.producers.compressed_tensors import read_groups
from freight.errors import CheckpointError, choices
from freight.fp8.scheme import (
    MXFP8_GROUP,
    Activations,
    LinearScheme,
    Packing,
    Rule,
    Scheme,
    WeightScales,
)

_ALGOS = {
    "FP8": LinearScheme(WeightScales.TENSOR, Activations.STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearScheme(WeightScales.ROW, Activations.DYNAMIC),
    # Per block, weight-only
    "FP8_PB_WO": LinearScheme(WeightScales.BLOCK, Activations.PLAIN, (128, 128)),
    # E2M1 with E4M3 scales of 16 inputs and a float32 scale per tensor; the second for weights only
    "NVFP4": LinearScheme.in_four_bits(Packing.MODELOPT_NVFP4, 16),
    "W4A16_NVFP4": LinearScheme.in_four_bits(Packing.MODELOPT_NVFP4, 16),
    "MXFP8": LinearScheme.in_mxfp8("FP8 per 32 inputs, powers of two"),
}


def read_modelopt(declared: JsonObject) -> Scheme:
    """Read ModelOpt's declaration.

    An FP8 cache may have no stored scales (ModelOpt's cast mode), so `kv_static` is False.
    """
    rules = tuple(_rules(declared))
    scheme = Scheme("modelopt", patterns.weight_format(rules), rules=rules)
    if scheme.four_bits:
        scheme = replace(scheme, unused=(("*.input_scale", UNROUNDED),))
    # Version 0.31 wrote the word under the second name
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        word = declared.get(key)
        if isinstance(word, str) and word != "FP8":
            return refuse_kv(scheme, f"{key} {word!r}")
        if word == "FP8":
            return replace(scheme, kv_format=E4M3)
    return replace(with_kv_scheme(declared, scheme), kv_static=False)


def _rules(declared: JsonObject) -> list[Rule]:
    left_out: list[Rule] = []
    for key in ("exclude_modules", "ignore"):
        left_out += patterns.rules(declared, key, patterns.wildcard_or_part)
    algo = declared.get("quant_algo")
    if algo is None:
        groups, _ = read_groups({"config_groups": declared.get("config_groups")}, "modelopt")
        return [*left_out, *map(_own_packing, groups)] if groups else []
    if algo != "MIXED_PRECISION":
        return [*left_out, Rule(patterns.every(), _linear(algo))]
    layers = part(declared, "quantized_layers")

    def linear(name: str) -> LinearScheme | None:
        of_module = mapping(layers[name], f"quantized_layers[{name!r}]").get("quant_algo")
        return None if of_module is None else _linear(of_module, f" of {name}")

    return [
        *left_out,
        *patterns.rules(declared, "quantized_layers", patterns.wildcard_or_part, linear),
    ]


def _own_packing(rule: Rule) -> Rule:
    """Return a rule of compressed-tensors' form with the tensors that ModelOpt writes. Raises
    CheckpointError for other numbers of 4 bits than NVFP4.
    """
    if rule.linear is not None and rule.linear.block == (1, MXFP8_GROUP):
        return replace(rule, linear=_ALGOS["MXFP8"])
    if rule.linear is None or rule.linear.four is None:
        return rule
    if rule.linear.four.packing is not Packing.NVFP4:
        raise CheckpointError(
            f"modelopt with weights of 4 bits in {rule.linear.four} is not implemented; NVFP4 is"
        )
    return replace(rule, linear=_ALGOS["NVFP4"])


def _linear(algo: Any, where: str = "") -> LinearScheme:
    if str(algo).upper() not in _ALGOS:
        raise CheckpointError(
            f"modelopt with quant_algo {algo!r}{where} is not implemented; {choices(sorted(_ALGOS))} are: export the "
            "model with one of these for every quantized module, or use the model in 16 bits"
        )
    return _ALGOS[str(algo).upper()]
