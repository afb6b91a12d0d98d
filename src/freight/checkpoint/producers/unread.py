"""Tools whose files no kernel has the form of: HQQ and bitsandbytes. Imports no torch.

HQQ optimizes zero points (`optimize`, its default) to numbers that are no integers, and groups may lie
along the outputs.
bitsandbytes has code books of its own (NF4, FP4), with scales of 64 values that follow each other in the
flattened matrix; LLM.int8 multiplies inputs beyond a threshold in 16 bits. Their values are not those of
INT4, E2M1 or INT8 with the scales that kernels take, and rounding them again would lose what they kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from freight.base.fields import JsonObject
from freight.errors import CheckpointError

_WAY_OUT = (
    "name the model in 16 bits that it was made from, with --quantization int4, int8 or fp8, or a copy of it in GPTQ, "
    "AWQ, compressed-tensors or GGUF"
)


def refuse_hqq(declared: JsonObject) -> NoReturn:
    """Raise CheckpointError with what HQQ declares: `quant_config` with `weight_quant_params`, of all
    modules or by name, or the parameters themselves.
    """
    config = declared.get("quant_config")
    weights = _weights(config) or _weights(declared)
    if not weights and isinstance(config, Mapping):  # of modules by their names
        weights = next(filter(None, map(_weights, config.values())), {})
    raise CheckpointError(
        f"hqq with nbits {weights.get('nbits')!r}, group_size {weights.get('group_size')!r} and axis "
        f"{weights.get('axis')!r} is not implemented: its zero points are no integers; {_WAY_OUT}"
    )


def _weights(config: object) -> JsonObject:
    """Return the parameters of weights in `config`; {} if it has none."""
    if not isinstance(config, Mapping):
        return {}
    inner = config.get("weight_quant_params")
    if isinstance(inner, Mapping):
        return inner
    return config if "nbits" in config else {}


def refuse_bitsandbytes(declared: JsonObject) -> NoReturn:
    """Raise CheckpointError with what bitsandbytes declares."""
    if declared.get("load_in_8bit", declared.get("_load_in_8bit")):
        raise CheckpointError(
            f"bitsandbytes with load_in_8bit, llm_int8_threshold {declared.get('llm_int8_threshold', 6.0)!r} is not "
            f"implemented: inputs beyond the threshold are multiplied in 16 bits; {_WAY_OUT}"
        )
    kind = declared.get("bnb_4bit_quant_type", "fp4")
    nested = bool(declared.get("bnb_4bit_use_double_quant"))
    raise CheckpointError(
        f"bitsandbytes with load_in_4bit, bnb_4bit_quant_type {kind!r} and bnb_4bit_use_double_quant {nested} is not "
        f"implemented: no kernel has its code book; {_WAY_OUT}"
    )
