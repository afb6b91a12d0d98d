"""compressed-tensors, as llm-compressor writes it: groups of modules, each with its own arguments.

The payload of `float-quantized` and `naive-quantized` is the same; a group without
`input_activations` is weight-only. `int-quantized` is INT8 weights with INT8 activations, or INT4
with a code to a byte; `mxfp8-quantized` is E4M3 with powers of two. Weights in 4 bits are read in
`four_bits.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from freight.base.fields import JsonObject
from freight.base.patterns import MOST_EXPRESSIONS
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import (
    E4M3,
    OF_INPUTS,
    UNROUNDED,
    block_size,
    input_rounding,
    mapping,
    part,
    require_blocks_for_groups,
    require_fp8,
    require_int8,
    with_kv_scheme,
)
from freight.checkpoint.producers.four_bits import is_in_four_bits, linear_in_four_bits
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.fp8.scheme import (
    MXFP8_GROUP,
    Activations,
    LinearScheme,
    Rule,
    Scheme,
    WeightScales,
)

_SCALES = {"tensor": WeightScales.TENSOR, "channel": WeightScales.ROW}  # by strategy
# Values of quantization_status before 'compressed': weights are stored as they were computed with
UNCOMPRESSED = ("initialized", "calibration", "frozen")


def read_compressed_tensors(declared: JsonObject) -> Scheme:
    """Read the declaration of compressed-tensors. Raises CheckpointError for what is not
    implemented.
    """
    _refuse_transforms(part(declared, "transform_config"))
    sparsity = part(declared, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise CheckpointError(
            f"compressed-tensors with sparsity_config = {dict(sparsity)!r} is not implemented"
        )
    rules, kv_outputs = read_groups(declared, "compressed-tensors")
    uncompressed = declared.get("quantization_status") in UNCOMPRESSED
    scheme = Scheme(
        "compressed-tensors", _weight_format(rules), rules=tuple(rules), uncompressed=uncompressed
    )
    if scheme.four_bits:
        unused = [("*.input_global_scale", UNROUNDED)]
        if scheme.rounded_inputs:
            unused += [("*.input_scale", OF_INPUTS), ("*.input_zero_point", OF_INPUTS)]
        scheme = replace(scheme, unused=tuple(unused))
    if kv_outputs:  # files older than kv_cache_scheme quantize the outputs of k_proj and v_proj
        scheme = replace(scheme, kv_format=E4M3, kv_static=True)
    return with_kv_scheme(declared, scheme)


def _weight_format(rules: list[Rule]) -> Format | None:
    """Return the one format of all groups. Raises CheckpointError for INT8 beside another."""
    linears = [rule.linear for rule in rules if rule.linear is not None]
    integers = [linear for linear in linears if linear.integers]
    if integers and len(integers) < len(linears):
        raise CheckpointError(
            "compressed-tensors with weights in INT8 and in other formats side by side is not implemented"
        )
    return Format.INT8 if integers else patterns.weight_format(rules)


def _refuse_transforms(declared: JsonObject) -> None:
    """Raise CheckpointError for rotations of values at run time.

    Those at `weight_input` and `weight_output` are part of the stored weights, and nothing is left
    to compute (compressed-tensors, TransformLocation.is_online).
    """
    groups = mapping(declared.get("config_groups"), "transform_config.config_groups")
    for name, group in groups.items():
        steps = mapping(group, f"transform_config {name}").get("apply") or []
        if not isinstance(steps, list):
            steps = [steps]
        for step in steps:
            location = step.get("location") if isinstance(step, Mapping) else step
            if location not in ("weight_input", "weight_output"):
                raise CheckpointError(
                    f"compressed-tensors with transform_config: {name} at {location!r} is not implemented; only "
                    "rotations that are part of the stored weights are (weight_input, weight_output)"
                )
    if declared and not groups:
        raise CheckpointError(
            f"compressed-tensors with transform_config = {dict(declared)!r} is not implemented"
        )


def read_groups(declared: JsonObject, method: str) -> tuple[list[Rule], bool]:
    """Return the rules of `ignore` and `config_groups`, and whether a group quantizes the outputs
    of k_proj and v_proj.

    Precedence: an exact name, then a regular expression, then a class.
    """
    by_rank: tuple[list[Rule], ...] = ([], [], [])
    kv_outputs = False
    for name, content in part(declared, "config_groups").items():
        where = f"{method} config_groups[{name!r}]"
        group = mapping(content, where)
        targets = patterns.names(group, "targets") or ["Linear"]
        if all(target.endswith("Attention") for target in targets):
            continue  # queries, keys and values: `kv_cache_scheme` declares the cache too
        if group.get("output_activations"):
            _require_kv_outputs(group, targets, where)
            kv_outputs = True
        linear = _linear(group, where, declared.get("format"))
        if linear is not None:
            for rank, rules in enumerate(by_rank):
                members = ((target, linear) for target in targets if _rank(target) == rank)
                rules += patterns.joined(members, patterns.class_or_exact, where)
    ranked = [rule for rules in by_rank for rule in rules]
    if len(ranked) > MOST_EXPRESSIONS:
        raise CheckpointError(
            f"config.json: config_groups have {len(ranked):,} expressions; at most "
            f"{MOST_EXPRESSIONS:,} are read"
        )
    return [*patterns.rules(declared, "ignore", patterns.class_or_exact), *ranked], kv_outputs


def _rank(target: str) -> int:
    if target in patterns.CLASSES:
        return 2
    return 1 if target.startswith("re:") else 0


def _linear(group: JsonObject, where: str, format: object) -> LinearScheme | None:
    """Return how a group quantizes a Linear; None if it does not quantize weights. format: that of
    all groups which name none.
    """
    weights = mapping(group.get("weights"), f"{where} weights")
    inputs = mapping(group.get("input_activations"), f"{where} input_activations")
    if not weights:
        if inputs:
            raise CheckpointError(
                f"{where} quantizes input_activations but no weights, which is not implemented"
            )
        return None
    if is_in_four_bits(weights):
        return linear_in_four_bits(weights, inputs, where, group.get("format", format))
    if weights.get("type") == "int" and weights.get("num_bits") == 8:
        return _int8_linear(weights, inputs, where)
    require_fp8(weights, f"{where} weights")
    if weights.get("dynamic"):
        raise CheckpointError(
            f"{where} weights with dynamic {weights['dynamic']!r} are not implemented; static ones are"
        )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if _is_mxfp8(weights, group.get("format", format)):
        return LinearScheme.in_mxfp8(input_rounding(inputs))
    kind = _activations(inputs, where)
    if strategy == "block":
        block = block_size(weights.get("block_structure"), "block_structure")
        return LinearScheme(WeightScales.BLOCK, kind, block)
    if strategy == "group":
        block = block_size([1, weights.get("group_size")], "group_size")
        return LinearScheme(WeightScales.BLOCK, kind, block)
    if kind is not Activations.PLAIN:
        require_blocks_for_groups(str(inputs.get("strategy")), f"{where} input_activations")
    if strategy not in tuple(_SCALES):  # it may be a list
        raise CheckpointError(f"{where} weights with strategy {strategy!r} are not implemented")
    return LinearScheme(_SCALES[strategy], kind)


def _is_mxfp8(weights: JsonObject, format: object) -> bool:
    """Return whether E4M3 weights have powers of two as scales, in bytes (compressed-tensors,
    MXFP8QuantizationCompressor).
    """
    in_bytes = str(weights.get("scale_dtype")).removeprefix("torch.") in ("uint8", "float8_e8m0fnu")
    return weights.get("group_size") == MXFP8_GROUP and (in_bytes or format == "mxfp8-quantized")


def _int8_linear(weights: JsonObject, inputs: JsonObject, where: str) -> LinearScheme:
    """Return how a group quantizes to INT8: weights per output row or tensor, activations per token
    or with one static scale, all of them symmetric. Raises CheckpointError for anything else.
    """
    require_int8(weights, f"{where} weights")
    strategy = weights.get("strategy") or "tensor"
    if strategy not in tuple(_SCALES) or weights.get("dynamic"):
        raise CheckpointError(
            f"{where} weights in INT8 with strategy {strategy!r} and dynamic {weights.get('dynamic')!r} are not "
            "implemented; static ones of strategy 'channel' or 'tensor' are"
        )
    if not inputs:
        raise CheckpointError(
            f"{where} weights in INT8 without input_activations are not implemented: products in INT8 round both; "
            "quantize the model with activations (W8A8), or to FP8"
        )
    require_int8(inputs, f"{where} input_activations")
    dynamic = inputs.get("dynamic")
    kind = inputs.get("strategy") or "tensor"
    if (dynamic, kind) not in ((True, "token"), (False, "tensor")):
        raise CheckpointError(
            f"{where} input_activations in INT8 with dynamic {dynamic!r} and strategy {kind!r} are not implemented; "
            "dynamic ones of strategy 'token', and static ones of strategy 'tensor', are"
        )
    activations = Activations.DYNAMIC if dynamic else Activations.STATIC
    return LinearScheme(_SCALES[strategy], activations, integers=True)


def _activations(inputs: JsonObject, where: str) -> Activations:
    if not inputs:
        return Activations.PLAIN
    require_fp8(inputs, f"{where} input_activations")
    if inputs.get("dynamic") is True:
        return Activations.DYNAMIC
    strategy = inputs.get("strategy") or "tensor"
    if inputs.get("dynamic") or strategy != "tensor":
        raise CheckpointError(
            f"{where} input_activations with dynamic {inputs.get('dynamic')!r} and strategy {strategy!r} are not "
            "implemented; dynamic ones, and static ones of strategy 'tensor', are"
        )
    return Activations.STATIC


def _require_kv_outputs(group: JsonObject, targets: list[str], where: str) -> None:
    require_fp8(mapping(group["output_activations"], where), f"{where} output_activations")
    if not all(target.endswith(("k_proj", "v_proj", "q_proj")) for target in targets):
        raise CheckpointError(
            f"{where} quantizes the outputs of {targets!r}; only those of k_proj and v_proj can be"
        )
