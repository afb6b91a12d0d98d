"""`quant_method` mxfp4: gpt-oss experts in E2M1 with a power of two per 32 inputs, rest in 16 bits."""

from __future__ import annotations

import re

from freight.base.fields import JsonObject
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import E4M3
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, Rule, Scheme, WeightScales

MXFP4 = LinearScheme(WeightScales.BLOCK, Activations.PLAIN, (1, 32), bits=4)
_EXPERTS = re.compile(r"(?:.*\.)?mlp\.experts(?:\.|$)")
_FAMILY = "gpt_oss"  # the family whose experts are read


def read_mxfp4(declared: JsonObject) -> Scheme:
    """Read the declaration, with config.json's `model_type`. Raises CheckpointError for a model other than gpt-oss."""
    model_type = declared.get("model_type")
    if model_type != _FAMILY:
        raise CheckpointError(
            f"quant_method mxfp4 of model_type {model_type!r} is not implemented: MXFP4 is read for the experts of "
            f"{_FAMILY}, and for no other modules; use the model in 16 bits or FP8"
        )
    left_out = patterns.rules(declared, "modules_to_not_convert", patterns.searched)
    return Scheme("mxfp4", E4M3, rules=(*left_out, Rule(_EXPERTS, MXFP4)))
