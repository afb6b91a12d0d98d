"""Weights in 4 bits as compressed-tensors declares them: INT4, NVFP4 and MXFP4. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import JsonObject, is_integer
from freight.checkpoint.producers.common import input_rounding
from freight.errors import CheckpointError
from freight.fp8.scheme import LinearScheme, Packing

# Formats of a file with groups in several formats, each of which may name its own
_ANY = (None, "mixed-precision")


def is_in_four_bits(weights: JsonObject) -> bool:
    """Return whether these QuantizationArgs say 4 bits."""
    return weights.get("num_bits") == 4


def linear_in_four_bits(
    weights: JsonObject, inputs: JsonObject, where: str, format: object
) -> LinearScheme:
    """Return the scheme of a group of modules in 4 bits. `inputs`: its input_activations, {} for
    none; format: what compressed-tensors calls the layout of the tensors.

    Whatever bits inputs are declared to have, they are not rounded so
    (`LinearScheme.input_rounding`). Raises CheckpointError for what is not implemented.
    """
    is_float = weights.get("type") == "float"
    linear = _float(weights, where) if is_float else _int(weights, where, format)
    assert linear.four is not None
    packing = linear.four.packing
    if format not in (*_ANY, packing):  # it may be a list
        raise CheckpointError(
            f"{where} weights of 4 bits in format {format!r} are not implemented; {packing} is: save the model "
            "with its weights compressed"
        )
    if weights.get("dynamic"):
        raise CheckpointError(
            f"{where} weights with dynamic {weights['dynamic']!r} are not implemented; static ones are"
        )
    if inputs and inputs.get("type") not in ("int", "float"):
        raise CheckpointError(
            f"{where} has weights of 4 bits and input_activations of type {inputs.get('type')!r}; 'int' and 'float' "
            "are known: quantize the model again"
        )
    return replace(linear, input_rounding=input_rounding(inputs))


def _int(weights: JsonObject, where: str, format: object) -> LinearScheme:
    strategy = weights.get("strategy")
    group = weights.get("group_size")
    if weights.get("type", "int") != "int":
        raise CheckpointError(
            f"{where} weights of num_bits 4, type {weights.get('type')!r} are not implemented; 'int' and 'float' are"
        )
    if strategy == "channel":
        group = None
    elif strategy != "group":
        raise CheckpointError(
            f"{where} weights of 4 bits with strategy {strategy!r} are not implemented; 'group' and 'channel' are"
        )
    elif not is_integer(group) or group < 1:
        raise CheckpointError(f"{where} weights: group_size = {group!r} is not a number of inputs")
    packing = Packing.INT4
    if format == Packing.INT4_BYTES:
        packing = Packing.INT4_BYTES
    return LinearScheme.in_four_bits(
        packing,
        group,
        zeros=weights.get("symmetric", True) is False,
        # with 'weight', also called 'static', the groups are of consecutive inputs
        ordered=weights.get("actorder") in (True, "group", "dynamic"),
    )


def _float(weights: JsonObject, where: str) -> LinearScheme:
    """Return NVFP4 or MXFP4, told apart by the size of a group, as compressed-tensors does."""
    group = weights.get("group_size")
    packings = {16: Packing.NVFP4, 32: Packing.MXFP4}
    if group not in tuple(packings):  # it may be a list
        raise CheckpointError(
            f"{where} weights of num_bits 4, type 'float' in groups of {group!r} are not implemented; 16 (NVFP4) and "
            "32 (MXFP4) are"
        )
    if weights.get("symmetric", True) is False:
        raise CheckpointError(
            f"{where} weights of type 'float' with symmetric False are not implemented"
        )
    return LinearScheme.in_four_bits(packings[group], group)
