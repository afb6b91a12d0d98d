"""Weights in 4 bits as compressed-tensors declares them: INT4, NVFP4 and MXFP4. Imports no torch."""

from __future__ import annotations

from freight.base.fields import JsonObject, is_integer
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

    Raises CheckpointError for what is not implemented.
    """
    linear = _float(weights, where) if weights.get("type") == "float" else _int(weights, where)
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
    if inputs and (packing is Packing.INT4 or inputs.get("num_bits") != 4):
        raise CheckpointError(
            f"{where} has weights of 4 bits and input_activations of num_bits {inputs.get('num_bits')!r}, type "
            f"{inputs.get('type')!r}, which is not implemented; weights alone are (W4A16)"
        )
    return linear


def _int(weights: JsonObject, where: str) -> LinearScheme:
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
    return LinearScheme.in_four_bits(
        Packing.INT4,
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
