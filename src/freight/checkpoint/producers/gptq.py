"""GPTQ's and AWQ's files: INT4 with scales and zero points of groups. Imports no torch.

These tools leave router, head and whatever they do not list in 16 bits, so tensors show which
modules are in 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from freight.base.fields import JsonObject, is_integer
from freight.checkpoint.producers import patterns
from freight.checkpoint.producers.common import E4M3, part
from freight.errors import CheckpointError, choices
from freight.fp8.scheme import LinearScheme, Packing, Rule, Scheme

_FORMATS = {None: Packing.GPTQ, "gptq": Packing.GPTQ, "gptq_v2": Packing.GPTQ_V2}


def read_gptq(declared: JsonObject) -> Scheme:
    """Read the declaration of AutoGPTQ and GPTQModel. Raises CheckpointError for what is not
    implemented.
    """
    group = _group_size(declared, "gptq", "bits", "group_size")
    format = declared.get("checkpoint_format") or declared.get("format")
    if format not in tuple(_FORMATS) or declared.get("is_marlin_format"):  # it may be a list
        raise CheckpointError(
            f"gptq with checkpoint_format {format!r} is not implemented; gptq and gptq_v2 are: save the model in one "
            "of them"
        )
    linear = LinearScheme.in_four_bits(
        _FORMATS[format],
        group,
        zeros=declared.get("sym", True) is False,
        ordered=bool(declared.get("desc_act")),
        or_plain=True,
    )
    return Scheme("gptq", E4M3, rules=(*_left_out(declared), Rule(patterns.every(), linear)))


def _left_out(declared: JsonObject) -> list[Rule]:
    """Return rules of the modules that GPTQModel's `dynamic` leaves out. Raises CheckpointError for
    modules with settings of their own. Published files also name modules that have the settings of
    all, as `"lm_head": {}`; whether these are quantized their tensors say.
    """
    listed = list[tuple[str, None]]()
    for name, settings in part(declared, "dynamic").items():
        if name.startswith("-:"):
            listed.append((f"re:{name.removeprefix('-:')}", None))
        elif not _is_as_all(settings, declared):
            raise CheckpointError(
                f"gptq with dynamic[{name!r}] = {settings!r} is not implemented: modules have one size of groups, "
                "4 bits; quantize all of them alike, or leave some out ('-:' before the expression)"
            )
    return list(patterns.joined(listed, patterns.exact, "dynamic"))


def _is_as_all(settings: object, declared: JsonObject) -> bool:
    """Return whether settings of some modules are those of the file."""
    if isinstance(settings, Mapping):
        return {**declared, **settings} == declared
    return settings is True or settings is None


def read_awq(declared: JsonObject) -> Scheme:
    """Read the declaration of AutoAWQ. Raises CheckpointError for what is not implemented.

    `zero_point` does not count: this version of the form has zero points always. AutoRound writes
    false where all are 8.
    """
    # AutoAWQ's own names of the keys, then transformers'
    bits = "w_bit" if "w_bit" in declared else "bits"
    size = "q_group_size" if "q_group_size" in declared else "group_size"
    group = _group_size(declared, "awq", bits, size)
    # GPTQModel's name of the key is the second
    version = declared.get("version", declared.get("checkpoint_format", "gemm"))
    if str(version).lower() != "gemm":
        raise CheckpointError(
            f"awq with version {version!r} is not implemented; gemm is: quantize the model with it"
        )
    linear = LinearScheme.in_four_bits(Packing.AWQ, group, zeros=True, or_plain=True)
    rules = patterns.all_but(declared, "modules_to_not_convert", patterns.contained, linear)
    return Scheme("awq", E4M3, rules=rules)


def _group_size(declared: JsonObject, method: str, bits_key: str, key: str) -> int | None:
    """Return the inputs of a group, None for all. Raises CheckpointError for other than 4 bits, and
    for rotations of values at run time.
    """
    if declared.get("rotation"):
        raise CheckpointError(
            f"{method} with rotation {declared['rotation']!r} is not implemented: inputs of down_proj would have to be "
            "rotated before every product; quantize the model without it"
        )
    bits = declared.get(bits_key)
    group = declared.get(key, -1)
    if bits != 4 or isinstance(bits, bool):
        raise CheckpointError(
            f"{method} with {bits_key} {bits!r} is not implemented; {choices(('4',))} is: use the model in 4 bits, "
            "FP8 or 16 bits"
        )
    if group == -1:
        return None
    if not is_integer(group) or group < 1:
        raise CheckpointError(f"{method} with {key} {group!r} is not a number of inputs, or -1")
    return int(group)
