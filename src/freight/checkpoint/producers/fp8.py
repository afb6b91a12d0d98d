"""Readers of `quant_method` fp8 (AutoFP8, Quark for vLLM, DeepSeek, transformers) and fbgemm_fp8.

A matrix of fp8 has one scale, or one per block if `weight_block_size` is given. The tensor of
scales is `weight_scale` or `weight_scale_inv`; the second is no inverse, despite its name. A matrix
of fbgemm_fp8 has a scale per output row, and activations are clipped to `activation_scale_ub`.
"""

from __future__ import annotations

import math

from freight.base.fields import JsonObject, is_number
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import E4M3, activations, block_size, with_kv_scheme
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, Scheme, WeightScales


def read_fp8(declared: JsonObject) -> Scheme:
    """Read the declaration of quant_method fp8. Raises CheckpointError for what is not implemented."""
    if declared.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):  # MiniMax writes the last
        raise CheckpointError(
            f"quant_method fp8 with fmt {declared['fmt']!r} is not implemented; e4m3 is"
        )
    size = declared.get("weight_block_size")
    inputs = activations(
        declared.get("activation_scheme", "dynamic"), "quant_method fp8 with activation_scheme"
    )
    if size is None:
        linear = LinearScheme(WeightScales.TENSOR, inputs)
    else:
        block = block_size(size, "weight_block_size")
        # or_plain: transformers leaves a matrix in 16 bits if its shape is no multiple of the block
        linear = LinearScheme(WeightScales.BLOCK, inputs, block, or_plain=True)
    key = "modules_to_not_convert"
    if declared.get("ignored_layers"):
        key = "ignored_layers"
    rules = patterns.all_but(declared, key, patterns.searched, linear)
    return with_kv_scheme(declared, Scheme("fp8", E4M3, rules=rules))


def read_fbgemm(declared: JsonObject) -> Scheme:
    """Read the declaration of fbgemm_fp8. Raises CheckpointError for what is not implemented."""
    limit = declared.get("activation_scale_ub", 1200.0)  # the default of transformers
    if not is_number(limit) or not 0 < limit < math.inf:
        raise CheckpointError(
            f"fbgemm_fp8 with activation_scale_ub {limit!r}: it must be finite and above 0"
        )
    linear = LinearScheme(WeightScales.ROW, Activations.DYNAMIC, input_limit=float(limit))
    rules = patterns.all_but(declared, "modules_to_not_convert", patterns.searched, linear)
    unused = (("*.input_scale_ub", "config.json has it as activation_scale_ub"),)
    return Scheme("fbgemm_fp8", E4M3, rules=rules, unused=unused)
