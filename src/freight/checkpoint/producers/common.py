"""Helpers of several producers' readers: FP8 checks, and the KV cache's scheme. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freight.base.fields import JsonObject
from freight.errors import CheckpointError, choices
from freight.fp8.formats import Format
from freight.fp8.scheme import Activations, Scheme

# The format that every producer stores; the device that loads it decides about E4M3FNUZ
E4M3 = Format.E4M3FN
# Why a scale or a zero point of inputs is not used
UNROUNDED = "of inputs in 4 bits: activations stay in 16 bits beside weights in 4 bits"
_OF_OTHER_KV = "of a KV cache in another format"
OF_INPUTS = "of inputs: beside weights in 4 bits they are not rounded as config.json declares"


def mapping(value: Any, what: str) -> JsonObject:
    """Return `value` as an object, {} for null. Raises CheckpointError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {what} = {value!r} is not a JSON object")
    return value


def part(declared: JsonObject, key: str) -> JsonObject:
    """Return the object under `key`, as `mapping`."""
    return mapping(declared.get(key), key)


def require_fp8(spec: JsonObject, what: str) -> None:
    """Raise CheckpointError unless QuantizationArgs say 8 bits, float, symmetric."""
    _require_type(spec, "float", "FP8", what)


def require_int8(spec: JsonObject, what: str) -> None:
    """Raise CheckpointError unless QuantizationArgs say 8 bits, int, symmetric."""
    _require_type(spec, "int", "INT8", what)


def _require_type(spec: JsonObject, kind: str, name: str, what: str) -> None:
    if spec.get("num_bits") != 8 or spec.get("type") != kind:
        raise CheckpointError(
            f"{what} of num_bits {spec.get('num_bits')!r}, type {spec.get('type')!r} is not implemented; {name} "
            f"(num_bits 8, type {kind!r}) is"
        )
    if spec.get("symmetric", True) is False:
        raise CheckpointError(
            f"{what} with symmetric False is not implemented; symmetric quantization is"
        )


def require_blocks_for_groups(kind: str, where: str) -> None:
    """Raise CheckpointError if activations are scaled per group. Call it for weights without block
    scales.
    """
    if kind in ("group", "per_group", "block", "per_block", "PerGroup", "PerBlock"):
        raise CheckpointError(
            f"{where} of {kind} with weights that are not in blocks are not implemented"
        )


def input_rounding(inputs: JsonObject) -> str:
    """Return how QuantizationArgs round inputs, for messages: 'INT8 per token'; '' for {}."""
    if not inputs:
        return ""
    kind = {"int": "INT", "float": "FP"}.get(str(inputs.get("type")), f"{inputs.get('type')} ")
    group = inputs.get("group_size")
    shared = f"per {inputs.get('strategy') or 'tensor'}"
    if group:
        shared = f"per {group} inputs"
    if inputs.get("dynamic") in (False, None):
        shared += ", static"
    return f"{kind}{inputs.get('num_bits')} {shared}"


def activations(word: str | None, what: str) -> Activations:
    """Return the `Activations` that `word` declares, null for none. Raises CheckpointError for
    another word.
    """
    known = {None: Activations.PLAIN, "dynamic": Activations.DYNAMIC, "static": Activations.STATIC}
    if word not in tuple(known):  # it may be a list
        raise CheckpointError(
            f"{what} {word!r} is not implemented; {choices(('static', 'dynamic', 'null'))} are"
        )
    return known[word]


def block_size(value: Any, what: str) -> tuple[int, int]:
    """Return [rows, columns] of a list, or of '128x128' as in older files. Raises CheckpointError
    for anything else.
    """
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = [int(size) for size in sizes]
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise CheckpointError(f"{what} = {value!r} is not a block size [rows, columns]")
    return rows, columns


def _kv_format(kv: JsonObject) -> str:
    """Return what QuantizationArgs say of a cache, NVFP4 by its name."""
    numbers = f"num_bits {kv.get('num_bits')!r}, type {kv.get('type')!r}"
    name = ""
    if (kv.get("num_bits"), kv.get("type")) == (4, "float"):
        name = "NVFP4: "
    return f"{name}kv_cache_scheme of {numbers}"


def refuse_kv(scheme: Scheme, declared: str) -> Scheme:
    """Return `scheme` with a KV cache, `declared`, that nothing here computes with. Scales of groups
    have a factor of their own, which no other cache has.
    """
    unused = tuple((f"*.{side}_global_scale", _OF_OTHER_KV) for side in "kvq")
    return replace(scheme, kv_refused=declared, unused=(*scheme.unused, *unused))


def with_kv_scheme(declared: JsonObject, scheme: Scheme) -> Scheme:
    """Return `scheme` with the declared `kv_cache_scheme`.

    That is the word 'static' (AutoFP8, Quark) or QuantizationArgs (compressed-tensors, ModelOpt).
    A cache in another format than FP8 is `Scheme.kv_refused`: the weights can be used with a cache
    that the user names.
    """
    kv = declared.get("kv_cache_scheme")
    if kv is None:
        return scheme
    dynamic = False
    if isinstance(kv, Mapping):
        if (kv.get("num_bits"), kv.get("type")) != (8, "float"):
            return refuse_kv(scheme, _kv_format(kv))
        require_fp8(kv, "kv_cache_scheme")
        dynamic = bool(kv.get("dynamic"))
        strategy = kv.get("strategy")
        if strategy not in (None, "tensor", "attn_head"):
            raise CheckpointError(
                f"kv_cache_scheme with strategy {strategy!r} is not implemented; 'tensor' and 'attn_head' are"
            )
    elif kv != "static":
        raise CheckpointError(f"kv_cache_scheme = {kv!r} is not implemented; 'static' is")
    return replace(scheme, kv_format=E4M3, kv_static=not dynamic)
