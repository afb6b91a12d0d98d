"""`quant_method` fp8 and fbgemm_fp8: AutoFP8, Quark's export for vLLM, DeepSeek's blocks, transformers.

One scale per tensor (`weight_scale`, or `weight_scale_inv`, which is no inverse), or one per block where
`weight_block_size` says so; fbgemm has one per output row and cuts activations off at `activation_scale_ub`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import E4M3, activations, block_size, with_kv_scheme
from freight.errors import CheckpointError
from freight.fp8.scheme import Activations, LinearScheme, Rule, Scheme, WeightScales


def read_fp8(said: Mapping[str, Any]) -> Scheme:
    if said.get("fmt") not in (None, "e4m3"):
        raise CheckpointError(f"quant_method fp8 with fmt {said['fmt']!r} is not implemented; e4m3 is")
    size = said.get("weight_block_size")
    kind = activations(said.get("activation_scheme", "dynamic"), "quant_method fp8 with activation_scheme")
    if size is None:
        linear = LinearScheme(WeightScales.TENSOR, kind)
    else:  # transformers leaves matrices as they are that blocks do not divide
        block = block_size(size, "weight_block_size")
        linear = LinearScheme(WeightScales.BLOCK, kind, block, or_plain=True)
    key = "ignored_layers" if said.get("ignored_layers") else "modules_to_not_convert"
    rules = (*patterns.rules(said, key, patterns.searched), Rule(patterns.every(), linear))
    return with_kv_scheme(said, Scheme("fp8", E4M3, rules=rules))


def read_fbgemm(said: Mapping[str, Any]) -> Scheme:
    limit = said.get("activation_scale_ub", 1200.0)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise CheckpointError(f"fbgemm_fp8 with activation_scale_ub {limit!r}: it has to be finite and above 0")
    linear = LinearScheme(WeightScales.ROW, Activations.DYNAMIC, input_limit=float(limit))
    left_out = patterns.rules(said, "modules_to_not_convert", patterns.searched)
    unused = (("*.input_scale_ub", "activation_scale_ub in config.json says the same"),)
    return Scheme("fbgemm_fp8", E4M3, rules=(*left_out, Rule(patterns.every(), linear)), unused=unused)
