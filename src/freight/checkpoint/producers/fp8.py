"""`quant_method` fp8 and fbgemm_fp8: AutoFP8, Quark's export for vLLM, DeepSeek's blocks,
transformers.

One scale per tensor (`weight_scale`, or `weight_scale_inv`, which is not an inverse), or one per
block where `weight_block_size` says so; fbgemm has one per output row and clips activations to
`activation_scale_ub`.
"""

from __future__ import annotations

import math

from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import E4M3, activations, block_size, with_kv_scheme
from freight.config.fields import JsonObject, is_number
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, Rule, Scheme, WeightScales


def read_fp8(declared: JsonObject) -> Scheme:
    """Read the declaration of quant_method fp8. Raises CheckpointError for what is not implemented."""
    if declared.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):  # the last is MiniMax's spelling
        raise CheckpointError(
            f"quant_method fp8 with fmt {declared['fmt']!r} is not implemented; e4m3 is"
        )
    size = declared.get("weight_block_size")
    kind = activations(
        declared.get("activation_scheme", "dynamic"), "quant_method fp8 with activation_scheme"
    )
    if size is None:
        linear = LinearScheme(WeightScales.TENSOR, kind)
    else:  # or_plain: transformers does not quantize matrices that blocks do not divide
        block = block_size(size, "weight_block_size")
        linear = LinearScheme(WeightScales.BLOCK, kind, block, or_plain=True)
    key = "ignored_layers" if declared.get("ignored_layers") else "modules_to_not_convert"
    rules = (*patterns.rules(declared, key, patterns.searched), Rule(patterns.every(), linear))
    return with_kv_scheme(declared, Scheme("fp8", E4M3, rules=rules))


def read_fbgemm(declared: JsonObject) -> Scheme:
    """Read the declaration of fbgemm_fp8. Raises CheckpointError for what is not implemented."""
    limit = declared.get("activation_scale_ub", 1200.0)
    if not is_number(limit) or not 0 < limit < math.inf:
        raise CheckpointError(
            f"fbgemm_fp8 with activation_scale_ub {limit!r}: it must be finite and above 0"
        )
    linear = LinearScheme(WeightScales.ROW, Activations.DYNAMIC, input_limit=float(limit))
    left_out = patterns.rules(declared, "modules_to_not_convert", patterns.searched)
    unused = (("*.input_scale_ub", "config.json has it as activation_scale_ub"),)
    return Scheme(
        "fbgemm_fp8", E4M3, rules=(*left_out, Rule(patterns.every(), linear)), unused=unused
    )
